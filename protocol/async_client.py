"""The asyncio client library: `protocol.client` for programs with an event loop.

    from protocol.async_client import AsyncClient

    async with AsyncClient() as client:
        async for output in client.generate([504, 3575, 282, 4649], max_tokens=16):
            print(output.tokens, output.finish)

An `AsyncClient` belongs to the event loop in which it was started. Many generations may be open at
once. Leaving a generation early (break, close, garbage collection) aborts it. `AsyncEngine` is an
alias of `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import zmq

from protocol import sockets, wire
from protocol.client import params_from
from protocol.cluster_key import read_cluster_key
from protocol.errors import EngineNotReady, WireError, error_from
from protocol.grammar import Grammar
from protocol.messages import (
    AbortByLabel,
    Aborted,
    Accepted,
    Drain,
    EngineStatus,
    GetStatus,
    Hello,
    Limits,
    Output,
    Ping,
    Profile,
    Profiled,
    Refused,
    ToClient,
    ToEngine,
)
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams
from protocol.session import RequestReport, Session
from protocol.stats import EngineStats

TICK_S = 0.25
_MAX_MESSAGES_PER_TURN = 256


class AsyncGeneration(AsyncIterator[Output]):
    """The answer to one prompt, as a stream. Iteration ends after the output that carries `finish`.

    Raises, at the next step: RequestError if the engine refused the request, EngineError if it
    failed.
    """

    def __init__(self, request: int, reports: asyncio.Queue[Any], close: Any) -> None:
        self.request = request
        self._reports = reports
        self._ended = False
        self.close = weakref.finalize(self, close, request)
        self.close.atexit = False

    async def __anext__(self) -> Output:
        while not self._ended:
            report = await self._reports.get()
            if isinstance(report, Accepted):
                continue
            if isinstance(report, Refused):
                self._ended = True
                raise error_from(report.error)
            self._ended = report.finish is not None
            if report.finish == "error":
                raise error_from(report.error)
            return report  # type: ignore[no-any-return]
        raise StopAsyncIteration

    async def tokens(self) -> list[int]:
        """Wait for the end. Return all token ids that were not iterated over yet."""
        return [token async for output in self for token in output.tokens]


class AsyncClient:
    """A connection to a running engine, from `start` (or `async with`) to `close`.

    address       the address printed by `tidegate serve`; default: the engine of the server on port
                  8000
    wait_s        seconds to wait for the engine to be ready, before EngineNotReady
    cluster_key   file with the cluster key, which TCP addresses need

    Raises ValueError if the address or the file cannot be used.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "client",
        wait_s: float = 10.0,
        cluster_key: str = "",
    ) -> None:
        self._address = address or sockets.engine_address()
        self._key = read_cluster_key(cluster_key)
        sockets.check_address(self._address, self._key)
        self._wait_s = wait_s
        self._session = Session(name)
        self._queues: dict[int, asyncio.Queue[Any]] = {}
        self._outbox: deque[ToEngine] = deque()
        self._decoder: wire.Decoder[ToClient] = wire.Decoder(ToClient)
        self._ready = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Connect, and wait until the engine is ready."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pair = sockets.connect_monitored(self._context, self._address, self._key)
        self._socket, self._monitor = pair
        self._fds = [int(socket.getsockopt(zmq.FD)) for socket in pair]
        for fd in self._fds:
            self._loop.add_reader(fd, self._receive_pending)
        self._tick()
        try:
            async with asyncio.timeout(self._wait_s):
                await self._ready.wait()
        except TimeoutError:
            await self.close()
            raise EngineNotReady(f"no engine answered at {self._address}") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect; open requests are aborted. May be called twice."""
        if self._loop is None or self._ticking is None:
            return
        self._ticking.cancel()
        self._ticking = None
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

    @property
    def model(self) -> ModelCard:
        assert self._session.model is not None
        return self._session.model

    @property
    def limits(self) -> Limits:
        assert self._session.limits is not None
        return self._session.limits

    @property
    def stats(self) -> EngineStats:
        """As of the last heartbeat, at most about a second old."""
        return self._session.stats

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        priority: int = 0,
        grammar: Grammar | None = None,
        labels: Sequence[str] = (),
        timeout_s: float = 0.0,
        queue_timeout_s: float = 0.0,
        **options: Any,
    ) -> AsyncGeneration:
        """Start a generation. Give the sampling parameters as `params`, or its fields as
        keywords.
        """
        message = self._session.generate(
            prompt,
            params_from(params, options),
            namespace=namespace,
            priority=priority,
            grammar=grammar,
            labels=list(labels),
            timeout_s=timeout_s,
            queue_timeout_s=queue_timeout_s,
        )
        reports = self._open(message.request, message)
        return AsyncGeneration(message.request, reports, self._abort_from_anywhere)

    async def abort_by_label(self, names: Sequence[str], *, everything: bool = False) -> Aborted:
        """Abort every request with one of these names (a label, or a name from EngineStatus), or
        all requests, whichever client sent them.

        Raises EngineError if there is no engine, or it is lost before it answers.
        """
        report = await self._request_reply(
            self._session.abort_by_label(names, everything=everything)
        )
        assert isinstance(report, Aborted)
        return report

    async def get_status(self, max_rows: int = 100) -> EngineStatus:
        """Return the status of the engine, with at most `max_rows` requests, the oldest first.

        Raises EngineError if there is no engine, or it is lost before it answers.
        """
        report = await self._request_reply(self._session.get_status(max_rows))
        assert isinstance(report, EngineStatus)
        return report

    async def profile(self, steps: int, directory: str, *, wait_s: float | None = None) -> Profiled:
        """Record the next `steps` steps of the worker, as a Chrome trace in `directory` on the
        engine machine. Waits until the file is written; without requests there are no steps.
        Cancelling the wait ends the recording.

        Raises InvalidRequest if another recording is running or `directory` is not allowed,
        EngineError if recording failed or there is no engine, TimeoutError after `wait_s`.
        """
        message = self._session.profile(steps, directory)
        try:
            async with asyncio.timeout(wait_s):
                report = await self._request_reply(message)
        except BaseException as error:
            self._abort(message.request)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no profile after {wait_s:g} s") from None
            raise
        assert isinstance(report, Profiled)
        return report

    async def drain(self) -> None:
        """Make the engine finish its requests, refuse new ones, and exit."""
        self._send(Drain())

    async def _request_reply(self, message: AbortByLabel | GetStatus | Profile) -> Any:
        """Send the message and wait for its only reply. Raises the error that the engine
        reports.
        """
        report = await self._open(message.request, message).get()
        if isinstance(report, Aborted | EngineStatus | Profiled):
            return report
        raise error_from(report.error)

    def _open(self, request: int, message: ToEngine) -> asyncio.Queue[Any]:
        reports: asyncio.Queue[Any] = asyncio.Queue()
        self._queues[request] = reports
        self._send(message)
        return reports

    def _abort_from_anywhere(self, request: int) -> None:
        """Abort from any thread, as garbage collection does, even after the loop has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, request)

    def _abort(self, request: int) -> None:
        self._queues.pop(request, None)
        message = self._session.abort(request)
        if message is not None and self._ticking is not None:
            self._send(message)

    # ---- the socket: its file descriptor is edge-triggered, and sending consumes the edge

    def _send(self, message: ToEngine) -> None:
        self._outbox.append(message)
        self._send_queued()
        assert self._loop is not None
        self._loop.call_soon(self._receive_pending)

    def _send_queued(self) -> None:
        while self._outbox:
            try:
                self._socket.send_multipart(wire.encode(self._outbox[0]), zmq.NOBLOCK)
            except zmq.Again:  # the engine does not read; drop heartbeats, which are repeated
                kept = (m for m in self._outbox if not isinstance(m, Hello | Ping))
                self._outbox = deque(kept)
                return
            self._outbox.popleft()

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
                    pass  # its last messages give the reason
                self._deliver(self._session.on_disconnected())

    def _receive(self, max_messages: int) -> bool:
        """Receive up to `max_messages`. Return whether these were all."""
        for _ in range(max_messages):
            try:
                message = self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return True
            except WireError:
                continue  # an incompatible engine shows up as silence
            was_ready = self._session.is_ready
            self._deliver(self._session.receive(message, time.monotonic()))
            if self._session.is_ready and not was_ready:
                self._send_heartbeat()  # a Ping, whose Pong brings the stats
            if self._session.has_stats:
                self._ready.set()
        return False

    def _deliver(self, reports: list[RequestReport]) -> None:
        for request, report in reports:
            reports_queue = self._queues.get(request)
            if reports_queue is not None:
                reports_queue.put_nowait(report)
                if request not in self._session.open:
                    del self._queues[request]


AsyncEngine = AsyncClient
"""Alias: the former name of `AsyncClient`."""
