"""For every syntax, events do not depend on how the tokens of an answer are cut.

If the tokenizer of the format's family is available, all answers are read. Other formats use the
tokenizer of another family, so most of their markers are spelt out, and only some answers are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
import pytest

from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.events import Event, Finished, ToolCall, merged
from gateway.formats.reasoning import REASONING
from gateway.formats.registry import REASONING_OF_ANSWER_SYNTAX, TOOLS, bind
from protocol.engine.messages import Output
from tests.property import test_reasoning
from tests.property.tool_samples import ANSWERS
from tests.support.cuts import all_cuts
from tests.support.formats import JOINT, ROWS, Fixture, FormatRow, Sample, without_ids
from tests.support.tokenizers import REAL_NAMES, tokenizer_of

STREAMS = {sample.name: (sample, cases) for sample, cases in ANSWERS}
FAMILY = {
    "hermes": "qwen3",
    "qwen3_coder": "qwen3",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "llama3_json": "llama3_1",
    "llama3_json (marker)": "llama3_1",
}
"""Format -> the tokenizer of its family."""
VOCABULARIES = [
    *((name, FAMILY.get(name, "qwen3")) for name in STREAMS),
    *((name, real) for name, own in FAMILY.items() if (real := f"real {own}") in REAL_NAMES),
]
"""(format, tokenizer)."""
NAMES = ("closing tag in a string", "nested and unicode", "reasoning before and after")


def tokens_of(text: str, family: str) -> list[int]:
    """Return the ids of a text. Text on both sides of a joint is encoded separately, so a spelt-out
    marker is never one token.
    """
    tokenizer = tokenizer_of(family)
    return [token for part in text.split(JOINT) for token in tokenizer.encode(part, False)]


def read(
    sample: Sample, fixture: Fixture, readers: ParserFactory, cut: Sequence[Sequence[int]]
) -> list[Event]:
    reader, events = readers.new(), []
    for at, ids in enumerate(cut, 1):
        finish: Literal["stop"] | None = "stop" if at == len(cut) else None
        events += reader.push(Output(request=1, tokens=list(ids), finish=finish)).events
    return without_ids(merged(events))


@pytest.mark.parametrize(("name", "family"), VOCABULARIES)
def test_the_cut_of_the_tokens_never_changes_the_events(name: str, family: str) -> None:
    sample, found = STREAMS[name]
    tokenizer = tokenizer_of(family)
    bound = bind(sample.format, tokenizer)
    row = FormatRow(f"{name}, tokens of {family}")
    ROWS.append(row)
    for fixture in found:
        prose = "prose" in fixture.name  # a spelt-out tag is a tag, unless it is a token
        if (name in FAMILY or fixture.name in NAMES) and not (
            prose and sample.tags[0] not in bound.lexicon.tokens.values()
        ):
            row.fixtures += 1
            options = AnswerOptions(
                format=bound, tools=sample.tools, starts_inside=fixture.starts_inside
            )
            _compare(row, sample, fixture, ParserFactory(tokenizer, None, options), family)
    assert row.fixtures
    assert not row.differences, row.first


def _compare(
    row: FormatRow, sample: Sample, fixture: Fixture, readers: ParserFactory, family: str
) -> None:
    called = any(isinstance(event, ToolCall) for event in fixture.events)
    ends = [Finished("tool_calls" if called else "stop")]
    whole = msgspec.to_builtins(without_ids(fixture.events)) + msgspec.to_builtins(ends)
    for cut in all_cuts(tokens_of(fixture.text, family), seed=len(fixture.text)):
        said = msgspec.to_builtins(read(sample, fixture, readers, cut))
        row.compare(said, whole, partial("{}: {}: {}".format, fixture.name, cut, said))


def test_no_format_is_left_out() -> None:
    """Several names may mean one format, so formats are compared by syntax and markers."""
    syntaxes = [sample.format.tools for sample, _ in STREAMS.values() if sample.format.tools]
    read_here = {(type(syntax), syntax.markers()) for syntax in syntaxes}
    assert [name for name, x in TOOLS.items() if (type(x), x.markers()) not in read_here] == []
    assert set(REASONING_OF_ANSWER_SYNTAX.values()) <= STREAMS.keys()
    assert {*test_reasoning.BLOCKS, "minimax_m2_append_think"} == REASONING.keys()
