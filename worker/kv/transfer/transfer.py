"""One transfer at the end that reads: a socket, a mover, and the state that fetch_job.py keeps.

It never waits: `turn` does what can be done now, and says when to come again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import monotonic

import zmq

from protocol import sockets, wire
from protocol.cluster_key import ClusterKey
from protocol.errors import WireError
from protocol.kv import KVEndpoint, KVFailure, KVFetch, KVFetched, PeerSource
from protocol.kv_peers import (
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
)
from worker.kv.blocks import CacheBlocks
from worker.kv.movers.base import DamagedTransfer, Mover, PollHint, TransferLost
from worker.kv.movers.choice import Unoffered, Ways
from worker.kv.transfer.exports import Ids
from worker.kv.transfer.fetch_job import FetchJob, FetchJobEvent, FetchJobState
from worker.slots.staging import integers


@dataclass(frozen=True, slots=True)
class Here:
    """What all transfers of a worker share.

    key        of the cluster, for peers on other hosts
    endpoint   of our own cache
    """

    context: zmq.Context[zmq.Socket[bytes]]
    key: ClusterKey | None
    endpoint: KVEndpoint
    blocks: CacheBlocks
    ways: Ways


class Transfer:
    """Begins to run when it is made. Raises ValueError or zmq.ZMQError where there can be no
    connection.

    source     of the fetch
    fence      the steps after which its blocks may be written (Blocks.fence)
    deadline   on the clock `monotonic`
    """

    def __init__(
        self, here: Here, fetch: KVFetch, source: PeerSource, fence: object, deadline: float
    ) -> None:
        self.deadline = deadline
        self.pace = PollHint.MESSAGE
        self._here = here
        self._fetch = fetch
        self._source = source
        self._job = FetchJob()
        self._ids: Ids = integers(fetch.blocks.data)
        self._reader = os.urandom(READER_BYTES)
        self._mover: Mover | None = None
        self._was_connected = False
        self._started = monotonic()
        self._decoder: wire.Decoder[FromExporter] = wire.Decoder(FromExporter)
        here.blocks.begin(fence)
        self.socket, self.watcher = sockets.connect_watched(here.context, source.address, here.key)
        self._say(
            KVOpen(
                lease=source.lease,
                reader=self._reader,
                layout=here.endpoint.layout,
                told=here.endpoint.told,
                first=source.first,
                count=len(self._ids),
            )
        )

    def turn(self) -> KVFetched | KVFailure | None:
        """Everything that can be done now. How it ended, once it has, and then it is closed."""
        self._hear()
        self._hear_of_connection()
        if monotonic() >= self.deadline:
            self._late()
        self._move()
        return self._end() if self._job.is_over else None

    def cancel(self) -> None:
        self._fail(FetchJobEvent.CANCEL, "as the engine asked")

    # ---- what the peer says

    def _hear(self) -> None:
        while not self._job.is_over and self.socket.poll(0):
            frames = [frame.buffer for frame in self.socket.recv_multipart(copy=False)]
            try:
                self._take(self._decoder.decode(frames))
            except (WireError, DamagedTransfer) as error:
                self._fail(FetchJobEvent.DAMAGED, str(error))
            except TransferLost as error:
                self._fail(FetchJobEvent.LOST, str(error))

    def _take(self, message: FromExporter) -> None:
        match message:
            case KVOpened():
                if self._job.on(FetchJobEvent.OPENED) is FetchJobState.MOVING:
                    self._begin_to_move(message)
            case KVChunk():
                if (
                    self._job.on(FetchJobEvent.CHUNK) is FetchJobState.MOVING
                    and self._mover is not None
                ):
                    self._mover.receive(message)
            case KVLive():
                self._job.on(FetchJobEvent.LIVE)
            case KVExpired():
                self._fail(FetchJobEvent.EXPIRED, "the lease is over")
            case KVUnlike(reason=reason):
                self._fail(FetchJobEvent.UNLIKE, f"{reason}; ours is of {self._here.endpoint.told}")

    def _begin_to_move(self, message: KVOpened) -> None:
        theirs = integers(message.blocks.data)
        if len(theirs) != len(self._ids):
            raise DamagedTransfer(f"{len(theirs)} blocks were opened instead of {len(self._ids)}")
        try:
            self._mover = self._here.ways.mover(self._ids, theirs, message.offers, self._ask)
        except Unoffered as error:
            self._fail(FetchJobEvent.UNLIKE, str(error))

    def _hear_of_connection(self) -> None:
        for is_up in sockets.connection_news(self.watcher):
            self._was_connected |= is_up
            if not is_up:
                self._hear()  # its last words came before
                self._fail(FetchJobEvent.LOST, f"no connection to {self._source.address}")

    def _late(self) -> None:
        told = f"not done in {self._fetch.timeout_s:g} s, while {self._job.state.name.lower()}"
        if self._was_connected:
            self._fail(FetchJobEvent.LATE, told)
        else:
            self._fail(FetchJobEvent.LOST, f"no connection to {self._source.address}; {told}")

    def _fail(self, event: FetchJobEvent, reason: str) -> None:
        if not self._job.is_over:
            self._job.on(event, reason)

    # ---- what is done

    def _move(self) -> None:
        self.pace = PollHint.MESSAGE
        if self._job.state is FetchJobState.MOVING and self._mover is not None:
            try:
                self.pace = self._mover.advance()
            except DamagedTransfer as error:
                self._fail(FetchJobEvent.DAMAGED, str(error))
            except TransferLost as error:
                self._fail(FetchJobEvent.LOST, str(error))
            if self.pace is PollHint.DONE:
                self._job.on(FetchJobEvent.PLACED)
                self._say(self._done(is_read=True))
        if self._job.state is FetchJobState.STOPPING:
            self.pace = PollHint.SOON
            if self._mover is None or self._mover.stop():
                self._job.on(FetchJobEvent.QUIET)

    def _end(self) -> KVFetched | KVFailure:
        if self._job.state is FetchJobState.FAILED:
            self._say(self._done(is_read=False))
        linger_ms = sockets.LINGER_MS if self._was_connected else 0
        sockets.close_watched(self.socket, self.watcher, linger_ms=linger_ms)
        if self._job.state is FetchJobState.FAILED:
            return KVFailure(self._fetch.job, self._job.failure, self._job.reason)
        assert self._mover is not None
        num_bytes = len(self._ids) * self._here.blocks.num_rows * self._here.blocks.piece_bytes
        seconds = monotonic() - self._started
        return KVFetched(self._fetch.job, num_bytes, seconds, self._mover.name)

    def _done(self, *, is_read: bool) -> KVDone:
        return KVDone(lease=self._source.lease, reader=self._reader, is_read=is_read)

    def _ask(self, chunk: int) -> None:
        self._say(KVRead(lease=self._source.lease, reader=self._reader, chunk=chunk))

    def _say(self, message: FromReader) -> None:
        self.socket.send_multipart(wire.encode(message))
