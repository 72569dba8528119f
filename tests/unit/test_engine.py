"""Specification of the engine: scheduling, preemption, the prefix cache, and how requests end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine_core.status import status_rows
from protocol.engine.messages import Account, RequestStatus
from protocol.wire.arrays import Float32, Int32
from protocol.worker.steps import Logprobs, StepResult
from tests.support.engines import CLIENT, EOS, Bench, answer


def test_an_answer_has_the_models_tokens_and_ends_once() -> None:
    bench = Bench()
    number = bench.add([5, 6, 7], max_tokens=10, ignore_eos=True)
    bench.run()
    assert len(bench.tokens(number)) == 10
    assert bench.last_output(number).finish == "length"
    assert [output.finish for output in bench.outputs[CLIENT, number]].count(None) == 9


def test_a_stop_token_ends_the_answer_and_is_reported() -> None:
    bench = Bench()
    expected = answer([5, 6, 7], 190)
    assert expected[-1] == EOS, "choose another prompt: this one's answer has no end"
    number = bench.add([5, 6, 7])
    bench.run()
    assert bench.tokens(number) == expected
    assert (bench.last_output(number).finish, bench.last_output(number).stop_token) == ("stop", EOS)


def test_a_long_prompt_is_computed_in_chunks_while_others_keep_decoding() -> None:
    bench = Bench(token_budget=8, prefix_cache=False)
    bench.add([1] * 4, ignore_eos=True)
    assert bench.step() == {0: 4}
    bench.add([2] * 20, ignore_eos=True)
    assert bench.step() == {0: 1, 1: 7}
    assert bench.step() == {0: 1, 1: 7}
    assert bench.step() == {0: 1, 1: 6}
    assert bench.step() == {0: 1, 1: 1}


def test_an_older_long_prompt_does_not_stall_a_younger_stream() -> None:
    bench = Bench(token_budget=8, prefix_cache=False)
    bench.add([2] * 12, ignore_eos=True)
    bench.add([1] * 3, ignore_eos=True)
    assert bench.step() == {0: 8}
    assert bench.step() == {0: 4, 1: 3}
    bench.add([3] * 40, ignore_eos=True)
    assert bench.step() == {0: 1, 1: 1, 2: 6}
    assert bench.step() == {0: 1, 1: 1, 2: 6}


def test_an_abort_by_label_ends_every_request_with_the_label_and_no_other() -> None:
    bench = Bench()
    mine = bench.add([5, 6], labels=["a", "chat-a"], ignore_eos=True)
    theirs = bench.add([5, 6, 7], client=b"other", labels=["chat-a"], ignore_eos=True)
    kept = bench.add([8, 9], labels=["b"], max_tokens=9, ignore_eos=True)
    bench.step()
    assert bench.abort_by_label("chat-a", "a", "c") == {"chat-a": True, "a": True, "c": False}
    assert bench.last_output(mine).finish == bench.last_output(theirs, b"other").finish == "abort"
    assert bench.abort_by_label("chat-a", "a") == {"chat-a": False, "a": False}
    bench.run()
    assert bench.last_output(kept).finish == "length"
    assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks
    assert bench.abort_by_label("b") == {"b": False}


def test_an_abort_by_label_frees_requests_in_flight_and_waiting() -> None:
    bench = Bench(max_slots=1)
    running = bench.add([5, 6], labels=["x"], ignore_eos=True)
    waiting = bench.add([7, 8], labels=["x"], ignore_eos=True)
    bench.step()
    plan = bench.plan()
    assert plan is not None
    assert bench.abort_by_label("x") == {"x": True}
    bench.finish()
    assert [bench.last_output(number).finish for number in (running, waiting)] == ["abort", "abort"]
    assert len(bench.tokens(running)) == 1
    assert bench.engine.is_idle
    assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks


def test_an_equal_prompt_is_not_computed_again() -> None:
    bench = Bench()
    first = bench.add(list(range(1, 18)), max_tokens=1)
    bench.run()
    second = bench.add(list(range(1, 18)), max_tokens=1)
    assert bench.step() == {0: 1}
    assert bench.usage(second).cached_tokens == 16
    assert bench.usage(first).cached_tokens == 0
    assert bench.tokens(first) == bench.tokens(second)


def test_the_last_token_is_computed_even_when_everything_is_cached() -> None:
    bench = Bench()
    bench.add(list(range(1, 17)), max_tokens=1)
    bench.run()
    bench.add(list(range(1, 17)), max_tokens=1)
    assert bench.step() == {0: 4}


def test_no_block_is_found_in_another_namespace_or_without_the_cache() -> None:
    for prefix_cache, namespace in ((True, "other"), (False, "")):
        bench = Bench(prefix_cache=prefix_cache)
        bench.add([3] * 16, max_tokens=1)
        bench.run()
        number = bench.add([3] * 16, max_tokens=1, namespace=namespace)
        bench.run()
        assert bench.usage(number).cached_tokens == 0


def test_a_block_is_findable_only_after_its_step_has_committed() -> None:
    bench = Bench(max_slots=2, token_budget=16)
    bench.add([3] * 16, max_tokens=4, ignore_eos=True)
    bench.plan()
    assert len(bench.engine.scheduler.pool.cache) == 0
    bench.finish()
    assert len(bench.engine.scheduler.pool.cache) == 4


def test_every_fresh_block_is_zeroed_and_shared_ones_are_not() -> None:
    bench = Bench()
    bench.add([3] * 16, max_tokens=1)
    bench.run()
    bench.add([3] * 20, max_tokens=1)
    plan = bench.plan()
    assert len(plan.bind[0].blocks) == 5
    assert plan.zero_blocks.tolist() == plan.bind[0].blocks.tolist()[4:]
    bench.finish()


def test_the_youngest_request_is_preempted_and_loses_no_tokens() -> None:
    bench = Bench(num_blocks=11, max_slots=4, max_len=40)
    prompts = [[10 + i] * 8 for i in range(3)]
    numbers = [bench.add(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]
    bench.run()
    expected = [answer(prompt, 20, ignore_eos=True) for prompt in prompts]
    assert [bench.tokens(number) for number in numbers] == expected
    preemptions = [bench.usage(number).preemptions for number in numbers]
    assert preemptions[0] == 0
    assert preemptions[2] > 0


def test_a_preempted_request_resumes_before_younger_ones() -> None:
    bench = Bench(num_blocks=7, max_slots=4, max_len=24)
    first = bench.add([1] * 8, max_tokens=12, ignore_eos=True)
    second = bench.add([2] * 8, max_tokens=12, ignore_eos=True)
    while not bench.engine.stats().num_preemptions:
        bench.step()
    bench.add([3] * 8, max_tokens=1, ignore_eos=True)
    bench.run()
    bound = [init.tokens.tolist()[0] for plan in bench.plans for init in plan.bind]
    assert bound[:2] == [1, 2]
    assert bound.index(3) > bound.index(2, 2)
    assert bench.usage(first).preemptions == 0
    assert len(bench.tokens(second)) == 12


def test_lower_priority_numbers_go_first() -> None:
    bench = Bench(max_slots=1)
    bench.add([1], max_tokens=1)
    late = bench.add([2], max_tokens=1, priority=1)
    early = bench.add([3], max_tokens=1, priority=-1)
    ends = []
    while bench.step() is not None:
        ends += [n for n in (late, early) if n not in ends and has_ended(bench, n)]
    assert ends == [early, late]


def test_no_more_requests_run_than_the_budget_has_tokens() -> None:
    bench = Bench(token_budget=2, max_slots=8)
    for i in range(4):
        bench.add([i + 1], max_tokens=5, ignore_eos=True)
    assert bench.step() == {0: 1, 1: 1}
    assert bench.step() == {0: 1, 1: 1}


def test_an_abort_between_steps_frees_everything_at_once() -> None:
    bench = Bench()
    number = bench.add([1] * 10)
    bench.step()
    bench.abort(number)
    assert bench.last_output(number).finish == "abort"
    assert bench.engine.stats().free_blocks == 64
    assert bench.engine.is_idle


def test_an_abort_in_flight_keeps_the_blocks_until_the_step_has_committed() -> None:
    bench = Bench(num_blocks=11, max_slots=1)
    number = bench.add([1] * 10)
    bench.plan()
    bench.abort(number)
    assert bench.last_output(number).finish == "abort"
    assert bench.engine.stats().free_blocks == 7
    bench.finish()
    assert bench.engine.stats().free_blocks == 10
    other = bench.add([2] * 4, max_tokens=1)
    bench.run()
    assert bench.tokens(other) == answer([2] * 4, 1, ignore_eos=True)


def test_an_abort_of_a_request_that_is_not_open_is_ignored() -> None:
    bench = Bench()
    bench.abort(99)
    number = bench.add([1], max_tokens=1)
    bench.run()
    bench.abort(number)
    assert bench.last_output(number).finish == "length"


def test_a_lost_clients_requests_are_freed() -> None:
    bench = Bench()
    for _ in range(3):
        bench.add([1] * 10, client=b"gone")
    kept = bench.add([2] * 10, max_tokens=2, ignore_eos=True)
    bench.step()
    bench.engine.on_client_lost(b"gone")
    bench.run()
    assert bench.last_output(kept).finish == "length"
    assert bench.engine.stats().free_blocks == 64


def test_a_request_for_its_prompt_only_ends_without_a_token() -> None:
    bench = Bench(token_budget=8)
    number = bench.add([1] * 20, max_tokens=0)
    bench.run()
    assert (bench.tokens(number), bench.last_output(number).finish) == ([], "length")


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_prompt_logprobs_are_sent_once_with_the_first_output(max_tokens: int) -> None:
    """This also holds if the first output is the last one. The prompt is computed in chunks."""
    bench = Bench(token_budget=8)
    number = bench.add([1] * 20, max_tokens=max_tokens, prompt_logprobs=0, ignore_eos=True)
    while (plan := bench.plan()) is not None:
        result = bench.worker.execute(plan)
        start, count = plan.row_starts.tolist()[0], plan.row_tokens.tolist()[0]
        scored = max(min(start + count, 19) - start, 0)
        bench.commit(msgspec.structs.replace(result, prompt_logprobs=some_logprobs(scored)))
    counts = [len(output.prompt_logprobs) for output in bench.outputs[CLIENT, number]]
    assert counts == [19] + [0] * (len(counts) - 1)


def test_an_answer_ends_at_the_context_length() -> None:
    bench = Bench(max_len=12)
    number = bench.add([1] * 10, ignore_eos=True)
    bench.run()
    assert (len(bench.tokens(number)), bench.last_output(number).finish) == (2, "length")


def test_a_max_tokens_above_the_context_means_the_rest_of_the_context() -> None:
    bench = Bench(max_len=12)
    number = bench.add([1] * 10, ignore_eos=True, max_tokens=1 << 20)
    bench.run()
    assert (len(bench.tokens(number)), bench.last_output(number).finish) == (2, "length")
    error = bench.refusal([1] * 12, max_tokens=1 << 20).error
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("prompt", "params", "code", "param"),
    [
        ([1] * 200, {}, "context_length_exceeded", "prompt"),
        ([97], {}, "invalid_request", "prompt[0]"),
        ([3, -1], {}, "invalid_request", "prompt[1]"),
        ([1], {"stop_token_ids": [97]}, "invalid_request", "stop_token_ids[0]"),
        ([1], {"logit_bias": {500: 1.0}}, "invalid_request", "logit_bias.500"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_field(
    prompt: list[int], params: dict[str, Any], code: str, param: str
) -> None:
    error = Bench().refusal(prompt, **params).error
    assert (error.code, error.param) == (code, param)
    assert len(prompt) < 200 or "200 tokens" in error.message


def test_a_full_queue_returns_retry_after() -> None:
    bench = Bench(max_slots=1, max_waiting=2)
    bench.add([1])
    bench.step()
    for _ in range(2):
        bench.add([1])
    refused = bench.refusal([1])
    assert refused.error.code == "overloaded"
    assert (refused.error.retry_after_s or 0) >= 1


def test_the_queue_is_bounded_in_tokens_but_a_long_prompt_may_wait_alone() -> None:
    bench = Bench(max_waiting_tokens=50)
    bench.add([1] * 100)
    bench.refusal([1])


def test_a_draining_engine_finishes_open_requests_and_refuses_new_ones() -> None:
    bench = Bench()
    number = bench.add([1], max_tokens=3, ignore_eos=True)
    bench.engine.drain()
    assert bench.refusal([1]).error.code == "draining"
    bench.run()
    assert bench.last_output(number).finish == "length"
    assert bench.engine.is_idle


def test_a_row_with_non_finite_logits_fails_alone() -> None:
    bench = Bench()
    bad = bench.add([1] * 4, max_tokens=2, ignore_eos=True)
    good = bench.add([2] * 4, max_tokens=2, ignore_eos=True)
    plan = bench.plan()
    assert plan is not None
    result = bench.worker.execute(plan)
    failed = StepResult(step=result.step, tokens=result.tokens, failed=Int32.of([0]))
    bench.commit(failed)
    bench.run()
    error = bench.last_output(bad).error
    assert error.code == "step_failed"
    assert bench.last_output(good).finish == "length"


def test_a_result_of_another_step_is_refused() -> None:
    bench = Bench()
    bench.add([1])
    bench.plan()
    with pytest.raises(RuntimeError, match="step 7"):
        bench.engine.commit(StepResult(step=7, tokens=Int32.of([1]), failed=Int32.of([])), 0.0)


def test_a_request_without_a_seed_gets_one_and_keeps_it_through_preemption() -> None:
    seeds = iter(range(100, 200))
    bench = Bench(num_blocks=11, max_slots=4, max_len=40, draw_seed=lambda: next(seeds))
    for i in range(3):
        bench.add([10 + i] * 8, max_tokens=20, ignore_eos=True)
    bench.run()
    bound = [(init.tokens.tolist()[0], init.seed) for plan in bench.plans for init in plan.bind]
    assert len(bound) > 3
    assert set(bound) == {(10, 100), (11, 101), (12, 102)}


def has_ended(bench: Bench, number: int) -> bool:
    news = bench.outputs[CLIENT, number]
    return bool(news) and news[-1].finish is not None


def some_logprobs(count: int) -> Logprobs:
    """Return logprobs of `count` prompt tokens of row 0."""
    return Logprobs(
        rows=Int32.of([0] * count),
        counts=Int32.of([0] * count),
        ids=Int32.of([1] * count),
        logprobs=Float32.of([-0.5] * count),
        ranks=Int32.of([1] * count),
        top_ids=Int32.of([], (count, 0)),
        top_logprobs=Float32.of([], (count, 0)),
    )


def test_status_rows_show_each_open_request() -> None:
    bench = Bench(token_budget=64, max_slots=1, prefix_cache=False)
    account = Account(name="alice")
    bench.engine.tick(10.0)
    bench.add([5, 6, 7], labels=["chat-1"], account=account, max_tokens=9, ignore_eos=True)
    bench.add([5, 6], client=b"\x01other")
    bench.step()
    bench.engine.tick(12.0)
    bench.step()

    def rows(most: int) -> list[tuple[bytes, RequestStatus]]:
        return status_rows(bench.engine.open_requests, bench.engine.scheduler.lack, most)

    (mine, first), (theirs, second) = rows(10)
    assert (mine, theirs) == (CLIENT, b"\x01other")
    assert first == RequestStatus(
        name="chat-1",
        account="alice",
        stage="decode",
        age_s=2.0,
        decode_s=2.0,
        prompt_tokens=3,
        computed_tokens=4,
        generated_tokens=2,
        most_tokens=9,
        waits_for="step",
    )
    assert (second.name, second.stage) == ("016f74686572.2", "queued")
    assert second.waits_for == "slot"
    assert [row for _, row in rows(1)] == [first]
    assert rows(0) == rows(-1) == []
    assert len(rows(1 << 63)) == 2


def test_a_request_without_labels_is_aborted_by_the_name_in_its_status_row() -> None:
    bench = Bench()
    number = bench.add([5, 6], client=b"\x01\x02", ignore_eos=True)
    labelled = bench.add([5, 6], client=b"\x01\x02", labels=["x"], ignore_eos=True)
    assert bench.engine.names == ["0102.1", "x"]
    strange = ["0102.3", "0102.", ".1", "zz.1", "012.1", "0102.x", "0102.٣", "0102." + "9" * 5000]
    assert not any(bench.abort_by_label("0102.2", *strange).values()), (
        "a request with a label has no other name"
    )
    assert bench.abort_by_label("0102.1") == {"0102.1": True}
    assert bench.last_output(number, b"\x01\x02").finish == "abort"
    assert not bench.outputs[b"\x01\x02", labelled]
