"""The file of --config: the options of a command as TOML.

    # tidegate.toml
    model = "qwen3-0.6b"
    port = 8001
    served_name = ["small", "fast"]
    prefix_cache = false            # --no-prefix-cache

The names are those of the options, with underscores. A switch is true or false, an option that may
be repeated is a list. `model` is MODEL: a text, a list, or tables [[model]] as in the file of
--models. Relative paths start at the directory of the file.

An option of the command line is used in place of the same name in the file. `parse` is pure: the
text and the flags of the command go in, checked values come out.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from protocol.process.exit_codes import ExitCode
from tools.failure import Failure
from tools.flags import Flag, flags_of
from tools.other_servers import advice_on_field
from tools.paths import in_folder, local_model, user_path

MODEL = "model"
"""Name of the argument MODEL in the file."""
MODELS = "models"
"""The option with a file of several models, which stands for MODEL."""
_TABLE = re.compile(r"^\s*\[", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The checked content of a file of --config."""

    #: Name of the file, as the user has given it.
    name: str
    #: Field -> value, as the parser of the command line stores it.
    values: Mapping[str, Any] = field(default_factory=dict)
    #: Field -> number of its line, from 1.
    lines: Mapping[str, int] = field(default_factory=dict)

    def origin(self, field: str) -> str:
        """Return where a field is set: "tidegate.toml:3"."""
        line = self.lines.get(field)
        return f"{self.name}:{line}" if line else self.name


def add_config_option(
    parser: argparse.ArgumentParser,
    configs: Sequence[tuple[str, type[msgspec.Struct]]],
    *,
    several: bool = False,
) -> None:
    """Add the option --config, for a command whose other options are the fields of `configs`.

    several   the command accepts several models
    """
    parser.add_argument(
        "--config",
        dest="config_file",
        metavar="FILE",
        help="TOML file with options of this command: their names with underscores, such as "
        "max_len = 4096; options of the command line are used in place of those in the file "
        "(`tidegate config` shows the result)",
    )
    parser.set_defaults(configs=[config for _, config in configs], several_models=several)


def apply_config_file(options: argparse.Namespace) -> FileSettings | None:
    """Add the values of the file of --config to the options that the user has not given. Return the
    file's settings that are in effect; None if there is no such file.

    Raises Failure, with the exit code of a usage error, if the file cannot be read or used.
    """
    if getattr(options, "config_file", None) is None:
        return None
    flags = [flag for config in options.configs for flag in flags_of(config)]
    path = user_path(options.config_file)
    try:
        text = path.read_text(encoding="utf-8")
        found = parse(
            text,
            flags,
            name=options.config_file,
            folder=path.absolute().parent,
            several=options.several_models,
        )
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Failure(f"--config {path}: {reason}", exit_code=ExitCode.USAGE) from None
    except ValueError as error:
        raise Failure(str(error), exit_code=ExitCode.USAGE) from None
    used = merge(vars(options), found)
    for name, value in used.values.items():
        setattr(options, name, value)
    return used


def merge(options: Mapping[str, Any], found: FileSettings) -> FileSettings:
    """Return those settings of a file that are in effect: the ones that the user has not given on
    the command line. MODEL and --models replace each other.

    options   field -> value, None or an empty list if the user did not give the option
    """
    given = {name for name, value in options.items() if value not in (None, [])}
    if given & {MODEL, MODELS}:
        given |= {MODEL, MODELS}
    values = {name: value for name, value in found.values.items() if name not in given}
    return FileSettings(found.name, values, found.lines)


def parse(
    text: str, flags: Sequence[Flag], *, name: str, folder: Path, several: bool = True
) -> FileSettings:
    """Return the checked settings in `text`, which is TOML. Raises ValueError, naming the file, the
    line and the setting, if a setting is unknown or its value is not accepted.

    flags     the options that the file may set
    name      name of the file, for errors
    folder    the file's directory, where relative paths start
    several   whether `model` may be a list
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name}: {error}") from None
    by_name = {flag.field: flag for flag in flags}
    values: dict[str, Any] = {}
    lines = {}
    for key, value in content.items():
        lines[key] = _line_of(text, key)
        try:
            if key == MODEL:
                values |= _models(value, folder, name, several=several)
            elif key in by_name:
                values[key] = _value(by_name[key], value, folder)
            else:
                raise ValueError(_unknown(key, flags))
        except ValueError as error:
            place = f"{name}:{lines[key]}" if lines[key] else name
            raise ValueError(f"{place}: {error}") from None
    if MODEL in values and values.get(MODELS):
        raise ValueError(f"{name}: models cannot be combined with model")
    if MODELS in values and MODEL in lines:
        lines[MODELS] = lines[MODEL]
    return FileSettings(name, values, lines)


def _line_of(text: str, key: str) -> int:
    """Return the number of the line that sets the top-level `key`, from 1; 0 if it was not found,
    because of unusual quotes."""
    quoted = rf"""["']?{re.escape(key)}["']?"""
    table = re.search(rf"^\s*\[\[?\s*{quoted}\s*[.\]]", text, re.MULTILINE)
    first = _TABLE.search(text)
    head = text[: first.start()] if first else text
    found = re.search(rf"^[ \t]*{quoted}\s*[.=]", head, re.MULTILINE) or table
    return text.count("\n", 0, found.end()) + 1 if found else 0


def _unknown(key: str, flags: Sequence[Flag]) -> str:
    """Return a message about an unknown name, with the known one that is most like it."""
    names = {flag.name: flag.field for flag in flags}
    switches = {f"--{flag.field.replace('_', '-')}": flag.field for flag in flags if flag.is_switch}
    dashed = f"--{key.replace('_', '-')}"
    if dashed in names and dashed.startswith("--no-"):
        hint = f"write {names[dashed]} = false"
    else:
        hint = advice_on_field(key, names | switches | {f"--{MODEL}": MODEL})
    return f"unknown name {key!r}" + (f": {hint}" if hint else "")


def _value(flag: Flag, value: Any, folder: Path) -> Any:
    """Return the checked value of an option. Raises ValueError if it is not accepted."""
    shown = "..." if flag.is_secret else repr(value)
    try:
        if flag.is_list or flag.is_tuple:
            if not isinstance(value, list):
                raise ValueError(f"{flag.field} must be a list, each item {flag.takes}")
            items = [msgspec.convert(item, flag.type) for item in value]
            return in_folder(flag, items, folder) if flag.is_list else tuple(items)
        value = msgspec.convert(value, flag.type)
    except msgspec.ValidationError:
        raise ValueError(f"{flag.field} must be {flag.takes}, not {shown}") from None
    return in_folder(flag, value, folder)


def _models(value: Any, folder: Path, file: str, *, several: bool) -> dict[str, Any]:
    """Return the option that the setting `model` of a file stands for: MODEL with the paths of
    local models, or MODELS with the path of the file itself if it has tables [[model]]. Raises
    ValueError if the setting is malformed."""
    if not several:
        if not isinstance(value, str):
            raise ValueError("model must be text")
        return {MODEL: local_model(value, folder)}
    items = value if isinstance(value, list) else [value]
    if items and all(isinstance(item, dict) for item in items) and isinstance(value, list):
        return {MODELS: os.path.abspath(folder / Path(file).name)}
    if not items or not all(isinstance(item, str) for item in items):
        raise ValueError("model must be text, a list of texts, or tables [[model]]")
    return {MODEL: [local_model(item, folder) for item in items]}


def origin_note(message: str, settings: FileSettings) -> str:
    """Return a note about the options that an error message names and a file has set, to be
    appended to the message; "" if there are none."""
    options = dict.fromkeys(re.findall(r"--(?:no-)?([a-z][a-z0-9-]*)", message))
    names = [option.replace("-", "_") for option in options]
    places = [settings.origin(name) for name in names if name in settings.values]
    return f"  ({', '.join(places)})" if places else ""


def api_keys_in_effect(options: argparse.Namespace, own: str) -> list[str]:
    """Return the API keys of a server.

    own   the key in the environment, "" if none. It replaces the keys of a file of --config, and
          is added to those of the command line
    """
    settings: FileSettings | None = options.settings
    given: list[str] = options.api_key or []
    if own and settings is not None and "api_key" in settings.values:
        given = []
    return [*given, *([own] if own else [])]
