"""A text that arrives piece by piece is repaired and judged like the whole text."""

from __future__ import annotations

import json
from math import isinf
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.formats.event_builder import INVALID_ARGUMENTS, EventBuilder
from gateway.formats.events import OutputWarning
from gateway.formats.json_scanner import MAX_DEPTH, LiteralScan, object_scan
from gateway.formats.readable_json import MAX_NUMBER_CHARS
from tests.support.examples import examples
from tests.support.formats import is_json_object
from tests.support.tokenizers import cuts

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
ODD = [
    "",
    " \n",
    "{}",
    " { } \n",
    "{}{}",
    "{} x",
    "[]",
    "3",
    '"a"',
    "null",
    '{"a"}',
    '{"a":}',
    '{"a":1,}',
    '{,"a":1}',
    '{"a":1 "b":2}',
    '{"a":[1,]}',
    '{"a":[,1]}',
    '{"a":[]}',
    '{"a":[}',
    '{"a":1]',
    '{"a":01}',
    '{"a":-}',
    '{"a":-0}',
    '{"a":1.}',
    '{"a":.5}',
    '{"a":1e}',
    '{"a":1e+}',
    '{"a":1E-7}',
    '{"a":1.50e+09}',
    '{"a":+1}',
    '{"a":NaN}',
    '{"a":-Infinity}',
    '{"a":tru}',
    '{"a":truee}',
    '{"a":nul',
    '{"a":"\\u12',
    '{"a":"\\u12g4"}',
    '{"a":"\\ud800"}',
    '{"a":"\\x"}',
    '{"a":"\t"}',
    '{"a":"\x7f\u2028"}',
    "{'a':1}",
    '{"a":1}}',
    '{"a":{"b":[{}, [], ""]}}',
    '{"a"\u00a0:1}',
    "{1:2}",
    "{]",
    "}",
]


def mended(pieces: list[str]) -> tuple[str, bool, bool]:
    """Return (the repaired text, whether it is an object, whether it is blank)."""
    scan, told = object_scan(), ""
    for piece in pieces:
        told += scan.push(piece)
        scan = msgspec.convert(msgspec.to_builtins(scan), LiteralScan)
    told += scan.finish()
    return told, scan.is_object, scan.is_blank


@pytest.mark.parametrize("text", ODD)
def test_odd_texts_are_judged_as_by_reading_them_as_a_whole(text: str) -> None:
    told, is_object, is_blank = mended([text])
    assert mended(list(text)) == (told, is_object, is_blank)
    assert is_object == is_json_object(told)
    assert is_blank == (not text.strip(" \t\r\n"))
    if is_json_object(text) or not is_object:
        assert told == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": "b\nc\t\x01"}', r'{"a": "b\nc\t\u0001"}'),
        (r'{"a": "\d \q \u12 C:\x"}', r'{"a": "\\d \\q \\u12 C:\\x"}'),
        ('{"a": "\\\n"}', r'{"a": "\\\n"}'),
        (r"""{"a": "it\'s"}""", """{"a": "it's"}"""),
        ('{"a": True, "b": [False, None]}', '{"a": true, "b": [false, null]}'),
        ('{"a": [1, 2 , ] , }', '{"a": [1, 2  ]  }'),
        ('{"a": 1', '{"a": 1}'),
        ('{"a": {"b": "c"}', '{"a": {"b": "c"}}'),
    ],
)
def test_what_can_only_be_meant_as_json_is_mended(text: str, told: str) -> None:
    assert mended([text]) == mended(list(text)) == (told, True, False)
    assert is_json_object(told)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1,,}', "{,}", "[1,]", '{"a": NaN}', "{'a': 1}", "{a: 1}", '{"a": "b', '{"a": [1',
     '{"a": 1,', '{"a": "say "hi""}', '{"a": Truth}', '{"a": }'],
)  # fmt: skip
def test_an_ambiguous_text_stays_unchanged(text: str) -> None:
    assert mended([text]) == mended(list(text)) == (text, False, False)


@settings(max_examples=examples(40, 100))
@given(VALUES, st.integers(0, 9), st.booleans(), st.booleans())
def test_every_value_and_every_damage_of_one_is_judged_in_every_cut_as_a_whole(
    value: Any, seed: int, ascii_only: bool, spaced: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=1 if spaced else None)
    for shown in (text, f'{{"k": {text}}}'):
        for at in {0, len(shown) // 3, len(shown) // 2, len(shown) - 1, len(shown)}:
            for damaged in (shown, shown[:at], shown[:at] + shown[at + 1 :], shown[:at] + ",]"):
                told, is_object, _ = mended(cuts(damaged, seed))
                assert (told, is_object) == mended([damaged])[:2]
                assert is_object == is_json_object(told)
                assert told == damaged or not is_json_object(damaged)


def test_json_that_is_nested_too_deeply_is_rejected() -> None:
    for depth, is_object in ((MAX_DEPTH - 1, True), (MAX_DEPTH, False), (100_000, False)):
        text = '{"a":' + "[" * depth + "]" * depth + "}"
        assert mended([text]) == (text, is_object, False)


def test_only_open_brackets_and_the_start_of_one_number_are_remembered() -> None:
    scan = object_scan()
    scan.push('{"a": [{"b": "')
    size = len(msgspec.json.encode(scan))
    for _ in range(1000):
        scan.push('x\\"' * 10)
    scan.push('", "n": 1' + "0" * 10_000)
    assert len(msgspec.json.encode(scan)) <= size + MAX_NUMBER_CHARS + 6


# ---- values that JSON readers cannot hold


def is_unreadable(value: Any) -> bool:
    """Return whether a decoded JSON value has an infinite number or half of a surrogate pair."""
    if isinstance(value, dict):
        return any(map(is_unreadable, [*value, *value.values()]))
    if isinstance(value, list):
        return any(map(is_unreadable, value))
    if isinstance(value, str):
        return any("\ud800" <= char <= "\udfff" for char in value)
    return isinstance(value, float) and isinf(value)


NUMBERS = st.from_regex(
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,3})?([eE][+-]?(30[0-9]|[0-9]{1,4}))?", fullmatch=True
)
PARTS = [r"\ud83d", r"\uD83D", r"\ude00", r"\uDE00", r"\u0041", r"\n", r"\\", "d", "\U0001f600"]
STRINGS = st.lists(st.sampled_from(PARTS), max_size=5).map(lambda parts: f'"{"".join(parts)}"')


@settings(max_examples=examples(100, 300))
@given(st.lists(NUMBERS | STRINGS, max_size=3), STRINGS, st.integers(0, 9))
def test_arguments_that_json_readers_cannot_hold_have_a_warning(
    values: list[str], key: str, seed: int
) -> None:
    text = f"{{{key}: [{', '.join(values)}]}}"
    expected = is_unreadable(json.loads(text))
    for pieces in ([text], list(text), cuts(text, seed)):
        builder = EventBuilder(None, lambda: "call")
        builder.start_call("f")
        for piece in pieces:
            if (event := builder.fast_arguments(piece)) is not None:
                builder.out.append(event)
            else:
                builder.arguments_delta(piece)
            builder = EventBuilder(None, lambda: "call", builder.state())
        builder.end_call()
        warnings = [event for event in builder.out if isinstance(event, OutputWarning)]
        assert [warning.code for warning in warnings] == [INVALID_ARGUMENTS] * expected


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("1e400", "a number that is too large"),
        ("-2.5E+999", "a number that is too large"),
        ("1" * 310 + ".0", "a number that is too large"),
        ("1" * (MAX_NUMBER_CHARS + 1), "a number that is too large"),
        ("1" * 400, ""),
        ("1" * 400 + "e-200", ""),
        ("0e999", ""),
        (r'"\ud83d"', "half of a surrogate pair, which is not a character"),
        (r'"\ud83d\ude00"', ""),
    ],
)
def test_the_value_that_json_readers_cannot_hold_is_named(value: str, problem: str) -> None:
    for pieces in ([value], list(value)):
        scan = object_scan()
        assert "".join(map(scan.push, ['{"a": ', *pieces, "}"])) == f'{{"a": {value}}}'
        assert (scan.is_object, scan.readable.problem) == (True, problem)
