"""The loop around the supervisor: what happens becomes events, its orders become deeds.

Decides nothing. It sleeps in one `select` on everything that can happen: a signal, a child's exit,
a child's output, news of readiness, the supervisor's deadline; and once a second it looks whether
somebody has stopped a process. Signal handlers do nothing but wake it.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self

from tools.http.web import ServerReadiness
from tools.processes.children import Child, Command
from tools.processes.restart_policy import RestartPolicy
from tools.processes.supervisor import (
    EndServer,
    KillProcess,
    LogAction,
    Order,
    SendSignal,
    StartProcess,
    Supervisor,
    SupervisorPhase,
)
from tools.terminal import Terminal

PROBE_EVERY_S = 0.1
LOOK_EVERY_S = 1.0
LISTENING, READY = b"l", b"r"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class WatchedProcess(Protocol):
    """What is started here, as its clients find it."""

    def readiness(self) -> ServerReadiness | None:
        """None where nobody answers. Asked several times a second, in a thread of its own."""


class Asking:
    """Asks the server until it is ready; `news` is readable when it first answers, and when it is.

    `model` is the served model's name, known once READY has been said.
    """

    def __init__(self, server: WatchedProcess) -> None:
        self.model: str | None = None
        self._server = server
        self._lives: frozenset[str] = frozenset()  # of the engines that were ready, and are no more
        self.news, self._tell = socket.socketpair()
        self._is_over = False
        self._wanted = threading.Event()
        self._pause = threading.Event()  # set: no more pauses
        self._thread = threading.Thread(target=self._run, name="readiness", daemon=True)

    def __enter__(self) -> Self:
        self._wanted.set()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        self._pause.set()
        self._wanted.set()
        self._thread.join()
        self.news.close()
        self._tell.close()

    def again(self, *, is_engine: bool) -> None:
        """Something was started again: say READY once more, when it is. A gateway that has not yet
        noticed that its engine was lost answers for the old one, which does not count."""
        if not is_engine:
            self._lives = frozenset()
        self._wanted.set()

    def _run(self) -> None:
        heard = False
        while not self._is_over:
            self._wanted.wait()
            if self._pause.wait(PROBE_EVERY_S):
                return
            answer = self._server.readiness()
            if answer is not None and not heard:
                heard = True
                self._tell.send(LISTENING)
            if answer is not None and answer.is_ready and self._is_new(answer):
                self.model, self._lives = answer.model, answer.lives
                self._wanted.clear()
                self._tell.send(READY)

    def _is_new(self, answer: ServerReadiness) -> bool:
        return not self._lives or answer.lives != self._lives


@contextlib.contextmanager
def signals() -> Iterator[socket.socket]:
    """A socket that receives the number of each stop signal, one byte each, while inside.

    A SIGHUP that was ignored when we came (nohup) stays ignored.
    """
    ours, kernels = socket.socketpair()
    ours.setblocking(False)
    kernels.setblocking(False)
    heard = [number for number in STOP_SIGNALS if not _under_nohup(number)]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    old = signal.set_wakeup_fd(kernels.fileno(), warn_on_full_buffer=False)
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        kernels.close()


def _under_nohup(number: signal.Signals) -> bool:
    return number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class Watch:
    """Carries out a supervisor's orders on real processes until it says End.

    on_listening   called once, when the server gets so far
    on_ready       called when it is ready for the first time
    """

    def __init__(
        self,
        supervisor: Supervisor,
        commands: Sequence[Command],
        children: Sequence[Child],
        *,
        wakeups: socket.socket,
        readiness: Asking,
        terminal: Terminal,
        on_listening: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._commands = {command.name: command for command in commands}
        self._children = {child.name: child for child in children}
        self._wakeups = wakeups
        self._readiness = readiness
        self._terminal = terminal
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._look_at = time.monotonic()
        self._lost_at = 0.0
        self._said_last = ""  # to the terminal, by us
        self._bury_at: dict[str, float] = {}  # children that are dead, but not what they started
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeups, selectors.EVENT_READ, self._hear_signals)
        self._selector.register(readiness.news, selectors.EVENT_READ, self._hear_readiness)
        for child in children:
            self._listen_to(child)

    def run(self) -> int:
        """The exit code. Returns when the last child is gone."""
        with self._selector:
            while True:
                for happened, _ in self._selector.select(self._patience()):
                    if happened.fd not in self._selector.get_map():
                        continue  # the event before this one closed it
                    code = self._obey(happened.data())
                    if code is not None:
                        return code
                now = time.monotonic()
                code = self._obey([*self._bury_due(now), *self._supervisor.tick(now)])
                if code is not None:
                    return code
                self._look(now)

    def _patience(self) -> float:
        deadline = self._supervisor.deadline
        times = [self._look_at, *self._bury_at.values(), *([] if deadline is None else [deadline])]
        return max(0.0, min(times) - time.monotonic())

    def _look(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        stopped = [each for child in self._children.values() for each in child.stopped()]
        self._obey(self._supervisor.saw(stopped, now))

    def _listen_to(self, child: Child) -> None:
        def printed() -> list[Order]:
            goes_on = child.relay()
            self._note_output(child)
            if not goes_on:
                self._selector.unregister(child.output)
                if child.name in self._bury_at:
                    return self._bury(child)
            return []

        def exited() -> list[Order]:
            self._selector.unregister(child.pidfd)
            now = time.monotonic()
            if self._supervisor.phase is SupervisorPhase.SERVING:
                self._lost_at = now
            if child.survivors_s and child.output in self._selector.get_map():
                self._bury_at[child.name] = now + child.survivors_s  # or when its output ends
                return []
            return self._bury(child)

        self._selector.register(child.output, selectors.EVENT_READ, printed)
        self._selector.register(child.pidfd, selectors.EVENT_READ, exited)

    def _bury_due(self, now: float) -> list[Order]:
        due = [name for name, when in self._bury_at.items() if when <= now]
        return [order for name in due for order in self._bury(self._children[name])]

    def _bury(self, child: Child) -> list[Order]:
        self._bury_at.pop(child.name, None)
        if child.output in self._selector.get_map():
            self._selector.unregister(child.output)
        del self._children[child.name]
        exit = child.bury()
        self._note_output(child)
        return self._supervisor.exited(exit, time.monotonic())

    def _note_output(self, child: Child) -> None:
        if child.has_printed:
            self._said_last, child.has_printed = "", False

    def _hear_signals(self) -> list[Order]:
        now = time.monotonic()
        orders: list[Order] = []
        for number in self._wakeups.recv(64):
            if number in STOP_SIGNALS:
                orders += self._supervisor.interrupted(signal.Signals(number), now)
        return orders

    def _hear_readiness(self) -> list[Order]:
        orders: list[Order] = []
        for word in self._readiness.news.recv(8):
            phase = self._supervisor.phase
            if word == LISTENING[0] and phase is SupervisorPhase.STARTING:
                self._on_listening()
            elif word == READY[0]:
                orders += self._supervisor.ready()
                self._tell_ready(phase)
        return orders

    def _tell_ready(self, before: SupervisorPhase) -> None:
        if self._supervisor.phase is not SupervisorPhase.SERVING:
            return  # it comes too late to be good news
        if before is SupervisorPhase.STARTING:
            self._on_ready()
        elif before is SupervisorPhase.RESTARTING:
            self._terminal.log(f"ready again, after {time.monotonic() - self._lost_at:.1f} s")

    def _start(self, name: str) -> None:
        command = self._commands[name]
        child = self._children[name] = Child(command)
        self._listen_to(child)
        self._readiness.again(is_engine=not command.revives)
        self._terminal.log(f"{name} started again (pid {child.pid})")

    def _obey(self, orders: Sequence[Order]) -> int | None:
        for order in orders:
            match order:
                case LogAction(text, is_failure):
                    (self._terminal.fail if is_failure else self._terminal.log)(text)
                    self._said_last = text
                case StartProcess(child):
                    self._start(child)
                case SendSignal(child, number):
                    self._children[child].send(number)
                case KillProcess(child, pid):
                    self._children[child].kill(pid)
                case EndServer(code, cause):
                    if cause and cause != self._said_last:
                        self._terminal.fail(cause)
                    return code
        return None


def supervise(
    commands: Sequence[Command],
    server: WatchedProcess,
    terminal: Terminal,
    *,
    start_timeout_s: float,
    drain_s: float,
    max_restarts: int = 0,
    on_started: Callable[[Sequence[Child]], None],
    on_listening: Callable[[], None],
    on_ready: Callable[[str | None], None],
) -> int:
    """Start `commands` together and stay with them to the end; the exit code.

    commands       in the order in which a drain stops them
    max_restarts   see `RestartPolicy`
    on_*           called once each, as the start gets so far; `on_ready` with the model's name
    """
    names = [command.name for command in commands]
    with signals() as wakeups:
        supervisor = Supervisor(
            names,
            time.monotonic(),
            start_timeout_s=start_timeout_s,
            drain_s=drain_s,
            restarts=RestartPolicy(max_restarts),
            revives=[command.name for command in commands if command.revives],
        )
        children = [Child(command) for command in commands]
        on_started(children)
        with Asking(server) as readiness:
            return Watch(
                supervisor,
                commands,
                children,
                wakeups=wakeups,
                readiness=readiness,
                terminal=terminal,
                on_listening=on_listening,
                on_ready=lambda: on_ready(readiness.model),
            ).run()
