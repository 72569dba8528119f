"""Bytes in, a checked struct or the name of the field at fault out."""

from __future__ import annotations

import io

import flask
import msgspec
import pytest
from werkzeug.exceptions import RequestEntityTooLarge, UnsupportedMediaType
from werkzeug.test import EnvironBuilder

from gateway.body import (
    MAX_DEPTH,
    MAX_VALUES,
    check_depth,
    check_strings,
    decode,
    read_json,
    unknown_fields,
)
from protocol.errors import InvalidRequest


class Inner(msgspec.Struct):
    size: int


class Body(msgspec.Struct):
    name: str
    inner: Inner | None = None
    table: dict[int, float] = {}
    tables: list[dict[int, float]] = []


decoder = msgspec.json.Decoder(Body)


def a_request(data: bytes, content_type: str | None = "application/json") -> flask.Request:
    builder = EnvironBuilder(method="POST", input_stream=io.BytesIO(data))
    environ = builder.get_environ()
    environ["CONTENT_LENGTH"] = str(len(data))
    environ.pop("CONTENT_TYPE", None)
    if content_type is not None:
        environ["CONTENT_TYPE"] = content_type
    return flask.Request(environ)


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", None, "application/x+json"],
)
def test_json_is_read_also_where_nobody_says_that_it_is_json(content_type: str | None) -> None:
    assert read_json(a_request(b"{}", content_type), 2) == b"{}"


def test_another_content_type_is_refused() -> None:
    with pytest.raises(UnsupportedMediaType):
        read_json(a_request(b"{}", "text/plain"), 10)


def test_a_body_may_be_as_long_as_the_limit_and_no_longer() -> None:
    assert read_json(a_request(b"x" * 10), 10) == b"x" * 10
    with pytest.raises(RequestEntityTooLarge):
        read_json(a_request(b"x" * 11), 10)


@pytest.mark.parametrize("text", ["", "x", '"', '""', "\\", '\\"', '\\\\"', '{"a": "b"}' * 9])
@pytest.mark.parametrize("num_strings", [0, 1, 2, 9, 10])
def test_strings_are_counted_before_a_body_is_decoded(text: str, num_strings: int) -> None:
    """Quotes in texts are none; at the latest twice as many are too many."""
    data = msgspec.json.encode([text] * num_strings)
    check_strings(data, num_strings)
    with pytest.raises(InvalidRequest, match="strings"):
        check_strings(msgspec.json.encode([text] * (2 * num_strings + 2)), num_strings)


def test_a_body_of_nothing_but_strings_is_refused_after_the_first_of_them() -> None:
    data = b'"a":1,' * 2_000_000
    with pytest.raises(InvalidRequest, match="more than 65,536 strings"):
        read_json(a_request(data), len(data))
    assert read_json(a_request(data[:1000]), len(data)) == data[:1000]
    assert read_json(a_request(data), len(data), max_strings=1 << 22) == data


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"{}", "name"),
        (b'{"name": 5}', "name"),
        (b'{"name": "x", "inner": {}}', "inner.size"),
        (b'{"name": "x", "inner": {"size": "big"}}', "inner.size"),
        (b'{"name": "x", "table": {"a": 1}}', "table.a"),
        (b'{"name": "x", "table": {"1": "a"}}', "table.1"),
        (b'{"tables": [{"5": 1}, {"1": 1, "2": 1, "3": "c", "4": "d"}]}', "tables[1].3"),
        (b'{"table": {"1": 1, "no name": 1}}', "table"),
        (b'{"table": {"a": 1}', "table"),
        (b'{"table": {"a": 1}, "table": 5}', "table"),
        (b'{"tables": [{}, {"a": 1}], "tables": []}', "tables[1]"),
        (b"[]", None),
        (b"", None),
        (b"{", None),
        (b'{"name": NaN}', None),
        (b'{"name": "\xff"}', None),
        (b'{"name": "\\ud800"}', None),
        (b'{"name": "x"} {}', None),
        (b'{"other":' + b"[" * 100_000, None),
    ],
)
def test_what_is_wrong_is_said_with_the_path_of_the_field(data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(data, decoder)
    assert caught.value.param == param
    assert "$" not in caught.value.message
    if param is not None:
        assert caught.value.message.startswith(f"{param}: ")


def test_a_key_at_fault_is_shown_as_far_as_it_is_short() -> None:
    data = msgspec.json.encode({"table": {"1": 1, "n o" + "!" * 1000: 2}})
    with pytest.raises(InvalidRequest) as caught:
        decode(data, decoder)
    assert caught.value.message.startswith("table: the key 'n o!!")
    assert len(caught.value.message) < 120


def nested(levels: int) -> object:
    value: object = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def test_free_values_may_be_nested_up_to_the_limit() -> None:
    check_depth(nested(MAX_DEPTH - 1), "tools")
    with pytest.raises(InvalidRequest, match="tools: nested deeper than 64 levels"):
        check_depth(nested(MAX_DEPTH), "tools")
    with pytest.raises(InvalidRequest):
        check_depth(nested(100_000), "tools")


def test_free_values_may_not_be_endless_either() -> None:
    check_depth([0] * MAX_VALUES, "tools")
    with pytest.raises(InvalidRequest, match="more than 200,000 values"):
        check_depth([0] * (MAX_VALUES + 1), "tools")


def test_unknown_fields_are_listed_where_their_names_fit_into_a_header() -> None:
    data = b'{"name": "x", "nmae": 1, "a\\r\\nb": 2, "": 3, "inner": null, "x_y-z.1": {}}'
    assert unknown_fields(data, Body) == ["nmae", "x_y-z.1"]
    with pytest.raises(InvalidRequest):
        unknown_fields(b'{"name": "x", "\\ud800": 1}', Body)
    many = msgspec.json.encode({f"field{i}": i for i in range(100)})
    assert len(unknown_fields(many, Body)) == 16
