"""The models that clients have added to a server, and the file that keeps them between two starts.

$TIDEGATE_HOME/served/PORT.json
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from protocol.config.base import NO_PATH
from protocol.config.engine import EngineConfig
from protocol.config.gateway import ModelConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.adapters import split_adapter
from tools.models.catalogue import CATALOGUE, HUB_MODELS
from tools.models.fetch import is_cached
from tools.models.names import parse_hub_name
from tools.models.records import read_record
from tools.paths import user_path
from tools.processes.several_models import NamedModel


class SavedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that clients have downloaded, or names that they gave to a model of the operator."""

    #: The names in the API, the main one first.
    names: list[str]
    #: Name of the download; "": the model is one of the operator's.
    source: str = ""
    #: The main name of the operator's model.
    model: str = ""


def source_of(model: str) -> str:
    """Return the name by which all spellings of a downloadable model are compared; "" if `model`
    names none of the catalogue or of the Hub."""
    if model in CATALOGUE:
        return model
    found = parse_hub_name(HUB_MODELS[model].source if model in HUB_MODELS else model)
    return "" if found is None else str(found)


def operators_source(model: str) -> str:
    """Return `source_of` for an argument MODEL of the command line, which may also be a path."""
    is_file = model not in HUB_MODELS and user_path(model).exists()
    return model if model in CATALOGUE else "" if is_file else source_of(model)


def saved_models_file(home: Path, port: int) -> Path:
    return home / "served" / f"{port}.json"


def read_saved(file: Path) -> list[SavedModel]:
    """Return the models in the file; none if there is no readable file."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=list[SavedModel])
    return []


def write_saved(file: Path, content: bytes) -> None:
    """Replace the file. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(file)


def loaded_paths(worker: WorkerConfig) -> list[str]:
    """Return the directories and files that a worker loads, or may load later: those of the model,
    its image encoder, its draft model, and its adapters."""
    adapters = [split_adapter(each)[1] for each in worker.lora]
    encoder = worker.mmproj if worker.mmproj != NO_PATH else ""
    paths = [worker.model, encoder, worker.draft_model, *adapters, worker.lora_dir]
    return [path for path in paths if path]


@dataclass(slots=True, eq=False)
class ManagedModel:
    """One model of the server."""

    hosted: ModelConfig
    #: Name of its download (`saved_models.source_of`); "": it is a file of the operator.
    source: str
    #: The directories and files that its worker loads (`loaded_paths`).
    paths: Sequence[str]
    #: The names that the operator gave. Without any, clients may delete the model.
    own_names: frozenset[str] = frozenset()
    #: The child process of its engine.
    child: str = ""
    #: Connections to reply to after the model was removed.
    deleters: list[int] = field(default_factory=list)
    #: Whether it has no names any more, and will be removed.
    is_leaving: bool = False
    #: Version of the states since which it has no names.
    left_at: int = 0
    #: Whether the removal of its files has been ordered.
    is_ordered: bool = False

    @property
    def key(self) -> str:
        """The model's name in the fleet."""
        return self.hosted.supervised_name

    @property
    def names(self) -> list[str]:
        return [] if self.is_leaving else self.hosted.served_name


@dataclass(frozen=True, slots=True)
class ManagedPlan:
    """The models of a server whose clients manage them, before they are planned."""

    #: The models of the command line, and those that clients added before this start.
    models: Sequence[NamedModel]
    #: Main name -> names that the operator gave. Models of clients have none.
    own_names: Mapping[str, frozenset[str]]
    #: Main name -> name of the download; "": the operator gave a path.
    sources: Mapping[str, str]

    @property
    def added(self) -> list[str]:
        """The models that clients have added."""
        return [name for name in self.sources if name not in self.own_names]

    def at_start(
        self, hosted: Sequence[ModelConfig], engines: Mapping[str, EngineConfig]
    ) -> list[ManagedModel]:
        """Return the models at the start, from the gateways' configs and the engines."""
        return [
            ManagedModel(
                each,
                self.sources[name],
                loaded_paths(engines[name].worker),
                own_names=self.own_names.get(name, frozenset()),
                child=f"engine {name}",
            )
            for each in hosted
            for name in [each.supervised_name]
        ]


def with_saved(
    own: Sequence[NamedModel],
    saved: Sequence[SavedModel],
    home: Path,
    options: Mapping[str, Any],
) -> ManagedPlan:
    """Return the models of the command line and those that clients have added. The latter are
    loaded at their first request. Names that are taken meanwhile, and models that are not in the
    cache any more, are left out.

    own       the models of the command line
    saved     what clients have added
    home      Tidegate's directory of downloads
    options   what the latter have in place of options of the command line
    """
    models = {each.name: each for each in own}
    sources = {each.name: operators_source(each.model) for each in own}
    own_names = {each.name: frozenset((each.name, *each.aliases)) for each in own}
    taken = {name for names in own_names.values() for name in names}
    for each in saved:
        names = [name for name in each.names if name not in taken]
        owner = models.get(each.model) if not each.source else None
        path = _path_in_cache(each.source, home) if each.source else None
        if names and owner is not None:
            models[owner.name] = owner._replace(aliases=[*owner.aliases, *names])
        elif names and path is not None:
            name, *aliases = names
            models[name] = NamedModel(name, path, True, aliases, {**options, "load": "first-use"})
            sources[name] = each.source
        else:
            continue
        taken.update(names)
    return ManagedPlan(list(models.values()), own_names, sources)


def _path_in_cache(source: str, home: Path) -> str | None:
    """Return the argument MODEL for a model that was downloaded; None if a file of it is missing.
    A model of the catalogue is given by name, because the name selects its sampling."""
    if source in CATALOGUE:
        return source if is_cached(CATALOGUE[source], home) else None
    record = read_record(home, source)
    return None if record is None else record.path
