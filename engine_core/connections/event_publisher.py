"""Publishes the KV events of an engine (protocol/engine/kv_events.py).

The engine's loop only encodes a batch and passes it to a thread, which owns the sockets. So neither
a subscriber that does not read nor a replay delays a step:

- If a subscriber does not read, its queue fills, and later batches are dropped for it. It notices
  the gap in the sequence numbers, and requests a replay.
- If the thread falls behind, the loop drops batches. These have numbers, too, and cannot be
  replayed.
- The batches that are kept for replays are limited in number and in bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque

import msgspec
import zmq

from protocol.config.engine import EngineConfig
from protocol.engine.kv_events import (
    END_OF_REPLAY,
    KVEvent,
    KVEventBatch,
    decode_sequence,
    encode_sequence,
)
from protocol.wire import sockets

log = logging.getLogger(__name__)

MAX_KEPT, MAX_KEPT_BYTES = 10_000, 64 << 20
"""Most batches, and most of their bytes, that are kept for replays."""
MAX_QUEUED = 10_000
"""Most batches queued for a subscriber that does not read."""
_STOP: list[bytes] = [b""]


class KeptBatches:
    """The newest batches, for replays: (sequence number, payload), oldest first."""

    def __init__(self, max_batches: int = MAX_KEPT, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        """Add a batch, and drop the oldest ones that exceed a limit."""
        self._batches.append((number, payload))
        self._num_bytes += len(payload)
        while len(self._batches) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._batches.popleft()[1])

    def since(self, number: int) -> list[tuple[int, bytes]]:
        """Return the batches from this sequence number on."""
        return [batch for batch in self._batches if batch[0] >= number]


class EventPublisher:
    """Numbers the batches of events and publishes them.

    publishing   PUB for the batches
    replaying    ROUTER for replays, or None
    topic        first frame of each message

    The constructor starts the thread that uses the sockets, and closes them at the end.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        publishing: zmq.Socket[bytes],
        replaying: zmq.Socket[bytes] | None,
        topic: str,
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = 0
        self._is_behind = False
        #: Whether the thread ends before it has published all batches, because its queue is full.
        self._gives_up = False
        self._publishing, self._replaying, self._topic = publishing, replaying, topic.encode()
        self._sending, self._receiving = sockets.socket_pair(context, "kv-events")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(
        cls, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]]
    ) -> EventPublisher | None:
        """Return the publisher that `config` describes; None if there is none.

        Raises ValueError if an address is invalid or in use, and OSError if the directory of an ipc
        address cannot be created or is not private.
        """
        if not config.kv_events:
            return None
        plain_tcp = config.kv_events_plain_tcp
        with contextlib.ExitStack() as stack:
            publishing = sockets.bind_publisher(
                context, config.kv_events, plain_tcp=plain_tcp, send_queue=MAX_QUEUED
            )
            stack.callback(publishing.close)
            replaying = None
            if config.kv_events_replay:
                replaying = sockets.bind_replay(
                    context, config.kv_events_replay, plain_tcp=plain_tcp, send_queue=MAX_KEPT + 1
                )
            stack.pop_all()
        log.info(
            "KV events of the namespaces %s, with token ids, are published on %s",
            ", ".join(map(repr, config.kv_events_namespace)),
            config.kv_events,
        )
        return cls(context, publishing, replaying, config.kv_events_topic)

    def send(self, events: list[KVEvent], now: float) -> None:
        """Publish a batch of events, unless it is empty. `now` is in seconds since 1970."""
        if not events:
            return
        payload = self._encoder.encode(KVEventBatch(ts=now, events=events))
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            self._sending.send_multipart([encode_sequence(number), payload])
        except zmq.Again:
            if not self._is_behind:
                log.warning("KV events are dropped: the thread that publishes them is too slow")
            self._is_behind = True
        else:
            self._is_behind = False

    def close(self) -> None:
        """Publish the batches that were sent, and end the thread. Batches are dropped if that takes
        long."""
        self._sending.setsockopt(zmq.SNDTIMEO, sockets.LINGER_MS)
        try:
            self._sending.send_multipart(_STOP)
        except zmq.Again:
            self._gives_up = True
        self._thread.join()
        self._sending.close()

    # ---- in the thread

    def _run(self) -> None:
        kept = KeptBatches()
        poller = zmq.Poller()
        for socket in filter(None, (self._receiving, self._replaying)):
            poller.register(socket, zmq.POLLIN)
        with contextlib.ExitStack() as stack:
            for socket in filter(None, (self._receiving, self._publishing, self._replaying)):
                stack.enter_context(contextlib.closing(socket))
            while not self._gives_up:
                ready = dict(poller.poll())
                if self._receiving in ready and not self._publish_next(kept):
                    return
                if self._replaying in ready:
                    self._replay_next(kept)

    def _publish_next(self, kept: KeptBatches) -> bool:
        """Publish the next batch. Return False if the publisher was closed instead."""
        message = self._receiving.recv_multipart()
        if message == _STOP:
            return False
        sequence, payload = message
        self._publishing.send_multipart([self._topic, sequence, payload])
        kept.add(decode_sequence(sequence), payload)
        return True

    def _replay_next(self, kept: KeptBatches) -> None:
        """Answer the next request for a replay. A malformed one gets no answer. If the subscriber
        is gone or does not read, it gets no more: it can send another request."""
        assert self._replaying is not None
        peer, *request = self._replaying.recv_multipart()
        try:
            empty, start = request
            number = decode_sequence(start)
        except ValueError:
            log.debug("a malformed request for a replay of KV events was ignored")
            return
        with contextlib.suppress(zmq.ZMQError):
            for at, payload in kept.since(number):
                self._replaying.send_multipart(
                    [peer, empty, self._topic, encode_sequence(at), payload]
                )
            end = encode_sequence(END_OF_REPLAY)
            self._replaying.send_multipart([peer, empty, b"", end, b""])
