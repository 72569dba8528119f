"""Decides what to do with a server's processes. It starts and signals no process itself.

Its input is events: a child exited, the server is ready, a stop signal arrived, time passed. Its
output is actions: log a line, start a process, send a signal, end with an exit code. The module
`tools.processes.watch` performs the actions. The current time is an argument. These rules hold in
addition to the table of phases (supervisor_phases.py):

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

Children of one group replace each other: they are the replicas of one model. The rules above hold
for a group as a whole:

- The loss of a child is not fatal if another child of its group serves or will serve. The lost one
  is restarted, up to a limit of its own. After that it stays down.
- The loss of an optional group does not end the server. Its model can be loaded again.
- A child may be retired and started while the server runs: to replace a replica, or to unload and
  load a model. The exit of a retired child is expected.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence

from protocol.process.exit_codes import DRAINED, KILLED, ExitCode
from tools.processes.actions import (
    Action,
    EndServer,
    KillProcess,
    LogAction,
    ProcessExit,
    SendSignal,
    StartProcess,
    StoppedProcess,
)
from tools.processes.child_states import ChildEvent, ChildRecord, ChildState
from tools.processes.restart_policy import RestartPolicy
from tools.processes.supervisor_phases import (
    SUPERVISOR_MACHINE,
    UNSTOPPED,
    SupervisorEvent,
    SupervisorPhase,
)

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
ORPHANED = "stopped by SIGQUIT: whatever started this process has probably ended"
STOPPED_S = 3.0
"""A process that is stopped (SIGSTOP) for this many seconds is considered lost."""


class Supervisor:
    """The state of one server. Times are in seconds of any monotonic clock.

    children            names of the child processes, in the order in which a drain stops them
    start_timeout_s     time until the server must be ready; also for a child that starts alone
    drain_s             time that each child has to finish its open requests
    restarts            restarts of children whose loss would otherwise end the server
    restarts_children   names of the children that restart their own child processes
    groups              child -> its group. A child without one is a group of its own
    replica_restarts    limit of the restarts of a child whose loss does not end the server
    optional            groups whose loss does not end the server
    unloaded            children that are not started yet
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
        groups: Mapping[str, str] | None = None,
        replica_restarts: int = 0,
        optional: Collection[str] = (),
        unloaded: Collection[str] = (),
    ) -> None:
        self.phase = SupervisorPhase.STARTING
        self._children = {
            name: ChildRecord(name, (groups or {}).get(name) or name, RestartPolicy(limit))
            for name, limit in dict.fromkeys(children, replica_restarts).items()
        }
        for name in unloaded:
            self._children[name].state = ChildState.DOWN
        self._start_timeout_s = start_timeout_s
        self._drain_s = drain_s
        self._replica_restarts = replica_restarts
        self._restarts = restarts or RestartPolicy(0)
        self._restarts_children = restarts_children
        self._optional = set(optional)
        self._phase_deadline: float | None = now + start_timeout_s
        self._signalled: set[str] = set()  # children to which a stop signal was sent
        self._stopped_since: dict[StoppedProcess, float] = {}
        self._code: int = ExitCode.OK
        self._cause = ""
        self._signal_at = float("-inf")  # time of the last stop signal

    @property
    def alive(self) -> list[str]:
        """The names of the children that have a process."""
        return [child.name for child in self._children.values() if child.is_alive]

    @property
    def deadline(self) -> float | None:
        """The time at which `tick` must be called; None if nothing is pending."""
        times = [self._phase_deadline, *(child.deadline for child in self._children.values())]
        return min((time for time in times if time is not None), default=None)

    @property
    def is_stopping(self) -> bool:
        return self.phase not in UNSTOPPED

    @property
    def is_awaiting_readiness(self) -> bool:
        """Whether the server or a process of it is starting or restarting. The caller should then
        check which processes are ready, and call `on_ready`."""
        return self.phase in (SupervisorPhase.STARTING, SupervisorPhase.RESTARTING) or any(
            self._in_states(ChildState.STARTING)
        )

    def state(self, child: str) -> ChildState:
        return self._children[child].state

    def failure(self, child: str) -> str:
        """Return why the last process of `child` failed; "" if it did not."""
        return self._children[child].failure

    def on_ready(
        self, ready: Iterable[str] | None = None, *, is_ready: bool = True
    ) -> list[Action]:
        """Record the children that have become ready. If the server needs no other child, enter the
        phase SERVING, unless the server is stopping. Call this whenever more children are ready.

        ready      the children that are ready now; None: all that run
        is_ready   whether the server accepts requests
        """
        actions: list[Action] = []
        for name in self._children if ready is None else ready:
            child = self._children[name]
            if child.state is ChildState.STARTING:
                if child.deadline is not None:
                    actions.append(LogAction(f"{name} is ready"))
                child.change(ChildEvent.READY)
                child.failure = ""
        if is_ready and not self._is_waiting() and self._transition(SupervisorEvent.READY):
            self._phase_deadline = None
        return actions

    def on_exit(self, exit: ProcessExit, now: float) -> list[Action]:
        """Handle the exit of a child. Call this once per exit."""
        child = self._children[exit.child]
        for stopped in [each for each in self._stopped_since if each.child == exit.child]:
            del self._stopped_since[stopped]
        actions: list[Action] = []
        if not self.is_stopping:
            actions = self._on_unstopped_exit(child, exit, now)
        else:
            is_expected = child.name in self._signalled or child.state is ChildState.RETIRING
            child.change(ChildEvent.EXITED)
            if self.phase in (SupervisorPhase.FOLLOWING, SupervisorPhase.DRAINING):
                actions = self._on_exit_in_drain(exit, is_expected) + self._drain_next(now)
        return actions + self._end()

    def on_signal(self, by: signal.Signals, now: float) -> list[Action]:
        """Handle a stop signal. The first one starts a drain. The second one, or the first one
        after a failure, kills all children. Signals that follow within SAME_SIGNAL_S are
        ignored. SIGQUIT stops all children as a failure does."""
        if by is signal.SIGQUIT:
            before = self.phase
            is_new = self._transition(SupervisorEvent.FAILED)
            return self._stop(ORPHANED, KILLED + by, before, now) if is_new else []
        if now - self._signal_at < SAME_SIGNAL_S:
            return []
        self._signal_at = now
        if not self._transition(SupervisorEvent.STOP_SIGNAL):
            return []
        if self.phase is SupervisorPhase.DRAINING:
            self._cancel_restarts()
            again = "; Ctrl-C again stops at once" if by is signal.SIGINT else ""
            log = LogAction(f"stopping: open requests may finish{again}")
            return [log, *self._drain_next(now), *self._end()]
        self._code = self._code or KILLED + by
        return [LogAction("stopping at once", is_failure=True), *self._kill()]

    def start(self, name: str, now: float) -> list[Action]:
        """Start the child `name`, which is down. Do nothing if the server is stopping, or if the
        child is not down."""
        child = self._children[name]
        if self.is_stopping or child.state is not ChildState.DOWN:
            return []
        child.killed_because = child.failure = ""
        child.comes_back = False
        child.change(ChildEvent.START, now + self._start_timeout_s)
        return [StartProcess(name)]

    def add(self, name: str, group: str) -> None:
        """Add a child that is not started yet. Its group is optional."""
        child = ChildRecord(name, group, RestartPolicy(self._replica_restarts), ChildState.DOWN)
        self._children[name] = child
        self._optional.add(group)

    def remove(self, name: str) -> None:
        """Remove a child that is down."""
        assert self._children[name].state is ChildState.DOWN
        del self._children[name]

    def retire(self, name: str, now: float, *, comes_back: bool = False) -> list[Action]:
        """Drain the child `name` while the server continues, or cancel its restart. Do nothing if
        the server is stopping, or if the child is down or retiring.

        comes_back   whether the caller will start it again. Until then it counts as a child that
                     will serve
        """
        child = self._children[name]
        if self.is_stopping or child.state in (ChildState.DOWN, ChildState.RETIRING):
            return []
        was_alive, child.comes_back = child.is_alive, comes_back
        child.killed_because = ""
        child.change(ChildEvent.RETIRE, now + self._drain_s if was_alive else None)
        return [SendSignal(name, signal.SIGTERM)] if was_alive else []

    def tick(self, now: float) -> list[Action]:
        """Start children whose restart is due, and handle deadlines that have passed. Call this at
        `deadline`; earlier calls do nothing."""
        actions = self._start_due(now) + self._kill_late(now)
        if self._phase_deadline is None or now < self._phase_deadline:
            return actions
        before = self.phase
        self._transition(SupervisorEvent.DEADLINE)
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
        if self.is_stopping:
            return actions
        for each in [each for each, began in since.items() if now - began >= STOPPED_S]:
            is_restarted = (
                self._restarts.is_enabled or self._is_spare(self._children[each.child])
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
        """Change the phase. Return False if the current phase ignores `event`. Raises
        IllegalMove."""
        if SUPERVISOR_MACHINE.ignores(self.phase, event):
            return False
        self.phase = SUPERVISOR_MACHINE.move(self.phase, event)
        return True

    # ---- groups

    def _in_states(self, *states: ChildState) -> list[ChildRecord]:
        return [child for child in self._children.values() if child.state in states]

    def _others(self, child: ChildRecord) -> list[ChildRecord]:
        """Return the other children in the group of `child` that serve, or will serve after a start
        or a restart."""
        group = (each for each in self._children.values() if each.group == child.group)
        return [each for each in group if each is not child and each.is_promised]

    def _is_spare(self, child: ChildRecord) -> bool:
        """Return whether the server continues without `child`."""
        return bool(self._others(child)) or child.group in self._optional

    def _is_waiting(self) -> bool:
        """Return whether some process must become ready before the server is ready. During the
        start, every process must. Later, one process of each group is enough, and optional groups
        do not count."""
        coming = self._in_states(ChildState.STARTING, ChildState.WAITING)
        if self.phase is SupervisorPhase.STARTING:
            return bool(coming)
        ready = {child.group for child in self._in_states(ChildState.READY)}
        return any(child.group not in ready | self._optional for child in coming)

    # ---- exits while the server runs

    def _on_unstopped_exit(self, child: ChildRecord, exit: ProcessExit, now: float) -> list[Action]:
        if child.state is ChildState.RETIRING:
            child.change(ChildEvent.EXITED)
            if child.killed_because or exit.code in (ExitCode.OK, -signal.SIGTERM):
                return []
            return [LogAction(f"while stopping, {exit.cause}", is_failure=True)]
        has_started = self.phase is not SupervisorPhase.STARTING
        if has_started and self._is_spare(child):
            return self._on_spare_exit(child, exit, now)
        was_drained = exit.code == ExitCode.OK
        return self._follow(child, exit, now) if was_drained else self._fail(child, exit, now)

    def _on_spare_exit(self, child: ChildRecord, exit: ProcessExit, now: float) -> list[Action]:
        """Handle the exit of a child without which the server continues: restart it, or leave it
        down."""
        serving = " and ".join(each.name for each in self._others(child))
        rest = f"; {serving or 'the server'} continues"
        if exit.code == ExitCode.OK:
            child.change(ChildEvent.EXITED)
            return [LogAction(f"{exit.child} {_how_drained(exit)}; it stays down{rest}")]
        cause = child.killed_because or exit.cause
        child.failure, child.killed_because = cause, ""
        delay_s = None
        if serving or self._restarts.is_enabled:
            delay_s = child.restarts.delay(exit.server_code, exit.code, now)
        if delay_s is None:
            child.change(ChildEvent.EXITED)
            return [LogAction(f"{cause}{child.restarts.why_not}{rest}", is_failure=True)]
        child.change(ChildEvent.LOST, now + delay_s)
        return [_restart_log(cause, delay_s, child.restarts), *self._start_due(now)]

    def _follow(self, child: ChildRecord, exit: ProcessExit, now: float) -> list[Action]:
        """Drain the other children too, after the exit of one that a user drained."""
        child.change(ChildEvent.EXITED)
        self._transition(SupervisorEvent.DRAINED)
        self._cancel_restarts()
        log = LogAction(f"{exit.child} {_how_drained(exit)}; the server stops")
        return [log, *self._drain_next(now)]

    def _fail(self, child: ChildRecord, exit: ProcessExit, now: float) -> list[Action]:
        """Handle the failure of a child that the server needs: restart it, or stop the others."""
        before = self.phase
        cause = child.killed_because or exit.cause
        child.failure, child.killed_because = cause, ""
        delay_s = None
        if before is not SupervisorPhase.STARTING:  # a restart does not fix a failed start
            delay_s = self._restarts.delay(exit.server_code, exit.code, now)
        if delay_s is None:
            child.change(ChildEvent.EXITED)
            self._transition(SupervisorEvent.FAILED)
            return self._stop(cause + self._restarts.why_not, exit.exit_code, before, now)
        child.change(ChildEvent.LOST, now + delay_s)
        self._transition(SupervisorEvent.LOST)
        self._phase_deadline = None
        return [_restart_log(cause, delay_s, self._restarts), *self._start_due(now)]

    def _start_due(self, now: float) -> list[Action]:
        """Start the children whose restart is due."""
        actions: list[Action] = []
        for child in self._in_states(ChildState.WAITING):
            if child.deadline is None or child.deadline > now:
                continue
            late = now + self._start_timeout_s
            if self.phase is SupervisorPhase.RESTARTING and not self._is_spare(child):
                child.change(ChildEvent.START)
                self._phase_deadline = late
            else:
                child.change(ChildEvent.START, late)
            actions.append(StartProcess(child.name))
        return actions

    def _kill_late(self, now: float) -> list[Action]:
        """Kill the children that have not started by their deadline, and those that have not
        drained. A draining child first gets SIGQUIT: it sends its clients an error, so that other
        replicas can continue their requests, and is killed only if it does not exit then."""
        actions: list[Action] = []
        for child in self._in_states(ChildState.STARTING, ChildState.RETIRING):
            if child.deadline is None or child.deadline > now:
                continue
            if child.state is ChildState.STARTING:
                child.killed_because = (
                    f"{child.name} was not ready after {self._start_timeout_s:g} s"
                )
            elif not child.killed_because:
                child.killed_because = f"{child.name} did not finish in {self._drain_s:g} s"
                child.deadline = now + STOP_S
                log = LogAction(f"{child.killed_because}; its open requests are ended")
                actions += [log, SendSignal(child.name, signal.SIGQUIT)]
                continue
            child.deadline = None
            log = LogAction(f"{child.killed_because} and will be killed", is_failure=True)
            actions += [log, SendSignal(child.name, signal.SIGKILL)]
        return actions

    # ---- the end of the server

    def _stop(self, cause: str, code: int, before: SupervisorPhase, now: float) -> list[Action]:
        """Stop all children after a failure.

        before   the phase in which the failure happened
        """
        timeout_s = UNUSED_STOP_S if before is SupervisorPhase.STARTING else STOP_S
        self._phase_deadline, self._code, self._cause = now + timeout_s, code, cause
        self._cancel_restarts()
        self._signalled.update(self.alive)
        stops = [SendSignal(child, signal.SIGQUIT) for child in self.alive]
        return [LogAction(cause, is_failure=True), *stops]

    def _cancel_restarts(self) -> None:
        """Cancel the pending restarts, and the start timeouts of the children that are starting."""
        for child in self._in_states(ChildState.WAITING):
            child.change(ChildEvent.RETIRE)
        for child in self._in_states(ChildState.STARTING):
            child.deadline = None

    def _on_exit_in_drain(self, exit: ProcessExit, is_expected: bool) -> list[Action]:
        """Handle an exit during a drain: report it if it was not requested, or not clean."""
        if is_expected and exit.code in (ExitCode.OK, -signal.SIGTERM):
            return []
        self._code, self._cause = exit.exit_code, f"while stopping, {exit.cause}"
        return [LogAction(self._cause, is_failure=True)]

    def _drain_next(self, now: float) -> list[Action]:
        """Drain the first group that is left, unless it is draining already."""
        alive = [child for child in self._children.values() if child.is_alive]
        group = [child for child in alive if child.group == alive[0].group]
        if all(child.name in self._signalled for child in group):
            return []
        self._signalled.update(child.name for child in group)
        self._phase_deadline = now + self._drain_s + GRACE_S
        draining = (child for child in group if child.state is not ChildState.RETIRING)
        return [SendSignal(child.name, signal.SIGTERM) for child in draining]

    def _kill(self) -> list[Action]:
        self._phase_deadline = None
        for child in self._children.values():
            child.deadline = None
        return [SendSignal(child, signal.SIGKILL) for child in self.alive]

    def _end(self) -> list[Action]:
        """End the server if no child is left and no restart is pending."""
        is_over = all(child.state is ChildState.DOWN for child in self._children.values())
        if not is_over or not self._transition(SupervisorEvent.ALL_EXITED):
            return []
        self._phase_deadline = None
        return [EndServer(self._code, self._cause)]


def _how_drained(exit: ProcessExit) -> str:
    """Return, for the log, why a child exited with code 0 although the supervisor did not stop it:
    the reason that the child gave, or a general phrase."""
    has_reason = exit.reason.startswith(DRAINED)
    return exit.reason if has_reason else "exited without a signal from its supervisor"


def _restart_log(cause: str, delay_s: float, restarts: RestartPolicy) -> LogAction:
    when = f"in {delay_s:g} s" if delay_s else "now"
    message = f"{cause}; starting it again {when} ({restarts.description})"
    return LogAction(message, is_failure=True)
