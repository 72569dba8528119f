"""Shells with `tidegate` and its completion, without the user's settings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.waiting import eventually

BASH = r"""
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
# As readline does it, = and : are words of their own.
COMP_WORDS=()
for word in $2; do
    while [[ $word =~ ^([^=:]*)([=:])(.*)$ ]]; do
        [[ -n ${BASH_REMATCH[1]} ]] && COMP_WORDS+=("${BASH_REMATCH[1]}")
        COMP_WORDS+=("${BASH_REMATCH[2]}")
        word=${BASH_REMATCH[3]}
    done
    [[ -n $word ]] && COMP_WORDS+=("$word")
done
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMPREPLY=()
_python_argcomplete tidegate
((${#COMPREPLY[@]})) && printf '%s\n' "${COMPREPLY[@]}"
true
"""
READY = "ready-for-input"


def install(folder: Path) -> None:
    """Write the commands `tidegate` and `python` of this environment to `folder`."""
    for name, options in (("tidegate", "-P -m tools"), ("python", "")):
        command = folder / name
        start = f"PYTHONPATH={ROOT} exec {sys.executable} {options}"
        command.write_text(f'#!/bin/sh\n{start} "$@"\n')
        command.chmod(0o755)


class Shell:
    """A shell that completes lines with a script.

    name     bash, zsh or fish. The test is skipped if it is not installed
    script   the file with the completion script
    """

    def __init__(self, name: str, script: Path, environment: dict[str, str]) -> None:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        self.name = name
        self._script = str(script)
        self._environment = environment

    def complete(self, line: str, folder: Path) -> list[str]:
        """Return what the shell suggests for the last word of `line`, in `folder`."""
        match self.name:
            case "bash":
                command = ["bash", "--norc", "-c", BASH, "bash", self._script, line]
                return self._output(command, folder)
            case "fish":
                code = f"source {self._script}; complete -C '{line}'"
                found = self._output(["fish", "--no-config", "-c", code], folder)
                return [suggestion.partition("\t")[0] for suggestion in found]
        return self._complete_in_zsh(line, folder)

    def _output(self, command: Sequence[str], folder: Path) -> list[str]:
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=self._environment, timeout=60
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
        return ran.stdout.splitlines()

    def _complete_in_zsh(self, line: str, folder: Path) -> list[str]:
        """Type the line on a terminal, as zsh completes nothing without one. A widget writes what
        zsh suggests to a file."""
        result = folder / ".zsh-suggestions"
        result.unlink(missing_ok=True)
        setup = folder / ".zsh-setup"
        setup.write_text(
            f"autoload -Uz compinit; compinit -u -D; source {self._script}\n"
            "zstyle ':completion:*' list-prompt ''; unsetopt automenu; LISTMAX=0\n"
            "compadd() {\n"
            "    local -a matches\n"
            '    builtin compadd -O matches "$@" 2>/dev/null\n'
            f'    (( $#matches )) && print -rl -- "${{matches[@]}}" >> {result}\n'
            '    builtin compadd "$@"\n'
            "}\n"
            f"complete-and-report() {{ zle complete-word; print done >> {result}.done }}\n"
            "zle -N complete-and-report; bindkey '^X' complete-and-report\n"
            f"cd {folder}; print {READY[:5]}''{READY[5:]}\n"
        )
        done = result.with_name(result.name + ".done")
        done.unlink(missing_ok=True)
        with PseudoTerminal(["zsh", "-f", "-i"], environment=self._environment) as terminal:
            terminal.press(f"source {setup}\n".encode())
            assert eventually(lambda: terminal.shows(READY)), terminal.text
            terminal.press(line.encode() + b"\x18")  # Ctrl-X
            assert eventually(done.exists), terminal.text
        return result.read_text().splitlines() if result.exists() else []
