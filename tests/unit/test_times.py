"""Where a request's time went, as the engine tells it, and when what it owned is free again."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.grammar import ChoiceGrammar
from protocol.messages import Times
from tests.support.engines import CLIENT, Bench


class Timed:
    """A bench whose clock goes on by one second with each step, and by `wait`."""

    def __init__(self, **options: Any) -> None:
        self.bench = Bench(**options)
        self.now = 0.0

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.bench.tick(self.now)

    def step(self) -> None:
        """Planned now, committed a second later."""
        assert self.bench.plan() is not None
        self.wait(1)
        self.bench.finish()

    def run(self) -> None:
        while self.bench.engine.num_in_flight or self.bench.plan() is not None:
            self.wait(1)
            self.bench.finish()

    def times(self, number: int) -> Times:
        """As told last."""
        told = [output.usage for output in self.bench.news[CLIENT, number] if output.usage]
        assert told[-1].times is not None
        return told[-1].times


def in_all(times: Times) -> float:
    return sum(msgspec.structs.asdict(times).values())


def test_time_is_told_by_what_the_request_waited_for() -> None:
    timed = Timed(token_budget=8)
    number = timed.bench.add([5] * 20, max_tokens=4, ignore_eos=True)
    assert isinstance(number, int)
    timed.wait(3)
    timed.run()
    assert timed.times(number) == Times(queued_s=3, prefill_s=3, decode_s=3)


def test_it_is_told_with_the_first_token_and_with_the_end() -> None:
    timed = Timed()
    number = timed.bench.add([5] * 6, max_tokens=3, ignore_eos=True)
    assert isinstance(number, int)
    timed.run()
    told = [output.usage and output.usage.times for output in timed.bench.news[CLIENT, number]]
    assert told == [Times(prefill_s=1), None, Times(prefill_s=1, decode_s=2)]


def test_an_answer_of_one_token_has_not_decoded() -> None:
    timed = Timed()
    number = timed.bench.add([5] * 6, max_tokens=1)
    assert isinstance(number, int)
    timed.run()
    assert timed.times(number) == Times(prefill_s=1)


def test_waiting_for_a_grammar_is_told_apart_from_the_queue() -> None:
    timed = Timed()
    number = timed.bench.add([5] * 6, grammar=ChoiceGrammar(choices=["a"]), max_tokens=3)
    assert isinstance(number, int)
    timed.wait(2)
    timed.bench.compile()
    timed.wait(5)
    timed.run()
    times = timed.times(number)
    assert (times.grammar_s, times.queued_s) == (2, 5)


def test_preempted_time_is_told_and_nothing_is_lost_or_told_twice() -> None:
    timed = Timed(num_blocks=11, max_slots=4, max_len=40)
    numbers = [timed.bench.add([10 + i] * 8, max_tokens=20, ignore_eos=True) for i in range(3)]
    ended: dict[int, float] = {}
    while len(ended) < len(numbers):
        timed.step()
        for number in numbers:
            assert isinstance(number, int)
            news = timed.bench.news[CLIENT, number]
            if news and news[-1].finish and number not in ended:
                ended[number] = timed.now
    for number, at in ended.items():
        assert in_all(timed.times(number)) == at
    assert any(timed.times(number).preempted_s for number in ended)
    assert all(timed.times(number).prefill_s == 1 for number in ended)


def test_what_waits_is_free_as_soon_as_it_is_aborted() -> None:
    bench = Bench(max_slots=1)
    first, second = bench.add([1] * 6), bench.add([2] * 6)
    bench.plan()
    bench.abort(second)
    assert bench.engine.freed == {CLIENT: [second]}
    assert isinstance(first, int)


def test_what_is_in_flight_is_free_when_its_step_has_committed() -> None:
    bench = Bench()
    number = bench.add([1] * 6, max_tokens=50, ignore_eos=True)
    assert isinstance(number, int)
    bench.plan()
    bench.abort(number, number, 77)
    assert bench.engine.freed == {}
    bench.finish()
    assert bench.engine.freed == {CLIENT: [number]}
    assert bench.engine.stats().free_blocks == bench.engine.stats().total_blocks


def test_nobody_is_told_of_what_ended_by_itself_or_with_its_client() -> None:
    bench = Bench()
    bench.add([1] * 6, max_tokens=2, ignore_eos=True)
    bench.run()
    bench.add([1] * 6, max_tokens=50, client=b"other")
    bench.plan()
    bench.engine.on_client_lost(b"other")
    bench.finish()
    assert bench.engine.freed == {}
