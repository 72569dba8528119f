"""KV events over sockets: a real engine, replays, and a subscriber that does not read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine_core.blocks.hash import root_hash
from engine_core.connections.event_publisher import EventPublisher
from protocol.engine.kv_events import AllBlocksCleared, BlockRemoved
from protocol.process.exit_codes import ExitCode
from protocol.sdk.client import Client
from protocol.wire import sockets
from tests.support.ports import free_port
from tests.support.processes import Program
from tests.support.tiny_engine import tiny_engine
from tests.support.vllm_events import CacheMirror, decode_batch, kind_of
from tests.support.waiting import eventually

WAIT_MS = 60_000
TOPIC = "kv@pod@tiny"
PROMPT = list(range(2, 52))


class Subscriber:
    """Subscribes to events and requests replays with plain sockets, as vLLM's subscribers do."""

    def __init__(self, address: str, replay: str = "", topic: str = "") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(address)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        if replay:
            self._replay.connect(replay)

    def receive(self) -> tuple[str, int, Any]:
        """Return topic, sequence number and batch of the next message."""
        topic, sequence, payload = self._socket.recv_multipart()
        return topic.decode(), int.from_bytes(sequence, "big"), decode_batch(payload)

    def has_message(self) -> bool:
        return bool(self._socket.poll(100))

    def request_replay(self, *frames: bytes) -> None:
        self._replay.send_multipart(frames)

    def replay(self, start: int) -> list[tuple[int, Any]]:
        """Return the batches from number `start` on, as the engine replays them."""
        self.request_replay(b"", start.to_bytes(8, "big"))
        found: list[tuple[int, Any]] = []
        while True:
            _, _, sequence, payload = self._replay.recv_multipart()
            if sequence == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((int.from_bytes(sequence, "big"), decode_batch(payload)))

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def subscribed(*arguments: str) -> Iterator[Subscriber]:
    subscriber = Subscriber(*arguments)
    try:
        yield subscriber
    finally:
        subscriber.close()


def events_of(batches: list[tuple[int, Any]]) -> list[Any]:
    return [event for _, batch in batches for event in batch.events]


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Return a directory for sockets that only this user can enter."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    return folder


def test_subscribers_receive_and_replay_what_an_engine_caches(private: Path) -> None:
    address, replay = f"tcp://127.0.0.1:{free_port()}", f"ipc://{private}/replay.sock"
    config: dict[str, Any] = {"kv_events_topic": TOPIC, "kv_events_namespace": ["team"]}
    with (
        tiny_engine(kv_events=address, kv_events_replay=replay, **config) as (program, engine),
        Client(engine) as client,
        subscribed(address, replay, "kv@") as subscriber,
    ):

        def compute(prompt: list[int], namespace: str) -> None:
            client.generate(prompt, max_tokens=1, namespace=namespace).tokens()

        # A subscription takes effect at some time after `connect`.
        for number in range(1000):
            compute([number % 90 + 2] * 17, "team")
            if subscriber.has_message():
                break
        topic, first, _ = subscriber.receive()
        assert topic == TOPIC
        compute(PROMPT, "other")
        compute(PROMPT, "team")

        subscriber.request_replay(b"", b"no number")
        subscriber.request_replay(b"only one frame")

        def is_published() -> bool:
            *_, last = events_of(subscriber.replay(0))
            return getattr(last, "token_ids", None) == PROMPT[:48]

        assert eventually(is_published)
        batches = subscriber.replay(0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        assert all(batch.data_parallel_rank == 0 for _, batch in batches)
        events = events_of(batches)
        assert kind_of(events[0]) == "AllBlocksCleared"
        mirror = CacheMirror([root_hash(client.model.digest, "team")])
        for event in events:
            mirror.apply(event)
        assert events_of(subscriber.replay(len(batches) - 1)) == batches[-1][1].events
        assert subscriber.replay(len(batches)) == []

        # The batches that were published later are those that were replayed.
        told = {number: batch for number, batch in batches if number > first}
        for _ in told:
            _, number, batch = subscriber.receive()
            assert batch == told[number]
    assert "with token ids, are published on tcp://127.0.0.1" in "\n".join(program.err)


def test_an_address_that_other_hosts_can_reach_ends_the_engine_at_once(private: Path) -> None:
    config = {
        "worker": {"model": ""},
        "address": f"ipc://{private}/engine.sock",
        "kv_events": "tcp://*:5557",
        "kv_events_namespace": [""],
    }
    with Program(["-P", "-m", "engine_core", "--config", json.dumps(config)]) as program:
        assert program.end() == ExitCode.USAGE
    assert "--kv-events-plain-tcp" in program.err[-1]


def test_a_subscriber_that_does_not_read_misses_batches_and_replays_them(private: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address, replay = f"ipc://{private}/events.sock", f"ipc://{private}/replay.sock"
    publisher = EventPublisher(
        context,
        sockets.bind_publisher(context, address, plain_tcp=False, send_queue=1),
        sockets.bind_replay(context, replay, plain_tcp=False, send_queue=1000),
        "",
    )
    with subscribed(address, replay) as subscriber:
        count = 1
        publisher.send([AllBlocksCleared()], 0.0)
        while not subscriber.has_message():
            publisher.send([AllBlocksCleared()], 0.0)
            count += 1
        num_known = subscriber.receive()[1]
        large = BlockRemoved(block_hashes=[2**64 - 1] * 50_000)
        for _ in range(100):
            publisher.send([large], 0.0)
        publisher.send([AllBlocksCleared()], 0.0)
        count += 101

        def has_all() -> bool:
            return len(subscriber.replay(count - 1)) == 1

        assert eventually(has_all)
        received = set()
        while subscriber.has_message():
            received.add(subscriber.receive()[1])
        missed = set(range(num_known + 1, count)) - received
        assert missed
        replayed = {number for number, _ in subscriber.replay(min(missed))}
        assert missed <= replayed
        publisher.close()
    context.destroy(linger=0)
