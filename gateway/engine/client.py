"""The engine client over a ZeroMQ socket, for greenlets: `protocol.engine.session` plus I/O.

Each process has one DEALER socket for each engine. It is opened after the fork, on first use. The
socket's file descriptor is edge-triggered: it becomes readable only once, although several messages
may have arrived. So whenever it becomes readable, messages are read until the socket is empty. One
callback of gevent's hub reads a bounded number of them, so that other greenlets run in between.
Every send is followed by a read, because sending, too, resets the readable state.

Subscribers are called in gevent's hub and must not block. If messages arrive faster than they are
processed, they are merged (`coalesce`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack, cast

import zmq
from gevent import get_hub
from gevent.event import AsyncResult

from gateway.engine.base import Report, RoutedEncodeOptions, RoutedOptions, Subscriber
from gateway.engine.coalesce import coalesce
from gateway.engine.refusal_cache import RefusalCache
from protocol.engine.adapters import AdapterInfo
from protocol.engine.encoding import EncodeInputs
from protocol.engine.messages import (
    AbortByLabel,
    Aborted,
    Account,
    AdapterChanged,
    AttachData,
    Encode,
    Generate,
    GetStatus,
    GetTimeline,
    KeepKV,
    Limits,
    LoadAdapter,
    Output,
    Outputs,
    Ping,
    Pong,
    Refused,
    ReleaseKV,
    RequestTimelines,
    ResourcesFreed,
    ToClient,
    ToEngine,
    UnloadAdapter,
    Welcome,
)
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import EncodeOptions, GenerateOptions, RequestReport, Session
from protocol.engine.stats import EngineLoad, EngineStats
from protocol.engine.timeline import AbortReason
from protocol.wire import codec, sockets
from protocol.wire.arrays import Int32
from protocol.wire.cluster_key import ClusterKey
from protocol.wire.errors import Draining, EngineNotReady, ServingError, WireError, error_from

log = logging.getLogger(__name__)
Command = AbortByLabel | GetStatus | GetTimeline | LoadAdapter | UnloadAdapter
Reply = TypeVar("Reply", Aborted, RequestTimelines)

MAX_MESSAGES_PER_CALLBACK = 512
MAX_TOKENS_PER_CALLBACK = 1024
"""With these bounds, other greenlets wait at most some milliseconds for one callback. A token with
logprobs counts as three, because logprobs take longer to encode."""
TICK_S = 0.25
"""Interval at which the session checks whether a heartbeat or a greeting is due."""

_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_READ = 1
"""libev's flag for a readable file descriptor."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ConnectedEngine:
    """One engine: its role and the client that is connected to it."""

    #: "replica", "prefill" or "decode"; "" if there is only one engine.
    role: str
    client: ZmqEngineClient


class ZmqEngineClient:
    """The `EngineClient` that is connected to one engine.

    address        ZeroMQ address of the engine
    key            the cluster key, which connections between hosts require
    on_wire_error  called for each malformed message from the engine

    The constructor raises ValueError if the address is invalid.
    """

    def __init__(
        self,
        address: str,
        key: ClusterKey | None = None,
        *,
        on_wire_error: Callable[[], None] = lambda: None,
    ) -> None:
        sockets.check_address(address, key)
        self.session = Session(f"gateway-{os.getpid()}")
        self.num_wire_errors = 0
        self.address = address
        self._key = key
        self._on_wire_error = on_wire_error
        self._subscribers: dict[int, Subscriber] = {}
        self._on_freed: dict[int, Callable[[], None]] = {}  # callbacks of aborted requests
        self._decoder: codec.Decoder[ToClient] = codec.Decoder(ToClient)
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: Any = None
        self._watchers: list[Any] = []
        self._stats: tuple[str, EngineStats] | tuple[None, None] = (None, None)
        self._drain_is_due = False
        self._with_ping: list[GetStatus] = []  # sent with the next heartbeat
        self._refusals = RefusalCache()
        #: Called with each report of the engine's load, after all messages that came before it.
        self.on_load: Callable[[EngineLoad], None] = lambda load: None

    def start(self) -> None:
        if self._socket is not None:
            return
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        watched = sockets.connect_monitored(self._context, self.address, self._key)
        self._socket, self._connection = watched
        self._loop = get_hub().loop
        readable = self._loop.io(self._socket.getsockopt(zmq.FD), _READ)
        readable.start(self._drain)
        changed = self._loop.io(self._connection.getsockopt(zmq.FD), _READ)
        changed.start(self._on_connection_event)
        clock = self._loop.timer(0, repeat=TICK_S)
        clock.start(self._tick)
        self._watchers = [readable, changed, clock]

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.stop()
            watcher.close()
        self._watchers = []
        if self._socket is not None:
            with contextlib.suppress(zmq.Again):  # the engine is not reachable
                self._socket.send_multipart(codec.encode(self.session.goodbye()), _NOBLOCK)
            sockets.close_monitored(self._socket, self._connection)
            self._context.destroy(linger=sockets.LINGER_MS)
            self._socket = None

    def on_exited(self) -> None:
        if self._socket is not None:
            self._drain_all()  # the engine's last messages may contain the reason
            self._dispatch(self.session.on_exited())

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **options: Unpack[RoutedOptions],
    ) -> int:
        self.start()
        options.pop("session", "")  # only a choice between engines needs it
        contents = options.pop("contents", {})
        message = self.session.generate(prompt, params, **cast(GenerateOptions, options))
        attached = [self.session.attach(digest, [*each]) for digest, each in contents.items()]
        self._open(message, subscriber, before=[each for each in attached if each is not None])
        return message.request

    def encode(
        self,
        inputs: EncodeInputs,
        subscriber: Subscriber,
        **options: Unpack[RoutedEncodeOptions],
    ) -> int:
        self.start()
        options.pop("session", "")  # only a choice between engines needs it
        message = self.session.encode(inputs, **cast(EncodeOptions, options))
        self._open(message, subscriber)
        return message.request

    def abort_by_label(self, labels: Sequence[str]) -> Aborted:
        self.start()
        return self._reply(self.session.abort_by_label(labels), Aborted)

    def get_timelines(self, names: Sequence[str]) -> RequestTimelines:
        """Return the timelines of the open and recently ended requests of all clients with these
        names. Raises EngineNotReady or EngineLost if the engine cannot be reached, Overloaded if
        too many requests for timelines wait there."""
        self.start()
        return self._reply(self.session.get_timeline(names), RequestTimelines)

    def request_status(self, max_rows: int, after_step: int, subscriber: Subscriber) -> None:
        """Send a GetStatus with the next heartbeat, which is due within half a second, so that it
        costs no wake-up of its own. `subscriber` is called with the EngineStatus, or with an Output
        that has the error if the engine is lost. Raises as `get_timelines` does."""
        self.start()
        message = self.session.get_status(max_rows, after_step)
        self._subscribers[message.request] = subscriber
        self._with_ping.append(message)

    def _reply(self, message: AbortByLabel | GetTimeline, kind: type[Reply]) -> Reply:
        """Send a command, wait for its reply of the class `kind`, and return it. If the engine
        refuses the command, raise the error."""
        result: AsyncResult[Report] = AsyncResult()
        self._open(message, result.set)
        report = result.get()
        if isinstance(report, kind):
            return report
        assert isinstance(report, Output | Refused)
        assert report.error is not None
        raise error_from(report.error)

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        self.start()
        return self._adapter_reply(self.session.load_adapter(name, path))

    def unload_adapter(self, name: str) -> AdapterInfo:
        self.start()
        return self._adapter_reply(self.session.unload_adapter(name))

    def _adapter_reply(self, message: LoadAdapter | UnloadAdapter) -> AdapterInfo:
        """Send a command and wait for the reply. Raises the engine's refusal."""
        result: AsyncResult[Report] = AsyncResult()
        self._open(message, result.set)
        report = result.get()
        if isinstance(report, AdapterChanged):
            return report.adapter
        assert isinstance(report, Output | Refused)
        assert report.error is not None
        raise error_from(report.error)

    def abort(
        self,
        request: int,
        reason: AbortReason,
        *,
        on_freed: Callable[[], None] | None = None,
    ) -> None:
        self._subscribers.pop(request, None)
        message = self.session.abort(request, reason)
        if message is not None and on_freed is not None:
            self._on_freed[request] = on_freed
        self._try_send(message)

    def stop(self, request: int, reason: AbortReason) -> None:
        """Abort `request` if it is open. Its subscriber still gets the last output."""
        self._try_send(self.session.request_abort(request, reason))

    def keep_kv(self, handles: Sequence[str]) -> None:
        """Renew the leases of the K/V that these handles name."""
        self._try_send(KeepKV(handles=list(handles)) if self.session.is_ready else None)

    def release_kv(self, handles: Sequence[str]) -> None:
        """End the leases of the K/V that these handles name, because no engine will fetch it."""
        self._try_send(ReleaseKV(handles=list(handles)) if self.session.is_ready else None)

    def cached_refusal(self, account: Account | None) -> ServingError | None:
        refusal = self._refusals.get(account, time.monotonic())
        if refusal is not None:
            self.count_cached_refusal()
        return refusal

    def cache_refusal(self, account: Account | None, refusal: ServingError) -> None:
        self._refusals.add(account, refusal, time.monotonic())

    def count_cached_refusal(self) -> None:
        """Count a request that was refused from the cache.

        The next heartbeat reports the count to the engine.
        """
        self.session.num_refused_early += 1

    def trouble(self) -> ServingError | None:
        if not self.session.is_ready:
            return self.session.not_ready_error
        if self.stats is not None and self.stats.draining:
            return Draining("it finishes its open requests and accepts no new ones")
        trouble = self.stats.worker.trouble if self.stats else ""
        return EngineNotReady(trouble) if trouble else None

    @property
    def connections(self) -> list[ConnectedEngine]:
        return [ConnectedEngine("", self)]

    @property
    def is_ready(self) -> bool:
        return self.trouble() is None

    @property
    def model(self) -> ModelCard | None:
        """The model in the engine's last Welcome message; None before the first one."""
        return self.session.model

    @property
    def limits(self) -> Limits | None:
        """The limits in the engine's last Welcome message; None before the first one."""
        return self.session.limits

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        return self.session.adapters

    @property
    def epoch(self) -> str | None:
        return self.session.epoch

    @property
    def silence_s(self) -> float | None:
        received_at = self.session.last_received_at
        return None if received_at is None else time.monotonic() - received_at

    @property
    def stats(self) -> EngineStats | None:
        """The statistics in the last heartbeat; None before the first one in this epoch."""
        epoch, stats = self._stats
        return stats if self.session.is_ready and epoch == self.session.epoch else None

    def _open(
        self,
        message: Generate | Encode | Command,
        subscriber: Subscriber,
        *,
        before: Sequence[AttachData] = (),
    ) -> None:
        """Send a message that opens a request, after the messages `before`. Raises EngineNotReady
        if one of them cannot be sent."""
        self._subscribers[message.request] = subscriber
        try:
            for each in (*before, message):
                self._send(each)
        except zmq.Again:
            self.session.abort(message.request)
            del self._subscribers[message.request]
            raise EngineNotReady("the engine does not accept messages at the moment") from None

    def _try_send(self, message: ToEngine | None) -> None:
        """Send `message` if there is one and the engine is reachable."""
        if message is not None and self._socket is not None:
            with contextlib.suppress(zmq.Again):
                self._send(message)

    def _send(self, message: ToEngine) -> None:
        """Send `message`. Raises zmq.Again if the engine does not read its messages."""
        assert self._socket is not None
        try:
            self._socket.send_multipart(codec.encode(message), _NOBLOCK)
        finally:
            self._drain_soon()

    def _drain_soon(self) -> None:
        """Have the hub call `_drain` after its current callback."""
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.run_callback(self._drain)

    def _drain(self) -> None:
        """Receive a bounded number of messages, and call their subscribers in order.

        Consecutive `Outputs` messages are collected, so that they can be merged.
        """
        self._drain_is_due = False
        socket = self._socket
        if socket is None:
            return
        steps: list[Outputs] = []
        num_tokens = 0
        for _ in range(MAX_MESSAGES_PER_CALLBACK):
            try:
                message = self._decoder.decode(socket.recv_multipart(_NOBLOCK))
            except zmq.Again:
                break
            except WireError as error:
                self._count_wire_error(error)
                continue
            if type(message) is Outputs:
                steps.append(message)
                num_tokens += sum([len(o.tokens) + 2 * len(o.logprobs) for o in message.outputs])
                if num_tokens >= MAX_TOKENS_PER_CALLBACK:
                    self._drain_soon()
                    break
                # This check takes a third of the time of another `recv` that raises zmq.Again.
                if not int(socket.getsockopt(_EVENTS)) & _POLLIN:
                    break
            else:
                self._on_outputs(steps)
                steps = []
                self._on_message(message)
        else:
            self._drain_soon()
        self._on_outputs(steps)

    def _on_connection_event(self) -> None:
        """Handle connects and disconnects.

        This is also called on each tick, because an edge of the file descriptor may be missed.
        """
        if self._socket is None:
            return
        for is_connected in sockets.read_connection_events(self._connection):
            if is_connected:
                self.session.on_connected()
                self._tick()
            else:
                self._drain_all()  # the engine's last messages may contain the reason
                self._dispatch(self.session.on_disconnected())

    def _drain_all(self) -> None:
        assert self._socket is not None
        while self._socket.poll(0):
            self._drain()

    def _count_wire_error(self, error: WireError) -> None:
        """Count a malformed message. Log the first, second, fourth, eighth and so on."""
        self.num_wire_errors += 1
        self._on_wire_error()
        if self.num_wire_errors.bit_count() == 1:
            text = "dropped a malformed message from the engine (number %d): %s"
            log.warning(text, self.num_wire_errors, error)

    def _on_outputs(self, steps: list[Outputs]) -> None:
        """Handle the outputs of consecutive steps."""
        for step in coalesce(steps):
            self._dispatch(self.session.receive(step, time.monotonic()))
        loads = [step.load for step in steps if step.load is not None]
        if loads:
            self.on_load(loads[-1])

    def _on_message(self, message: ToClient) -> None:
        """Pass a message other than `Outputs` to the session and the subscribers, and store the
        state of the engine that it reports."""
        self._dispatch(self.session.receive(message, time.monotonic()))
        if isinstance(message, Pong):
            self._stats = (message.epoch, message.stats)
            stats = message.stats
            self.on_load(EngineLoad(stats.running, stats.waiting, stats.waiting_tokens))
        elif isinstance(message, ResourcesFreed):
            for request in message.requests:
                self._on_freed.pop(request, _nothing)()
        elif isinstance(message, Welcome):
            # The epoch or the session is new, so earlier resources will not be reported as freed.
            self._on_freed.clear()
            with contextlib.suppress(zmq.Again):
                self._send(Ping())  # fetches the statistics before the next heartbeat
        elif isinstance(message, Refused) and message.request < 0:
            log.error("the engine rejected a message: %s", message.error.message)

    def _dispatch(self, reports: list[RequestReport]) -> None:
        """Call the subscriber of each report. Remove the subscribers of ended requests."""
        for request, report in reports:
            subscriber = self._subscribers.get(request)
            if subscriber is None:
                continue
            if request not in self.session.open:
                del self._subscribers[request]
            subscriber(report)

    def _tick(self) -> None:
        """Send a due heartbeat, or a due greeting if the engine has not sent Welcome yet."""
        messages, reports = self.session.tick(time.monotonic())
        if self._with_ping and any(isinstance(message, Ping) for message in messages):
            waiting, self._with_ping = self._with_ping, []
            messages += [message for message in waiting if message.request in self.session.open]
        for message in messages:
            with contextlib.suppress(zmq.Again):
                self._send(message)
        self._dispatch(reports)
        self._on_connection_event()
