"""The loop around the supervisor: what happens becomes events, its orders become deeds.

Decides nothing. It sleeps in one `select` on everything that can happen: a signal, a child's exit,
a child's output, news of readiness, the supervisor's deadline. Signal handlers do nothing but wake
it.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from tools.children import Child, Command
from tools.supervisor import End, Order, Phase, Say, Send, Supervisor
from tools.web import Readiness

PROBE_EVERY_S = 0.1
LISTENING, READY = b"l", b"r"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watched(Protocol):
    """What is started here, as its clients find it."""

    def readiness(self) -> Readiness | None:
        """None where nobody answers. Asked several times a second, in a thread of its own."""


class Asking:
    """Asks the server until it is ready; `news` is readable when it first answers, and when it is.

    `model` is the served model's name, known once READY has been said.
    """

    def __init__(self, server: Watched) -> None:
        self.model: str | None = None
        self._server = server
        self.news, self._tell = socket.socketpair()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="readiness", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.news.close()
        self._tell.close()

    def _ask(self) -> None:
        heard = False
        while not self._stop.wait(PROBE_EVERY_S):
            answer = self._server.readiness()
            if answer is not None and not heard:
                heard = True
                self._tell.send(LISTENING)
            if answer is not None and answer.is_ready:
                self.model = answer.model
                self._tell.send(READY)
                return


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

    on_listening, on_ready   called once each, in this order, when the server gets so far
    """

    def __init__(
        self,
        supervisor: Supervisor,
        children: Sequence[Child],
        *,
        wakeups: socket.socket,
        readiness: Asking,
        on_listening: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._children = {child.name: child for child in children}
        self._wakeups = wakeups
        self._readiness = readiness
        self._on_listening = on_listening
        self._on_ready = on_ready
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
                self._obey(self._supervisor.tick(time.monotonic()))

    def _patience(self) -> float | None:
        deadline = self._supervisor.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _listen_to(self, child: Child) -> None:
        def printed() -> list[Order]:
            if not child.relay():
                self._selector.unregister(child.output)
            return []

        def exited() -> list[Order]:
            self._selector.unregister(child.pidfd)
            if child.output in self._selector.get_map():
                self._selector.unregister(child.output)
            return self._supervisor.exited(child.bury(), time.monotonic())

        self._selector.register(child.output, selectors.EVENT_READ, printed)
        self._selector.register(child.pidfd, selectors.EVENT_READ, exited)

    def _hear_signals(self) -> list[Order]:
        now = time.monotonic()
        orders: list[Order] = []
        for number in self._wakeups.recv(64):
            if number in STOP_SIGNALS:
                orders += self._supervisor.interrupted(signal.Signals(number), now)
        return orders

    def _hear_readiness(self) -> list[Order]:
        words = self._readiness.news.recv(8)
        if self._supervisor.phase is not Phase.STARTING:
            return []  # it comes too late to be good news
        orders: list[Order] = []
        for word in words:
            if word == READY[0]:
                self._on_ready()
                orders += self._supervisor.ready()
            else:
                self._on_listening()
        return orders

    def _obey(self, orders: Sequence[Order]) -> int | None:
        for order in orders:
            match order:
                case Say(text, is_failure):
                    say(text, is_failure=is_failure)
                case Send(child, number):
                    self._children[child].send(number)
                case End(code):
                    return code
        return None


def supervise(
    commands: Sequence[Command],
    server: Watched,
    *,
    start_timeout_s: float,
    drain_s: float,
    on_started: Callable[[Sequence[Child]], None],
    on_listening: Callable[[], None],
    on_ready: Callable[[str | None], None],
) -> int:
    """Start `commands` together and stay with them to the end; the exit code.

    commands   in the order in which a drain stops them
    on_*       called once each, as the start gets so far; `on_ready` with the served model's name
    """
    names = [command.name for command in commands]
    with signals() as wakeups:
        supervisor = Supervisor(
            names, time.monotonic(), start_timeout_s=start_timeout_s, drain_s=drain_s
        )
        children = [Child(command) for command in commands]
        on_started(children)
        with Asking(server) as readiness:  # a thread, so only after the last fork
            return Watch(
                supervisor,
                children,
                wakeups=wakeups,
                readiness=readiness,
                on_listening=on_listening,
                on_ready=lambda: on_ready(readiness.model),
            ).run()


def say(text: str, *, is_failure: bool = False) -> None:
    """To the person at the terminal: failures on stderr, the rest on stdout. Never fails itself."""
    with contextlib.suppress(OSError):
        if is_failure:
            print(f"tidegate: {text}", file=sys.stderr, flush=True)
        else:
            print(text, flush=True)
