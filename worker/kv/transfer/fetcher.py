"""Fetches blocks, and the states after them, from other workers.

One thread runs all transfers of this worker concurrently.

Every queued fetch ends in exactly one report, once nothing writes into its blocks any more. Only
`close` drops fetches without a report: those that have not started. The thread starts with the
first fetch. A transfer is a socket, a mover, and the state machine of fetch_job.py.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

import numpy as np
import zmq

from protocol.wire import codec, sockets
from protocol.wire.cluster_key import ClusterKey
from protocol.wire.errors import WireError
from protocol.worker.kv import KVCancel, KVEndpoint, KVFailure, KVFetch, KVFetched, PeerSource
from protocol.worker.kv_peers import (
    READER_BYTES,
    FromExporter,
    FromReader,
    KVChunk,
    KVDone,
    KVExpired,
    KVLive,
    KVOpen,
    KVOpened,
    KVRead,
    KVUnlike,
    Offer,
)
from worker.device.staging import integers
from worker.kv.blocks import CacheBlocks
from worker.kv.movers.base import DamagedTransfer, Mover, PollHint, TransferLost
from worker.kv.movers.choice import MoverFactory, NoCommonMover
from worker.kv.report_queue import ReportQueue
from worker.kv.transfer.exports import Ids
from worker.kv.transfer.fetch_job import FetchJob, FetchJobEvent, FetchJobState

MAX_TRANSFERS = 64
"""Most transfers that run at the same time. They are limited because each needs sockets. Further
fetches wait, and their timeouts count while they wait."""
SOON_MS = 1
IDLE_MS = 60_000


@dataclass(frozen=True, slots=True)
class TransferContext:
    """Objects that all transfers of a worker share.

    key        cluster key, for peers on other hosts
    endpoint   describes this worker's cache
    cache      fills blocks of the cache
    states     fills checkpoints; None: the model has no recurrent state
    """

    context: zmq.Context[zmq.Socket[bytes]]
    key: ClusterKey | None
    endpoint: KVEndpoint
    cache: MoverFactory
    states: MoverFactory | None

    @property
    def memories(self) -> list[CacheBlocks]:
        """The blocks of the cache, and the checkpoints if there are any."""
        return [each.blocks for each in (self.cache, self.states) if each is not None]


@dataclass(frozen=True, slots=True)
class TransferPart:
    """A part of a transfer, which one mover copies: the K/V, or the state.

    ids      where it is written
    theirs   where the peer has it
    """

    movers: MoverFactory
    ids: Ids
    theirs: Ids
    offers: list[Offer]
    is_state: bool


class Transfer:
    """One transfer, which starts when the object is created.

    The transfer never waits: `poll` does everything that can be done now, and sets `poll_hint`,
    which says when to call again. The constructor raises ValueError or zmq.ZMQError if it cannot
    start to connect.

    source     the source of `fetch`
    fences     the memories of `shared` may be written only after them (CacheBlocks.fence)
    deadline   time of the clock `monotonic` at which the transfer fails
    """

    def __init__(
        self,
        shared: TransferContext,
        fetch: KVFetch,
        source: PeerSource,
        fences: Sequence[object],
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self.poll_hint = PollHint.MESSAGE
        self._shared = shared
        self._fetch = fetch
        self._source = source
        self._job = FetchJob()
        self._ids: Ids = integers(fetch.blocks.data)
        self._reader = os.urandom(READER_BYTES)
        self._mover: Mover | None = None
        self._parts: deque[TransferPart] = deque()  # those that follow the present mover's
        self._was_connected = False
        self._started = monotonic()
        self._decoder: codec.Decoder[FromExporter] = codec.Decoder(FromExporter)
        for memory, fence in zip(shared.memories, fences, strict=True):
            memory.wait_for(fence)
        self.socket, self.watcher = sockets.connect_monitored(
            shared.context, source.address, shared.key
        )
        self._send(
            KVOpen(
                lease=source.lease,
                reader=self._reader,
                layout=shared.endpoint.layout,
                layout_text=shared.endpoint.layout_text,
                first=source.first,
                count=len(self._ids),
                needs_state=fetch.checkpoint is not None,
            )
        )

    def poll(self) -> KVFetched | KVFailure | None:
        """Do everything that can be done now. Return the result if the transfer has ended,
        otherwise None. The sockets of an ended transfer are closed."""
        self._receive()
        self._check_connection()
        if monotonic() >= self.deadline:
            self._on_timeout()
        self._move()
        return self._finish() if self._job.is_over else None

    def cancel(self) -> None:
        self._fail(FetchJobEvent.CANCEL, "cancelled by the engine")

    # ---- messages of the peer

    def _receive(self) -> None:
        while not self._job.is_over and self.socket.poll(0):
            frames = [frame.buffer for frame in self.socket.recv_multipart(copy=False)]
            try:
                self._apply(self._decoder.decode(frames))
            except (WireError, DamagedTransfer) as error:
                self._fail(FetchJobEvent.DAMAGED, str(error))
            except TransferLost as error:
                self._fail(FetchJobEvent.LOST, str(error))

    def _apply(self, message: FromExporter) -> None:
        match message:
            case KVOpened():
                if self._job.on(FetchJobEvent.OPENED) is FetchJobState.MOVING:
                    self._start_moving(message)
            case KVChunk():
                if (
                    self._job.on(FetchJobEvent.CHUNK) is FetchJobState.MOVING
                    and self._mover is not None
                ):
                    self._mover.receive(message)
            case KVLive():
                self._job.on(FetchJobEvent.LIVE)
            case KVExpired():
                self._fail(FetchJobEvent.EXPIRED, "the lease has ended")
            case KVUnlike(reason=reason):
                ours = self._shared.endpoint.layout_text
                self._fail(FetchJobEvent.UNLIKE, f"{reason}; this worker's cache is of {ours}")

    def _start_moving(self, message: KVOpened) -> None:
        theirs = integers(message.blocks.data)
        if len(theirs) != len(self._ids):
            raise DamagedTransfer(f"{len(theirs)} blocks were opened instead of {len(self._ids)}")
        cache, states, checkpoint = self._shared.cache, self._shared.states, self._fetch.checkpoint
        self._parts.append(TransferPart(cache, self._ids, theirs, message.offers, is_state=False))
        if checkpoint is not None:
            if states is None or message.checkpoint is None:
                raise DamagedTransfer("no state was opened")
            ids, theirs = np.array([checkpoint]), np.array([message.checkpoint])
            self._parts.append(
                TransferPart(states, ids, theirs, message.state_offers, is_state=True)
            )
        self._start_next()

    def _start_next(self) -> None:
        """Start the mover of the next part. Raises DamagedTransfer or TransferLost."""
        part = self._parts.popleft()
        request = partial(self._request_chunk, is_state=part.is_state)
        self._mover = None
        try:
            self._mover = part.movers.create(part.ids, part.theirs, part.offers, request)
        except NoCommonMover as error:
            self._fail(FetchJobEvent.UNLIKE, str(error))

    def _check_connection(self) -> None:
        for is_up in sockets.read_connection_events(self.watcher):
            self._was_connected |= is_up
            if not is_up:
                self._receive()  # messages that the peer sent before the disconnect
                self._fail(FetchJobEvent.LOST, f"no connection to {self._source.address}")

    def _on_timeout(self) -> None:
        state = self._job.state.name.lower()
        reason = f"not done within {self._fetch.timeout_s:g} s, in state {state}"
        if self._was_connected:
            self._fail(FetchJobEvent.LATE, reason)
        else:
            self._fail(FetchJobEvent.LOST, f"no connection to {self._source.address}; {reason}")

    def _fail(self, event: FetchJobEvent, reason: str) -> None:
        if not self._job.is_over:
            self._job.on(event, reason)

    # ---- work

    def _move(self) -> None:
        self.poll_hint = PollHint.MESSAGE
        if self._job.state is FetchJobState.MOVING and self._mover is not None:
            try:
                self.poll_hint = self._mover.advance()
                if self.poll_hint is PollHint.DONE and self._parts:
                    self.poll_hint = PollHint.NOW
                    self._start_next()
            except DamagedTransfer as error:
                self._fail(FetchJobEvent.DAMAGED, str(error))
            except TransferLost as error:
                self._fail(FetchJobEvent.LOST, str(error))
            if self.poll_hint is PollHint.DONE:
                self._job.on(FetchJobEvent.PLACED)
                self._send(self._done(is_read=True))
        if self._job.state is FetchJobState.STOPPING:
            self.poll_hint = PollHint.SOON
            if self._mover is None or self._mover.stop():
                self._job.on(FetchJobEvent.QUIET)

    def _finish(self) -> KVFetched | KVFailure:
        if self._job.state is FetchJobState.FAILED:
            self._send(self._done(is_read=False))
        linger_ms = sockets.LINGER_MS if self._was_connected else 0
        sockets.close_monitored(self.socket, self.watcher, linger_ms=linger_ms)
        if self._job.state is FetchJobState.FAILED:
            return KVFailure(self._fetch.job, self._job.failure, self._job.reason)
        assert self._mover is not None
        num_bytes = len(self._ids) * self._shared.cache.blocks.block_bytes
        if self._shared.states is not None and self._fetch.checkpoint is not None:
            num_bytes += self._shared.states.blocks.block_bytes
        seconds = monotonic() - self._started
        return KVFetched(self._fetch.job, num_bytes, seconds, self._mover.name)

    def _done(self, *, is_read: bool) -> KVDone:
        return KVDone(lease=self._source.lease, reader=self._reader, is_read=is_read)

    def _request_chunk(self, chunk: int, *, is_state: bool) -> None:
        lease, reader = self._source.lease, self._reader
        self._send(KVRead(lease=lease, reader=reader, chunk=chunk, is_state=is_state))

    def _send(self, message: FromReader) -> None:
        self.socket.send_multipart(codec.encode(message))


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """A queued fetch. The memories of `TransferContext` may be written only after `fences`
    (CacheBlocks.fence)."""

    fetch: KVFetch
    fences: list[object]
    deadline: float


class Fetcher:
    """Runs the transfers in a thread. Only the loop calls its public methods."""

    def __init__(self, shared: TransferContext, reports: ReportQueue) -> None:
        self._shared = shared
        self._reports = reports
        self._commands: SimpleQueue[FetchOrder | KVCancel] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread: Thread | None = None
        # Used by the thread only:
        self._waiting: deque[FetchOrder] = deque()
        self._transfers: dict[int, Transfer] = {}
        self._poller = zmq.Poller()

    def fetch(self, fetch: KVFetch) -> None:
        fences = [memory.fence() for memory in self._shared.memories]
        order = FetchOrder(fetch, fences, monotonic() + fetch.timeout_s)
        if self._thread is None:
            self._poller.register(self._wake, zmq.POLLIN)
            work = self._reports.guard(self._run)
            self._thread = Thread(target=work, name="kv fetcher", daemon=True)
            self._thread.start()
        self._send(order)

    def cancel(self, cancel: KVCancel) -> None:
        self._send(cancel)

    def close(self) -> None:
        """Cancel all transfers and stop the thread."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake)

    def _send(self, command: FetchOrder | KVCancel) -> None:
        self._commands.put(command)
        os.eventfd_write(self._wake, 1)

    # ---- the thread

    def _run(self) -> None:
        while not self._is_closed or self._transfers:
            if self._wake in dict(self._poller.poll(self._poll_timeout_ms())):
                os.eventfd_read(self._wake)
            self._read_commands()
            self._start_waiting()
            for job, transfer in list(self._transfers.items()):
                if (end := transfer.poll()) is not None:
                    self._forget(job)
                    self._reports.add_result(end)

    def _read_commands(self) -> None:
        try:
            while True:
                match self._commands.get_nowait():
                    case FetchOrder() as order:
                        self._waiting.append(order)
                    case KVCancel(job=job):
                        self._cancel(job)
        except Empty:
            pass
        if self._is_closed:
            self._waiting.clear()
            for transfer in self._transfers.values():
                transfer.cancel()

    def _start_waiting(self) -> None:
        """Start the waiting orders until MAX_TRANSFERS run. Orders past their deadline fail."""
        waiting: deque[FetchOrder] = deque()
        for order in self._waiting:
            job = order.fetch.job
            if order.deadline <= monotonic():
                reason = f"not started within {order.fetch.timeout_s:g} s"
                self._reports.add_result(KVFailure(job, "timeout", reason))
            elif len(self._transfers) < MAX_TRANSFERS:
                self._start(order)
            else:
                waiting.append(order)
        self._waiting = waiting

    def _start(self, order: FetchOrder) -> None:
        job = order.fetch.job
        source = order.fetch.source
        if not isinstance(source, PeerSource):
            self._reports.add_result(KVFailure(job, "lost", "this worker has no tiers"))
            return
        try:
            transfer = Transfer(self._shared, order.fetch, source, order.fences, order.deadline)
        except (ValueError, zmq.ZMQError) as error:
            self._reports.add_result(KVFailure(job, "unreachable", str(error)))
            return
        self._transfers[job] = transfer
        for socket in (transfer.socket, transfer.watcher):
            self._poller.register(socket, zmq.POLLIN)

    def _cancel(self, job: int) -> None:
        """Cancel a job, unless it has ended."""
        if job in self._transfers:
            self._transfers[job].cancel()
        remaining = deque(order for order in self._waiting if order.fetch.job != job)
        if len(remaining) < len(self._waiting):
            self._waiting = remaining
            self._reports.add_result(KVFailure(job, "cancelled", "before it started"))

    def _forget(self, job: int) -> None:
        transfer = self._transfers.pop(job)
        for socket in (transfer.socket, transfer.watcher):
            self._poller.unregister(socket)

    def _poll_timeout_ms(self) -> int:
        """Return how many milliseconds the thread may sleep if no socket becomes readable."""
        if self._waiting and len(self._transfers) < MAX_TRANSFERS:
            return 0  # some transfers have just ended, so others can start
        hints = {transfer.poll_hint for transfer in self._transfers.values()}
        if PollHint.NOW in hints:
            return 0
        if PollHint.SOON in hints:
            return SOON_MS
        deadlines = [transfer.deadline for transfer in self._transfers.values()]
        deadlines += [order.deadline for order in self._waiting]
        if not deadlines:
            return IDLE_MS
        left_s = min(deadlines) - monotonic()
        return max(0, min(IDLE_MS, int(left_s * 1000) + 1))
