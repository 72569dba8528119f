"""A chat answered in one request equals one that is rendered, generated and derendered, for every
format, whole and in any cut of the stream.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import tokenizers

from gateway.formats.events import ToolCall
from gateway.formats.lexicon import Lexicon, MarkerToken, Piece
from gateway.formats.reasoning import REASONING
from gateway.formats.registry import REASONING_OF_ANSWER_SYNTAX, TOOLS, parser_state
from gateway.served_model import ModelOptions, ServedModel
from protocol.config.gateway import ModelConfig
from protocol.engine.messages import Output, Usage
from tests.property.test_tool_grammars import SAMPLES
from tests.support.examples import examples
from tests.support.formats import Call, Fixture, Sample, lexicon, units
from tests.support.http import fold_chat_response, fold_chat_stream
from tests.support.rendering import Trip
from tests.support.response_templates import TEMPLATES
from tests.support.scripted_engine import EOS, TEMPLATE, byte_tokenizer, scripted_card
from tests.support.served import LIMITS
from tests.support.templates import UnlimitedTemplates

BY_NAME = {sample.name: (sample, list(cases)) for sample, cases in SAMPLES}
SUFFIX = " (template)"
ROOMY = msgspec.structs.replace(LIMITS, max_len=1 << 12, num_blocks=1 << 10)
"""Limits for prompts that describe tools, one token per byte."""
CUT_IN_TWO = ("hermes", "deepseek_v3", "qwen3_coder", "openai")
"""One format whose calls are JSON, one with JSON after a name, one with tags, and one that covers
the whole answer.
"""


def test_every_format_has_a_sample() -> None:
    read = [sample.format.tools for sample, _ in SAMPLES]
    assert all(syntax in read for syntax in TOOLS.values())


@cache
def model_of(name: str) -> tuple[ServedModel, Lexicon]:
    """Return a model and its lexicon. The tokens are single bytes and the sample's markers and
    parts. Options choose the model's formats.
    """
    sample, _ = BY_NAME[name]
    found = sample.format.markers() if sample.markers is None else sample.markers
    markers = [marker for marker in found if not any(part in marker for part in sample.parts)]
    inner = byte_tokenizer(markers)
    inner.add_special_tokens(list(sample.parts))
    options: dict[str, Any] = {"tool_format": "hf", "reasoning_format": "hf"}
    template = None
    if name.endswith(SUFFIX):
        template = json.dumps(TEMPLATES[name.removesuffix(SUFFIX)])
    else:
        options = {"tool_format": tools_of(sample), "reasoning_format": reasoning_of(sample)}
    return model_with(inner, template, **options), lexicon_of(inner, markers, sample.parts)


def model_with(
    inner: tokenizers.Tokenizer, response_template: str | None = None, **options: Any
) -> ServedModel:
    card = scripted_card(
        vocab_size=inner.get_vocab_size(),
        tokenizer=inner.to_str().encode(),
        chat_template=TEMPLATE + "{% for tool in tools or [] %}{% endfor %}",
        response_template=response_template,
    )
    templates = UnlimitedTemplates()
    chosen = ModelOptions.from_config(ModelConfig(**options), templates)
    return ServedModel.from_card(card, ROOMY, chosen, templates)


def lexicon_of(
    inner: tokenizers.Tokenizer, markers: Sequence[str], parts: Sequence[str]
) -> Lexicon:
    ids = inner.get_vocab()
    return Lexicon({ids[marker]: marker for marker in markers}, {ids[part]: part for part in parts})


def tools_of(sample: Sample) -> str:
    names = (name for name, syntax in TOOLS.items() if syntax == sample.format.tools)
    return next(names, sample.name.split()[0])  # a format fitted to a vocabulary has no name


def reasoning_of(sample: Sample) -> str:
    whole = {tools: name for name, tools in REASONING_OF_ANSWER_SYNTAX.items()}
    if tools_of(sample) in whole:
        return whole[tools_of(sample)]
    names = (name for name, format in REASONING.items() if format == sample.format.reasoning)
    return next(names, "none")


def ids_of(text: str, words: Lexicon) -> list[int]:
    by_text = {piece.text: token for token, piece in words.pieces.items()}  # type: ignore[union-attr]

    def ids(piece: Piece) -> list[int]:
        return list(piece.encode()) if isinstance(piece, str) else [by_text[piece.text]]

    assert all(isinstance(piece, MarkerToken) for piece in words.pieces.values() if not words.parts)
    return [token for piece in units(text, words) for token in ids(piece)]


def body_of(sample: Sample, fixture: Fixture, **more: Any) -> dict[str, Any]:
    named = {event.name: None for event in fixture.events if isinstance(event, ToolCall)}
    declared = named | {tool.name: tool.parameters for tool in sample.tools or ()}
    tools = [
        {"type": "function", "function": {"name": name} | ({"parameters": p} if p else {})}
        for name, p in declared.items()
    ]
    hello = [{"role": "user", "content": "Hi"}]
    return {"messages": hello, "model": "scripted", **({"tools": tools} if tools else {}), **more}


def has_ids(fixture: Fixture) -> bool:
    """Return whether the answer's text has the ids of its calls."""
    calls = [event for event in fixture.events if isinstance(event, ToolCall)]
    return bool(calls) and all(call.id in fixture.text for call in calls)


def outputs_of(deltas: Sequence[Sequence[int]], *, complete: bool = True) -> list[Output]:
    """Return the engine's outputs. The last one has the end token, or the finish reason "length" if
    not `complete`.
    """
    news = [Output(request=0, tokens=list(delta)) for delta in deltas]
    total = sum(map(len, deltas)) + complete
    usage = Usage(prompt_tokens=3, generated_tokens=total, cached_tokens=2)
    if complete:
        return [*news, Output(request=0, tokens=[EOS], finish="stop", stop_token=EOS, usage=usage)]
    return [*news, Output(request=0, finish="length", usage=usage)]


LONGEST = examples((12, 60), (3, 12, 60))
"""The most tokens of a delta. Each cut uses one of these numbers."""


def cuts(ids: list[int], seed: int) -> list[list[int]]:
    rng, deltas, start = random.Random(seed), [], 0
    most = rng.choice(LONGEST)
    while start < len(ids):
        end = start + rng.randint(1, most)
        deltas.append(ids[start:end])
        start = end
    return deltas


def told(whole: dict[str, Any], *, with_ids: bool, with_usage: bool) -> dict[str, Any]:
    """Return a whole answer without its time and, unless the options are set, without usage and the
    ids of calls. `with_ids` is for models that write the ids themselves.
    """
    seen = {**whole, "created": 0, "usage": whole["usage"] if with_usage else None}
    if not with_ids:
        for choice in seen["choices"]:
            for call in choice["message"].get("tool_calls", ()):
                call["id"] = ""
    return seen


def heard(choices: dict[int, dict[str, Any]], *, with_ids: bool) -> dict[int, dict[str, Any]]:
    for choice in choices.values():
        if not with_ids:
            choice["calls"] = [("", name, arguments) for _, name, arguments in choice["calls"]]
    return choices


def check(trip: Trip, *, with_ids: bool, with_usage: bool = True) -> dict[int, dict[str, Any]]:
    """Check that a chat, and the same chat rendered, generated and derendered, have the same
    answer, whole and streamed. Return its choices.
    """
    kept = {"with_ids": with_ids, "with_usage": with_usage}
    whole, _ = trip.chat()
    response, chunks = trip.generate(trip.render_chat())
    derendered = trip.derender_chat(response)
    assert told(derendered, **kept) == told(whole, **kept)
    streamed = trip.derender_stream(chunks, trip.derender_chat_chunk)
    expected = heard(fold_chat_response(whole), with_ids=with_ids)
    assert heard(fold_chat_stream(streamed), with_ids=with_ids) == expected
    assert streamed[-1]["usage"] == (whole["usage"] if with_usage else derendered["usage"])
    return expected


@pytest.mark.parametrize("name", BY_NAME)
def test_an_answer_that_took_the_way_over_tokens_is_that_of_a_chat(name: str) -> None:
    sample, cases = BY_NAME[name]
    model, words = model_of(name)
    num_calls = 0
    for seed, fixture in enumerate(cases):
        ids = ids_of(fixture.text, words)
        # With few examples, every second answer is also cut off.
        for complete in (True, False)[: 2 - seed % examples(2, 1)]:
            ends = ids if complete else ids[: len(ids) * 2 // 3]
            outputs = outputs_of(cuts(ends, seed), complete=complete)
            trip = Trip(model, body_of(sample, fixture), outputs)
            said = check(trip, with_ids=has_ids(fixture))
            num_calls += len(said[0]["calls"])
    assert num_calls >= 3


def two_parts(ids: list[int]) -> Iterator[list[list[int]]]:
    """Yield the ways to cut the ids in two. With few examples, one of four that cut a word."""
    for at in range(1, len(ids)):
        cuts_a_word = all(token < 128 and chr(token).isalnum() for token in ids[at - 1 : at + 1])
        if not cuts_a_word or at % examples(4, 1) == 0:
            yield [ids[:at], ids[at:]]


@pytest.mark.parametrize("name", CUT_IN_TWO)
def test_no_cut_of_a_stream_changes_what_is_derendered(name: str) -> None:
    sample, cases = BY_NAME[name]
    model, words = model_of(name)
    for fixture in [case for case in cases if case.name in ("one call", "reasoning before")]:
        ids = ids_of(fixture.text, words)
        for deltas in [[[token] for token in ids], *two_parts(ids)]:
            trip = Trip(model, body_of(sample, fixture), outputs_of(deltas))
            check(trip, with_ids=has_ids(fixture))


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_comes_back_in_every_reasoning_format(name: str) -> None:
    format = REASONING[name]
    markers = [*format.markers(), "<tool_call>", "</tool_call>"]
    inner = byte_tokenizer(dict.fromkeys(markers))
    model = model_with(inner, tool_format="hermes", reasoning_format=name)
    words = lexicon_of(inner, markers, ())
    opens, closes = (*format.open, "")[0], (*format.close, "")[0]
    calls = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    text = f"{opens}\nLet me see 語.\n{closes}\n\nHere it is. {calls}"
    tools = [{"type": "function", "function": {"name": "now"}}]
    for kwargs in ({}, {"enable_thinking": True}, {"thinking": False}):
        for more in ({}, {"include_reasoning": False}, {"parallel_tool_calls": False}):
            body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, **more}
            body |= {"chat_template_kwargs": kwargs, "model": "scripted"}
            deltas = cuts(ids_of(text, words), len(kwargs) + len(more))
            # A chat ends after its only call. /generate does not parse calls, so it continues.
            many = more.get("parallel_tool_calls", True)
            check(Trip(model, body, outputs_of(deltas)), with_ids=False, with_usage=many)


def test_ids_that_the_model_writes_are_among_what_was_compared() -> None:
    kept = {name for name, (_, cases) in BY_NAME.items() if any(map(has_ids, cases))}
    assert {"kimi_k2", "mistral (v13)"} <= kept


LONG, SHORT = 10_000, 100


def memory(sample: Sample, head: str, num_chars: int) -> int:
    """Return the size in bytes of the parser's serialised state after `head` and a text of this
    length, in deltas of two words."""
    words = lexicon(sample, tokens=True)
    machine = sample.format.parser(words, tools=sample.tools)
    delta = "so on. "
    for piece in [*units(head, words), *[delta] * (num_chars // len(delta))]:
        machine.push(piece)
    return len(msgspec.msgpack.encode(parser_state(machine)))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_state_of_a_parser_does_not_grow_with_its_output(name: str) -> None:
    """The output is content, reasoning, or a string in a call's arguments."""
    sample, _ = BY_NAME[name]
    call = sample.write([Call("run", {"code": "X", "path": "Y"})], 0)
    heads = ["", call[: call.index("X")]]
    if sample.think is not None:
        thought = sample.think("X")
        heads.append(thought[: thought.index("X")])
    for head in heads:
        short, long = (memory(sample, head, num_chars) for num_chars in (SHORT, LONG))
        assert long <= short + 16
