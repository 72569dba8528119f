"""The blocking client library: token ids in, token ids out.

    from protocol.sdk.client import Client

    with Client() as client:
        for output in client.generate([504, 3575, 282, 4649], max_tokens=16):
            print(output.tokens, output.finish)

Many threads may use one `Client`, with many open generations. One background thread owns the
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

import zmq

from protocol.engine.adapters import AdapterInfo
from protocol.engine.attachments import AttachedTensor, Attachment, attachment_digest
from protocol.engine.grammar import Grammar
from protocol.engine.messages import (
    AbortByLabel,
    Aborted,
    Accepted,
    AdapterChanged,
    Drain,
    EngineStatus,
    Generate,
    GetStatus,
    GetTimeline,
    Hello,
    LoadAdapter,
    Output,
    Ping,
    Profile,
    Profiled,
    Refused,
    RequestTimelines,
    ToClient,
    ToEngine,
    UnloadAdapter,
)
from protocol.engine.sampling import SamplingParams, params_from
from protocol.engine.session import RequestReport, Session
from protocol.sdk.engine_of_client import EngineOfClient
from protocol.wire import codec, sockets
from protocol.wire.cluster_key import read_cluster_key
from protocol.wire.errors import EngineNotReady, WireError, error_from

AnyGeneration = TypeVar("AnyGeneration")
Command = AbortByLabel | GetStatus | GetTimeline | LoadAdapter | Profile | UnloadAdapter
"""A message that gets one reply."""


class OpenGeneration:
    """Base of `Generation` and `AsyncGeneration`: an open request, and the queue of its reports.

    close   aborts the request, unless it has ended
    """

    def __init__(self, request: int, reports: Any, close: Callable[[int], None]) -> None:
        self.request = request
        self._reports = reports
        self._ended = False
        self.close = weakref.finalize(self, close, request)
        self.close.atexit = False

    def _output(self, report: Any) -> Output | None:
        """Return `report` if it is an Output, None if it is Accepted, else raise its error."""
        if isinstance(report, Accepted):
            return None
        self._ended = isinstance(report, Refused) or report.finish is not None
        if isinstance(report, Refused) or report.finish == "error":
            raise error_from(report.error)
        return report  # type: ignore[no-any-return]


class Generation(OpenGeneration, Iterator[Output]):
    """The answer to one prompt, as an iterator over its outputs. The last one has `finish` set.

    The next step of the iteration raises RequestError if the engine has refused the request,
    EngineError if the request has failed.
    """

    def __next__(self) -> Output:
        while not self._ended:
            if (output := self._output(self._reports.get())) is not None:
                return output
        raise StopIteration

    def tokens(self) -> list[int]:
        """Wait until the generation ends. Return all token ids that were not iterated over yet."""
        return [token for output in self for token in output.tokens]


class BaseClient(EngineOfClient, ABC, Generic[AnyGeneration]):
    """Base of the blocking and the asyncio client: a session, and a queue of reports for each
    request.

    address       the address printed by `tidegate serve`; default: the engine of the server on port
                  8000
    name          name of this client, as the engine logs it
    wait_s        seconds to wait until the engine is ready, before EngineNotReady is raised
    cluster_key   file with the cluster key, which TCP addresses need

    Raises ValueError if the address or the file cannot be used, and PermissionError if the default
    address may be that of another user's engine.
    """

    _is_closed = False

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "client",
        wait_s: float = 10.0,
        cluster_key: str = "",
    ) -> None:
        self._address = address or sockets.checked_engine_address()
        self._key = read_cluster_key(cluster_key)
        sockets.check_address(self._address, self._key)
        self._wait_s = wait_s
        self._decoder: codec.Decoder[ToClient] = codec.Decoder(ToClient)
        self._session = Session(name)
        self._queues: dict[int, Any] = {}  # request -> queue of its reports
        self._outbox: deque[ToEngine] = deque()  # messages to send
        #: Guards the session, the queues and the outbox.
        self._lock: AbstractContextManager[Any] = nullcontext()

    def _connect(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._monitor = sockets.connect_monitored(
            self._context, self._address, self._key
        )

    def _no_answer(self) -> EngineNotReady:
        return EngineNotReady(f"no engine answered at {self._address}")

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
        adapter: str = "",
        attachments: Sequence[Attachment] = (),
        **options: Any,
    ) -> AnyGeneration:
        """Start a generation, and return it. See `Generate` for the meaning of the arguments.

        params    the sampling parameters; or
        options   fields of SamplingParams, in place of `params`

        Raises InvalidRequest for bad `options`, TypeError if both are given, EngineError if there
        is no engine.
        """
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
                adapter=adapter,
                attachments=list(attachments),
            )
        )
        return self._new_generation(request, reports)

    def attach(self, tensors: Sequence[AttachedTensor]) -> str:
        """Send an image, unless the engine has it, and return its digest. If a request that names
        it is refused with AttachmentMissing, call this again, and repeat the request."""
        digest = attachment_digest(tensors)
        if (message := self._session.attach(digest, list(tensors))) is not None:
            self._send(message)
        return digest

    @abstractmethod
    def _new_generation(self, request: int, reports: Any) -> AnyGeneration: ...

    @abstractmethod
    def _new_queue(self) -> Any: ...

    @abstractmethod
    def _flush(self) -> None:
        """Send the messages in the outbox, or wake up the thread that sends them."""

    def _open(
        self,
        make_message: Callable[[], Generate | Command],
    ) -> tuple[int, Any]:
        """Send the message that opens a request. Return its number and the queue of its reports."""
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
            self._queue_abort(request)
        self._flush()

    def _queue_abort(self, request: int) -> None:
        """Forget the queue of a request. If the request is open, queue its Abort."""
        self._queues.pop(request, None)
        message = self._session.abort(request)
        if message is not None and not self._is_closed:
            self._outbox.append(message)

    def _send_queued(self) -> None:
        while self._outbox:
            try:
                self._socket.send_multipart(codec.encode(self._outbox[0]), zmq.NOBLOCK)
            except zmq.Again:
                # The engine does not read. Drop heartbeats, because the next tick repeats them.
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
    """Return the reply of the engine to a command, or raise the error that it contains."""
    if isinstance(report, Aborted | AdapterChanged | EngineStatus | Profiled | RequestTimelines):
        return report
    raise error_from(report.error)


class Client(BaseClient[Generation]):
    """A connection to a running engine, from its creation until `close`. `BaseClient` describes the
    arguments. Creating a client waits until the engine is ready, and raises EngineNotReady after
    `wait_s` seconds."""

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "client",
        wait_s: float = 10.0,
        cluster_key: str = "",
    ) -> None:
        super().__init__(address, name=name, wait_s=wait_s, cluster_key=cluster_key)
        self._lock = threading.Lock()
        #: Requests that were closed, for `_run` to abort.
        self._closed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._connect()
        self._wake_in, self._wake_out = self._wake_pair()
        self._thread = threading.Thread(target=self._run, name="tidegate-client", daemon=True)
        self._thread.start()
        if not self._ready.wait(wait_s):
            self.close()
            raise self._no_answer()

    def _new_generation(self, request: int, reports: Any) -> Generation:
        return Generation(request, reports, self._abort_soon)

    def _new_queue(self) -> Any:
        return queue.SimpleQueue()

    def abort_by_label(self, names: Sequence[str], *, everything: bool = False) -> Aborted:
        """Abort requests of any client by name, and return which were aborted.

        names        labels, or names from EngineStatus; every request with one of them is aborted
        everything   abort all requests, and ignore `names`

        Raises EngineError if there is no engine, or if the engine is lost before it answers.
        """
        _, reports = self._open(lambda: self._session.abort_by_label(names, everything=everything))
        aborted: Aborted = checked_reply(reports.get())
        return aborted

    def get_status(self, max_rows: int = 100, *, after_step: int | None = None) -> EngineStatus:
        """Return the status of the engine, with at most `max_rows` requests, the oldest first.

        after_step   also report the steps after this one, as far as they are recorded

        Raises EngineError if there is no engine, or if the engine is lost before it answers."""
        _, reports = self._open(lambda: self._session.get_status(max_rows, after_step))
        status: EngineStatus = checked_reply(reports.get())
        return status

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load a LoRA adapter, and wait until it can be used.

        path   its directory on the worker's machine, relative to --lora-dir

        Raises InvalidRequest or UnknownModel if it cannot be loaded, EngineError if there is no
        engine.
        """
        _, reports = self._open(lambda: self._session.load_adapter(name, path))
        changed: AdapterChanged = checked_reply(reports.get())
        return changed.adapter

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Unload a LoRA adapter, and wait until its requests have ended and its memory is free.
        Raises UnknownModel if there is no such adapter, EngineError if there is no engine."""
        _, reports = self._open(lambda: self._session.unload_adapter(name))
        changed: AdapterChanged = checked_reply(reports.get())
        return changed.adapter

    def get_timelines(
        self, names: Sequence[str], *, are_beginnings: bool = False
    ) -> RequestTimelines:
        """Return the timelines of the open and recently ended requests of any client with one of
        these names, or with a name that begins so. Raises EngineError as `get_status` does."""
        _, reports = self._open(
            lambda: self._session.get_timeline(names, are_beginnings=are_beginnings)
        )
        timelines: RequestTimelines = checked_reply(reports.get())
        return timelines

    def profile(self, steps: int, directory: str, *, wait_s: float | None = None) -> Profiled:
        """Record the worker's next steps as a Chrome trace, and wait until its file is written.

        steps       number of steps to record; there are no steps while there are no requests
        directory   directory for the file, on the engine's machine
        wait_s      seconds to wait; None: no limit

        Interrupting the wait (KeyboardInterrupt) ends the recording. Raises InvalidRequest if
        another recording is running or `directory` is not allowed, EngineError if recording failed
        or there is no engine, TimeoutError after `wait_s`.
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
        """Make the engine finish its open requests, refuse new ones, and exit."""
        self._send(Drain())

    def close(self) -> None:
        """Disconnect, which aborts the open requests. May be called twice."""
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
        """Return two connected sockets: a message sent to the first wakes up `_run`."""
        address = f"inproc://{id(self)}"
        sink = self._context.socket(zmq.PULL)
        sink.bind(address)
        source = self._context.socket(zmq.PUSH)
        source.connect(address)
        self._wake_lock = threading.Lock()  # only one thread at a time may use a ZeroMQ socket
        return source, sink

    def _flush(self) -> None:
        with self._wake_lock:
            self._send_wake_up()

    def _send_wake_up(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the socket is closed, or full of wake-ups
            self._wake_in.send(b"", zmq.NOBLOCK)

    def _abort_soon(self, request: int) -> None:
        """Have `_run` abort a request. The garbage collector may call this at any time, also in a
        thread that holds a lock of this client, so it never waits for a lock. Without the wake-up,
        the request is aborted after the poll's timeout."""
        self._closed.put(request)
        if self._wake_lock.acquire(blocking=False):
            try:
                self._send_wake_up()
            finally:
                self._wake_lock.release()

    def _abort_closed(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue_abort(self._closed.get_nowait())

    def _run(self) -> None:
        """Run the thread that owns the socket: send queued messages and heartbeats, and deliver
        reports, until the client is closed.
        """
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
                    self._abort_closed()
                self._send_queued()
                if self._is_closed:
                    return
            for socket, _ in poller.poll(250):
                if socket is self._wake_out:
                    self._wake_out.recv()
                elif socket is self._monitor:
                    self._check_connection()
                else:
                    self._receive()

    def _check_connection(self) -> None:
        for is_connected in sockets.read_connection_events(self._monitor):
            while not is_connected and self._socket.poll(0):
                self._receive()  # the engine's last messages give the reason
            with self._lock:
                if is_connected:
                    self._session.on_connected()
                else:
                    self._deliver(self._session.on_disconnected())

    def _receive(self) -> None:
        try:
            message = self._decoder.decode(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return  # the message was read already, when the connection broke
        except WireError:
            return  # an incompatible engine is treated as a silent one
        with self._lock:
            self._deliver(self._session.receive(message, time.monotonic()))
            if self._session.has_stats:
                self._ready.set()


Engine = Client
"""Alias: the former name of `Client`."""
