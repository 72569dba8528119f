"""`tidegate completion`: prints the script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from tools.completion import bash, fish, zsh
from tools.completion.tree import DYNAMIC, read_tree
from tools.completion.values import values
from tools.failure import Failure

DESCRIPTION = """\
Print the script with which a shell completes commands, options and their values. The script is for
the installed version: print it again after an upgrade, or load it in each new shell.
"""

EXAMPLES = """\
to load it in each new shell, add the line to the file in brackets:
  source <(tidegate completion bash)                    (~/.bashrc)
  source <(tidegate completion zsh)                     (~/.zshrc, after compinit)
  tidegate completion fish | source                     (~/.config/fish/config.fish)
"""

SCRIPTS = {"bash": bash.script, "zsh": zsh.script, "fish": fish.script}
VALUES = "values"
"""The word with which the scripts ask for names that only this machine knows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar=f"{{{','.join(SCRIPTS)}}}", help="bash, zsh or fish")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    if options.shell == VALUES and options.words and options.words[0] in DYNAMIC:
        print(*values(options.words[0], options.words[1:]), sep="\n")
        return 0
    if options.shell not in SCRIPTS or options.words:
        raise Failure(f"give one of {', '.join(SCRIPTS)}", exit_code=2)
    from tools.__main__ import build_parser  # builds the parsers of all commands

    print(SCRIPTS[options.shell](read_tree(build_parser())), end="")
    return 0
