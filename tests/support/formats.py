"""Test kit for formats. It writes abstract answers in a format, cuts them in every way, and parses
them.

An abstract answer is a list of parts: content, reasoning and calls. A `Sample` describes how one
format writes them. The expected events follow from the parts alone. `fixtures` makes a sample's
texts, `check` parses each text in every way in which it can be cut, and `table` shows the totals of
a run.

A text is cut between *units*: characters, and markers that are tokens of the vocabulary. In content
and arguments, `spelt` keeps a marker from being written as its token.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import msgspec

from gateway.formats.argument_types import is_json
from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import PARSE_FAILED, DeclaredTool, markup_without_call
from gateway.formats.events import (
    Content,
    Event,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
    merged,
)
from gateway.formats.harmony import Harmony
from gateway.formats.lexicon import Lexicon, Piece
from gateway.formats.reasoning import ReasoningFormat
from gateway.formats.registry import Format, parser_state
from tests.support.cpu_time import best_cpu_s
from tests.support.cuts import all_cuts, chosen_places
from tests.support.examples import examples

JOINT = "\ue000"
"""Stands between the letters of a marker that is spelt out. It is removed before parsing."""


def spelt(marker: str) -> str:
    """Return `marker` with a JOINT between its letters, so that it is not written as one token."""
    return JOINT.join(marker)


@dataclass(frozen=True)
class Call:
    """A call of tool `name`. Strings in its arguments may contain `spelt` markers."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ContentPart:
    text: str


@dataclass(frozen=True)
class ReasoningPart:
    text: str


Part = ContentPart | ReasoningPart | Sequence[Call]
"""A part of an answer. A list of calls is written as one group."""


@dataclass(frozen=True)
class Sample:
    """How one format writes answers.

    name        name in the table of results
    write       writes a group of calls, given the number of calls before it
    think       writes a block of reasoning; None: the format has no reasoning
    arguments   returns the expected JSON text of arguments
    call_id     returns the expected id of the call with a given index; None: the parser makes the
                ids
    markers     those of the format's markers that are tokens in the family's vocabulary; None: all
                of them
    parts       special tokens of the family's vocabulary that are parts of spelt-out markers
    tags        markers that have no meaning inside strings and in prose. Some have a meaning in
                prose when they are spelt out; such prose is parsed only if the marker is a token
    spelt_ok    whether the format can also be parsed if no marker is a token
    max_calls   maximum number of calls in one group
    only_first  whether calls are recognised only before any content
    trims       whether blanks at both ends of a string argument are markup
    tools       tools of the request; None: unknown
    """

    name: str
    format: Format
    write: Callable[[Sequence[Call], int], str]
    think: Callable[[str], str] | None = None
    arguments: Callable[[dict[str, Any]], str] = lambda values: dumps(values)
    call_id: Callable[[int, Call], str] | None = None
    markers: tuple[str, ...] | None = None
    parts: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    spelt_ok: bool = True
    max_calls: int = 99
    only_first: bool = False
    trims: bool = False
    tools: tuple[DeclaredTool, ...] | None = None


@dataclass(frozen=True)
class Fixture:
    """One answer as text, and its expected events.

    starts_inside  whether the prompt has opened the reasoning
    complete       whether the model ended the answer by itself
    """

    name: str
    text: str
    events: list[Event]
    starts_inside: bool = False
    complete: bool = True


def dumps(values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)


def is_json_object(text: str) -> bool:
    return is_json(text) and text.lstrip(" \t\r\n").startswith("{")


# ---- abstract answers


def answers(tag: str) -> Iterator[tuple[str, list[Part]]]:
    """Yield (name, parts) of each abstract answer. `tag` is a marker that has no meaning inside
    strings."""
    weather = Call("get_weather", {"city": "Oslo", "days": 3})
    tricky = {"code": f'if a < b: print("{spelt(tag)}") }}}}]', "path": "C:\\new\\", "e": ""}
    nested = {"a": {"b": [1, 2.5, None, True, {"c": []}], "語": "👩🏽‍🚀 é\u2028"}, "n": -1e-9}
    yield "text alone", [ContentPart("Hello, world! 語 {a} [b] <c>")]
    yield "one call", [[weather]]
    yield "three calls", [[weather, Call("now", {"tz": "UTC"}), Call("get_weather", {"city": "é"})]]
    yield "no arguments", [[Call("now")]]
    yield "nested and unicode", [[Call("f_1", nested)]]
    yield "closing tag in a string", [[Call("run", tricky), weather]]
    yield "newlines around a string", [[Call("run", {"code": "\n\na\n\n", "path": "\n"})]]
    yield (
        "prose that mentions the tag",
        [ContentPart(f"Write {spelt(tag)} to end, or {spelt(tag)[:9]}")],
    )
    yield "text before a call", [ContentPart("I will look.\n\nOne moment"), [weather]]
    yield "reasoning before", [ReasoningPart("Hm.\n\nLet me see"), ContentPart("Here."), [weather]]
    yield "reasoning alone", [ReasoningPart("a <b> c"), ContentPart("It is so.")]
    yield (
        "reasoning before and after",
        [ReasoningPart("a"), ContentPart("b"), ReasoningPart("c"), [weather]],
    )
    yield "reasoning, then calls", [ReasoningPart("x"), [weather, weather]]
    yield (
        "reasoning around a call",
        [ReasoningPart("a"), [weather], ReasoningPart("c"), ContentPart("b")],
    )


def fixtures(sample: Sample) -> list[Fixture]:
    """Return a fixture for each abstract answer that the sample's format can express."""
    found = []
    for name, parts in answers(sample.tags[0] if sample.tags else "</none>"):
        if any(isinstance(part, ReasoningPart) for part in parts) and sample.think is None:
            continue
        if any(isinstance(part, list) and len(part) > sample.max_calls for part in parts):
            continue
        if sample.trims and name == "newlines around a string":
            continue
        if sample.only_first and any(isinstance(part, ContentPart) for part in parts[:-1]):
            continue
        found.append(written(sample, name, parts))
        if "prose" in name:
            found[-1].events.extend(warned_about(sample))
    return found


def warned_about(sample: Sample) -> list[Event]:
    """Return the warning about prose that mentions `tags[0]`, if its letters are markup of calls.
    They are not if the marker is a token of the family's vocabulary."""
    tools = sample.format.tools
    signs = tools.signs() if isinstance(tools, CallSyntax | Harmony) else ()
    tokens = sample.format.markers() if sample.markers is None else sample.markers
    found = [sign for sign in signs if sign in sample.tags[0] and sign not in tokens]
    return [OutputWarning(PARSE_FAILED, markup_without_call(sign)) for sign in found[:1]]


def written(sample: Sample, name: str, parts: Sequence[Part]) -> Fixture:
    text, index = "", 0
    for part in parts:
        match part:
            case ContentPart(prose):
                text += prose
            case ReasoningPart(thought):
                assert sample.think is not None
                text += sample.think(thought)
            case calls:
                text += sample.write(calls, index)
                index += len(calls)
    return Fixture(name, text, expected(sample, parts))


def expected(sample: Sample, parts: Sequence[Part]) -> list[Event]:
    events: list[Event] = []
    index = 0
    ours = itertools.count(1)
    for part in parts:
        match part:
            case ContentPart(prose):
                events.append(Content(prose.replace(JOINT, "")))
            case ReasoningPart(thought):
                events.append(Reasoning(thought.replace(JOINT, "")))
            case calls:
                for call in calls:
                    native = sample.call_id(index, call) if sample.call_id else None
                    events += [
                        ToolCall(index, native or f"call_{next(ours)}", call.name),
                        ToolArguments(index, sample.arguments(call.arguments).replace(JOINT, "")),
                        ToolCallEnd(index),
                    ]
                    index += 1
    return merged(events)


# ---- reading


def lexicon(sample: Sample, *, tokens: bool) -> Lexicon:
    """Return a vocabulary in which every marker of the sample is a token, or none is."""
    markers = sample.format.markers() if sample.markers is None else sample.markers
    return shared_lexicon(markers if tokens else ())


def lexicon_of_parts(sample: Sample) -> Lexicon:
    """Return a vocabulary with the sample's parts as special tokens. Markers that contain parts are
    spelt out."""
    markers = tuple(
        marker
        for marker in sample.markers or ()
        if marker in sample.format.markers() and not any(part in marker for part in sample.parts)
    )
    return shared_lexicon(markers, sample.parts)


@cache
def shared_lexicon(markers: tuple[str, ...], parts: tuple[str, ...] = ()) -> Lexicon:
    """Return a vocabulary with these tokens. Its caches are filled once for all tests."""
    return Lexicon(dict(enumerate(markers, 1000)), dict(enumerate(parts, 2000)))


def vocabularies(sample: Sample, fixture: Fixture) -> Iterator[Lexicon]:
    """Yield all vocabularies in which the answer has the same meaning."""
    yield lexicon(sample, tokens=True)
    if sample.spelt_ok and means_the_same_spelt_out(fixture):
        yield lexicon(sample, tokens=False)
    if sample.parts and means_the_same_spelt_out(fixture):
        yield lexicon_of_parts(sample)


def units(text: str, words: Lexicon) -> list[Piece]:
    """Return the pieces of a text: its characters, and the tokens of `words` wherever their text
    occurs."""
    pattern, by_text = _vocabulary(tuple(words.pieces.values()))
    return [by_text.get(part, part) for part in pattern.findall(text) if part != JOINT]


@cache
def _vocabulary(pieces: tuple[Piece, ...]) -> tuple[re.Pattern[str], dict[str, Piece]]:
    """Return a pattern of the units of a text, and {text: piece}. Longer pieces go first."""
    by_text: dict[str, Piece] = {}
    for piece in pieces:
        by_text.setdefault(piece if isinstance(piece, str) else piece.text, piece)
    by_length = sorted(filter(None, by_text), key=lambda text: -len(text))
    return re.compile("|".join([*map(re.escape, by_length), "."]), re.DOTALL), by_text


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces of one delta, with neighbouring text joined."""
    try:
        return ["".join(pieces)]  # type: ignore[arg-type]
    except TypeError:  # some pieces are markers
        markers = [at for at, piece in enumerate(pieces) if type(piece) is not str]
    found: list[Piece] = []
    start = 0
    for at in (*markers, len(pieces)):
        if at > start:
            found.append("".join(pieces[start:at]))  # type: ignore[arg-type]
        found += pieces[at : at + 1]
        start = at + 1
    return found


class NumberedIds:
    """Makes ids of calls. It is not a method of `Reading`: a `Reading` and its parser would then
    refer to each other, and only the garbage collector frees such a cycle."""

    def __init__(self, num_made: int = 0) -> None:
        self.num_made = num_made

    def __call__(self) -> str:
        self.num_made += 1
        return f"call_{self.num_made}"


@dataclass
class Reading:
    """A parser of one answer, and the events so far. If `state`, a parser's serialised state, is
    given, the parser continues from it."""

    sample: Sample
    words: Lexicon
    fixture: Fixture
    state: bytes | None = None
    num_ids: int = 0  # made before this parser started
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = NumberedIds(self.num_ids)
        self.parser = self.sample.format.parser(
            self.words,
            tools=self.sample.tools,
            new_id=self.ids,
            starts_inside=self.fixture.starts_inside,
            state=None if self.state is None else msgspec.msgpack.decode(self.state),
        )

    def push(self, delta: Sequence[Piece]) -> None:
        for piece in joined(delta):
            self.events += self.parser.push(piece)

    def moved(self) -> Reading:
        """Return a new parser that continues from the present state. This parser is not changed."""
        state = msgspec.msgpack.encode(parser_state(self.parser))
        return Reading(
            self.sample, self.words, self.fixture, state, self.ids.num_made, [*self.events]
        )

    def finish(self) -> list[Event]:
        """Return the merged events of the whole answer."""
        return merged(self.events + self.parser.finish(self.fixture.complete))


def read(
    sample: Sample,
    deltas: Sequence[Sequence[Piece]],
    words: Lexicon,
    fixture: Fixture,
    *,
    moving: bool = False,
) -> list[Event]:
    """Return the merged events of the format's parser. If `moving`, a new parser continues after
    each delta."""
    reading = Reading(sample, words, fixture)
    for delta in deltas:
        reading.push(delta)
        if moving:
            reading = reading.moved()
    return reading.finish()


@dataclass
class FormatRow:
    """Results for one sample: number of answers, of cuts of all answers, and of cuts with
    unexpected events. `first` describes the first unexpected result."""

    name: str
    fixtures: int = 0
    cuts: int = 0
    differences: int = 0
    first: str = ""

    def compare(self, found: object, expected: object, where: Callable[[], str]) -> None:
        self.cuts += 1
        if found != expected:
            self.differences += 1
            self.first = self.first or where()


ROWS: list[FormatRow] = []
"""Results of all checks in this run, which are printed as one table at its end."""
CUT_SHORT = ("closing tag in a string", "one block")


def check(sample: Sample, cases: Sequence[Fixture]) -> FormatRow:
    """Parse every fixture in every cut and in every vocabulary. Return the results. A fixture named
    in CUT_SHORT is also cut off at the chosen places."""
    row = FormatRow(sample.name)
    ROWS.append(row)
    for fixture in cases:
        row.fixtures += 1
        for words in vocabularies(sample, fixture):
            check_cuts(row, sample, fixture, words)
            if fixture.name in CUT_SHORT:
                _check_cut_short(row, sample, fixture, words)
    row.fixtures += any(fixture.name in CUT_SHORT for fixture in cases)
    return row


def check_cuts(row: FormatRow, sample: Sample, fixture: Fixture, words: Lexicon) -> None:
    """Parse the fixture in every cut and in one vocabulary, and add the results to `row`. At the
    chosen places, another parser continues from the state of the one before."""
    pieces = units(fixture.text, words)
    for deltas in all_cuts(pieces, row.fixtures):
        found = read(sample, deltas, words, fixture)
        row.compare(found, fixture.events, partial(difference, fixture, deltas, found))
    places = [0, *chosen_places(pieces), len(pieces)]
    deltas = [pieces[start:end] for start, end in itertools.pairwise(places)]
    found = read(sample, deltas, words, fixture, moving=True)
    row.compare(found, fixture.events, lambda: f"{fixture.name}: moved to another process")


def _check_cut_short(row: FormatRow, sample: Sample, fixture: Fixture, words: Lexicon) -> None:
    """Cut the answer off at the chosen places.

    The events must not depend on how the remaining text was cut, and must not show any markup. One
    parser reads up to each place, and another one continues from its state. With few examples, a
    random cut in two is tried at every third place.
    """
    pieces = units(fixture.text, words)
    rng = random.Random(row.fixtures)
    whole = content(fixture.events)
    fixture = replace(fixture, complete=False)
    moving = Reading(sample, words, fixture)
    start = 0
    for number, end in enumerate(chosen_places(pieces)):
        head, at = pieces[:end], rng.randrange(end)
        short = replace(fixture, name=f"{fixture.name}, cut short at {end}")
        short = replace(short, events=read(sample, [head], words, short))
        shown = content(short.events).rstrip()
        row.compare(whole.startswith(shown), True, partial("{0.name}: markup".format, short))
        for unit in pieces[start:end]:
            moving.push([unit])
        start = end
        found = moving.moved().finish()
        row.compare(found, short.events, partial(difference, short, [[p] for p in head], found))
        if number % examples(3, 1):
            continue
        found = read(sample, [head[:at], head[at:]], words, short)
        row.compare(found, short.events, partial(difference, short, [head[:at], head[at:]], found))


def means_the_same_spelt_out(fixture: Fixture) -> bool:
    """Return whether the answer has the same meaning if no marker is a token. Prose about a marker
    does not, because the parser would find the marker in it."""
    return "prose" not in fixture.name


def difference(fixture: Fixture, deltas: Sequence[Sequence[Piece]], found: list[Event]) -> str:
    """Return a description of a cut with unexpected events."""
    return (
        f"{fixture.name}, cut into {len(deltas)}: {[joined(d) for d in deltas][:6]}\n"
        f"  found    {found}\n  expected {fixture.events}"
    )


def table(rows: Sequence[FormatRow]) -> str:
    total = FormatRow(
        f"total ({len(rows)} formats)",
        sum(row.fixtures for row in rows),
        sum(row.cuts for row in rows),
        sum(row.differences for row in rows),
    )
    lines = [f"{'format':36}{'fixtures':>9}{'cuts':>10}{'differences':>13}"]
    lines += [
        f"{row.name:36}{row.fixtures:9,}{row.cuts:10,}{row.differences:13,}"
        for row in (*rows, total)
    ]
    return "\n".join(lines)


# ---- answers that are cut off, and hostile texts


def without_ids(events: Sequence[Event]) -> list[Event]:
    return [
        msgspec.structs.replace(event, id="") if isinstance(event, ToolCall) else event
        for event in events
    ]


def cut_off(sample: Sample, fixture: Fixture, *, tokens: bool) -> Iterator[list[Event]]:
    """Yield the events of the answer if it is cut off after 0, 1, 2, ... units."""
    words = lexicon(sample, tokens=tokens)
    pieces = units(fixture.text, words)
    for end in range(len(pieces) + 1):
        short = replace(fixture, complete=False)
        yield read(sample, [pieces[:end]], words, short)


def content(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def warnings(events: Sequence[Event]) -> list[str]:
    return [event.code for event in events if isinstance(event, OutputWarning)]


PLAIN = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 2_000
PLAIN_RATIO = 100
"""A hostile text may take at most this many times as long as a plain text of the same length. The
worst text today takes 30 times as long, because a plain text has no markers and is passed on
unchanged."""


def seconds(
    sample: Sample, text: str, *, tokens: bool = False, step: int = 4, tries: int = 1
) -> float:
    """Return the CPU time, in seconds, of parsing a text in deltas of `step` characters: the least
    of `tries` tries."""
    words = lexicon(sample, tokens=tokens)

    def read_all() -> None:
        machine = sample.format.parser(words)
        for at in range(0, len(text), step):
            machine.push(text[at : at + step])
        machine.finish()

    return best_cpu_s(read_all, tries=tries)


def check_cost(sample: Sample, texts: Sequence[str]) -> None:
    """Raise AssertionError if parsing hostile texts, which together are as long as PLAIN, takes too
    long in each of three tries."""
    most = PLAIN_RATIO * seconds(sample, PLAIN, step=64, tries=3)
    times = (sum(seconds(sample, text, step=64) for text in texts) for _ in range(3))
    assert any(time < most for time in times)


def reasoning_writer(reasoning: ReasoningFormat) -> Callable[[str], str]:
    """Return a function that writes blocks of reasoning as most templates do."""
    return lambda thought: f"{reasoning.open[0]}\n{thought}\n{reasoning.close[0]}\n\n"
