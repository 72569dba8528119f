"""The contents of a JSON text are counted before it is decoded, however the text is cut."""

from __future__ import annotations

import msgspec
import pytest

from gateway.http.json_size import JsonBounds, JsonCounter, open_field

TEXTS = ["", "x", '"', '""', "\\", '\\"', '\\\\"', "a,b[{", '{"a": "b,c"}' * 9]
STOP = "sampling_params.stop_token_ids"
SIZES = [1, 2, 3, 7, 64, 1 << 16]


def excess_of(data: bytes, bounds: JsonBounds, size: int = 1 << 16) -> str:
    counter = JsonCounter(bounds)
    for start in range(0, len(data), size):
        if excess := counter.push(data[start : start + size]):
            return excess
    return ""


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num", [2, 9, 10])
@pytest.mark.parametrize("size", SIZES)
def test_strings_and_values_are_counted_to_the_last_one(text: str, num: int, size: int) -> None:
    data = msgspec.json.encode([text] * num)
    assert excess_of(data, JsonBounds(num, num), size) == ""
    assert "strings" in excess_of(data, JsonBounds(num - 1, num), size)
    assert "values" in excess_of(data, JsonBounds(num, num - 1), size)


@pytest.mark.parametrize("size", SIZES)
def test_objects_and_arrays_are_counted(size: int) -> None:
    data = b'[[], {}, "[{", [{}]]'
    assert excess_of(data, JsonBounds(max_strings=5), size) == ""
    assert "objects and arrays" in excess_of(data, JsonBounds(max_strings=4), size)


def test_token_ids_are_allowed_beside_other_values_up_to_a_limit() -> None:
    assert JsonBounds.with_ids(8192).max_values == 208_192
    assert JsonBounds.with_ids(1 << 40).max_values == 200_000 + (1 << 20)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b'{"token_ids": [1, 2', "token_ids"),
        (b'{"prompt" : [[1], [2, 3', "prompt"),
        (b'{"model": "a", "sampling_params" : {"n": 1, "stop_token_ids" :[1', STOP),
        (b'{"model":"a","sampling_params": {"n": 1, "stop_token_ids" :[1', STOP),
        (b'{"messages": [{"content": [{"text": "a", "x": [1', "messages"),
        (b'{"messages": [{"content": [1]}, [[1', "messages"),
        (b'{"a": {"b": {"c": {"d": 1', "a.b.c"),
        (b'{"stop": ["x", "y', "stop"),
        (b'{"stop": ["x\\\\", "y\\"]', "stop"),
        (b'{"stop": [1], "n', None),
        (b'{"stop": [1], "n": 1', None),
        (b"[1, 2, 3", None),
        (b"", None),
        (b'{"a b": [1', None),
        (b'{"a\\r\\nb": [1', None),
    ],
)
def test_the_field_that_is_open_is_named(text: bytes, field: str | None) -> None:
    assert open_field(text) == field


def test_a_field_is_looked_for_in_so_many_strings_only() -> None:
    assert open_field(b'{"a":[' + b'"b",' * 1_000_000) == "a"
    assert open_field(b'{"a":[' + b'{"b":1},' * 1_000_000) is None
