"""KV events: the schema on the wire, which events an engine produces, and what is kept."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
import zmq

from engine_core.connections.event_publisher import KeptBatches
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_sequence,
    encode_sequence,
    external_hash,
)
from protocol.wire import sockets
from tests.support.engines import Bench
from tests.support.vllm_events import decode_batch, kind_of

BATCH = KVEventBatch(
    ts=1.5,
    events=[
        AllBlocksCleared(),
        BlockStored(
            block_hashes=[2**64 - 1, 7],
            parent_block_hash=None,
            token_ids=[1, 2, 3, 300],
            block_size=2,
        ),
        BlockRemoved(block_hashes=[7]),
    ],
)
GOLDEN = bytes.fromhex(
    "93cb3ff800000000000093"
    "81a474797065b0416c6c426c6f636b73436c6561726564"
    "88a474797065ab426c6f636b53746f726564"
    "ac626c6f636b5f68617368657392cfffffffffffffffff07"
    "b1706172656e745f626c6f636b5f68617368c0"
    "a9746f6b656e5f69647394010203cd012c"
    "aa626c6f636b5f73697a6502"
    "a76c6f72615f6964c0"
    "a66d656469756da3475055"
    "a96c6f72615f6e616d65c0"
    "83a474797065ac426c6f636b52656d6f766564"
    "ac626c6f636b5f6861736865739107"
    "a66d656469756da3475055"
    "00"
)
PUBLISHED: dict[str, Any] = {"kv_events": "ipc:///nowhere/events.sock"}


def test_the_bytes_of_a_batch_do_not_change() -> None:
    assert msgspec.msgpack.encode(BATCH) == GOLDEN
    assert msgpack.unpackb(GOLDEN)[1][2] == {
        "type": "BlockRemoved",
        "block_hashes": [7],
        "medium": "GPU",
    }


def test_a_batch_is_decoded_with_the_schema_of_vllm() -> None:
    batch = decode_batch(GOLDEN)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    cleared, stored, removed = batch.events
    assert kind_of(cleared) == "AllBlocksCleared"
    assert (stored.block_hashes, stored.parent_block_hash) == ([2**64 - 1, 7], None)
    assert (stored.token_ids, stored.block_size) == ([1, 2, 3, 300], 2)
    assert (stored.lora_id, stored.medium, stored.lora_name) == (None, "GPU", None)
    assert (removed.block_hashes, removed.medium) == ([7], "GPU")


def test_sequence_numbers_and_hashes_are_big_endian() -> None:
    assert encode_sequence(258) == b"\0\0\0\0\0\0\1\2"
    assert encode_sequence(-1) == b"\xff" * 8
    assert decode_sequence(b"\0\0\0\0\0\0\1\2") == 258
    assert external_hash(b"x" * 24 + b"\0\0\0\0\0\0\1\2") == 258
    with pytest.raises(ValueError, match="8 bytes, not 3"):
        decode_sequence(b"abc")


# ---- the engine
def published(bench: Bench) -> list[tuple[str, list[int]]]:
    """Return (kind, token ids or hashes) of each event since the last call."""
    return [
        (kind_of(event), getattr(event, "token_ids", getattr(event, "block_hashes", [])))
        for event in bench.engine.drain_kv_events()
    ]


def test_an_engine_reports_blocks_after_their_step_has_committed() -> None:
    bench = Bench(**PUBLISHED, kv_events_namespace=[""])
    assert published(bench) == [("AllBlocksCleared", [])]
    prompt = list(range(1, 11))
    bench.add(prompt, max_tokens=1)
    bench.plan()
    assert published(bench) == []
    bench.finish()
    assert published(bench) == [("BlockStored", prompt[:8])]


def test_a_later_event_names_the_block_before_it() -> None:
    bench = Bench(**PUBLISHED, kv_events_namespace=[""])
    number = bench.add([1] * 8, max_tokens=6, ignore_eos=True)
    bench.run()
    _, first, second = bench.engine.drain_kv_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert len(first.block_hashes) == 2
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == bench.tokens(number)[:4]


def test_a_cached_prefix_is_not_reported_twice() -> None:
    bench = Bench(**PUBLISHED, kv_events_namespace=[""])
    for last in (8, 9):
        bench.add([*range(1, 9), last], max_tokens=1)
        bench.run()
    assert published(bench) == [("AllBlocksCleared", []), ("BlockStored", list(range(1, 9)))]


def test_blocks_that_are_overwritten_are_reported_as_removed() -> None:
    bench = Bench(**PUBLISHED, kv_events_namespace=[""], num_blocks=5, max_len=16)
    bench.add([1] * 15, max_tokens=1)
    bench.run()
    _, stored = bench.engine.drain_kv_events()
    assert isinstance(stored, BlockStored)
    bench.add([2] * 15, max_tokens=1)
    bench.plan()
    (removed,) = bench.engine.drain_kv_events()
    assert isinstance(removed, BlockRemoved)
    assert sorted(removed.block_hashes) == sorted(stored.block_hashes)


def test_other_namespaces_and_salts_are_not_reported() -> None:
    bench = Bench(**PUBLISHED, kv_events_namespace=["group:team/"])
    for namespace in ("", "group:team/", "group:team/salt", "key:team/"):
        bench.add([1] * 9, namespace=namespace, max_tokens=1)
        bench.run()
    assert published(bench) == [("AllBlocksCleared", []), ("BlockStored", [1] * 8)]


def test_an_engine_without_the_option_produces_no_events() -> None:
    bench = Bench()
    bench.add([1] * 9, max_tokens=1)
    bench.run()
    assert bench.engine.drain_kv_events() == []


# ---- options
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_events": "ipc:///a/b"}, "kv_events and kv_events_namespace must be set together"),
        ({"kv_events_namespace": [""]}, "kv_events and kv_events_namespace must be set together"),
        (
            {"kv_events": "ipc:///a/b", "kv_events_namespace": [""], "prefix_cache": False},
            "need prefix_cache",
        ),
        ({"kv_events_replay": "ipc:///a/b"}, "kv_events_replay needs kv_events"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineConfig(worker=WorkerConfig(model=""), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5557", "tcp://localhost:5557", "tcp://[::1]:5557"]
)
def test_plain_tcp_is_allowed_within_the_host(address: str) -> None:
    assert sockets.check_plain_address(address, plain_tcp=False) is None


@pytest.mark.parametrize(
    "address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://host:5557"]
)
def test_plain_tcp_that_other_hosts_can_reach_must_be_allowed(address: str) -> None:
    with pytest.raises(ValueError, match="--kv-events-plain-tcp"):
        sockets.check_plain_address(address, plain_tcp=False)
    assert sockets.check_plain_address(address, plain_tcp=True) is None


def test_an_address_in_use_is_an_error_that_names_it() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    other = context.socket(zmq.PUB)
    port = other.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ValueError, match=rf"tcp://127.0.0.1:{port}: Address already in use"):
        sockets.bind_publisher(context, f"tcp://127.0.0.1:{port}", plain_tcp=False, send_queue=1)
    context.destroy(linger=0)


# ---- replays
def test_the_newest_batches_are_kept() -> None:
    kept = KeptBatches(max_batches=3, max_bytes=10)
    for number in range(5):
        kept.add(number, b"ab")
    assert kept.since(0) == [(2, b"ab"), (3, b"ab"), (4, b"ab")]
    assert kept.since(4) == [(4, b"ab")]
    kept.add(5, b"12345678")
    assert kept.since(0) == [(4, b"ab"), (5, b"12345678")]
    kept.add(6, b"x" * 11)
    assert kept.since(0) == []
