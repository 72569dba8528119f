"""The asyncio client library: `protocol.sdk.client` for programs with an event loop.

    from protocol.sdk.async_client import AsyncClient

    async with AsyncClient() as client:
        async for output in client.generate([504, 3575, 282, 4649], max_tokens=16):
            print(output.tokens, output.finish)

An `AsyncClient` belongs to the event loop in which it was started. Many generations may be open at
once. Leaving a generation early (break, close, garbage collection) aborts it. `AsyncEngine` is an
alias of `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import zmq

from protocol.engine.adapters import AdapterInfo
from protocol.engine.messages import (
    Aborted,
    Drain,
    EngineStatus,
    Output,
    Profiled,
    RequestTimelines,
)
from protocol.sdk.client import BaseClient, Command, OpenGeneration, checked_reply
from protocol.wire import sockets
from protocol.wire.errors import WireError

TICK_S = 0.25
"""Seconds between two calls of `Session.tick`."""
_MAX_MESSAGES_PER_TURN = 256
"""Most messages received before other tasks of the event loop run."""


class AsyncGeneration(OpenGeneration, AsyncIterator[Output]):
    """The answer to one prompt, as an iterator over its outputs. The last one has `finish` set.

    The next step of the iteration raises RequestError if the engine has refused the request,
    EngineError if the request has failed.
    """

    async def __anext__(self) -> Output:
        while not self._ended:
            if (output := self._output(await self._reports.get())) is not None:
                return output
        raise StopAsyncIteration

    async def tokens(self) -> list[int]:
        """Wait until the generation ends. Return all token ids that were not iterated over yet."""
        return [token async for output in self for token in output.tokens]


class AsyncClient(BaseClient[AsyncGeneration]):
    """A connection to a running engine, from `start` (or `async with`) until `close`.

    `BaseClient` describes the arguments.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _ticking: asyncio.TimerHandle | None = None  # None: not connected

    async def start(self) -> None:
        """Connect, and wait until the engine is ready. Raises EngineNotReady after `wait_s`."""
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._connect()
        pair = (self._socket, self._monitor)
        self._fds = [int(socket.getsockopt(zmq.FD)) for socket in pair]
        for fd in self._fds:
            self._loop.add_reader(fd, self._receive_pending)
        self._tick()
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.close)
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._ready.wait()
            except TimeoutError:
                raise self._no_answer() from None
            on_failure.pop_all()

    async def close(self) -> None:
        """Disconnect, which aborts the open requests. May be called twice."""
        if self._loop is None or self._ticking is None:
            return
        self._ticking.cancel()
        self._ticking = None
        self._is_closed = True
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._outbox.append(self._session.goodbye())
        self._send_queued()
        sockets.close_monitored(self._socket, self._monitor)
        await self._loop.run_in_executor(None, self._context.term)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _new_generation(self, request: int, reports: Any) -> AsyncGeneration:
        return AsyncGeneration(request, reports, self._abort_threadsafe)

    def _new_queue(self) -> Any:
        return asyncio.Queue()

    async def abort_by_label(self, names: Sequence[str], *, everything: bool = False) -> Aborted:
        """Abort requests of any client by name, as `Client.abort_by_label` does."""
        aborted: Aborted = await self._request_reply(
            lambda: self._session.abort_by_label(names, everything=everything)
        )
        return aborted

    async def get_status(
        self, max_rows: int = 100, *, after_step: int | None = None
    ) -> EngineStatus:
        """Return the status of the engine, as `Client.get_status` does."""
        status: EngineStatus = await self._request_reply(
            lambda: self._session.get_status(max_rows, after_step)
        )
        return status

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load a LoRA adapter; see `Client.load_adapter`."""
        changed = await self._request_reply(lambda: self._session.load_adapter(name, path))
        return changed.adapter  # type: ignore[no-any-return]

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Unload a LoRA adapter; see `Client.unload_adapter`."""
        changed = await self._request_reply(lambda: self._session.unload_adapter(name))
        return changed.adapter  # type: ignore[no-any-return]

    async def get_timelines(
        self, names: Sequence[str], *, are_beginnings: bool = False
    ) -> RequestTimelines:
        """Return the timelines of requests, as `Client.get_timelines` does."""
        timelines: RequestTimelines = await self._request_reply(
            lambda: self._session.get_timeline(names, are_beginnings=are_beginnings)
        )
        return timelines

    async def profile(self, steps: int, directory: str, *, wait_s: float | None = None) -> Profiled:
        """Record steps, as `Client.profile` does. Cancelling this coroutine ends the recording."""
        request, reports = self._open(lambda: self._session.profile(steps, directory))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._abort, request)
            try:
                async with asyncio.timeout(wait_s):
                    report = await reports.get()
            except TimeoutError:
                raise TimeoutError(f"no profile after {wait_s:g} s") from None
            on_failure.pop_all()
        profiled: Profiled = checked_reply(report)
        return profiled

    async def drain(self) -> None:
        """Make the engine finish its open requests, refuse new ones, and exit."""
        self._send(Drain())

    async def _request_reply(self, make_message: Callable[[], Command]) -> Any:
        _, reports = self._open(make_message)
        return checked_reply(await reports.get())

    def _abort_threadsafe(self, request: int) -> None:
        """Abort `request` from any thread, because garbage collection may run in any thread. Do
        nothing if the event loop was closed.
        """
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, request)

    # ---- the socket. Its file descriptor is edge-triggered, and sending may consume the edge of a
    # message that has arrived. So each send is followed by an attempt to receive.

    def _flush(self) -> None:
        self._send_queued()
        assert self._loop is not None
        self._loop.call_soon(self._receive_pending)

    def _tick(self) -> None:
        assert self._loop is not None
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        self._send_heartbeat()
        self._receive_pending()

    def _send_heartbeat(self) -> None:
        messages, ended = self._session.tick(time.monotonic())
        self._outbox.extend(messages)
        self._deliver(ended)
        self._send_queued()

    def _receive_pending(self) -> None:
        """Receive the messages that have arrived, a bounded number at a time."""
        if self._ticking is None:
            return
        if not self._receive(_MAX_MESSAGES_PER_TURN):
            assert self._loop is not None
            self._loop.call_soon(self._receive_pending)
        for is_connected in sockets.read_connection_events(self._monitor):
            if is_connected:
                self._session.on_connected()
                self._send_heartbeat()
            else:
                while not self._receive(_MAX_MESSAGES_PER_TURN):
                    pass  # the engine's last messages give the reason
                self._deliver(self._session.on_disconnected())

    def _receive(self, max_messages: int) -> bool:
        """Receive up to `max_messages` messages. Return whether no more are waiting."""
        for _ in range(max_messages):
            try:
                message = self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return True
            except WireError:
                continue  # an incompatible engine is treated as a silent one
            was_ready = self._session.is_ready
            self._deliver(self._session.receive(message, time.monotonic()))
            if self._session.is_ready and not was_ready:
                self._send_heartbeat()  # a Ping, whose Pong brings the stats
            if self._session.has_stats:
                self._ready.set()
        return False


AsyncEngine = AsyncClient
"""Alias: the former name of `AsyncClient`."""
