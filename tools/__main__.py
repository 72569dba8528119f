"""The `tidegate` command: which tool runs, and how its failures are told.

Each command is a row of COMMANDS, and a module that does it. A Failure becomes one line on stderr;
Ctrl-C ends quietly with the code that shells expect.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from tools.commands import (
    abort,
    chat,
    doctor,
    drain,
    engine,
    key,
    keys,
    models,
    profile,
    ps,
    replay,
    serve,
    status,
    stop,
)
from tools.commands import bench as bench
from tools.commands import bench_step as bench_step
from tools.commands import top as top
from tools.failure import Failure
from tools.flags import OneLineParser
from tools.other_servers import OPTIONS
from tools.terminal import Terminal, log_style

DESCRIPTION = (
    "Tidegate serves language models: on a plain CPU with one command, over the OpenAI API."
)

BENCH_STEP = "bench step"
STARTERS = (serve.run, engine.run)
"""The commands that start engines. Other servers have other names for their options."""

EXAMPLES = """\
a first minute:
  tidegate serve                  fetch the default model, start, say where it listens
  tidegate chat                   in another terminal: talk to it
  tidegate status                 is it ready, what is running
  tidegate top                    watch what it does
  tidegate doctor                 if something is not as it should be
  tidegate bench                  how fast it answers, and how many
  tidegate models                 which models it knows by name, and where they are kept

each command explains itself: tidegate serve --help
"""


class Tool(Protocol):
    """What the module of a command has."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> int: ...


COMMANDS: tuple[tuple[str, str, Tool], ...] = (
    ("serve", "start a server", serve),
    ("chat", "talk to a server", chat),
    ("status", "show whether a server is ready and what it does", status),
    ("top", "watch an engine", top),
    ("abort", "end requests", abort),
    ("ps", "list servers and leftovers", ps),
    ("stop", "stop servers, clear leftovers", stop),
    ("replay", "replay a journal", replay),
    ("drain", "let an engine finish", drain),
    ("engine", "start one engine of a cluster, without a gateway", engine),
    ("doctor", "look at this machine first", doctor),
    ("bench", "put a load on a server", bench),
    (BENCH_STEP, "time one step of the worker", bench_step),
    ("keys", "keys of the HTTP API", keys),
    ("profile", "trace a running server", profile),
    ("key", "make a key for a cluster", key),
    ("models", "list the models known by name", models),
)
"""Name, summary, and what runs, in the order in which `--help` shows them."""


def parser() -> argparse.ArgumentParser:
    whole = OneLineParser(
        prog="tidegate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"tidegate {version('tidegate')}")
    commands = whole.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    for name, summary, tool in COMMANDS:
        made = commands.add_parser(
            name,
            help=summary,
            description=tool.DESCRIPTION,
            epilog=tool.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        tool.add_arguments(made)
        made.set_defaults(run=tool.run, parser=made)
    return whole


def _check_command(words: Sequence[str]) -> None:
    """Raise Failure for a command that does not exist, with the one that may be meant."""
    names = [name for name, _, _ in COMMANDS]
    word = words[0] if words else ""
    if word.startswith("-") or word in names:
        return
    if Path(word).suffix == ".gguf" or Path(word).is_dir():
        hint = f": to serve it, run: tidegate serve {word}"
    else:
        close = get_close_matches(word, names, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
    raise Failure(f"no command {word!r}{hint}  (see tidegate --help)", exit_code=2)


def _commands(arguments: Sequence[str]) -> list[str]:
    """`bench step` is a command of its own, though it is two words."""
    said = list(arguments)
    two = BENCH_STEP.split()
    return [BENCH_STEP, *said[len(two) :]] if said[: len(two)] == two else said


def main(arguments: Sequence[str] | None = None) -> int:
    words = _commands(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser().print_help()
        return 0
    log_format = None
    try:
        _check_command(words)
        options, unknown = parser().parse_known_args(words)
        if unknown:
            options.parser.refuse(unknown, OPTIONS if options.run in STARTERS else {})
        log_format = getattr(options, "log_format", None)  # of a command that starts a server
        code: int = options.run(options)
        sys.stdout.flush()
    except Failure as failure:
        Terminal(log_style(log_format)).fail(str(failure))
        return failure.exit_code
    except BrokenPipeError:  # the reader of our output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return code


if __name__ == "__main__":
    sys.exit(main())
