"""The `tidegate` command: runs the module of the selected subcommand and reports its failure.

Each subcommand is a row of COMMANDS and a module in `tools.commands`. A Failure is printed as one
line on stderr. Ctrl-C ends the command without a message, with the exit code that shells expect.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
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
    pull,
    quantize,
    replay,
    rm,
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

DESCRIPTION = "Tidegate serves language models over the OpenAI API. It runs on a plain CPU."

BENCH_STEP = "bench step"
STARTERS = (serve.run, engine.run)
"""Commands that start engines. Their errors name replacements for options of other servers."""

EXAMPLES = """\
getting started:
  tidegate serve                  download the default model and start a server
  tidegate chat                   chat with the server, from another terminal
  tidegate status                 show whether the server is ready and how busy it is
  tidegate top                    watch the engine and its open requests
  tidegate doctor                 check this machine if something does not work
  tidegate bench                  measure latency and throughput
  tidegate models                 list the models in the cache and in the catalogue

for the options of a command: tidegate serve --help
"""


class Tool(Protocol):
    """The interface of a command's module."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> int: ...


COMMANDS: tuple[tuple[str, str, Tool], ...] = (
    ("serve", "start a server", serve),
    ("chat", "chat with a server", chat),
    ("status", "show whether a server is ready and how busy it is", status),
    ("top", "watch an engine and its open requests", top),
    ("abort", "abort requests", abort),
    ("ps", "list servers, and processes and sockets left behind", ps),
    ("stop", "stop servers and remove what was left behind", stop),
    ("replay", "replay a journal", replay),
    ("drain", "stop an engine after its open requests finish", drain),
    ("engine", "start one engine of a cluster, without a gateway", engine),
    ("doctor", "check whether this machine can run a server", doctor),
    ("bench", "measure the latency and throughput of a server", bench),
    (BENCH_STEP, "measure one step of the worker", bench_step),
    ("keys", "add, list and revoke API keys", keys),
    ("profile", "trace the worker of a running server", profile),
    ("key", "create a cluster key", key),
    ("models", "list the models in the cache, and those of the catalogue", models),
    ("pull", "download a model", pull),
    ("quantize", "write a model as a smaller GGUF file", quantize),
    ("rm", "remove models from the cache", rm),
)
"""Name, summary and module of each command, in the order of `--help`."""


@cache
def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="tidegate", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"tidegate {version('tidegate')}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=OneLineParser
    )
    for name, summary, tool in COMMANDS:
        command = commands.add_parser(
            name, help=summary, description=tool.DESCRIPTION, epilog=tool.EXAMPLES
        )
        tool.add_arguments(command)
        command.set_defaults(run=tool.run, parser=command)
    return parser


def _check_command(words: Sequence[str]) -> None:
    """Raise Failure if the first word is not a command. The message suggests a similar one."""
    names = [name for name, _, _ in COMMANDS]
    word = words[0] if words else ""
    if word.startswith("-") or word in names:
        return
    if Path(word).suffix == ".gguf" or Path(word).is_dir():
        hint = f": to serve it, run: tidegate serve {word}"
    else:
        close = get_close_matches(word, names, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
    raise Failure(f"unknown command {word!r}{hint}  (see tidegate --help)", exit_code=2)


def join_bench_step(arguments: Sequence[str]) -> list[str]:
    """Return `arguments`. If they start with `bench` and `step`, join these into one word."""
    words = list(arguments)
    name = BENCH_STEP.split()
    return [BENCH_STEP, *words[len(name) :]] if words[: len(name)] == name else words


def main(arguments: Sequence[str] | None = None) -> int:
    words = join_bench_step(sys.argv[1:] if arguments is None else arguments)
    if not words:
        build_parser().print_help()
        return 0
    log_format = None
    try:
        _check_command(words)
        options, unknown = build_parser().parse_known_args(words)
        if unknown:
            options.parser.refuse(unknown, OPTIONS if options.run in STARTERS else {})
        log_format = getattr(options, "log_format", None)  # only `serve` and `engine` have it
        code: int = options.run(options)
        sys.stdout.flush()
    except Failure as failure:
        Terminal(log_style(log_format)).fail(str(failure))
        return failure.exit_code
    except BrokenPipeError:  # the reader of stdout has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return code


if __name__ == "__main__":
    sys.exit(main())
