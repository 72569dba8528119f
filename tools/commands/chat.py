"""`tidegate chat`: a conversation at the terminal.

Lines starting with a slash are commands, every other line is said to the model. Ctrl-C stops an
answer, not the program. Where the input is no terminal, each line is a turn and the output is the
answers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.failure import Failure
from tools.http.conversation import ChatAnswer, ChatSession, no_server
from tools.http.web import KEY_VARIABLE, WebServer
from tools.processes.servers import add_server, server_url

DESCRIPTION = "Talk to a running server. Answers stream; Ctrl-C stops an answer, Ctrl-D ends."

EXAMPLES = """\
examples:
  tidegate chat
  tidegate chat --system "Answer in one sentence." --temperature 0
  echo "What is the capital of France?" | tidegate chat
"""

HELP = """\
/reset          forget the conversation      /system TEXT   set the system prompt (alone: show it)
/save FILE      write it as JSON             /quit          leave (Ctrl-D as well)"""

FAINT, PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument("--api-key", help=f"where the server wants one (default: ${KEY_VARIABLE})")
    parser.add_argument("--model", help="which of its models (default: the first)")
    parser.add_argument("--system", help="a system prompt")
    parser.add_argument("--temperature", type=float, help="default: the model's own")
    parser.add_argument("--max-tokens", type=int, help="the longest answer (default: no limit)")
    parser.add_argument("--seed", type=int, help="the same answers each time")


def run(options: argparse.Namespace) -> int:
    server = WebServer(server_url(options), options.api_key or os.environ.get(KEY_VARIABLE, ""))
    model = options.model or server.first_model()
    if model is None:
        raise no_server(server)
    asked = {name: getattr(options, name) for name in ("temperature", "max_tokens", "seed")}
    given = {name: value for name, value in asked.items() if value is not None}
    conversation = ChatSession(server, model, system=options.system, options=given)
    return ChatTerminal(conversation).run()


class ChatTerminal:
    """Reads lines, prints answers. Talks about itself only if a person is there to read it."""

    def __init__(self, conversation: ChatSession) -> None:
        self._conversation = conversation
        self._asks = sys.stdin.isatty()
        self._explains = sys.stdout.isatty()

    def run(self) -> int:
        """Exit code 1 if a turn failed and nobody was there to try again."""
        if self._asks:
            self._faintly(f"{self._conversation.model} at {self._conversation.server.url}")
            self._faintly("/help for commands, Ctrl-C stops an answer, Ctrl-D ends")
        for line in self._lines():
            if line in ("/quit", "/exit"):
                break
            try:
                self._take(line)
            except Failure as failure:
                print(f"tidegate: {failure}", file=sys.stderr)
                if not self._asks:
                    return failure.exit_code
        return 0

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            self._command(*line[1:].split(maxsplit=1))
        else:
            self._answer(line)

    def _answer(self, text: str) -> None:
        """Print the answer as it comes; Ctrl-C hangs up and keeps what came."""
        pieces = self._conversation.ask(text)
        stopped = False
        with contextlib.closing(pieces):
            try:
                for piece in pieces:
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                stopped = True
        print(flush=True)
        self._faintly(_summary(self._conversation.last, stopped=stopped))

    def _command(self, name: str = "", argument: str = "") -> None:
        conversation = self._conversation
        match name:
            case "reset":
                conversation.reset()
                self._faintly("forgotten")
            case "system":
                conversation.system = argument or conversation.system
                self._faintly(f"system prompt: {conversation.system or 'none'}")
            case "save":
                self._save(argument)
            case "help":
                self._faintly(HELP)
            case _:
                raise Failure(f"no command /{name}; there are /help /reset /system /save /quit")

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
        self._faintly(f"saved {len(conversation.messages)} messages to {name}")

    def _lines(self) -> Iterator[str]:
        """What the user says, without empty lines. Ctrl-C at the prompt clears the line."""
        if self._asks:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (editing and history for input())
        while True:
            try:
                line = input("> ") if self._asks else sys.stdin.readline()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                self._faintly("\n/quit or Ctrl-D leaves")
                continue
            if not self._asks and not line:
                return
            if line.strip():
                yield line.strip()

    def _faintly(self, text: str) -> None:
        if self._explains:
            print(f"{FAINT}{text}{PLAIN}")


def _summary(answer: ChatAnswer, *, stopped: bool) -> str:
    """What is known about an answer; a stopped one never heard its count."""
    facts = [f"{answer.tokens} tokens"] if answer.tokens else []
    facts += [f"{answer.tokens_per_s:.1f} tokens/s"] if answer.tokens_per_s else []
    return f"[{', '.join([*facts, 'stopped by you' if stopped else str(answer.finish_reason)])}]"
