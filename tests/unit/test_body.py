"""The body of a request becomes a checked struct, or an error that names the field."""

from __future__ import annotations

import contextlib
import io
from itertools import product

import flask
import gevent
import msgspec
import pytest
from gevent.event import Event
from gunicorn.http.errors import InvalidChunkSize, NoMoreData
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout, UnsupportedMediaType
from werkzeug.test import EnvironBuilder

from gateway.api.anthropic.requests import MessagesBody
from gateway.api.openai.requests import ChatBody, CompletionBody
from gateway.api.responses.requests import ResponsesBody
from gateway.api.tokens.requests import GenerateBody
from gateway.http import body
from gateway.http.body import (
    MAX_SEARCHED_BYTES,
    RESERVATION,
    SMALL_BYTES,
    WHOLE,
    BodyReader,
    decode,
    decode_json,
    unknown_fields,
)
from gateway.http.body_memory import BodyMemory
from gateway.http.json_size import USUAL_BOUNDS, JsonBounds
from gateway.http.json_values import MAX_DEPTH, MAX_VALUES, check_depth
from protocol.wire.errors import InvalidRequest
from tests.support.waiting import HANG_S, eventually


class Inner(msgspec.Struct):
    size: int


class BodySchema(msgspec.Struct):
    name: str
    inner: Inner | None = None
    table: dict[int, float] = {}
    tables: list[dict[int, float]] = []


def a_request(data: bytes, content_type: str | None = "application/json") -> flask.Request:
    builder = EnvironBuilder(method="POST", input_stream=io.BytesIO(data))
    environ = builder.get_environ()
    environ["CONTENT_LENGTH"] = str(len(data))
    environ.pop("CONTENT_TYPE", None)
    if content_type is not None:
        environ["CONTENT_TYPE"] = content_type
    return flask.Request(environ)


def read(
    request: flask.Request, max_bytes: int = 1 << 24, bounds: JsonBounds = USUAL_BOUNDS
) -> object:
    with BodyReader(max_bytes, BodyMemory(2 * max_bytes)).read(request, bounds) as fields:
        return fields


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", None, "application/x+json"],
)
def test_json_is_accepted_with_other_content_types_and_without_one(
    content_type: str | None,
) -> None:
    assert read(a_request(b"{}", content_type), 2) == {}


def test_another_content_type_is_refused() -> None:
    with pytest.raises(UnsupportedMediaType):
        read(a_request(b"{}", "text/plain"), 10)


@pytest.mark.parametrize(
    ("encoding", "name"),
    [("gzip", "gzip"), ("br", "br"), ("x" * 1000, "this encoding"), ("a\r\nb", "this encoding")],
)
def test_a_content_encoding_is_refused_by_its_name(encoding: str, name: str) -> None:
    request = a_request(b"{}")
    request.environ["HTTP_CONTENT_ENCODING"] = encoding
    with pytest.raises(UnsupportedMediaType) as caught:
        read(request)
    assert f"Content-Encoding: {name} is not supported" in (caught.value.description or "")


def test_the_identity_encoding_is_none() -> None:
    request = a_request(b"{}")
    request.environ["HTTP_CONTENT_ENCODING"] = "identity"
    assert read(request) == {}


def test_a_body_may_be_as_long_as_the_limit_and_no_longer() -> None:
    assert read(a_request(b'"12345678"'), 10) == "12345678"
    with pytest.raises(RequestEntityTooLarge):
        read(a_request(b"x" * 11), 10)


class BrokenStream(io.BytesIO):
    """A body whose transfer coding is broken. Reading it raises the error of gunicorn's reader."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def read(self, size: int | None = -1) -> bytes:
        raise self._error


@pytest.mark.parametrize("error", [InvalidChunkSize(b"zz"), NoMoreData()])
def test_a_broken_transfer_coding_is_the_clients_fault(error: Exception) -> None:
    request = a_request(b"")
    del request.environ["CONTENT_LENGTH"]
    request.environ |= {"wsgi.input": BrokenStream(error), "wsgi.input_terminated": True}
    with pytest.raises(InvalidRequest):
        read(request)


@pytest.mark.parametrize(
    ("head", "rest", "field"),
    [
        (b'{"token_ids":[', b"1,", "token_ids"),
        (b'{"tools":[', b"[],", "tools"),
        (b'{"a":1,"stop":["', b'x","', "stop"),
    ],
)
def test_a_body_that_holds_too_much_is_refused_after_its_first_part(
    head: bytes, rest: bytes, field: str
) -> None:
    request = a_request((head + rest * (4 << 20))[: 1 << 24])
    with pytest.raises(InvalidRequest, match=f"^{field}: more than ") as caught:
        read(request)
    assert caught.value.param == field
    assert request.environ["wsgi.input"].tell() < 1 << 20


def test_a_large_body_counts_until_its_request_has_ended() -> None:
    memory = BodyMemory(1 << 21)
    bodies = BodyReader(1 << 20, memory)
    data = b'{"name": "' + b"x" * SMALL_BYTES + b'"}'
    for _ in range(50):
        request = a_request(data)
        assert bodies.parse(request, BodySchema).name == "x" * SMALL_BYTES
        assert memory.num_held == len(data)
        request.environ[RESERVATION].close()
    request = a_request(data[:-1])
    with pytest.raises(InvalidRequest):
        bodies.parse(request, BodySchema)
    request.environ[RESERVATION].close()
    assert memory.num_held == 0


class DrippingStream:
    """A body of which only the beginning arrives. Reading the rest takes until the test ends."""

    def __init__(self, data: bytes) -> None:
        self._arrived = io.BytesIO(data)
        self.is_waiting = False

    def read(self, size: int) -> bytes:
        if not (data := self._arrived.read(size)):
            self.is_waiting = True
            Event().wait(HANG_S)
        return data


def dripping(num_bytes: int) -> flask.Request:
    """Return a request that announces a body of 4 MiB and sends `num_bytes` of it."""
    request = a_request(b"")
    stream = DrippingStream(b'"' + b"x" * (num_bytes - 1))
    request.environ |= {"CONTENT_LENGTH": str(1 << 22), "wsgi.input": stream}
    return request


def test_bodies_that_arrive_slowly_leave_the_memory_to_others() -> None:
    bodies = BodyReader(1 << 22, BodyMemory(1 << 25))
    slow = [dripping(SMALL_BYTES + 5) for _ in range(8)]  # they announce all of it
    greenlets = [gevent.spawn(bodies.parse, request, BodySchema) for request in slow]
    assert eventually(
        lambda: all(request.environ["wsgi.input"].is_waiting for request in slow),
        pause=gevent.sleep,
    )
    other = a_request(b'{"name": "' + b"x" * (1 << 19) + b'"}')
    assert bodies.parse(other, BodySchema)
    gevent.killall(greenlets)


def test_a_large_body_that_arrives_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SLOW_S", 0)
    with pytest.raises(RequestTimeout, match="64 KiB per second"):
        read(dripping(SMALL_BYTES + 5))


def test_a_body_that_is_in_memory_already_takes_no_more() -> None:
    memory = BodyMemory(1 << 21)
    request = a_request(b"")
    data = b'{"name": "' + b"x" * (1 << 19) + b'"}'
    request.environ |= {"CONTENT_LENGTH": str(len(data)), WHOLE: data}
    assert BodyReader(1 << 20, memory).parse(request, BodySchema).name == "x" * (1 << 19)
    assert memory.num_held == 0
    request.environ[WHOLE] = b"[" * len(data)
    with pytest.raises(InvalidRequest, match="more than 65,536 objects"):
        BodyReader(1 << 20, memory).parse(request, BodySchema)


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("num_bytes", [SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, 5_000_001])
def test_every_byte_of_a_large_body_arrives_in_its_place(num_bytes: int, has_length: bool) -> None:
    text = "".join(map(str, range(num_bytes)))[: num_bytes - 2]
    request = a_request(f'"{text}"'.encode())
    if not has_length:
        del request.environ["CONTENT_LENGTH"]
        request.environ["wsgi.input_terminated"] = True
    assert read(request) == text


@pytest.mark.parametrize(
    "tail", [b'"}', b'", "n": 1e999}', b'"'], ids=["valid", "an invalid number", "cut off"]
)
def test_other_greenlets_run_after_a_large_body_is_decoded(
    tail: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def decode(data: bytes | memoryview) -> object:
        gevent.spawn(order.append, "another greenlet")
        return decode_json(data)

    monkeypatch.setattr(body, "decode_json", decode)
    with contextlib.suppress(InvalidRequest):
        read(a_request(b'{"name": "' + b"x" * SMALL_BYTES + tail))
    order.append("the request")
    assert order == ["another greenlet", "the request"]


@pytest.mark.parametrize(("size", "param"), [(SMALL_BYTES, "n"), (MAX_SEARCHED_BYTES, None)])
def test_an_invalid_number_is_searched_unless_the_body_is_huge(
    size: int, param: str | None
) -> None:
    data = b'{"text": "' + b"x" * size + b'", "n": 1e999}'
    with pytest.raises(InvalidRequest, match="out of range") as error:
        read(a_request(data))
    assert error.value.param == param


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
        (b'{"table": {"a": 1}, "table": 5}', "table"),
        (b'{"tables": [{}, {"a": 1}], "tables": []}', "name"),
        (b'{"inner": {"size": [1]}, "table": {"a": 1}}', "inner.size"),
        (b'{"inner": {"size": 1, "x": [1, 2]}, "table": {"a": 1}}', "table.a"),
        (b'{"name": "x", "table": {"1": 1e999}}', "table.1"),
        (b'{"name": "x", "tables": [{}, {"1": 2, "2": 1e999}], "other": 1e999}', "tables[1].2"),
        (b'{"other": {"no name": 1e999}}', None),
        (b"1e999", None),
        (b'{"table": {"a": 1}', None),
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
def test_an_error_in_a_body_names_the_path_of_the_field(data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(data, BodySchema)
    assert caught.value.param == param
    assert "$" not in caught.value.message
    if param is not None:
        assert caught.value.message.startswith(f"{param}: ")


def test_a_key_at_fault_is_shown_as_far_as_it_is_short() -> None:
    data = msgspec.json.encode({"table": {"1": 1, "n o" + "!" * 1000: 2}})
    with pytest.raises(InvalidRequest) as caught:
        decode(data, BodySchema)
    words = "table: each key must be a whole number; got a text of 1,003 characters that starts "
    assert caught.value.message.startswith(f'{words}with "n o!!')
    assert len(caught.value.message) < 160


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
    assert unknown_fields(decode_json(data), BodySchema) == ["nmae", "x_y-z.1"]
    with pytest.raises(InvalidRequest):
        decode_json(b'{"name": "x", "\\ud800": 1}')
    assert len(unknown_fields({f"field{i}": i for i in range(100)}, BodySchema)) == 16


ANY_VALUES = (
    b"1", b"1.0", b"-0", b"0.5", b'"x"', b"null", b"true", b"[]", b"{}", b"[1,2]", b'["a"]',
    b"[[1],[2]]", b'[1,"a"]', b'{"1":2}', b'{"a":2}', b'{"1":"x"}', b"1e3", b"18446744073709551616",
    b"-9223372036854775809", b'[{"role":"user","content":"x"}]', b'{"include_usage":true,"x":1}',
)  # fmt: skip
BODIES: dict[type[msgspec.Struct], bytes] = {
    ChatBody: b'"messages":[{"role":"user","content":"x"}]',
    CompletionBody: b'"prompt":"x"',
    GenerateBody: b'"token_ids":[1],"sampling_params":{}',
    MessagesBody: b'"messages":[{"role":"user","content":"x"}],"max_tokens":3,"model":"m"',
    ResponsesBody: b'"input":"x"',
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_converted_body_equals_one_that_is_decoded_directly(kind: type[msgspec.Struct]) -> None:
    """msgspec's typed decoder is the reference: both accept a value, or both refuse it."""
    for field, value in product(msgspec.structs.fields(kind), ANY_VALUES):
        data = b'{%b,"%b":%b}' % (BODIES[kind], field.encode_name.encode(), value)
        try:
            expected = msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            with pytest.raises(InvalidRequest):
                decode(data, kind)
        else:
            assert decode(data, kind) == expected, data
