"""The models of the supervisor as one gateway process sees them: their states, and their requests.

A request opens a model before it uses the model, and closes it at its end. If the model is not
loaded, the request is kept until the model is ready, or refused. `protocol.tools.control` has the
rules that guarantee that no model is unloaded under a request. The module is pure: `control.py` has
the socket, and the greenlets that wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.config.gateway import ModelConfig
from protocol.tools.control import (
    ControlError,
    FromSupervisor,
    LoadState,
    ModelState,
    ModelStates,
    ReportUse,
    StartModel,
)
from protocol.wire.errors import EngineNotReady, ServingError

REFUSED_RETRY_S = 10.0
"""Retry-After of a request whose model cannot be loaded. Another model must be unloaded first."""
UNLOADED: tuple[LoadState, ...] = ("unloaded", "waiting", "stopping")
"""The states in which a model's engines are stopped or will be."""
WITHOUT_ENGINES: tuple[LoadState, ...] = ("unloaded", "waiting", "failed")
"""The states in which no engine of a model runs."""


@dataclass(slots=True)
class _Load:
    """The state of one model, and the requests that use it or wait for it."""

    #: The last state that the supervisor sent; None before the first one on any connection.
    last: ModelState | None = None
    #: Requests that were given to the model's engines and have not ended.
    num_open: int = 0
    #: Requests that wait until the model is ready.
    num_kept: int = 0
    #: Whether the model was used since the last report.
    is_used: bool = False
    #: Whether `StartModel` was sent for the kept requests, and its effect is not known yet.
    is_requested: bool = False
    #: Whether the model was unloaded or failed at some time, so that its requests wait for it.
    was_unloaded: bool = False
    #: Number of reports by which all earlier engines of the model have exited.
    num_exits: int = 0
    #: Number of times that all kept requests were refused, and the last cause.
    num_refusals: int = 0
    refusal: str = ""


class ModelLoads:
    """The states of the supervisor's models, by name, and the requests of this gateway process for
    them.

    Requests for a model wait for it only if it is loaded on first use, or was unloaded or failed
    before. If it is still loading since the start of the server, they are refused until it is
    ready.
    """

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        #: Version of the last states on this connection; 0: none.
        self.version = 0
        #: Version in the last report on this connection.
        self._reported = 0
        #: The models that every gateway process serves, as the supervisor last sent them; None: it
        #: has sent none, as clients do not manage the models.
        self.hosted: list[ModelConfig] | None = None
        self._names: set[str] = set()  # of the last states, if clients manage the models

    def add(self, name: str, *, is_unloaded: bool) -> None:
        """Add a model, unless the supervisor has reported its state already. `is_unloaded`: it is
        loaded on first use."""
        self._loads.setdefault(name, _Load(was_unloaded=is_unloaded))

    def has(self, name: str) -> bool:
        """Return whether the supervisor has the model, as far as it has reported."""
        return name in self._names

    def remove(self, name: str) -> None:
        """Forget a model that the supervisor has removed."""
        self._loads.pop(name, None)

    def state(self, name: str) -> ModelState | None:
        """Return the last state of a model; None if the supervisor has sent none yet."""
        return self._loads[name].last

    def accepts(self, name: str) -> bool:
        """Return whether a new request may be given to the model's engines, if they are ready.

        While a model loads for the first time, its engines may be ready before the supervisor has
        noticed that.
        """
        load = self._loads[name]
        state = load.last.state if load.last is not None else None
        return state == "ready" or (state == "loading" and not load.was_unloaded)

    def unloaded_state(self, name: str) -> LoadState | None:
        """Return the model's state if its engines are stopped or will be; otherwise None."""
        last = self._loads[name].last
        return last.state if last is not None and last.state in UNLOADED else None

    def keeps_requests(self, name: str) -> bool:
        """Return whether requests wait while the model is not ready."""
        return self._loads[name].was_unloaded

    def num_exits(self, name: str) -> int:
        """Return a number that changes whenever the supervisor reports that all engines of the
        model have exited. Those that serve its next load are new ones."""
        return self._loads[name].num_exits

    # ---- requests

    def open(self, name: str) -> None:
        """Count a request that may be given to the model's engines, until `close`."""
        load = self._loads[name]
        load.num_open += 1
        load.is_used = True

    def close(self, name: str) -> None:
        """Count the end of a request. Its model may have been removed, if the supervisor has not
        received a report of this process for long."""
        if (load := self._loads.get(name)) is not None:
            load.num_open -= 1

    def keep(self, name: str) -> None:
        """Count a request that waits until the model is ready, until `release`."""
        self._loads[name].num_kept += 1

    def release(self, name: str) -> None:
        """Count the end of a request's wait for the model, whether the model became ready or the
        request failed. If the request goes on to the engines, the caller must call `open` too."""
        if (load := self._loads.get(name)) is None:
            return
        load.num_kept -= 1
        if not load.num_kept:
            load.is_requested = False  # the supervisor may forget a model that nobody waits for

    def num_refusals(self, name: str) -> int:
        """Return a number that changes whenever the kept requests of the model are refused."""
        return self._loads[name].num_refusals

    def refusal(self, name: str) -> ServingError:
        """Return the last refusal of the model's kept requests, as a new exception."""
        return EngineNotReady(
            f"the model {name} cannot be loaded: {self._loads[name].refusal}",
            retry_after_s=REFUSED_RETRY_S,
        )

    # ---- messages to the supervisor

    def start(self, name: str) -> StartModel | None:
        """Return the message that loads the model for a kept request; None if it was sent already,
        or if the model is loading or loaded."""
        load = self._loads[name]
        if load.is_requested or (load.last is not None and load.last.state in ("loading", "ready")):
            return None
        load.is_requested = True
        return StartModel(model=name)

    @property
    def must_report(self) -> bool:
        """Whether a report is due at once, because the supervisor has sent a new version."""
        return self.version > self._reported

    def report(self) -> ReportUse:
        """Return the report of the models' use. It must be sent."""
        loads = self._loads.items()
        used = {name: load.num_open for name, load in loads if load.num_open or load.is_used}
        kept = {name: load.num_kept for name, load in loads if load.num_kept}
        for load in self._loads.values():
            load.is_used = False
        self._reported = self.version
        return ReportUse(open=used, kept=kept, version=self.version)

    # ---- events of the connection

    def on_message(self, message: FromSupervisor) -> None:
        if isinstance(message, ModelStates):
            is_new, self.version = message.version != self.version, message.version
            if message.hosted is not None:
                self._update(message, message.hosted)
            for state in message.models:
                if (load := self._loads.get(state.name)) is not None:
                    self._on_state(load, state, is_new)
        elif isinstance(message, ControlError) and message.model in self._loads:
            load = self._loads[message.model]
            load.is_requested = False
            _refuse(load, message.message)

    def _update(self, message: ModelStates, hosted: list[ModelConfig]) -> None:
        """Note which models there are, and add those that are new."""
        self.hosted = hosted
        self._names = {state.name for state in message.models}
        for name in self._names:
            self.add(name, is_unloaded=True)

    def _on_state(self, load: _Load, state: ModelState, is_new: bool) -> None:
        """Note the state of a model. `is_new`: it belongs to a new version."""
        before, load.last = load.last, state
        if is_new and state.state in ("unloaded", "failed"):
            # A load may have been requested, and given up, between the last version and this one.
            load.is_requested = False
        if before is not None and (before.state, before.version) == (state.state, state.version):
            return
        load.is_requested = False
        load.was_unloaded |= state.state in (*UNLOADED, "failed")
        # A model that is needed again at once is "loading" after "stopping".
        was_stopping = before is not None and before.state == "stopping"
        if state.state in WITHOUT_ENGINES or (was_stopping and state.state == "loading"):
            load.num_exits += 1
        if before is not None and state.state == "failed":
            _refuse(load, state.error or "its engines failed")

    def on_disconnected(self) -> None:
        """Forget what was sent on the lost connection. The next connection starts with a report."""
        self.version = self._reported = 0
        for load in self._loads.values():
            load.is_requested = False


def _refuse(load: _Load, cause: str) -> None:
    """Refuse the kept requests of a model."""
    load.num_refusals += 1
    load.refusal = cause
