"""Exports blocks: a thread that answers other workers, and stores nothing about them except in
`Exports`.

The thread reads blocks while steps run. That is safe, because no step writes into blocks under a
lease. If a lease ends while its blocks are read, the reader gets KVExpired (exports.py).

A chunk is gathered when it is requested. Answers that a reader has not received wait in its
connection's queue, which has room for the reader's window of chunks. Further answers to that reader
are dropped.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Sequence
from threading import Thread

import zmq

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
from worker.kv.transfer.exports import Exports

log = logging.getLogger(__name__)

SEND_QUEUE = WINDOW + 2
"""Answers that may wait for one reader: its window of chunks, and one message before and one after
them."""
HELP_MS = 1


class KVServer:
    """Thread that answers readers until `close`.

    socket   a ROUTER whose queues hold SEND_QUEUE messages; the thread uses and closes it
    offers   the movers by which readers can get the blocks
    helper   the NIXL agent, which must make progress while its memory is read (movers/nixl.py);
             None if NIXL is not used
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: KVEndpoint,
        blocks: CacheBlocks,
        offers: Sequence[Offer],
        exports: Exports,
        reports: ReportQueue,
        *,
        helper: Agent | None = None,
    ) -> None:
        self.num_dropped = 0  # invalid messages, and answers that could not be sent
        self._socket = socket
        self._endpoint = endpoint
        self._blocks = blocks
        self._offers = list(offers)
        self._chunk_bytes = next((o.chunk_bytes for o in offers if isinstance(o, ZmqOffer)), 0)
        self._exports = exports
        self._reports = reports
        self._helper = helper
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
                if self._helper is not None:
                    self._helper.make_progress()
        log.info("kv server stopped; messages dropped: %d", self.num_dropped)

    def _poll_timeout_ms(self) -> int | None:
        is_needed = self._helper is not None and self._exports.is_being_read
        return HELP_MS if is_needed else None

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
        except ValueError as error:
            return KVUnlike(reason=str(error))
        if ids is None:
            return KVExpired()
        return KVOpened(blocks=int32(ids), offers=self._offers)

    def _chunk(self, message: KVRead) -> FromExporter:
        """Return the requested chunk, or KVExpired if the lease has ended. Raises WireError if
        there is no such chunk."""
        ids = self._exports.opened(message.lease, message.reader)
        if ids is None:
            return KVExpired()
        if not self._chunk_bytes:
            raise WireError("chunks are not offered")
        try:
            cut = cuts_of(self._blocks, len(ids), self._chunk_bytes)[message.chunk]
        except IndexError as error:
            raise WireError(str(error)) from None
        pieces = self._blocks.gather(cut.first_row, cut.end_row, ids[cut.first : cut.end])
        return KVChunk(chunk=message.chunk, crc32=zlib.crc32(pieces.data), data=UInt8(pieces))

    def _send(self, reader: bytes, answer: FromExporter) -> None:
        """Send an answer. Drop it if the reader is gone or its queue is full."""
        try:
            self._socket.send_multipart([reader, *codec.encode(answer)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.num_dropped += 1
