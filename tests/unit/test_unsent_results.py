"""Results of encoding that wait in the engine until their client has read."""

from __future__ import annotations

import pytest

from engine_core.encode.scheduler import MAX_STARTED
from engine_core.invariants import check_encoding
from engine_core.requests.request import AccountUsage
from protocol.engine.encoding import MAX_STEP_INPUTS
from protocol.engine.messages import Account, Refused
from tests.support.engines import ECHO_SIZE, Bench

LATE, PROMPT = b"late", b"prompt"
RESULT_BYTES = 4 * ECHO_SIZE
"""Bytes of the result of one input."""


def late_bench(**config: object) -> tuple[Bench, int]:
    """Return an engine in which the result of a request of LATE waits, and that request."""
    bench = Bench(token_budget=8, **config)  # type: ignore[arg-type]
    bench.not_reading.add(LATE)
    number = bench.encode([1] * 8, client=LATE)
    bench.step()
    assert bench.outputs[LATE, number] == []
    return bench, number


def finish_of(bench: Bench, client: bytes, number: int) -> str | None:
    outputs = bench.outputs[client, number]
    return outputs[-1].finish if outputs else None


def test_a_client_gets_its_results_when_it_has_read() -> None:
    bench, number = late_bench()
    bench.read(LATE)
    assert finish_of(bench, LATE, number) == "stop"
    assert bench.engine.is_idle


def test_requests_of_a_client_that_must_read_are_not_started_and_others_are() -> None:
    bench, first = late_bench()
    held = bench.encode([1] * 8, client=LATE)
    other = bench.encode([1] * 8, client=PROMPT)
    bench.run()
    assert finish_of(bench, PROMPT, other) == "stop"
    assert bench.engine.stats().waiting == 1
    bench.read(LATE)
    bench.not_reading.clear()
    bench.run()
    assert [finish_of(bench, LATE, number) for number in (first, held)] == ["stop", "stop"]


def test_requests_that_waited_when_their_client_stopped_to_read_are_held() -> None:
    bench = Bench(token_budget=8)
    bench.not_reading.add(LATE)
    for _ in range(3):
        bench.encode([1] * 8, client=LATE)
    others = [bench.encode([1] * 8, client=PROMPT) for _ in range(2)]
    bench.run()
    assert [finish_of(bench, PROMPT, number) for number in others] == ["stop", "stop"]
    assert len(bench.engine.encoding.unsent) == 1
    assert bench.engine.stats().waiting == 2


def test_an_account_that_was_held_for_long_has_a_bounded_head_start() -> None:
    """Otherwise its requests would go before all others until it has caught up."""
    bench = Bench(token_budget=8)
    bench.not_reading.add(LATE)
    fair_share = bench.engine.scheduler.fair_share
    late = fair_share.get("late", lambda _: 1)
    for _ in range(3):
        bench.encode([1] * 8, client=LATE, account=Account(name="late"))
    bench.run()
    busy = AccountUsage("busy", late.served + 3 * fair_share.max_credit)
    fair_share.on_scheduled(busy)
    bench.read(LATE)
    bench.engine.encoding.update_held()
    assert len(bench.engine.encoding.waiting) == 2
    assert late.served == busy.served - fair_share.max_credit


def test_requests_that_return_do_not_change_an_account_that_waits() -> None:
    bench = Bench(token_budget=8)
    bench.not_reading.add(LATE)
    fair_share = bench.engine.scheduler.fair_share
    usage = fair_share.get("both", lambda _: 1)
    for _ in range(2):
        bench.encode([1] * 8, client=LATE, account=Account(name="both"))
    bench.run()
    bench.encode([1] * 8, client=PROMPT, account=Account(name="both"))
    served = usage.served = 9 * fair_share.max_credit
    bench.read(LATE)
    bench.engine.encoding.update_held()
    assert (len(bench.engine.encoding.waiting), usage.served) == (2, served)


def test_a_started_request_is_computed_to_its_end_although_its_client_must_read() -> None:
    bench = Bench(token_budget=8)
    bench.not_reading.add(LATE)
    for _ in range(2):
        bench.encode(*[[1] * 8] * 3, client=LATE)
    bench.run()
    assert len(bench.engine.encoding.unsent) == 2
    assert bench.engine.stats().running == 2


def test_the_results_that_the_engine_holds_are_counted() -> None:
    """Those that are not sent, and those of requests that are not computed to their end."""
    bench = Bench(token_budget=8, steps_in_flight=2)
    bench.not_reading.add(LATE)
    sizes = []
    bench.encode(*[[1] * 8] * 3, client=LATE)
    for _ in range(3):
        bench.step()
        sizes.append(bench.engine.encoding.num_result_bytes)
    bench.read(LATE)
    sizes.append(bench.engine.encoding.num_result_bytes)
    assert sizes == [RESULT_BYTES, 2 * RESULT_BYTES, 3 * RESULT_BYTES, 0]


def test_as_many_results_are_sent_as_there_is_room_for_and_at_least_one() -> None:
    bench = Bench(token_budget=64)
    bench.not_reading.add(LATE)
    numbers = [bench.encode([1], client=LATE) for _ in range(6)]
    bench.step()

    def num_read() -> int:
        return sum(finish_of(bench, LATE, number) == "stop" for number in numbers)

    bench.read(LATE, 1)
    assert num_read() == 1
    bench.read(LATE, 2 * RESULT_BYTES)
    assert num_read() == 3
    bench.read(LATE, 3 * RESULT_BYTES - 1)
    assert num_read() == 5
    assert bench.engine.encoding.unsent.fits(LATE, RESULT_BYTES)
    assert not bench.engine.encoding.unsent.fits(LATE, RESULT_BYTES - 1)


def test_a_message_has_the_results_of_a_bounded_number_of_requests() -> None:
    bench = Bench(token_budget=MAX_STEP_INPUTS, steps_in_flight=2, max_waiting=5000, checks=False)
    bench.not_reading.add(LATE)
    for _ in range(2 * MAX_STEP_INPUTS):
        bench.encode([1], client=LATE)
    bench.plan()
    bench.plan()
    bench.finish()
    bench.finish()
    assert len(bench.engine.pop_results(LATE, 1 << 30).outputs) == MAX_STEP_INPUTS


def test_no_request_starts_while_too_many_results_are_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine_core.encode.unsent_results.MAX_UNSENT_BYTES", RESULT_BYTES)
    bench, _ = late_bench()
    bench.not_reading.add(b"second")
    bench.encode([1] * 8, client=b"second")
    other = bench.encode([1] * 8, client=PROMPT)
    bench.run()
    assert finish_of(bench, PROMPT, other) is None
    bench.read(LATE)
    bench.run()
    assert finish_of(bench, PROMPT, other) == "stop"


def test_started_requests_go_on_while_too_many_results_are_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine_core.encode.unsent_results.MAX_UNSENT_BYTES", RESULT_BYTES - 1)
    bench = Bench(token_budget=8)
    bench.not_reading.add(LATE)
    large = bench.encode(*[[1] * 8] * 9, client=PROMPT)
    bench.step()
    bench.encode([1] * 8, client=LATE)
    while not bench.engine.encoding.unsent:
        bench.step()
    small = bench.encode([1] * 8, client=b"another")
    bench.run()
    assert finish_of(bench, PROMPT, large) == "stop"
    assert finish_of(bench, b"another", small) is None
    bench.read(LATE)
    bench.run()
    assert finish_of(bench, b"another", small) == "stop"


def test_what_waits_is_bounded_by_the_limit_and_the_started_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine_core.encode.unsent_results.MAX_UNSENT_BYTES", 5 * RESULT_BYTES)
    bench = Bench(token_budget=8)
    for index in range(30):
        client = b"client %d" % index
        bench.not_reading.add(client)
        for _ in range(3):
            bench.encode([1] * 8, [2] * 8, client=client)
    bench.run()
    unsent = bench.engine.encoding.unsent
    assert 5 * RESULT_BYTES < unsent.num_bytes <= (5 + 2 * (MAX_STARTED + 1)) * RESULT_BYTES
    while unsent:
        bench.read(next(iter(unsent.clients)))
        bench.run()
    assert bench.engine.is_idle
    assert all(outputs[-1].finish == "stop" for outputs in bench.outputs.values())


def test_an_aborted_request_has_no_result_to_send() -> None:
    bench, number = late_bench()
    bench.abort(number, client=LATE)
    assert finish_of(bench, LATE, number) == "abort"
    assert bench.engine.pop_freed() == {LATE: [number]}
    assert not bench.engine.encoding.unsent
    assert bench.engine.is_idle


def test_a_held_request_can_be_aborted_and_can_miss_its_deadline() -> None:
    bench, _ = late_bench()
    bench.run()
    aborted = bench.encode([1], client=LATE)
    late = bench.encode([1], client=LATE, queue_timeout_s=1.0)
    bench.abort(aborted, client=LATE)
    bench.tick(2.0)
    assert bench.last_output(late, LATE).error.code == "queue_timeout"
    assert bench.engine.stats().waiting == 0


def test_a_result_that_is_not_read_in_time_ends_with_an_error() -> None:
    bench = Bench()
    bench.not_reading.add(LATE)
    number = bench.encode([1], client=LATE, timeout_s=5.0)
    bench.step()
    bench.tick(6.0)
    error = bench.last_output(number, LATE).error
    assert error.code == "timeout"
    assert "1 inputs were encoded" in error.message


def test_a_lost_client_takes_its_results_and_held_requests_with_it() -> None:
    bench, _ = late_bench()
    bench.run()
    bench.encode([1], client=LATE)
    bench.engine.on_client_lost(LATE)
    bench.check()
    assert bench.engine.is_idle
    assert bench.engine.encoding.unsent.num_bytes == 0


def test_a_draining_engine_sends_the_results_that_wait() -> None:
    bench, number = late_bench()
    bench.engine.drain()
    assert not bench.engine.is_idle
    bench.read(LATE)
    assert finish_of(bench, LATE, number) == "stop"
    assert bench.engine.is_idle


def test_held_requests_count_in_the_limits_of_the_queue() -> None:
    bench, _ = late_bench(max_waiting=2)
    bench.run()
    for _ in range(2):
        bench.encode([1] * 8, client=LATE)
    refusal = bench.try_encode([1], client=PROMPT)
    assert isinstance(refusal, Refused)
    assert refusal.error.code == "overloaded"
    bench.encode([1], client=PROMPT, account=Account(name="another"))


def test_the_invariants_include_the_results_that_wait() -> None:
    bench, _ = late_bench()
    encoding = bench.engine.encoding
    encoding.unsent.remove(next(iter(encoding.unsent)))
    with pytest.raises(AssertionError, match="its results and `unsent` disagree"):
        check_encoding(encoding, list(bench.engine.open_requests))
