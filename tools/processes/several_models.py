"""The models that `tidegate serve` loads and unloads: their names, engines and memory.

Each model has one engine. All use the same device, so their memory is planned together: a model
that is loaded at the start is planned with what the earlier ones leave, and a model that is loaded
on first use as if it were alone. On a CPU its K/V cache then gets exactly the planned size,
whatever is free when it is loaded. On a GPU the worker measures what is free within its share. The
fleet keeps the sum of the loaded models within the memory that was free at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from protocol.config.base import NO_PATH
from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig, ModelConfig
from protocol.config.serve import ServeConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.model_card import ModelCard
from protocol.process.exit_codes import ExitCode
from protocol.shared.gguf_parts import model_name
from protocol.tools.control import control_address
from protocol.tools.start_facts import GIB, ModelPlan, Preflight
from tools.failure import Failure
from tools.models.preflight import preflight, preflight_alternatives, tokenizer_digest
from tools.models.pulling import served_name
from tools.processes.fleet import Fleet, FleetLimits

_with = msgspec.structs.replace


class NamedModel(NamedTuple):
    """A model of the command line, and the name under which it is served."""

    name: str
    model: str
    #: Whether the user has chosen the name.
    is_explicit: bool = False
    #: More names under which it is served.
    aliases: Sequence[str] = ()
    #: Options of this model, which replace those of the command line.
    options: Mapping[str, Any] = {}


def named_models(words: Sequence[str]) -> list[NamedModel]:
    """Return the models that the arguments MODEL or NAME=MODEL name."""
    return [_named(word) for word in words]


def check_names(models: Sequence[NamedModel]) -> None:
    """Raise ValueError if two models have the same name."""
    names = [name for each in models for name in (each.name, *each.aliases)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two models are named {name}; give them names: NAME=MODEL")


def _named(word: str) -> NamedModel:
    name, equals, model = word.partition("=")
    if equals and name and "/" not in name and not Path(word).exists():
        return NamedModel(name, model, is_explicit=True)
    return NamedModel(own_name(word), word)


def own_name(model: str) -> str:
    """Return the name of MODEL if the user chooses none: that in the catalogue or on the Hub, or
    else that of its file or directory."""
    path = Path(model)
    return served_name(model) or (model_name(path) if path.suffix == ".gguf" else path.name)


def with_served_name(models: Sequence[NamedModel], gateway: GatewayConfig) -> list[NamedModel]:
    """Return the models; a single one has the names of --served-name, if there are any."""
    if len(models) == 1 and gateway.served_name:
        name, *aliases = gateway.served_name
        return [models[0]._replace(name=name, aliases=aliases)]
    return list(models)


def check_shared(
    gateway: GatewayConfig, engine: EngineConfig, models: Sequence[NamedModel]
) -> None:
    """Raise ValueError if an option is set that models which are loaded on demand cannot share."""
    if gateway.served_name and len(models) > 1:
        raise ValueError("served_name cannot be combined with several models; use NAME=MODEL")
    if engine.worker.mmproj not in ("", NO_PATH) and len(models) > 1:
        raise ValueError(
            "mmproj cannot be combined with several models; set it for one of them in the file of "
            "--models"
        )
    if engine.worker.draft_model:
        raise ValueError("draft_model cannot be combined with models that are loaded on demand")


def options_of_others(worker: WorkerConfig) -> Mapping[str, Any]:
    """Return the options that models which clients add have in place of those of the command line:
    without the files that were made for its model."""
    return {"mmproj": NO_PATH if worker.mmproj == NO_PATH else "", "lora": []}


def engines_of_models(
    models: Sequence[NamedModel],
    build_engine: Callable[[Mapping[str, Any]], EngineConfig],
    directory: Path,
) -> dict[str, EngineConfig]:
    """Return the engine of each model, by the model's name. The first one has the default address
    of a server's engine, to which programs connect that use the ZeroMQ client library.

    build_engine   returns one engine as the command line describes it, with other options for one
                   model
    directory      the run directory of the server
    """
    found = {}
    for number, (name, model, _, _, options) in enumerate(models, start=1):
        engine = build_engine(options)
        if engine.is_group:  # the plan of several models counts one worker for each
            raise Failure(
                f"model {name}: --tensor-parallel cannot be combined with several models, or with "
                "models that are loaded on demand; serve it alone",
                exit_code=ExitCode.USAGE,
            )
        address = engine.address if number == 1 else f"ipc://{directory / f'engine-{number}.sock'}"
        worker = _with(
            engine.worker,
            model=model,
            address=f"ipc://{directory / f'worker-{number}.sock'}",
            share_device=True,
        )
        journal = str(Path(engine.journal) / name) if engine.journal else ""
        found[name] = _with(engine, address=address, worker=worker, journal=journal)
    return found


@dataclass(frozen=True, slots=True)
class PlannedModels:
    """The models after their files were checked."""

    #: Name -> engine with the planned size of its K/V cache, and of its recurrent states.
    engines: Mapping[str, EngineConfig]
    plans: Mapping[str, ModelPlan]
    cards: Mapping[str, ModelCard]
    #: The models that are loaded at the start.
    loaded: Sequence[str]
    #: Optional models that cannot be served now -> why.
    left_out: Mapping[str, str]

    def fleet(self, serve: ServeConfig, now: float) -> Fleet:
        """Return the fleet of these models. The models in `loaded` are loading."""
        limits = FleetLimits(
            memory_bytes=max(plan.free_bytes for plan in self.plans.values()),
            max_loaded=serve.max_loaded,
            idle_unload_s=serve.idle_unload_s,
        )
        planned = {name: planned_bytes(plan) for name, plan in self.plans.items()}
        return Fleet(planned, limits, now, loaded=self.loaded)


def planned_bytes(plan: ModelPlan) -> int:
    """Return the memory that a model needs in all."""
    return plan.device_bytes + plan.tier_bytes


def plan_models(
    engines: Mapping[str, EngineConfig],
    hosted: Sequence[ModelConfig],
    serve: ServeConfig,
    *,
    optional: Collection[str] = (),
) -> PlannedModels:
    """Check the files of all models, and plan their memory.

    hosted     the models of the gateway
    optional   names of models that are left out if they cannot be served

    Raises Failure, in one line with a remedy, if another model cannot be served, or if those that
    are loaded at the start do not fit together.
    """
    names = list(engines)
    at_start = [each.supervised_name for each in hosted if each.load == "start"]
    loaded = at_start[: serve.max_loaded or None]
    workers = [engine.worker for engine in engines.values()]
    found = dict(zip(names, preflight_alternatives(workers), strict=True))
    left_out = {name: each.error for name, each in found.items() if each.error}
    for name in left_out.keys() - {*optional}:
        _raise_error(name, found[name])
    found = {name: each for name, each in found.items() if name not in left_out}
    together = preflight([engines[name].worker for name in loaded]) if loaded else Preflight()
    if together.error:
        raise Failure(
            f"the models do not fit together: {together.error}; {together.remedy}, or "
            "--load first-use",
            exit_code=ExitCode.BAD_MODEL,
        )
    plans = {name: each.plans[0] for name, each in found.items()}
    plans |= dict(zip(loaded, together.plans, strict=True))
    cards = {name: card for name, each in found.items() if (card := each.card) is not None}
    planned = {name: with_sizes(engines[name], plan) for name, plan in plans.items()}
    return PlannedModels(planned, plans, cards, loaded, left_out)


def _raise_error(name: str, found: Preflight) -> None:
    message = f"model {name}: {found.error}; {found.remedy}"
    raise Failure(message, exit_code=ExitCode.BAD_MODEL)


def with_sizes(engine: EngineConfig, plan: ModelPlan) -> EngineConfig:
    """Return the config `engine` with the planned number of slots, if each has a recurrent state,
    and with the planned size of the K/V cache, if its device is the CPU."""
    worker = engine.worker
    if plan.request_state_bytes:
        worker = _with(worker, max_slots=plan.max_slots)
    if not worker.kv_blocks and plan.device == "cpu":
        gib = (plan.kv_bytes + 1) / GIB  # not less than the blocks need, after the conversion
        worker = _with(worker, kv_memory_gib=gib)
    return _with(engine, worker=worker)


def hosting(
    gateway: GatewayConfig, models: PlannedModels, cards: Mapping[str, Path], directory: Path
) -> GatewayConfig:
    """Return the config of a gateway that serves all models in `gateway.models`.

    cards       name -> file with the card of the model
    directory   the run directory, with the control socket
    """
    hosted = [
        _with(
            each,
            engine=models.engines[name].address,
            load="start" if name in models.loaded else "first-use",
            expected_card=str(cards[name]),
            tried_tokenizer=tokenizer_digest(models.cards[name]),
        )
        for each in gateway.models
        for name in [each.supervised_name]
        if name in models.engines
    ]
    return _with(gateway, models=hosted, control=control_address(directory))
