"""The blocking client library: token ids in, token ids out.

    from protocol.client import Engine

    with Engine() as engine:
        for output in engine.generate([504, 3575, 282, 4649], max_tokens=16):
            print(output.tokens, output.finish)

An `Engine` may be used from many threads, and many generations may be open at once: one background
thread owns the socket, each generation has its own queue. Leaving a generation early (break, close,
garbage collection) aborts it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import msgspec
import zmq

from protocol import sockets, wire
from protocol.cluster_key import read_cluster_key
from protocol.errors import EngineNotReady, InvalidRequest, WireError, error_from
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
    Profiled,
    Refused,
    ToClient,
    ToEngine,
)
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams
from protocol.session import News, Session
from protocol.stats import EngineStats


class Generation(Iterator[Output]):
    """The answer to one prompt, as it comes. Iterating ends after the output that carries `finish`.

    Raises, on the next step: RequestError where the engine refused the request, EngineError where
    it failed.
    """

    def __init__(self, request: int, news: queue.SimpleQueue[Any], close: Any) -> None:
        self.request = request
        self._news = news
        self._ended = False
        self.close = weakref.finalize(self, close, request)
        self.close.atexit = False

    def __next__(self) -> Output:
        while not self._ended:
            report = self._news.get()
            if isinstance(report, Accepted):
                continue
            if isinstance(report, Refused):
                self._ended = True
                raise error_from(report.error)
            self._ended = report.finish is not None
            if report.finish == "error":
                raise error_from(report.error)
            return report  # type: ignore[no-any-return]
        raise StopIteration

    def tokens(self) -> list[int]:
        """Wait for the end; all token ids that were not yet iterated over."""
        return [token for output in self for token in output.tokens]


def params_from(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """Return `params`, or the parameters whose fields are `options`. Raises InvalidRequest."""
    if params is None:
        try:
            return msgspec.convert(options, SamplingParams)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error)) from None
    if options:
        raise TypeError("give either params or its fields, not both")
    return params


class Engine:
    """A connection to a running engine.

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
        key = read_cluster_key(cluster_key)
        address = address or sockets.engine_address()
        self._session = Session(name)
        self._lock = threading.Lock()  # guards the session, the queues and the outbox
        self._queues: dict[int, queue.SimpleQueue[Any]] = {}
        self._outbox: deque[ToEngine] = deque()
        self._ready = threading.Event()
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._connection = sockets.connect_watched(self._context, address, key)
        self._wake_in, self._wake_out = self._wake_pair()
        self._thread = threading.Thread(target=self._run, name="tidegate-client", daemon=True)
        self._thread.start()
        if not self._ready.wait(wait_s):
            self.close()
            raise EngineNotReady(f"no engine answered at {address}")

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
    ) -> Generation:
        """Start a generation; `options` are fields of SamplingParams, as an alternative to
        `params`.
        """
        with self._lock:
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
            news = self._queues[message.request] = queue.SimpleQueue()
            self._outbox.append(message)
        self._wake()
        return Generation(message.request, news, self._abort)

    def abort_named(self, names: Sequence[str], *, everything: bool = False) -> Aborted:
        """End every request that is called so (a label, or its name in a View), or all there are,
        whichever client asked for it.

        Raises EngineError where there is no engine, or it is lost before it has answered.
        """
        report = self._ask(lambda: self._session.abort_named(names, everything=everything))
        assert isinstance(report, Aborted)
        return report

    def look(self, most: int = 100) -> EngineStatus:
        """What the engine does now, with `most` of the requests that have been open for longest.

        Raises EngineError where there is no engine, or it is lost before it has answered.
        """
        report = self._ask(lambda: self._session.look(most))
        assert isinstance(report, EngineStatus)
        return report

    def _ask(self, message_of: Callable[[], AbortByLabel | GetStatus]) -> Any:
        """A question that the engine answers at once: its answer. Raises what it says instead."""
        with self._lock:
            message = message_of()
            news = self._queues[message.request] = queue.SimpleQueue()
            self._outbox.append(message)
        self._wake()
        report = news.get()
        if isinstance(report, Aborted | EngineStatus):
            return report
        raise error_from(report.error)

    def profile(self, steps: int, directory: str, *, wait_s: float | None = None) -> Profiled:
        """Record the worker's next `steps` steps, as a Chrome trace in `directory` of the engine's
        machine. Waits until it is written, so perhaps for requests that make steps; whoever stops
        waiting (KeyboardInterrupt) ends it.

        Raises InvalidRequest where another is being made or the directory cannot be meant,
        EngineError where it failed or there is no engine, TimeoutError after `wait_s`.
        """
        with self._lock:
            message = self._session.profile(steps, directory)
            news = self._queues[message.request] = queue.SimpleQueue()
            self._outbox.append(message)
        self._wake()
        try:
            report = news.get(timeout=wait_s)
        except BaseException as error:
            self._abort(message.request)
            if isinstance(error, queue.Empty):
                raise TimeoutError(f"no profile after {wait_s:g} s") from None
            raise
        if isinstance(report, Profiled):
            return report
        raise error_from(report.error)

    def drain(self) -> None:
        """Ask the engine to finish what it has, refuse what is new, and exit."""
        with self._lock:
            self._outbox.append(Drain())
        self._wake()

    def close(self) -> None:
        """Leave; what is open is aborted. Safe to call twice."""
        if self._closing:
            return
        with self._lock:
            self._closing = True
            self._outbox.append(self._session.leave())
        self._wake()
        self._thread.join()
        sockets.close_watched(self._socket, self._connection)
        for socket in (self._wake_in, self._wake_out):
            socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _abort(self, request: int) -> None:
        with self._lock:
            self._queues.pop(request, None)
            message = self._session.abort(request)
            if message is None or self._closing:
                return
            self._outbox.append(message)
        self._wake()

    def _wake_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        address = f"inproc://{id(self)}"
        sink = self._context.socket(zmq.PULL)
        sink.bind(address)
        source = self._context.socket(zmq.PUSH)
        source.connect(address)
        self._wake_lock = threading.Lock()  # a ZeroMQ socket is for one thread at a time
        return source, sink

    def _wake(self) -> None:
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):
            self._wake_in.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        """The thread that owns the socket: send what is queued, hand out what comes, keep the
        lease.
        """
        decoder: wire.Decoder[ToClient] = wire.Decoder(ToClient)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for socket in (self._wake_out, self._connection):
            poller.register(socket, zmq.POLLIN)
        while True:
            with self._lock:
                if not self._closing:  # a tick after Goodbye would greet the engine again
                    messages, news = self._session.tick(time.monotonic())
                    self._outbox.extend(messages)
                    self._hand_out(news)
                self._send_queued()
                if self._closing:
                    return
            for socket, _ in poller.poll(250):
                if socket is self._wake_out:
                    self._wake_out.recv()
                elif socket is self._connection:
                    self._hear_connection(decoder)
                else:
                    self._receive(decoder)

    def _hear_connection(self, decoder: wire.Decoder[ToClient]) -> None:
        for is_there in sockets.connection_news(self._connection):
            while not is_there and self._socket.poll(0):
                self._receive(decoder)  # its last words say more
            with self._lock:
                if is_there:
                    self._session.connected()
                else:
                    self._hand_out(self._session.disconnected())

    def _receive(self, decoder: wire.Decoder[ToClient]) -> None:
        try:
            message = decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return  # read already, when the connection broke
        except WireError:
            return  # an end that speaks otherwise is noticed by its silence
        with self._lock:
            self._hand_out(self._session.receive(message, time.monotonic()))
            if self._session.has_stats:
                self._ready.set()

    def _hand_out(self, news: list[News]) -> None:
        for request, report in news:
            box = self._queues.get(request)
            if box is not None:
                box.put(report)
                if request not in self._session.open:
                    del self._queues[request]

    def _send_queued(self) -> None:
        while self._outbox:
            try:
                self._socket.send_multipart(wire.encode(self._outbox[0]), zmq.NOBLOCK)
            except zmq.Again:  # it does not read: keep all but heartbeats, which are repeated
                kept = (
                    message for message in self._outbox if not isinstance(message, Hello | Ping)
                )
                self._outbox = deque(kept)
                return
            self._outbox.popleft()
