"""Deadlines of requests, the times of their stages, and the report of freed resources."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from engine_core.admission.check_generate import new_request
from engine_core.policy import deadlines
from engine_core.policy.deadlines import Deadlines
from engine_core.requests.request import Request
from engine_core.requests.stage_timer import EngineClock
from protocol.engine.grammar import ChoiceGrammar, Lark
from protocol.engine.messages import Account, Generate, Output, Times
from protocol.wire.arrays import Int32
from protocol.wire.errors import ErrorInfo
from tests.support.engines import CLIENT, Bench, a_card, answer


def error_of(output: Output) -> ErrorInfo:
    assert output.finish == "error"
    assert output.error is not None
    return output.error


def a_busy_bench() -> Bench:
    """Return a bench whose only slot is taken for a long time."""
    bench = Bench(max_slots=1)
    bench.tick(100.0)
    bench.add([1, 2, 3], max_tokens=150, ignore_eos=True)
    bench.step()
    return bench


@pytest.mark.parametrize("field", ["queue_timeout_s", "timeout_s"])
def test_a_request_that_does_not_start_in_time_fails_and_is_never_computed(field: str) -> None:
    bench = a_busy_bench()
    number = bench.add([5] * 20, **{field: 2.0})
    bench.tick(101.9)
    assert bench.outputs[CLIENT, number] == []
    bench.tick(102.0)
    error = error_of(bench.last_output(number))
    assert (error.code, error.param) == ("queue_timeout", field)
    assert "not started within 2 s" in error.message
    assert error.retry_after_s is not None
    bench.run()
    assert sum(len(plan.bind) for plan in bench.plans) == 1
    assert bench.engine.stats().num_timeouts == {"queued": 1}


def test_a_started_request_has_no_queue_timeout() -> None:
    bench = Bench()
    bench.tick(100.0)
    number = bench.add([5] * 4, queue_timeout_s=2.0, max_tokens=9, ignore_eos=True)
    bench.step()
    bench.tick(200.0)
    bench.run()
    assert bench.last_output(number).finish == "length"
    assert bench.engine.deadlines.next_at == float("inf")


def test_a_preempted_request_has_no_queue_timeout() -> None:
    bench = Bench(num_blocks=9, block_tokens=4, max_len=32)
    bench.tick(100.0)
    numbers = [
        bench.add([7 + i] * 8, queue_timeout_s=1.0, max_tokens=20, ignore_eos=True)
        for i in range(2)
    ]
    while not bench.engine.stats().num_preemptions:
        bench.step()
    bench.tick(110.0)
    bench.run()
    assert [bench.last_output(n).finish for n in numbers] == ["length"] * 2


def test_an_answer_past_its_timeout_ends_with_the_tokens_so_far() -> None:
    bench = Bench()
    bench.tick(100.0)
    number = bench.add([5] * 4, timeout_s=3.0, max_tokens=50, ignore_eos=True)
    for _ in range(5):
        bench.step()
    bench.plan()
    bench.tick(103.0)
    error = error_of(bench.last_output(number))
    assert (error.code, error.param) == ("timeout", "timeout_s")
    assert "within 3 s" in error.message
    assert "5 tokens were generated" in error.message
    assert bench.tokens(number) == answer([5] * 4, 5)
    bench.run()
    stats = bench.engine.stats()
    assert stats.free_blocks == stats.total_blocks
    assert stats.num_timeouts == {"running": 1}


def test_a_request_whose_grammar_compiles_too_late_ends_with_queue_timeout() -> None:
    bench = Bench()
    bench.tick(100.0)
    number = bench.add([5, 6], grammar=Lark(text='start: "a"'), queue_timeout_s=1.0)
    bench.tick(101.0)
    assert error_of(bench.last_output(number)).code == "queue_timeout"
    assert bench.compile() == {}
    assert bench.engine.is_idle


def test_a_request_that_cannot_start_in_time_is_refused_at_once() -> None:
    bench = a_busy_bench()
    bench.engine.throughput.admitted.observe(50, 5.0)
    bench.add([5] * 50)
    refused = bench.refusal([5] * 4, queue_timeout_s=4.0)
    assert (refused.error.code, refused.error.param) == ("queue_timeout", "queue_timeout_s")
    assert "about 5 s" in refused.error.message
    assert refused.error.retry_after_s == 3.0  # about half of the 5 s
    bench.add([5] * 4, queue_timeout_s=6.0)
    bench.refusal([5] * 4, timeout_s=4.0)
    assert bench.add([5] * 4, queue_timeout_s=4.0, priority=-1000), (
        "a request with a higher priority goes first"
    )
    bob = Account(name="bob")
    assert bench.add([5] * 4, queue_timeout_s=4.0, account=bob), (
        "an account that was served less goes first"
    )


def test_without_a_measured_rate_no_request_is_refused_for_its_timeout() -> None:
    bench = Bench(max_slots=1)
    bench.tick(100.0)
    for _ in range(3):
        bench.add([5] * 50, queue_timeout_s=0.001)


def test_the_queue_rate_is_measured_while_requests_wait() -> None:
    bench = Bench(max_slots=1, prefix_cache=False)
    assert bench.engine.throughput.queue_per_s == 0.0
    for _ in range(100):
        bench.add([5] * 10, max_tokens=2, ignore_eos=True)
    bench.run()
    # A request of 10 tokens takes two steps of 10 ms.
    assert bench.engine.throughput.queue_per_s == pytest.approx(500, rel=0.1)


def request_with_deadlines(order: int, start_deadline: float, deadline: float) -> Request:
    message = Generate(request=order, prompt=Int32.of([1]))
    request = new_request(
        CLIENT, message, [1], order, lambda: 0, a_card(), Bench().limits, EngineClock()
    )
    request.start_deadline, request.deadline = start_deadline, deadline
    return request


def test_late_requests_are_found_in_order_after_others_were_removed() -> None:
    rng = random.Random(1)
    tracked, left = Deadlines(), {}
    for order in range(300):
        request = request_with_deadlines(order, rng.uniform(0, 100), rng.uniform(0, 100))
        tracked.add(request)
        tracked.add(request)
        left[request] = min(request.start_deadline, request.deadline)
    for request in rng.sample(list(left), 100):
        tracked.remove(request)
        del left[request]
    found: list[Request] = []
    for now in range(0, 101, 5):
        late = tracked.pop_late(now)
        assert all(left[request] <= now for request in late)
        found += late
        assert tracked.next_at > now
    assert sorted(found, key=lambda r: r.order) == sorted(left, key=lambda r: r.order)


def test_a_request_that_has_ended_is_not_kept_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "STALE_SLACK", 10)
    tracked = Deadlines()
    for order in range(1000):
        request = request_with_deadlines(order, float("inf"), 600.0)
        tracked.add(request)
        tracked.remove(request)
    assert len(tracked) <= 11


# ---- the times of a request's stages
class Timed:
    """A bench with a clock. Each step takes one second, and `wait` lets more time pass."""

    def __init__(self, **options: Any) -> None:
        self.bench = Bench(**options)
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.bench.tick(self.now)

    def step(self) -> None:
        """Plan a step now, and commit it a second later."""
        assert self.bench.plan() is not None
        self.wait(1)
        self.bench.finish()

    def run(self) -> None:
        while self.bench.engine.num_in_flight or self.bench.plan() is not None:
            self.wait(1)
            self.bench.finish()

    def times(self, number: int) -> Times:
        """Return the last reported stage times of a request."""
        usages = [output.usage for output in self.bench.outputs[CLIENT, number] if output.usage]
        assert usages[-1].times is not None
        return usages[-1].times


def total_s(times: Times) -> float:
    return sum(msgspec.structs.asdict(times).values())


def test_times_are_reported_by_stage() -> None:
    timed = Timed(token_budget=8)
    number = timed.bench.add([5] * 20, max_tokens=4, ignore_eos=True)
    timed.wait(3)
    timed.run()
    assert timed.times(number) == Times(queued_s=3, prefill_s=3, decode_s=3)


def test_times_are_sent_with_the_first_token_and_with_the_end() -> None:
    timed = Timed()
    number = timed.bench.add([5] * 6, max_tokens=3, ignore_eos=True)
    timed.run()
    reported = [
        output.usage and output.usage.times for output in timed.bench.outputs[CLIENT, number]
    ]
    assert reported == [Times(prefill_s=1), None, Times(prefill_s=1, decode_s=2)]


def test_an_answer_of_one_token_has_not_decoded() -> None:
    timed = Timed()
    number = timed.bench.add([5] * 6, max_tokens=1)
    timed.run()
    assert timed.times(number) == Times(prefill_s=1)


def test_grammar_time_is_separate_from_queue_time() -> None:
    timed = Timed()
    number = timed.bench.add([5] * 6, grammar=ChoiceGrammar(choices=["a"]), max_tokens=3)
    timed.wait(2)
    timed.bench.compile()
    timed.wait(5)
    timed.run()
    times = timed.times(number)
    assert (times.grammar_s, times.queued_s) == (2, 5)


def test_the_times_of_preempted_requests_add_up() -> None:
    timed = Timed(num_blocks=11, max_slots=4, max_len=40)
    numbers = [timed.bench.add([10 + i] * 8, max_tokens=20, ignore_eos=True) for i in range(3)]
    ended: dict[int, float] = {}
    while len(ended) < len(numbers):
        timed.step()
        for number in numbers:
            news = timed.bench.outputs[CLIENT, number]
            if news and news[-1].finish and number not in ended:
                ended[number] = timed.now
    for number, at in ended.items():
        assert total_s(timed.times(number)) == at
    assert any(timed.times(number).preempted_s for number in ended)
    assert all(timed.times(number).prefill_s == 1 for number in ended)


def test_an_aborted_waiting_request_is_reported_as_freed_at_once() -> None:
    bench = Bench(max_slots=1)
    _, second = bench.add([1] * 6), bench.add([2] * 6)
    bench.plan()
    bench.abort(second)
    assert bench.engine.pop_freed() == {CLIENT: [second]}


def test_an_aborted_request_in_flight_is_reported_as_freed_after_its_step() -> None:
    bench = Bench()
    number = bench.add([1] * 6, max_tokens=50, ignore_eos=True)
    bench.plan()
    bench.abort(number, number, 77)
    assert bench.engine.pop_freed() == {}
    bench.finish()
    assert bench.engine.pop_freed() == {CLIENT: [number]}
    assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks


def test_freed_resources_are_reported_only_after_an_abort() -> None:
    bench = Bench()
    bench.add([1] * 6, max_tokens=2, ignore_eos=True)
    bench.run()
    bench.add([1] * 6, max_tokens=50, client=b"other")
    bench.plan()
    bench.engine.on_client_lost(b"other")
    bench.finish()
    assert bench.engine.pop_freed() == {}
