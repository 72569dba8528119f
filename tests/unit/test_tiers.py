"""A worker's tiers: stored blocks are loaded bit by bit, or a fetch reports why not."""

from __future__ import annotations

import os
import random
import select
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event

import pytest
import torch

from protocol.config.worker import WorkerConfig
from protocol.wire.arrays import Int32
from protocol.worker.kv import (
    KVFailure,
    KVFetch,
    KVFetched,
    KVStore,
    KVTierNews,
    KVUsed,
    TierSource,
)
from worker.kv.blocks import cache_blocks
from worker.kv.cache import KVCache
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.disk import DiskTier
from worker.kv.tiers.host import HostTier
from worker.kv.tiers.store import TierStore

SHAPE = (2, 9, 4, 2, 8)  # layers, blocks, tokens, heads, head dim
BLOCK_BYTES = 2 * 2 * 4 * 2 * 8 * 4
LAYOUT = b"l" * 16


def content(number: int) -> bytes:
    return sha256(bytes([number])).digest()


def contents(*numbers: int) -> list[bytes]:
    return [content(number) for number in numbers]


class TierBench:
    """Tiers of a cache that is filled at random, and everything that they have reported."""

    def __init__(self, disk: Path | None, host_blocks: int, disk_blocks: int = 100) -> None:
        self.cache = KVCache(*SHAPE, torch.float32, torch.device("cpu"))
        self.cache.rows.random_(0, 256, generator=torch.Generator().manual_seed(0))
        tier = None
        if disk is not None:
            most = disk_blocks * (BLOCK_BYTES + 200)
            tier = DiskTier(disk, LAYOUT, payload_bytes=BLOCK_BYTES, max_bytes=most)
        self.reports = ReportQueue()
        rows, blocks = self.cache.rows, cache_blocks(self.cache)
        self.tiers = TierStore(rows, blocks, tier, host_blocks * BLOCK_BYTES, self.reports)
        self.results: dict[int, KVFetched | KVFailure] = {}
        self.contents: dict[str, set[bytes]] = {"host": set(), "disk": set()}
        self.counts: Counter[str] = Counter()
        self._job = 0

    def store(self, blocks: list[int], hashes: list[bytes]) -> None:
        self.tiers.store(KVStore(blocks=Int32.of(blocks), hashes=hashes))

    def start_fetch(self, hashes: list[bytes], blocks: list[int], timeout_s: float = 10) -> int:
        self._job += 1
        source = TierSource(hashes=hashes)
        ids = Int32.of(blocks)
        message = KVFetch(job=self._job, source=source, blocks=ids, timeout_s=timeout_s)
        self.tiers.fetch(message, source)
        return self._job

    def fetch(self, hashes: list[bytes], blocks: list[int]) -> KVFetched | KVFailure:
        return self.result_of(self.start_fetch(hashes, blocks))

    def result_of(self, job: int) -> KVFetched | KVFailure:
        self.wait_until(lambda: job in self.results)
        return self.results[job]

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            assert select.select([self.reports.fd], [], [], 5)[0], "no report"
            self.apply_reports()

    def apply_reports(self) -> None:
        """Apply the reports that have arrived."""
        self.reports.wake()
        if (report := self.reports.drain()) is None:
            return
        self.results |= {result.job: result for result in report.fetched}
        self.results |= {result.job: result for result in report.failed}
        for news in report.tiers:
            self._apply(news)

    def is_on_disk(self, number: int) -> bool:
        return content(number) in self.contents["disk"]

    def await_contents(self, tier: str, *numbers: int) -> None:
        self.wait_until(lambda: self.contents[tier] == set(contents(*numbers)))

    def _apply(self, news: KVTierNews) -> None:
        self.contents[news.tier] |= set(news.stored)
        self.contents[news.tier] -= set(news.lost)
        for kind in ("stored", "dropped", "loaded", "failed"):
            if num := getattr(news, f"num_{kind}"):
                self.counts[f"{news.tier} {kind}"] += num

    def bytes_of(self, block: int) -> bytes:
        return self.cache.rows[:, block].numpy().tobytes()

    def wipe(self) -> None:
        self.cache.rows.zero_()


NewBench = Callable[..., TierBench]


@pytest.fixture
def new_bench() -> Iterator[NewBench]:
    """Return a function that makes benches, which are closed at the end of the test."""
    made: list[TierBench] = []

    def bench(disk: Path | None = None, host_blocks: int = 0, **more: int) -> TierBench:
        made.append(TierBench(disk, host_blocks, **more))
        return made[-1]

    yield bench
    for one in made:
        one.tiers.close()
        one.reports.close()


def test_blocks_are_loaded_from_host_memory_bit_by_bit(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=4)
    was = [bench.bytes_of(block) for block in (1, 2, 3)]
    bench.store([1, 2, 3], contents(1, 2, 3))
    bench.wipe()  # as a later plan would: the stored blocks are copies
    bench.await_contents("host", 1, 2, 3)
    result = bench.fetch(contents(3, 1), [5, 8])
    assert isinstance(result, KVFetched)
    assert (result.num_bytes, result.mover) == (2 * BLOCK_BYTES, "tier")
    assert [bench.bytes_of(5), bench.bytes_of(8)] == [was[2], was[0]]
    assert not any(any(bench.bytes_of(block)) for block in (0, 1, 2, 3, 4, 6, 7))
    assert bench.counts == {"host stored": 3, "host loaded": 2}


def test_blocks_are_loaded_from_disk_after_a_restart(new_bench: NewBench, tmp_path: Path) -> None:
    first = new_bench(tmp_path / "kv")
    was = first.bytes_of(4)
    first.store([4, 5], contents(4, 5))
    first.await_contents("disk", 4, 5)
    first.tiers.close()
    second = new_bench(tmp_path / "kv")
    second.wipe()
    second.await_contents("disk", 4, 5)  # before the first request
    assert isinstance(second.fetch(contents(4), [1]), KVFetched)
    assert second.bytes_of(1) == was
    assert second.counts == {"disk loaded": 1}


def test_close_writes_the_waiting_blocks(new_bench: NewBench, tmp_path: Path) -> None:
    bench = new_bench(tmp_path / "kv")
    for number in range(1, 9):
        bench.store([number], contents(number))
    bench.tiers.close()
    assert len(list((tmp_path / "kv" / LAYOUT.hex()).iterdir())) == 8


def test_blocks_loaded_from_disk_stay_in_host_memory(new_bench: NewBench, tmp_path: Path) -> None:
    first = new_bench(tmp_path / "kv")
    first.store([1, 2], contents(1, 2))
    first.tiers.close()
    bench = new_bench(tmp_path / "kv", host_blocks=2)
    for _ in range(2):
        assert isinstance(bench.fetch(contents(1, 2), [3, 4]), KVFetched)
    bench.await_contents("host", 1, 2)
    assert bench.counts == {"disk loaded": 2, "host loaded": 2}
    assert bench.bytes_of(3) == first.bytes_of(1)


def test_blocks_dropped_from_host_memory_are_still_on_disk(
    new_bench: NewBench, tmp_path: Path
) -> None:
    bench = new_bench(tmp_path / "kv", host_blocks=2)
    was = bench.bytes_of(1)
    for number in range(1, 5):
        bench.store([number], contents(number))
        bench.wait_until(partial(bench.is_on_disk, number))
    bench.await_contents("host", 3, 4)
    assert isinstance(bench.fetch(contents(1), [8]), KVFetched)
    assert bench.bytes_of(8) == was


def test_the_most_recently_used_blocks_stay(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=3)
    bench.store([1, 2], contents(1, 2))
    bench.tiers.touch(KVUsed(hashes=contents(2, 1)))
    bench.store([3], contents(3))
    bench.await_contents("host", 1, 2, 3)  # the thread works in order: 1 and 2 were touched before
    bench.store([4], contents(4))
    bench.await_contents("host", 1, 3, 4)


def test_a_fetch_of_a_dropped_block_fails_as_lost(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=1)
    bench.store([1], contents(1))
    bench.await_contents("host", 1)
    bench.store([2], contents(2))
    bench.await_contents("host", 2)
    result = bench.fetch(contents(2, 1), [3, 4])
    assert isinstance(result, KVFailure)
    assert result.kind == "lost"
    assert bench.counts["host failed"] == 1


def test_a_fetch_of_a_damaged_file_fails_and_is_not_repeated(
    new_bench: NewBench, tmp_path: Path
) -> None:
    bench = new_bench(tmp_path / "kv")
    bench.store([1], contents(1))
    bench.await_contents("disk", 1)
    (path,) = (tmp_path / "kv" / LAYOUT.hex()).iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    result = bench.fetch(contents(1), [3])
    assert isinstance(result, KVFailure)
    assert result.kind == "damaged"
    bench.await_contents("disk")
    assert not path.exists()
    assert bench.counts["disk failed"] == 1


def test_a_cancelled_fetch_ends_and_writes_nothing_more(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=8)
    bench.store([1, 2], contents(1, 2))
    bench.await_contents("host", 1, 2)
    bench.wipe()
    jobs = [bench.start_fetch(contents(1, 2), [3, 4]) for _ in range(50)]
    for job in jobs:
        bench.tiers.cancel(job)
    results = [bench.result_of(job) for job in jobs]
    last = results[-1]
    assert isinstance(last, KVFailure)
    assert last.kind == "cancelled"
    bench.wipe()
    assert not any(bench.bytes_of(3))


def test_a_fetch_past_its_deadline_fails(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=8)
    bench.store([1], contents(1))
    result = bench.result_of(bench.start_fetch(contents(1), [3], timeout_s=0))
    assert isinstance(result, KVFailure)
    assert result.kind == "timeout"


def test_a_block_that_is_being_written_is_not_evicted(
    new_bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the block's place in host memory were reused during the write, another block's bytes would
    be stored under its name."""
    bench, is_writing, may_write = new_bench(tmp_path / "kv", host_blocks=1), Event(), Event()
    was, writev = bench.bytes_of(1), os.writev

    def slow(file: int, parts: list[bytes]) -> int:
        is_writing.set()
        assert may_write.wait(5)
        return writev(file, parts)

    monkeypatch.setattr(os, "writev", slow)
    bench.store([1], contents(1))
    assert is_writing.wait(5)
    bench.store([2], contents(2))
    may_write.set()
    bench.await_contents("disk", 1)
    assert bench.counts["host dropped"] == bench.counts["disk dropped"] == 1
    bench.tiers.close()
    again = new_bench(tmp_path / "kv")
    assert isinstance(again.fetch(contents(1), [5]), KVFetched)
    assert again.bytes_of(5) == was


def test_blocks_beyond_the_capacity_are_dropped_and_counted(
    new_bench: NewBench, tmp_path: Path
) -> None:
    bench = new_bench(host_blocks=2)
    bench.store([1, 2, 3, 4], contents(1, 2, 3, 4))
    bench.await_contents("host", 1, 2)
    assert bench.counts == {"host stored": 2, "host dropped": 2}


def test_a_block_that_is_stored_twice_is_kept_once(new_bench: NewBench, tmp_path: Path) -> None:
    bench = new_bench(tmp_path / "kv", host_blocks=3)
    bench.store([1, 2], contents(1, 1))
    bench.store([1], contents(1))
    bench.tiers.close()
    bench.apply_reports()
    assert bench.counts["disk stored"] == 1
    assert bench.contents == {"host": {content(1)}, "disk": {content(1)}}


def test_the_config_decides_which_tiers_exist(tmp_path: Path) -> None:
    cache = KVCache(*SHAPE, torch.float32, torch.device("cpu"))

    def tiers(**config: object) -> list[str] | None:
        reports = ReportQueue()
        worker = WorkerConfig(model="", **config)  # type: ignore[arg-type]
        made = TierStore.from_config(worker, LAYOUT, cache.rows, cache_blocks(cache), reports)
        if made is not None:
            made.close()
        reports.close()
        return None if made is None else list(made.names)

    assert tiers() is None
    assert tiers(kv_host_gib=0.001) == ["host"]
    assert tiers(kv_disk=str(tmp_path / "kv")) == ["disk"]
    assert tiers(kv_disk=str(tmp_path / "kv"), kv_host_gib=0.001) == ["host", "disk"]
    with pytest.raises(ValueError, match=r"kv_host_gib is 1e[+]06; .* GiB of memory are free"):
        tiers(kv_host_gib=1e6)
    with pytest.raises(ValueError, match="at least one block"):
        tiers(kv_host_gib=1e-9)


def test_a_failure_of_a_tier_thread_is_raised_in_the_loop(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=2)
    bench.tiers.store(KVStore(blocks=Int32.of([1]), hashes=contents(1)))
    bench.await_contents("host", 1)
    bench.start_fetch(contents(1), [99])  # there is no such block
    with pytest.raises(IndexError):
        bench.wait_until(lambda: False)


# ---- places of host memory
def filled(tier: HostTier, *contents: bytes) -> list[int]:
    """Reserve a place in `tier` for each of these contents and publish them. Return the places."""
    places = []
    for content in contents:
        place = tier.reserve()
        assert place is not None
        tier.publish(content, place)
        places.append(place)
    tier.check()
    return places


def test_a_published_block_is_found_in_its_tier() -> None:
    tier = HostTier(2)
    a, b = filled(tier, b"a", b"b")
    assert {a, b} == {0, 1}
    assert (tier.hold(b"a"), tier.hold(b"b"), tier.hold(b"c")) == (a, b, None)


def test_a_reserved_place_is_not_found_and_not_reserved_again() -> None:
    tier = HostTier(1)
    place = tier.reserve()
    assert place is not None
    assert (tier.reserve(), len(tier)) == (None, 0)
    tier.give_back(place)
    assert tier.reserve() == place


def test_the_least_recently_used_block_is_dropped_and_reported() -> None:
    tier = HostTier(2)
    a, b = filled(tier, b"a", b"b")
    tier.touch(b"a")
    assert filled(tier, b"c") == [b]
    assert tier.drain_changes() == ([b"a", b"c"], [b"b"])
    assert tier.hold(b"a") == a
    assert tier.drain_changes() == ([], [])


def test_a_held_block_is_evicted_only_after_its_last_holder() -> None:
    tier = HostTier(1)
    (place,) = filled(tier, b"a")
    tier.hold(b"a")
    tier.hold(b"a")
    tier.release(b"a")
    assert tier.reserve() is None
    tier.release(b"a")
    assert tier.reserve() == place
    assert b"a" not in tier


def test_the_same_content_has_one_place() -> None:
    tier = HostTier(2)
    filled(tier, b"a", b"a")
    assert len(tier) == 1
    tier.hold(b"a")
    assert tier.reserve() is not None


def test_a_freed_place_is_reused_before_one_that_was_never_used() -> None:
    tier = HostTier(100)
    place = tier.reserve()
    assert place is not None
    tier.give_back(place)
    assert tier.reserve() == place


def test_a_tier_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        HostTier(0)


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_never_lose_a_place_or_a_held_block(seed: int) -> None:
    rng, tier = random.Random(seed), HostTier(6)
    filling: list[int] = []
    held: list[tuple[bytes, int]] = []
    for _ in range(2000):
        content = bytes([rng.randrange(20)])
        match rng.randrange(6):
            case 0 | 1 if (place := tier.reserve()) is not None:
                filling.append(place)
            case 2 if filling:
                tier.publish(content, filling.pop(rng.randrange(len(filling))))
            case 3 if filling:
                tier.give_back(filling.pop())
            case 4 if (place := tier.hold(content)) is not None:
                held.append((content, place))
            case 5 if held:
                tier.release(held.pop(rng.randrange(len(held)))[0])
        tier.check()
        assert all(tier.hold(content) == place for content, place in held)
        for content, _ in held:
            tier.release(content)
