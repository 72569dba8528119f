"""The lines of batches, in OpenAI's format: one JSON object per line, requests and their results.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, ...}, "error": null}

`tidegate run-batch` and the gateway's /v1/batches read and write the same lines. The format is
described at https://platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from protocol.wire.field_errors import FieldError, field_error
from protocol.wire.field_words import alternatives, shown

BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
"""A path that a line may request."""
BATCH_URLS: tuple[str, ...] = get_args(BatchUrl)
MAX_ID_CHARS = 512
MAX_LINE_BYTES = 16 << 20
"""Default limit on the length of a line. A server's limit on bodies may be lower."""


class BadLine(ValueError):
    """A line of a batch is wrong. The message names the field, but not the line's number."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch. `body` is the JSON of the request's body, as it stands in the
    file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct, frozen=True):
    """The server's answer to a line. Its status may be that of an error."""

    status_code: int
    request_id: str
    #: JSON on one line.
    body: msgspec.Raw


class BatchFailure(msgspec.Struct, frozen=True):
    """Why a line has no answer."""

    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True):
    """The result of one line: a response or an error."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchFailure | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the line has no answer, or one with the status of an error."""
        return self.response is None or not 200 <= self.response.status_code < 300

    def to_line(self) -> bytes:
        """Return the result as a line of a file, with its line break."""
        return msgspec.json.encode(self) + b"\n"


class _BodyFields(msgspec.Struct, frozen=True):
    """The fields of a body that decide whether a batch can contain it."""

    model: Any = None
    stream: Any = None
    background: Any = None


_TOO_DEEP = "the line is nested too deeply"
_read_line = msgspec.json.Decoder(BatchLine).decode
_read_body = msgspec.json.Decoder(_BodyFields).decode
_read_result = msgspec.json.Decoder(BatchResult).decode


def read_line(data: bytes, url: str | None = None) -> BatchLine:
    """Return the request in a line. Raises BadLine if the line is malformed, or if a batch cannot
    contain the request.

    url  the only path that the lines may request; None: any of BATCH_URLS
    """
    try:
        line = _read_line(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_line(error, data, BatchLine) from None
    try:
        fields = _read_body(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad_line(error, line.body, _BodyFields, at="body") from None
    allowed = BATCH_URLS if url is None else (url,)
    if line.url not in allowed:
        problem = f"must be {alternatives(allowed)}; got {shown(line.url)}"
        raise BadLine(f"url: {problem}", field="url")
    for field in ("stream", "background"):
        if getattr(fields, field):
            raise BadLine(f"body.{field}: a batch needs whole answers", field=f"body.{field}")
    return line


def _bad_line(error: Exception, data: bytes | msgspec.Raw, kind: type, at: str = "") -> BadLine:
    """Return the error for JSON that could not be read.

    data   the JSON
    kind   the struct that it should have become
    at     path of the JSON in the line; "": it is the whole line
    """
    if isinstance(error, RecursionError):
        return BadLine(_TOO_DEEP)
    if not isinstance(error, msgspec.ValidationError):
        return BadLine(f"the line is not valid JSON: {error}")
    try:
        found = field_error(error, msgspec.json.decode(data), kind).below(at)
    except RecursionError:
        return BadLine(_TOO_DEEP)
    except msgspec.ValidationError:
        found = FieldError(at, "a number in it is out of range")
    if not found.path:
        return BadLine(f"the line {found.problem}")
    return BadLine(str(found), field=found.path)


def model_in(line: BatchLine) -> str | None:
    """Return the model that a line names; None if it names none."""
    model = _read_body(line.body).model
    return model if isinstance(model, str) else None


def read_result(data: bytes) -> BatchResult:
    """Parse a line of an output file. Raises BadLine if the line is not the result of a request."""
    try:
        return _read_result(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(str(error)) from None


def json_of(data: bytes) -> msgspec.Raw:
    """Return the body of a response as JSON on one line. A body that is not JSON, such as the page
    of a proxy, becomes a string."""
    try:
        return msgspec.Raw(msgspec.json.format(data, indent=-1))
    except msgspec.DecodeError:
        return msgspec.Raw(msgspec.json.encode(data.decode(errors="replace")))


def digest_of_id(custom_id: str) -> bytes:
    """Return 16 bytes that stand for an id. Sets of them are smaller than sets of ids."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def split_lines(
    pieces: Iterable[bytes], max_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of each line that is not blank, in a file that is read in pieces.

    The numbers start at 1 and count blank lines. A byte-order mark, which some editors write, is
    not part of the first line. Raises BadLine if a line is longer than `max_bytes`.
    """
    number, length = 1, 0
    parts: list[bytes] = []

    def joined() -> bytes:
        line = b"".join(parts)
        parts.clear()
        return line.removeprefix(codecs.BOM_UTF8) if number == 1 else line

    for piece in pieces:
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            parts.append(piece[start:end])
            lines = [joined()]  # emptied before the yield, so that only the caller holds the line
            if len(lines[0]) > max_bytes:
                raise too_long(number, max_bytes)
            if lines[0] and not lines[0].isspace():
                yield number, lines.pop()
            number, length, start = number + 1, 0, end + 1
        parts.append(piece[start:])
        length += len(parts[-1])
        if length > max_bytes:
            raise too_long(number, max_bytes)
    if (line := joined()).strip():
        yield number, line


def too_long(number: int, max_bytes: int) -> BadLine:
    return BadLine(f"line {number} is longer than {max_bytes:,} bytes")
