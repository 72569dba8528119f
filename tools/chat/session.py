"""`ChatSession`: the history of a conversation with a server, and its requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools.failure import Failure
from tools.http.sse import DONE, EventReader
from tools.http.web import WebServer, hang_up, no_server

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


class ChatPiece(NamedTuple):
    """Text that was added to an answer, or to the reasoning before it."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class ChatAnswer:
    """An answer to which text is added until its stream ends. Times are in seconds of a monotonic
    clock."""

    text: str = ""
    finish_reason: str | None = None
    #: Number of tokens that the server reported, with those of reasoning; 0 if it reported none.
    tokens: int = 0
    #: When the first text or reasoning arrived.
    started_at: float = 0.0
    #: When the last text or reasoning arrived.
    ended_at: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The decoding speed, without the time to the first token; 0 if it is unknown."""
        seconds = self.ended_at - self.started_at
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0


@dataclass(slots=True)
class ChatSession:
    """The history of a conversation, and its options.

    options    sampling parameters for each request
    messages   the history, whose last message is always an answer
    last       the last answer
    """

    server: WebServer
    model: str
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    last: ChatAnswer = field(default_factory=ChatAnswer)

    @property
    def transcript(self) -> list[dict[str, str]]:
        """All messages, with the system prompt first if there is one."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, text: str) -> Generator[ChatPiece, None, None]:
        """Send `text` as a user's message, and yield the pieces of the answer as they arrive.

        Closing the iterator early disconnects, which ends the request on the server. The text so
        far is added to the history, because the user has read it; the reasoning is not. A message
        without any answer is not added. Raises Failure if the server refuses the request or reports
        an error, or if the connection is lost.
        """
        turn = {"role": "user", "content": text}
        self.last = answer = ChatAnswer()
        body = {"messages": [*self.transcript, turn]}
        try:
            yield from self.stream(CHAT_PATH, body, answer)
        finally:
            if answer.text or answer.finish_reason:
                self.messages += [turn, {"role": "assistant", "content": answer.text}]

    def take_back(self) -> str | None:
        """Remove the last message and its answer, and return the message; None if there is none."""
        if not self.messages:
            return None
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        return text

    def reset(self) -> None:
        self.messages.clear()

    def stream(
        self, path: str, body: Mapping[str, Any], answer: ChatAnswer
    ) -> Generator[ChatPiece, None, None]:
        """Send a request with the options of the conversation, and yield the pieces of `answer` as
        they arrive. Closing the iterator early disconnects. Raises Failure as `ask` does."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        with self._posted(path, {**body, **streamed}) as response:
            for data in events(response):
                yield from _apply(json.loads(data), answer)

    def whole(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Send a request with the options of the conversation, and return the body of the response,
        which is JSON. Raises Failure as `ask` does."""
        with self._posted(path, body) as response:
            return response.read()

    @contextlib.contextmanager
    def _posted(self, path: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and yield the response. Raises Failure if the response is an error, or if
        the server cannot be reached."""
        connection = self.server.connect(None)
        try:
            response = self.server.post(
                connection, path, {"model": self.model, **body, **self.options}
            )
            if response.status != http.client.OK:
                raise Failure(_error_message(response.status, response.read()))
            yield response
        except ConnectionRefusedError:
            raise no_server(self.server) from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise Failure(f"lost the connection to {self.server.url}: {reason}") from None
        finally:
            hang_up(connection)


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event until [DONE]. Skip comments (keep-alives). Raises
    Failure if the stream ends without [DONE], because the answer may be incomplete."""
    reader = EventReader()
    for line in lines:
        for data in reader.push(line):
            if data == DONE:
                return
            yield data.decode()
    raise Failure("the answer is incomplete: the server closed the stream without [DONE]")


def _apply(chunk: dict[str, Any], answer: ChatAnswer) -> list[ChatPiece]:
    """Add a chunk to `answer`. Return its pieces. Raises Failure if the chunk is an error."""
    if error := chunk.get("error"):
        raise Failure(f"the server reported an error: {error.get('message', error)}")
    if usage := chunk.get("usage"):
        answer.tokens = usage["completion_tokens"]
    pieces = []
    for choice in chunk.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            pieces.append(ChatPiece(reasoning, is_reasoning=True))
        if text := delta.get("content") or choice.get("text"):
            pieces.append(ChatPiece(text))
            answer.text += text
    if pieces:
        answer.ended_at = time.monotonic()
        answer.started_at = answer.started_at or answer.ended_at
    return pieces


def _error_message(status: int, body: bytes) -> str:
    """Return a message about an error response, with the server's own message if it has one."""
    try:
        return f"the server refused the request ({status}): {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"the server refused the request with status {status}"
