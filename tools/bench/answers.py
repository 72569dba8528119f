"""Parses the bytes of an HTTP response, piece by piece, into one measured answer.

    bytes -> ResponseReader (HTTP/1.1) -> EventReader (sse.py) -> AnswerReader (chunks)

The parsers do no I/O and read no clock: the bytes and their arrival time are arguments.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from tools.http.sse import DONE, EventReader

OK = 200
MAX_HEAD_BYTES = 1 << 16
MESSAGE_CHARS = 200


class BadResponse(Exception):
    """The bytes are not a valid HTTP response."""


class ResponsePart(Enum):
    """The part of a response to which the next byte belongs."""

    HEAD = auto()
    BODY = auto()  # `_left` more bytes; if `_left` is None, until the connection ends
    CHUNK_SIZE = auto()
    CHUNK = auto()  # `_left` more bytes
    CHUNK_END = auto()
    TRAILER = auto()
    END = auto()


class ResponseReader:
    """Parses one HTTP response.

    status    0 until the head of the response was parsed
    headers   by name in lower case; empty until the head was parsed
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.part = ResponsePart.HEAD
        self._left: int | None = None
        self._held = b""

    def push(self, data: bytes) -> bytes:
        """Parse the next bytes of the response. Return those that belong to the body. Raises
        BadResponse if they are not valid HTTP."""
        data = self._held + data if self._held else data
        self._held = b""
        body = []
        while data and self.part is not ResponsePart.END:
            match self.part:
                case ResponsePart.BODY | ResponsePart.CHUNK:
                    piece = data if self._left is None else data[: self._left]
                    data = data[len(piece) :]
                    body.append(piece)
                    self._count(len(piece))
                case ResponsePart.HEAD:
                    head, found, rest = data.partition(b"\r\n\r\n")
                    if not found:
                        break
                    data = rest
                    self._read_head(head)
                case _:
                    line, found, rest = data.partition(b"\r\n")
                    if not found:
                        break
                    data = rest
                    self._read_line(line)
        self._hold(data)
        return b"".join(body)

    def finish(self) -> None:
        """Handle the end of the connection. It ends a body without a Content-Length. Any other
        incomplete response stays incomplete: its `part` is not END."""
        if self.part is ResponsePart.BODY and self._left is None:
            self.part = ResponsePart.END

    @property
    def keeps_alive(self) -> bool:
        return (
            self.part is ResponsePart.END and self.headers.get("connection", "").lower() != "close"
        )

    def _hold(self, data: bytes) -> None:
        if len(data) > MAX_HEAD_BYTES:
            raise BadResponse(f"a line of the response exceeds {MAX_HEAD_BYTES} bytes")
        self._held = data

    def _count(self, size: int) -> None:
        if self._left is not None:
            self._left -= size
            if not self._left:
                self.part = (
                    ResponsePart.END if self.part is ResponsePart.BODY else ResponsePart.CHUNK_END
                )

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise BadResponse(f"not an HTTP response: {first[:40]!r}")
        self.status = int(rest[:3])
        if self.status < OK:  # an interim response such as 100 Continue; the final one follows
            return
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        if version == "HTTP/1.0":
            self.headers["connection"] = "close"
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self.part = ResponsePart.CHUNK_SIZE
            return
        length = self.headers.get("content-length")
        if length is not None and not length.isdigit():
            raise BadResponse(f"invalid Content-Length: {length}")
        self._left = None if length is None else int(length)
        self.part = ResponsePart.END if self._left == 0 else ResponsePart.BODY
        if length is None:
            self.headers["connection"] = "close"

    def _read_line(self, line: bytes) -> None:
        match self.part:
            case ResponsePart.CHUNK_SIZE:
                try:
                    self._left = int(line.partition(b";")[0], 16)
                except ValueError:
                    raise BadResponse(f"invalid chunk size: {line[:40]!r}") from None
                self.part = ResponsePart.CHUNK if self._left else ResponsePart.TRAILER
            case ResponsePart.CHUNK_END:
                self.part = ResponsePart.CHUNK_SIZE
            case ResponsePart.TRAILER if not line:
                self.part = ResponsePart.END


# ---- the chunks of a stream: only the fields that are used here


class BenchDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class BenchChoice(msgspec.Struct):
    text: str | None = None
    delta: BenchDelta | None = None

    @property
    def has_content(self) -> bool:
        """Whether the choice contains a part of the answer, rather than only a role or a finish
        reason."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class BenchUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    choices: list[BenchChoice] = []
    usage: BenchUsage | None = None
    error: Any = None


CHUNK = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class BenchAnswer:
    """The result of one request. Times are in seconds on the same clock."""

    #: When the request was due to be sent.
    started: float
    #: The requested length of the answer.
    requested_tokens: int = 0
    ended: float = 0.0
    #: Arrival time of each event that contains a piece of the answer.
    times: array[float] = field(default_factory=lambda: array("d"))
    #: The kind of the first error; "" for a complete answer.
    error: str = ""
    #: The message of the first error, from the server or the operating system.
    message: str = ""
    #: How often the request was sent again, because the server had closed a reused connection.
    num_resent: int = 0
    usage: BenchUsage | None = None

    @property
    def counted(self) -> str:
        """How tokens were counted: "usage" if the server reported their number, else "chunks"."""
        return "chunks" if self.usage is None else "usage"

    @property
    def output_tokens(self) -> int:
        return len(self.times) if self.usage is None else self.usage.completion_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds from `started` to the first token. Raises IndexError if there are no tokens."""
        return self.times[0] - self.started

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there are no further tokens."""
        further = self.output_tokens - 1
        return (self.times[-1] - self.times[0]) / further if further > 0 else None

    def fail(self, kind: str, message: str = "") -> None:
        """Record an error, unless one was recorded before.

        kind   short text; errors of the same kind are counted together
        """
        if not self.error:
            self.error, self.message = kind, message[:MESSAGE_CHARS]


class AnswerReader:
    """Parses the bytes of one response, and fills in its `BenchAnswer`."""

    def __init__(self, answer: BenchAnswer) -> None:
        self.answer = answer
        self.response = ResponseReader()
        self._events = EventReader()
        self._refusal = b""
        self._has_done = False

    @property
    def is_done(self) -> bool:
        return self.response.part is ResponsePart.END

    def push(self, data: bytes, now: float) -> None:
        """Parse the next bytes, which arrived at `now`. Raises BadResponse if they are not valid
        HTTP."""
        body = self.response.push(data)
        if self.response.status == OK:
            for event in self._events.push(body):
                self._apply(event, now)
        else:
            self._refusal += body
        if self.is_done:
            self._end(now)

    def finish(self, now: float) -> None:
        """Handle the end of the connection."""
        if self.is_done:
            return
        self.response.finish()
        if not self.is_done:
            self.answer.fail("connection lost", "in the middle of an answer")
        self._end(now)

    def _apply(self, event: bytes, now: float) -> None:
        if event == DONE:
            self._has_done = True
            return
        try:
            chunk = CHUNK.decode(event)
        except msgspec.MsgspecError as error:
            self.answer.fail("malformed event", f"{error}: {event[:80].decode(errors='replace')}")
            return
        if chunk.error:
            self.answer.fail("error in the stream", error_message(chunk.error))
        if chunk.usage is not None:
            self.answer.usage = chunk.usage
        if any(choice.has_content for choice in chunk.choices):
            self.answer.times.append(now)

    def _end(self, now: float) -> None:
        answer = self.answer
        answer.ended = now
        if self.response.status != OK:
            answer.fail(f"status {self.response.status}", _refusal(self._refusal))
        elif not self._has_done:
            answer.fail("broken stream", "it ended without [DONE]")
        elif not answer.times:
            answer.fail("empty answer", "no event contained any text")


def error_message(error: Any) -> str:
    """Return the message of an error in OpenAI's format; any other error as text."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _refusal(body: bytes) -> str:
    try:
        parsed = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")
    return error_message(parsed.get("error", parsed) if isinstance(parsed, dict) else parsed)
