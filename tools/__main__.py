"""The `tidegate` command: which tool runs, and how its failures are told.

Each tool is a module with `add_arguments(parser)` and `run(options) -> exit code`. A Failure
becomes one line on stderr; Ctrl-C ends quietly with the code that shells expect.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version

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


def parser() -> argparse.ArgumentParser:
    whole = OneLineParser(
        prog="tidegate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"tidegate {version('tidegate')}")
    commands = whole.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)

    def command(
        name: str, summary: str, description: str = "", examples: str = ""
    ) -> OneLineParser:
        return commands.add_parser(
            name,
            help=summary,
            description=description or summary.capitalize() + ".",
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    for tool, made in (
        (serve, command("serve", "start a server", serve.DESCRIPTION, serve.EXAMPLES)),
        (chat, command("chat", "talk to a server", chat.DESCRIPTION, chat.EXAMPLES)),
        (status, command("status", "show whether a server is ready and what it does")),
        (top, command("top", "watch an engine", top.DESCRIPTION, top.EXAMPLES)),
        (abort, command("abort", "end requests", abort.DESCRIPTION, abort.EXAMPLES)),
        (ps, command("ps", "list servers and leftovers", ps.DESCRIPTION, ps.EXAMPLES)),
        (stop, command("stop", "stop servers, clear leftovers", stop.DESCRIPTION, stop.EXAMPLES)),
        (
            replay,
            command("replay", "replay a journal", replay.DESCRIPTION, replay.EXAMPLES),
        ),
        (drain, command("drain", "let an engine finish", drain.DESCRIPTION, drain.EXAMPLES)),
        (
            engine,
            command(
                "engine",
                "start one engine of a cluster, without a gateway",
                engine.DESCRIPTION,
                engine.EXAMPLES,
            ),
        ),
        (
            doctor,
            command("doctor", "look at this machine first", doctor.DESCRIPTION, doctor.EXAMPLES),
        ),
        (bench, command("bench", "put a load on a server", bench.DESCRIPTION, bench.EXAMPLES)),
        (
            bench_step,
            command(
                BENCH_STEP,
                "time one step of the worker",
                bench_step.DESCRIPTION,
                bench_step.EXAMPLES,
            ),
        ),
        (keys, command("keys", "keys of the HTTP API", keys.DESCRIPTION, keys.EXAMPLES)),
        (
            profile,
            command("profile", "trace a running server", profile.DESCRIPTION, profile.EXAMPLES),
        ),
        (key, command("key", "make a key for a cluster", key.DESCRIPTION, key.EXAMPLES)),
    ):
        tool.add_arguments(made)
        made.set_defaults(run=tool.run)
    command("models", "list the models known by name").set_defaults(run=models.run)
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
