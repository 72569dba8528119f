"""Reads which models to serve: from the command line, or from the file of --models, in which each
model has options of its own.

    [[model]]
    path = "Qwen/Qwen3-0.6B"        # as MODEL on the command line
    name = "small"                  # default: the model's own name
    alias = ["gpt-4o-mini"]         # more names in the API
    load = "first-use"
    max_len = 8192

The other keys are options of the command line, spelt with underscores. They replace those of the
command line for this model.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from protocol.config.engine import EngineConfig
from protocol.config.gateway import ModelConfig
from protocol.config.serve import ServeConfig
from protocol.config.worker import WorkerConfig
from protocol.wire.field_errors import field_error
from tools.flags import Flag, build, flags_of
from tools.models.catalogue import DEFAULT
from tools.paths import in_folder, user_path
from tools.processes.several_models import NamedModel, check_names, named_models, own_name

_SHARED = {"draft_model", "served_name"}
"""Options that a model of several cannot have."""


class ModelTable(msgspec.Struct, frozen=True, kw_only=True):
    """The keys `path`, `name` and `alias` of a table [[model]] in a file of models."""

    path: str
    name: str = ""
    alias: list[str] = []


def given_models(options: Mapping[str, Any], serve: ServeConfig) -> list[NamedModel]:
    """Return the models of the command line or of --models. Raises ValueError if both are given, if
    the file cannot be used, or if two models have the same name."""
    if serve.models and options["model"]:
        raise ValueError("--models cannot be combined with MODEL")
    config_file = options.get("config_file")
    given = (
        read_models_file(Path(serve.models), is_config=is_same_file(serve.models, config_file))
        if serve.models
        else named_models(options["model"] or [DEFAULT])
    )
    check_names(given)
    return given


def model_config(model: NamedModel, options: Mapping[str, Any], serve: ServeConfig) -> ModelConfig:
    """Return the gateway's config of one of several models, without its engine. `options` are those
    of the command line. Raises ValueError if an option is invalid."""
    own = {**options, **model.options, "served_name": [model.name, *model.aliases]}
    return build(ModelConfig, own, load=own.get("load") or serve.load)


def is_same_file(file: str, other: str | None) -> bool:
    """Return whether two paths name the same file; False if `other` is None."""
    return other is not None and Path(file).absolute() == user_path(other).absolute()


def read_models_file(file: Path, *, is_config: bool = False) -> list[NamedModel]:
    """Return the models in `file`. Raises ValueError, naming the table and the key, if the file
    cannot be read or used. Paths in it are relative to its directory.

    is_config   the file is also that of --config, and has more than models
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--models {file}: {error}") from None
    tables = content.pop("model", None)
    if (content and not is_config) or not isinstance(tables, list) or not tables:
        raise ValueError(f"--models {file}: expected only tables [[model]], and at least one")
    found = []
    for number, table in enumerate(tables, start=1):
        try:
            found.append(_read_table(table, file.parent))
        except ValueError as error:
            raise ValueError(f"--models {file}: model {number}: {error}") from None
    return found


def _read_table(table: Mapping[str, Any], folder: Path) -> NamedModel:
    own = msgspec.convert(table, ModelTable)
    options = {
        key: _option(key, value, folder)
        for key, value in table.items()
        if key not in ModelTable.__struct_fields__
    }
    local = folder / user_path(own.path)
    path = str(local) if local.exists() else own.path
    name = own.name or own_name(path)
    return NamedModel(name, path, is_explicit=True, aliases=own.alias, options=options)


def _option(key: str, value: Any, folder: Path) -> Any:
    """Return `value` as the type of the option `key`; relative paths start at `folder`. Raises
    ValueError, naming the key, if a model has no such option or the value is not valid."""
    if key not in _options():
        raise ValueError(f"unknown key {key!r}")
    flag, kind = _options()[key]
    try:
        return in_folder(flag, msgspec.convert(value, kind), folder)
    except msgspec.ValidationError as error:
        raise ValueError(str(field_error(error, value, kind).below(key))) from None


@cache
def _options() -> Mapping[str, tuple[Flag, Any]]:
    """Return each option that a model may have, and the type of its value."""
    options: dict[str, tuple[Flag, Any]] = {}
    for config in (WorkerConfig, EngineConfig, ModelConfig, ServeConfig):
        kinds = {each.name: each.type for each in msgspec.structs.fields(config)}
        flags = {flag.field: flag for flag in flags_of(config) if flag.field not in _SHARED}
        names = ["load"] if config is ServeConfig else flags
        options |= {name: (flags[name], kinds[name]) for name in names}
    return options
