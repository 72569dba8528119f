"""`GatedStart`: starts processes early, and holds them until the checks of the server pass."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Self

from protocol.process.exit_codes import KILLED
from protocol.process.start_gate import StartGate
from tools.failure import Failure
from tools.processes.children import Child, Command
from tools.processes.server_log import ServerLog
from tools.processes.watch import handled_stop_signals


def stopped_early(number: signal.Signals) -> Failure:
    """Return the failure of a server that a signal stops before it can load its model."""
    message = f"stopped by {number.name} before the model was loaded"
    return Failure(message, exit_code=KILLED + number)


@contextlib.contextmanager
def stop_signals_as_failures() -> Iterator[None]:
    """Raise Failure for a stop signal that arrives in this block, so that the files of the server
    are removed. Ctrl-C raises KeyboardInterrupt in any case. Use this in the main thread."""

    def fail(number: int, _frame: object) -> None:
        raise stopped_early(signal.Signals(number))

    numbers = [each for each in handled_stop_signals() if each is not signal.SIGINT]
    before = {number: signal.signal(number, fail) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class GatedStart:
    """Starts processes that wait at a gate until the `with` block ends.

    An exception in the block kills the processes, without printing any of their output. Otherwise
    the gate opens, and `children` has the processes in the order in which they were started. Their
    output stays in the pipes until it is read.

    Stop signals are held back in the block, so none can interrupt the start or the kill of a
    process. The first one is raised as an exception inside `interruptible`, or else at the end of
    the block. Later ones are ignored. Use this class in the main thread.

    log   keeps what the processes print; None: nothing does
    """

    def __init__(self, log: ServerLog | None = None) -> None:
        self._log = log
        self.children: list[Child] = []
        self._received: signal.Signals | None = None
        self._may_raise = False

    def __enter__(self) -> Self:
        self._gate = StartGate()
        self._handlers = {n: signal.signal(n, self._on_signal) for n in handled_stop_signals()}
        return self

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise a stop signal as an exception in this block: KeyboardInterrupt for Ctrl-C, Failure
        for other signals. Processes may be started in the block."""
        self._may_raise = True
        try:
            self._raise_received()
            yield
        finally:
            self._may_raise = False

    def start(self, commands: Iterable[Command]) -> None:
        """Start a process for each command. Call this inside the `with` block."""
        may_raise, self._may_raise = self._may_raise, False
        for each in commands:
            gated = replace(
                each,
                environment={**each.environment, **self._gate.environment},
                keeps_open=[*each.keeps_open, self._gate.fd],
            )
            self.children.append(Child(gated, self._log))
        self._may_raise = may_raise
        if may_raise:
            self._raise_received()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with contextlib.ExitStack() as stack:  # if one callback fails, the others still run
            stack.callback(self._restore_handlers)
            stack.callback(self._gate.close)
            if kind is None and self._received is None:
                self._gate.open()
            else:
                for child in self.children:
                    stack.callback(child.discard)
        if kind is None:
            self._raise_received()

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
            if self._may_raise:
                self._raise_received()

    def _raise_received(self) -> None:
        if self._received is signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise stopped_early(self._received)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
