"""The command line as completion needs it: commands, options, and what their values are."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["", "choice", "file", "directory", "model", "port", "key"]
"""The kind of an option's value. "": any text, so nothing is suggested. Values of the kinds in
`DYNAMIC` are looked up when they are completed."""
DYNAMIC = ("model", "port", "key")
KINDS: dict[str, Kind] = {
    "FILE": "file",
    "PATH": "file",
    "OUT.gguf": "file",
    "DIRECTORY": "directory",
    "MODEL": "model",
    "PORT": "port",
    "KEY_NAME": "key",
}
"""Name of a value in the usage -> its kind."""
HELP_LENGTH = 70


@dataclass(frozen=True, slots=True)
class Value:
    """The value of an option, or an argument."""

    name: str
    kind: Kind
    choices: tuple[str, ...] = ()
    #: Whether more values of the same kind may follow.
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command."""

    names: tuple[str, ...]
    #: One line of help.
    help: str
    #: None: the option has no value.
    value: Value | None = None
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class CommandTree:
    """A command, and what may follow its name on the command line. If `words` is empty, it is the
    program itself."""

    words: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Value, ...]
    #: Names of the commands that may follow.
    commands: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(self.words)


def read_tree(parser: argparse.ArgumentParser) -> list[CommandTree]:
    """Return the program and all commands of `parser`. A command of two words, such as `bench
    step`, is one of the first word's commands, too."""
    found = list(_read(parser, (), ""))
    below: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        if each.words:
            below.setdefault(each.words[:-1], []).append(each.words[-1])
    return [replace(each, commands=tuple(below.get(each.words, ()))) for each in found]


def _read(
    parser: argparse.ArgumentParser, words: tuple[str, ...], about: str
) -> Iterator[CommandTree]:
    options: list[Option] = []
    arguments: list[Value] = []
    below: list[CommandTree] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for name, command in action.choices.items():
                below += _read(command, (*words, *name.split()), helps.get(name, ""))
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            options.append(_option(action))
        else:
            arguments.append(_value(action))
    yield CommandTree(words, _line(about), tuple(options), tuple(arguments))
    yield from below


def _option(action: argparse.Action) -> Option:
    value = None if action.nargs == 0 else _value(action)
    repeats = isinstance(action, argparse._AppendAction)
    return Option(tuple(action.option_strings), _line(action.help or ""), value, repeats)


def _value(action: argparse.Action) -> Value:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    choices = tuple(map(str, action.choices or ()))
    if metavar.startswith("{"):  # a choice of `tools.flags`
        choices = tuple(metavar.strip("{}").split(","))
    kind: Kind = "choice" if choices else KINDS.get(metavar, "")
    return Value(metavar, kind, choices, repeats=action.nargs in ("*", "+"))


def _line(text: str) -> str:
    """Return the first phrase of a help text, in one line."""
    text = " ".join(text.replace("%%", "%").split())
    phrase = re.split(r"; | \(|\. ", text)[0]
    return phrase if len(phrase) <= HELP_LENGTH else phrase[: HELP_LENGTH - 1] + "…"
