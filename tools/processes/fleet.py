"""Decides which of a server's models are loaded. It starts and stops no process itself.

Its input is events: a model was requested, gateways reported their open requests, a model's engines
became ready or exited, time passed. Its output is actions: start or stop the engines of a model.
The current time is an argument. These rules hold in addition to the table of phases
(model_phases.py):

- The loaded models together stay within the planned memory and within `max_loaded`.
- Requested models wait in a queue, first come, first served. If the first one has no room, models
  make room for it: those without requests at once, the least recently used first. If that is not
  enough, busy models make room too, each after it has served for as long as its load took.
- A model that makes room accepts no new requests. It is unloaded after every gateway has confirmed
  that, and has no open request of it. So no model is unloaded under a request, and each requested
  model is loaded in the end.
- A model that was not used for `idle_unload_s` is unloaded in the same way.
- A model whose load failed is not loaded again for RETRY_S.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.tools.control import (
    REPORT_EVERY_S,
    ModelState,
    ModelStates,
    ReportUse,
)
from protocol.tools.start_facts import GIB
from tools.processes.model_phases import (
    LEAVING,
    LOADED,
    MODEL_MACHINE,
    NOT_LOADED,
    REPORTED_STATE,
    ModelEvent,
    ModelPhase,
)

RETRY_S = 10.0
"""Seconds after a failed load in which requests for the model are refused at once."""
SILENT_S = 10 * REPORT_EVERY_S
"""A gateway that has sent no report for this many seconds is considered gone."""


class ModelRefused(Exception):
    """A model cannot be loaded now. The message says why, with numbers."""


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The action to start the engines of a model."""

    model: str


@dataclass(frozen=True, slots=True)
class DrainModel:
    """The action to stop the engines of a model, which has no open requests."""

    model: str


FleetAction = LoadModel | DrainModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """The limits on all loaded models together."""

    #: Memory that all models together may use; 0: not limited.
    memory_bytes: int = 0
    #: Most models that are loaded at the same time; 0: not limited.
    max_loaded: int = 0
    #: Seconds without use after which a model is unloaded; 0: never.
    idle_unload_s: float = 0.0


@dataclass(slots=True, eq=False)
class FleetModel:
    """One model of a server."""

    name: str
    #: Memory that its engines need for weights, K/V cache and steps together; 0: unknown.
    planned_bytes: int = 0
    phase: ModelPhase = ModelPhase.UNLOADED
    #: Why it was refused or failed; "" if nothing is wrong.
    error: str = ""
    #: Version of the states at the last change of its phase.
    version: int = 0
    #: Time of its last use, as far as reported.
    used_at: float = 0.0
    #: Start and end of its last load.
    load_at: float = 0.0
    ready_at: float = 0.0
    #: Time before which requests for it are refused, after a failure.
    retry_at: float = field(default=float("-inf"))
    #: Whether it is needed again after it has been unloaded.
    is_wanted: bool = False
    #: Whether it must be unloaded even if nobody needs its room.
    is_stopped: bool = False
    #: Whether it will be removed, so that it is not loaded again.
    is_leaving: bool = False

    @property
    def served_enough_at(self) -> float:
        """The time from which the model may be unloaded for another one even if it is busy."""
        return self.ready_at + (self.ready_at - self.load_at)


@dataclass(slots=True, eq=False)
class GatewayUse:
    """The last report of one gateway process."""

    report: ReportUse
    at: float
    #: Models that it has requested since the report.
    requested: set[str] = field(default_factory=set)

    def needs(self, model: str) -> bool:
        """Return whether the gateway has a request for `model`."""
        report = self.report
        counts = report.open.get(model, 0), report.kept.get(model, 0)
        return any(counts) or model in self.requested

    def has_left(self, model: FleetModel) -> bool:
        """Return whether the gateway has no open request at the model, and has confirmed that it
        will open none before the model's next load."""
        is_open = self.report.open.get(model.name, 0) > 0
        return not is_open and self.report.version >= model.version


class Fleet:
    """The models of one server. Times are in seconds of any monotonic clock.

    models   name -> planned bytes, in the order of the command line
    loaded   models whose engines are started with the server

    Methods that take an event return the actions to perform.
    """

    def __init__(
        self,
        models: Mapping[str, int],
        limits: FleetLimits,
        now: float,
        *,
        loaded: Iterable[str] = (),
    ) -> None:
        self.limits = limits
        self.version = 1
        self._models = {name: FleetModel(name, planned) for name, planned in models.items()}
        self._queue: list[FleetModel] = []  # the models in the phase WAITING
        self._gateways: dict[int, GatewayUse] = {}
        self._advanced_at = now
        for name in loaded:
            model = self._models[name]
            model.phase, model.load_at = ModelPhase.LOADING, now

    # ---- what others see

    @property
    def models(self) -> list[str]:
        return list(self._models)

    def phase(self, model: str) -> ModelPhase:
        return self._models[model].phase

    def states(self) -> ModelStates:
        loaded = [model.name for model in self._in_phases(LOADED)]
        return ModelStates(
            version=self.version,
            models=[
                ModelState(
                    name=model.name,
                    state=REPORTED_STATE[model.phase],
                    version=model.version,
                    error=model.error,
                    planned_bytes=model.planned_bytes,
                    waits_for=loaded if model.phase is ModelPhase.WAITING else [],
                )
                for model in self._models.values()
            ],
            used_bytes=self._used_bytes(self._in_phases(LOADED)),
            limit_bytes=self.limits.memory_bytes,
        )

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` must be called; None if nothing is pending."""
        times = []
        ready = self._in_phases({ModelPhase.READY})
        if self.limits.idle_unload_s:
            times += [self._idle_at(model) for model in ready if not self._is_busy(model)]
        if self._queue:
            enough = (model.served_enough_at for model in ready)
            times += [time for time in enough if time > self._advanced_at]
        if self._in_phases({ModelPhase.YIELDING}) or not self.has_confirmed(self.version):
            times += [gateway.at + SILENT_S for gateway in self._gateways.values()]
        return min(times, default=None)

    def has_confirmed(self, version: int) -> bool:
        """Return whether every gateway process has received the states of `version`."""
        return all(each.report.version >= version for each in self._gateways.values())

    # ---- the models of the server

    def add(self, name: str, planned_bytes: int) -> None:
        """Add a model that is not loaded."""
        self._models[name] = FleetModel(name, planned_bytes)
        self.touch()

    def retire(self, name: str) -> None:
        """Let a model be unloaded after its open requests finish, and not be loaded again. Call
        `tick` afterwards. When the model is unloaded, it can be removed."""
        model = self._models[name]
        model.is_leaving = True
        self._stop(model)

    def remove(self, name: str) -> None:
        """Remove a model that is not loaded."""
        assert self.phase(name) in NOT_LOADED
        del self._models[name]
        self.touch()

    def touch(self) -> int:
        """Make a new version of the states, because something else that belongs to them has
        changed. Return the version."""
        self.version += 1
        return self.version

    # ---- events

    def on_request(self, name: str, now: float, gateway: int | None = None) -> list[FleetAction]:
        """Load a model, as soon as there is room.

        gateway   number of the gateway process that has a request for the model; None: a command

        Raises ModelRefused if the model is unknown, can never fit, or has just failed.
        """
        model = self._known(name)
        if model.is_leaving:
            raise ModelRefused(f"model {name} is being deleted")
        self._check_fits(model)
        if model.phase is ModelPhase.FAILED and now < model.retry_at:
            raise ModelRefused(
                f"model {name} could not be loaded: {model.error}; the next attempt is possible in "
                f"{model.retry_at - now:.0f} s"
            )
        if gateway is not None:
            use = self._gateways.setdefault(gateway, GatewayUse(ReportUse(open={}), now))
            use.requested.add(name)
        model.used_at = now
        if model.phase in LEAVING:
            model.is_wanted = True
        elif self._change(model, ModelEvent.REQUEST):
            model.error = ""
            self._queue.append(model)
        return self._advance(now)

    def on_stop(self, name: str, now: float) -> list[FleetAction]:
        """Unload a model after its open requests finish, or cancel its load. Raises ModelRefused if
        the model is unknown."""
        self._stop(self._known(name))
        return self._advance(now)

    def on_report(self, gateway: int, report: ReportUse, now: float) -> list[FleetAction]:
        """Handle the report of the gateway process with the number `gateway`."""
        self._gateways[gateway] = GatewayUse(report, now)
        for name in (report.open.keys() | report.kept.keys()) & self._models.keys():
            self._models[name].used_at = now
        return self._advance(now)

    def on_gateway_lost(self, gateway: int, now: float) -> list[FleetAction]:
        """Handle the end of a gateway process, or of its connection."""
        self._gateways.pop(gateway, None)
        return self._advance(now)

    def on_ready(self, name: str, now: float) -> list[FleetAction]:
        """Record that an engine of the model `name` became ready."""
        model = self._models[name]
        if self._change(model, ModelEvent.READY):
            model.ready_at = model.used_at = now
            model.error = ""
        return self._advance(now)

    def on_lost(self, name: str, now: float) -> list[FleetAction]:
        """Record that the last ready engine of the model `name` is being restarted."""
        model = self._models[name]
        was_yielding = model.phase is ModelPhase.YIELDING
        if self._change(model, ModelEvent.LOST):
            model.load_at = now
        drained = [DrainModel(name)] * was_yielding
        return [*drained, *self._advance(now)]

    def on_exit(self, name: str, error: str, now: float) -> list[FleetAction]:
        """Record that all engines of the model `name` have exited.

        error   why the last one failed; "" after a drain
        """
        model = self._models[name]
        was_loading = model.phase is ModelPhase.LOADING
        self._change(model, ModelEvent.FAILED if error else ModelEvent.EXITED)
        if model.phase is ModelPhase.FAILED:
            model.error = error
            model.retry_at = now + RETRY_S if was_loading else now
        model.is_stopped = False
        if model.is_wanted:
            model.is_wanted = False
            self._change(model, ModelEvent.REQUEST)
            self._queue.append(model)
        return self._advance(now)

    def tick(self, now: float) -> list[FleetAction]:
        """Do what is due at `now`, such as unloading an idle model. Call this at `deadline`."""
        return self._advance(now)

    # ---- rules

    def _advance(self, now: float) -> list[FleetAction]:
        """Do all that is possible now: load the models in the queue, make room for the first one,
        unload idle models, and drain those that have no open requests any more."""
        actions: list[FleetAction] = []
        self._advanced_at = now
        self._forget_silent(now)
        while self._queue and self._has_room(self._queue[0], self._in_phases(LOADED)):
            model = self._queue.pop(0)
            self._change(model, ModelEvent.ADMIT)
            model.load_at = now
            actions.append(LoadModel(model.name))
        if self._queue:
            self._make_room(self._queue[0], now)
        else:
            self._revive()
        for model in self._in_phases({ModelPhase.READY}):
            is_idle = self.limits.idle_unload_s and now >= self._idle_at(model)
            if is_idle and not self._is_busy(model):
                self._yield(model)
        for model in self._in_phases({ModelPhase.YIELDING}):
            if all(gateway.has_left(model) for gateway in self._gateways.values()):
                self._change(model, ModelEvent.CONFIRMED)
                actions.append(DrainModel(model.name))
        return actions

    def _make_room(self, wanted: FleetModel, now: float) -> None:
        """Choose models to unload so that `wanted` fits, as few as necessary: idle ones first. Do
        nothing if it would still not fit."""
        staying = [model for model in self._in_phases(LOADED) if model.phase not in LEAVING]
        ready = [model for model in staying if model.phase is ModelPhase.READY]
        idle = [model for model in ready if not self._is_busy(model)]
        busy = [model for model in ready if self._is_busy(model) and now >= model.served_enough_at]
        idle.sort(key=lambda model: model.used_at)
        busy.sort(key=lambda model: model.ready_at)
        leaving: list[FleetModel] = []
        for model in [*idle, *busy]:
            if self._has_room(wanted, staying):
                break
            staying.remove(model)
            leaving.append(model)
        if self._has_room(wanted, staying):
            for model in leaving:
                self._yield(model)

    def _revive(self) -> None:
        """Keep the models whose room is not needed, if somebody needs them again."""
        for model in self._in_phases({ModelPhase.YIELDING}):
            if model.is_wanted and not model.is_stopped:
                model.is_wanted = False
                self._change(model, ModelEvent.REVIVE)

    def _stop(self, model: FleetModel) -> None:
        model.is_wanted = False
        if model.phase is ModelPhase.WAITING:
            self._queue.remove(model)
            self._change(model, ModelEvent.CANCEL)
        elif model.phase in (ModelPhase.LOADING, ModelPhase.READY):
            self._yield(model)
        model.is_stopped = model.phase is ModelPhase.YIELDING

    def _yield(self, model: FleetModel) -> None:
        model.is_wanted = False
        self._change(model, ModelEvent.YIELD)

    def _change(self, model: FleetModel, event: ModelEvent) -> bool:
        """Change the phase of a model. Return False if its phase ignores `event`. Raises
        IllegalMove."""
        if MODEL_MACHINE.ignores(model.phase, event):
            return False
        phase = MODEL_MACHINE.move(model.phase, event, subject=model.name)
        if REPORTED_STATE[phase] != REPORTED_STATE[model.phase]:
            self.version += 1
            model.version = self.version
        model.phase = phase
        return True

    def _known(self, name: str) -> FleetModel:
        if name not in self._models:
            raise ModelRefused(f"no model is named {name}; served: {', '.join(self._models)}")
        return self._models[name]

    # ---- use

    def _is_busy(self, model: FleetModel) -> bool:
        return any(gateway.needs(model.name) for gateway in self._gateways.values())

    def _forget_silent(self, now: float) -> None:
        """Forget the gateways that have stopped to report."""
        self._gateways = {
            number: gateway
            for number, gateway in self._gateways.items()
            if now < gateway.at + SILENT_S
        }

    def _idle_at(self, model: FleetModel) -> float:
        return model.used_at + self.limits.idle_unload_s

    # ---- room

    def _in_phases(self, phases: set[ModelPhase]) -> list[FleetModel]:
        return [model for model in self._models.values() if model.phase in phases]

    def _used_bytes(self, models: Iterable[FleetModel]) -> int:
        return sum(model.planned_bytes for model in models)

    def _has_room(self, wanted: FleetModel, loaded: Sequence[FleetModel]) -> bool:
        """Return whether `wanted` can be loaded while `loaded` are."""
        limits = self.limits
        if limits.max_loaded and len(loaded) >= limits.max_loaded:
            return False
        used = self._used_bytes(loaded) + wanted.planned_bytes
        return not limits.memory_bytes or used <= limits.memory_bytes

    def _check_fits(self, model: FleetModel) -> None:
        """Raise ModelRefused if a model does not fit even if it is alone."""
        if not self._has_room(model, []):
            raise ModelRefused(
                f"model {model.name} needs {_in_gib(model.planned_bytes)}; all models together may "
                f"use {_in_gib(self.limits.memory_bytes)}"
            )


def _in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
