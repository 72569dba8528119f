"""Decides what to do with a server's processes. It starts and signals no process itself.

Its input is events: a child exited, the server is ready, a stop signal arrived, time passed. Its
output is actions: log a line, start a process, send a signal, end with an exit code. The module
`tools.processes.watch` performs the actions. The current time is an argument. These rules hold in
addition to the table of phases:

- If a child exits without a request to stop, it has failed. If it may be restarted
  (`tools.processes.restart_policy`), it is started again, and the others continue. Otherwise the
  others are stopped. The first failure determines the reported cause and the exit code.
- If a child exits with code 0 without such a request, something else drained it (`tidegate drain`,
  a signal). Then the others are drained as well, and the server ends without a failure.
- A drain stops the children one after the other, those that accept requests first. So the processes
  that an open stream needs keep running.
- After a failure, the others receive SIGQUIT: each sends its clients an error and exits. In a drain
  they receive SIGTERM, and let open requests finish.
- A process that does not stop in time is killed. A second Ctrl-C kills all processes at once.
- A process that is stopped by SIGSTOP serves nothing. If it can be replaced, only this process is
  killed, so that its own child processes can still send their clients an error.
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
"""Seconds after a failure in which the other processes must send their clients an error and
exit.
"""
UNUSED_STOP_S = 1.0
"""STOP_S for a server that was not ready yet. It is shorter, because no client waits for an
answer."""
SAME_SIGNAL_S = 0.5
"""Stop signals within this many seconds count as one, because `timeout` and service managers may
send two.
"""
GRACE_S = 5.0
"""Seconds that a child has to exit in a drain, after the time limit of its open requests."""
STOPPED_S = 3.0
"""A process that is stopped (SIGSTOP) for this many seconds is considered lost."""


class SupervisorPhase(Enum):
    STARTING = auto()  # children run; not ready yet; limited by start_timeout_s
    SERVING = auto()  # ready; ends with a failure or a signal
    RESTARTING = auto()  # a child is being restarted, as in STARTING; the others serve
    FOLLOWING = auto()  # a child was drained from outside; the other children are draining
    DRAINING = auto()  # the children drain one after the other
    STOPPING = auto()  # all children were signalled to stop after a failure
    KILLING = auto()  # all children were killed
    ENDED = auto()  # no child is left


UNSTOPPED = {SupervisorPhase.STARTING, SupervisorPhase.SERVING, SupervisorPhase.RESTARTING}
"""Phases before any child has received a stop signal."""


class SupervisorEvent(Enum):
    READY = auto()  # the server is ready
    LOST = auto()  # a child exited and will be restarted
    FAILED = auto()  # a child exited and will not be restarted
    DRAINED = auto()  # a child exited after a drain from outside
    STOP_SIGNAL = auto()  # a stop signal arrived
    DEADLINE = auto()  # the phase's deadline has passed
    ALL_EXITED = auto()  # no child is left, and no restart is pending


NEXT_PHASE = {
    (SupervisorPhase.STARTING, SupervisorEvent.READY): SupervisorPhase.SERVING,
    (SupervisorPhase.STARTING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
    (SupervisorPhase.STARTING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
    (SupervisorPhase.STARTING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.DRAINING,
    (SupervisorPhase.STARTING, SupervisorEvent.DEADLINE): SupervisorPhase.STOPPING,
    (SupervisorPhase.SERVING, SupervisorEvent.LOST): SupervisorPhase.RESTARTING,
    (SupervisorPhase.SERVING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
    (SupervisorPhase.SERVING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
    (SupervisorPhase.SERVING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.DRAINING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.READY): SupervisorPhase.SERVING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.LOST): SupervisorPhase.RESTARTING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.FAILED): SupervisorPhase.STOPPING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.DRAINED): SupervisorPhase.FOLLOWING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.DRAINING,
    (SupervisorPhase.RESTARTING, SupervisorEvent.DEADLINE): SupervisorPhase.STOPPING,
    (SupervisorPhase.FOLLOWING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.DRAINING,
    (SupervisorPhase.FOLLOWING, SupervisorEvent.DEADLINE): SupervisorPhase.KILLING,
    (SupervisorPhase.FOLLOWING, SupervisorEvent.ALL_EXITED): SupervisorPhase.ENDED,
    (SupervisorPhase.DRAINING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.KILLING,
    (SupervisorPhase.DRAINING, SupervisorEvent.DEADLINE): SupervisorPhase.KILLING,
    (SupervisorPhase.DRAINING, SupervisorEvent.ALL_EXITED): SupervisorPhase.ENDED,
    (SupervisorPhase.STOPPING, SupervisorEvent.STOP_SIGNAL): SupervisorPhase.KILLING,
    (SupervisorPhase.STOPPING, SupervisorEvent.DEADLINE): SupervisorPhase.KILLING,
    (SupervisorPhase.STOPPING, SupervisorEvent.ALL_EXITED): SupervisorPhase.ENDED,
    (SupervisorPhase.KILLING, SupervisorEvent.ALL_EXITED): SupervisorPhase.ENDED,
}
"""(phase, event) -> next phase. An event without a row is ignored, such as a third Ctrl-C."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a child process."""

    child: str
    #: The exit code, or the negative number of the signal that killed it.
    code: int
    #: The cause in words; "" if it is unknown.
    reason: str = ""
    #: The server's exit code if the server ends because of this exit. If a signal killed the child,
    #: `exit_code` follows from the signal instead.
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
    """The action to print a log line. A failure is printed to stderr."""

    text: str
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class StartProcess:
    """The action to start `child` again, and to poll again until the server is ready."""

    child: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    """The action to send `signal` to `child`. SIGKILL also goes to all processes that the child
    started."""

    child: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class KillProcess:
    """The action to kill one process: `child` itself, or one that it started."""

    child: str
    pid: int


@dataclass(frozen=True, slots=True)
class EndServer:
    """The action to end the supervisor with this exit code."""

    code: int
    #: The failure to print as the last line on the terminal; "" if there was none.
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

    children            names of the child processes, in the order in which a drain stops them
    start_timeout_s     time until the server must be ready
    drain_s             time that each child has to finish its open requests
    restarts_children   names of the children that restart their own child processes
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
        self._restart_at: dict[str, float] = {}  # child -> time of its pending restart
        self._signalled: set[str] = set()  # children to which a stop signal was sent
        self._stopped_since: dict[StoppedProcess, float] = {}
        self._code: int = ExitCode.OK
        self._cause = ""
        self._signal_at = float("-inf")  # time of the last stop signal

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` must be called; None if nothing is pending."""
        phase_deadline = [] if self._phase_deadline is None else [self._phase_deadline]
        return min([*self._restart_at.values(), *phase_deadline], default=None)

    def on_ready(self) -> list[Action]:
        """Enter the phase SERVING, unless a restart is pending or the server is stopping. Call this
        when the server is ready, and again when it is ready after a restart."""
        if not self._restart_at and self._transition(SupervisorEvent.READY):
            self._phase_deadline = None
        return []

    def on_exit(self, exit: ProcessExit, now: float) -> list[Action]:
        """Handle the exit of a child. Call this once per exit."""
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
        """Handle a stop signal. The first one starts a drain. The second one, or the first one
        after a failure, kills all children. Signals that follow within SAME_SIGNAL_S are
        ignored."""
        if now - self._signal_at < SAME_SIGNAL_S:
            return []
        self._signal_at = now
        if not self._transition(SupervisorEvent.STOP_SIGNAL):
            return []
        if self.phase is SupervisorPhase.DRAINING:
            self._restart_at.clear()
            again = "; Ctrl-C again stops at once" if by is signal.SIGINT else ""
            log = LogAction(f"stopping: open requests may finish{again}")
            return [log, *self._drain_next(now), *self._end()]
        self._code = self._code or KILLED + by
        return [LogAction("stopping at once", is_failure=True), *self._kill()]

    def tick(self, now: float) -> list[Action]:
        """Start children whose restart is due, and handle a deadline that has passed. Call this at
        `deadline`; earlier calls do nothing."""
        actions = self._start_due(now)
        if self._phase_deadline is None or now < self._phase_deadline:
            return actions
        before = self.phase
        assert self._transition(SupervisorEvent.DEADLINE), f"{before} has no deadline"
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
        """Handle the processes that are stopped (SIGSTOP) at `now`. Call this once a second.

        stopped   all stopped child processes, and stopped processes that they started
        """
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
        """Change the phase. Return False if the current phase ignores `event`."""
        phase = NEXT_PHASE.get((self.phase, event))
        self.phase = phase or self.phase
        return phase is not None

    def _follow(self, exit: ProcessExit, now: float) -> list[Action]:
        """Handle the exit of a child that was drained from outside: drain the others, too."""
        self._transition(SupervisorEvent.DRAINED)
        self._restart_at.clear()
        has_reason = exit.reason.startswith(DRAINED)
        how = exit.reason if has_reason else "exited without a signal from its supervisor"
        return [LogAction(f"{exit.child} {how}; the server stops"), *self._drain_next(now)]

    def _on_failure(self, exit: ProcessExit, now: float) -> list[Action]:
        """Handle the failure of a child: restart it, or stop the others."""
        before = self.phase
        delay_s = None
        if before is not SupervisorPhase.STARTING:  # a restart does not fix a failed start
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
        """Start the children whose restart is due."""
        due = [child for child, when in self._restart_at.items() if when <= now]
        for child in due:
            del self._restart_at[child]
            self._phase_deadline = now + self._start_timeout_s
        self.alive = [name for name in self._order if name in self.alive or name in due]
        return [StartProcess(child) for child in due]

    def _stop(self, cause: str, code: int, before: SupervisorPhase, now: float) -> list[Action]:
        """Stop all children after a failure.

        before   the phase in which the failure happened
        """
        timeout_s = UNUSED_STOP_S if before is SupervisorPhase.STARTING else STOP_S
        self._phase_deadline, self._code, self._cause = now + timeout_s, code, cause
        self._restart_at.clear()
        self._signalled.update(self.alive)
        stops = [SendSignal(child, signal.SIGQUIT) for child in self.alive]
        return [LogAction(cause, is_failure=True), *stops]

    def _on_exit_in_drain(self, exit: ProcessExit) -> list[Action]:
        """Handle an exit during a drain: report it if it was not requested, or not clean."""
        if exit.child in self._signalled and exit.code in (ExitCode.OK, -signal.SIGTERM):
            return []
        self._code, self._cause = exit.exit_code, f"while stopping, {exit.cause}"
        return [LogAction(self._cause, is_failure=True)]

    def _drain_next(self, now: float) -> list[Action]:
        """Drain the first child that is left, unless it is draining already."""
        if not self.alive or self.alive[0] in self._signalled:
            return []
        self._signalled.add(self.alive[0])
        self._phase_deadline = now + self._drain_s + GRACE_S
        return [SendSignal(self.alive[0], signal.SIGTERM)]

    def _kill(self) -> list[Action]:
        self._phase_deadline = None
        return [SendSignal(child, signal.SIGKILL) for child in self.alive]

    def _end(self) -> list[Action]:
        """End the server if no child is left and no restart is pending."""
        if self.alive or self._restart_at or not self._transition(SupervisorEvent.ALL_EXITED):
            return []
        self._phase_deadline = None
        return [EndServer(self._code, self._cause)]
