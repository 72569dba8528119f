"""Decides what to do with a server's processes. Starts nothing, signals nothing, reads no clock.

Events come in: a child exited, the server is ready, a stop signal arrived, time passed. Actions
come out: log a line, start a process, send a signal, end with an exit code. The module
`tools.processes.watch` performs them. The rules, in addition to the table of phases:

- If a child exits without a request to stop, it has failed. If it may be restarted
  (`tools.processes.restart_policy`), the others continue and it is started again. Otherwise the
  others are stopped. The first failure determines the reported cause and the exit code.
- If a child exits with code 0, something else has drained it (`tidegate drain`, a signal). Then the
  others are drained as well, and the server ends without a failure.
- A drain stops the children one after the other, those that accept requests first. So the processes
  that an open stream needs keep running.
- After a failure the others get SIGQUIT: each sends its clients an error and exits. In a drain they
  get SIGTERM and let open requests finish.
- A process that does not stop in time is killed. A second Ctrl-C kills all at once.
- A process stopped by SIGSTOP serves nothing. If it would be restarted, it alone is killed: its
  children may still send their clients an error.
- The server ends only when no child is left and no restart is pending.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from protocol.exit_codes import DRAINED, KILLED, ExitCode
from tools.processes.restart_policy import RestartPolicy

STOP_S = 5.0
"""Time for the other processes to send their clients an error and exit after a failure."""
UNUSED_STOP_S = 1.0
"""The same before the server was ready, when no client waits for an answer."""
SAME_SIGNAL_S = 0.5
"""Stop signals within this time count as one: `timeout` and service managers may send two."""
GRACE_S = 5.0
"""Time to exit that a child has in a drain, after the time limit of its open requests."""
STOPPED_S = 3.0
"""A process that is stopped (SIGSTOP) for this long is considered lost."""


class SupervisorPhase(Enum):
    STARTING = auto()  # children run; not ready yet; limited by start_timeout_s
    SERVING = auto()  # ready; ends with a failure or a signal
    RESTARTING = auto()  # a child is being restarted, as in STARTING; the others serve
    FOLLOWING = auto()  # a child was drained from outside; the others are draining
    DRAINING = auto()  # the children drain one after the other
    STOPPING = auto()  # all children were signalled to stop after a failure
    KILLING = auto()  # all children were killed
    ENDED = auto()  # no child is left


UNSTOPPED = {SupervisorPhase.STARTING, SupervisorPhase.SERVING, SupervisorPhase.RESTARTING}
"""Phases in which no process was sent a stop signal."""


class SupervisorEvent(Enum):
    READY = auto()  # the server is ready
    LOST = auto()  # a child exited and will be restarted
    FAILED = auto()  # a child exited and will not be restarted
    DRAINED = auto()  # a child exited after a drain from outside
    ASKED = auto()  # a stop signal arrived
    LATE = auto()  # the phase's deadline has passed
    EMPTY = auto()  # no child is left, and no restart is pending


NEXT_PHASE = {
    (SupervisorPhase.STARTING, SupervisorEvent.READY): SupervisorPhase.SERVING,
    (SupervisorPhase.STARTING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
    (SupervisorPhase.STARTING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
    (SupervisorPhase.STARTING, SupervisorEvent.ASKED): SupervisorPhase.DRAINING,
    (SupervisorPhase.STARTING, SupervisorEvent.LATE): SupervisorPhase.STOPPING,
    (SupervisorPhase.SERVING, SupervisorEvent.LOST): SupervisorPhase.RESTARTING,
    (SupervisorPhase.SERVING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
    (SupervisorPhase.SERVING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
    (SupervisorPhase.SERVING, SupervisorEvent.ASKED): SupervisorPhase.DRAINING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.READY): SupervisorPhase.SERVING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.LOST): SupervisorPhase.RESTARTING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.ASKED): SupervisorPhase.DRAINING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.LATE): SupervisorPhase.STOPPING,
    (SupervisorPhase.FOLLOWING, SupervisorEvent.ASKED): SupervisorPhase.DRAINING,
    (SupervisorPhase.FOLLOWING, SupervisorEvent.LATE): SupervisorPhase.KILLING,
    (SupervisorPhase.FOLLOWING, SupervisorEvent.EMPTY): SupervisorPhase.ENDED,
    (SupervisorPhase.DRAINING, SupervisorEvent.ASKED): SupervisorPhase.KILLING,
    (SupervisorPhase.DRAINING, SupervisorEvent.LATE): SupervisorPhase.KILLING,
    (SupervisorPhase.DRAINING, SupervisorEvent.EMPTY): SupervisorPhase.ENDED,
    (SupervisorPhase.STOPPING, SupervisorEvent.ASKED): SupervisorPhase.KILLING,
    (SupervisorPhase.STOPPING, SupervisorEvent.LATE): SupervisorPhase.KILLING,
    (SupervisorPhase.STOPPING, SupervisorEvent.EMPTY): SupervisorPhase.ENDED,
    (SupervisorPhase.KILLING, SupervisorEvent.EMPTY): SupervisorPhase.ENDED,
}
"""An event without a row is ignored, such as a late READY or a third Ctrl-C."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a child ended."""

    child: str
    #: The exit code, or the negative number of the signal that killed it.
    code: int
    #: The cause in words; "" if it is unknown.
    reason: str = ""
    #: The server's exit code if the server ends because of this exit, unless a signal killed it.
    server_code: int = ExitCode.FAILED

    @property
    def cause(self) -> str:
        how = f"exited with code {self.code}"
        if self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name}"
        return f"{self.child} {how}" + (f": {self.reason}" if self.reason else "")

    @property
    def exit_code(self) -> int:
        return KILLED - self.code if self.code < 0 else self.server_code


@dataclass(frozen=True, slots=True)
class LogAction:
    """Log a line; on stderr if it is a failure."""

    text: str
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start `child` again, and check again whether the server is ready."""

    child: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send `signal` to `child`. SIGKILL also goes to all processes that the child started."""

    child: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill one process: `child` itself, or one that it started."""

    child: str
    pid: int


@dataclass(frozen=True, slots=True)
class EndServer:
    """End the supervisor with this exit code."""

    code: int
    #: The failure to report as the last line on the terminal; "" if there was none.
    cause: str = field(default="", compare=False)


Action = LogAction | StartProcess | SendSignal | KillProcess | EndServer


@dataclass(frozen=True, slots=True)
class StoppedProcess:
    """A process that is stopped (SIGSTOP): `child` itself, or one that it started."""

    child: str
    pid: int
    is_child: bool


class Supervisor:
    """The state of one server. Times are in seconds of any monotonic clock.

    children            in the order in which a drain stops them
    restarts_children   children that restart their own child processes
    """

    def __init__(
        self,
        children: Sequence[str],
        now: float,
        *,
        start_timeout_s: float,
        drain_s: float,
        restarts: RestartPolicy | None = None,
        restarts_children: Collection[str] = (),
    ) -> None:
        self.phase = SupervisorPhase.STARTING
        self.alive = list(children)
        self._order = list(children)
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self._restarts = restarts or RestartPolicy(0)
        self._restarts_children = restarts_children
        self._phase_deadline: float | None = now + start_timeout_s
        self._restart_at: dict[str, float] = {}  # pending restarts
        self._signalled: set[str] = set()  # children that were sent a stop signal
        self._stopped_since: dict[StoppedProcess, float] = {}
        self._code: int = ExitCode.OK
        self._cause = ""
        self._signal_at = float("-inf")  # of the last stop signal

    @property
    def deadline(self) -> float | None:
        """When to call `tick`; None if no deadline is pending."""
        phase_deadline = [] if self._phase_deadline is None else [self._phase_deadline]
        return min([*self._restart_at.values(), *phase_deadline], default=None)

    def on_ready(self) -> list[Action]:
        """Handle a ready server. After a restart, call this only if the new process is ready."""
        if not self._restart_at and self._transition(SupervisorEvent.READY):
            self._phase_deadline = None
        return []

    def on_exit(self, exit: ProcessExit, now: float) -> list[Action]:
        """Handle the exit of a child. Call once for each time the child was started."""
        self.alive.remove(exit.child)
        for stopped in [each for each in self._stopped_since if each.child == exit.child]:
            del self._stopped_since[stopped]
        actions: list[Action] = []
        if self.phase in UNSTOPPED:
            was_drained = exit.code == ExitCode.OK
            actions = self._follow(exit, now) if was_drained else self._on_failure(exit, now)
        elif self.phase in (SupervisorPhase.FOLLOWING, SupervisorPhase.DRAINING):
            actions = self._on_exit_in_drain(exit) + self._drain_next(now)
        return actions + self._end()

    def on_signal(self, by: signal.Signals, now: float) -> list[Action]:
        """Handle a stop signal: drain at the first, kill at the second."""
        if now - self._signal_at < SAME_SIGNAL_S:
            return []
        self._signal_at = now
        if not self._transition(SupervisorEvent.ASKED):
            return []
        if self.phase is SupervisorPhase.DRAINING:
            self._restart_at.clear()
            again = "; Ctrl-C again stops at once" if by is signal.SIGINT else ""
            log = LogAction(f"stopping: open requests may finish{again}")
            return [log, *self._drain_next(now), *self._end()]
        self._code = self._code or KILLED + by
        return [LogAction("stopping at once", is_failure=True), *self._kill()]

    def tick(self, now: float) -> list[Action]:
        """Perform what is due at `now`. Call at `deadline`; earlier calls do no harm."""
        actions = self._start_due(now)
        if self._phase_deadline is None or now < self._phase_deadline:
            return actions
        before = self.phase
        assert self._transition(SupervisorEvent.LATE), f"{before} has no deadline"
        if self.phase is SupervisorPhase.STOPPING:
            cause = f"not ready after {self._start_timeout_s:g} s; --start-timeout-s allows more"
            return actions + self._stop(cause, ExitCode.NOT_READY, before, now)
        if before is SupervisorPhase.STOPPING:  # the cause is already reported
            return self._kill()
        late = [child for child in self.alive if child in self._signalled]
        self._code = ExitCode.FAILED
        self._cause = f"{' and '.join(late)} did not stop in time and will be killed"
        return [LogAction(self._cause, is_failure=True), *self._kill()]

    def on_stopped(self, stopped: Collection[StoppedProcess], now: float) -> list[Action]:
        """Handle the list of all processes that are stopped at `now`. Call about once a second."""
        since = {each: self._stopped_since.get(each, now) for each in stopped}
        self._stopped_since = since
        actions: list[Action] = []
        if self.phase not in UNSTOPPED:
            return actions
        for each in [each for each, began in since.items() if now - began >= STOPPED_S]:
            is_restarted = (
                self._restarts.is_enabled
                if each.is_child
                else each.child in self._restarts_children
            )
            if not is_restarted:
                continue  # SIGCONT may resume it later
            message = (
                f"{each.child}: process {each.pid} has been stopped for {STOPPED_S:g} s; it will "
                "be killed and replaced"
            )
            actions += [LogAction(message, is_failure=True), KillProcess(each.child, each.pid)]
        return actions

    def _transition(self, event: SupervisorEvent) -> bool:
        """Change the phase. Returns False if `event` is ignored in the current phase."""
        phase = NEXT_PHASE.get((self.phase, event))
        self.phase = phase or self.phase
        return phase is not None

    def _follow(self, exit: ProcessExit, now: float) -> list[Action]:
        """Drain the other children after this one was drained from outside."""
        self._transition(SupervisorEvent.DRAINED)
        self._restart_at.clear()
        has_reason = exit.reason.startswith(DRAINED)
        how = exit.reason if has_reason else "exited without a signal from its supervisor"
        return [LogAction(f"{exit.child} {how}; the server stops"), *self._drain_next(now)]

    def _on_failure(self, exit: ProcessExit, now: float) -> list[Action]:
        """Restart the child, or stop the others."""
        before = self.phase
        delay_s = None
        if before is not SupervisorPhase.STARTING:  # a restart would not fix the first start
            delay_s = self._restarts.delay(exit.server_code, exit.code, now)
        if delay_s is None:
            self._transition(SupervisorEvent.FAILED)
            return self._stop(exit.cause + self._restarts.why_not, exit.exit_code, before, now)
        self._transition(SupervisorEvent.LOST)
        self._restart_at[exit.child] = now + delay_s
        self._phase_deadline = None
        when = f"in {delay_s:g} s" if delay_s else "now"
        message = f"{exit.cause}; starting it again {when} ({self._restarts.description})"
        return [LogAction(message, is_failure=True), *self._start_due(now)]

    def _start_due(self, now: float) -> list[Action]:
        due = [child for child, when in self._restart_at.items() if when <= now]
        for child in due:
            del self._restart_at[child]
            self._phase_deadline = now + self._start_timeout_s
        self.alive = [name for name in self._order if name in self.alive or name in due]
        return [StartProcess(child) for child in due]

    def _stop(self, cause: str, code: int, before: SupervisorPhase, now: float) -> list[Action]:
        """Stop all children after a failure in the phase `before`."""
        timeout_s = UNUSED_STOP_S if before is SupervisorPhase.STARTING else STOP_S
        self._phase_deadline, self._code, self._cause = now + timeout_s, code, cause
        self._restart_at.clear()
        self._signalled.update(self.alive)
        stops = [SendSignal(child, signal.SIGQUIT) for child in self.alive]
        return [LogAction(cause, is_failure=True), *stops]

    def _on_exit_in_drain(self, exit: ProcessExit) -> list[Action]:
        """Report the exit if it was not clean or not requested."""
        if exit.child in self._signalled and exit.code in (ExitCode.OK, -signal.SIGTERM):
            return []
        self._code, self._cause = exit.exit_code, f"while stopping, {exit.cause}"
        return [LogAction(self._cause, is_failure=True)]

    def _drain_next(self, now: float) -> list[Action]:
        if not self.alive or self.alive[0] in self._signalled:
            return []
        self._signalled.add(self.alive[0])
        self._phase_deadline = now + self._drain_s + GRACE_S
        return [SendSignal(self.alive[0], signal.SIGTERM)]

    def _kill(self) -> list[Action]:
        self._phase_deadline = None
        return [SendSignal(child, signal.SIGKILL) for child in self.alive]

    def _end(self) -> list[Action]:
        if self.alive or self._restart_at or not self._transition(SupervisorEvent.EMPTY):
            return []
        self._phase_deadline = None
        return [EndServer(self._code, self._cause)]
