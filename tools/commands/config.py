"""`tidegate config`: shows the options with which `tidegate serve` would start.

The output is TOML that `tidegate serve --config` accepts. Keys are not printed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protocol.config.base import Config
from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig
from protocol.config.serve import ServeConfig
from protocol.config.worker import WorkerConfig
from tools.commands import serve
from tools.config_file import MODEL, MODELS, FileSettings, api_keys_in_effect
from tools.flags import Flag, build, flags_of
from tools.http.web import KEY_VARIABLE
from tools.models.catalogue import DEFAULT
from tools.processes.models_file import given_models, is_same_file
from tools.processes.several_models import NamedModel

DESCRIPTION = """\
Show the options with which `tidegate serve` would start: from the command line, the file of
--config, the environment, or the defaults. The output is a file for --config. Each line names the
source of its value. API keys are not shown.
"""

EXAMPLES = """\
examples:
  tidegate config                                   all defaults
  tidegate config --config tidegate.toml            a file, completed by the defaults
  tidegate config --config tidegate.toml --port 8001 > all.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    own = os.environ.get(KEY_VARIABLE, "")
    given = {**vars(options), "api_key": api_keys_in_effect(options, own)}
    serve.plan(given)  # raises Failure if options contradict each other
    worker = build(WorkerConfig, given, model="")
    configs: Sequence[Config] = (
        build(GatewayConfig, given),
        build(EngineConfig, given, worker=worker),
        worker,
        build(ServeConfig, given),
    )
    values = {
        flag.field: getattr(config, flag.field)
        for config in configs
        for flag in flags_of(type(config))
    }
    origins = _Origins(options, options.settings, own)
    for line in _document(given, values, origins):
        print(line)
    return 0


class _Origins:
    """The source of each option's value."""

    def __init__(
        self, options: argparse.Namespace, settings: FileSettings | None, own_key: str
    ) -> None:
        self._given = {k for k, value in vars(options).items() if value not in (None, [])}
        self._settings = settings
        self._own_key = own_key

    def of(self, field: str, option: str) -> str:
        """Return the source of the value of a field.

        option   how the command line spells the field
        """
        sources = [f"${KEY_VARIABLE}"] if field == "api_key" and self._own_key else []
        if self._settings is not None and field in self._settings.values:
            return sources[0] if sources else self._settings.origin(field)
        if field in self._given:
            sources.insert(0, option)
        return " and ".join(sources) or "default"


def _document(
    options: Mapping[str, Any], values: Mapping[str, Any], origins: _Origins
) -> Iterator[str]:
    """Yield the lines of the file.

    options   field -> value, as the user has given them
    values    field -> value of each option, checked
    """
    has_tables = is_same_file(options[MODELS] or "", options["config_file"])
    models = options[MODEL] or [DEFAULT]
    if not options[MODELS]:
        yield _line(MODEL, models[0] if len(models) == 1 else models, origins.of(MODEL, "MODEL"))
    for title, config in serve.CONFIGS:
        yield ""
        yield f"# {title}"
        for flag in flags_of(config):
            if flag.field != MODELS or not has_tables:
                yield _option_line(flag, values[flag.field], origins)
    if has_tables:
        origin = origins.of(MODELS, "--models")
        yield from _tables(given_models(options, build(ServeConfig, options)), origin)


def _option_line(flag: Flag, value: Any, origins: _Origins) -> str:
    name = flag.name if not flag.is_switch or value != flag.default else flag.opposite
    origin = origins.of(flag.field, name)
    if flag.is_secret and value:
        return f"# {flag.field}: {len(value)} not shown  # {origin}"
    if flag.is_path and value and os.sep in value:
        value = os.path.abspath(value)
    return _line(flag.field, value, origin)


def _tables(models: Sequence[NamedModel], origin: str) -> Iterator[str]:
    """Yield the tables [[model]] of the file of --config."""
    for model in models:
        yield ""
        yield f"[[model]]  # {origin}"
        table = {"path": model.model, "name": model.name, "alias": list(model.aliases)}
        for name, value in (table | dict(model.options)).items():
            yield f"{name} = {to_toml(value)}"


def _line(name: str, value: Any, origin: str) -> str:
    return f"{name} = {to_toml(value)}  # {origin}"


def to_toml(value: Any) -> str:
    """Return a text, number, bool, list or tuple as TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(to_toml, value))}]"
    return repr(value)
