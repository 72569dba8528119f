"""Requests that have only so much time: to be begun, and to be done."""

from __future__ import annotations

import random

import pytest

from engine_core.policy import deadlines
from engine_core.policy.admission import new_request
from engine_core.policy.deadlines import Deadlines
from engine_core.request import Request
from engine_core.stage_timer import EngineClock
from protocol.arrays import Int32
from protocol.errors import ErrorInfo
from protocol.grammar import Lark
from protocol.messages import Account, Generate, Output, Refused
from tests.support.engines import CLIENT, Bench, a_card, answer


def error_of(output: Output) -> ErrorInfo:
    assert output.finish == "error"
    assert output.error is not None
    return output.error


def a_busy_bench() -> Bench:
    """One slot, and it is taken for a long time."""
    bench = Bench(max_slots=1)
    bench.tick(100.0)
    bench.add([1, 2, 3], max_tokens=150, ignore_eos=True)
    bench.step()
    return bench


def test_who_is_not_begun_in_time_is_told_so_and_is_never_computed() -> None:
    bench = a_busy_bench()
    number = bench.add([5] * 20, queue_timeout_s=2.0)
    assert isinstance(number, int)
    bench.tick(101.9)
    assert bench.news[CLIENT, number] == []
    bench.tick(102.0)
    error = error_of(bench.end(number))
    assert (error.code, error.param) == ("queue_timeout", "queue_timeout_s")
    assert "not started within 2 s" in error.message
    assert error.retry_after_s is not None
    bench.run()
    assert sum(len(plan.bind) for plan in bench.plans) == 1
    assert bench.engine.stats().num_timeouts == {"queued": 1}


def test_who_has_been_begun_has_all_the_time_it_wants() -> None:
    bench = Bench()
    bench.tick(100.0)
    number = bench.add([5] * 4, queue_timeout_s=2.0, max_tokens=9, ignore_eos=True)
    assert isinstance(number, int)
    bench.step()
    bench.tick(200.0)
    bench.run()
    assert bench.end(number).finish == "length"
    assert bench.engine._deadlines.next_at == float("inf")


def test_who_was_preempted_is_not_refused_for_waiting() -> None:
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
    assert [bench.end(n).finish for n in numbers if isinstance(n, int)] == ["length"] * 2


def test_an_answer_that_is_not_done_in_time_ends_with_what_there_is() -> None:
    bench = Bench()
    bench.tick(100.0)
    number = bench.add([5] * 4, timeout_s=3.0, max_tokens=50, ignore_eos=True)
    assert isinstance(number, int)
    for _ in range(5):
        bench.step()
    bench.plan()
    bench.tick(103.0)
    error = error_of(bench.end(number))
    assert (error.code, error.param) == ("timeout", "timeout_s")
    assert "within 3 s" in error.message
    assert "5 tokens were generated" in error.message
    assert bench.tokens(number) == answer([5] * 4, 5)
    bench.run()
    stats = bench.engine.stats()
    assert stats.free_blocks == stats.total_blocks
    assert stats.num_timeouts == {"running": 1}


def test_time_is_over_in_the_queue_too_and_nothing_was_computed() -> None:
    bench = a_busy_bench()
    number = bench.add([5] * 20, timeout_s=2.0)
    assert isinstance(number, int)
    bench.tick(103.0)
    error = error_of(bench.end(number))
    assert (error.code, error.param) == ("queue_timeout", "timeout_s")


def test_a_grammar_that_is_compiled_too_late_is_no_answer() -> None:
    bench = Bench()
    bench.tick(100.0)
    number = bench.add([5, 6], grammar=Lark(text='start: "a"'), queue_timeout_s=1.0)
    assert isinstance(number, int)
    bench.tick(101.0)
    assert error_of(bench.end(number)).code == "queue_timeout"
    assert bench.compile() == {}
    assert bench.engine.is_idle


def test_who_cannot_be_begun_in_time_is_refused_at_once() -> None:
    bench = a_busy_bench()
    bench.engine._throughput.admitted.observe(50, 5.0)
    waiting = bench.add([5] * 50)
    assert isinstance(waiting, int)
    refused = bench.add([5] * 4, queue_timeout_s=4.0)
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.error.param) == ("queue_timeout", "queue_timeout_s")
    assert "about 5 s" in refused.error.message
    assert refused.error.retry_after_s == 3.0  # about half of it
    assert isinstance(bench.add([5] * 4, queue_timeout_s=6.0), int)
    assert isinstance(bench.add([5] * 4, timeout_s=4.0), Refused)
    assert isinstance(bench.add([5] * 4, queue_timeout_s=4.0, priority=-1000), int), "it goes first"
    bob = Account(name="bob")
    assert isinstance(bench.add([5] * 4, queue_timeout_s=4.0, account=bob), int), "so does he"


def test_without_a_measured_rate_nobody_is_refused_for_it() -> None:
    bench = Bench(max_slots=1)
    bench.tick(100.0)
    for _ in range(3):
        assert isinstance(bench.add([5] * 50, queue_timeout_s=0.001), int)


def test_how_fast_the_queue_moves_is_measured_while_somebody_waits() -> None:
    bench = Bench(max_slots=1, prefix_cache=False)
    assert bench.engine._throughput.queue_per_s == 0.0
    for _ in range(100):
        bench.add([5] * 10, max_tokens=2, ignore_eos=True)
    bench.run()
    # A request of 10 tokens takes two steps of 10 ms.
    assert bench.engine._throughput.queue_per_s == pytest.approx(500, rel=0.1)


def watched(order: int, start_deadline: float, deadline: float) -> Request:
    message = Generate(request=order, prompt=Int32.of([1]))
    request = new_request(
        CLIENT, message, [1], order, lambda: 0, a_card(), Bench().limits, EngineClock()
    )
    request.start_deadline, request.deadline = start_deadline, deadline
    return request


def test_deadlines_come_in_their_order_whoever_leaves_meanwhile() -> None:
    rng = random.Random(1)
    book, left = Deadlines(), {}
    for order in range(300):
        request = watched(order, rng.uniform(0, 100), rng.uniform(0, 100))
        book.add(request)
        book.add(request)
        left[request] = min(request.start_deadline, request.deadline)
    for request in rng.sample(list(left), 100):
        book.remove(request)
        del left[request]
    told: list[Request] = []
    for now in range(0, 101, 5):
        late = book.pop_late(now)
        assert all(left[request] <= now for request in late)
        told += late
        assert book.next_at > now
    assert sorted(told, key=lambda r: r.order) == sorted(left, key=lambda r: r.order)


def test_a_request_that_has_ended_is_not_kept_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "SLACK", 10)
    book = Deadlines()
    for order in range(1000):
        request = watched(order, float("inf"), 600.0)
        book.add(request)
        book.remove(request)
    assert len(book) <= 11
