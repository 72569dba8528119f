"""Parsers of formatted answers: their events depend on the tokens alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gateway.formats.choice_parser import AnswerOptions, ParserFactory, ParserState, ReadOptions
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import (
    Content,
    Event,
    Finished,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
    merged,
)
from gateway.formats.registry import bind, format_of
from protocol.engine.messages import Output
from tests.support.cuts import all_cuts
from tests.support.tokenizers import REAL_NAMES, cuts, tokenizer_of

HERMES = (
    "<think>\nWhere is </tool_call> 語?\n</think>\n\nI will look. 👩🏽‍🚀\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "</tool_call> } é", "n": [1, {}]}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
DEEPSEEK = (
    "Let me see.<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function"
    '<\uff5ctool▁sep\uff5c>look\n```json\n{"at": "``` 語"}\n```<\uff5ctool▁call▁end\uff5c>'
    "<\uff5ctool▁calls▁end\uff5c>"
)
LLAMA = '{"name": "look", "parameters": {"at": "} 語"}}; {"name": "now", "parameters": {}}'
ANSWERS = {
    "qwen3": ("hermes", "qwen3", HERMES),
    "smollm2": ("hermes", "qwen3", HERMES.replace("</tool_call> 語", "語")),
    "deepseek_v3": ("deepseek_v3", "deepseek_r1", DEEPSEEK),
    "llama3_1": ("llama3_json", None, LLAMA),
}
ANSWERS |= {name: ANSWERS[name.removeprefix("real ")] for name in REAL_NAMES}


def factory(
    family: str, options: ReadOptions | None = None, **answer: Any
) -> tuple[ParserFactory, list[int]]:
    """Return a parser factory for the family's answer, and the answer's tokens."""
    tokenizer = tokenizer_of(family)
    tools, reasoning, text = ANSWERS[family]
    ids = itertools.count(1)
    bound = bind(format_of(tools, reasoning), tokenizer)
    known: dict[str, Any] = {"new_id": lambda: f"call_{next(ids)}"}
    readers = ParserFactory(tokenizer, options, AnswerOptions(format=bound, **(known | answer)))
    return readers, tokenizer.encode(text, False)


def read(readers: ParserFactory, pieces: Sequence[Sequence[int]], **end: Any) -> list[Event]:
    """Return the merged events without call ids, because each reading makes new ids."""
    reader, events = readers.new(), []
    for at, ids in enumerate(pieces, 1):
        last = end if at == len(pieces) else {}
        events += reader.push(Output(request=1, tokens=list(ids), **last)).events
    return [
        msgspec.structs.replace(event, id="") if isinstance(event, ToolCall) else event
        for event in merged(events)
    ]


def hermes_events(at: str = "</tool_call> } é") -> list[Event]:
    return [
        Reasoning("Where is </tool_call> 語?"),
        Content("I will look. 👩🏽‍🚀"),
        ToolCall(0, "", "look"),
        ToolArguments(0, f'{{"at": "{at}", "n": [1, {{}}]}}'),
        ToolCallEnd(0),
        ToolCall(1, "", "now"),
        ToolArguments(1, "{}"),
        ToolCallEnd(1),
        Finished("tool_calls"),
    ]


def test_a_whole_answer_is_understood() -> None:
    readers, ids = factory("qwen3")
    assert read(readers, [ids], finish="stop") == hermes_events()


@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize(
    "options", [None, ReadOptions(stop=["zzz", "look.\nX"]), ReadOptions(stop=["I"], min_tokens=12)]
)
def test_the_cut_of_the_tokens_never_changes_the_events(
    family: str, options: ReadOptions | None
) -> None:
    readers, ids = factory(family, options)
    whole = read(readers, [ids], finish="stop")
    assert ToolCallEnd(0) in whole or (options and options.min_tokens)
    for pieces in all_cuts(ids, seed=5):
        assert read(readers, pieces, finish="stop") == whole


def test_markers_are_known_by_their_ids_and_the_same_letters_are_text() -> None:
    readers, _ = factory("qwen3")
    tokenizer = tokenizer_of("qwen3")
    letters = [i for char in "</tool_call> and <tool_call>" for i in tokenizer.encode(char, False)]
    assert read(readers, [letters], finish="stop") == [
        Content("</tool_call> and <tool_call>"),
        Finished("stop"),
    ]
    assert bind(format_of("hermes", "qwen3"), tokenizer).lexicon.tokens.keys() == {
        tokenizer.token_id(marker)
        for marker in ("<tool_call>", "</tool_call>", "<think>", "</think>")
    }


def test_an_ordinary_word_of_the_vocabulary_is_no_marker_token() -> None:
    bound = bind(format_of("phi4_mini_json", "granite"), tokenizer_of("qwen3"))
    assert bound.lexicon.tokens == {}


@pytest.mark.parametrize("family", ANSWERS)
def test_an_answer_cut_off_anywhere_shows_no_markup_and_ends_no_open_call(family: str) -> None:
    readers, ids = factory(family)
    whole = read(readers, [ids], finish="stop")
    said = "".join(event.text for event in whole if isinstance(event, Content))
    for end in range(len(ids) + 1):
        events = read(readers, [ids[:end]], finish="length")
        assert events == read(readers, [[i] for i in ids[:end]] + [[]], finish="length")
        assert events[-1] == Finished("length")
        shown = "".join(event.text for event in events if isinstance(event, Content))
        assert said.startswith(shown.rstrip("\ufffd\n "))
        assert not [event for event in events if isinstance(event, OutputWarning)]
        ended = [event.index for event in events if isinstance(event, ToolCallEnd)]
        assert ended == list(range(len(ended)))


def test_length_wins_over_completed_calls() -> None:
    readers, ids = factory("qwen3")
    assert read(readers, [ids], finish="length")[:-1] == hermes_events()[:-1]
    assert read(readers, [ids], finish="length")[-1] == Finished("length")


def test_a_stop_string_ends_content_and_nothing_else() -> None:
    for stop, ends in (("Where", False), ("name", False), ('"n"', False), ("look.", True)):
        readers, ids = factory("qwen3", ReadOptions(stop=[stop]))
        for pieces in ([ids], [[i] for i in ids]):
            events = read(readers, pieces, finish="stop")
            assert (events[-1] == Finished("stop", stop)) == ends
            assert (ToolCallEnd(1) in events) != ends


def test_a_stop_string_does_not_span_a_call() -> None:
    readers, ids = factory("qwen3", ReadOptions(stop=["🚀After"]))
    ids = [*ids, *tokenizer_of("qwen3").encode("After", False)]
    events = read(readers, [ids], finish="stop")
    assert events == [*hermes_events()[:-1], Content("After"), Finished("tool_calls")]
    assert read(readers, [[i] for i in ids], finish="stop") == events


def test_reasoning_that_is_not_requested_is_parsed_and_dropped() -> None:
    readers, ids = factory("qwen3", include_reasoning=False)
    assert read(readers, [ids], finish="stop") == hermes_events()[1:]


def test_an_answer_that_may_have_one_call_ends_with_it() -> None:
    readers, ids = factory("qwen3", parallel_tool_calls=False)
    for pieces in ([ids], [[i] for i in ids], cuts(ids, 3)):
        reader, events = readers.new(), []
        for piece in pieces:
            events += reader.push(Output(request=1, tokens=piece)).events
        assert reader.stopped
        assert reader.finished
        assert merged(events)[-2:] == [ToolCallEnd(0), Finished("tool_calls")]


def test_a_call_of_an_unknown_tool_has_a_warning() -> None:
    readers, ids = factory("qwen3", tools=[DeclaredTool("now")])
    events = read(readers, [ids], finish="stop")
    assert [event.code for event in events if isinstance(event, OutputWarning)] == ["unknown_tool"]
    assert ToolCallEnd(1) in events


def test_a_reader_goes_on_in_another_process_after_any_message() -> None:
    for family, options in itertools.product(
        ("qwen3", "smollm2", "deepseek_v3"), (None, ReadOptions(stop=["absent", "}"]))
    ):
        readers, ids = factory(family, options)
        reader, events = readers.new(), []
        for at, token_id in enumerate(ids, 1):
            end: dict[str, Any] = {"finish": "stop"} if at == len(ids) else {}
            events += reader.push(Output(request=1, tokens=[token_id], **end)).events
            wire = msgspec.msgpack.encode(reader.state())
            reader = readers.new(msgspec.msgpack.decode(wire, type=ParserState))
        own = [
            msgspec.structs.replace(event, id="") if isinstance(event, ToolCall) else event
            for event in merged(events)
        ]
        assert own == read(readers, [ids], finish="stop")


def test_interleaved_choices_are_parsed_independently() -> None:
    readers, ids = factory("qwen3")
    three = [readers.new() for _ in range(3)]
    lengths = [len(ids), len(ids) - 9, 25]
    events: list[list[Event]] = [[], [], []]
    for at in range(len(ids)):
        for reader, own, length in zip(three, events, lengths, strict=True):
            if at < length:
                own += reader.push(Output(request=1, tokens=[ids[at]])).events
    for reader, own, length in zip(three, events, lengths, strict=True):
        own += reader.push(Output(request=1, finish="length")).events
        named = [
            msgspec.structs.replace(event, id="") if isinstance(event, ToolCall) else event
            for event in merged(own)
        ]
        assert named == read(readers, [ids[:length]], finish="length")


def test_no_token_is_lost() -> None:
    readers, ids = factory("qwen3")
    reader, sent = readers.new(), []
    for token_id in ids:
        sent += reader.push(Output(request=1, tokens=[token_id])).token_ids
    sent += reader.push(Output(request=1, finish="stop")).token_ids
    assert sent == ids


def test_half_a_character_before_a_marker_is_emitted_before_it() -> None:
    readers, _ = factory("qwen3")
    tokenizer = tokenizer_of("qwen3")
    half = tokenizer.encode("𒀀", False)[:1]
    think = tokenizer.encode("<think>a</think>b", False)
    expected = [Content("\ufffd"), Reasoning("a"), Content("b"), Finished("stop")]
    assert read(readers, [half + think], finish="stop") == expected
    assert read(readers, [[i] for i in half + think], finish="stop") == expected
