"""Markers of several tokens, some of them special, read from real token streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from gateway.formats.choice_parser import AnswerOptions, ParserFactory, ParserState, ReadOptions
from gateway.formats.events import (
    Content,
    Event,
    Finished,
    OutputWarning,
    Reasoning,
    ToolCall,
    merged,
)
from gateway.formats.registry import Format, bind, format_of
from gateway.formats.response_template_loader import load
from gateway.text.tokenizer import Tokenizer
from protocol.engine.messages import Output
from tests.property import test_tools_nested, test_tools_response_template, test_tools_xml
from tests.support.cuts import all_cuts
from tests.support.formats import (
    JOINT,
    Call,
    ContentPart,
    Fixture,
    ReasoningPart,
    Sample,
    answers,
    dumps,
    expected,
    fixtures,
    means_the_same_spelt_out,
    without_ids,
)
from tests.support.response_templates import LLAMA
from tests.support.scripted_engine import byte_tokenizer
from tests.support.tokenizers import card_of, tokenizer_of

SAMPLES = {
    **{s.name: (s, fixtures(s)) for s in test_tools_nested.SAMPLES},
    **{s.name: (s, fixtures(s)) for s in test_tools_xml.SAMPLES if s.parts},
    **{
        f"{s.name} (template)": (s, test_tools_response_template.cases(s))
        for s in test_tools_response_template.SAMPLES
        if s.parts
    },
}
NAMES = ("three calls", "closing tag in a string", "reasoning before and after")


def vocabulary_of(sample: Sample) -> Tokenizer:
    """Return a tokenizer with a token for every byte, the sample's parts as special tokens, and
    `<think>` and `</think>` as added tokens.
    """
    inner = byte_tokenizer()
    inner.add_special_tokens([AddedToken(part, normalized=False) for part in sample.parts])
    inner.add_tokens([AddedToken(marker, normalized=False) for marker in ("<think>", "</think>")])
    return Tokenizer(card_of(inner.to_str().encode()))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text. Text on both sides of a joint is encoded separately, so a spelt-out
    marker is never one token.
    """
    return [token for part in text.split(JOINT) for token in tokenizer.encode(part, False)]


def read(readers: ParserFactory, cut: Sequence[Sequence[int]], finish: str = "stop") -> list[Event]:
    """Return the events of an answer that arrives in the parts of `cut`. If these are fewer than
    four, each is read by a new parser that continues from the state of the one before.
    """
    reader, events = readers.new(), []
    for at, ids in enumerate(cut, 1):
        last: Any = finish if at == len(cut) else None
        events += reader.push(Output(request=1, tokens=list(ids), finish=last)).events
        if len(cut) < 4:
            wire = msgspec.msgpack.encode(reader.state())
            reader = readers.new(msgspec.msgpack.decode(wire, type=ParserState))
    return without_ids(merged(events))


def readers_of(tokenizer: Tokenizer, format: Format, **options: Any) -> ParserFactory:
    read_options = ReadOptions(skip_special_tokens=options.pop("skip", True))
    answer = AnswerOptions(format=bind(format, tokenizer), **options)
    return ParserFactory(tokenizer, read_options, answer)


def check_cuts(sample: Sample, fixture: Fixture, tokenizer: Tokenizer) -> None:
    readers = readers_of(
        tokenizer, sample.format, tools=sample.tools, starts_inside=fixture.starts_inside
    )
    called = any(isinstance(event, ToolCall) for event in fixture.events)
    whole = [*without_ids(fixture.events), Finished("tool_calls" if called else "stop")]
    for cut in all_cuts(ids_of(tokenizer, fixture.text), seed=len(fixture.text)):
        said = read(readers, cut)
        assert msgspec.to_builtins(said) == msgspec.to_builtins(whole), (fixture.name, cut)


@pytest.mark.parametrize("name", SAMPLES)
def test_however_the_tokens_are_cut_their_markers_are_found(name: str) -> None:
    sample, found = SAMPLES[name]
    tokenizer = vocabulary_of(sample)
    bound = bind(sample.format, tokenizer)
    assert set(bound.lexicon.parts.values()) <= set(sample.parts)
    assert bound.lexicon.parts
    for fixture in found:
        if fixture.name in NAMES and means_the_same_spelt_out(fixture):
            check_cuts(sample, fixture, tokenizer)


# ---- a real vocabulary
def llama(calls: Sequence[Call], before: int) -> str:
    return "".join(
        f"<|start_header_id|>call:{call.name}<|end_header_id|>\n{dumps(call.arguments)}<|eot_id|>"
        for call in calls
    )


def llama_message(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


LLAMA_SAMPLE = Sample("llama", Format(load(LLAMA)), llama, tags=("<|eot_id|>",))


def llama_cases() -> list[Fixture]:
    found = []
    for name, parts in answers("<|eot_id|>"):
        text = ""
        for part in parts:
            match part:
                case ContentPart(said):
                    text += llama_message("assistant", said)
                case ReasoningPart(thought):
                    text += llama_message("thinking", thought)
                case calls:
                    text += llama(calls, 0)
        found.append(Fixture(name, text, expected(LLAMA_SAMPLE, parts)))
    return found


def test_headers_of_special_tokens_are_read_from_a_real_vocabulary() -> None:
    tokenizer = tokenizer_of("llama3_1")
    bound = bind(LLAMA_SAMPLE.format, tokenizer)
    assert set(bound.lexicon.tokens.values()) == {"<|eot_id|>"}
    assert set(bound.lexicon.parts.values()) == {"<|start_header_id|>", "<|end_header_id|>"}
    for fixture in llama_cases():
        check_cuts(LLAMA_SAMPLE, fixture, tokenizer)


# ---- what is no marker
PLAMO = test_tools_nested.PLAMO
TOKENIZER = vocabulary_of(PLAMO)
FORMAT = format_of("plamo3", "plamo3")


@pytest.mark.parametrize(
    "text",
    [
        "a:plamo|>b",
        "a<|plamo:begin_b",
        "a<|plamo:begin_<|plamo:end_b",
        "a<|plamo:constrain|>b<|plamo:msg|>",
        "<|plamo:msg|>ab",
    ],
)
def test_a_special_token_that_is_no_part_of_a_marker_has_no_text(text: str) -> None:
    for cut in all_cuts(ids_of(TOKENIZER, text), seed=1):
        assert read(readers_of(TOKENIZER, FORMAT), cut) == [Content("ab"), Finished("stop")]
        shown = [Content(text), Finished("stop")]
        assert read(readers_of(TOKENIZER, FORMAT, skip=False), cut) == shown


def test_markers_are_found_even_if_special_tokens_have_text() -> None:
    fixture = next(case for case in fixtures(PLAMO) if case.name == "three calls")
    readers = readers_of(TOKENIZER, PLAMO.format, skip=False)
    for cut in list(all_cuts(ids_of(TOKENIZER, fixture.text), seed=1))[::20]:
        assert read(readers, cut)[:-1] == without_ids(fixture.events)


def test_an_answer_cut_off_anywhere_shows_no_markup() -> None:
    text = "<|plamo:begin_think:plamo|>a<|plamo:end_think:plamo|>b" + test_tools_nested.plamo3(
        [Call("now", {"tz": "é"})], 0
    )
    ids = ids_of(TOKENIZER, text)
    readers = readers_of(TOKENIZER, FORMAT)
    for end in range(len(ids) + 1):
        events = read(readers, [ids[:end]], "length")
        assert "".join(e.text for e in events if isinstance(e, Content)) in ("", "b")
        assert "".join(e.text for e in events if isinstance(e, Reasoning)) in ("", "a")
        assert not [event for event in events if isinstance(event, OutputWarning)]


def test_half_a_character_before_a_part_is_emitted_before_it() -> None:
    ids = [0xE2, 0x82, *ids_of(TOKENIZER, "<|plamo:begin_think:plamo|>a")]
    expected_events = [Content("\ufffd"), Reasoning("a"), Finished("stop")]
    for cut in all_cuts(ids, seed=2):
        assert read(readers_of(TOKENIZER, FORMAT), cut) == expected_events


def test_an_added_token_is_a_marker_and_an_ordinary_word_is_not() -> None:
    words = bind(format_of("phi4_mini_json", "granite"), tokenizer_of("smollm2")).lexicon
    assert words.tokens == words.parts == {}
    inner = byte_tokenizer()
    inner.add_tokens([AddedToken("<tool_call>", single_word=True, normalized=False)])
    added = Tokenizer(card_of(inner.to_str().encode()))
    assert list(bind(format_of("hermes", None), added).lexicon.tokens.values()) == ["<tool_call>"]
    assert added.added_tokens[259] == "<tool_call>"
