"""Requests that encode: steps, order, refusals and ends in the engine."""

from __future__ import annotations

import pytest

from engine_core.encode.scheduler import MAX_STARTED
from protocol.engine.encoding import MAX_INPUTS, MAX_RESULT_NUMBERS, EncodeInputs, EncodingCard
from protocol.engine.messages import Account, Output, Refused
from protocol.wire.arrays import Int32
from protocol.worker.steps import EncodePlan, StepPlan
from tests.support.engines import FAILING_SUM, MAX_INPUT, Bench, a_card, echo_vector
from tests.support.storm import EncodeStorm


def test_a_request_gets_the_results_of_its_inputs_in_their_order() -> None:
    bench = Bench(token_budget=16)
    number = bench.encode([1] * 9, [2] * 3, [3] * 12, splits=[9, 1, 12])
    bench.run()
    assert bench.last_output(number).finish == "stop"
    assert bench.vectors(number) == [
        echo_vector([1] * 9, 9),
        echo_vector([2] * 3, 1),
        echo_vector([3] * 12, 12),
    ]
    usage = bench.usage(number)
    assert (usage.prompt_tokens, usage.generated_tokens) == (24, 0)


def test_inputs_of_several_requests_share_a_step_under_the_token_budget() -> None:
    bench = Bench(token_budget=16)
    for size in (5, 6, 4, 7):
        bench.encode([1] * size)
    assert bench.step() == {0: 5, 1: 6, 2: 4}
    assert bench.step() == {0: 7}
    assert bench.step() is None


def test_an_input_longer_than_the_budget_is_a_step_by_itself() -> None:
    bench = Bench(token_budget=16)
    bench.encode([1] * 40)
    bench.encode([2] * 3)
    assert bench.step() == {0: 40}
    assert bench.step() == {0: 3}


def test_a_short_request_does_not_wait_for_all_inputs_of_a_long_one() -> None:
    bench = Bench(token_budget=10)
    long = bench.encode(*[[1] * 10] * 20)
    bench.step()
    short = bench.encode([2] * 4)
    bench.step()
    bench.step()
    assert bench.last_output(short).finish == "stop"
    assert not bench.outputs[b"client", long]
    bench.run()
    assert len(bench.vectors(long)) == 20


def test_steps_that_encode_take_turns_with_steps_that_generate() -> None:
    bench = Bench(token_budget=8)
    bench.add([1] * 4, max_tokens=10, ignore_eos=True)
    bench.encode(*[[2] * 8] * 4)
    kinds = []
    for _ in range(6):
        plan = bench.plan()
        kinds.append(type(plan))
        bench.finish()
    assert kinds == [EncodePlan, StepPlan] * 3


def crowd(bench: Bench) -> Account:
    """Let an account decode in `bench`. Return another account, which has sent a request too."""
    bench.add([1] * 4, max_tokens=100, ignore_eos=True, account=Account(name="alice"))
    return Account(name="bob")


LINEAR_COSTS = ((1, 0.001), (256, 0.256))
"""Step costs for which the share of prompts is 16 tokens while accounts share the engine."""


def kinds(bench: Bench, num_steps: int) -> list[int]:
    """Run some steps. Return the number of tokens of each that encodes, and 0 for each other."""
    found = []
    for _ in range(num_steps):
        plan = bench.plan()
        found.append(plan.inputs.tokens.shape[0] if isinstance(plan, EncodePlan) else 0)
        bench.finish()
    return found


def test_encoding_takes_its_share_of_a_step_while_another_account_decodes() -> None:
    bench = Bench(token_budget=256, step_costs=LINEAR_COSTS)
    bob = crowd(bench)
    bench.encode(*[[2] * 4] * 100, account=bob)
    assert kinds(bench, 8) == [16, 0] * 4


def test_an_input_above_the_share_is_followed_by_more_steps_that_generate() -> None:
    bench = Bench(token_budget=256, step_costs=LINEAR_COSTS)
    bob = crowd(bench)
    bench.encode(*[[2] * 40] * 3, account=bob)
    assert kinds(bench, 8) == [40, 0, 0, 0] * 2


def test_encoding_takes_whole_steps_if_one_account_sends_everything() -> None:
    bench = Bench(token_budget=256, step_costs=LINEAR_COSTS)
    crowd(bench)
    bench.encode(*[[2] * 4] * 128, account=Account(name="alice"))
    assert kinds(bench, 4) == [256, 0] * 2


def test_encoding_takes_whole_steps_if_nothing_generates() -> None:
    bench = Bench(token_budget=256, step_costs=LINEAR_COSTS)
    for name in ("alice", "bob"):
        bench.encode(*[[2] * 4] * 64, account=Account(name=name))
    assert kinds(bench, 2) == [256] * 2


def test_two_steps_can_be_in_flight() -> None:
    bench = Bench(token_budget=8, steps_in_flight=2)
    number = bench.encode([1] * 8, [2] * 8, [3] * 8)
    assert isinstance(bench.plan(), EncodePlan)
    assert isinstance(bench.plan(), EncodePlan)
    assert bench.plan() is None
    bench.run()
    assert len(bench.vectors(number)) == 3


def test_the_account_that_was_served_least_goes_first() -> None:
    bench = Bench(token_budget=8)
    for _ in range(3):
        bench.encode([1] * 8, account=Account(name="alice"))
    bob = bench.encode([2] * 8, account=Account(name="bob"))
    bench.step()
    bench.step()
    assert bench.last_output(bob).finish == "stop"


def test_an_aborted_request_ends_once_and_its_results_in_flight_are_dropped() -> None:
    bench = Bench(token_budget=8)
    number = bench.encode([1] * 8, [2] * 8)
    bench.plan()
    bench.abort(number)
    assert bench.last_output(number).finish == "abort"
    assert bench.engine.pop_freed() == {b"client": [number]}
    bench.finish()
    assert bench.step() is None
    assert len(bench.outputs[b"client", number]) == 1
    assert bench.engine.is_idle


def test_a_result_that_is_not_finite_fails_only_its_own_request() -> None:
    bench = Bench()
    bad, good = bench.encode([FAILING_SUM], [1] * 3), bench.encode([2] * 3)
    bench.run()
    error = bench.last_output(bad).error
    assert error is not None
    assert error.code == "step_failed"
    assert bench.vectors(good) == [echo_vector([2] * 3, 3)]


def test_a_lost_client_takes_its_requests_with_it() -> None:
    bench = Bench(token_budget=8)
    bench.encode([1] * 8, [2] * 8)
    bench.plan()
    bench.engine.on_client_lost(b"client")
    bench.check()
    bench.finish()
    assert bench.engine.is_idle


def test_a_request_that_is_not_started_in_time_ends_with_an_error() -> None:
    bench = Bench(token_budget=8)
    first = bench.encode([1] * 8, timeout_s=5.0)
    late = bench.encode([2] * 8, queue_timeout_s=1.0)
    bench.plan()
    bench.tick(2.0)
    assert bench.last_output(late).error.code == "queue_timeout"
    bench.tick(6.0)
    assert bench.last_output(first).error.code == "timeout"
    assert "0 inputs were encoded" in bench.last_output(first).error.message


def test_a_large_request_does_not_wait_for_all_large_requests_of_another_account() -> None:
    bench = Bench(token_budget=10)
    alice, bob = Account(name="alice"), Account(name="bob")
    for _ in range(MAX_STARTED):
        bench.encode(*[[1] * 10] * 30, account=alice)
    while len(bench.engine.encoding.started) < MAX_STARTED:
        bench.step()
    bobs = bench.encode(*[[2] * 10] * 3, account=bob)
    for _ in range(6):  # steps that start requests take turns with steps that continue them
        bench.step()
    assert bench.last_output(bobs).finish == "stop"


def refused(bench: Bench, *inputs: list[int], **more: object) -> Refused:
    reply = bench.try_encode(*inputs, **more)  # type: ignore[arg-type]
    assert isinstance(reply, Refused)
    return reply


def test_an_input_that_is_too_long_is_refused_by_its_number() -> None:
    error = refused(Bench(), [1], [1] * (MAX_INPUT + 1)).error
    assert error.code == "context_length_exceeded"
    assert error.param == "input[1]"
    assert error.message == (
        "This model's maximum context length is 40 tokens. However, input[1] is too long: "
        "41 tokens > 40 maximum"
    )


def test_a_key_can_lower_the_limit_of_an_input() -> None:
    error = refused(Bench(), [1] * 9, account=Account(name="a", max_len=8)).error
    assert (
        "length is 8 tokens with this key. However, input[0] is too long: 9 tokens" in error.message
    )


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4,097 inputs; a request can have at most 4,096"):
        Bench().try_encode(*[[1]] * (MAX_INPUTS + 1))


def test_inputs_with_too_many_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = EncodingCard(task="embed", max_tokens=MAX_INPUT, size=MAX_RESULT_NUMBERS // 5)
    monkeypatch.setattr("tests.support.engines.a_card", lambda **_: a_card(encoding=encoding))
    error = refused(Bench(), *[[1]] * 6).error
    assert error.message == "input: 6 inputs; a request can have at most 5"


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    assert refused(Bench(), [1, 97]).error.param == "input[1]"


@pytest.mark.parametrize("splits", [[1], [1, 1, 1], [-1, 1], [1, 3]])
def test_splits_that_do_not_fit_the_inputs_are_refused(splits: list[int]) -> None:
    with pytest.raises(ValueError, match="splits"):
        EncodeInputs(tokens=Int32.of([5] * 4), lengths=Int32.of([2, 2]), splits=Int32.of(splits))


def test_a_full_queue_returns_when_to_try_again() -> None:
    bench = Bench(token_budget=8, max_waiting=2)
    bench.encode([1] * 8)
    bench.encode([1] * 8)
    error = refused(bench, [1] * 8).error
    assert error.code == "overloaded"
    assert error.retry_after_s == 1.0
    bench.run()
    bench.encode([1] * 8)


def test_a_full_queue_of_one_kind_refuses_no_request_of_the_other() -> None:
    bench = Bench(max_waiting=2)
    for _ in range(2):
        bench.encode([1] * 4)
    for _ in range(2):
        bench.add([1] * 4, max_tokens=1)
    assert isinstance(bench.try_add([1] * 4, max_tokens=1), Refused)
    assert refused(bench, [1] * 4).error.code == "overloaded"


def test_a_missed_deadline_returns_when_the_queue_of_its_kind_will_be_shorter() -> None:
    bench = Bench(token_budget=8)
    bench.encode([1] * 8)
    bench.plan()
    bench.finish(4.0)  # 2 tokens per second
    for _ in range(10):
        bench.encode([1] * 8)
    late = bench.encode([1] * 8, queue_timeout_s=45.0)
    bench.plan()
    bench.tick(50.0)
    assert bench.last_output(late).error.retry_after_s == 20.0


def test_a_moved_request_is_not_refused_because_of_load() -> None:
    bench = Bench(token_budget=8, max_waiting=1)
    bench.encode([1] * 8)
    bench.encode([1] * 8, is_moved=True)


def test_an_accounts_tokens_are_counted() -> None:
    bench = Bench()
    account = Account(name="alice", tokens_per_minute=10)
    bench.encode([1] * 12, account=account)
    assert refused(bench, [1], account=account).error.code == "rate_limit_exceeded"


def test_a_draining_engine_finishes_what_it_has_accepted() -> None:
    bench = Bench()
    number = bench.encode([1] * 8)
    bench.engine.drain()
    assert refused(bench, [1]).error.code == "draining"
    bench.run()
    assert bench.last_output(number).finish == "stop"


def test_a_model_that_does_not_encode_refuses_such_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.support.engines.a_card", lambda **_: a_card(encoding=None))
    assert refused(Bench(), [1]).error.message == "echo has no embeddings and no scores"


def test_a_model_that_only_encodes_refuses_to_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.engines.a_card", lambda **_: a_card(generates=False))
    assert Bench().refusal([1]).error.message == "echo does not generate text"


def test_a_result_of_another_step_is_an_error() -> None:
    bench = Bench()
    bench.encode([1])
    plan = bench.plan()
    assert isinstance(plan, EncodePlan)
    result = bench.worker.encode(plan)
    with pytest.raises(RuntimeError, match="not the oldest"):
        bench.engine.commit_encoded(
            type(result)(step=9, vectors=result.vectors, failed=result.failed), 0.1
        )


@pytest.mark.parametrize("seed", range(12))
def test_requests_of_both_kinds_get_their_answers(seed: int) -> None:
    storm = EncodeStorm(seed)
    for number in range(400):
        storm.bench.engine.tick(number / 8)
        storm.operate()
    storm.finish_all()
    storm.check()
    ends = [storm.bench.outputs[key] for key in storm.encoded]
    assert any(isinstance(end[0], Output) and end[0].finish == "stop" for end in ends if end)
