"""`tidegate chat`: a conversation at the terminal.

Lines that start with a slash are commands. Every other line is a message to the model. Ctrl-C stops
an answer, not the program. If stdin is not a terminal, there is no prompt, and the first failure
ends the program. If stdout is not a terminal, only the answers are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.failure import Failure
from tools.http.sse import DONE, EventReader
from tools.http.web import KEY_VARIABLE, WebServer, hang_up, no_server
from tools.processes.discovery import add_server, server_url

DESCRIPTION = "Chat with a running server. Ctrl-C stops an answer, Ctrl-D ends the chat."

EXAMPLES = """\
examples:
  tidegate chat
  tidegate chat --system "Answer in one sentence." --temperature 0
  echo "Name three fruits." | tidegate chat
"""

HELP = """\
/reset          start a new conversation     /system TEXT   set the system prompt (no TEXT: show it)
/save FILE      save it as JSON              /quit          quit (or Ctrl-D)"""

FAINT, PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument("--api-key", metavar="KEY", help=f"API key (default: ${KEY_VARIABLE})")
    parser.add_argument(
        "--model", metavar="NAME", help="model name (default: the server's first model)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="sampling temperature (default: the model's own)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum length of an answer (default: no limit)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed for reproducible answers")


def run(options: argparse.Namespace) -> int:
    server = WebServer(server_url(options), options.api_key or os.environ.get(KEY_VARIABLE, ""))
    model = options.model or server.first_model()
    if model is None:
        raise no_server(server)
    sampling = {name: getattr(options, name) for name in ("temperature", "max_tokens", "seed")}
    given = {name: value for name, value in sampling.items() if value is not None}
    conversation = ChatSession(server, model, system=options.system, options=given)
    return ChatTerminal(conversation).run()


class ChatTerminal:
    """Reads lines from stdin, and prints the answers. If stdout is a terminal, it also prints
    notes."""

    def __init__(self, conversation: ChatSession) -> None:
        self._conversation = conversation
        self._is_interactive = sys.stdin.isatty()
        self._prints_notes = sys.stdout.isatty()

    def run(self) -> int:
        """Process lines until the end of the input, and return the exit code. If stdin is not a
        terminal, a failure ends the program, with its exit code."""
        if self._is_interactive:
            self._print_note(f"{self._conversation.model} at {self._conversation.server.url}")
            self._print_note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
        for line in self._lines():
            if line in ("/quit", "/exit"):
                break
            try:
                self._process(line)
            except Failure as failure:
                print(f"tidegate: {failure}", file=sys.stderr)
                if not self._is_interactive:
                    return failure.exit_code
        return 0

    def _process(self, line: str) -> None:
        if line.startswith("/"):
            self._command(*line[1:].split(maxsplit=1))
        else:
            self._answer(line)

    def _answer(self, text: str) -> None:
        """Print the answer to `text` as it arrives. Ctrl-C disconnects; the text so far is kept."""
        pieces = self._conversation.ask(text)
        stopped = False
        with contextlib.closing(pieces):
            try:
                for piece in pieces:
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                stopped = True
        print(flush=True)
        self._print_note(_summary(self._conversation.last, stopped=stopped))

    def _command(self, name: str = "", argument: str = "") -> None:
        conversation = self._conversation
        match name:
            case "reset":
                conversation.reset()
                self._print_note("conversation cleared")
            case "system":
                conversation.system = argument or conversation.system
                self._print_note(f"system prompt: {conversation.system or 'none'}")
            case "save":
                self._save(argument)
            case "help":
                self._print_note(HELP)
            case _:
                raise Failure(
                    f"unknown command /{name}; commands: /help /reset /system /save /quit"
                )

    def _save(self, name: str) -> None:
        if not name:
            raise Failure("/save needs a file name")
        conversation = self._conversation
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        saved: dict[str, Any] = {
            "model": conversation.model,
            "messages": [*system, *conversation.messages],
        }
        try:
            text = json.dumps(saved, indent=2, ensure_ascii=False)
            Path(name).expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise Failure(f"cannot save: {error}") from None
        self._print_note(f"saved {len(conversation.messages)} messages to {name}")

    def _lines(self) -> Iterator[str]:
        """Yield the lines of stdin, except empty ones. Ctrl-C at the prompt clears the line."""
        if self._is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (editing and history for input())
        while True:
            try:
                line = input("> ") if self._is_interactive else sys.stdin.readline()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                self._print_note("\n/quit or Ctrl-D ends the chat")
                continue
            if not self._is_interactive and not line:
                return
            if line.strip():
                yield line.strip()

    def _print_note(self, text: str) -> None:
        if self._prints_notes:
            print(f"{FAINT}{text}{PLAIN}")


def _summary(answer: ChatAnswer, *, stopped: bool) -> str:
    """Return a line that describes an answer: tokens, speed and why it ended. The number of tokens
    is unknown if the user stopped the answer."""
    facts = [f"{answer.tokens} tokens"] if answer.tokens else []
    facts += [f"{answer.tokens_per_s:.1f} tokens/s"] if answer.tokens_per_s else []
    return f"[{', '.join([*facts, 'stopped by you' if stopped else str(answer.finish_reason)])}]"


# ---- the conversation: its history and its streamed answers


@dataclass(slots=True)
class ChatAnswer:
    """An answer to which text is added until its stream ends. Times are in seconds of a monotonic
    clock."""

    text: str = ""
    finish_reason: str | None = None
    #: Number of tokens that the server reported; 0 if it reported none.
    tokens: int = 0
    #: When the first text arrived.
    started_at: float = 0.0
    #: When the last text arrived.
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

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send `text` as a user's message, and yield the pieces of the answer as they arrive.

        Closing the iterator early disconnects, which ends the request on the server. The text so
        far is added to the history, because the user has read it. A message without any answer is
        not added. Raises Failure if the server refuses the request or reports an error, or if the
        connection is lost.
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
    """Yield the data of each server-sent event until [DONE]. Skip comments (keep-alives). Raises
    Failure if the stream ends without [DONE], because the answer may be incomplete."""
    reader = EventReader()
    for line in lines:
        for data in reader.push(line):
            if data == DONE:
                return
            yield data.decode()
    raise Failure("the answer is incomplete: the server closed the stream without [DONE]")


def _apply(chunk: dict[str, Any], answer: ChatAnswer) -> str:
    """Add a chunk to `answer`. Return the chunk's text. Raises Failure if the chunk is an error."""
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
    """Return a message about an error response, with the server's own message if it has one."""
    try:
        return f"the server refused the request ({status}): {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"the server refused the request with status {status}"
