"""The base of all parsers: states, markers as tokens and as text, and when events are emitted."""

from __future__ import annotations

import pytest

from gateway.formats.events import Content
from gateway.formats.lexicon import Lexicon, MarkerPart, MarkerToken, Piece
from gateway.formats.parser import (
    BLOCK_CHARS,
    FormatParser,
    FormatParserState,
    Moves,
    ParserContext,
)


class CountingReads(FormatParserState):
    at: str = "a"


class Switching(FormatParser):
    """A parser with the states a and b. Each dot switches the state. The marker of state a is
    <A>, and that of state b is <B>."""

    State = CountingReads

    def moves(self) -> Moves:
        return {"a": ((("<A>",), self._say),), "b": ((("<B>",), self._say),)}

    def on_text(self, text: str) -> str:
        read, dot, rest = text.partition(".")
        self.builder.content(f"{self.s.at}({read})")
        if dot:
            self.s.at = "b" if self.s.at == "a" else "a"
        return rest

    def _say(self, marker: str) -> None:
        self.builder.content(f"[{marker}]")


def parsed(pieces: list[Piece], *, tokens: bool = False, complete: bool = True) -> str:
    words = Lexicon({1: "<A>", 2: "<B>"} if tokens else {})
    context = ParserContext(words)
    machine = Switching(context, context.event_builder())
    events = [event for piece in pieces for event in machine.push(piece)]
    events += machine.finish(complete)
    return "".join(event.text for event in events if isinstance(event, Content))


def test_held_text_is_read_in_the_state_after_the_text_before_it() -> None:
    assert parsed(["x.", "<B>"]) == "a(x)[<B>]"
    assert parsed(["x.<", "B>"]) == "a(x)[<B>]"
    assert parsed(["x.<B>"]) == "a(x)[<B>]"
    assert parsed(["x.<A>.<A>"]) == "a(x)b(<A>)[<A>]"
    assert parsed(["x.<A", ">"]) == "a(x)b(<A)b(>)"


def test_a_marker_that_is_a_token_is_recognized_only_by_its_id() -> None:
    assert parsed(["<A>", MarkerToken(1, "<A>")], tokens=True) == "a(<A>)[<A>]"
    assert parsed(["<A", MarkerToken(1, "<A>")]) == "a(<A)[<A>]"


def test_a_token_that_means_nothing_in_this_state_is_dropped() -> None:
    assert parsed(["x", MarkerToken(2, "<B>"), "y"], tokens=True) == "a(x)a(y)"


def test_a_part_is_text_in_a_marker_and_nothing_outside_of_one() -> None:
    assert parsed([MarkerPart("<"), "A>"]) == "[<A>]"
    assert parsed([MarkerPart("<"), MarkerPart("A>")]) == "[<A>]"
    assert parsed(["x", MarkerPart("<"), "A", MarkerPart("<"), "A>"]) == "a(x)a(A)[<A>]"
    assert parsed(["x", MarkerPart("<"), "y"]) == "a(x)a(y)"
    assert parsed(["x", MarkerPart("<")]) == "a(x)"
    assert parsed(["x", MarkerPart("A>")]) == "a(x)"
    assert parsed(["<", MarkerPart("B"), ">"]) == "a(<)a(>)"


def test_half_a_marker_at_the_end_is_text_unless_the_answer_was_cut_off() -> None:
    assert parsed(["x<A"]) == "a(x)a(<A)"
    assert parsed(["x<A"], complete=False) == "a(x)"


@pytest.mark.parametrize("length", [BLOCK_CHARS - 2, BLOCK_CHARS, 3 * BLOCK_CHARS + 1])
def test_a_long_text_is_read_in_blocks_and_means_the_same(length: int) -> None:
    text = "x" * length + "<A>" + "y" * length + "<A>"
    output = parsed([text])
    assert output.replace("a(", "").replace(")", "") == text.replace("<A>", "[<A>]")


def test_a_marker_is_found_in_no_more_than_its_own_automaton() -> None:
    words = Lexicon({1: "<A>"})
    assert words.automaton(("<A>",)) is None
    found = words.automaton(("<A>", "<B>"))
    assert found.markers == ("<B>",)
    assert words.automaton(("<A>", "<B>")) is found
