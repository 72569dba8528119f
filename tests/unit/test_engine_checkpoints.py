"""Models with a recurrent state: where the engine saves checkpoints of it, and what requests reuse.

The echo worker checks that each row starts with the state of the positions before it, and that each
checkpoint that a request starts with is that of its tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from engine_core.startup import build_engine
from engine_core.workers.process import WorkerLost
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import KVGroups
from protocol.process.exit_codes import ExitCode
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepPlan, WorkerReady
from tests.support.engines import Bench, a_card, guess_with_accuracy

SIZE = 4
"""Tokens of a block."""
GROUPS = KVGroups(window=8, window_blocks=2)


def a_bench(**options: Any) -> Bench:
    fields = {"num_checkpoints": 64, "block_tokens": SIZE, "state_interval": 16, "max_len": 400}
    return Bench(state_bytes=8, **(fields | {"num_blocks": 201} | options))


def a_text(number: int, length: int) -> list[int]:
    return [(number * 31 + at * at * 7 + at) % 90 + 1 for at in range(length)]


def saved(bench: Bench) -> list[int]:
    """Return the position of each save of all plans, in order."""
    return [
        position
        for plan in bench.plans
        if plan.save_lens is not None
        for position in plan.save_lens.tolist()
    ]


def num_found(bench: Bench, prompt: list[int], max_tokens: int = 1, **options: Any) -> int:
    """Run a request, and return how many tokens of its prompt were found."""
    number = bench.add(prompt, max_tokens=max_tokens, ignore_eos=True, **options)
    bench.run()
    return bench.usage(number).cached_tokens


def counts(bench: Bench) -> tuple[int, int]:
    """Return the numbers of held and cached checkpoints."""
    stats = bench.engine.stats()
    return stats.held_checkpoints, stats.cached_checkpoints


# ---- the end of a prompt
@pytest.mark.parametrize(
    ("length", "end", "positions"),
    [(3, 0, []), (4, 0, [4]), (5, 4, [4]), (11, 8, [8]), (12, 8, [8, 12]), (13, 12, [12])],
)
def test_the_same_prompt_is_found_to_the_last_block_before_its_last_token(
    length: int, end: int, positions: list[int]
) -> None:
    """A state after the whole prompt is saved, too: the next turn of a conversation finds it."""
    bench, prompt = a_bench(), a_text(1, length)
    assert num_found(bench, prompt) == 0
    assert saved(bench) == positions
    assert num_found(bench, prompt) == end
    assert num_found(bench, [*prompt, 1]) == max(positions, default=0)


def test_a_state_that_another_request_has_cached_meanwhile_is_not_saved_again() -> None:
    """The second request is admitted when 20 tokens are cached, and the step that saves the states
    after 32 and 40 tokens is in flight. The last one is cached when it could save it."""
    bench, prompt = a_bench(token_budget=20, steps_in_flight=2), a_text(1, 41)
    for _ in range(2):
        bench.add(prompt, max_tokens=1)
    bench.run()
    assert saved(bench) == [16, 32, 40, 20, 32]


def test_a_prompt_is_not_found_from_another_namespace() -> None:
    bench, prompt = a_bench(), a_text(1, 21)
    assert num_found(bench, prompt, namespace="a") == 0
    assert num_found(bench, prompt, namespace="b") == 0
    assert num_found(bench, prompt, namespace="a") == 20


def test_a_prompt_is_found_while_the_request_that_computed_it_still_runs() -> None:
    bench, prompt = a_bench(), a_text(1, 21)
    bench.add(prompt, max_tokens=30, ignore_eos=True)
    bench.step()
    number = bench.add(prompt, max_tokens=1)
    bench.run()
    assert bench.usage(number).cached_tokens == 20


def test_two_equal_prompts_in_one_step_leave_one_checkpoint() -> None:
    bench, prompt = a_bench(), a_text(1, 11)
    for _ in range(2):
        bench.add(prompt, max_tokens=1)
    bench.run()
    assert saved(bench) == [8, 8]
    assert counts(bench) == (0, 1)


# ---- long prompts
@pytest.mark.parametrize(
    ("num_checkpoints", "positions"),
    [
        (64, [16, 32, 48, 64, 80, 96]),
        (48, [16, 32, 48, 64, 80, 96]),
        (47, [32, 64, 96]),
        (8, [64, 96]),
    ],
)
def test_a_long_prompt_has_checkpoints_at_even_distances_but_not_too_many(
    num_checkpoints: int, positions: list[int]
) -> None:
    bench = a_bench(num_checkpoints=num_checkpoints, token_budget=40)
    num_found(bench, a_text(1, 99))
    assert saved(bench) == positions
    assert num_found(bench, a_text(1, 70) + a_text(2, 20)) == max(p for p in positions if p <= 70)


# ---- branches
def test_the_third_prompt_with_a_common_beginning_finds_all_of_it() -> None:
    bench, beginning = a_bench(), a_text(1, 26)
    found = [num_found(bench, beginning + a_text(number, 13)) for number in (2, 3, 4)]
    assert found == [0, 16, 24]
    assert bench.engine.stats().num_uncovered_tokens == 8


@pytest.mark.parametrize(("num_blocks", "groups"), [(31, None), (58, GROUPS)])
def test_a_beginning_stays_cached_although_the_first_prompt_with_it_is_evicted(
    num_blocks: int, groups: KVGroups | None
) -> None:
    """The second prompt computes the blocks of the beginning again, into blocks of its own. Those
    replace the first prompt's, which no checkpoint followed and which are evicted first."""
    bench = a_bench(
        num_blocks=num_blocks,
        kv_groups=groups,
        state_interval=400,
        max_len=120,
        token_budget=16,
    )
    beginning = a_text(1, 26)
    for number in (2, 3):
        num_found(bench, beginning + a_text(number, 13))
    assert num_found(bench, a_text(4, 60)) == 0
    assert num_found(bench, beginning + a_text(5, 13)) == 24


# ---- what is reported
def test_the_bytes_of_states_in_use_are_those_of_slots_and_checkpoints() -> None:
    bench = a_bench(max_slots=3, num_checkpoints=8)
    stats = bench.engine.stats()
    assert stats.state_bytes == {"slots": 0, "checkpoints": 0}
    assert stats.reserved_state_bytes == 8 * (3 + 8)
    bench.add(a_text(1, 11), max_tokens=30, ignore_eos=True)
    bench.step()
    held, cached = counts(bench)
    assert held + cached == 1
    assert bench.engine.stats().state_bytes == {"slots": 8, "checkpoints": 8}
    bench.run()
    assert bench.engine.stats().state_bytes == {"slots": 0, "checkpoints": 8 * counts(bench)[1]}


def test_lost_checkpoints_are_counted_by_what_was_lacking() -> None:
    few_checkpoints = a_bench(num_checkpoints=2, state_interval=400)
    for number in range(4):
        num_found(few_checkpoints, a_text(number, 11))
    assert few_checkpoints.engine.stats().num_evicted_checkpoints == {"checkpoints": 2, "blocks": 0}
    few_blocks = a_bench(num_blocks=8, state_interval=400, max_len=16)
    for number in range(4):
        num_found(few_blocks, a_text(number, 15))
    stats = few_blocks.engine.stats()
    assert stats.num_evicted_checkpoints["checkpoints"] == 0
    assert stats.num_evicted_checkpoints["blocks"] == 4 - stats.cached_checkpoints > 0


def test_a_model_without_recurrent_layers_reports_no_states() -> None:
    stats = Bench().engine.stats()
    assert (stats.state_bytes, stats.num_evicted_checkpoints) == ({}, {})
    assert stats.reserved_state_bytes == 0


# ---- beside windows and a draft model
@pytest.mark.parametrize("window", [{"kv_window": 8}, {"kv_groups": GROUPS}])
def test_a_prompt_is_found_beside_layers_with_a_window(window: dict[str, Any]) -> None:
    bench, prompt = a_bench(**window), a_text(1, 61)
    assert [num_found(bench, prompt) for _ in range(2)] == [0, 60]
    number = bench.add(prompt, max_tokens=50, ignore_eos=True)
    bench.run()
    history = prompt + bench.tokens(number)
    assert num_found(bench, [*history, 1]) == 108


def test_the_third_prompt_finds_a_common_beginning_beside_layers_with_a_window() -> None:
    bench, beginning = a_bench(kv_groups=GROUPS, token_budget=16), a_text(1, 26)
    found = [num_found(bench, beginning + a_text(number, 13)) for number in (2, 3, 4)]
    assert found == [0, 16, 24]


def test_the_next_turn_is_found_although_the_draft_model_is_behind() -> None:
    """The drafts are wrong, so they are no longer requested, and the draft model computes the
    answer only now and then."""
    wrong = guess_with_accuracy(0.0)
    bench, prompt = a_bench(speculation="model", guess=wrong), a_text(1, 6)
    number = bench.add(prompt, max_tokens=31, ignore_eos=True)
    bench.run()
    assert num_found(bench, prompt + bench.tokens(number) + [1]) == 36


# ---- answers
def test_the_next_turn_finds_the_prompt_and_the_answer() -> None:
    bench, prompt = a_bench(), a_text(1, 6)
    number = bench.add(prompt, max_tokens=20, ignore_eos=True)
    bench.run()
    assert saved(bench) == [4, 8, 12, 16, 20, 24]
    history = prompt + bench.tokens(number)
    assert num_found(bench, history + a_text(2, 10)) == 24


def test_the_next_turn_is_found_although_another_request_had_cached_the_prompt() -> None:
    """Two requests compute one prompt in one step, and the blocks of the first are cached. They are
    evicted before the second one ends, which then publishes its own."""
    bench, prompt = a_bench(num_blocks=31), a_text(1, 21)
    bench.add(prompt, max_tokens=3, ignore_eos=True)
    number = bench.add(prompt, max_tokens=60, ignore_eos=True)
    bench.step()
    for other in range(2, 8):
        bench.add(a_text(other, 30), max_tokens=1)
        bench.step()
    bench.run()
    assert num_found(bench, prompt + bench.tokens(number) + [1]) == 80


def test_a_request_holds_only_the_newest_checkpoint_of_its_answer() -> None:
    bench = a_bench(num_checkpoints=8, state_interval=400)
    bench.add(a_text(1, 6), max_tokens=60, ignore_eos=True)
    most = 0
    while bench.step() is not None:
        most = max(most, bench.engine.stats().held_checkpoints)
    assert saved(bench) == list(range(4, 65, 4))
    assert most <= 2, "the newest confirmed one, and that of a step in flight"
    assert counts(bench) == (0, 2)


def test_a_long_answer_also_has_a_checkpoint_at_a_multiple_of_the_interval() -> None:
    bench = a_bench()
    bench.add(a_text(1, 6), max_tokens=58, ignore_eos=True)
    bench.run()
    assert counts(bench) == (0, 3), "after 4 tokens of the prompt, after 48 and after 60"


def test_an_answer_moves_its_only_checkpoint_if_no_other_can_be_allocated() -> None:
    bench, prompt = a_bench(num_checkpoints=2), a_text(1, 3)
    num_found(bench, a_text(2, 6))
    number = bench.add(prompt, max_tokens=30, ignore_eos=True)
    bench.run()
    assert saved(bench) == [4, *range(4, 33, 4)]
    assert counts(bench) == (0, 2)
    assert num_found(bench, prompt + bench.tokens(number) + [1]) == 32


def test_answers_leave_some_checkpoints_to_prompts() -> None:
    """Eight answers could hold all of the eight checkpoints. They evict none once they hold half of
    them."""
    bench = a_bench(num_checkpoints=8, max_slots=8)
    shared = a_text(1, 21)
    assert num_found(bench, shared) == 0
    for number in range(2, 10):
        bench.add(a_text(number, 3), max_tokens=30, ignore_eos=True)
    bench.run()
    assert num_found(bench, shared) == 20


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_preempted_request_computes_at_most_one_block_again(steps_in_flight: int) -> None:
    """The older request gets one block, which the younger one had not filled, and ends in it."""
    bench = a_bench(num_blocks=21, steps_in_flight=steps_in_flight)
    bench.add(a_text(1, 12), max_tokens=32, ignore_eos=True)
    younger = bench.add(a_text(2, 8), max_tokens=38, ignore_eos=True)
    bench.run()
    assert bench.usage(younger).preemptions == 1
    resumed = [init for plan in bench.plans for init in plan.bind][2]
    assert resumed.checkpoint
    assert len(resumed.tokens) - resumed.num_computed <= SIZE


# ---- steps that are not confirmed
def test_a_checkpoint_after_a_wrong_draft_is_freed_and_saved_again() -> None:
    bench = a_bench(speculation="model", guess=guess_with_accuracy(0.0), max_drafts=4)
    bench.add(a_text(1, 6), max_tokens=30, ignore_eos=True)
    bench.run()
    positions = saved(bench)
    assert len(positions) > len(set(positions)), "no draft was in the way"
    assert sorted(set(positions)) == list(range(4, 36, 4))
    assert counts(bench) == (0, 2)


def test_a_state_after_a_draft_does_not_replace_the_only_checkpoint() -> None:
    bench = a_bench(
        num_checkpoints=1, speculation="model", guess=guess_with_accuracy(0.0), max_drafts=4
    )
    bench.add(a_text(1, 3), max_tokens=30, ignore_eos=True)
    bench.run()
    assert saved(bench) == [*range(4, 33, 4)]


def test_a_request_that_is_aborted_in_flight_leaves_no_checkpoint_of_that_step() -> None:
    bench = a_bench()
    number = bench.add(a_text(1, 11), max_tokens=9)
    bench.plan()
    assert counts(bench) == (1, 0)
    bench.abort(number)
    assert counts(bench) == (1, 0), "the worker may still write to it"
    bench.finish()
    assert counts(bench) == (0, 0)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_step_that_an_abort_discards_leaves_the_older_checkpoint(steps_in_flight: int) -> None:
    bench, prompt = a_bench(steps_in_flight=steps_in_flight, state_interval=400), a_text(1, 6)
    number = bench.add(prompt, max_tokens=40, ignore_eos=True)
    while 20 not in saved(bench):
        if bench.plan() is None:
            bench.finish()
    bench.abort(number)
    bench.run()
    assert counts(bench) == (0, 2)
    assert num_found(bench, prompt + bench.tokens(number) + a_text(2, 9)) == 16


def test_a_failed_row_leaves_no_checkpoint() -> None:
    bench, prompt = a_bench(), a_text(1, 11)
    bench.add(prompt, max_tokens=9)
    plan = bench.plan()
    assert isinstance(plan, StepPlan)
    failed = replace(bench.worker.execute(plan), tokens=Int32.of([0]), failed=Int32.of([0]))
    bench.commit(failed)
    assert counts(bench) == (0, 0)
    assert num_found(bench, prompt) == 0


# ---- eviction
def test_the_checkpoints_used_longest_ago_are_evicted_first() -> None:
    bench = a_bench(num_checkpoints=3)
    prompts = [a_text(number, 11) for number in range(4)]
    assert [num_found(bench, prompt) for prompt in prompts[:3]] == [0, 0, 0]
    assert num_found(bench, prompts[0]) == 8
    assert num_found(bench, prompts[3]) == 0
    assert [num_found(bench, prompts[number]) for number in (0, 2, 3)] == [8, 8, 8]
    assert num_found(bench, prompts[1]) == 0


def test_blocks_that_no_checkpoint_follows_are_evicted_before_older_ones() -> None:
    """The only checkpoint is that of the first prompt. The blocks of the first answer make room for
    the second one."""
    bench = a_bench(num_blocks=31, num_checkpoints=1)
    prompt = a_text(1, 30)
    num_found(bench, prompt)
    for number in (2, 3):
        bench.add(a_text(number, 3), max_tokens=62, ignore_eos=True)
        bench.run()
    assert saved(bench) == [28]
    assert num_found(bench, prompt) == 28


# ---- what does not carry states
READY = WorkerReady(
    model=a_card(),
    max_len=512,
    max_slots=8,
    token_budget=256,
    block_tokens=16,
    num_blocks=50,
    state_bytes=1000,
    num_checkpoints=20,
)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"worker": WorkerConfig(model="", kv_host_gib=1)}, "--kv-host-gib"),
        ({"worker": WorkerConfig(model="", kv_disk="/kv")}, "--kv-disk"),
        ({"worker": WorkerConfig(model="", kv_export=True)}, "--split, --role and --kv-address"),
        ({"role": "prefill", "prefix_cache": False}, "--split, --role and --kv-address"),
    ],
)
def test_options_that_move_kv_are_refused_without_checkpoints_for_the_states(
    options: dict[str, Any], named: str
) -> None:
    config = EngineConfig(**({"worker": WorkerConfig(model="")} | options))
    with pytest.raises(WorkerLost, match=f"serve it without {named}") as refused:
        build_engine(replace(READY, num_checkpoints=0), config, epoch="e")
    assert refused.value.exit_code == ExitCode.USAGE
    lack = "no memory is left" if config.prefix_cache else "--no-prefix-cache is set"
    assert f"there are none because {lack}" in str(refused.value)


def test_an_engine_with_tiers_refuses_a_model_with_a_state_and_no_checkpoints() -> None:
    with pytest.raises(ValueError, match="need checkpoints of the model's recurrent states"):
        a_bench(tiers=["host"], prefix_cache=False)


def test_a_model_with_a_state_and_no_checkpoints_shares_no_prefixes() -> None:
    config = EngineConfig(worker=WorkerConfig(model=""))
    assert build_engine(READY, config, epoch="e").limits.prefix_cache
    ready = replace(READY, num_checkpoints=0)
    assert not build_engine(ready, config, epoch="e").limits.prefix_cache


def test_the_distance_of_checkpoints_is_a_multiple_of_the_block_size() -> None:
    with pytest.raises(ValueError, match=r"state_interval \(24\).*block_tokens \(16\)"):
        EngineConfig(worker=WorkerConfig(model=""), state_interval=24)
