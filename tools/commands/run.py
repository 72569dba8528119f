"""`tidegate run`: one answer on stdout, or a chat at a terminal.

A running server that has the model answers, if there is one. Otherwise a server is started for this
answer. Only the answer is printed on stdout. If stdout is a terminal, characters in the answer that
could control it are replaced. If stderr is a terminal, it shows the model's reasoning.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from collections.abc import Iterator

from tools.chat.options import add_sampling, sampling_of
from tools.chat.reasoning import ReasoningPrinter
from tools.chat.session import CHAT_PATH, COMPLETION_PATH, ChatAnswer, ChatSession
from tools.commands.chat import HISTORY, ChatTerminal
from tools.commands.models import resolve
from tools.failure import Failure
from tools.flags import allow_late
from tools.http.web import KEY_VARIABLE, WebServer, no_server
from tools.models.fetch import home, print_on_stderr
from tools.processes.discovery import add_server, running, server_url
from tools.processes.private_server import PrivateServer
from tools.terminal import safe_text

DESCRIPTION = """\
Print one answer of a model, or chat with it if there is no PROMPT and stdin is a terminal. A
running server that has the model answers, or else a server that is started for this command. If
stdin is a pipe or a file, its text is the prompt, or follows PROMPT.
"""

EXAMPLES = """\
examples:
  tidegate run smollm2-135m                      chat
  tidegate run smollm2-135m "Name three fruits."
  git diff | tidegate run qwen3-0.6b "Summarise this change in one sentence."
  tidegate run smollm2-135m --raw "The capital of France is" --max-tokens 8
  tidegate run smollm2-135m --json "Hello!" > answer.json
"""

STARTING = "starting a server for {}; `tidegate serve` keeps one running"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as in `tidegate serve`")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the message to the model")
    allow_late(parser, "prompt")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_sampling(parser)
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompt as it is, without the model's chat template",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the response of the API in place of its text"
    )
    parser.add_argument("--config", metavar="FILE", help="options of the server, if one is started")
    add_server(parser)


def run(options: argparse.Namespace) -> int:
    chats = _is_chat(options)
    prompt = "" if chats else _prompt(options.prompt)
    if options.raw and options.system:
        raise Failure("--system needs the chat template: leave out --raw", exit_code=2)
    with _server(options) as (server, model):
        session = ChatSession(server, model, system=options.system, options=sampling_of(options))
        if chats:
            return ChatTerminal(session, history=home() / HISTORY).run()
        _answer(session, prompt, options)
    return 0


def _is_chat(options: argparse.Namespace) -> bool:
    """Return whether the user is to type messages."""
    wants_one = options.prompt is not None or options.raw or options.json
    return not wants_one and sys.stdin.isatty() and sys.stdout.isatty()


def _answer(session: ChatSession, prompt: str, options: argparse.Namespace) -> None:
    turn = {"role": "user", "content": prompt}
    path, body = (
        (COMPLETION_PATH, {"prompt": prompt})
        if options.raw
        else (CHAT_PATH, {"messages": [*session.transcript, turn]})
    )
    if options.json:
        print(session.whole(path, body).decode())
        return
    is_terminal, shows_reasoning = sys.stdout.isatty(), sys.stderr.isatty()
    reasoning = ReasoningPrinter()
    with contextlib.closing(session.stream(path, body, ChatAnswer())) as pieces:
        try:
            for text, is_reasoning in pieces:
                if not is_reasoning:
                    print(reasoning.finish(), end="", file=sys.stderr, flush=True)
                    print(safe_text(text) if is_terminal else text, end="", flush=True)
                elif shows_reasoning:
                    print(reasoning.push(text), end="", file=sys.stderr, flush=True)
        finally:
            print(reasoning.finish(), end="", file=sys.stderr, flush=True)
    print(flush=True)


def _prompt(argument: str | None) -> str:
    """Return the prompt: the argument, what stdin has, or both. A stdin that is neither a pipe nor
    a file is not read, so the command never waits for a terminal. Raises Failure if there is no
    prompt."""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    is_piped = stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
    try:
        piped = sys.stdin.read() if is_piped else ""
    except UnicodeDecodeError:
        raise Failure("stdin is not UTF-8 text", exit_code=2) from None
    parts = [part for part in (argument, piped) if part and part.strip()]
    if not parts:
        raise Failure(
            "the prompt is empty: tidegate run MODEL PROMPT, or pipe it to stdin", exit_code=2
        )
    return "\n\n".join(parts)


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[tuple[WebServer, str]]:
    """Yield a server that has the model, and the model's name in its API: the server that the
    options select, one that runs on this machine, or one that is started and ends with the block.
    """
    key, model = os.environ.get(KEY_VARIABLE, ""), options.model
    if options.url or options.port is not None:
        yield WebServer(server_url(options), key), model
        return
    for each in running():
        server = WebServer(each.url, key)
        if model in each.model.split(", ") and _has(server, model):
            yield server, model
            return
    progress = print_on_stderr if sys.stderr.isatty() else _print_nothing
    resolve(model, home(), progress)  # a download shows its progress
    progress(STARTING.format(model))
    config = ["--config", options.config] if options.config else []
    with PrivateServer(model, config) as started:
        name = started.web.first_model()
        if name is None:
            raise no_server(started.web)
        yield started.web, name


def _has(server: WebServer, model: str) -> bool:
    """Return whether a server answers with `model`. It does not if its API key is another one."""
    try:
        return model in server.model_names()
    except Failure:
        return False


def _print_nothing(text: str) -> None:
    pass
