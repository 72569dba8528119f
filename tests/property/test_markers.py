"""The scanner finds the markers that a regular expression finds in the whole text."""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.markers import Marker, MarkerSet, MarkerText, Scanner, ScannerState
from tests.support.tokenizers import cuts

letters = st.text("abc", max_size=24)
markers = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5)


def scanned(names: list[str], deltas: list[str]) -> list[MarkerText | Marker]:
    scanner = Scanner(MarkerSet(names))
    pieces = [piece for delta in deltas for piece in scanner.push(delta)]
    return merged(pieces + scanner.finish())


def merged(pieces: list[MarkerText | Marker]) -> list[MarkerText | Marker]:
    whole: list[MarkerText | Marker] = []
    for piece in pieces:
        if whole and isinstance(piece, MarkerText) and isinstance(whole[-1], MarkerText):
            whole[-1] = MarkerText(whole[-1].text + piece.text)
        else:
            whole.append(piece)
    return whole


def slow_twin(names: list[str], text: str) -> list[MarkerText | Marker]:
    pieces: list[MarkerText | Marker] = []
    start = 0
    for found in re.finditer("|".join(map(re.escape, names)), text):
        pieces += [MarkerText(text[start : found.start()]), Marker(found[0])]
        start = found.end()
    return [piece for piece in [*pieces, MarkerText(text[start:])] if piece.text]


@settings(max_examples=400, deadline=None)
@given(markers, letters, st.integers(0, 1 << 30))
def test_any_cut_gives_what_a_regular_expression_finds(
    names: list[str], text: str, seed: int
) -> None:
    expected = slow_twin(names, text)
    assert scanned(names, [text]) == expected
    assert scanned(names, list(text)) == expected
    assert scanned(names, cuts(text, seed)) == expected


@settings(max_examples=100, deadline=None)
@given(markers, letters)
def test_every_cut_in_two_gives_the_same(names: list[str], text: str) -> None:
    expected = slow_twin(names, text)
    for at in range(len(text) + 1):
        assert scanned(names, [text[:at], text[at:]]) == expected


@settings(max_examples=200, deadline=None)
@given(markers, letters)
def test_the_state_is_the_text_that_is_held_and_nothing_more(names: list[str], text: str) -> None:
    compiled = MarkerSet(names)
    scanner, pieces = Scanner(compiled), []
    for char in text:
        pieces += scanner.push(char)
        wire = msgspec.json.encode(scanner.state())
        scanner = Scanner(compiled, msgspec.json.decode(wire, type=ScannerState))
    assert merged(pieces + scanner.finish()) == slow_twin(names, text)


@settings(max_examples=200, deadline=None)
@given(markers, letters)
def test_only_what_could_still_become_a_marker_is_held(names: list[str], text: str) -> None:
    scanner = Scanner(MarkerSet(names))
    for end, _ in enumerate(text, 1):
        scanner.push(text[end - 1])
        held = scanner.state().held
        assert not held or any(
            name.startswith(held[:k]) for name in names for k in range(1, len(held) + 1)
        )
        assert len(held) <= max(map(len, names))


def test_text_that_can_no_longer_be_a_marker_is_released_at_once() -> None:
    scanner = Scanner(MarkerSet(["<think>"]))
    assert scanner.push("a <thi") == [MarkerText("a ")]
    assert scanner.push("s") == [MarkerText("<this")]
    assert scanner.push("<think>x") == [Marker("<think>"), MarkerText("x")]


def test_the_first_of_two_markers_at_one_place_wins() -> None:
    assert scanned(["ab", "abc"], ["abc"]) == [Marker("ab"), MarkerText("c")]
    assert scanned(["abc", "ab"], ["ab", "c"]) == [Marker("abc")]
    assert scanned(["abc", "ab"], ["ab", "d"]) == [Marker("ab"), MarkerText("d")]


def test_an_earlier_start_wins_even_if_it_ends_later() -> None:
    for cut in itertools.pairwise((0, 1, 2, 3, 4)):
        pieces = ["xabcdx"[: cut[0]], "xabcdx"[cut[0] : cut[1]], "xabcdx"[cut[1] :]]
        assert scanned(["bc", "abcd"], pieces) == [MarkerText("x"), Marker("abcd"), MarkerText("x")]


@pytest.mark.parametrize("names", [[], [""], ["a", ""]])
def test_a_marker_has_at_least_one_character(names: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one character"):
        MarkerSet(names)


@pytest.mark.parametrize("char", "^]-\\[.*&|~\n")
def test_characters_that_mean_something_to_a_regular_expression_are_plain_here(char: str) -> None:
    assert scanned([char * 2], ["x", char, char, "x"]) == [
        MarkerText("x"),
        Marker(char * 2),
        MarkerText("x"),
    ]


@settings(max_examples=300, deadline=None)
@given(st.text("abc", min_size=1, max_size=5), st.text("abcABC", max_size=24), st.integers(0, 99))
def test_a_part_has_text_inside_markers_only(name: str, text: str, seed: int) -> None:
    """Upper-case letters are read as parts, whose text counts inside a marker only."""
    compiled = MarkerSet([name])
    scanner, told = Scanner(compiled), ""
    for run in re.findall("[A-Z]|[a-z]+", text):
        for delta in [run] if run.isupper() else cuts(run, seed):
            released, marker, rest = scanner.next(delta.lower(), part=run.isupper())
            told += released
            while marker is not None:
                told += marker
                released, marker, rest = scanner.next(rest)
                told += released
            wire = msgspec.json.encode(scanner.state())
            scanner = Scanner(compiled, msgspec.json.decode(wire, type=ScannerState))
    told += scanner.next("", final=True)[0]
    found = re.finditer(re.escape(name), text.lower())
    inside = {place for match in found for place in range(match.start(), match.end())}
    kept = [char for at, char in enumerate(text) if at in inside or char.islower()]
    assert told == "".join(kept).lower()
