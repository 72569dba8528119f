"""Decides what becomes of a server's processes. Starts nothing, signals nobody, reads no clock.

Events come in (a child exited, the server is ready, somebody pressed Ctrl-C, time passed); orders
come out (say this, start that, send a signal, end with this code). `tools.processes.watch` carries
them out. The laws, beside the table of phases:

- a child that exits before it was told to is a failure. If it may come back
  (`tools.processes.restart_policy`), the others serve on and it is started again; else they are
  stopped, the first cause is the one that is told, and the exit code is the one that stands for it;
- a child that leaves with code 0 has failed at nothing: somebody else has asked it to (`tidegate
  drain`, a signal), and it has finished what it had. That is the end of the server, too, and a
  good one: the others are drained;
- a drain stops the children one after the other, those who take requests first, so that whoever
  still streams keeps the processes it needs;
- a failure ends the others at once (SIGQUIT): each sends its clients an error and leaves. A drain
  (SIGTERM) lets open requests finish;
- a process that does not stop in time is killed; a second Ctrl-C kills at once;
- a process that was stopped by a signal (SIGSTOP) answers nobody: if it would be started again, it
  is killed, and it alone: what it has started may still send its clients an error;
- the end comes when no child is left and none is to come back, and only then.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from protocol.exit_codes import DRAINED, KILLED, ExitCode
from tools.processes.restart_policy import RestartPolicy

STOP_S = 5.0
"""After a failure, how long the other processes have to send their clients an error and leave."""
UNUSED_STOP_S = 1.0
"""The same before the server was ready: nobody waits for an answer."""
SAME_WISH_S = 0.5
"""Signals so close together are one wish: `timeout` and service managers may send it twice."""
GRACE_S = 5.0
"""In a drain, what a child has on top of the time its open requests may take."""
STOPPED_S = 3.0
"""A process that has been stopped for so long was not stopped by accident. Then its clients need an
end."""


class SupervisorPhase(Enum):
    STARTING = auto()  # children run; not ready yet; bounded by start_timeout_s
    SERVING = auto()  # ready; ends by a failure or a signal
    RESTARTING = auto()  # some child is gone and comes back, as STARTING; the others serve on
    FOLLOWING = auto()  # one has drained as somebody else asked; the others are asked to finish
    DRAINING = auto()  # children are asked to finish, one after the other
    STOPPING = auto()  # all children were told to go, after a failure
    KILLING = auto()  # no more patience
    ENDED = auto()  # no child is left


class SupervisorEvent(Enum):
    READY = auto()  # the server answers that it is
    LOST = auto()  # a child is gone that may come back
    FAILED = auto()  # a child is gone for good
    DRAINED = auto()  # a child is gone as it was asked to, by somebody else
    ASKED = auto()  # a signal: somebody wants us gone
    LATE = auto()  # the phase's deadline has come
    EMPTY = auto()  # no child is left, and none is to come back


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
"""What is not here changes nothing: readiness that comes too late, a third Ctrl-C."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a child ended: `code` as of wait(2), negative for a signal; why, in words, if known.

    stands_for   the server's exit code, if this is its end and no signal has ended it
    """

    child: str
    code: int
    last_words: str = ""
    stands_for: int = ExitCode.FAILED

    @property
    def cause(self) -> str:
        how = f"exited with code {self.code}"
        if self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name}"
        return f"{self.child} {how}" + (f": {self.last_words}" if self.last_words else "")

    @property
    def exit_code(self) -> int:
        return KILLED - self.code if self.code < 0 else self.stands_for


@dataclass(frozen=True, slots=True)
class LogAction:
    """Tell the person at the terminal; on stderr if it is a failure."""

    text: str
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class StartProcess:
    """`child` again, and ask anew whether the server is ready."""

    child: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    """`signal` to `child`; SIGKILL goes to everything that the child has started, too."""

    child: str
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill one process alone: `child` itself, or one that it has started."""

    child: str
    pid: int


@dataclass(frozen=True, slots=True)
class EndServer:
    """All is over; leave with this code.

    cause   of a failure, which is to be the last line on the terminal
    """

    code: int
    cause: str = field(default="", compare=False)


Order = LogAction | StartProcess | SendSignal | KillProcess | EndServer


@dataclass(frozen=True, slots=True)
class Stopped:
    """A process that is stopped (SIGSTOP): `child` itself, or one that it has started."""

    child: str
    pid: int
    is_child: bool


class Supervisor:
    """The state of one server. `now` is in seconds of any steady clock; `deadline` says when to
    tick.

    children   in the order in which a drain stops them
    revives    those that start what they have started again when it dies
    """

    def __init__(
        self,
        children: Sequence[str],
        now: float,
        *,
        start_timeout_s: float,
        drain_s: float,
        restarts: RestartPolicy | None = None,
        revives: Collection[str] = (),
    ) -> None:
        self.phase = SupervisorPhase.STARTING
        self.alive = list(children)
        self._order = list(children)
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self._restarts = restarts or RestartPolicy(0)
        self._revives = revives
        self._late_at: float | None = now + start_timeout_s
        self._due: dict[str, float] = {}  # who is to be started again, and when
        self._told: set[str] = set()
        self._stopped_since: dict[Stopped, float] = {}
        self._code: int = ExitCode.OK
        self._cause = ""
        self._wished_at = float("-inf")

    @property
    def deadline(self) -> float | None:
        times = [*self._due.values(), *([] if self._late_at is None else [self._late_at])]
        return min(times, default=None)

    def ready(self) -> list[Order]:
        """The server answers that it is ready. Told of a restarted one only if it is the new one
        that answers."""
        if not self._due and self._moves(SupervisorEvent.READY):
            self._late_at = None
        return []

    def exited(self, exit: ProcessExit, now: float) -> list[Order]:
        """A child is gone. A child exits once for each time it was started."""
        self.alive.remove(exit.child)
        for stopped in [each for each in self._stopped_since if each.child == exit.child]:
            del self._stopped_since[stopped]
        orders: list[Order] = []
        if self.phase in (
            SupervisorPhase.STARTING,
            SupervisorPhase.SERVING,
            SupervisorPhase.RESTARTING,
        ):
            orders = self._follow(exit, now) if exit.code == ExitCode.OK else self._lose(exit, now)
        elif self.phase in (SupervisorPhase.FOLLOWING, SupervisorPhase.DRAINING):
            orders = self._left(exit) + self._drain_next(now)
        return orders + self._end()

    def interrupted(self, by: signal.Signals, now: float) -> list[Order]:
        """Somebody wants us gone: politely the first time, at once the second time."""
        if now - self._wished_at < SAME_WISH_S:
            return []
        self._wished_at = now
        if not self._moves(SupervisorEvent.ASKED):
            return []
        if self.phase is SupervisorPhase.DRAINING:
            self._due.clear()
            again = "; Ctrl-C again stops at once" if by is signal.SIGINT else ""
            say = LogAction(f"stopping: open requests may finish{again}")
            return [say, *self._drain_next(now), *self._end()]
        self._code = self._code or KILLED + by
        return [LogAction("stopping at once", is_failure=True), *self._kill()]

    def tick(self, now: float) -> list[Order]:
        """Time passed; call at `deadline`."""
        orders = self._start_due(now)
        if self._late_at is None or now < self._late_at:
            return orders
        was = self.phase
        assert self._moves(SupervisorEvent.LATE), f"{was} has no end in time"
        if self.phase is SupervisorPhase.STOPPING:
            cause = f"not ready after {self._start_timeout_s:g} s"
            return orders + self._stop(cause, ExitCode.NOT_READY, was, now)
        if was is SupervisorPhase.STOPPING:  # the cause has been told; this is no news
            return self._kill()
        late = [child for child in self.alive if child in self._told]
        self._code = ExitCode.FAILED
        self._cause = f"{' and '.join(late)} did not stop in time and will be killed"
        return [LogAction(self._cause, is_failure=True), *self._kill()]

    def saw(self, stopped: Collection[Stopped], now: float) -> list[Order]:
        """These are stopped at the moment, and no others: look about once a second."""
        since = {each: self._stopped_since.get(each, now) for each in stopped}
        self._stopped_since = since
        orders: list[Order] = []
        if self.phase not in (
            SupervisorPhase.STARTING,
            SupervisorPhase.SERVING,
            SupervisorPhase.RESTARTING,
        ):
            return orders
        for each in [each for each, began in since.items() if now - began >= STOPPED_S]:
            comes_back = self._restarts.is_on if each.is_child else each.child in self._revives
            if not comes_back:
                continue  # whoever has stopped it may let it go on
            words = f"{each.child}: process {each.pid} has been stopped for {STOPPED_S:g} s"
            say = LogAction(f"{words}; it is killed and comes back", is_failure=True)
            orders += [say, KillProcess(each.child, each.pid)]
        return orders

    def _moves(self, event: SupervisorEvent) -> bool:
        """Whether `event` means anything now; the phase is the next one then."""
        phase = NEXT_PHASE.get((self.phase, event))
        self.phase = phase or self.phase
        return phase is not None

    def _follow(self, exit: ProcessExit, now: float) -> list[Order]:
        self._moves(SupervisorEvent.DRAINED)
        self._due.clear()
        knows = exit.last_words.startswith(DRAINED)
        how = exit.last_words if knows else "left, as somebody else than its supervisor asked"
        return [LogAction(f"{exit.child} {how}; the server stops"), *self._drain_next(now)]

    def _lose(self, exit: ProcessExit, now: float) -> list[Order]:
        was = self.phase
        wait_s = None
        if was is not SupervisorPhase.STARTING:  # who has never served is wrong in itself
            wait_s = self._restarts.after(exit.stands_for, exit.code, now)
        if wait_s is None:
            self._moves(SupervisorEvent.FAILED)
            return self._stop(exit.cause + self._restarts.why_not, exit.exit_code, was, now)
        self._moves(SupervisorEvent.LOST)
        self._due[exit.child] = now + wait_s
        self._late_at = None
        when = f"in {wait_s:g} s" if wait_s else "now"
        told = f"{exit.cause}; starting it again {when} ({self._restarts.told})"
        return [LogAction(told, is_failure=True), *self._start_due(now)]

    def _start_due(self, now: float) -> list[Order]:
        due = [child for child, when in self._due.items() if when <= now]
        for child in due:
            del self._due[child]
            self._late_at = now + self._start_timeout_s
        self.alive = [name for name in self._order if name in self.alive or name in due]
        return [StartProcess(child) for child in due]

    def _stop(self, cause: str, code: int, was: SupervisorPhase, now: float) -> list[Order]:
        patience_s = UNUSED_STOP_S if was is SupervisorPhase.STARTING else STOP_S
        self._late_at, self._code, self._cause = now + patience_s, code, cause
        self._due.clear()
        self._told.update(self.alive)
        stops = [SendSignal(child, signal.SIGQUIT) for child in self.alive]
        return [LogAction(cause, is_failure=True), *stops]

    def _left(self, exit: ProcessExit) -> list[Order]:
        """In a drain: told to go and went, or broke on the way out."""
        if exit.child in self._told and exit.code in (ExitCode.OK, -signal.SIGTERM):
            return []
        self._code, self._cause = exit.exit_code, f"while stopping, {exit.cause}"
        return [LogAction(self._cause, is_failure=True)]

    def _drain_next(self, now: float) -> list[Order]:
        if not self.alive or self.alive[0] in self._told:
            return []
        self._told.add(self.alive[0])
        self._late_at = now + self._drain_s + GRACE_S
        return [SendSignal(self.alive[0], signal.SIGTERM)]

    def _kill(self) -> list[Order]:
        self._late_at = None
        return [SendSignal(child, signal.SIGKILL) for child in self.alive]

    def _end(self) -> list[Order]:
        if self.alive or self._due or not self._moves(SupervisorEvent.EMPTY):
            return []
        self._late_at = None
        return [EndServer(self._code, self._cause)]
