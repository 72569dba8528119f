"""The engine client over a socket, for greenlets: `protocol.session` plus I/O.

Each process has one DEALER socket, opened after the fork, on first use. Its file descriptor is
edge-triggered: it becomes readable once per change. So each event drains the socket until it is
empty, in bounded portions so that other greenlets run. Every send is followed by a drain, because
sending consumes the edge. Subscribers are called in gevent's hub and must not block. If messages
arrive faster than they are processed, they are merged (`coalesce`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import zmq
from gevent import get_hub
from gevent.event import AsyncResult

from gateway.engine.base import Report, Subscriber
from gateway.engine.coalesce import coalesce
from protocol import sockets, wire
from protocol.arrays import Int32
from protocol.cluster_key import ClusterKey
from protocol.errors import Draining, EngineNotReady, ServingError, WireError, error_from
from protocol.messages import (
    AbortByLabel,
    Aborted,
    Generate,
    KeepKV,
    Limits,
    Output,
    Outputs,
    Ping,
    Pong,
    Refused,
    ReleaseKV,
    ResourcesFreed,
    ToClient,
    ToEngine,
    Welcome,
)
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams
from protocol.session import GenerateOptions, RequestReport, Session
from protocol.stats import EngineStats

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_CALLBACK = 512
MAX_TOKENS_PER_CALLBACK = 1024
"""Bounds the time that other greenlets wait to some milliseconds. A token with logprobs counts as
three, because logprobs take longer to encode."""
TICK_S = 0.25

_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_READ = 1


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ClientLine:
    """The connection to one engine. role: "" if it is the only one."""

    role: str
    engine: ZmqEngineClient


class ZmqEngineClient:
    """A gateway process's connection to one engine. See `EngineClient`.

    on_wire_error   called for each malformed message from the engine

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
        self._on_freed: dict[int, Callable[[], None]] = {}  # of aborted requests
        self._decoder: wire.Decoder[ToClient] = wire.Decoder(ToClient)
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: Any = None
        self._watchers: list[Any] = []
        self._stats: tuple[str, EngineStats] | tuple[None, None] = (None, None)
        self._drain_is_due = False

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
            with contextlib.suppress(zmq.Again):  # the engine is gone
                self._socket.send_multipart(wire.encode(self.session.goodbye()), _NOBLOCK)
            sockets.close_monitored(self._socket, self._connection)
            self._context.destroy(linger=sockets.LINGER_MS)
            self._socket = None

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **options: Unpack[GenerateOptions],
    ) -> int:
        self.start()
        message = self.session.generate(prompt, params, **options)
        self._open(message, subscriber)
        return message.request

    def abort_named(self, names: Sequence[str]) -> Aborted:
        self.start()
        result: AsyncResult[Report] = AsyncResult()
        self._open(self.session.abort_by_label(names), result.set)
        report = result.get()
        if isinstance(report, Aborted):
            return report
        assert isinstance(report, Output)
        assert report.error is not None
        raise error_from(report.error)

    def abort(self, request: int, on_freed: Callable[[], None] | None = None) -> None:
        self._subscribers.pop(request, None)
        message = self.session.abort(request)
        if message is not None and on_freed is not None:
            self._on_freed[request] = on_freed
        self._try_send(message)

    def stop(self, request: int) -> None:
        """End `request` if it is open. Its subscriber gets the last output."""
        self._try_send(self.session.request_abort(request))

    def keep_kv(self, handles: Sequence[str]) -> None:
        """Renew the leases of these handles; see messages.KeepKV."""
        self._try_send(KeepKV(handles=list(handles)) if self.session.is_ready else None)

    def release_kv(self, handles: Sequence[str]) -> None:
        """Release the K/V of these handles: no engine will fetch it."""
        self._try_send(ReleaseKV(handles=list(handles)) if self.session.is_ready else None)

    def count_cached_refusal(self) -> None:
        """Count a request that was refused from the cache. A later heartbeat reports the count."""
        self.session.num_refused_early += 1

    def trouble(self) -> ServingError | None:
        if not self.session.is_ready:
            return self.session.not_ready_error
        if self.stats is not None and self.stats.draining:
            return Draining("it finishes its open requests and accepts no new ones")
        trouble = self.stats.worker.trouble if self.stats else ""
        return EngineNotReady(trouble) if trouble else None

    @property
    def lines(self) -> list[ClientLine]:
        return [ClientLine("", self)]

    @property
    def is_ready(self) -> bool:
        return self.trouble() is None

    @property
    def model(self) -> ModelCard | None:
        """The model of the last Welcome, as are `limits`; None before the first."""
        return self.session.model

    @property
    def limits(self) -> Limits | None:
        return self.session.limits

    @property
    def epoch(self) -> str | None:
        return self.session.epoch

    @property
    def silence_s(self) -> float | None:
        heard_at = self.session.last_received_at
        return None if heard_at is None else time.monotonic() - heard_at

    @property
    def stats(self) -> EngineStats | None:
        """Statistics of the last heartbeat; None before the first one of the engine's epoch."""
        epoch, stats = self._stats
        return stats if self.session.is_ready and epoch == self.session.epoch else None

    def _open(self, message: Generate | AbortByLabel, subscriber: Subscriber) -> None:
        self._subscribers[message.request] = subscriber
        try:
            self._send(message)
        except zmq.Again:
            self.session.abort(message.request)
            del self._subscribers[message.request]
            raise EngineNotReady("the engine does not accept messages at the moment") from None

    def _try_send(self, message: ToEngine | None) -> None:
        if message is not None and self._socket is not None:
            with contextlib.suppress(zmq.Again):  # the engine is gone
                self._send(message)

    def _send(self, message: ToEngine) -> None:
        """Raises zmq.Again if the engine does not read."""
        assert self._socket is not None
        try:
            self._socket.send_multipart(wire.encode(message), _NOBLOCK)
        finally:
            self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.run_callback(self._drain)

    def _drain(self) -> None:
        """Receive a bounded number of messages and dispatch them in order.

        Consecutive `Outputs` are collected and dispatched together.
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
                # This check costs a third of another zmq.Again.
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
        """Handle connects and disconnects. Also called on each tick, as an edge may be missed."""
        if self._socket is None:
            return
        for is_there in sockets.read_connection_events(self._connection):
            if is_there:
                self.session.on_connected()
                self._tick()
            else:
                self._drain_all()  # its last messages may say why
                self._dispatch(self.session.on_disconnected())

    def _drain_all(self) -> None:
        assert self._socket is not None
        while self._socket.poll(0):
            self._drain()

    def _count_wire_error(self, error: WireError) -> None:
        """Count a malformed message, and log the 1st, 2nd, 4th, 8th ... one."""
        self.num_wire_errors += 1
        self._on_wire_error()
        if self.num_wire_errors.bit_count() == 1:
            text = "dropped a malformed message from the engine (number %d): %s"
            log.warning(text, self.num_wire_errors, error)

    def _on_outputs(self, steps: list[Outputs]) -> None:
        for step in coalesce(steps):
            self._dispatch(self.session.receive(step, time.monotonic()))

    def _on_message(self, message: ToClient) -> None:
        """Handle any message except `Outputs`."""
        self._dispatch(self.session.receive(message, time.monotonic()))
        if isinstance(message, Pong):
            self._stats = (message.epoch, message.stats)
        elif isinstance(message, ResourcesFreed):
            for request in message.requests:
                self._on_freed.pop(request, _nothing)()
        elif isinstance(message, Welcome):
            self._on_freed.clear()  # a new epoch or session: these reports will not come
            with contextlib.suppress(zmq.Again):
                self._send(Ping())  # to get the statistics before the next heartbeat
        elif isinstance(message, Refused) and message.request < 0:
            log.error("the engine rejected a message: %s", message.error.message)

    def _dispatch(self, news: list[RequestReport]) -> None:
        for request, report in news:
            subscriber = self._subscribers.get(request)
            if subscriber is None:
                continue
            if request not in self.session.open:
                del self._subscribers[request]
            subscriber(report)

    def _tick(self) -> None:
        """Send the heartbeat, or the greeting until the engine has welcomed this client."""
        messages, news = self.session.tick(time.monotonic())
        for message in messages:
            with contextlib.suppress(zmq.Again):
                self._send(message)
        self._dispatch(news)
        self._on_connection_event()
