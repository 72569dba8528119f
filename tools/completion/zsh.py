"""The completion script for zsh: a function for each command, which calls `_arguments`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tools.completion.tree import CommandTree, Option, Value

HEAD = r"""#compdef tidegate
# zsh completion for tidegate, made by `tidegate completion zsh`.

_tidegate_dynamic() {
    local -a names
    names=("${(@f)$("$_tidegate_program" completion values "$@" 2>/dev/null)}")
    compadd -a names
}
_tidegate_model() { _tidegate_dynamic model; _files -g '*.gguf(-.)'; _files -/ }
_tidegate_port() { _tidegate_dynamic port }
_tidegate_key() { _tidegate_dynamic key ${line[1]} }
"""
TAIL = r"""
_tidegate() {
    local _tidegate_program=${words[1]}
    _tidegate_0
}
# The file is sourced, or found by compinit as _tidegate.
if [[ $funcstack[1] == _tidegate ]]; then _tidegate "$@"; else compdef _tidegate tidegate; fi
"""
ACTIONS = {
    "": " ",
    "file": "_files",
    "directory": "_files -/",
    "model": "_tidegate_model",
    "port": "_tidegate_port",
    "key": "_tidegate_key",
}


def script(tree: Sequence[CommandTree]) -> str:
    functions = {each.words: f"_tidegate_{number}" for number, each in enumerate(tree)}
    parts = [HEAD]
    for each in tree:
        parts.append("\n".join(_function(each, functions, tree)))
    return "\n".join([*parts, TAIL])


def _function(
    command: CommandTree, functions: dict[tuple[str, ...], str], tree: Sequence[CommandTree]
) -> Iterator[str]:
    yield f"{functions[command.words]}() {{"
    yield "    local context state state_descr line"
    yield "    typeset -A opt_args"
    specs = [_option(option, name) for option in command.options for name in option.names]
    if command.commands:
        specs += ["'1: :->command'", "'*:: :->rest'"]
    else:
        specs += [_argument(value) for value in command.arguments]
    yield "    _arguments -s -S \\" if not command.commands else "    _arguments -C -S \\"
    yield from (f"        {spec} \\" for spec in specs)
    yield "        && return"
    if command.commands:
        yield from _commands(command, functions, tree)
    yield "}"


def _commands(
    command: CommandTree, functions: dict[tuple[str, ...], str], tree: Sequence[CommandTree]
) -> Iterator[str]:
    helps = {each.words: each.help for each in tree}
    yield "    case $state in"
    yield "    command)"
    yield "        local -a commands=("
    for name in command.commands:
        yield f"            {_quoted(f'{name}:{helps[(*command.words, name)]}')}"
    yield "        )"
    yield "        _describe -t commands command commands"
    for value in command.arguments:
        yield f"        {ACTIONS[value.kind]}" if value.kind else "        :"
    yield "        ;;"
    yield "    rest)"
    yield "        case ${words[1]} in"
    for name in command.commands:
        yield f"        {name}) {functions[(*command.words, name)]} ;;"
    yield "        esac"
    yield "        ;;"
    yield "    esac"


def _option(option: Option, name: str) -> str:
    repeats = "*" if option.repeats else ""
    if option.value is None:
        return _quoted(f"{repeats}{name}[{_escaped(option.help)}]")
    equals = "=" if name.startswith("--") else ""
    value = f":{_escaped(option.value.name)}:{_action(option.value)}"
    return _quoted(f"{repeats}{name}{equals}[{_escaped(option.help)}]{value}")


def _argument(value: Value) -> str:
    place = "*" if value.repeats else ""
    return _quoted(f"{place}:{_escaped(value.name)}:{_action(value)}")


def _action(value: Value) -> str:
    return f"({' '.join(value.choices)})" if value.choices else ACTIONS[value.kind]


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
