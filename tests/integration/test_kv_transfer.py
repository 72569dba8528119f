"""K/V transfers from one worker's cache to another's, through real sockets, with every mover.

The reader is in the test's process. The exporter is in another process, which can be killed or
stopped.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from msgspec.structs import replace

from protocol.config.worker import WorkerConfig
from protocol.wire import codec, sockets
from protocol.wire.arrays import Int32
from protocol.worker.kv import (
    KVCancel,
    KVExport,
    KVFailure,
    KVFetch,
    KVFetched,
    PeerSource,
)
from protocol.worker.kv_peers import KVChunk, KVDone, KVOpen, KVOpened, KVRead
from tests.support.kv_proxy import Proxy
from tests.support.kv_worker import Peer, Shape, Worker
from tests.support.waiting import eventually

pytestmark = pytest.mark.long
MOVERS = [
    "auto",
    "shm",
    "zmq",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed"
        ),
    ),
]
LEASE = b"a lease of blocks"
SMALL = Shape(seed=1)
BIG = Shape(num_layers=8, num_blocks=120, block_tokens=16, num_kv_heads=4, head_dim=64, seed=3)
"""256 KiB per block. A transfer of all blocks takes long enough for a test to interrupt it."""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return private_address(tmp_path)


@pytest.fixture
def lease(request: pytest.FixtureRequest) -> bytes:
    """Return the name of a lease that no other test uses."""
    return request.node.name.encode()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """Yield a peer with a small cache, for tests that leave it as it is."""
    with Peer(SMALL, private_address(tmp_path_factory.mktemp("small"))) as peer:
        yield peer


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """Yield a peer with a big cache, which tests may overwrite."""
    with Peer(BIG, private_address(tmp_path_factory.mktemp("big")), "zmq") as peer:
        yield peer


def private_address(directory: Path) -> str:
    sockets.make_private(directory / "run")
    return f"ipc://{directory / 'run' / 'kv'}"


def reader(context: zmq.Context[zmq.Socket[bytes]], shape: Shape, mover: Any = "auto") -> Worker:
    return Worker(context, shape, WorkerConfig(model="", kv_mover=mover))


def empty(shape: Shape, **more: object) -> Shape:
    return Shape(
        **{**{f: getattr(shape, f) for f in shape.__struct_fields__}, "seed": None, **more}
    )


# ---- the bytes


def shapes() -> Iterator[Shape]:
    chance = random.Random(5)
    for dtype in ("float32", "bfloat16"):
        yield Shape(
            num_layers=chance.randrange(1, 6),
            num_blocks=chance.randrange(12, 40),
            block_tokens=chance.choice((1, 4, 16)),
            num_kv_heads=chance.randrange(1, 5),
            head_dim=chance.choice((8, 24, 64)),
            dtype=dtype,
            seed=chance.randrange(1000),
        )
    yield BIG


@pytest.mark.parametrize("mover", MOVERS)
def test_blocks_arrive_bit_by_bit_and_no_other_block_is_changed(
    context, tmp_path, monkeypatch, mover
):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    chance = random.Random(9)
    for number, shape in enumerate([BIG] if mover == "auto" else shapes()):  # "auto" takes shm
        sockets.make_private(tmp_path / f"run{number}")
        address = f"ipc://{tmp_path / f'run{number}' / 'kv'}"
        theirs = chance.sample(range(1, shape.num_blocks), shape.num_blocks // 2)
        theirs += sorted(set(range(1, shape.num_blocks)) - set(theirs))  # scattered, then in runs
        first = chance.randrange(1, 4)
        wanted = len(theirs) - first - chance.randrange(3)
        ours_shape = empty(shape, num_blocks=shape.num_blocks + 5)
        ours = chance.sample(range(1, ours_shape.num_blocks), wanted)
        with Peer(shape, address, mover) as peer, reader(context, ours_shape, mover) as worker:
            peer.export(LEASE, theirs)
            worker.fetch(1, peer.source(LEASE, first), ours)
            result = worker.result_of(1)
            assert isinstance(result, KVFetched), result
            assert result.num_bytes == wanted * shape.block_bytes
            assert result.mover == ("shm" if mover == "auto" else mover)
            expected = ours_shape.cache()
            expected.rows[:, ours] = shape.cache().rows[:, theirs[first : first + wanted]]
            assert torch.equal(worker.cache.rows, expected.rows)
            peer.program.line_with(f"taken {LEASE.hex()}")


STATES = Shape(num_checkpoints=6, state_items=1_200_001, seed=4)
"""States of 4.8 MB, which is not a multiple of eight bytes, beside blocks of 3 KB."""


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("state_items", [3, STATES.state_items])
def test_a_state_arrives_bit_by_bit_and_no_other_checkpoint_is_changed(
    context, address, mover, state_items
):
    shape = replace(STATES, state_items=state_items)
    ours = empty(shape, num_checkpoints=9)
    with Peer(shape, address, mover) as peer, reader(context, ours, mover) as worker:
        peer.export(LEASE, [3, 9, 4, 11], checkpoint=5)
        worker.fetch(1, peer.source(LEASE, 1), [2, 1, 6], checkpoint=8)
        result = worker.result_of(1)
        assert isinstance(result, KVFetched), result
        assert result.num_bytes == 3 * shape.block_bytes + shape.state_bytes
        expected, theirs = ours.states(), shape.states()
        expected.states[8] = theirs.states[5]
        assert torch.equal(worker.states.rows, expected.rows)
        assert torch.equal(worker.cache.rows[:, [2, 1, 6]], shape.cache().rows[:, [9, 4, 11]])
        peer.program.line_with(f"taken {LEASE.hex()}")


def test_transfers_run_concurrently_and_a_lease_with_two_readers_is_taken_once(context, address):
    """The proxy holds the large transfers back until the small one has its result."""
    with (
        Peer(BIG, address, "zmq") as peer,
        Proxy(context, f"{address}p", address) as proxy,
        reader(context, empty(BIG), "zmq") as worker,
    ):
        peer.export(LEASE, list(range(1, 60)), readers=2)
        proxy.holds = lambda message: isinstance(message, KVChunk) and message.chunk == 2
        worker.fetch(1, through(proxy, LEASE), list(range(1, 60)))
        worker.fetch(2, through(proxy, LEASE), list(range(60, 119)))
        assert eventually(lambda: proxy.num_held)
        worker.fetch(3, peer.source(b"unknown"), [119])
        assert worker.result_of(3) == KVFailure(3, "expired", "the lease has ended")
        assert not {1, 2} & worker.results.keys()
        proxy.release()
        assert isinstance(worker.result_of(1), KVFetched)
        assert isinstance(worker.result_of(2), KVFetched)
        peer.program.line_with("taken")
        rows = BIG.cache().rows
        assert torch.equal(worker.cache.rows[:, 1:60], rows[:, 1:60])
        assert torch.equal(worker.cache.rows[:, 60:119], rows[:, 1:60])
    assert sum("taken" in line for line in peer.program.out) == 1


def test_transfers_beyond_the_limit_run_after_others(context, address):
    shape = Shape(num_blocks=200, seed=1)
    with Peer(shape, address) as peer, reader(context, empty(shape)) as worker:
        peer.export(LEASE, list(range(1, 200)), readers=150)
        for job in range(1, 151):
            worker.fetch(job, peer.source(LEASE, job), [job], timeout_s=60)
        results = [worker.result_of(job, 15) for job in range(1, 151)]  # well before their timeouts
        assert all(isinstance(result, KVFetched) for result in results), results
        assert torch.equal(worker.cache.rows[:, 1:151], shape.cache().rows[:, 2:152])
        peer.program.line_with("taken")


# ---- what does not fit


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"},
        {"model": "0ther"},
        {"block_tokens": 8},
        {"num_layers": 3},
        {"num_checkpoints": 2},
    ],
)
def test_another_layout_is_refused_and_both_are_named(context, small, lease, other):
    ours = empty(SMALL, **other)
    with reader(context, ours) as worker:
        small.export(lease, [1, 2])
        checkpoint = 1 if ours.num_checkpoints else None
        worker.fetch(1, small.source(lease), [1, 2], checkpoint=checkpoint)
        result = worker.result_of(1)
        assert isinstance(result, KVFailure)
        assert result.kind == "refused"
        assert SMALL.layout.description in result.message
        assert ours.layout.description in result.message


def test_more_blocks_than_a_lease_has_are_refused(context, small, lease):
    with reader(context, empty(SMALL)) as worker:
        small.export(lease, [1, 2, 3])
        worker.fetch(1, small.source(lease, first=2), [1, 2])
        result = worker.failure_of(1)
        assert (result.kind, "blocks 2 to 4" in result.message) == ("refused", True)


def test_a_state_is_refused_if_it_does_not_follow_the_last_block_that_is_read(context, address):
    with Peer(STATES, address) as peer, reader(context, empty(STATES)) as worker:
        peer.export(LEASE, [3, 9, 4], checkpoint=5)
        worker.fetch(1, peer.source(LEASE), [1, 2], checkpoint=2)
        result = worker.failure_of(1)
        assert (result.kind, "one after the last of them" in result.message) == ("refused", True)
        assert not worker.states.rows.any()


@pytest.mark.parametrize("checkpoint", [None, 0, -1, 7])
def test_a_command_without_a_checkpoint_that_exists_raises(context, address, checkpoint):
    config = WorkerConfig(model="", kv_export=True, kv_address=address)
    with Worker(context, STATES, config) as worker:
        for command in (
            KVExport(lease=LEASE, blocks=Int32.of([1]), readers=1, checkpoint=checkpoint),
            KVFetch(
                job=1,
                source=PeerSource(address=address, lease=LEASE),
                blocks=Int32.of([1]),
                timeout_s=1,
                checkpoint=checkpoint,
            ),
        ):
            with pytest.raises(ValueError, match=f"checkpoint {checkpoint}; there are 6"):
                worker.transfers.apply(command)


def test_a_mover_that_the_peer_does_not_offer_is_refused(context, address):
    shape = Shape(seed=1)
    with Peer(shape, address, "zmq") as peer, reader(context, empty(shape), "shm") as worker:
        peer.export(LEASE, [1, 2])
        worker.fetch(1, peer.source(LEASE), [1, 2])
        message = "kv_mover is shm here; the peer offers zmq"
        assert worker.result_of(1) == KVFailure(1, "refused", message)


def test_memory_that_cannot_be_mapped_is_moved_through_zeromq(context, address, tmp_path):
    """A proxy replaces the path in the offer, as if the peer were in another PID namespace."""
    shape = Shape(seed=1)
    with Peer(shape, address) as peer, Proxy(context, f"{address}p", address) as proxy:
        proxy.replaces = lambda message: (
            message_with_other_path(message) if isinstance(message, KVOpened) else message
        )
        source = PeerSource(address=f"{address}p", lease=LEASE)
        for job, (mover, outcome) in enumerate([("auto", "zmq"), ("shm", "unreachable")]):
            peer.export(LEASE, [3, 4])
            with reader(context, empty(shape), mover) as worker:
                worker.fetch(job, source, [1, 2])
                result = worker.result_of(job)
                assert outcome in (getattr(result, "mover", ""), getattr(result, "kind", ""))
            peer.withdraw(LEASE)


def message_with_other_path(message: KVOpened) -> KVOpened:
    offers = [
        replace(offer, path=f"/proc/{os.getpid()}/exe") if hasattr(offer, "path") else offer
        for offer in message.offers
    ]
    return replace(message, offers=offers)


# ---- faults


def fetch_all(worker: Worker, source: PeerSource, timeout_s: float = 10) -> None:
    ids = list(range(1, BIG.num_blocks))
    worker.fetch(1, source, ids, timeout_s)


@pytest.fixture
def under_way(context, big, lease) -> Iterator[tuple[Peer, Worker, Proxy]]:
    """Yield (exporter, reader, proxy). A transfer of all blocks through the proxy does not end,
    because the proxy holds the third chunk back."""
    with (
        Proxy(context, f"{big.address}p", big.address) as proxy,
        reader(context, empty(BIG), "zmq") as worker,
    ):
        big.export(lease, list(range(1, BIG.num_blocks)))
        proxy.holds = lambda message: isinstance(message, KVChunk) and message.chunk == 2
        yield big, worker, proxy


def through(proxy: Proxy, lease: bytes) -> PeerSource:
    return PeerSource(address=proxy.address, lease=lease)


def test_a_chunk_that_was_changed_in_transit_is_damage(under_way, lease):
    _, worker, proxy = under_way

    def flip(message):
        if isinstance(message, KVChunk) and message.chunk == 5:
            message.data.data[77] ^= 1
        return message

    proxy.holds = lambda message: False
    proxy.replaces = flip
    fetch_all(worker, through(proxy, lease))
    result = worker.result_of(1)
    assert (result.kind, "chunk 5 does not match its checksum" in result.message) == (
        "damaged",
        True,
    )


def test_a_peer_that_is_killed_during_a_transfer_is_unreachable_at_once(context, address):
    with Peer(BIG, address, "zmq") as peer, reader(context, empty(BIG), "zmq") as worker:
        peer.export(LEASE, list(range(1, BIG.num_blocks)))
        peer.program.signal(signal.SIGSTOP)
        fetch_all(worker, peer.source(LEASE))
        assert worker.receives_nothing()
        peer.program.signal(signal.SIGKILL)
        assert worker.failure_of(1).kind == "unreachable"  # otherwise it would be a "timeout"


def test_a_missing_peer_is_unreachable_at_once(context, address):
    with reader(context, empty(BIG)) as worker:
        fetch_all(worker, PeerSource(address=address, lease=LEASE))
        assert worker.failure_of(1, timeout_s=5).kind == "unreachable"


@pytest.mark.parametrize("bad", ["tcp://somewhere:99", "ipc://", "http://x", "ipc:///" + "x" * 200])
def test_an_invalid_address_is_unreachable_and_fails_no_other_fetch(context, small, lease, bad):
    with reader(context, empty(SMALL)) as worker:
        worker.fetch(1, PeerSource(address=bad, lease=lease), [1])
        assert worker.failure_of(1).kind == "unreachable"
        small.export(lease, [2])
        worker.fetch(2, small.source(lease), [1])
        assert isinstance(worker.result_of(2), KVFetched)


def test_a_transfer_from_a_stopped_peer_fails_at_its_timeout(under_way, lease):
    peer, worker, proxy = under_way
    fetch_all(worker, through(proxy, lease), timeout_s=0.6)
    assert eventually(lambda: proxy.num_held)
    peer.program.signal(signal.SIGSTOP)
    try:
        result = worker.result_of(1)
    finally:
        peer.program.signal(signal.SIGCONT)
    assert (result.kind, "moving" in result.message) == ("timeout", True)


def test_a_lease_that_is_withdrawn_during_a_transfer_is_expired(under_way, lease):
    peer, worker, proxy = under_way
    fetch_all(worker, through(proxy, lease))
    assert eventually(lambda: proxy.num_held)
    peer.withdraw(lease)
    peer.fill(7)
    proxy.release()
    assert worker.result_of(1) == KVFailure(1, "expired", "the lease has ended")


@pytest.mark.parametrize("mover", MOVERS)
def test_data_of_an_ended_lease_is_never_accepted(context, address, mover):
    """The lease is withdrawn and its blocks are overwritten after the reader's last copy, while a
    proxy holds back the reader's last message."""
    with (
        Peer(BIG, address, mover) as peer,
        Proxy(context, f"{address}p", address) as proxy,
        reader(context, empty(BIG), mover) as worker,
    ):
        peer.export(LEASE, list(range(1, BIG.num_blocks)))
        proxy.holds = lambda message: isinstance(message, KVDone)
        fetch_all(worker, through(proxy, LEASE))
        assert eventually(lambda: proxy.num_held)
        peer.withdraw(LEASE)
        peer.fill(7)
        proxy.release()
        assert worker.result_of(1) == KVFailure(1, "expired", "the lease has ended")


def test_a_cancelled_transfer_is_reported_once_and_writes_no_more(under_way, lease):
    _, worker, proxy = under_way
    fetch_all(worker, through(proxy, lease))
    assert eventually(lambda: proxy.num_held)
    worker.transfers.apply(KVCancel(job=1))
    assert worker.result_of(1) == KVFailure(1, "cancelled", "cancelled by the engine")
    before = worker.cache.rows.clone()
    worker.transfers.apply(KVCancel(job=1))
    proxy.release()
    assert worker.receives_nothing()
    assert torch.equal(worker.cache.rows, before)


def test_a_reader_that_gives_up_counts_as_done(under_way, lease):
    peer, worker, proxy = under_way
    fetch_all(worker, through(proxy, lease))
    assert eventually(lambda: proxy.num_held)
    worker.transfers.apply(KVCancel(job=1))
    worker.result_of(1)
    proxy.release()
    peer.program.line_with(f"taken {lease.hex()}")


def test_a_worker_that_stops_gives_up_its_transfers(under_way, lease):
    _, worker, proxy = under_way
    fetch_all(worker, through(proxy, lease))
    assert eventually(lambda: proxy.num_held)
    # the end of the fixture's `with` block returns


# ---- readers that misbehave


def test_invalid_messages_are_dropped_and_an_idle_reader_costs_one_window(context, address):
    """The idle reader requests every chunk twice, and receives no reply from its socket. What
    is queued for it would stay in memory, so a short peak has another cause."""
    big = empty(BIG, num_blocks=1200, seed=3)  # 300 MB
    with (
        Peer(big, address, "zmq") as peer,
        reader(context, empty(big), "zmq") as worker,
        sockets.connect_dealer(context, address) as greedy,
    ):
        peer.export(LEASE, list(range(1, 1200)), readers=2)
        before = peer.resident_bytes()
        greedy.setsockopt(zmq.LINGER, 0)
        for frames in ([b""], [b"\x07x"], [b"\x01\xc1"], [b"\x01\x80"], [b"x"] * 70, []):
            greedy.send_multipart([*frames, b""])
        layout = big.layout
        opening = KVOpen(
            lease=LEASE, reader=b"greedy", layout=layout.digest, layout_text="", first=0, count=1199
        )
        greedy.send_multipart(codec.encode(opening))
        for chunk in [10**9, -1, *range(300), *range(300)]:
            greedy.send_multipart(codec.encode(KVRead(lease=LEASE, reader=b"greedy", chunk=chunk)))
        worker.fetch(1, peer.source(LEASE, first=1000), list(range(1, 100)))
        assert isinstance(worker.result_of(1), KVFetched), (
            "other readers do not wait for the greedy one"
        )
        assert eventually(lambda: peer.resident_bytes() - before < 32 << 20)


def test_exported_memory_costs_nothing_until_it_is_touched_and_leaves_no_file(context, address):
    shape = Shape(num_layers=8, num_blocks=40_000, block_tokens=16, head_dim=64)
    with Peer(shape, address, "shm") as peer, reader(context, Shape(), "auto"):
        assert shape.num_blocks * shape.block_bytes > 7e9
        status = Path(f"/proc/{peer.pid}/status").read_text()
        (shared,) = [line for line in status.splitlines() if line.startswith("RssShmem")]
        assert int(shared.split()[1]) < 4096
        assert not [name for name in os.listdir("/dev/shm") if "tidegate" in name]
