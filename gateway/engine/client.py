"""`protocol.session` over a socket, for greenlets: whoever asked is called with the news.

One DEALER per process, made after the fork, on first use. Its file descriptor is edge-triggered: it
says "something happened", once. So each event drains the socket until it is empty, a bounded amount
at a time so that other greenlets run, and every send is followed by a drain, since sending swallows
the edge. Callbacks run in gevent's hub and must not block. What comes faster than it can be told is
joined (`backlog`).
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

from gateway.engine.coalesce import as_told
from protocol import sockets, wire
from protocol.arrays import Int32
from protocol.cluster_key import ClusterKey
from protocol.errors import Draining, EngineNotReady, ServingError, WireError, error_from
from protocol.messages import (
    AbortByLabel,
    Aborted,
    Accepted,
    EngineStatus,
    Generate,
    KeepKV,
    Limits,
    Output,
    Outputs,
    Ping,
    Pong,
    Profiled,
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

Report = Accepted | Refused | Output | Aborted | Profiled | EngineStatus
Subscriber = Callable[[Report], None]

MAX_MESSAGES_PER_CALLBACK = 512
MAX_TOKENS_PER_CALLBACK = 1024
"""Other greenlets, and the streams, wait for some milliseconds while so many are read. A token with
logprobs, which take longer to tell, counts as three."""
TICK_S = 0.25

_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_READ = 1


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ClientLine:
    """One engine behind a gateway. role: "" where it is the only one."""

    role: str
    engine: ZmqEngineClient


class ZmqEngineClient:
    """A gateway process's line to its engine. All methods are for the greenlets of one thread.

    on_wire_error   called for each message of the engine that makes no sense

    Raises ValueError where the address cannot be used.
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
        self._leaving: dict[int, Callable[[], None]] = {}  # aborted, and not known to be free yet
        self._decoder: wire.Decoder[ToClient] = wire.Decoder(ToClient)
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: Any = None
        self._watchers: list[Any] = []
        self._stats: tuple[str, EngineStats] | tuple[None, None] = (None, None)
        self._drain_is_due = False

    def start(self) -> None:
        """Connect, once. Called after the fork, in the process that will use the socket."""
        if self._socket is not None:
            return
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        watched = sockets.connect_monitored(self._context, self.address, self._key)
        self._socket, self._connection = watched
        self._loop = get_hub().loop
        readable = self._loop.io(self._socket.getsockopt(zmq.FD), _READ)
        readable.start(self._drain)
        changed = self._loop.io(self._connection.getsockopt(zmq.FD), _READ)
        changed.start(self._hear_connection)
        clock = self._loop.timer(0, repeat=TICK_S)
        clock.start(self._tick)
        self._watchers = [readable, changed, clock]

    def close(self) -> None:
        """Leave; the engine aborts what is open."""
        for watcher in self._watchers:
            watcher.stop()
            watcher.close()
        self._watchers = []
        if self._socket is not None:
            with contextlib.suppress(zmq.Again):  # an engine that is gone needs no telling
                self._socket.send_multipart(wire.encode(self.session.goodbye()), _NOBLOCK)
            sockets.close_monitored(self._socket, self._connection)
            self._context.destroy(linger=sockets.LINGER_MS)
            self._socket = None

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **terms: Unpack[GenerateOptions],
    ) -> int:
        """Open a request; `subscriber` is called with each report until its end. Its number.

        Raises EngineNotReady or EngineLost where there is no engine to ask.
        """
        self.start()
        message = self.session.generate(prompt, params, **terms)
        self._open(message, subscriber)
        return message.request

    def abort_named(self, names: Sequence[str]) -> Aborted:
        """End every request that has one of these labels, of whichever client, and wait until the
        engine has said which there were.

        Raises EngineNotReady or EngineLost where there is no engine to ask.
        """
        self.start()
        told: AsyncResult[Report] = AsyncResult()
        self._open(self.session.abort_by_label(names), told.set)
        report = told.get()
        if isinstance(report, Aborted):
            return report
        assert isinstance(report, Output)
        assert report.error is not None
        raise error_from(report.error)

    def abort(self, request: int, freed: Callable[[], None] | None = None) -> None:
        """End `request` if it is open; its subscriber hears nothing more. `freed` is called when
        the engine has back what it owned, if the engine is there to say so."""
        self._subscribers.pop(request, None)
        message = self.session.abort(request)
        if message is not None and freed is not None:
            self._leaving[request] = freed
        self._try_to_say(message)

    def stop(self, request: int) -> None:
        """End `request` if it is open; its subscriber hears how it ended."""
        self._try_to_say(self.session.request_abort(request))

    def keep_kv(self, handles: Sequence[str]) -> None:
        """What these stand for is still wanted; see messages.KeepKV."""
        self._try_to_say(KeepKV(handles=list(handles)) if self.session.is_ready else None)

    def release_kv(self, handles: Sequence[str]) -> None:
        """Nobody will come for these (any more)."""
        self._try_to_say(ReleaseKV(handles=list(handles)) if self.session.is_ready else None)

    def note_early(self) -> None:
        """A request was refused as the engine had just refused others: it hears that in time."""
        self.session.num_refused_early += 1

    def trouble(self) -> ServingError | None:
        """Why no request can be opened now; None where one can."""
        if not self.session.is_ready:
            return self.session.not_ready_error
        if self.stats is not None and self.stats.draining:
            return Draining("it finishes what it has, and takes nothing new")
        trouble = self.stats.worker.trouble if self.stats else ""
        return EngineNotReady(trouble) if trouble else None

    @property
    def lines(self) -> list[ClientLine]:
        """All the engines that this one is."""
        return [ClientLine("", self)]

    @property
    def is_ready(self) -> bool:
        return self.trouble() is None

    @property
    def model(self) -> ModelCard | None:
        """As of the last Welcome, and `limits` with it; None before the first."""
        return self.session.model

    @property
    def limits(self) -> Limits | None:
        return self.session.limits

    @property
    def epoch(self) -> str | None:
        return self.session.epoch

    @property
    def silence_s(self) -> float | None:
        """Since the engine last said anything; None if it never did."""
        heard_at = self.session.last_received_at
        return None if heard_at is None else time.monotonic() - heard_at

    @property
    def stats(self) -> EngineStats | None:
        """As of the last heartbeat; None before the first of the engine's present life."""
        epoch, stats = self._stats
        return stats if self.session.is_ready and epoch == self.session.epoch else None

    def _open(self, message: Generate | AbortByLabel, subscriber: Subscriber) -> None:
        """`subscriber` hears what becomes of it."""
        self._subscribers[message.request] = subscriber
        try:
            self._send(message)
        except zmq.Again:
            self.session.abort(message.request)
            del self._subscribers[message.request]
            raise EngineNotReady("the engine does not take requests at the moment") from None

    def _try_to_say(self, message: ToEngine | None) -> None:
        if message is not None and self._socket is not None:
            with contextlib.suppress(zmq.Again):  # an engine that is gone needs no telling
                self._send(message)

    def _send(self, message: ToEngine) -> None:
        """Raises zmq.Again where the engine does not read."""
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
        """Take in what has come, up to a bound, and hand it out: steps together at the end, all
        else at once, behind the steps that came before it."""
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
                self._complain(error)
                continue
            if type(message) is Outputs:
                steps.append(message)
                num_tokens += sum([len(o.tokens) + 2 * len(o.logprobs) for o in message.outputs])
                if num_tokens >= MAX_TOKENS_PER_CALLBACK:
                    self._drain_soon()
                    break
                if (
                    not int(socket.getsockopt(_EVENTS)) & _POLLIN
                ):  # a third of the price of zmq.Again
                    break
            else:
                self._tell(steps)
                steps = []
                self._take(message)
        else:
            self._drain_soon()
        self._tell(steps)

    def _hear_connection(self) -> None:
        """Also with each tick, since the edge may have been missed."""
        if self._socket is None:
            return
        for is_there in sockets.read_connection_events(self._connection):
            if is_there:
                self.session.on_connected()
                self._tick()
            else:
                self._drain_all()  # its last words say more
                self._hand_out(self.session.on_disconnected())

    def _drain_all(self) -> None:
        assert self._socket is not None
        while self._socket.poll(0):
            self._drain()

    def _complain(self, error: WireError) -> None:
        """A flood of malformed messages is no flood of log lines: the 1st, 2nd, 4th ... is told."""
        self.num_wire_errors += 1
        self._on_wire_error()
        if self.num_wire_errors.bit_count() == 1:
            told = "dropped a message from the engine (the %d. of all): %s"
            log.warning(told, self.num_wire_errors, error)

    def _tell(self, steps: list[Outputs]) -> None:
        for step in as_told(steps):
            self._hand_out(self.session.receive(step, time.monotonic()))

    def _take(self, message: ToClient) -> None:
        """All but steps."""
        self._hand_out(self.session.receive(message, time.monotonic()))
        if isinstance(message, Pong):
            self._stats = (message.epoch, message.stats)
        elif isinstance(message, ResourcesFreed):
            for request in message.requests:
                self._leaving.pop(request, _nothing)()
        elif isinstance(message, Welcome):
            self._leaving.clear()  # it has begun anew, or has forgotten us: nobody will say
            with contextlib.suppress(zmq.Again):
                self._send(Ping())  # its stats now, not with the next heartbeat
        elif isinstance(message, Refused) and message.request < 0:
            log.error("the engine did not understand us: %s", message.error.message)

    def _hand_out(self, news: list[RequestReport]) -> None:
        for request, report in news:
            subscriber = self._subscribers.get(request)
            if subscriber is None:
                continue
            if request not in self.session.open:
                del self._subscribers[request]
            subscriber(report)

    def _tick(self) -> None:
        """The heartbeat; until the engine has welcomed us, the greeting."""
        messages, news = self.session.tick(time.monotonic())
        for message in messages:
            with contextlib.suppress(zmq.Again):
                self._send(message)
        self._hand_out(news)
        self._hear_connection()
