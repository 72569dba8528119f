"""Exports blocks and checkpoints of states: a thread that answers other workers, and stores nothing
about them except in `Exports`.

The thread reads blocks and checkpoints while steps run. That is safe, because no step writes into
those under a lease. If a lease ends while they are read, the reader gets KVExpired (exports.py).

A chunk is gathered when it is requested. Answers that a reader has not received wait in its
connection's queue, which has room for the reader's window of chunks. Further answers to that reader
are dropped.
"""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass
from threading import Thread

import numpy as np
import zmq
from msgspec.structs import replace

from protocol.wire import codec
from protocol.wire.arrays import UInt8
from protocol.wire.errors import WireError
from protocol.worker.kv import KVEndpoint
from protocol.worker.kv_peers import (
    WINDOW,
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
    ZmqOffer,
)
from worker.device.logprob_columns import int32
from worker.kv.blocks import CacheBlocks
from worker.kv.movers.nixl import Agent
from worker.kv.movers.zmq import cuts_of
from worker.kv.report_queue import ReportQueue
from worker.kv.transfer.exports import Exports, Ids

log = logging.getLogger(__name__)

SEND_QUEUE = WINDOW + 2
"""Answers that may wait for one reader: its window of chunks, and one message before and one after
them."""
HELP_MS = 1


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """Memory that other workers read.

    blocks   its blocks, or checkpoints
    offers   the movers by which readers can get them
    helper   the NIXL agent, which must make progress while its memory is read (movers/nixl.py);
             None if NIXL is not used
    """

    blocks: CacheBlocks
    offers: list[Offer]
    helper: Agent | None = None

    @property
    def chunk_bytes(self) -> int:
        """Return the size of the offered chunks; 0: chunks are not offered."""
        return next((each.chunk_bytes for each in self.offers if isinstance(each, ZmqOffer)), 0)


class KVServer:
    """Thread that answers readers until `close`.

    socket   a ROUTER whose queues hold SEND_QUEUE messages; the thread uses and closes it
    cache    the K/V cache
    states   the checkpoints; None: the model has no recurrent state
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: KVEndpoint,
        cache: ExportedMemory,
        states: ExportedMemory | None,
        exports: Exports,
        reports: ReportQueue,
    ) -> None:
        self.num_dropped = 0  # invalid messages, and answers that could not be sent
        self._socket = socket
        self._endpoint = endpoint
        self._cache = cache
        self._states = states
        self._exports = exports
        self._reports = reports
        memories = [cache] if states is None else [cache, states]
        self._helpers = [each.helper for each in memories if each.helper is not None]
        self._decoder: codec.Decoder[FromReader] = codec.Decoder(FromReader)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = Thread(target=reports.guard(self._run), name="kv server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        with self._socket:
            while self._stop not in (ready := dict(poller.poll(self._poll_timeout_ms()))):
                if ready:
                    self._serve_one()
                for helper in self._helpers:
                    helper.make_progress()
        log.info("kv server stopped; messages dropped: %d", self.num_dropped)

    def _poll_timeout_ms(self) -> int | None:
        return HELP_MS if self._helpers and self._exports.is_being_read else None

    def _serve_one(self) -> None:
        """Receive one message and answer it."""
        reader, *frames = self._socket.recv_multipart()
        try:
            answer = self._answer(self._decoder.decode(frames))
        except WireError as error:
            self.num_dropped += 1
            log.debug("dropped an invalid message: %s", error)
            return
        if answer is not None:
            self._send(reader, answer)

    def _answer(self, message: FromReader) -> FromExporter | None:
        match message:
            case KVOpen():
                return self._open(message)
            case KVRead():
                return self._chunk(message)
            case KVDone(lease=lease, reader=reader, is_read=is_read):
                ended = self._exports.on_reader_done(lease, reader)
                if ended.is_taken:
                    self._reports.add_taken(lease)
                if not is_read:
                    return None
                return KVLive() if ended.is_live else KVExpired()

    def _open(self, message: KVOpen) -> FromExporter:
        if message.layout != self._endpoint.layout:
            log.warning("refused a reader with a cache of %s", message.layout_text)
            return KVUnlike(reason=f"the peer's cache is of {self._endpoint.layout_text}")
        try:
            ids = self._exports.open(message.lease, message.reader, message.first, message.count)
            checkpoint = None
            if message.needs_state:
                checkpoint = self._exports.open_state(message.lease, message.reader)
        except ValueError as error:
            return KVUnlike(reason=str(error))
        if ids is None or (message.needs_state and checkpoint is None):
            return KVExpired()
        opened = KVOpened(blocks=int32(ids), offers=self._cache.offers)
        if checkpoint is None or self._states is None:
            return opened
        return replace(opened, checkpoint=checkpoint, state_offers=self._states.offers)

    def _chunk(self, message: KVRead) -> FromExporter:
        """Return the requested chunk, or KVExpired if the lease has ended. Raises WireError if
        there is no such chunk."""
        memory, ids = self._cache, self._exports.opened(message.lease, message.reader)
        if message.is_state:
            if self._states is None:
                raise WireError("there are no states")
            memory, ids = self._states, self._opened_state(message)
        if ids is None:
            return KVExpired()
        if not memory.chunk_bytes:
            raise WireError("chunks are not offered")
        try:
            cut = cuts_of(memory.blocks, len(ids), memory.chunk_bytes)[message.chunk]
        except IndexError as error:
            raise WireError(str(error)) from None
        wanted = ids[cut.first : cut.end]
        pieces = memory.blocks.gather(cut.first_row, cut.end_row, wanted, cut.part)
        return KVChunk(chunk=message.chunk, crc32=zlib.crc32(pieces.data), data=UInt8(pieces))

    def _opened_state(self, message: KVRead) -> Ids | None:
        """Return the checkpoint that a reader reads, [1]; None if its lease has ended. Raises
        WireError if its lease has no state after the blocks that it has opened."""
        try:
            checkpoint = self._exports.open_state(message.lease, message.reader)
        except ValueError as error:
            raise WireError(str(error)) from None
        return None if checkpoint is None else np.array([checkpoint])

    def _send(self, reader: bytes, answer: FromExporter) -> None:
        """Send an answer. Drop it if the reader is gone or its queue is full."""
        try:
            self._socket.send_multipart([reader, *codec.encode(answer)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.num_dropped += 1
