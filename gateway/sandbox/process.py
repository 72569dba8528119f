"""Starts sandbox processes, sends calls to them, and replaces them when they end.

One call is open per process; others wait. If a call exceeds its limits, the kernel or this module
kills the process, and the call fails. Waiting calls are sent to the next process. A process may
also end for a reason that the call did not cause. In that case the call is sent to a second process
before it fails.

While a greenlet waits for a reply, the other greenlets of the gateway run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import gevent
from gevent.lock import Semaphore
from gevent.socket import wait_read, wait_write

from gateway.sandbox.messages import (
    HEAD_BYTES,
    Buffer,
    Call,
    OutOfMemory,
    Reply,
    decode_reply,
    sizes_of,
    to_frame,
)
from protocol.wire.errors import Overloaded

MODULE = "gateway.sandbox"
CPU_S = 2.0
MEMORY_BYTES = 512 << 20
"""Default memory limit. A prompt of 16 million characters needs a quarter of it, in any script."""
RETIRE_BYTES = 64 << 20
"""Default growth of a process after which it is replaced."""
WALL_S = 30.0
TRIES = 2
"""Number of processes to which a call is sent before it fails."""
SMALL_BYTES = 256 << 10
"""Most bytes of the frame of a small call. Such a call takes a few tens of milliseconds."""
_PIECE_BYTES = 1 << 20
_ADDED = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment variables added for the process. Most of them prevent a thread for each core, because
each thread would reserve memory. The others keep transformers silent, and off the network."""
_INHERITED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ")
"""Environment variables that the process inherits. It does not inherit others, because they may
contain keys."""
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that may be sent to a whole process group. The process blocks them, because its gateway
may have requests to finish. It ends when its gateway ends."""


class LimitExceeded(Exception):
    """Raised if a call is too large, used too much time or memory, or crashed its process. The
    message says which."""


class FullReply(NamedTuple):
    """A reply, and the raw bytes of its frame."""

    message: Reply
    raw: memoryview


def frame_of(call: Call, raw: Sequence[Buffer] = ()) -> bytes:
    """Return the frame of a call, with `raw` as its raw bytes. Raises LimitExceeded if it cannot be
    sent."""
    try:
        return to_frame(call, raw)
    except ValueError as error:
        raise LimitExceeded(str(error)) from None


class _Ended(Exception):
    """The process has ended.

    is_final  whether the same call would end another process, too
    """

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


class SandboxProcess:
    """A process that runs calls. It starts at `start` or at the first call, and is replaced when it
    ends.

    cpu_s         CPU time limit of one call
    memory_bytes  limit on the growth of the process's memory after its start
    wall_s        time limit of one call, including the start of the process
    max_waiting   maximum number of calls, including the open one; None: no limit
    nice          added to the gateway's own niceness
    retire_bytes  growth of the process's memory after which it is replaced
    queued        what waits for the process, for the error if too much of it does
    """

    def __init__(
        self,
        *,
        cpu_s: float = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
        wall_s: float = WALL_S,
        max_waiting: int | None = None,
        nice: int = 0,
        retire_bytes: int = RETIRE_BYTES,
        queued: str = "request templates are waiting to be rendered",
    ) -> None:
        self._arguments = (
            *("--cpu-s", str(cpu_s)),
            *("--memory-bytes", str(memory_bytes)),
            *("--nice", str(nice)),
            *("--retire-bytes", str(retire_bytes)),
        )
        self._queued = queued
        self.wall_s = wall_s
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._is_closed = False
        self._turn = Semaphore(1)
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the current process; None if there is none."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the process before the first call, without waiting until it is ready."""
        if self._child is None:
            self._child = _Child(self._arguments)

    def close(self) -> None:
        """End the process. An open call fails. May be called twice."""
        self._is_closed = True
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.reap()

    def call(self, call: Call) -> Reply:
        """Send a call and return its reply. Raises LimitExceeded, or Overloaded if too many calls
        are waiting."""
        return self.call_frame(frame_of(call))

    def call_frame(self, frame: bytes) -> Reply:
        """Send the frame of a call, as `call` does."""
        return self.full_reply(frame).message

    def full_reply(self, frame: bytes) -> FullReply:
        """Send the frame of a call, as `call` does, and return its reply with the raw bytes."""
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            raise Overloaded(f"too many {self._queued}", retry_after_s=2)
        self._num_waiting += 1
        try:
            with self._turn:
                return self._reply_to(frame)
        finally:
            self._num_waiting -= 1

    def _reply_to(self, frame: bytes) -> FullReply:
        """Return the reply to the call in `frame`.

        If a process ends without a reply, the next one gets the call, up to TRIES processes. Raises
        LimitExceeded if all of them end, or if the call exceeds its limits.
        """
        for tries_left in reversed(range(TRIES)):
            self.start()
            child = self._child
            assert child is not None
            is_new = child.num_calls == 0
            try:
                reply = child.call(frame, self.wall_s)
            except _Ended as end:
                self._replace(child)
                if end.is_final or self._is_closed or not tries_left:
                    raise LimitExceeded(str(end)) from None
                continue
            except BaseException:
                # This greenlet was killed. The next call must not read the reply to this one.
                self._replace(child)
                raise
            if child.has_sent_last:
                self._replace(child)
            if not isinstance(reply.message, OutOfMemory):
                return reply
            if is_new or not tries_left:
                raise LimitExceeded("it takes too much memory")
        raise AssertionError("the last try returns or raises")

    def _replace(self, child: _Child) -> None:
        """Kill the process and start the next one, so that it is ready for the next call."""
        child.kill()
        gevent.spawn(child.reap)
        if not self._is_closed:
            self._child = None
            self.start()


class CallRunner(Protocol):
    """The methods of a sandbox process that `SandboxPool` calls. SandboxProcess implements them."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def call_frame(self, frame: bytes) -> Reply: ...


class SandboxPool:
    """A process for calls of any size, and a second one for small calls.

    So small calls never wait for large ones: a conversation of 15 MB takes a second to render, and
    only one call is open per process. Calls run in the first process in the order in which they
    arrive. While it has large calls, small ones go to the second process. It starts with the first
    large call, so a server without such calls has one process.

    first   runs calls of any size
    second  runs small calls while `first` has large ones
    """

    def __init__(self, first: CallRunner | None = None, second: CallRunner | None = None) -> None:
        self.first = SandboxProcess() if first is None else first
        self.second = SandboxProcess() if second is None else second
        #: Number of large calls that wait or run in the first process.
        self._num_large = 0

    def start(self) -> None:
        """Start the first process before the first call, without waiting until it is ready."""
        self.first.start()

    def close(self) -> None:
        """End the processes. Open calls fail. May be called twice."""
        self.first.close()
        self.second.close()

    def call(self, call: Call) -> Reply:
        """Send a call and return its reply. Raises LimitExceeded."""
        frame = frame_of(call)
        if len(frame) <= SMALL_BYTES:
            process = self.second if self._num_large else self.first
            return process.call_frame(frame)
        self._num_large += 1
        try:
            self.second.start()
            return self.first.call_frame(frame)
        finally:
            self._num_large -= 1


class _Child:
    """One process, and the gateway's end of the socket to it (a file descriptor)."""

    def __init__(self, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self._fd = ours.detach()
        os.set_blocking(self._fd, False)
        os.set_blocking(theirs.fileno(), True)  # gevent makes its sockets non-blocking
        self.num_calls = 0
        self.has_sent_last = False  # whether the process has sent its last reply
        self._status: int | None = None  # exit status, as waitpid returns it
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", MODULE, *arguments],
                {name: os.environ[name] for name in _INHERITED if name in os.environ} | _ADDED,
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

    def call(self, frame: bytes, wall_s: float) -> FullReply:
        """Return the reply to a call. Raises _Ended if the process ends or exceeds `wall_s`."""
        deadline = time.monotonic() + wall_s
        self.num_calls += 1
        try:
            self._write(frame, deadline)
            size, raw_size, self.has_sent_last = sizes_of(self._read(HEAD_BYTES, deadline))
            reply: Reply = decode_reply(self._read(size, deadline))
            return FullReply(reply, memoryview(self._read(raw_size, deadline)))
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
        """Return the exception that says how the process ended."""
        status = self._status
        if status is None or not os.WIFSIGNALED(status):
            return _Ended("its process ended by itself")
        number = os.WTERMSIG(status)
        if number == signal.SIGPROF:
            return _Ended("it takes too much time", is_final=True)
        return _Ended(f"its process was ended by {signal.Signals(number).name}")

    def kill(self) -> None:
        """Kill the process. If a greenlet waits for a reply, its call ends with an error."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait until the process has ended. Call this after `kill`, or if it closed its socket."""
        while self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another handler of SIGCHLD has reaped the process
                pid, status = self.pid, 0
            if pid:
                self._status = status
            else:
                gevent.sleep(0.002)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _left(deadline: float) -> float:
    """Return the seconds until `deadline`, at least 0."""
    return max(deadline - time.monotonic(), 0.0)
