"""Formats that are no JSON, read from the tokens of a real vocabulary, however they are cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import msgspec
import pytest

from gateway.output.events import Event, Finished, ToolCall, merged
from gateway.output.formats import bind
from gateway.output.reader import AnswerOptions, ReaderFactory
from protocol.messages import Output
from tests.property import (
    test_tools_arg_pairs,
    test_tools_gemma,
    test_tools_messages,
    test_tools_nested,
    test_tools_pythonic,
    test_tools_xml,
    test_tools_xtml,
)
from tests.support.formats import JOINT, Fixture, Sample, fixtures, without_ids
from tests.support.tokenizers import real_tokenizer

STREAMS = {
    **{s.name: (s, fixtures(s)) for s in test_tools_xml.SAMPLES},
    **{s.name: (s, fixtures(s)) for s in test_tools_arg_pairs.SAMPLES},
    **{s.name: (s, test_tools_pythonic.cases(s)) for s in test_tools_pythonic.SAMPLES},
    **{s.name: (s, fixtures(s)) for s in test_tools_gemma.SAMPLES},
    **{s.name: (s, fixtures(s)) for s in test_tools_nested.SAMPLES},
    **{s.name: (s, test_tools_messages.cases(s)) for s in test_tools_messages.SAMPLES},
    "kimi_k3": (test_tools_xtml.K3, test_tools_xtml.cases()),
}
NAMES = ("closing tag in a string", "nested and unicode", "reasoning before and after")


def token_cuts(ids: list[int], seed: int) -> Iterator[list[list[int]]]:
    """Uncut, one by one, every cut in two, and 200 random ones."""
    yield [ids]
    yield [[token] for token in ids]
    for at in range(1, len(ids)):
        yield [ids[:at], ids[at:]]
    rng = random.Random(seed)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, len(ids)), min(len(ids) - 1, rng.randint(2, 20))))
        yield [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]


def tokens_of(text: str) -> list[int]:
    """Each part between joints for itself: so what is spelt out is never one token."""
    tokenizer = real_tokenizer("qwen3")
    return [token for part in text.split(JOINT) for token in tokenizer.encode(part, False)]


def read(
    sample: Sample, fixture: Fixture, readers: ReaderFactory, cut: list[list[int]]
) -> list[Event]:
    reader, events = readers.new(), []
    for at, ids in enumerate(cut, 1):
        finish = "stop" if at == len(cut) else None
        events += reader.push(Output(request=1, tokens=ids, finish=finish)).events
    return without_ids(merged(events))


@pytest.mark.parametrize("name", STREAMS)
def test_the_way_the_tokens_are_cut_never_changes_what_is_said(name: str) -> None:
    sample, found = STREAMS[name]
    bound = bind(sample.format, real_tokenizer("qwen3"))
    for fixture in (case for case in found if case.name in NAMES):
        options = AnswerOptions(
            format=bound, tools=sample.tools, starts_inside=fixture.starts_inside
        )
        readers = ReaderFactory(real_tokenizer("qwen3"), None, options)
        called = any(isinstance(event, ToolCall) for event in fixture.events)
        ends = [Finished("tool_calls" if called else "stop")]
        whole = msgspec.to_builtins(without_ids(fixture.events)) + msgspec.to_builtins(ends)
        for cut in token_cuts(tokens_of(fixture.text), seed=len(fixture.text)):
            said = msgspec.to_builtins(read(sample, fixture, readers, cut))
            assert said == whole, (fixture.name, cut)
