"""Answers the requests on the control socket (protocol/tools/control.py). It has no socket itself.

The fleet decides which models are loaded, the rolling restart which engine is next, and the
supervisor what happens to each process. This module passes the decisions of the first two on to the
supervisor, and the changes of its children back to them. The current time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from protocol.tools.control import (
    ControlError,
    CopyModel,
    DeleteModel,
    FromSupervisor,
    GetLibrary,
    GetModels,
    ModelStates,
    PullModel,
    ReportUse,
    RollEnded,
    RollEngines,
    RollProgress,
    StartModel,
    StopModel,
    ToSupervisor,
)
from tools.processes.actions import Action, LogAction, SendReply
from tools.processes.child_states import ChildState
from tools.processes.fleet import DrainModel, Fleet, FleetAction, LoadModel, ModelRefused
from tools.processes.managed_models import ManagedModels
from tools.processes.model_job import JobReport
from tools.processes.model_phases import ModelPhase
from tools.processes.rolling_restart import (
    RetireEngine,
    RollAction,
    RollingRestart,
    RollRefused,
    StartEngine,
)
from tools.processes.supervisor import Supervisor

COMING = {ChildState.STARTING, ChildState.WAITING}
ONE_MODEL = "this server has one model, which is always loaded"
NOT_MANAGED = "the models of this server are not managed by clients: --manage-models is not set"


class ControlService:
    """The supervisor's answers to gateways and commands.

    groups      engine -> its group. The group of a model in the fleet has the model's name
    fleet       the models; None: the server has one model, which is always loaded
    managed     the models of `fleet`, if clients manage them
    timeout_s   time in which the engines of a rolling restart must become ready

    All methods return actions. Connections have numbers. Each request receives one reply, as
    protocol/tools/control.py says; `ReportUse` receives none.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        groups: Mapping[str, str],
        *,
        fleet: Fleet | None = None,
        managed: ManagedModels | None = None,
        timeout_s: float,
    ) -> None:
        self._supervisor = supervisor
        self._groups = groups
        self._fleet = fleet
        self._managed = managed
        self._timeout_s = timeout_s
        self._roll: RollingRestart | None = None
        self._roll_client = 0  # connection that requested the rolling restart
        #: Gateway's connection -> the newest version of the states that it has or was sent.
        self._versions: dict[int, int] = {}

    @property
    def deadline(self) -> float | None:
        """The time at which `advance` must be called; None if nothing is pending."""
        machines = (self._fleet, self._roll)
        times = [machine.deadline for machine in machines if machine is not None]
        return min((time for time in times if time is not None), default=None)

    def on_request(self, connection: int, request: ToSupervisor, now: float) -> list[Action]:
        """Handle a request. Call `advance` afterwards."""
        if isinstance(request, RollEngines):
            return self._start_roll(connection, now)
        fleet = self._fleet
        if fleet is None:
            refused = not isinstance(request, ReportUse)
            return [SendReply(connection, ControlError(message=ONE_MODEL))] if refused else []
        match request:
            case ReportUse():
                sent = self._versions.get(connection, 0)
                self._versions[connection] = max(sent, request.version)
                return self._perform(fleet.on_report(connection, request, now), now)
            case StartModel(model=model):
                gateway = connection if connection in self._versions else None
                return self._change(
                    connection, model, lambda: fleet.on_request(model, now, gateway), now
                )
            case StopModel(model=model):
                return self._change(connection, model, lambda: fleet.on_stop(model, now), now)
            case GetModels():
                return [SendReply(connection, self._model_states(fleet))]
            case PullModel() | CopyModel() | DeleteModel() | GetLibrary():
                if self._managed is None:
                    return [SendReply(connection, ControlError(message=NOT_MANAGED))]
                return self._managed.on_request(connection, request)

    def on_closed(self, connection: int, now: float) -> list[Action]:
        """Handle the end of a connection. Call `advance` afterwards."""
        if self._managed is not None:
            self._managed.on_closed(connection)
        if self._versions.pop(connection, None) is None or self._fleet is None:
            return []
        return self._perform(self._fleet.on_gateway_lost(connection, now), now)

    def advance(self, now: float) -> list[Action]:
        """Continue a rolling restart, and act on changed model states. Call this after each event,
        and at `deadline`."""
        actions = self._advance_roll(now)
        if self._fleet is None or self._supervisor.is_stopping:
            return actions
        for model in self._fleet.models:
            actions += self._perform(self._on_engines(self._fleet, model, now), now)
        actions += self._perform(self._fleet.tick(now), now)
        if self._managed is not None:
            actions += self._managed.advance()
        return actions + self._publish(self._fleet)

    def on_job_report(self, report: JobReport) -> list[Action]:
        """Handle a report of the process that downloads or removes a model."""
        return [] if self._managed is None else self._managed.on_job_report(report)

    def on_job_ended(self, result: JobReport | None) -> list[Action]:
        """Handle the end of that process, and its last report. Call `advance` afterwards."""
        return [] if self._managed is None else self._managed.on_job_ended(result)

    # ---- models

    def _change(
        self, connection: int, model: str, change: Callable[[], list[FleetAction]], now: float
    ) -> list[Action]:
        """Perform a request that changes the state of a model, and reply."""
        assert self._fleet is not None
        try:
            actions = self._perform(change(), now)
        except ModelRefused as error:
            return [SendReply(connection, ControlError(message=str(error), model=model))]
        if connection in self._versions:
            self._versions[connection] = self._fleet.version
        return [*actions, SendReply(connection, self._model_states(self._fleet))]

    def _model_states(self, fleet: Fleet) -> ModelStates:
        return fleet.states() if self._managed is None else self._managed.states()

    def _on_engines(self, fleet: Fleet, model: str, now: float) -> list[FleetAction]:
        """Report to the fleet what has changed with the engines of `model`."""
        engines = self._engines(model)
        states = {self._supervisor.state(engine) for engine in engines}
        is_gone = states == {ChildState.DOWN}
        match fleet.phase(model):
            case ModelPhase.LOADING if ChildState.READY in states:
                return fleet.on_ready(model, now)
            case ModelPhase.READY | ModelPhase.YIELDING if (
                states & COMING and ChildState.READY not in states
            ):
                return fleet.on_lost(model, now)
            case ModelPhase.LOADING | ModelPhase.READY if is_gone:
                return fleet.on_exit(model, self._failure(engines), now)
            case ModelPhase.YIELDING | ModelPhase.DRAINING if is_gone:
                return fleet.on_exit(model, "", now)
        return []

    def _failure(self, engines: Iterable[str]) -> str:
        """Return why the engines failed; "" if they were drained."""
        return next(filter(None, map(self._supervisor.failure, engines)), "")

    def _perform(self, actions: Sequence[FleetAction], now: float) -> list[Action]:
        performed: list[Action] = []
        for action in actions:
            engines = self._engines(action.model)
            match action:
                case LoadModel(model):
                    performed.append(LogAction(f"loading {model}"))
                    for engine in engines:
                        performed += self._supervisor.start(engine, now)
                case DrainModel(model):
                    performed.append(LogAction(f"unloading {model}"))
                    for engine in engines:
                        performed += self._supervisor.retire(engine, now)
        return performed

    def _publish(self, fleet: Fleet) -> list[Action]:
        """Send the states to the gateways that do not have this version."""
        outdated = [each for each, version in self._versions.items() if version < fleet.version]
        self._versions |= dict.fromkeys(outdated, fleet.version)
        return [SendReply(connection, self._model_states(fleet)) for connection in outdated]

    def _engines(self, group: str) -> list[str]:
        return [engine for engine, its_group in self._groups.items() if its_group == group]

    # ---- rolling restarts

    def _start_roll(self, connection: int, now: float) -> list[Action]:
        error = ""
        if self._supervisor.is_stopping:
            error = "the server is stopping"
        elif self._roll is not None:
            error = "a rolling restart is in progress"
        else:
            try:
                self._roll = RollingRestart(
                    self._groups, self._states(), now, timeout_s=self._timeout_s
                )
            except RollRefused as refused:
                error = str(refused)
        if error:
            return [SendReply(connection, ControlError(message=error))]
        self._roll_client = connection
        return []

    def _advance_roll(self, now: float) -> list[Action]:
        """Continue the rolling restart until it waits for something."""
        if self._roll is None:
            return []
        if self._supervisor.is_stopping:
            return self._report_roll(RollEnded(error="the server stops"))
        actions: list[Action] = []
        failures = {engine: self._supervisor.failure(engine) for engine in self._groups}
        for action in self._roll.advance(self._states(), failures, now):
            actions += self._perform_roll(action, now)
        return actions

    def _perform_roll(self, action: RollAction, now: float) -> list[Action]:
        match action:
            case RetireEngine(engine):
                return list(self._supervisor.retire(engine, now, comes_back=True))
            case StartEngine(engine):
                return list(self._supervisor.start(engine, now))
            case RollProgress() | RollEnded():
                return self._report_roll(action)

    def _report_roll(self, report: RollProgress | RollEnded) -> list[Action]:
        """Log the progress of the rolling restart, and send it to the command that started it."""
        if isinstance(report, RollProgress):
            text = f"rolling restart: {report.engine} is {report.stage}"
            log = LogAction(f"{text} ({report.number} of {report.total})")
        else:
            self._roll = None
            text = f"rolling restart stopped: {report.error}"
            log = LogAction(text if report.error else "rolling restart done", bool(report.error))
        message: FromSupervisor = report
        return [log, SendReply(self._roll_client, message)]

    def _states(self) -> dict[str, ChildState]:
        return {engine: self._supervisor.state(engine) for engine in self._groups}
