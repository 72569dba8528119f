"""A conversation over the OpenAI API: its history and its streamed answers.

`tools.commands.chat` adds the terminal.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.failure import Failure
from tools.http.sse import DONE, EventReader
from tools.http.web import WebServer, hang_up


@dataclass(slots=True)
class ChatAnswer:
    """An answer, which grows until its stream ends. Times are in seconds of a monotonic clock."""

    text: str = ""
    finish_reason: str | None = None
    #: As counted by the server; 0 if it did not report it.
    tokens: int = 0
    #: When the first text arrived.
    started_at: float = 0.0
    #: When the last text arrived.
    ended_at: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, without the wait for the first token. 0 if it is unknown."""
        seconds = self.ended_at - self.started_at
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0


@dataclass(slots=True)
class ChatSession:
    """History and options of a conversation. `messages` contains only complete turns."""

    server: WebServer
    model: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    last: ChatAnswer = field(default_factory=ChatAnswer)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send `text` and yield the pieces of the answer as they arrive. Raises Failure.

        Closing the iterator early disconnects, which ends the request on the server. The text so
        far stays in the history because the user has read it. A refused turn is not added.
        """
        turn = {"role": "user", "content": text}
        self.last = answer = ChatAnswer()
        connection = self.server.connect(None)
        try:
            yield from self._stream(connection, turn, answer)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise Failure(f"lost the connection to {self.server.url}: {reason}") from None
        finally:
            hang_up(connection)
            if answer.text or answer.finish_reason:
                self.messages += [turn, {"role": "assistant", "content": answer.text}]

    def reset(self) -> None:
        self.messages.clear()

    def _stream(
        self, connection: http.client.HTTPConnection, turn: dict[str, str], answer: ChatAnswer
    ) -> Iterator[str]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, *self.messages, turn],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        try:
            response = self.server.post(connection, "/v1/chat/completions", body)
        except ConnectionRefusedError:
            raise no_server(self.server) from None
        if response.status != http.client.OK:
            raise Failure(_error_message(response.status, response.read()))
        for data in events(response):
            if piece := _apply(json.loads(data), answer):
                yield piece


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event until [DONE]. Comments (keep-alives) are skipped.

    Raises Failure if the stream ends without [DONE], because the answer may be incomplete.
    """
    reader = EventReader()
    for line in lines:
        for data in reader.push(line):
            if data == DONE:
                return
            yield data.decode()
    raise Failure("the answer is incomplete: the server closed the stream without [DONE]")


def no_server(server: WebServer) -> Failure:
    return Failure(f"no server answers at {server.url}; start one with: tidegate serve")


def _apply(chunk: dict[str, Any], answer: ChatAnswer) -> str:
    """Add a chunk to `answer`, and return its text."""
    if error := chunk.get("error"):
        raise Failure(f"the server reported an error: {error.get('message', error)}")
    if usage := chunk.get("usage"):
        answer.tokens = usage["completion_tokens"]
    piece = ""
    for choice in chunk.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        piece += choice["delta"].get("content") or ""
    if piece:
        answer.ended_at = time.monotonic()
        answer.started_at = answer.started_at or answer.ended_at
        answer.text += piece
    return piece


def _error_message(status: int, body: bytes) -> str:
    """Return the message of an error response, in OpenAI's format or any other."""
    try:
        return f"the server refused the request ({status}): {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"the server refused the request with status {status}"
