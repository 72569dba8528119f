"""The completion script for fish: one `complete` for each command, option and argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.completion.tree import CommandTree, Value

HEAD = r"""# fish completion for tidegate, made by `tidegate completion fish`.

function __tidegate_values
    set -l words (commandline -opc)
    $words[1] completion values $argv 2>/dev/null
end

# Whether the words so far name the command $argv, and no command of it follows.
function __tidegate_at
    set -l found
    for word in (commandline -opc)[2..]
        string match -q -- '-*' $word; and break
        contains -- "$found $word" $__tidegate_commands; or break
        set found "$found $word"
    end
    test "$found" = "$argv"
end

# The number of arguments after the words of the command, of which there are $argv.
function __tidegate_place
    set -l words (commandline -opc)[2..]
    set -l place 0
    set -l before ''
    for word in $words
        if not string match -q -- '-*' $word
            string match -q -- '-*' $before; and not string match -q -- '*=*' $before
            and not contains -- $before $__tidegate_switches
            or set place (math $place + 1)
        end
        set before $word
    end
    math $place - $argv
end

complete -c tidegate -f
"""
ARGUMENTS = {
    "": "-x",
    "file": "-r -F",
    "directory": "-x -a '(__fish_complete_directories)'",
    "model": "-r -F -a '(__tidegate_values model)'",
    "port": "-x -a '(__tidegate_values port)'",
    "key": "-x -a '(__tidegate_values key (commandline -opc)[4..])'",
}


def script(tree: Sequence[CommandTree]) -> str:
    names = " ".join(_quoted(f" {each.name}") for each in tree if each.words)
    switches = {n for each in tree for o in each.options if o.value is None for n in o.names}
    lines = [HEAD, f"set -g __tidegate_commands {names}"]
    lines.append(f"set -g __tidegate_switches {' '.join(sorted(switches))}")
    for each in tree:
        lines += _command(each, tree)
    return "\n".join(lines) + "\n"


def _command(command: CommandTree, tree: Sequence[CommandTree]) -> Iterator[str]:
    path = f" {command.name}" if command.words else ""
    start = f"complete -c tidegate -n {_quoted('__tidegate_at ' + _quoted(path))}"
    helps = {each.words: each.help for each in tree}
    for name in command.commands:
        yield f"{start} -a {name} -d {_quoted(helps[(*command.words, name)])}"
    for option in command.options:
        names = " ".join(
            f"-l {name[2:]}" if name.startswith("--") else _short(name) for name in option.names
        )
        value = "" if option.value is None else f" {_value(option.value)}"
        yield f"{start} {names}{value} -d {_quoted(option.help)}"
    for place, argument in enumerate(command.arguments):
        if argument.choices or argument.kind:
            compared = "-ge" if argument.repeats else "-eq"
            count = f"(__tidegate_place {len(command.words)}) {compared} {place}"
            here = f"__tidegate_at {_quoted(path)}; and test {count}"
            value = _value(argument).replace("-x ", "").replace("-r ", "")
            yield f"complete -c tidegate -n {_quoted(here)} {value}"


def _short(name: str) -> str:
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"


def _value(value: Value) -> str:
    if value.choices:
        return f"-x -a {_quoted(' '.join(value.choices))}"
    return ARGUMENTS[value.kind]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
