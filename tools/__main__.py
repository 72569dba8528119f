"""The `tidegate` command: runs the module of the selected subcommand and reports its failure.

Each subcommand is a row of COMMANDS and a module in `tools.commands`. Only the module of the
selected subcommand is imported, so that a server starts sooner. A Failure is printed as one line on
stderr. Ctrl-C ends the command without a message, with the exit code that shells expect.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from protocol.process.exit_codes import ExitCode
from protocol.process.imports import without_collections
from protocol.process.open_files import raise_file_limit
from tools import other_servers
from tools.config_file import apply_config_file, origin_note
from tools.failure import Failure
from tools.flags import OneLineParser, settle_argument, take_late_argument
from tools.terminal import Terminal, log_style

DESCRIPTION = "Tidegate serves language models over the OpenAI API. It runs on a plain CPU."

BENCH_STEP = "bench step"
STARTERS = ("serve", "engine", "config")
"""Commands that start engines. Their errors name replacements for options of other servers."""

EXAMPLES = """\
getting started:
  tidegate serve            download the default model and start a server
  tidegate chat             chat with the server, from another terminal; or use
                            its web page at http://127.0.0.1:8000/

for the options of a command: tidegate serve --help
"""


class Tool(Protocol):
    """The interface of a command's module."""

    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> int: ...


COMMAND_GROUPS = {
    "start and stop": {
        "serve": "start a server",
        "ps": "list servers, and processes and sockets left behind",
        "stop": "stop servers and remove what was left behind",
        "config": "show the options of a server, and where each comes from",
    },
    "use": {
        "run": "print one answer of a model, or chat with it",
        "chat": "chat with a server",
        "launch": "start a coding agent that uses a server",
        "run-batch": "answer all lines of a file, each exactly once",
    },
    "operate": {
        "status": "show whether a server is ready and how busy it is",
        "logs": "show the log of a running server",
        "top": "watch an engine and its open requests",
        "why": "explain where the time of a request went",
        "abort": "abort requests",
        "keys": "add, list and revoke API keys",
        "lora": "load, unload and list LoRA adapters",
        "restart": "restart the engines of a server in turn, while it serves",
        "drain": "stop an engine after its open requests finish",
    },
    "models": {
        "models": "list the models in the cache, and those of the catalogue",
        "pull": "download a model",
        "rm": "remove models from the cache",
        "quantize": "write a model as a smaller GGUF file",
    },
    "this machine": {
        "doctor": "check whether this machine can run a server",
        "fetch-kernels": "fetch a FlashAttention library for GPUs",
        "completion": "print the completion script of a shell",
    },
    "cluster": {
        "engine": "start one engine of a cluster, without a gateway",
        "worker": "start a worker for an engine on another machine",
        "cluster-key": "create a cluster key",
        "simulate": "predict how a cluster serves a workload",
    },
    "measure and develop": {
        "bench": "measure the latency and throughput of a server",
        BENCH_STEP: "measure one step of the worker",
        "profile": "trace the worker of a running server",
        "replay": "replay a journal",
    },
}
"""Title of each group -> name and summary of its commands, in the order of `--help`."""
COMMANDS = {name: text for group in COMMAND_GROUPS.values() for name, text in group.items()}
"""Name and summary of each command."""
OWN_OPTIONS = ("-h", "--help", "--version")
"""Options that need no command."""
OLD_NAMES = {"key": "cluster-key"}
"""Earlier name of a command, which still works -> its name."""


def _tool(name: str) -> Tool:
    """Import the module of a command."""
    with without_collections():
        return cast(Tool, import_module(f"tools.commands.{re.sub('[ -]', '_', name)}"))


class PrintVersion(argparse.Action):
    """Prints the version of the installed package, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # imports the parser of e-mails

        print(f"tidegate {version('tidegate')}")
        parser.exit()


@cache
def build_parser(*names: str) -> argparse.ArgumentParser:
    """Return the parser of the commands `names`, or of all commands if there are no names."""
    parser, commands = _start_parser()
    commands.help = argparse.SUPPRESS  # the description lists the commands
    for name in names or COMMANDS:
        tool = _tool(name)
        command = commands.add_parser(
            name, help=COMMANDS[name], description=tool.DESCRIPTION, epilog=tool.EXAMPLES
        )
        tool.add_arguments(command)
        command.set_defaults(run=tool.run, parser=command)
    return parser


def _start_parser() -> tuple[argparse.ArgumentParser, Any]:
    """Return a parser without commands, and the object with which they are added."""
    parser = OneLineParser(
        prog="tidegate",
        usage="tidegate COMMAND [options]",
        description=f"{DESCRIPTION}\n\n{_list_commands()}",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--version", action=PrintVersion, nargs=0, help="show program's version number and exit"
    )
    commands = parser.add_subparsers(
        prog="tidegate", metavar="COMMAND", required=True, parser_class=OneLineParser
    )
    return parser, commands


def _list_commands() -> str:
    """Return the commands with their summaries, in groups."""
    width = max(map(len, COMMANDS))
    return "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in group.items())])
        for title, group in COMMAND_GROUPS.items()
    )


def _complete(line: str) -> None:
    """Print the suggestions for a shell's line up to the cursor, and exit. The parser has the names
    of all commands, but only the options of the command in the line, so it is built sooner."""
    from tools.completion import complete

    parser, commands = _start_parser()
    named = line.rpartition(" ")[0].split()[1:2]
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, summary in COMMANDS.items():
        first, _, second = name.partition(" ")  # `bench step` is a command of `bench`
        among = parsers[first].add_subparsers(parser_class=OneLineParser) if second else commands
        parsers[name] = among.add_parser(second or first, help=summary)
        if named == [first]:
            _tool(name).add_arguments(parsers[name])
    os.environ["COMP_POINT"] = str(len(line))  # zsh counts from the start of the edited text
    complete(parser)


def _check_command(words: Sequence[str]) -> None:
    """Raise Failure if the first word is neither a command nor an option of `tidegate` itself. The
    message suggests a replacement or a similar command."""
    word = words[0]
    if word in (*COMMANDS, *OWN_OPTIONS):
        return
    if word.startswith("-"):
        if instead := other_servers.OPTIONS.get(word.partition("=")[0]):
            is_option = instead.startswith("-") and " " not in instead
            hint = f"use tidegate serve MODEL {instead}" if is_option else instead
        else:
            hint = other_servers.advice(word, OWN_OPTIONS, {})
            hint = hint or f"the command comes first, such as tidegate serve {word}"
        raise Failure(f"unknown option {word}: {hint}  (see tidegate --help)", exit_code=2)
    if instead := other_servers.COMMANDS.get(word):
        hint = f": {instead}"
    elif Path(word).suffix == ".gguf" or Path(word).is_dir():
        hint = f": to serve it, run: tidegate serve {word}"
    else:
        from difflib import get_close_matches

        close = get_close_matches(word, COMMANDS, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
    raise Failure(f"unknown command {word!r}{hint}  (see tidegate --help)", exit_code=2)


def _others_options(command: str) -> Mapping[str, str]:
    """Return the options of other servers that users may give to a command, and replacements."""
    if command == "run-batch":
        return other_servers.BATCH_OPTIONS
    return other_servers.OPTIONS if command in STARTERS else {}


def with_command(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` with the name of the command as the first word: `bench` and `step` become
    one word, and an old name becomes the present one."""
    words = list(arguments)
    if words and words[0] in OLD_NAMES:
        return [OLD_NAMES[words[0]], *words[1:]]
    name = BENCH_STEP.split()
    return [BENCH_STEP, *words[len(name) :]] if words[: len(name)] == name else words


def split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the words of the command, those after `--` for the program that it starts). Other
    commands than `launch` start no program, and argparse handles their `--`."""
    if words[0] != "launch" or "--" not in words:
        return [*words], []
    place = words.index("--")
    return [*words[:place]], [*words[place + 1 :]]


def main(arguments: Sequence[str] | None = None) -> int:
    raise_file_limit()
    if "_ARGCOMPLETE" in os.environ:  # a shell completes a line
        _complete(os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])])
    words = with_command(sys.argv[1:] if arguments is None else arguments)
    if not words:
        build_parser().print_help()
        return 0
    log_format = settings = None
    try:
        _check_command(words)
        parser = build_parser(*([words[0]] if words[0] in COMMANDS else []))
        words, others = split_arguments(words)
        options, unknown = parser.parse_known_args(words)
        options.others = others
        if unknown and not take_late_argument(options, unknown):
            options.parser.refuse(unknown, _others_options(words[0]))
        settle_argument(options)
        options.settings = settings = apply_config_file(options)
        log_format = getattr(options, "log_format", None)  # only `serve` and `engine` have it
        code: int = options.run(options)
        sys.stdout.flush()
    except Failure as failure:
        origin = origin_note(str(failure), settings) if settings is not None else ""
        Terminal(log_style(log_format)).fail(f"{failure}{origin}")
        return failure.exit_code
    except UnicodeEncodeError as error:  # an argument, a variable or the working directory
        if error.encoding != "utf-8":  # stdout has another encoding
            raise
        text = f"{error.object!a} is not UTF-8; Tidegate needs names that are"
        Terminal(log_style(log_format)).fail(text)
        return ExitCode.USAGE
    except BrokenPipeError:  # the reader of stdout has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return code


if __name__ == "__main__":
    sys.exit(main())
