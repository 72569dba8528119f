"""A client that pauses gets its whole answer in fewer deltas; the pending output is bounded.

tests/unit/test_sse.py tests how such a client is detected.
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
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output, Usage
from protocol.engine.sampling import SamplingParams
from protocol.wire.errors import EngineLost, ErrorInfo, ServingError
from tests.support.scripted_engine import EOS, ids_of, scripted_card, scripted_logprob

TEXT = "Größe, 🙂 and what comes after it."


class SentFrames:
    """A sink that records its deltas and ends, and calls `then` after each delta."""

    def __init__(self, num_choices: int, then: Callable[[], None] = lambda: None) -> None:
        self.fold = CollectSink(num_choices)
        self.deltas: list[tuple[int, OutputDelta]] = []
        self.ends: list[ServingError | None] = []
        self._then = then

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        assert not self.ends, "a delta after the end"
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
    """Return the engine's outputs of one request, one token each."""
    outputs = [
        Output(request=1, tokens=[token], logprobs=[scripted_logprob(token, logprobs)])
        for token in ids
    ]
    usage = Usage(prompt_tokens=3, generated_tokens=len(ids) + 1)
    last = scripted_logprob(EOS, logprobs)
    end = Output(
        request=1, tokens=[EOS], logprobs=[last], finish="stop", stop_token=EOS, usage=usage
    )
    return [*outputs, end]


def folded(sent: SentFrames) -> list[tuple[object, ...]]:
    return [(merged(w.events), w.token_ids, w.logprobs) for w in sent.fold.whole]


# ---- pending output
def test_pending_deltas_are_merged_per_choice_in_the_order_of_their_first_delta() -> None:
    one, two = an_answer(2).choices
    pending, sent = PendingOutput(), SentFrames(2)
    pending.delta(two, OutputDelta([Reasoning("Hm")], [5], [TokenLogprobs(5, -1.0, 1)]))
    pending.delta(one, OutputDelta([Content("a")], [1]))
    pending.delta(two, OutputDelta([Reasoning("."), Content("b")], [6, 7]))
    pending.delta(two, OutputDelta([Content("c"), Finished("stop")], [8]))
    pending.end()
    assert [pending.emit_next(sent) for _ in range(4)] == [True, True, True, False]
    whole: list[Event] = [Reasoning("Hm."), Content("bc"), Finished("stop")]
    assert sent.deltas == [
        (1, OutputDelta(whole, [5, 6, 7, 8], [TokenLogprobs(5, -1.0, 1)])),
        (0, OutputDelta([Content("a")], [1], [])),
    ]
    assert sent.ends == [None]


def test_merging_does_not_change_the_deltas_that_were_added() -> None:
    (choice,) = an_answer().choices
    pending = PendingOutput()
    first = OutputDelta([Content("a")], [1])
    pending.delta(choice, first)
    pending.delta(choice, OutputDelta([Content("b")], [2]))
    assert first == OutputDelta([Content("a")], [1])


def test_alternative_tokens_in_logprobs_count_towards_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.generation.sinks.MAX_PENDING", 12)
    (choice,) = an_answer().choices
    pending = PendingOutput()
    pending.delta(choice, OutputDelta([], [1] * 5))
    pending.delta(choice, OutputDelta([], [1], [scripted_logprob(1, 5)]))
    assert not pending.is_full
    pending.delta(choice, OutputDelta([], [1]))
    assert pending.is_full
    pending.emit_next(SentFrames(1))
    assert not pending.is_full


@pytest.mark.parametrize("many", [1, 3, 100])
def test_pending_tokens_are_counted_and_sent_parsed_or_not(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.generation.sinks.MAX_UNPARSED", many)
    monkeypatch.setattr("gateway.generation.sinks.MAX_PENDING", 4)
    (choice,) = an_answer().choices
    pending, sent = PendingOutput(), SentFrames(1)
    for letters, is_full in (("a", False), ("bc", False), ("d", True), ("e", True)):
        pending.hold(choice, Output(request=1, tokens=ids_of(letters)))
        assert pending.is_full == is_full
    assert pending.emit_next(sent)
    assert [delta.events for _, delta in sent.deltas] == [[Content("abcde")]]
    assert not pending.is_full
    assert not pending.emit_next(sent)


def test_a_client_that_stops_reading_gets_no_more_buffered_events() -> None:
    """More events could exceed the client's buffer, and then the client would be disconnected."""
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


# ---- an answer whose client pauses
@pytest.mark.parametrize("seed", range(20))
def test_pauses_of_the_client_change_no_text_token_or_logprob(seed: int) -> None:
    """Outputs of three choices interleave. The client may pause or resume at each output."""
    chance = random.Random(seed)
    plain, paused = [_sent_with_pauses(chance, pauses) for pauses in (False, True)]
    assert folded(plain) == folded(paused)
    assert plain.ends == paused.ends == [None]
    assert len(paused.deltas) < len(plain.deltas)


def _sent_with_pauses(chance: random.Random, pauses: bool) -> SentFrames:
    answer = an_answer(3)
    sent = SentFrames(3, lambda: answer.detach() if pauses and chance.random() < 0.5 else None)
    answer.attach(sent)
    left = [(choice, token_by_token(ids_of(TEXT))) for choice in answer.choices]
    while some := [(choice, outputs) for choice, outputs in left if outputs]:
        choice, outputs = chance.choice(some)
        answer.on_report(choice, outputs.pop(0))
        if chance.random() < 0.1:
            answer.attach(sent)
    while not sent.ends:
        answer.attach(sent)
    return sent


def test_events_before_a_sink_is_attached_are_not_merged() -> None:
    """A sink that is attached late does not mean that the client is slow. A stream must not show
    how busy the gateway is."""
    answer = an_answer()
    for output in token_by_token(ids_of("Hello")):
        answer.on_report(answer.choices[0], output)
    sent, late = SentFrames(1), SentFrames(1)
    answer.attach(sent)
    assert [delta.events for _, delta in sent.deltas] == [
        *([Content(letter)] for letter in "Hello"),
        [Finished("stop")],
    ]
    assert sent.ends == [None]
    answer.attach(late)
    assert (late.deltas, late.ends) == ([], [])


def test_an_answer_ends_and_is_counted_on_arrival_although_it_is_not_sent() -> None:
    """A stop string ends the answer at once, so the engine computes no more for a paused client."""
    answer = an_answer(stop=["STOP"])
    (choice,) = answer.choices
    sent = SentFrames(1)
    answer.attach(sent)
    answer.detach()
    for output in token_by_token(ids_of("so STOP and the rest")):
        answer.on_report(choice, output)
    assert (choice.is_ended, choice.finish, choice.num_generated) == (True, "stop", len("so STOP"))
    assert not sent.deltas
    answer.attach(sent)
    ((_, delta),) = sent.deltas
    assert delta.events == [Content("so "), Finished("stop", "STOP")]
    assert sent.ends == [None]


def test_an_error_is_sent_after_the_text_before_it() -> None:
    answer = an_answer()
    sent = SentFrames(1)
    answer.attach(sent)
    answer.detach()
    answer.on_report(answer.choices[0], Output(request=1, tokens=ids_of("so far")))
    error = ErrorInfo(code=EngineLost.code, message="the worker died")
    answer.on_report(answer.choices[0], Output(request=1, finish="error", error=error))
    assert not sent.deltas
    answer.attach(sent)
    assert sent.fold.whole[0].events[0] == Content("so far")
    (failure,) = sent.ends
    assert isinstance(failure, EngineLost)


def test_a_paused_client_that_disconnects_gets_nothing_more() -> None:
    answer = an_answer()
    sent = SentFrames(1)
    answer.attach(sent)
    answer.detach()
    answer.on_report(answer.choices[0], Output(request=1, tokens=ids_of("lost")))
    answer.abandon()
    answer.attach(sent)
    assert not sent.deltas
    assert not sent.ends


def test_output_beyond_the_buffer_is_sent_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is sent although the client pauses. It then waits in the outlet as bytes, whose
    number is bounded."""
    monkeypatch.setattr("gateway.generation.sinks.MAX_PENDING", 10)
    monkeypatch.setattr("gateway.generation.sinks.MAX_UNPARSED", 5)
    answer = an_answer()
    sent = SentFrames(1)
    answer.attach(sent)
    answer.detach()
    for output in token_by_token(ids_of("0123456789abcdefghijklm"), logprobs=0):
        answer.on_report(answer.choices[0], output)
    assert [len(delta.token_ids) for _, delta in sent.deltas] == [10, 10]
    answer.attach(sent)
    assert [len(delta.token_ids) for _, delta in sent.deltas] == [10, 10, 4]
    assert sent.ends == [None]
