"""A client that takes nothing is told less often, and everything; what waits for it is bounded.

How a client is known to take nothing: tests/unit/test_sse.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gateway.engine.client import ZmqEngineClient
from gateway.formats.choice_parser import ParserFactory, ReadOptions
from gateway.formats.events import Content, Event, Finished, OutputDelta, Reasoning, merged
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice, PromptRequest
from gateway.generation.sinks import CollectSink, PendingOutput
from gateway.text.tokenizer import Tokenizer
from protocol.errors import EngineLost, ErrorInfo, ServingError
from protocol.messages import Output, TokenLogprobs, Usage
from protocol.sampling import SamplingParams
from tests.support.scripted_engine import EOS, ids_of, scripted_card, scripted_logprob

SAID = "Größe, 🙂 and what comes after it."


class SentFrames:
    """A sink, and what it was told; `then` is called with each delta."""

    def __init__(self, num_choices: int, then: Callable[[], None] = lambda: None) -> None:
        self.fold = CollectSink(num_choices)
        self.deltas: list[tuple[int, OutputDelta]] = []
        self.ends: list[ServingError | None] = []
        self._then = then

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        assert not self.ends, "news after the end"
        self.deltas.append((choice.index, delta))
        self.fold.delta(choice, delta)
        self._then()

    def end(self) -> None:
        self.ends.append(None)

    def fail(self, error: ServingError) -> None:
        self.ends.append(error)


def an_answer(num_choices: int = 1, **options: object) -> ChoiceGroup:
    readers = ParserFactory(Tokenizer(scripted_card()), ReadOptions(**options))  # type: ignore[arg-type]
    params = [SamplingParams() for _ in range(num_choices)]
    return ChoiceGroup(
        ZmqEngineClient("ipc:///nowhere"), [PromptRequest([1, 2, 3], params, readers)]
    )


def token_by_token(ids: list[int], logprobs: int = 1) -> list[Output]:
    """All that the engine says of one request."""
    said = [
        Output(request=1, tokens=[token], logprobs=[scripted_logprob(token, logprobs)])
        for token in ids
    ]
    usage = Usage(prompt_tokens=3, generated_tokens=len(ids) + 1)
    last = scripted_logprob(EOS, logprobs)
    end = Output(
        request=1, tokens=[EOS], logprobs=[last], finish="stop", stop_token=EOS, usage=usage
    )
    return [*said, end]


def folded(told: SentFrames) -> list[tuple[object, ...]]:
    return [(merged(w.events), w.token_ids, w.logprobs) for w in told.fold.whole]


# ---- what waits
def test_what_waits_is_one_piece_for_each_choice_in_the_order_they_were_heard_of() -> None:
    one, two = an_answer(2).choices
    untold, told = PendingOutput(), SentFrames(2)
    untold.delta(two, OutputDelta([Reasoning("Hm")], [5], [TokenLogprobs(5, -1.0, 1)]))
    untold.delta(one, OutputDelta([Content("a")], [1]))
    untold.delta(two, OutputDelta([Reasoning("."), Content("b")], [6, 7]))
    untold.delta(two, OutputDelta([Content("c"), Finished("stop")], [8]))
    untold.end()
    assert [untold.emit_next(told) for _ in range(4)] == [True, True, True, False]
    whole: list[Event] = [Reasoning("Hm."), Content("bc"), Finished("stop")]
    assert told.deltas == [
        (1, OutputDelta(whole, [5, 6, 7, 8], [TokenLogprobs(5, -1.0, 1)])),
        (0, OutputDelta([Content("a")], [1], [])),
    ]
    assert told.ends == [None]


def test_waiting_changes_nothing_of_what_was_told_before() -> None:
    (choice,) = an_answer().choices
    untold = PendingOutput()
    first = OutputDelta([Content("a")], [1])
    untold.delta(choice, first)
    untold.delta(choice, OutputDelta([Content("b")], [2]))
    assert first == OutputDelta([Content("a")], [1])


def test_tokens_and_the_alternatives_told_with_them_are_much_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.generation.sinks.MAX_PENDING", 12)
    (choice,) = an_answer().choices
    untold = PendingOutput()
    untold.delta(choice, OutputDelta([], [1] * 5))
    untold.delta(choice, OutputDelta([], [1], [scripted_logprob(1, 5)]))
    assert not untold.is_full
    untold.delta(choice, OutputDelta([], [1]))
    assert untold.is_full
    untold.emit_next(SentFrames(1))
    assert not untold.is_full


@pytest.mark.parametrize("many", [1, 3, 100])
def test_tokens_are_measured_and_told_read_or_not(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.generation.sinks.MAX_UNPARSED", many)
    monkeypatch.setattr("gateway.generation.sinks.MAX_PENDING", 4)
    (choice,) = an_answer().choices
    untold, told = PendingOutput(), SentFrames(1)
    for letters, is_much in (("a", False), ("bc", False), ("d", True), ("e", True)):
        untold.hold(choice, Output(request=1, tokens=ids_of(letters)))
        assert untold.is_full == is_much
    assert untold.emit_next(told)
    assert [delta.events for _, delta in told.deltas] == [[Content("abcde")]]
    assert not untold.is_full
    assert not untold.emit_next(told)


def test_a_client_that_stops_reading_while_it_gets_the_buffered_events_gets_no_more_of_them() -> (
    None
):
    """They may exceed the buffer of a client, which would be disconnected then."""
    group = an_answer()
    outputs = token_by_token(ids_of("abc"))
    for output in outputs:
        group.on_report(group.choices[0], output)
    sink = SentFrames(1, then=group.detach)
    group.attach(sink)
    assert [delta.token_ids for _, delta in sink.deltas] == [ids_of("a")]
    group.attach(sink)
    assert [delta.token_ids for _, delta in sink.deltas] == [ids_of("a"), [*ids_of("bc"), EOS]]
    assert sink.ends == []
    group.attach(sink)
    assert sink.ends == [None]


# ---- an answer whose client takes nothing now and then
@pytest.mark.parametrize("seed", range(20))
def test_with_any_pauses_the_same_is_told(seed: int) -> None:
    """Three choices whose news interleave; the client stops and goes on reading at any of them."""
    chance = random.Random(seed)
    plain, paused = [_told_with_pauses(chance, pauses) for pauses in (False, True)]
    assert folded(plain) == folded(paused)
    assert plain.ends == paused.ends == [None]
    assert len(paused.deltas) < len(plain.deltas)


def _told_with_pauses(chance: random.Random, pauses: bool) -> SentFrames:
    answer = an_answer(3)
    told = SentFrames(3, lambda: answer.detach() if pauses and chance.random() < 0.5 else None)
    answer.attach(told)
    left = [(choice, token_by_token(ids_of(SAID))) for choice in answer.choices]
    while some := [(choice, said) for choice, said in left if said]:
        choice, said = chance.choice(some)
        answer.on_report(choice, said.pop(0))
        if chance.random() < 0.1:
            answer.attach(told)
    while not told.ends:
        answer.attach(told)
    return told


def test_what_comes_before_there_is_a_sink_is_told_as_it_came() -> None:
    """A client that is not slow: its request is about to ask. How busy the gateway is at that
    moment is nothing that a stream should show."""
    answer = an_answer()
    for output in token_by_token(ids_of("Hello")):
        answer.on_report(answer.choices[0], output)
    told, late = SentFrames(1), SentFrames(1)
    answer.attach(told)
    assert [delta.events for _, delta in told.deltas] == [
        *([Content(letter)] for letter in "Hello"),
        [Finished("stop")],
    ]
    assert told.ends == [None]
    answer.attach(late)
    assert (late.deltas, late.ends) == ([], [])


def test_an_answer_ends_and_is_counted_when_it_comes_not_when_it_is_told() -> None:
    """A stop string ends it at once: the engine computes nothing for a client that sleeps."""
    answer = an_answer(stop=["STOP"])
    (choice,) = answer.choices
    told = SentFrames(1)
    answer.attach(told)
    answer.detach()
    for output in token_by_token(ids_of("so STOP and never this")):
        answer.on_report(choice, output)
    assert (choice.is_ended, choice.finish, choice.num_generated) == (True, "stop", len("so STOP"))
    assert not told.deltas
    answer.attach(told)
    ((_, delta),) = told.deltas
    assert delta.events == [Content("so "), Finished("stop", "STOP")]
    assert told.ends == [None]


def test_an_error_waits_behind_the_words_that_came_before_it() -> None:
    answer = an_answer()
    told = SentFrames(1)
    answer.attach(told)
    answer.detach()
    answer.on_report(answer.choices[0], Output(request=1, tokens=ids_of("so far")))
    error = ErrorInfo(code=EngineLost.code, message="the worker died")
    answer.on_report(answer.choices[0], Output(request=1, finish="error", error=error))
    assert not told.deltas
    answer.attach(told)
    assert told.fold.whole[0].events[0] == Content("so far")
    (failure,) = told.ends
    assert isinstance(failure, EngineLost)


def test_a_slow_client_that_hung_up_gets_nothing_more() -> None:
    answer = an_answer()
    told = SentFrames(1)
    answer.attach(told)
    answer.detach()
    answer.on_report(answer.choices[0], Output(request=1, tokens=ids_of("lost")))
    answer.abandon()
    answer.attach(told)
    assert not told.deltas
    assert not told.ends


def test_output_beyond_the_buffer_is_sent_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it waits as bytes, which are bounded."""
    monkeypatch.setattr("gateway.generation.sinks.MAX_PENDING", 10)
    monkeypatch.setattr("gateway.generation.sinks.MAX_UNPARSED", 5)
    answer = an_answer()
    told = SentFrames(1)
    answer.attach(told)
    answer.detach()
    for output in token_by_token(ids_of("0123456789abcdefghijklm"), logprobs=0):
        answer.on_report(answer.choices[0], output)
    assert [len(delta.token_ids) for _, delta in told.deltas] == [10, 10]
    answer.attach(told)
    assert [len(delta.token_ids) for _, delta in told.deltas] == [10, 10, 4]
    assert told.ends == [None]
