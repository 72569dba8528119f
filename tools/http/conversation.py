"""One conversation with a chat model over the OpenAI API: its history, and answers as they stream.

Knows HTTP and server-sent events, not the terminal; `tools.commands.chat` is the terminal.
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
    """What is known about an answer; complete when its stream has ended.

    tokens      as counted by the server; 0 if it did not say
    started_at, ended_at   when its first and its last text came, in seconds of a steady clock
    """

    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of decoding: the first token's wait is not in it. 0 where it cannot be told."""
        seconds = self.ended_at - self.started_at
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0


@dataclass(slots=True)
class ChatSession:
    """History and options. `messages` holds whole turns: what the user said and was answered."""

    server: WebServer
    model: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    last: ChatAnswer = field(default_factory=ChatAnswer)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Say `text`; yield the answer's pieces as they come. Raises Failure.

        Closing the iterator early hangs up, which stops the server's work; what had come by then
        stays in the history, since the user has read it. A refused turn is not remembered.
        """
        turn = {"role": "user", "content": text}
        self.last = answer = ChatAnswer()
        connection = self.server.connect(None)
        try:
            yield from self._stream(connection, turn, answer)
        except (OSError, http.client.HTTPException) as error:
            raise Failure(f"the connection to {self.server.url} broke: {_words(error)}") from None
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
            raise Failure(_complaint(response.status, response.read()))
        for data in events(response):
            if piece := _take(json.loads(data), answer):
                yield piece


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each server-sent event, up to [DONE]; comments (keep-alives) are skipped.

    Raises Failure if the stream ends without [DONE]: what came may be half an answer.
    """
    reader = EventReader()
    for line in lines:
        for data in reader.feed(line):
            if data == DONE:
                return
            yield data.decode()
    raise Failure("the server ended the answer without saying that it was complete")


def no_server(server: WebServer) -> Failure:
    return Failure(f"no server answers at {server.url}; start one with: tidegate serve")


def _take(chunk: dict[str, Any], answer: ChatAnswer) -> str:
    """Note what a chunk says in `answer`; its text, "" if it has none."""
    if error := chunk.get("error"):
        raise Failure(f"the server gave up: {error.get('message', error)}")
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


def _complaint(status: int, body: bytes) -> str:
    """What a refusal says, in OpenAI's shape or any other."""
    try:
        return f"the server refused ({status}): {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"the server refused with status {status}"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
