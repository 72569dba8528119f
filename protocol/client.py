"""The blocking client library: token ids in, token ids out.

    from protocol.client import Client

    with Client() as client:
        for output in client.generate([504, 3575, 282, 4649], max_tokens=16):
            print(output.tokens, output.finish)

A `Client` may be used by many threads, with many open generations. One background thread owns the
socket, and each generation has its own queue. Leaving a generation early (break, close, garbage
collection) aborts it. `Engine` is an alias of `Client`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Self, TypeVar

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
    Generate,
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

AnyGeneration = TypeVar("AnyGeneration")


class OpenGeneration:
    """The state of an open generation: its request, and the queue of the reports on it."""

    def __init__(self, request: int, reports: Any, close: Callable[[int], None]) -> None:
        self.request = request
        self._reports = reports
        self._ended = False
        self.close = weakref.finalize(self, close, request)
        self.close.atexit = False

    def _output(self, report: Any) -> Output | None:
        """Return the output of a report; None for Accepted. Raises the error that it carries."""
        if isinstance(report, Accepted):
            return None
        self._ended = isinstance(report, Refused) or report.finish is not None
        if isinstance(report, Refused) or report.finish == "error":
            raise error_from(report.error)
        return report  # type: ignore[no-any-return]


class Generation(OpenGeneration, Iterator[Output]):
    """The answer to one prompt, as a stream. Iteration ends after the output that carries `finish`.

    Raises, at the next step: RequestError if the engine refused the request, EngineError if it
    failed.
    """

    def __next__(self) -> Output:
        while not self._ended:
            if (output := self._output(self._reports.get())) is not None:
                return output
        raise StopIteration

    def tokens(self) -> list[int]:
        """Wait for the end. Return all token ids that were not iterated over yet."""
        return [token for output in self for token in output.tokens]


def params_from(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """Return `params`, or parameters made from `options`. Raises InvalidRequest."""
    if params is None:
        try:
            return msgspec.convert(options, SamplingParams)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error)) from None
    if options:
        raise TypeError("give either params or its fields, not both")
    return params


class BaseClient(ABC, Generic[AnyGeneration]):
    """Base of the blocking and the asyncio client: a session, and queues of messages."""

    _socket: zmq.Socket[bytes]
    _is_closed = False

    def __init__(self, name: str) -> None:
        self._session = Session(name)
        self._lock: AbstractContextManager[Any] = nullcontext()  # guards all three
        self._queues: dict[int, Any] = {}
        self._outbox: deque[ToEngine] = deque()

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
    ) -> AnyGeneration:
        """Start a generation. Sampling parameters are given as `params`, or as its fields."""
        request, reports = self._open(
            lambda: self._session.generate(
                prompt,
                params_from(params, options),
                namespace=namespace,
                priority=priority,
                grammar=grammar,
                labels=list(labels),
                timeout_s=timeout_s,
                queue_timeout_s=queue_timeout_s,
            )
        )
        return self._generation(request, reports)

    @abstractmethod
    def _generation(self, request: int, reports: Any) -> AnyGeneration: ...

    @abstractmethod
    def _new_queue(self) -> Any: ...

    @abstractmethod
    def _flush(self) -> None:
        """Send the outbox, or make the thread that owns the socket send it."""

    def _open(
        self, make_message: Callable[[], Generate | AbortByLabel | GetStatus | Profile]
    ) -> tuple[int, Any]:
        """Send a message that opens a request. Return the request and the queue of its reports."""
        with self._lock:
            message = make_message()
            reports = self._queues[message.request] = self._new_queue()
            self._outbox.append(message)
        self._flush()
        return message.request, reports

    def _send(self, message: ToEngine) -> None:
        with self._lock:
            self._outbox.append(message)
        self._flush()

    def _abort(self, request: int) -> None:
        with self._lock:
            self._queues.pop(request, None)
            message = self._session.abort(request)
            if message is None or self._is_closed:
                return
            self._outbox.append(message)
        self._flush()

    def _send_queued(self) -> None:
        while self._outbox:
            try:
                self._socket.send_multipart(wire.encode(self._outbox[0]), zmq.NOBLOCK)
            except zmq.Again:  # the engine does not read; drop heartbeats, which are repeated
                kept = (m for m in self._outbox if not isinstance(m, Hello | Ping))
                self._outbox = deque(kept)
                return
            self._outbox.popleft()

    def _deliver(self, reports: list[RequestReport]) -> None:
        for request, report in reports:
            reports_queue = self._queues.get(request)
            if reports_queue is not None:
                reports_queue.put_nowait(report)
                if request not in self._session.open:
                    del self._queues[request]


def checked_reply(report: Any) -> Any:
    """Return the only reply to a command. Raises the error that the engine reports."""
    if isinstance(report, Aborted | EngineStatus | Profiled):
        return report
    raise error_from(report.error)


class Client(BaseClient[Generation]):
    """A connection to a running engine.

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
        key = read_cluster_key(cluster_key)
        address = address or sockets.engine_address()
        super().__init__(name)
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._monitor = sockets.connect_monitored(self._context, address, key)
        self._wake_in, self._wake_out = self._wake_pair()
        self._thread = threading.Thread(target=self._run, name="tidegate-client", daemon=True)
        self._thread.start()
        if not self._ready.wait(wait_s):
            self.close()
            raise EngineNotReady(f"no engine answered at {address}")

    def _generation(self, request: int, reports: Any) -> Generation:
        return Generation(request, reports, self._abort)

    def _new_queue(self) -> Any:
        return queue.SimpleQueue()

    def abort_by_label(self, names: Sequence[str], *, everything: bool = False) -> Aborted:
        """Abort every request with one of these names (a label, or a name from EngineStatus), or
        all requests, whichever client sent them.

        Raises EngineError if there is no engine, or it is lost before it answers.
        """
        _, reports = self._open(lambda: self._session.abort_by_label(names, everything=everything))
        aborted: Aborted = checked_reply(reports.get())
        return aborted

    def get_status(self, max_rows: int = 100) -> EngineStatus:
        """Return the status of the engine, with at most `max_rows` requests, the oldest first.

        Raises EngineError if there is no engine, or it is lost before it answers.
        """
        _, reports = self._open(lambda: self._session.get_status(max_rows))
        status: EngineStatus = checked_reply(reports.get())
        return status

    def profile(self, steps: int, directory: str, *, wait_s: float | None = None) -> Profiled:
        """Record the next `steps` steps of the worker, as a Chrome trace in `directory` on the
        engine machine. Waits until the file is written; without requests there are no steps.
        Interrupting the wait (KeyboardInterrupt) ends the recording.

        Raises InvalidRequest if another recording is running or `directory` is not allowed,
        EngineError if recording failed or there is no engine, TimeoutError after `wait_s`.
        """
        request, reports = self._open(lambda: self._session.profile(steps, directory))
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._abort, request)
            try:
                report = reports.get(timeout=wait_s)
            except queue.Empty:
                raise TimeoutError(f"no profile after {wait_s:g} s") from None
            on_failure.pop_all()
        profiled: Profiled = checked_reply(report)
        return profiled

    def drain(self) -> None:
        """Make the engine finish its requests, refuse new ones, and exit."""
        self._send(Drain())

    def close(self) -> None:
        """Disconnect; open requests are aborted. May be called twice."""
        if self._is_closed:
            return
        with self._lock:
            self._is_closed = True
            self._outbox.append(self._session.goodbye())
        self._flush()
        self._thread.join()
        sockets.close_monitored(self._socket, self._monitor)
        for socket in (self._wake_in, self._wake_out):
            socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wake_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        address = f"inproc://{id(self)}"
        sink = self._context.socket(zmq.PULL)
        sink.bind(address)
        source = self._context.socket(zmq.PUSH)
        source.connect(address)
        self._wake_lock = threading.Lock()  # a ZeroMQ socket is for one thread at a time
        return source, sink

    def _flush(self) -> None:
        with self._wake_lock, contextlib.suppress(zmq.ZMQError):
            self._wake_in.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        """Own the socket, in a thread: send queued messages, deliver reports, keep the lease."""
        decoder: wire.Decoder[ToClient] = wire.Decoder(ToClient)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for socket in (self._wake_out, self._monitor):
            poller.register(socket, zmq.POLLIN)
        while True:
            with self._lock:
                if not self._is_closed:  # a tick after Goodbye would send Hello again
                    messages, ended = self._session.tick(time.monotonic())
                    self._outbox.extend(messages)
                    self._deliver(ended)
                self._send_queued()
                if self._is_closed:
                    return
            for socket, _ in poller.poll(250):
                if socket is self._wake_out:
                    self._wake_out.recv()
                elif socket is self._monitor:
                    self._check_connection(decoder)
                else:
                    self._receive(decoder)

    def _check_connection(self, decoder: wire.Decoder[ToClient]) -> None:
        for is_connected in sockets.read_connection_events(self._monitor):
            while not is_connected and self._socket.poll(0):
                self._receive(decoder)  # its last messages give the reason
            with self._lock:
                if is_connected:
                    self._session.on_connected()
                else:
                    self._deliver(self._session.on_disconnected())

    def _receive(self, decoder: wire.Decoder[ToClient]) -> None:
        try:
            message = decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return  # was read already, when the connection broke
        except WireError:
            return  # an incompatible engine shows up as silence
        with self._lock:
            self._deliver(self._session.receive(message, time.monotonic()))
            if self._session.has_stats:
                self._ready.set()


Engine = Client
"""Alias: the former name of `Client`."""
