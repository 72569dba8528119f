"""Restarts the engines of a server one after the other. It starts and signals no process itself.

An engine is drained only while another one of its group is ready, so the group always serves.
`advance` compares the states of the engines with the current stage, so it does not matter in which
order events arrive. The current time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from protocol.machine import Machine
from protocol.tools.control import RollEnded, RollProgress, RollStep
from tools.processes.child_states import ChildState


class RollStage(Enum):
    WAITING = auto()  # until another engine of the group is ready; limited by `deadline`
    DRAINING = auto()  # until the engine has exited; the supervisor limits it
    STARTING = auto()  # until its successor is ready; the supervisor limits it
    ENDED = auto()  # all engines were restarted, or one was not ready


class RollEvent(Enum):
    DRAINED = auto()  # the engine was signalled to drain
    STARTED = auto()  # the successor was started
    NEXT = auto()  # the successor is ready, or the engine is not needed; another one follows
    DONE = auto()  # the last engine is ready
    FAILED = auto()  # the successor, or another engine of the group, is not ready


ROLL_MACHINE = Machine(
    "rolling restart",
    starts=(RollStage.WAITING,),
    rows={
        (RollStage.WAITING, RollEvent.DRAINED): RollStage.DRAINING,
        (RollStage.WAITING, RollEvent.STARTED): RollStage.STARTING,
        (RollStage.WAITING, RollEvent.NEXT): RollStage.WAITING,
        (RollStage.WAITING, RollEvent.DONE): RollStage.ENDED,
        (RollStage.WAITING, RollEvent.FAILED): RollStage.ENDED,
        (RollStage.DRAINING, RollEvent.STARTED): RollStage.STARTING,
        (RollStage.STARTING, RollEvent.NEXT): RollStage.WAITING,
        (RollStage.STARTING, RollEvent.DONE): RollStage.ENDED,
        (RollStage.STARTING, RollEvent.FAILED): RollStage.ENDED,
    },
)

COMING = {ChildState.STARTING, ChildState.WAITING, ChildState.READY}


class RollRefused(Exception):
    """A rolling restart is not possible. The message says why."""


@dataclass(frozen=True, slots=True)
class RetireEngine:
    """The action to drain an engine, which will be started again."""

    engine: str


@dataclass(frozen=True, slots=True)
class StartEngine:
    """The action to start an engine that is down."""

    engine: str


RollAction = RetireEngine | StartEngine | RollProgress | RollEnded


class RollingRestart:
    """One rolling restart.

    groups      engine -> its group, of all engines of the server, in the order of the restart.
                Those that are down are started first.
                Groups with one engine, and groups that are not loaded, are left alone
    states      engine -> its state now
    timeout_s   time in which another engine of the group must become ready

    Raises RollRefused if no group has several engines.
    """

    def __init__(
        self,
        groups: Mapping[str, str],
        states: Mapping[str, ChildState],
        now: float,
        *,
        timeout_s: float,
    ) -> None:
        self._groups = groups
        self._timeout_s = timeout_s
        self.stage = RollStage.WAITING
        self.deadline: float | None = now + timeout_s
        # Engines that are down come first: others may have to wait until they are ready.
        self._left = sorted(
            (each for each in groups if self._others(each) and self._is_loaded(each, states)),
            key=lambda engine: states[engine] is not ChildState.DOWN,
        )
        self._total = len(self._left)
        if not self._left:
            raise RollRefused(
                "a rolling restart needs several engines of a model (--replicas), and one that runs"
            )

    @property
    def engine(self) -> str:
        """The engine that is being restarted."""
        return self._left[0]

    def advance(
        self, states: Mapping[str, ChildState], failures: Mapping[str, str], now: float
    ) -> list[RollAction]:
        """Return what to do now. Call this after each change of `states`, and at `deadline`.

        failures   engine -> why its last process failed; "" if it did not
        """
        if self.stage is RollStage.ENDED:
            return []
        state = states[self.engine]
        if self.stage is RollStage.WAITING:
            return self._on_waiting(states, now)
        if self.stage is RollStage.DRAINING:
            return self._start() if state is ChildState.DOWN else []
        if state is ChildState.READY:
            return [self._progress("ready"), *self._next(states, now)]
        if state is ChildState.STARTING and not failures[self.engine]:
            return []
        return self._fail(failures[self.engine] or f"{self.engine} was stopped")

    def _on_waiting(self, states: Mapping[str, ChildState], now: float) -> list[RollAction]:
        state = states[self.engine]
        if not self._is_loaded(self.engine, states):
            return self._next(states, now)
        if any(states[each] is ChildState.READY for each in self._others(self.engine)):
            if state is ChildState.DOWN:
                return self._start()
            if state is not ChildState.RETIRING:
                self._change(RollEvent.DRAINED)
                return [self._progress("draining"), RetireEngine(self.engine)]
        if self.deadline is not None and now >= self.deadline:
            return self._fail(
                f"{self.engine} was not restarted, because no other replica was ready within "
                f"{self._timeout_s:g} s"
            )
        return []

    def _start(self) -> list[RollAction]:
        self._change(RollEvent.STARTED)
        return [self._progress("starting"), StartEngine(self.engine)]

    def _next(self, states: Mapping[str, ChildState], now: float) -> list[RollAction]:
        """Continue with the next engine."""
        if len(self._left) == 1:
            self._change(RollEvent.DONE)
            return [RollEnded()]
        self._left.pop(0)
        self._change(RollEvent.NEXT)
        self.deadline = now + self._timeout_s
        return self._on_waiting(states, now)

    def _fail(self, error: str) -> list[RollAction]:
        self._change(RollEvent.FAILED)
        return [RollEnded(error=error)]

    def _change(self, event: RollEvent) -> None:
        self.stage = ROLL_MACHINE.move(self.stage, event)
        self.deadline = None

    def _progress(self, stage: RollStep) -> RollProgress:
        number = self._total - len(self._left) + 1
        return RollProgress(engine=self.engine, stage=stage, number=number, total=self._total)

    def _others(self, engine: str) -> Sequence[str]:
        """Return the other engines in the replica group of `engine`."""
        group = self._groups[engine]
        return [each for each in self._groups if self._groups[each] == group and each != engine]

    def _is_loaded(self, engine: str, states: Mapping[str, ChildState]) -> bool:
        """Return whether the engine, or another one of its group of replicas, serves or will."""
        return any(states[each] in COMING for each in [engine, *self._others(engine)])
