"""`tidegate chat`: a conversation at the terminal.

Lines that start with a slash are commands. Everything else is a message to the model. Ctrl-C stops
an answer, not the program. If stdin is not a terminal, there is no prompt, and the first failure
ends the program. If stdout is not a terminal, only the answers are printed, as the model wrote
them, without its reasoning.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from tools.chat.lines import MessageLines, add_to_history, read_history
from tools.chat.markdown import MarkdownPrinter
from tools.chat.options import SAMPLING, add_sampling, change, listed, sampling_of
from tools.chat.reasoning import FAINT, PLAIN, ReasoningPrinter
from tools.chat.saved import as_json, as_markdown, read_saved, restore
from tools.chat.session import ChatAnswer, ChatSession
from tools.failure import Failure
from tools.http.web import KEY_VARIABLE, WebServer, no_server
from tools.models.fetch import home
from tools.paths import user_path
from tools.processes.discovery import add_server, server_url
from tools.terminal import safe_text

DESCRIPTION = """\
Chat with a running server. Ctrl-C stops an answer, Ctrl-D ends the chat. Markdown is rendered,
and reasoning is shown in faint text above the answer.
A line that ends with a backslash continues in the next one, and so does one that starts with three
double quotes, until three more. Ctrl-R searches earlier lines, which are kept in
$TIDEGATE_HOME/chat_history.
"""

EXAMPLES = """\
examples:
  tidegate chat
  tidegate chat --system "Answer in one sentence." --temperature 0
  echo "Name three fruits." | tidegate chat
"""

HELP = """\
/reset            start a new conversation
/retry            answer the last message again
/system TEXT      set the system prompt (no TEXT: show it)
/set NAME VALUE   set a sampling parameter, such as temperature 0.5 (no NAME: list them)
/model NAME       talk to another model (no NAME: list the models)
/save FILE        save the conversation, as markdown if FILE ends with .md, else as JSON
/load FILE        continue a conversation that was saved as JSON
/quit             quit (or Ctrl-D)
A line that ends with \\ continues in the next one; so does \"\"\", until another \"\"\"."""

COMMANDS = ("/help", "/load", "/model", "/quit", "/reset", "/retry", "/save", "/set", "/system")
PROMPT, CONTINUED = "> ", ". "
HISTORY = "chat_history"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(
        parser, takes_argument=True, otherwise="to chat with a model by its name: tidegate run {}"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"API key (default: ${KEY_VARIABLE})")
    parser.add_argument(
        "--model", metavar="NAME", help="model name (default: the server's first model)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_sampling(parser)
    parser.add_argument(
        "--plain", action="store_true", help="print answers as the model writes them, with markdown"
    )
    parser.add_argument(
        "--no-history", action="store_true", help="do not keep the lines that you type"
    )


def run(options: argparse.Namespace) -> int:
    server = WebServer(server_url(options), options.api_key or os.environ.get(KEY_VARIABLE, ""))
    model = options.model or server.first_model()
    if model is None:
        raise no_server(server)
    conversation = ChatSession(server, model, system=options.system, options=sampling_of(options))
    history = None if options.no_history else home() / HISTORY
    return ChatTerminal(conversation, is_plain=options.plain, history=history).run()


class AnswerPrinter(Protocol):
    """Converts the pieces of an answer into what is printed."""

    def push(self, text: str) -> str: ...
    def finish(self) -> str: ...


class PlainPrinter:
    """Passes the pieces of an answer through a function."""

    def __init__(self, convert: Callable[[str], str]) -> None:
        self.push = convert

    def finish(self) -> str:
        return ""


class SafeMarkdown(MarkdownPrinter):
    """Shows markdown in which no character can control the terminal, wrapped at its width."""

    def push(self, text: str) -> str:
        return super().push(safe_text(text))


class ChatTerminal:
    """Reads lines from stdin, and prints the answers. If stdout is a terminal, it also prints
    notes.

    is_plain   markdown is printed as it is
    history    file that keeps the lines; None: they are not kept
    """

    def __init__(
        self, conversation: ChatSession, *, is_plain: bool = False, history: Path | None = None
    ) -> None:
        self._conversation = conversation
        self._is_plain = is_plain
        self._history = history
        self._is_interactive = sys.stdin.isatty()
        self._is_shown = sys.stdout.isatty()

    def run(self) -> int:
        """Process lines until the end of the input, and return the exit code. If stdin is not a
        terminal, a failure ends the program, with its exit code."""
        if self._is_interactive:
            self._print_note(f"{self._conversation.model} at {self._conversation.server.url}")
            self._print_note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
        for message in self._messages():
            if message in ("/quit", "/exit"):
                break
            try:
                self._process(message)
            except Failure as failure:
                print(f"tidegate: {failure}", file=sys.stderr)
                if not self._is_interactive:
                    return failure.exit_code
        return 0

    def _process(self, message: str) -> None:
        if message.startswith("/"):
            self._command(*message[1:].split(maxsplit=1))
        else:
            self._answer(message)

    def _answer(self, text: str) -> None:
        """Print the answer to `text` as it arrives. Ctrl-C disconnects; the text so far is kept."""
        pieces, printer, reasoning = (
            self._conversation.ask(text),
            self._printer(),
            self._reasoning(),
        )
        stopped = False
        with contextlib.closing(pieces):
            try:
                for piece in pieces:
                    if piece.is_reasoning:
                        shown = reasoning.push(piece.text)
                    else:
                        shown = reasoning.finish() + printer.push(piece.text)
                    print(shown, end="", flush=True)
            except KeyboardInterrupt:
                stopped = True
            finally:
                print(reasoning.finish() + printer.finish(), flush=True)
        self._print_note(_summary(self._conversation.last, stopped=stopped))

    def _printer(self) -> AnswerPrinter:
        if not self._is_shown:
            return PlainPrinter(str)
        return PlainPrinter(safe_text) if self._is_plain else SafeMarkdown(_columns)

    def _reasoning(self) -> AnswerPrinter:
        if not self._is_shown:
            return PlainPrinter(lambda text: "")
        return ReasoningPrinter(None if self._is_plain else _columns)

    def _command(self, name: str = "", argument: str = "") -> None:
        conversation = self._conversation
        match name:
            case "reset":
                conversation.reset()
                self._print_note("conversation cleared")
            case "retry":
                message = conversation.take_back()
                if message is None:
                    raise Failure("there is no message to answer again")
                self._answer(message)
            case "system":
                conversation.system = argument or conversation.system
                self._print_note(f"system prompt: {conversation.system or 'none'}")
            case "model":
                self._choose_model(argument)
            case "set":
                self._set(argument)
            case "save":
                self._save(argument)
            case "load":
                self._load(argument)
            case "help":
                self._print_note(HELP)
            case _:
                raise Failure(f"unknown command /{name}; commands: {' '.join(COMMANDS)}")

    def _choose_model(self, name: str) -> None:
        """Continue with another model of the server; without a name, list the models."""
        conversation = self._conversation
        names = conversation.server.model_names()
        if name and name not in names:
            raise Failure(f"the server has no model {name!r}; it has {', '.join(names)}")
        conversation.model = name or conversation.model
        others = [each for each in names if each != conversation.model]
        note = f"model: {conversation.model}" + (f"  (also: {', '.join(others)})" if others else "")
        self._print_note(note)

    def _set(self, argument: str) -> None:
        """Set a sampling parameter; without an argument, list them."""
        conversation = self._conversation
        if argument:
            try:
                conversation.options = change(conversation.options, argument)
            except ValueError as error:
                raise Failure(str(error)) from None
        self._print_note(listed(conversation.options))

    def _load(self, name: str) -> None:
        """Replace the conversation by one that `_save` has written."""
        if not name:
            raise Failure("/load needs a file name")
        try:
            saved = read_saved(user_path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise Failure(f"cannot load: {error}") from None
        except ValueError as error:
            raise Failure(f"cannot load {name}: {error}") from None
        restore(saved, self._conversation)
        num_messages = len(self._conversation.messages)
        self._print_note(f"loaded {num_messages} messages of a chat with {saved.model}")

    def _save(self, name: str) -> None:
        if not name:
            raise Failure("/save needs a file name")
        conversation = self._conversation
        file = user_path(name)
        try:
            text = as_markdown if file.suffix == ".md" else as_json
            file.write_text(text(conversation), encoding="utf-8")
        except OSError as error:
            raise Failure(f"cannot save: {error}") from None
        self._print_note(f"saved {len(conversation.messages)} messages to {name}")

    def _messages(self) -> Iterator[str]:
        """Yield the messages and commands of stdin, except empty ones. Ctrl-C at the prompt clears
        the message."""
        lines = MessageLines()
        read = self._editor() if self._is_interactive else _read_line
        with contextlib.ExitStack() as at_end:
            if self._is_interactive and self._history is not None:
                at_end.callback(self._keep_history)
            while True:
                try:
                    message = lines.push(read(CONTINUED if lines.is_open else PROMPT))
                except EOFError:
                    if self._is_interactive:
                        print()
                    elif message := lines.finish():
                        yield message
                    return
                except KeyboardInterrupt:
                    lines.finish()
                    self._print_note("\n/quit or Ctrl-D ends the chat")
                    continue
                if message:
                    yield message

    def _editor(self) -> Callable[[str], str]:
        """Return a function that reads a line, which can be edited if Python has readline."""
        with contextlib.suppress(ImportError):
            import readline

            for line in read_history(self._history) if self._history else []:
                readline.add_history(line)
            self._old_lines = readline.get_current_history_length()
            readline.set_completer(_complete)
            readline.set_completer_delims(" ")
            readline.parse_and_bind("tab: complete")
        return input

    def _keep_history(self) -> None:
        """Add the lines of this chat to the history."""
        with contextlib.suppress(ImportError):
            import readline

            places = range(self._old_lines, readline.get_current_history_length())
            lines = [readline.get_history_item(place + 1) for place in places]
            assert self._history is not None
            try:
                add_to_history(self._history, [line for line in lines if line])
            except OSError as error:
                print(f"tidegate: cannot keep the history: {error}", file=sys.stderr)

    def _print_note(self, text: str) -> None:
        if self._is_shown:
            print(f"{FAINT}{safe_text(text)}{PLAIN}")


def _read_line(_prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _columns() -> int:
    """Return the width of the terminal that stdout is; 0 if it is unknown."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return 0


def _complete(text: str, number: int) -> str | None:
    """Return the command with this number among those that start with `text`, or after /set the
    parameter, for readline."""
    import readline

    is_set = readline.get_line_buffer().startswith("/set ")
    words = [option.field for option in SAMPLING] if is_set else COMMANDS
    found = [word for word in words if text and word.startswith(text)]
    return found[number] if number < len(found) else None


def _summary(answer: ChatAnswer, *, stopped: bool) -> str:
    """Return a line that describes an answer: tokens, speed and why it ended. The number of tokens
    is unknown if the user stopped the answer."""
    facts = [f"{answer.tokens} tokens"] if answer.tokens else []
    facts += [f"{answer.tokens_per_s:.1f} tokens/s"] if answer.tokens_per_s else []
    return f"[{', '.join([*facts, 'stopped by you' if stopped else str(answer.finish_reason)])}]"
