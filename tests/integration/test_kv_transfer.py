"""K/V from one worker's cache into another's: two processes, real sockets, every mover.

Who reads is in this process, who has the content in another one, which can be killed or stopped.
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

from protocol import sockets, wire
from protocol.config.worker import WorkerConfig
from protocol.kv import KVCancel, KVFailure, KVFetched, PeerSource
from protocol.kv_peers import KVChunk, KVDone, KVOpen, KVOpened, KVRead
from tests.support.kv_proxy import Proxy
from tests.support.kv_worker import Peer, Shape, Worker
from tests.support.waiting import eventually

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
BIG = Shape(num_layers=8, num_blocks=120, block_tokens=16, num_kv_heads=4, head_dim=64, seed=3)
"""256 KiB a block: a transfer of all of it takes long enough to come between."""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    sockets.make_private(tmp_path / "run")
    return f"ipc://{tmp_path / 'run' / 'kv'}"


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
def test_blocks_arrive_bit_by_bit_where_they_belong_and_no_other_is_touched(
    context, tmp_path, monkeypatch, mover
):
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    chance = random.Random(9)
    for number, shape in enumerate(shapes()):
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
            end = worker.end_of(1)
            assert isinstance(end, KVFetched), end
            assert end.num_bytes == wanted * shape.block_bytes
            assert end.mover == ("shm" if mover == "auto" else mover)
            expected = ours_shape.cache()
            expected.rows[:, ours] = shape.cache().rows[:, theirs[first : first + wanted]]
            assert torch.equal(worker.cache.rows, expected.rows)
            peer.program.line_with(f"taken {LEASE.hex()}")


def test_several_transfers_go_on_beside_each_other_and_two_readers_end_a_lease(context, address):
    with Peer(BIG, address, "zmq") as peer, reader(context, empty(BIG), "zmq") as worker:
        peer.export(LEASE, list(range(1, 60)), readers=2)
        worker.fetch(1, peer.source(LEASE), list(range(1, 60)))
        worker.fetch(2, peer.source(LEASE), list(range(60, 119)))
        worker.fetch(3, peer.source(b"unknown"), [119])
        assert worker.end_of(3) == KVFailure(3, "expired", "the lease has ended")
        assert {1, 2} - worker.ends.keys(), "a small one does not wait for the large ones"
        assert isinstance(worker.end_of(1), KVFetched)
        assert isinstance(worker.end_of(2), KVFetched)
        peer.program.line_with("taken")
        rows = BIG.cache().rows
        assert torch.equal(worker.cache.rows[:, 1:60], rows[:, 1:60])
        assert torch.equal(worker.cache.rows[:, 60:119], rows[:, 1:60])
    assert sum("taken" in line for line in peer.program.out) == 1


def test_more_transfers_than_may_run_take_their_turn(context, address):
    shape = Shape(num_blocks=200, seed=1)
    with Peer(shape, address) as peer, reader(context, empty(shape)) as worker:
        peer.export(LEASE, list(range(1, 200)), readers=150)
        for job in range(1, 151):
            worker.fetch(job, peer.source(LEASE, job), [job], timeout_s=60)
        ends = [worker.end_of(job, 15) for job in range(1, 151)]  # their time is not what wakes it
        assert all(isinstance(end, KVFetched) for end in ends), ends
        assert torch.equal(worker.cache.rows[:, 1:151], shape.cache().rows[:, 2:152])
        peer.program.line_with("taken")


# ---- what does not fit


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"model": "0ther"}, {"block_tokens": 8}, {"num_layers": 3}]
)
def test_another_layout_is_refused_and_both_are_named(context, address, other):
    shape = Shape(seed=1)
    ours = empty(shape, **other)
    with Peer(shape, address) as peer, reader(context, ours) as worker:
        peer.export(LEASE, [1, 2])
        worker.fetch(1, peer.source(LEASE), [1, 2])
        end = worker.end_of(1)
        assert isinstance(end, KVFailure)
        assert end.kind == "refused"
        assert shape.layout.description in end.message
        assert ours.layout.description in end.message


def test_more_blocks_than_a_lease_has_are_refused(context, address):
    shape = Shape(seed=1)
    with Peer(shape, address) as peer, reader(context, empty(shape)) as worker:
        peer.export(LEASE, [1, 2, 3])
        worker.fetch(1, peer.source(LEASE, first=2), [1, 2])
        end = worker.failure_of(1)
        assert (end.kind, "blocks 2 to 4" in end.message) == ("refused", True)


def test_a_way_that_the_peer_does_not_offer_is_refused(context, address):
    shape = Shape(seed=1)
    with Peer(shape, address, "zmq") as peer, reader(context, empty(shape), "shm") as worker:
        peer.export(LEASE, [1, 2])
        worker.fetch(1, peer.source(LEASE), [1, 2])
        message = "kv_mover is shm here; the peer offers zmq"
        assert worker.end_of(1) == KVFailure(1, "refused", message)


def test_memory_that_cannot_be_mapped_is_moved_through_zeromq(context, address, tmp_path):
    """A proxy tells of a path where other memory is, as another PID namespace would."""
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
                end = worker.end_of(job)
                assert outcome in (getattr(end, "mover", ""), getattr(end, "kind", ""))
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
def under_way(context, address) -> Iterator[tuple[Peer, Worker, Proxy]]:
    """A transfer by zmq that stands still: the proxy holds its third chunk back."""
    with (
        Peer(BIG, address, "zmq") as peer,
        Proxy(context, f"{address}p", address) as proxy,
        reader(context, empty(BIG), "zmq") as worker,
    ):
        peer.export(LEASE, list(range(1, BIG.num_blocks)))
        proxy.holds = lambda message: isinstance(message, KVChunk) and message.chunk == 2
        yield peer, worker, proxy


def through(proxy: Proxy) -> PeerSource:
    return PeerSource(address=proxy.address, lease=LEASE)


def test_a_chunk_that_was_changed_on_its_way_is_damage(under_way):
    _, worker, proxy = under_way

    def flip(message):
        if isinstance(message, KVChunk) and message.chunk == 5:
            message.data.data[77] ^= 1
        return message

    proxy.holds = lambda message: False
    proxy.replaces = flip
    fetch_all(worker, through(proxy))
    end = worker.end_of(1)
    assert (end.kind, "chunk 5 does not match its checksum" in end.message) == ("damaged", True)


def test_a_peer_that_is_killed_in_the_middle_is_unreachable_at_once(context, address):
    with Peer(BIG, address, "zmq") as peer, reader(context, empty(BIG), "zmq") as worker:
        peer.export(LEASE, list(range(1, BIG.num_blocks)))
        peer.program.signal(signal.SIGSTOP)
        fetch_all(worker, peer.source(LEASE))
        assert worker.hears_nothing()
        peer.program.signal(signal.SIGKILL)
        assert worker.failure_of(1).kind == "unreachable"  # a fetch without news is a "timeout"


def test_a_peer_that_is_not_there_is_unreachable_at_once(context, address):
    with reader(context, empty(BIG)) as worker:
        fetch_all(worker, PeerSource(address=address, lease=LEASE))
        assert worker.failure_of(1, timeout_s=5).kind == "unreachable"


@pytest.mark.parametrize("bad", ["tcp://somewhere:99", "ipc://", "http://x", "ipc:///" + "x" * 200])
def test_an_address_that_cannot_be_is_unreachable_and_does_no_harm(context, address, bad):
    shape = Shape(seed=1)
    with Peer(shape, address) as peer, reader(context, empty(shape)) as worker:
        worker.fetch(1, PeerSource(address=bad, lease=LEASE), [1])
        assert worker.failure_of(1).kind == "unreachable"
        peer.export(LEASE, [2])
        worker.fetch(2, peer.source(LEASE), [1])
        assert isinstance(worker.end_of(2), KVFetched)


def test_a_peer_that_stands_still_is_given_up_when_the_time_is_over(under_way):
    peer, worker, proxy = under_way
    fetch_all(worker, through(proxy), timeout_s=0.6)
    assert eventually(lambda: proxy.num_held)
    peer.program.signal(signal.SIGSTOP)
    end = worker.end_of(1)
    assert (end.kind, "moving" in end.message) == ("timeout", True)
    peer.program.signal(signal.SIGCONT)


def test_a_lease_that_is_withdrawn_in_the_middle_is_expired(under_way):
    peer, worker, proxy = under_way
    fetch_all(worker, through(proxy))
    assert eventually(lambda: proxy.num_held)
    peer.withdraw(LEASE)
    peer.fill(7)
    proxy.release()
    assert worker.end_of(1) == KVFailure(1, "expired", "the lease has ended")


@pytest.mark.parametrize("mover", MOVERS)
def test_data_of_an_ended_lease_is_never_accepted(context, address, mover):
    """It is withdrawn, and its blocks are written, between the reader's last copy and its last
    word, which a proxy holds back."""
    with (
        Peer(BIG, address, mover) as peer,
        Proxy(context, f"{address}p", address) as proxy,
        reader(context, empty(BIG), mover) as worker,
    ):
        peer.export(LEASE, list(range(1, BIG.num_blocks)))
        proxy.holds = lambda message: isinstance(message, KVDone)
        fetch_all(worker, through(proxy))
        assert eventually(lambda: proxy.num_held)
        peer.withdraw(LEASE)
        peer.fill(7)
        proxy.release()
        assert worker.end_of(1) == KVFailure(1, "expired", "the lease has ended")


def test_a_cancelled_transfer_says_so_once_and_writes_no_more(under_way):
    _, worker, proxy = under_way
    fetch_all(worker, through(proxy))
    assert eventually(lambda: proxy.num_held)
    worker.exchange.apply(KVCancel(job=1))
    assert worker.end_of(1) == KVFailure(1, "cancelled", "cancelled by the engine")
    before = worker.cache.rows.clone()
    worker.exchange.apply(KVCancel(job=1))
    proxy.release()
    assert worker.hears_nothing()
    assert torch.equal(worker.cache.rows, before)


def test_a_reader_that_gives_up_is_not_waited_for(under_way):
    peer, worker, proxy = under_way
    fetch_all(worker, through(proxy))
    assert eventually(lambda: proxy.num_held)
    worker.exchange.apply(KVCancel(job=1))
    worker.end_of(1)
    proxy.release()
    peer.program.line_with(f"taken {LEASE.hex()}")


def test_a_worker_that_stops_gives_up_what_is_on_its_way(under_way):
    _, worker, proxy = under_way
    fetch_all(worker, through(proxy))
    assert eventually(lambda: proxy.num_held)
    # the end of the fixture's `with`: it returns


# ---- readers that misbehave


def test_nonsense_is_dropped_and_a_reader_that_takes_nothing_costs_a_window(context, address):
    """It asks for every chunk, again and again, and reads none."""
    big = empty(BIG, num_blocks=1200, seed=3)  # 300 MB
    with Peer(big, address, "zmq") as peer, reader(context, empty(big), "zmq") as worker:
        peer.export(LEASE, list(range(1, 1200)), readers=2)
        before = peer.resident_bytes()
        greedy = sockets.connect_dealer(context, address)
        for frames in ([b""], [b"\x07x"], [b"\x01\xc1"], [b"\x01\x80"], [b"x"] * 70, []):
            greedy.send_multipart([*frames, b""])
        layout = big.layout
        opening = KVOpen(
            lease=LEASE, reader=b"greedy", layout=layout.digest, layout_text="", first=0, count=1199
        )
        greedy.send_multipart(wire.encode(opening))
        for chunk in [10**9, -1, *range(300), *range(300)]:
            greedy.send_multipart(wire.encode(KVRead(lease=LEASE, reader=b"greedy", chunk=chunk)))
        worker.fetch(1, peer.source(LEASE, first=1000), list(range(1, 100)))
        assert isinstance(worker.end_of(1), KVFetched), "others do not wait for it"
        assert peer.resident_bytes() - before < 32 << 20
        greedy.close(linger=0)


def test_what_is_exported_costs_nothing_until_it_is_touched_and_leaves_nothing(context, address):
    shape = Shape(num_layers=8, num_blocks=40_000, block_tokens=16, head_dim=64)
    with Peer(shape, address, "shm") as peer, reader(context, Shape(), "auto"):
        assert shape.num_blocks * shape.block_bytes > 7e9
        status = Path(f"/proc/{peer.pid}/status").read_text()
        (shared,) = [line for line in status.splitlines() if line.startswith("RssShmem")]
        assert int(shared.split()[1]) < 4096
        assert not [name for name in os.listdir("/dev/shm") if "tidegate" in name]
