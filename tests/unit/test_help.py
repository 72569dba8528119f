"""The help of the commands: each option says what its value is, and the options of a server are in
groups, of which `--help` shows the most used ones."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest

from tools.__main__ import COMMAND_GROUPS, COMMANDS, OLD_NAMES, build_parser, main
from tools.commands import engine, serve
from tools.flags import OneLineParser, flags_of
from tools.option_groups import GROUPS, grouped

METAVARS = {
    *("ACTION", "ADDRESS", "AGENT", "COMMAND", "DAYS", "DIRECTORY", "FILE", "FORMAT", "FRACTION"),
    *("GIB", "GPU|FILE", "HEADER", "HOST", "ID", "INPUT", "JSON", "KEY", "KEY_NAME", "LIBRARY"),
    *("MIB", "MILLISECONDS", "MODEL", "N", "N,...", "NAME", "NAME=PATH", "NAMESPACE", "ORIGIN"),
    *("OUTPUT", "PATH", "PORT", "PROMPT", "SECONDS", "TOPIC", "URL", "URL|PORT", "VARIABLE"),
    *("X", "X,...", "all"),
}
"""Names of values that say what the value is. A text that is free is TEXT."""
FREE_TEXTS = {"--system"}
SERVERS = ("serve", "config", "engine")
"""Commands with the options of a server."""


def parsers(parser: argparse.ArgumentParser) -> Iterator[OneLineParser]:
    """Yield a parser and those of its subcommands, each once."""
    assert isinstance(parser, OneLineParser)
    yield parser
    for action in parser.actions:
        if isinstance(action.choices, Mapping):
            for each in dict.fromkeys(action.choices.values()):
                yield from parsers(each)


def shown(parser: OneLineParser) -> list[argparse.Action]:
    return [action for action in parser.actions if action.help is not argparse.SUPPRESS]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def options_in(text: str) -> list[str]:
    """Return the options that a help lists, in its order."""
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_value_has_a_name_and_each_option_a_help_of_one_plain_sentence(command: str) -> None:
    for parser in parsers(build_parser(command)):
        for action in shown(parser):
            name = f"{parser.prog}: {'/'.join(action.option_strings) or action.dest}"
            if action.nargs != 0 and action.choices is None:
                metavar = str(action.metavar)
                is_choice = metavar.startswith("{")
                is_free = metavar == "TEXT" and action.option_strings[0] in FREE_TEXTS
                assert is_choice or is_free or metavar in METAVARS, f"{name} takes {metavar}"
            if isinstance(action.choices, Mapping):
                continue  # of subcommands, which have a help each
            text = action.help or ""
            assert text.strip(), f"{name} has no help"
            assert not text.endswith("."), f"{name}: {text}"
            assert not re.search(r"\.\s+[A-Z`$-]", text), f"{name} has several sentences: {text}"
            assert "\n" not in text, name


def test_each_option_of_a_server_is_in_one_group() -> None:
    configs = [config for each in (serve, engine) for _, config in each.CONFIGS]
    fields = {flag.field for config in configs for flag in flags_of(config)}
    listed = Counter(field for group in GROUPS for field in group.fields)
    assert {*listed} == fields, "an option without a group, or a name that is no option"
    assert max(listed.values()) == 1
    assert "others" not in [title for title, _ in grouped(configs)]


@pytest.mark.parametrize("command", SERVERS)
def test_help_all_shows_every_option_and_help_the_most_used_ones(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    some = options_in(printed(capsys, command, "--help"))
    every = options_in(printed(capsys, command, "--help", "all"))
    module = {"engine": engine}.get(command, serve)
    names = {flag.name for _, config in module.CONFIGS for flag in flags_of(config)}
    assert names <= set(every)
    assert len(every) == len(set(every))
    assert some == [option for option in every if option in some]
    assert 15 <= len(some) <= 26
    assert len(every) > 2 * len(some)


def test_the_most_used_options_of_a_server_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "serve", "--help")
    assert text.endswith("\nall options: tidegate serve --help all\n")
    titles = re.findall(r"^([A-Za-z][\w ,]*):$", text, re.MULTILINE)
    assert titles[:7] == [
        *("positional arguments", "options", "where to listen", "the model", "memory", "speed"),
        "API keys",
    ]
    assert options_in(text.partition("where to listen:")[2])[:2] == ["--host", "--port"]


@pytest.mark.parametrize("command", [*SERVERS, "run-batch", "bench", "bench step", "simulate"])
def test_the_usage_of_a_command_with_many_options_does_not_list_them(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *command.split(), "--help")
    assert text.splitlines()[0].startswith(f"usage: tidegate {command} [options]")
    assert text.splitlines()[1] == ""


def test_help_ignores_a_word_that_is_not_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "serve", "--help", "model.gguf") == printed(capsys, "serve", "-h")


def test_a_command_with_few_options_has_one_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "all options" not in printed(capsys, "ps", "--help")


def test_the_commands_are_listed_in_groups_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    for title, group in COMMAND_GROUPS.items():
        listed = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0].splitlines()
        assert [re.split(" {2,}", line.strip()) for line in listed] == [
            [*each] for each in group.items()
        ]
    assert sum(map(len, COMMAND_GROUPS.values())) == len(COMMANDS)


@pytest.mark.parametrize(("old", "name"), OLD_NAMES.items())
def test_an_old_name_of_a_command_works_and_is_not_listed(
    old: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, old, "--help") == printed(capsys, name, "--help")
    assert f"  {old} " not in printed(capsys, "--help")
