"""Models with a recurrent state: a handle carries the blocks of a prompt and the state after them.

The echo worker checks that each row starts with the state of the positions before it, and that each
checkpoint that a request starts with is that of its tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.requests.request import RequestPhase
from protocol.worker.kv import KVExport, KVFetch
from tests.support.engines import Bench, answer, guess_with_accuracy
from tests.support.pair import PROMPT, HandoffPair

SIZE = 4
"""Tokens of a block. PROMPT has 30 tokens, so the last boundary before its last token is 28."""
STATE: dict[str, Any] = {
    "state_bytes": 8,
    "num_checkpoints": 8,
    "block_tokens": SIZE,
    "state_interval": 400,
}


def a_pair(p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> HandoffPair:
    return HandoffPair(STATE | (p or {}), STATE | (d or {}))


def reused_tokens(bench: Bench, number: int) -> tuple[int, int]:
    """Return the (cached, fetched) tokens in the usage of the last output."""
    usage = bench.usage(number)
    return usage.cached_tokens, usage.fetched_tokens


def num_computed(bench: Bench) -> int:
    return bench.engine.stats().num_computed_tokens


def num_held(bench: Bench) -> int:
    return bench.engine.stats().held_checkpoints


def is_free(pair: HandoffPair) -> bool:
    pair.p.tick(1000)  # leases that no reader has taken expire
    return pair.is_free() and num_held(pair.p) == num_held(pair.d) == 0


def exported(pair: HandoffPair) -> list[KVExport]:
    return [each for each in pair.movers[0].commands if isinstance(each, KVExport)]


def fetched(pair: HandoffPair) -> list[KVFetch]:
    return [each for each in pair.movers[1].commands if isinstance(each, KVFetch)]


# ---- the normal course
def test_each_token_is_computed_once_and_the_answer_is_that_of_one_engine() -> None:
    pair = a_pair()
    number = pair.decode(pair.prefill(), max_tokens=9)
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)
    assert (num_computed(pair.p), num_computed(pair.d)) == (28, 2 + 8)
    assert reused_tokens(pair.d, number) == (28, 28)
    assert pair.p.engine.stats().num_leases_ended == {"taken": 1}
    assert is_free(pair)


@pytest.mark.parametrize("length", range(2, 20))
def test_a_handle_covers_the_whole_blocks_before_the_last_token(length: int) -> None:
    pair, prompt = a_pair(), PROMPT[:length]
    handle, end = pair.prefill(prompt), (length - 1) // SIZE * SIZE
    assert bool(handle) == bool(end), "there is no state within the first block"
    number = pair.decode(handle, prompt, max_tokens=5)
    pair.run()
    assert pair.d.tokens(number) == answer(prompt, 5)
    assert reused_tokens(pair.d, number) == (end, end)
    assert is_free(pair)


@pytest.mark.parametrize(("prefilled", "decoded", "end"), [(12, 30, 8), (18, 17, 16), (18, 16, 0)])
def test_a_state_is_fetched_only_if_a_token_of_the_prompt_follows_it(
    prefilled: int, decoded: int, end: int
) -> None:
    """The state after 16 tokens cannot give the logits of the sixteenth."""
    pair, prompt = a_pair(), PROMPT[:decoded]
    number = pair.decode(pair.prefill(PROMPT[:prefilled]), prompt, max_tokens=5)
    pair.run()
    assert pair.d.tokens(number) == answer(prompt, 5)
    assert reused_tokens(pair.d, number) == (end, end)


def test_the_fetched_state_is_found_by_the_next_prompt() -> None:
    pair = a_pair()
    pair.decode(pair.prefill(), max_tokens=1)
    pair.run()
    number = pair.d.add(PROMPT, max_tokens=4)
    pair.d.run()
    assert pair.d.tokens(number) == answer(PROMPT, 4)
    assert pair.d.usage(number).cached_tokens == 28


def test_only_what_follows_the_cached_prefix_is_fetched() -> None:
    pair = a_pair()
    pair.d.add(PROMPT[:10], max_tokens=1)
    pair.d.run()
    number = pair.decode(pair.prefill(), max_tokens=4)
    (fetch,) = fetched(pair)
    assert (len(fetch.blocks), fetch.source.first) == (5, 2)  # type: ignore[union-attr]
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 4)
    assert reused_tokens(pair.d, number) == (28, 20)


def test_several_readers_each_fetch_the_state_and_the_last_one_frees_it() -> None:
    pair = a_pair()
    prompts = [[*PROMPT[:28], seed] for seed in range(3)]
    handle = pair.prefill([*PROMPT[:28], 0], readers=3)
    numbers = [pair.d.add(prompt, kv_handle=handle, max_tokens=3) for prompt in prompts]
    pair.d.plan()
    for left in (1, 1, 0):
        pair.move()
        assert num_held(pair.p) == left
    pair.run()
    for prompt, number in zip(prompts, numbers, strict=True):
        assert pair.d.tokens(number) == answer(prompt, 3)


def test_a_draft_model_computes_a_fetched_prompt() -> None:
    options = {"speculation": "model", "guess": guess_with_accuracy(0.7)}
    pair = a_pair(d=options)
    number = pair.decode(pair.prefill(), max_tokens=40, ignore_eos=True)
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 40, ignore_eos=True)
    assert pair.d.engine.stats().num_accepted_tokens > 5
    assert is_free(pair)


# ---- P
def test_a_lease_holds_the_checkpoint_that_it_exports() -> None:
    """Other prompts save so many states that all other checkpoints are evicted."""
    pair = a_pair(p={"num_checkpoints": 3, "role": "both", "num_blocks": 200})
    handle = pair.prefill()
    (export,) = exported(pair)
    for first in range(31, 90, 10):
        pair.p.add(list(range(first, first + 9)), max_tokens=1)
        pair.p.run()
    pool = pair.p.engine.scheduler.pool.cache.checkpoints
    assert pool is not None
    assert pool.holders == {export.checkpoint: 1}
    number = pair.decode(handle, max_tokens=9)
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)
    assert is_free(pair)


def test_a_lease_holds_its_checkpoint_although_another_one_of_the_state_is_cached() -> None:
    pair = a_pair(p={"role": "both"})
    for _ in range(2):
        pair.p.add(PROMPT, kv_readers=1)
    pair.p.run()
    first, second = exported(pair)
    assert first.checkpoint != second.checkpoint
    assert num_held(pair.p) == 2
    pair.p.tick(31)
    assert num_held(pair.p) == 0


def test_the_same_prompt_is_handed_over_twice() -> None:
    pair = a_pair(p={"role": "both"})
    handles = [pair.prefill() for _ in range(2)]
    numbers = [pair.decode(handle, max_tokens=3) for handle in handles]
    pair.run()
    assert [pair.d.tokens(number) for number in numbers] == [answer(PROMPT, 3)] * 2


def test_a_prompt_waits_for_a_checkpoint_until_the_first_term_of_a_lease_is_over() -> None:
    """As for blocks, leases yield after their first term, even if they were renewed."""
    pair = a_pair(p={"num_checkpoints": 2})
    handles = [pair.prefill(), pair.prefill(list(range(40, 60)))]
    number = pair.p.add(list(range(60, 80)), kv_readers=1)
    assert pair.p.plan() is None
    pair.p.tick(20)
    pair.p.engine.keep_kv(handles)
    pair.p.tick(29)
    assert pair.p.plan() is None
    pair.p.tick(31)
    pair.p.run()
    assert pair.p.last_output(number).kv_handle
    assert pair.p.engine.stats().num_leases_ended == {"yielded": 1}
    for handle, prompt in ((handles[1], list(range(40, 60))), (handles[0], PROMPT)):
        number = pair.decode(handle, prompt, max_tokens=9)
        pair.run()
        assert pair.d.tokens(number) == answer(prompt, 9)
    assert is_free(pair)


def test_prompts_that_are_computed_together_each_have_a_checkpoint_for_their_end() -> None:
    """Two checkpoints are enough for two of four prompts: the others wait until they are taken."""
    pair = a_pair(p={"num_checkpoints": 2, "token_budget": 8})
    prompts = [list(range(first, first + 20)) for first in (1, 21, 41, 61)]
    for prompt in prompts:
        pair.p.add(prompt, kv_readers=1)
    numbers = []
    for turn in range(2):
        pair.p.run()
        ready = [pair.p.last_output(2 * turn + place).kv_handle for place in (1, 2)]
        for handle, prompt in zip(ready, prompts[2 * turn :], strict=False):
            numbers.append(pair.decode(handle, prompt, max_tokens=5))
            while pair.d.step() is not None or pair.movers[1].jobs:
                if pair.movers[1].jobs:
                    pair.move()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert pair.d.tokens(number) == answer(prompt, 5)
        assert reused_tokens(pair.d, number) == (16, 16)
    assert is_free(pair)


def test_a_preempted_prefill_reserves_its_checkpoint_again() -> None:
    pair = a_pair(p={"role": "both", "num_blocks": 20, "token_budget": 8})
    older = pair.p.add([90] * 8, priority=-1, max_tokens=60, ignore_eos=True)
    for _ in range(3):
        pair.p.step()
    number = pair.p.add(PROMPT, kv_readers=1)
    pair.p.run()
    assert len(pair.p.tokens(older)) == 60
    decoded = pair.decode(pair.p.last_output(number).kv_handle, max_tokens=5)
    pair.run()
    assert pair.d.tokens(decoded) == answer(PROMPT, 5)
    assert is_free(pair)


def test_an_aborted_prefill_frees_its_checkpoint_after_the_step() -> None:
    pair = a_pair()
    number = pair.p.add(PROMPT, kv_readers=1)
    pair.p.plan()
    pair.p.abort(number)
    assert num_held(pair.p) == 1, "the worker may still write to it"
    pair.p.run()
    assert is_free(pair)


@pytest.mark.parametrize("event", ["expired", "released", "yielded"])
def test_each_end_of_a_lease_frees_its_checkpoint(event: str) -> None:
    pair = a_pair(p={"num_blocks": 13, "role": "both"})
    handle = pair.prefill()
    assert num_held(pair.p) == 1
    match event:
        case "expired":
            pair.p.tick(31)
        case "released":
            pair.p.engine.release_kv([handle])
        case _:
            pair.p.add(list(range(90, 50, -1)), max_tokens=4, ignore_eos=True)
            pair.p.run()
    assert pair.p.engine.stats().num_leases_ended == {event: 1}
    assert num_held(pair.p) == 0


# ---- engines that are lost
def test_another_engine_continues_from_the_same_handle() -> None:
    """The first one is lost while it fetches."""
    pair = a_pair()
    handle = pair.prefill()
    pair.decode(handle, max_tokens=9)
    pair.d = Bench(place=pair.air.member("another"), role="decode", **STATE)
    number = pair.decode(handle, max_tokens=9)
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)
    assert reused_tokens(pair.d, number) == (28, 28)
    assert is_free(pair)


def test_another_engine_continues_an_answer_without_its_state() -> None:
    """The state was lost with the first one, so the prompt and the tokens so far are computed."""
    whole = answer(PROMPT, 20, ignore_eos=True)
    other = Bench(**STATE)
    number = other.add(PROMPT, answer=whole[:7], max_tokens=20, ignore_eos=True)
    other.run()
    assert other.tokens(number) == whole[7:]
    assert num_computed(other) == len(PROMPT) + 19


# ---- D
def test_a_failed_fetch_continues_from_the_cached_prefix() -> None:
    """While the fetch is under way, other requests evict all checkpoints that nothing holds."""
    pair = a_pair(d={"num_checkpoints": 3, "num_blocks": 200})
    pair.d.add(PROMPT[:10], max_tokens=1)
    pair.d.run()
    number = pair.decode(pair.prefill(), max_tokens=9)
    for first in range(31, 90, 10):
        pair.d.add(list(range(first, first + 9)), max_tokens=1)
        pair.d.run()
    assert num_held(pair.d) == 2
    pair.move("damaged")
    assert num_held(pair.d) == 1
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)
    assert reused_tokens(pair.d, number)[0] == 8
    assert is_free(pair)


def test_a_fetched_state_is_kept_until_the_first_step_of_its_request() -> None:
    """Other requests run until the fetched one has a slot in a step, and evict checkpoints."""
    pair = a_pair(d={"num_checkpoints": 2, "token_budget": 8, "num_blocks": 200})
    number = pair.decode(pair.prefill(), max_tokens=9)
    pair.move()
    (request,) = pair.d.engine.scheduler.unbound
    assert request.phase is RequestPhase.READY
    for first in range(31, 90, 10):
        pair.d.add(list(range(first, first + 9)), max_tokens=1, priority=-1)
        pair.d.step()
    pair.run()
    assert pair.d.tokens(number) == answer(PROMPT, 9)


def test_without_a_checkpoint_for_the_state_a_prompt_is_computed() -> None:
    pair = a_pair(d={"num_checkpoints": 1})
    first = pair.decode(pair.prefill(), max_tokens=9)
    other = list(range(40, 60))
    second = pair.decode(pair.prefill(other), other, max_tokens=9)
    assert len(fetched(pair)) == 1
    pair.run()
    assert pair.d.tokens(first) == answer(PROMPT, 9)
    assert pair.d.tokens(second) == answer(other, 9)
    assert reused_tokens(pair.d, second) == (0, 0)
    assert is_free(pair)


@pytest.mark.parametrize("is_moved", [False, True])
def test_an_abort_during_a_fetch_frees_the_checkpoints_after_the_report(*, is_moved: bool) -> None:
    pair = a_pair()
    pair.d.add(PROMPT[:10], max_tokens=1)
    pair.d.run()
    number = pair.decode(pair.prefill(), max_tokens=9)
    if is_moved:
        pair.move()
    pair.d.abort(number)
    assert num_held(pair.d) == (0 if is_moved else 2)
    pair.d.send_kv_commands()
    if not is_moved:
        pair.move()
    assert is_free(pair)


def test_a_checkpoint_that_a_step_reads_is_not_filled_by_a_fetch_of_the_same_step() -> None:
    """The command of the fetch is sent before the plan."""
    pair = a_pair(d={"num_checkpoints": 1})
    pair.d.add(PROMPT[:10], max_tokens=1)
    pair.d.run()
    other = list(range(40, 60))
    handle = pair.prefill(other)
    first = pair.d.add(PROMPT[:10], max_tokens=3)
    second = pair.d.add(other, kv_handle=handle, max_tokens=3)
    plan = pair.d.plan()
    assert plan is not None
    assert plan.bind[0].checkpoint == 1  # type: ignore[union-attr]
    assert not fetched(pair)
    pair.run()
    assert pair.d.tokens(first) == answer(PROMPT[:10], 3)
    assert pair.d.tokens(second) == answer(other, 3)
