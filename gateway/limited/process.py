"""One limited process, as the gateway sees it.

Calls take turns. If a call exceeds its limits, the kernel or this module kills the process, and the
call fails. Waiting calls are sent to the next process. A process may also end through no fault of
its call, so a call fails only if a second process ends as well.

The gateway's other greenlets go on meanwhile. The file descriptor is a plain one, so calls may come
from any thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence

import gevent
from gevent.lock import Semaphore
from gevent.socket import wait_read, wait_write

from gateway.limited.calls import (
    LAST,
    LENGTH_BYTES,
    Call,
    OutOfMemory,
    Reply,
    decode_reply,
    to_frame,
)
from protocol.errors import Overloaded

MODULE = "gateway.limited"
CPU_S = 2.0
MEMORY_BYTES = 512 << 20
"""A prompt of 16 million characters takes a quarter of it, in any script."""
WALL_S = 30.0
TRIES = 2
_PIECE_BYTES = 1 << 20
_ADDED = {"TOKENIZERS_PARALLELISM": "false"}
"""Added to the environment: a thread for each core would reserve memory."""
_PASSED_ON = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ")
"""The variables that are passed on. Others may hold keys, which foreign code must not get."""
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Sent to whole groups of processes. A limited process ends with its gateway, which may have
requests to finish."""


class LimitExceeded(Exception):
    """The call used too much time or memory, or crashed its process. The message says which."""


class _Ended(Exception):
    """The process is gone. `is_final`: another one would come to the same end."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


class LimitedProcess:
    """A process that is started by the first call, or by `start`, and again whenever it has ended.

    cpu_s        CPU time of one call
    memory_bytes the most memory beyond that at its start
    wall_s       time of one call, the start of the process included; for a process that is stopped
    max_waiting  calls that may be open or wait for their turn; None: any number
    nice         added to the gateway's own niceness
    """

    def __init__(
        self,
        *,
        cpu_s: float = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
        wall_s: float = WALL_S,
        max_waiting: int | None = None,
        nice: int = 0,
    ) -> None:
        self._arguments = (
            *("--cpu-s", str(cpu_s)),
            *("--memory-bytes", str(memory_bytes)),
            *("--nice", str(nice)),
        )
        self._wall_s = wall_s
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._is_closed = False
        self._turn = Semaphore(1)
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that the next call goes to; None if there is none yet."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process ahead of the first call. It gets ready beside us."""
        if self._child is None:
            self._child = _Child(self._arguments)

    def close(self) -> None:
        """May be called twice. A call that is open fails."""
        self._is_closed = True
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.reap()

    def call(self, call: Call) -> Reply:
        """Raises LimitExceeded, and Overloaded if too many calls wait."""
        try:
            frame = to_frame(call)
        except ValueError as error:
            raise LimitExceeded(str(error)) from None
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            raise Overloaded(
                "too many request templates are waiting to be rendered", retry_after_s=2
            )
        self._num_waiting += 1
        try:
            with self._turn:
                return self._sent(frame)
        finally:
            self._num_waiting -= 1

    def _sent(self, frame: bytes) -> Reply:
        for tries_left in reversed(range(TRIES)):
            self.start()
            child = self._child
            assert child is not None
            is_new = child.num_calls == 0
            try:
                reply = child.ask(frame, self._wall_s)
            except _Ended as end:
                self._replace(child)
                if end.is_final or self._is_closed or not tries_left:
                    raise LimitExceeded(str(end)) from None
                continue
            except BaseException:  # this greenlet is to end: the reply would be the next call's
                self._replace(child)
                raise
            if child.is_done:
                self._replace(child)
            if not isinstance(reply, OutOfMemory):
                return reply
            if is_new or not tries_left:
                raise LimitExceeded("it takes too much memory")
        raise AssertionError("the last try returns or raises")

    def _replace(self, child: _Child) -> None:
        """Start the next process at once, so that it is ready when it is needed."""
        child.kill()
        gevent.spawn(child.reap)
        if not self._is_closed:
            self._child = None
            self.start()


class _Child:
    """A process and our end of its socket."""

    def __init__(self, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self._fd = ours.detach()
        os.set_blocking(self._fd, False)
        os.set_blocking(theirs.fileno(), True)  # in a gateway, sockets are gevent's
        self.num_calls = 0
        self.is_done = False  # it has sent its last reply
        self._status: int | None = None
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", MODULE, *arguments],
                {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | _ADDED,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                ],
                setsigmask=_BLOCKED,
                setsigdef=[signal.SIGPROF],
            )
        except OSError:
            os.close(self._fd)
            raise
        finally:
            theirs.close()

    def ask(self, frame: bytes, wall_s: float) -> Reply:
        """Raises _Ended if the process ends first, or takes longer than `wall_s`."""
        deadline = time.monotonic() + wall_s
        self.num_calls += 1
        try:
            self._write(frame, deadline)
            head = int.from_bytes(self._read(LENGTH_BYTES, deadline), "big")
            self.is_done = bool(head & LAST)
            reply: Reply = decode_reply(self._read(head & ~LAST, deadline))
            return reply
        except TimeoutError:
            raise _Ended(f"it takes longer than {wall_s:g} s", is_final=True) from None
        except (OSError, EOFError):
            self.reap()
            raise self._end() from None

    def _write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest[:_PIECE_BYTES]) :]
            except BlockingIOError:
                wait_write(self._fd, _left(deadline), TimeoutError())

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            try:
                piece = os.read(self._fd, min(size - len(data), _PIECE_BYTES))
            except BlockingIOError:
                wait_read(self._fd, _left(deadline), TimeoutError())
                continue
            if not piece:
                raise EOFError
            data += piece
        return data

    def _end(self) -> _Ended:
        status = self._status
        if status is None or not os.WIFSIGNALED(status):
            return _Ended("its process ended by itself")
        number = os.WTERMSIG(status)
        if number == signal.SIGPROF:
            return _Ended("it takes too much time", is_final=True)
        return _Ended(f"its process was ended by {signal.Signals(number).name}")

    def kill(self) -> None:
        """Also ends a call that another greenlet waits in."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for its end, once it has been killed or has closed its socket."""
        while self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else's handler was faster
                pid, status = self.pid, 0
            if pid:
                self._status = status
            else:
                gevent.sleep(0.002)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
