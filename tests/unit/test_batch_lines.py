"""The lines of batches: which requests are accepted, and how results are written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.shared.batches import (
    BadLine,
    BatchFailure,
    BatchResponse,
    BatchResult,
    json_of,
    model_in,
    read_line,
    read_result,
    split_lines,
)
from tests.support.batches import batch_line


def encoded(**changes: Any) -> bytes:
    return json.dumps({**batch_line("a", {"prompt": "hi", "model": "m"}), **changes}).encode()


def test_a_line_keeps_the_bytes_of_its_body() -> None:
    data = b'{"body":{"prompt":"h\\u00e9", "seed" : 1.0e0},"custom_id":"a","method":"POST"'
    line = read_line(data + b',"url":"/v1/completions"}')
    assert bytes(line.body) == b'{"prompt":"h\\u00e9", "seed" : 1.0e0}'
    assert model_in(line) is None
    assert model_in(read_line(encoded())) == "m"


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"[]", None),
        (b"{", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (encoded(custom_id=""), "custom_id"),
        (encoded(custom_id=7), "custom_id"),
        (encoded(custom_id="x" * 513), "custom_id"),
        (encoded(method="GET"), "method"),
        (encoded(url="/v1/models"), "url"),
        (encoded(body=[]), "body"),
        (encoded(body={"prompt": "hi", "stream": True}), "body.stream"),
        (encoded(body={"input": "hi", "background": True}), "body.background"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/completions"}', "body"),
    ],
)
def test_a_wrong_line_is_refused_and_the_error_names_the_field(
    data: bytes, field: str | None
) -> None:
    with pytest.raises(BadLine) as refused:
        read_line(data)
    assert refused.value.field == field
    if field is not None:
        assert refused.value.message.startswith(field)


def test_a_batch_with_one_url_refuses_lines_with_another() -> None:
    with pytest.raises(BadLine, match=r"^url: must be /v1/responses"):
        read_line(encoded(), "/v1/responses")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1000])
def test_a_byte_order_mark_is_not_part_of_the_first_line(size: int) -> None:
    data = b"\xef\xbb\xbf" + encoded() + b"\n\xef\xbb\xbf\n"
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    (first, second) = split_lines(pieces)
    assert first == (1, encoded())
    assert read_line(first[1]).custom_id == "a"
    assert second == (2, b"\xef\xbb\xbf"), "only the start of a file has a mark"
    assert list(split_lines([b"\xef\xbb\xbf\n"])) == []


def test_a_body_in_several_lines_becomes_one_line() -> None:
    body = json_of(b'{\n  "a": [1,\n 2]\n}\n')
    response = BatchResponse(200, "r", body)
    line = BatchResult("id", "a", response=response).to_line()
    assert line.count(b"\n") == 1
    assert json.loads(line)["response"]["body"] == {"a": [1, 2]}


def test_a_body_that_is_not_json_becomes_a_string() -> None:
    assert msgspec.json.decode(json_of(b"<html>\xff\n")) == "<html>\ufffd\n"


def test_a_result_is_read_back_and_says_whether_it_failed() -> None:
    answered = BatchResult("1", "a", response=BatchResponse(200, "r", json_of(b"{}")))
    refused = BatchResult("2", "b", response=BatchResponse(400, "r", json_of(b"{}")))
    lost = BatchResult("3", "c", error=BatchFailure("no_answer", "gone"))
    assert [read_result(each.to_line()) for each in (answered, refused, lost)] == [
        answered,
        refused,
        lost,
    ]
    assert [each.has_failed for each in (answered, refused, lost)] == [False, True, True]
    with pytest.raises(BadLine):
        read_result(b'{"id": "1"}')


@given(st.binary(max_size=60), st.lists(st.integers(1, 9)))
def test_lines_do_not_depend_on_how_the_file_is_read(data: bytes, sizes: list[int]) -> None:
    pieces, rest = [], data
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    expected = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    assert list(split_lines([*pieces, rest])) == expected


def test_a_line_that_is_too_long_is_refused_before_it_ends() -> None:
    read: list[int] = []

    def pieces() -> Any:
        for number in range(100):
            read.append(number)
            yield b"x" * 10

    with pytest.raises(BadLine, match="line 1 is longer than 25 bytes"):
        list(split_lines(pieces(), 25))
    assert len(read) == 3
