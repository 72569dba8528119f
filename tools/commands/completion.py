"""`tidegate completion`: prints the script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode

DESCRIPTION = """\
Print the script with which a shell completes commands, options and their values. It starts
tidegate for each completion, so it suits each version.
"""

EXAMPLES = """\
to load it in each new shell, add the line to the file in brackets:
  source <(tidegate completion bash)                    (~/.bashrc)
  source <(tidegate completion zsh)                     (~/.zshrc, after compinit)
  tidegate completion fish | source                     (~/.config/fish/config.fish)
"""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")


def run(options: argparse.Namespace) -> int:
    print(script(options.shell))
    return 0


def script(shell: str) -> str:
    """Return the script for a shell. In zsh, argcomplete gets only the command that is completed,
    not the commands before it in the same line."""
    text: str = shellcode(["tidegate"], use_defaults=False, shell=shell)
    return text.replace('"$BUFFER"', '"${(j: :)words[1,CURRENT-1]} $PREFIX"')
