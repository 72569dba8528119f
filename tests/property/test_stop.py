"""The text ends where a stop string starts, however it is cut."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.stop import StopMatcher, StopState, compile_stops
from tests.support.cpu_time import best_cpu_s, check_linear
from tests.support.examples import examples
from tests.support.tokenizers import cuts


def stopped(
    stops: list[str], deltas: list[str], *, include: bool = False
) -> tuple[str, str | None]:
    compiled = compile_stops(stops)
    assert compiled is not None
    matcher = StopMatcher(compiled, include=include)
    text = "".join([matcher.push(delta) for delta in deltas]) + matcher.finish()
    return text, matcher.matched


def slow_twin(stops: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    found = re.search("|".join(map(re.escape, stops)), text)
    if found is None:
        return text, None
    return text[: found.end() if include else found.start()], found[0]


@settings(max_examples=examples(100, 300), deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=16),
    st.text("abc", max_size=20),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_any_cut_ends_the_text_at_the_same_place(
    stops: list[str], text: str, include: bool, seed: int
) -> None:
    expected = slow_twin(stops, text, include=include)
    assert stopped(stops, cuts(text, seed), include=include) == expected
    for at in range(len(text) + 1):
        assert stopped(stops, [text[:at], text[at:]], include=include) == expected


def test_a_stop_string_across_three_deltas_never_leaks() -> None:
    compiled = compile_stops(["\n\nUser:"])
    assert compiled is not None
    matcher = StopMatcher(compiled)
    assert [matcher.push(d) for d in ("Yes.\n", "\nUs", "er: hi", "more")] == ["Yes.", "", "", ""]
    assert matcher.matched == "\n\nUser:"


def test_a_beginning_that_does_not_complete_is_not_eaten() -> None:
    assert stopped(["STOP"], ["ST", "AY ST", "O"]) == ("STAY STO", None)


def test_the_stop_string_is_part_of_the_text_only_where_asked_for() -> None:
    assert stopped(["END"], ["a E", "ND b"]) == ("a ", "END")
    assert stopped(["END"], ["a E", "ND b"], include=True) == ("a END", "END")


def test_a_match_that_waits_for_an_earlier_one_is_found_at_the_end() -> None:
    assert stopped(["abcd", "bc"], ["xabc"]) == ("xa", "bc")


def test_the_state_carries_over_between_any_two_deltas() -> None:
    compiled = compile_stops(["abab", "ba"])
    assert compiled is not None
    matcher, text = StopMatcher(compiled), ""
    for char in "cacabcc":
        text += matcher.push(char)
        wire = msgspec.json.encode(matcher.state())
        matcher = StopMatcher(compiled, state=msgspec.json.decode(wire, type=StopState))
    assert (text + matcher.finish(), matcher.matched) == ("cacabcc", None)
    matcher.push("ab")
    again = StopMatcher(compiled, state=matcher.state())
    again.push("abxx")
    assert again.matched == "abab"


def test_no_stop_strings_need_no_matcher() -> None:
    assert compile_stops([]) is None


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["a" * 1000 + "b"], "a" * 240_000),
        (["ab" * 500 + "c", "b" * 999], "ab" * 120_000),
        ([f"stop{i}" for i in range(16)], "stop the quick brown foxes " * 9_000),
    ],
)
@pytest.mark.parametrize("delta_chars", [4, 300_000])
def test_the_time_is_linear_in_a_text_made_to_be_slow(
    stops: list[str], text: str, delta_chars: int
) -> None:
    compiled = compile_stops(stops)
    assert compiled is not None

    def push_all(size: int) -> None:
        matcher = StopMatcher(compiled)
        for at in range(0, size, delta_chars):
            matcher.push(text[at : min(at + delta_chars, size)])
        assert matcher.matched is None

    check_linear(lambda size: best_cpu_s(lambda: push_all(size), tries=2), len(text) // 4)
