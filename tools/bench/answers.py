"""From the bytes of a socket to one measured answer: pure machines that are pushed, for any cut.

    bytes -> ResponseReader (HTTP/1.1) -> EventReader (sse.py) -> AnswerReader (chunks)

The time is an argument: when the bytes were there.
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
COMPLAINT_CHARS = 200


class BadResponse(Exception):
    """What came is no HTTP response."""


class At(Enum):
    """Where in a response the next byte stands."""

    HEAD = auto()
    BODY = auto()  # `_left` more bytes; None: until the connection ends
    CHUNK_SIZE = auto()
    CHUNK = auto()  # `_left` more bytes
    CHUNK_END = auto()
    TRAILER = auto()
    END = auto()


class ResponseReader:
    """One response. `status` and `headers` (names in lower case) are known once HEAD is behind."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.at = At.HEAD
        self._left: int | None = None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What of the body is in `data`. Raises BadResponse."""
        data = self._held + data if self._held else data
        self._held = b""
        body = []
        while data and self.at is not At.END:
            match self.at:
                case At.BODY | At.CHUNK:
                    piece = data if self._left is None else data[: self._left]
                    data = data[len(piece) :]
                    body.append(piece)
                    self._count(len(piece))
                case At.HEAD:
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

    def close(self) -> None:
        """The connection has ended: a body without a length is complete."""
        if self.at is At.BODY and self._left is None:
            self.at = At.END

    @property
    def keeps_alive(self) -> bool:
        return self.at is At.END and self.headers.get("connection", "").lower() != "close"

    def _hold(self, data: bytes) -> None:
        if len(data) > MAX_HEAD_BYTES:
            raise BadResponse("a line of the response has no end")
        self._held = data

    def _count(self, size: int) -> None:
        if self._left is not None:
            self._left -= size
            if not self._left:
                self.at = At.END if self.at is At.BODY else At.CHUNK_END

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise BadResponse(f"no HTTP response: {first[:40]!r}")
        self.status = int(rest[:3])
        if self.status < OK:  # 100 Continue and the like: the response proper follows
            return
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        if version == "HTTP/1.0":
            self.headers["connection"] = "close"
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self.at = At.CHUNK_SIZE
            return
        length = self.headers.get("content-length")
        if length is not None and not length.isdigit():
            raise BadResponse(f"Content-Length: {length}")
        self._left = None if length is None else int(length)
        self.at = At.END if self._left == 0 else At.BODY
        if length is None:
            self.headers["connection"] = "close"

    def _read_line(self, line: bytes) -> None:
        match self.at:
            case At.CHUNK_SIZE:
                try:
                    self._left = int(line.partition(b";")[0], 16)
                except ValueError:
                    raise BadResponse(f"size of a chunk: {line[:40]!r}") from None
                self.at = At.CHUNK if self._left else At.TRAILER
            case At.CHUNK_END:
                self.at = At.CHUNK_SIZE
            case At.TRAILER if not line:
                self.at = At.END


# ---- chunks, as far as they matter here


class BenchDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class BenchChoice(msgspec.Struct):
    text: str | None = None
    delta: BenchDelta | None = None

    @property
    def brings(self) -> bool:
        """Whether anything of the answer is in it: a role or an end alone is not."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class UsageTold(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    choices: list[BenchChoice] = []
    usage: UsageTold | None = None
    error: Any = None


CHUNK = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class BenchAnswer:
    """What one request came to. Times are seconds of one clock.

    started        when it was to be sent
    times          [events] when each event with a piece of the answer came
    error          what went wrong, as a kind that others may share; "" for a complete answer
    complaint      the server's own words, or the system's
    counted        by "usage", as the server told it, or by "chunks", where it did not
    asked_tokens   how long the answer was to be
    num_resent     how often a connection that had served before was closed instead of answered
    """

    started: float
    asked_tokens: int = 0
    ended: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    error: str = ""
    complaint: str = ""
    num_resent: int = 0
    usage: UsageTold | None = None

    @property
    def counted(self) -> str:
        return "chunks" if self.usage is None else "usage"

    @property
    def output_tokens(self) -> int:
        return len(self.times) if self.usage is None else self.usage.completion_tokens

    @property
    def ttft_s(self) -> float:
        """Only of an answer with a first token, as the next one."""
        return self.times[0] - self.started

    @property
    def tpot_s(self) -> float | None:
        """Time per token behind the first; None where there is none."""
        further = self.output_tokens - 1
        return (self.times[-1] - self.times[0]) / further if further > 0 else None

    def fail(self, kind: str, complaint: str = "") -> None:
        """The first thing that went wrong is what is told."""
        if not self.error:
            self.error, self.complaint = kind, complaint[:COMPLAINT_CHARS]


class AnswerReader:
    """Fills an `BenchAnswer`. `is_done` once nothing more can come."""

    def __init__(self, answer: BenchAnswer) -> None:
        self.answer = answer
        self.response = ResponseReader()
        self._events = EventReader()
        self._refusal = b""
        self._said_done = False

    @property
    def is_done(self) -> bool:
        return self.response.at is At.END

    def feed(self, data: bytes, now: float) -> None:
        """Raises BadResponse."""
        body = self.response.feed(data)
        if self.response.status == OK:
            for event in self._events.feed(body):
                self._take(event, now)
        else:
            self._refusal += body
        if self.is_done:
            self._end(now)

    def close(self, now: float) -> None:
        """The connection has ended."""
        if self.is_done:
            return
        self.response.close()
        if not self.is_done:
            self.answer.fail("connection lost", "in the middle of an answer")
        self._end(now)

    def _take(self, event: bytes, now: float) -> None:
        if event == DONE:
            self._said_done = True
            return
        try:
            chunk = CHUNK.decode(event)
        except msgspec.MsgspecError as error:
            self.answer.fail("malformed event", f"{error}: {event[:80].decode(errors='replace')}")
            return
        if chunk.error:
            self.answer.fail("error in the stream", complaint_of(chunk.error))
        if chunk.usage is not None:
            self.answer.usage = chunk.usage
        if any(choice.brings for choice in chunk.choices):
            self.answer.times.append(now)

    def _end(self, now: float) -> None:
        answer = self.answer
        answer.ended = now
        if self.response.status != OK:
            answer.fail(f"status {self.response.status}", _refusal(self._refusal))
        elif not self._said_done:
            answer.fail("broken stream", "it ended without [DONE]")
        elif not answer.times:
            answer.fail("empty answer", "no event brought any text")


def complaint_of(error: Any) -> str:
    """The words of an error in OpenAI's shape, or of any other."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _refusal(body: bytes) -> str:
    try:
        told = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")
    return complaint_of(told.get("error", told) if isinstance(told, dict) else told)
