"""The loop around the supervisor: reports events to it, and performs the actions that it returns.

The loop itself decides nothing. One `select` waits for a signal, a child's exit, a child's output,
a change of readiness, a request on the control socket, and the next deadline. Once a second the
loop checks for stopped processes (SIGSTOP). Signal handlers only wake up the loop.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.processes.actions import (
    Action,
    AddProcess,
    EndServer,
    KillProcess,
    LogAction,
    RemoveProcess,
    SaveModels,
    SendReply,
    SendSignal,
    StartJob,
    StartProcess,
    StopJob,
)
from tools.processes.children import Child, Command
from tools.processes.control_server import ControlServer
from tools.processes.control_service import ControlService
from tools.processes.fleet import Fleet
from tools.processes.managed_models import ManagedModels
from tools.processes.model_jobs import ModelJobs
from tools.processes.model_phases import ModelPhase
from tools.processes.new_models import NewModels
from tools.processes.readiness import ChildReadiness, ReadinessPoller, ReadinessProbe
from tools.processes.restart_policy import RestartPolicy
from tools.processes.saved_models import ManagedModel
from tools.processes.server_log import ServerLog
from tools.processes.supervisor import Supervisor
from tools.processes.supervisor_phases import SupervisorPhase
from tools.terminal import Terminal

CHECK_EVERY_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handled_stop_signals() -> list[signal.Signals]:
    """Return the stop signals, without SIGHUP if it is ignored (nohup)."""
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [n for n in STOP_SIGNALS if n is not signal.SIGHUP or not under_nohup]


@contextlib.contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """Receive stop signals inside the `with` block. They do not end the process there.

    Yield a socket from which the number of each signal can be read, as one byte. If SIGHUP was
    ignored before (nohup), it stays ignored.
    """
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    numbers = [*handled_stop_signals(), signal.SIGQUIT]
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    old = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield receiver
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        receiver.close()
        sender.close()


def current_events(selector: selectors.BaseSelector, timeout_s: float) -> Iterator[Any]:
    """Wait once, and yield the data of each descriptor that is ready.

    An event is left out if the caller has closed its descriptor meanwhile, also if a new file has
    received the same number, or if the caller has changed what the selector waits for. In the
    latter case the next call yields it.
    """
    for key, _ in selector.select(timeout_s):
        if selector.get_map().get(key.fd) is key:
            yield key.data


@dataclass(frozen=True, slots=True)
class ModelManagement:
    """How clients manage the models of a server."""

    #: The models at the start.
    models: Sequence[ManagedModel]
    new: NewModels
    #: Stores which models clients have added. Raises OSError.
    save: Callable[[bytes], object]


class Watch:
    """Performs a supervisor's actions on real processes, until an action is EndServer.

    commands       the processes of the server. Those that are not among `children` start later
    wakeups        socket that receives the numbers of stop signals
    control        answers the requests on the control socket
    directory      directory of the control socket; None: the server has none
    on_listening   is called once, when the server first answers
    on_ready       is called once, when the server is ready for the first time
    log            keeps what the children print; None: nothing does
    save           stores which models clients have added
    """

    def __init__(
        self,
        supervisor: Supervisor,
        commands: Sequence[Command],
        children: Sequence[Child],
        *,
        wakeups: socket.socket,
        readiness: ReadinessPoller,
        control: ControlService,
        directory: Path | None,
        terminal: Terminal,
        on_listening: Callable[[], None],
        on_ready: Callable[[], None],
        log: ServerLog | None = None,
        save: Callable[[bytes], object] = lambda content: None,
    ) -> None:
        self._log = log
        self._save = save
        self._supervisor = supervisor
        self._commands = {command.name: command for command in commands}
        self._children = {child.name: child for child in children}
        self._wakeups = wakeups
        self._readiness = readiness
        self._ready = ChildReadiness({command.name: command.address for command in commands})
        self._control = control
        self._terminal = terminal
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._check_at = time.monotonic()
        self._lost_at = 0.0
        self._is_listening = False
        self._last_line = ""  # the last line that we logged; "" if a child has printed since
        self._was_started = set(self._children)  # names of children that were started at least once
        #: Exited child whose own children may still run -> the time at which they are killed.
        self._reap_at: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeups, selectors.EVENT_READ, self._receive_signals)
        self._selector.register(readiness.changes, selectors.EVENT_READ, self._receive_readiness)
        self._jobs = ModelJobs(
            self._selector,
            terminal.log,
            on_report=control.on_job_report,
            on_ended=control.on_job_ended,
        )
        for child in children:
            self._register(child)
        self._server: ControlServer | None = None
        if directory is not None:
            self._server = ControlServer(
                directory,
                self._selector,
                on_request=lambda number, each: control.on_request(number, each, time.monotonic()),
                on_closed=lambda number: control.on_closed(number, time.monotonic()),
            )

    def run(self) -> int:
        """Run until the server has ended, and return the exit code."""
        try:
            while True:
                for on_event in current_events(self._selector, self._timeout()):
                    code = self._perform(on_event())
                    if code is not None:
                        return code
                now = time.monotonic()
                code = self._perform([*self._reap_due(now), *self._supervisor.tick(now)])
                if code is not None:
                    return code
                self._check_stopped(now)
                if not self._supervisor.is_awaiting_readiness:
                    self._readiness.pause()
        finally:
            if self._server is not None:
                self._server.close()
            self._jobs.close()
            self._selector.close()

    def _timeout(self) -> float:
        deadlines = (self._supervisor.deadline, self._control.deadline)
        times = [self._check_at, *self._reap_at.values()]
        times += [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(times) - time.monotonic())

    def _check_stopped(self, now: float) -> None:
        if now < self._check_at:
            return
        self._check_at = now + CHECK_EVERY_S
        stopped = [each for child in self._children.values() for each in child.stopped()]
        self._perform(self._supervisor.on_stopped(stopped, now))

    def _register(self, child: Child) -> None:
        def on_output() -> list[Action]:
            is_open = child.relay()
            self._note_output(child)
            if not is_open:
                self._selector.unregister(child.output)
                if child.name in self._reap_at:
                    return self._reap(child)
            return []

        def on_exit() -> list[Action]:
            self._selector.unregister(child.pidfd)
            now = time.monotonic()
            if self._supervisor.phase is SupervisorPhase.SERVING:
                self._lost_at = now
            if child.survivors_s and child.output in self._selector.get_map():
                # `on_output` reaps it earlier if its output ends before that time.
                self._reap_at[child.name] = now + child.survivors_s
                return []
            return self._reap(child)

        self._selector.register(child.output, selectors.EVENT_READ, on_output)
        self._selector.register(child.pidfd, selectors.EVENT_READ, on_exit)

    def _reap_due(self, now: float) -> list[Action]:
        due = [name for name, when in self._reap_at.items() if when <= now]
        return [action for name in due for action in self._reap(self._children[name])]

    def _reap(self, child: Child) -> list[Action]:
        self._reap_at.pop(child.name, None)
        if child.output in self._selector.get_map():
            self._selector.unregister(child.output)
        del self._children[child.name]
        exit = child.reap()
        self._note_output(child)
        return self._supervisor.on_exit(exit, time.monotonic())

    def _note_output(self, child: Child) -> None:
        if child.has_printed:
            self._last_line, child.has_printed = "", False
            self._readiness.hint()

    def _receive_signals(self) -> list[Action]:
        now = time.monotonic()
        actions: list[Action] = []
        for number in self._wakeups.recv(64):
            if number in (*STOP_SIGNALS, signal.SIGQUIT):
                actions += self._supervisor.on_signal(signal.Signals(number), now)
        return actions

    def _receive_readiness(self) -> list[Action]:
        self._readiness.changes.recv(64)
        answer, before = self._readiness.latest, self._supervisor.phase
        assert answer is not None
        if not self._is_listening:
            self._is_listening = True
            if before is SupervisorPhase.STARTING:
                self._on_listening()
        ready = self._ready.ready(answer)
        actions = self._supervisor.on_ready(ready, is_ready=answer.is_ready)
        self._report_ready(before)
        return actions

    def _report_ready(self, before: SupervisorPhase) -> None:
        if self._supervisor.phase is not SupervisorPhase.SERVING:
            return  # the server is already stopping
        if before is SupervisorPhase.STARTING:
            self._on_ready()
        elif before is SupervisorPhase.RESTARTING:
            self._terminal.log(f"ready again, after {time.monotonic() - self._lost_at:.1f} s")

    def _start(self, name: str) -> None:
        self._ready.on_start(name)
        child = self._children[name] = Child(self._commands[name], self._log)
        self._register(child)
        self._readiness.restart()
        again = " again" if name in self._was_started else ""
        self._was_started.add(name)
        self._terminal.log(f"{name} started{again} (pid {child.pid})")

    def _perform(self, actions: Sequence[Action]) -> int | None:
        """Perform the actions, and those that follow from them. Return the exit code if the server
        ends, else None."""
        while True:
            for action in actions:
                match action:
                    case LogAction(text, is_failure):
                        (self._terminal.fail if is_failure else self._terminal.log)(text)
                        self._last_line = text
                    case StartProcess(child):
                        self._start(child)
                    case SendSignal(child, number):
                        self._children[child].send(number)
                    case KillProcess(child, pid):
                        self._children[child].kill(pid)
                    case SendReply(connection, message):
                        if self._server is not None:
                            self._server.send(connection, message)
                    case AddProcess(command):
                        self._commands[command.name] = command
                        self._ready.add(command.name, command.address)
                    case RemoveProcess(child):
                        del self._commands[child]
                        self._ready.remove(child)
                    case StartJob(order):
                        self._jobs.start(order)
                    case StopJob():
                        self._jobs.stop()
                    case SaveModels(content):
                        self._save_models(content)
                    case EndServer(code, cause):
                        if not cause:
                            self._terminal.log("stopped")
                        elif cause != self._last_line:
                            self._terminal.fail(cause)
                        return code
            actions = self._control.advance(time.monotonic())
            if not actions:
                return None

    def _save_models(self, content: bytes) -> None:
        try:
            self._save(content)
        except OSError as error:
            self._terminal.fail(f"the next start will not have the models as they are now: {error}")


def supervise(
    commands: Sequence[Command],
    server: ReadinessProbe,
    terminal: Terminal,
    *,
    started: Sequence[Child] = (),
    start_timeout_s: float,
    drain_s: float,
    max_restarts: int = 0,
    replica_restarts: int = 0,
    fleet: Fleet | None = None,
    management: ModelManagement | None = None,
    control_directory: Path | None = None,
    on_started: Callable[[Sequence[Child]], None],
    on_listening: Callable[[], None],
    on_ready: Callable[[str | None], None],
    log: ServerLog | None = None,
) -> int:
    """Start the processes of a server, supervise them until all have ended, and return the exit
    code.

    commands          the processes, in the order in which a drain stops them
    server            checks whether the server is ready
    started           the processes that already run; the others are started
    start_timeout_s   time until the server must be ready
    drain_s           time that each process has to finish its open requests
    max_restarts      limit of a `RestartPolicy`
    replica_restarts  the same for each engine that another one of its group replaces meanwhile
    fleet             models that are loaded and unloaded while the server runs, if any. The engines
                      of a model are the group with its name. Those of models that are not loaded
                      are not started
    management        how clients manage the models of `fleet`; None: they do not
    control_directory run directory for the control socket; None: there is none
    on_started        is called once, after the processes were started
    on_listening      is called once, when the server first answers
    on_ready          is called once, with the model's name, when the server is first ready
    log               keeps what the processes print; None: nothing does
    """
    groups = {each.name: each.group for each in commands if each.group}
    models = {} if fleet is None else {name: fleet.phase(name) for name in fleet.models}
    at_start = [each for each in commands if models.get(each.group) is not ModelPhase.UNLOADED]
    with stop_signals() as wakeups:
        supervisor = Supervisor(
            [command.name for command in commands],
            time.monotonic(),
            start_timeout_s=start_timeout_s,
            drain_s=drain_s,
            restarts=RestartPolicy(max_restarts),
            restarts_children=[each.name for each in commands if each.restarts_children],
            groups=groups,
            replica_restarts=replica_restarts,
            optional=models,
            unloaded=[each.name for each in commands if each not in at_start],
        )
        running = {child.name: child for child in started}
        children = [running.get(command.name) or Child(command, log) for command in at_start]
        on_started(children)
        managed = None
        if management is not None:
            assert fleet is not None
            managed = ManagedModels(
                management.models,
                management.new,
                fleet=fleet,
                supervisor=supervisor,
                groups=groups,
            )
        control = ControlService(
            supervisor, groups, fleet=fleet, managed=managed, timeout_s=start_timeout_s
        )
        with ReadinessPoller(server) as readiness:
            return Watch(
                supervisor,
                commands,
                children,
                wakeups=wakeups,
                readiness=readiness,
                control=control,
                directory=control_directory,
                terminal=terminal,
                on_listening=on_listening,
                on_ready=lambda: on_ready(readiness.model),
                log=log,
                save=management.save if management is not None else lambda content: None,
            ).run()
