"""The parser of one choice: its events depend on the tokens alone."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from gateway.formats.choice_parser import ParserFactory, ParserState, ReadOptions
from gateway.formats.events import Content, Event, Failed, Finished, OutputDelta, merged
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output
from protocol.wire.errors import ErrorInfo
from tests.support.tokenizers import cuts, tokenizer_of

EOS = 2  # <|im_end|>
TEXT = "Hello, 👩🏽‍🚀! One, two, three.\n\nUser: four 語 five"


def tokenizer() -> Tokenizer:
    return tokenizer_of("smollm2")


def factory(**options: Any) -> ParserFactory:
    return ParserFactory(tokenizer(), ReadOptions(**options))


def outputs(pieces: list[list[int]], **end: Any) -> list[Output]:
    """Return one output of the engine for each piece. `end` has fields of the last output, such as
    the finish reason."""
    logprobs = [[TokenLogprobs(i, -1.0, 1) for i in ids] for ids in pieces]
    news = [
        Output(request=1, tokens=ids, logprobs=lps)
        for ids, lps in zip(pieces, logprobs, strict=True)
    ]
    return [*news[:-1], msgspec.structs.replace(news[-1], **end)]


def read(readers: ParserFactory, news: list[Output]) -> list[OutputDelta]:
    reader = readers.new()
    return [reader.push(output) for output in news]


def events(deltas: list[OutputDelta]) -> list[Event]:
    return merged([event for delta in deltas for event in delta.events])


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": ["\n\nUser:", "zzz"]},
        {"stop": ["two", "o, t"], "include_stop": True},
        {"stop": [","], "min_tokens": 9},
        {"stop": ["absent"], "skip_special_tokens": False},
    ],
)
@pytest.mark.parametrize("end", [{"finish": "length"}, {"finish": "stop", "stop_token": EOS}])
def test_the_cut_of_the_tokens_never_changes_the_events(
    options: dict[str, Any], end: dict[str, Any]
) -> None:
    ids = [*ids_of(TEXT), EOS]
    readers = factory(**options)

    def result_of(pieces: list[list[int]]) -> tuple[list[Event], list[int], list[int]]:
        deltas = read(readers, outputs(pieces, **end))
        tokens = [i for delta in deltas for i in delta.token_ids]
        return events(deltas), tokens, [lp.token_id for d in deltas for lp in d.logprobs]

    whole = result_of([ids])
    assert whole[0]
    assert result_of([[i] for i in ids]) == whole
    for at in range(1, len(ids)):
        assert result_of([ids[:at], ids[at:]]) == whole
    for seed in range(30):
        assert result_of(cuts(ids, seed)) == whole


def test_tokens_after_the_end_are_not_counted() -> None:
    ids = ids_of("One, two, three")
    num_said = len(ids_of("One, two"))
    for before in (0, 1, num_said - 1):
        reader = factory(stop=["two"]).new()
        reader.push(Output(request=1, tokens=ids[:before]))
        delta = reader.push(Output(request=1, tokens=ids[before:]))
        assert delta.num_after_end == len(ids) - num_said
    whole = factory().new().push(Output(request=1, tokens=ids, finish="length"))
    assert whole.num_after_end == 0


def test_no_token_is_lost_and_each_travels_with_its_text() -> None:
    ids = [*ids_of(TEXT), EOS]
    for options in ({}, {"stop": ["three"]}, {"stop": ["User: four 語 five and"]}):
        news = outputs([[i] for i in ids], finish="stop", stop_token=EOS)
        deltas = read(factory(**options), news)
        sent = [i for delta in deltas for i in delta.token_ids]
        assert sent == ids[: len(sent)]
        assert [lp.token_id for delta in deltas for lp in delta.logprobs] == sent
        assert len(sent) == len(ids) or "three" in options["stop"]
        assert all(delta.events for delta in deltas if delta.token_ids)


def test_the_stop_token_has_no_text_and_only_a_named_one_is_a_reason() -> None:
    dot = ids_of(".")[0]
    named = {"finish": "stop", "stop_token": dot}
    ids = [*ids_of("Yes"), dot]
    assert events(read(factory(), outputs([ids], **named))) == [
        Content("Yes"),
        Finished("stop", dot),
    ]
    assert events(read(factory(include_stop=True), outputs([ids], **named))) == [
        Content("Yes."),
        Finished("stop", dot),
    ]
    end = {"finish": "stop", "stop_token": EOS}
    assert events(read(factory(), outputs([[*ids, EOS]], **end))) == [
        Content("Yes."),
        Finished("stop"),
    ]
    shown = factory(skip_special_tokens=False)
    assert events(read(shown, outputs([[*ids, EOS]], **end)))[0] == Content("Yes.")


def test_a_stop_string_ends_the_answer_and_later_tokens_are_ignored() -> None:
    reader = factory(stop=["two"]).new()
    delta = reader.push(Output(request=1, tokens=ids_of("One, two, three")))
    assert delta.events == [Content("One, "), Finished("stop", "two")]
    assert reader.stopped
    assert reader.finished
    assert not reader.push(Output(request=1, tokens=ids_of("four")))
    assert not reader.push(Output(request=1, finish="abort"))


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop() -> None:
    ids = ids_of("One, two")
    together = read(factory(stop=["two"]), outputs([ids], finish="length"))
    apart = read(factory(stop=["two"]), outputs([ids, []], finish="length"))
    assert events(together) == events(apart) == [Content("One, "), Finished("stop", "two")]


def test_a_stop_string_is_not_looked_for_in_the_first_min_tokens() -> None:
    ids = ids_of("One, two, three")
    comma = 1
    readers = factory(stop=[","], min_tokens=comma + 1)
    for pieces in ([ids], [[i] for i in ids]):
        assert events(read(readers, outputs(pieces, finish="length"))) == [
            Content("One, two"),
            Finished("stop", ","),
        ]


def test_the_end_of_the_first_min_tokens_is_not_searched_either() -> None:
    half = ids_of("語")[:1]
    for min_tokens, end in ((1, Finished("length")), (0, Finished("stop", "\ufffd"))):
        deltas = read(
            factory(stop=["\ufffd"], min_tokens=min_tokens), outputs([half], finish="length")
        )
        assert events(deltas)[-1] == end


def test_an_error_without_tokens_is_emitted() -> None:
    error = ErrorInfo(code="step_failed", message="no")
    deltas = read(factory(stop=["Yes!"]), outputs([ids_of("Yes"), []], finish="error", error=error))
    assert events(deltas) == [Content("Yes"), Failed(error)]
    silent = read(factory(), outputs([[]], finish="error"))
    assert isinstance(events(silent)[0], Failed)


def test_half_a_character_waits_and_its_tokens_wait_with_it() -> None:
    ids = ids_of("語")
    assert len(ids) > 1
    reader = factory().new()
    assert not reader.push(Output(request=1, tokens=ids[:1]))
    delta = reader.push(Output(request=1, tokens=ids[1:]))
    assert (delta.events, delta.token_ids) == ([Content("語")], ids)
    cut_off = read(factory(), outputs([ids[:1]], finish="length"))
    assert events(cut_off) == [Content("\ufffd"), Finished("length")]


def test_choices_of_one_request_share_no_mutable_state() -> None:
    readers = factory(stop=["two"])
    one, other = readers.new(), readers.new()
    one.push(Output(request=1, tokens=ids_of("One, t")))
    assert other.push(Output(request=2, tokens=ids_of("wo"))).events == [Content("wo")]
    assert not other.stopped


def test_a_reader_goes_on_in_another_process_after_any_message() -> None:
    rng = random.Random(7)
    ids = [*ids_of(TEXT), EOS]
    for options in ({}, {"stop": ["User: four 語", "thr!"]}, {"stop": ["e"], "min_tokens": 20}):
        readers = factory(**options)
        news = outputs(cuts(ids, rng.randrange(99)), finish="stop", stop_token=EOS)
        reader, deltas = readers.new(), []
        for output in news:
            deltas.append(reader.push(output))
            wire = msgspec.msgpack.encode(reader.state())
            reader = readers.new(msgspec.msgpack.decode(wire, type=ParserState))
        straight = read(readers, news)
        assert deltas == straight


def test_an_answer_without_tokens_still_ends() -> None:
    assert events(read(factory(), outputs([[]], finish="abort"))) == [Finished("abort")]
