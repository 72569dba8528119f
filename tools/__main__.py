"""The `tidegate` command: which tool runs, and how its failures are told.

Each command is a row of COMMANDS, and a module that does it. A Failure becomes one line on stderr;
Ctrl-C ends quietly with the code that shells expect.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Protocol

from tools import (
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
from tools.bench import command as bench
from tools.bench import step as bench_step
from tools.failure import Failure
from tools.flags import OneLineParser
from tools.top import command as top

DESCRIPTION = (
    "Tidegate serves language models: on a plain CPU with one command, over the OpenAI API."
)

BENCH_STEP = "bench step"

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
        made.set_defaults(run=tool.run)
    return whole


def _commands(arguments: Sequence[str]) -> list[str]:
    """`bench step` is a command of its own, though it is two words."""
    said = list(arguments)
    two = BENCH_STEP.split()
    return [BENCH_STEP, *said[len(two) :]] if said[: len(two)] == two else said


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(_commands(sys.argv[1:] if arguments is None else arguments))
    try:
        code: int = options.run(options)
    except Failure as failure:
        print(f"tidegate: {failure}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return code


if __name__ == "__main__":
    sys.exit(main())
