"""The asyncio client library: `protocol.client` for programs with an event loop.

    from protocol.async_client import AsyncEngine

    async with AsyncEngine() as engine:
        async for output in engine.generate([504, 3575, 282, 4649], max_tokens=16):
            print(output.tokens, output.finish)

An `AsyncEngine` belongs to the event loop in which it was started. Many generations may be open at
once. Leaving a generation early (break, close, garbage collection) aborts it.
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
from protocol.session import News, Session
from protocol.stats import EngineStats

TICK_S = 0.25
_MAX_MESSAGES_PER_TURN = 256


class AsyncGeneration(AsyncIterator[Output]):
    """The answer to one prompt, as it comes. Iterating ends after the output that carries `finish`.

    Raises, on the next step: RequestError where the engine refused the request, EngineError where
    it failed.
    """

    def __init__(self, request: int, news: asyncio.Queue[Any], close: Any) -> None:
        self.request = request
        self._news = news
        self._ended = False
        self.close = weakref.finalize(self, close, request)
        self.close.atexit = False

    async def __anext__(self) -> Output:
        while not self._ended:
            report = await self._news.get()
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
        """Wait for the end; all token ids that were not yet iterated over."""
        return [token async for output in self for token in output.tokens]


class AsyncEngine:
    """A connection to a running engine, from `start` (or `async with`) to `close`.

    address       as printed by `tidegate serve`; default: the engine of the server on port 8000
    wait_s        how long to wait for the engine to be ready; EngineNotReady after that
    cluster_key   the file with the key of the engine's cluster, without which TCP is not spoken

    Raises ValueError where the address or the file cannot be used.
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
        watched = sockets.connect_watched(self._context, self._address, self._key)
        self._socket, self._connection = watched
        self._files = [int(socket.getsockopt(zmq.FD)) for socket in watched]
        for file in self._files:
            self._loop.add_reader(file, self._turn)
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
        """Leave; what is open is aborted. Safe to call twice."""
        if self._loop is None or self._ticking is None:
            return
        self._ticking.cancel()
        self._ticking = None
        for file in self._files:
            self._loop.remove_reader(file)
        self._outbox.append(self._session.leave())
        self._send_queued()
        sockets.close_watched(self._socket, self._connection)
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
        """Start a generation; `options` are fields of SamplingParams, as an alternative to
        `params`.
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
        news = self._open(message.request, message)
        return AsyncGeneration(message.request, news, self._abort_from_anywhere)

    async def abort_named(self, names: Sequence[str], *, everything: bool = False) -> Aborted:
        """End every request that is called so (a label, or its name in a View), or all there are,
        whichever client asked for it.

        Raises EngineError where there is no engine, or it is lost before it has answered.
        """
        report = await self._ask(self._session.abort_named(names, everything=everything))
        assert isinstance(report, Aborted)
        return report

    async def look(self, most: int = 100) -> EngineStatus:
        """What the engine does now, with `most` of the requests that have been open for longest.

        Raises EngineError where there is no engine, or it is lost before it has answered.
        """
        report = await self._ask(self._session.look(most))
        assert isinstance(report, EngineStatus)
        return report

    async def profile(self, steps: int, directory: str, *, wait_s: float | None = None) -> Profiled:
        """Record the worker's next `steps` steps, as a Chrome trace in `directory` of the engine's
        machine. Waits until it is written, so perhaps for requests that make steps; cancelling the
        wait ends it.

        Raises InvalidRequest where another is being made or the directory cannot be meant,
        EngineError where it failed or there is no engine, TimeoutError after `wait_s`.
        """
        message = self._session.profile(steps, directory)
        try:
            async with asyncio.timeout(wait_s):
                report = await self._ask(message)
        except BaseException as error:
            self._abort(message.request)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no profile after {wait_s:g} s") from None
            raise
        assert isinstance(report, Profiled)
        return report

    async def drain(self) -> None:
        """Ask the engine to finish what it has, refuse what is new, and exit."""
        self._send(Drain())

    async def _ask(self, message: AbortByLabel | GetStatus | Profile) -> Any:
        """A question that has one answer: that. Raises what the engine says instead."""
        report = await self._open(message.request, message).get()
        if isinstance(report, Aborted | EngineStatus | Profiled):
            return report
        raise error_from(report.error)

    def _open(self, request: int, message: ToEngine) -> asyncio.Queue[Any]:
        news: asyncio.Queue[Any] = asyncio.Queue()
        self._queues[request] = news
        self._send(message)
        return news

    def _abort_from_anywhere(self, request: int) -> None:
        """Garbage is collected in any thread, and perhaps when the loop has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, request)

    def _abort(self, request: int) -> None:
        self._queues.pop(request, None)
        message = self._session.abort(request)
        if message is not None and self._ticking is not None:
            self._send(message)

    # ---- the socket: its file says only once that something happened, and sending swallows that

    def _send(self, message: ToEngine) -> None:
        self._outbox.append(message)
        self._send_queued()
        assert self._loop is not None
        self._loop.call_soon(self._turn)

    def _send_queued(self) -> None:
        while self._outbox:
            try:
                self._socket.send_multipart(wire.encode(self._outbox[0]), zmq.NOBLOCK)
            except zmq.Again:  # it does not read: keep all but heartbeats, which are repeated
                kept = (m for m in self._outbox if not isinstance(m, Hello | Ping))
                self._outbox = deque(kept)
                return
            self._outbox.popleft()

    def _tick(self) -> None:
        assert self._loop is not None
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        self._keep_lease()
        self._turn()

    def _keep_lease(self) -> None:
        messages, news = self._session.tick(time.monotonic())
        self._outbox.extend(messages)
        self._hand_out(news)
        self._send_queued()

    def _turn(self) -> None:
        """Take in what has come, a bounded part of it at a time."""
        if self._ticking is None:
            return
        if not self._receive(_MAX_MESSAGES_PER_TURN):
            assert self._loop is not None
            self._loop.call_soon(self._turn)
        for is_there in sockets.connection_news(self._connection):
            if is_there:
                self._session.connected()
                self._keep_lease()
            else:
                while not self._receive(_MAX_MESSAGES_PER_TURN):
                    pass  # its last words say more
                self._hand_out(self._session.disconnected())

    def _receive(self, most: int) -> bool:
        """Whether that was all."""
        for _ in range(most):
            try:
                message = self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return True
            except WireError:
                continue  # an end that speaks otherwise is noticed by its silence
            was_ready = self._session.is_ready
            self._hand_out(self._session.receive(message, time.monotonic()))
            if self._session.is_ready and not was_ready:
                self._keep_lease()  # a Ping, for its stats
            if self._session.has_stats:
                self._ready.set()
        return False

    def _hand_out(self, news: list[News]) -> None:
        for request, report in news:
            box = self._queues.get(request)
            if box is not None:
                box.put_nowait(report)
                if request not in self._session.open:
                    del self._queues[request]
