"""A worker's tiers: stored blocks are loaded bit by bit, or a fetch reports why not."""

from __future__ import annotations

import os
import random
import select
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    state_key,
)
from worker.kv.blocks import cache_blocks, memory_blocks
from worker.kv.cache import KVCache
from worker.kv.checkpoint_memory import CheckpointMemory
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers import disk as disk_module
from worker.kv.tiers.disk import DiskTier
from worker.kv.tiers.host import HostTier, Places
from worker.kv.tiers.store import StoredMemory, TierStore

SHAPE = (2, 9, 4, 2, 8)  # layers, blocks, tokens, heads, head dim
BLOCK_BYTES = 2 * 2 * 4 * 2 * 8 * 4
LAYOUT, STATES = b"l" * 16, b"s" * 16
STATE_BYTES = BLOCK_BYTES * 9 // 2 + 4


def content(number: int) -> bytes:
    return sha256(bytes([number])).digest()


def contents(*numbers: int) -> list[bytes]:
    return [content(number) for number in numbers]


class TierBench:
    """Tiers of a cache that is filled at random, and everything that they have reported."""

    def __init__(
        self,
        disk: Path | None,
        host_blocks: int,
        disk_blocks: int = 100,
        *,
        num_checkpoints: int = 0,
        state_bytes: int = STATE_BYTES,
    ) -> None:
        random = torch.Generator().manual_seed(0)
        self.cache = KVCache(*SHAPE, torch.float32, torch.device("cpu"))
        self.cache.rows.random_(0, 256, generator=random)
        cache, states = StoredMemory(self.cache.rows, cache_blocks(self.cache), LAYOUT), None
        self.memory: CheckpointMemory | None = None
        if num_checkpoints:
            self.memory = CheckpointMemory(torch.zeros(1 + num_checkpoints, state_bytes // 4))
            self.memory.rows.random_(0, 256, generator=random)
            states = StoredMemory(self.memory.rows, memory_blocks(self.memory.rows), STATES)
        tier = None
        if disk is not None:
            layouts = cache.stored_layout, None if states is None else states.stored_layout
            tier = DiskTier(disk, *layouts, max_bytes=disk_blocks * (BLOCK_BYTES + 200))
        self.reports = ReportQueue()
        self.tiers = TierStore(cache, states, tier, host_blocks * BLOCK_BYTES, self.reports)
        self.results: dict[int, KVFetched | KVFailure] = {}
        self.contents: dict[str, set[bytes]] = {"host": set(), "disk": set()}
        self.counts: Counter[str] = Counter()
        self._job = 0

    def store(
        self, blocks: list[int], hashes: list[bytes], states: Mapping[int, int] | None = None
    ) -> None:
        """Store blocks, and states: checkpoint -> number of the block that it follows."""
        self.tiers.store(
            KVStore(
                blocks=Int32.of(blocks),
                hashes=hashes,
                checkpoints=None if states is None else Int32.of(states),
                states=[state_key(content(number)) for number in (states or {}).values()],
            )
        )

    def start_fetch(
        self,
        hashes: list[bytes],
        blocks: list[int],
        timeout_s: float = 10,
        checkpoint: int | None = None,
    ) -> int:
        self._job += 1
        source = TierSource(hashes=hashes)
        ids = Int32.of(blocks)
        message = KVFetch(
            job=self._job, source=source, blocks=ids, timeout_s=timeout_s, checkpoint=checkpoint
        )
        self.tiers.fetch(message, source)
        return self._job

    def fetch(
        self, hashes: list[bytes], blocks: list[int], checkpoint: int | None = None
    ) -> KVFetched | KVFailure:
        return self.result_of(self.start_fetch(hashes, blocks, checkpoint=checkpoint))

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

    def await_contents(self, tier: str, *numbers: int, states: Iterable[int] = ()) -> None:
        keys = {*contents(*numbers), *(state_key(content(number)) for number in states)}
        self.wait_until(lambda: self.contents[tier] == keys)

    def _apply(self, news: KVTierNews) -> None:
        self.contents[news.tier] |= set(news.stored)
        self.contents[news.tier] -= set(news.lost)
        for kind in ("stored", "dropped", "loaded", "failed"):
            if num := getattr(news, f"num_{kind}"):
                self.counts[f"{news.tier} {kind}"] += num

    def bytes_of(self, block: int) -> bytes:
        return self.cache.rows[:, block].numpy().tobytes()

    def state(self, checkpoint: int) -> bytes:
        assert self.memory is not None
        return self.memory.rows[0, checkpoint].numpy().tobytes()

    def wipe(self) -> None:
        self.cache.rows.zero_()
        if self.memory is not None:
            self.memory.rows.zero_()


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
    bench.tiers.touch(KVUsed(keys=contents(2, 1)))
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
        stored = StoredMemory(cache.rows, cache_blocks(cache), LAYOUT)
        made = TierStore.from_config(worker, stored, None, reports)
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


# ---- states
def test_states_are_loaded_from_host_memory_bit_by_bit(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=20, num_checkpoints=5)
    was = [bench.state(number) for number in range(6)]
    bench.store([1, 2], contents(1, 2), states={3: 2})
    bench.await_contents("host", 1, 2, states=[2])
    bench.wipe()
    result = bench.fetch(contents(1, 2), [4, 5], checkpoint=1)
    assert isinstance(result, KVFetched)
    assert result.num_bytes == 2 * BLOCK_BYTES + STATE_BYTES
    assert bench.state(1) == was[3]
    assert not any(any(bench.state(number)) for number in (0, 2, 3, 4, 5))
    assert bench.counts == {"host stored": 3, "host loaded": 3}


def test_states_are_loaded_from_disk_after_a_restart(new_bench: NewBench, tmp_path: Path) -> None:
    first = new_bench(tmp_path / "kv", num_checkpoints=5)
    was = first.state(3)
    first.store([1, 2], contents(1, 2), states={3: 2})
    first.await_contents("disk", 1, 2, states=[2])
    first.tiers.close()
    files = {path.name for path in (tmp_path / "kv" / STATES.hex()).iterdir()}
    assert files == {content(2).hex()}
    second = new_bench(tmp_path / "kv", num_checkpoints=3, host_blocks=20)
    second.await_contents("disk", 1, 2, states=[2])
    for checkpoint in (1, 2):
        second.wipe()
        assert isinstance(second.fetch(contents(1, 2), [4, 5], checkpoint), KVFetched)
        assert second.state(checkpoint) == was
    assert second.counts == {"disk loaded": 3, "host loaded": 3}


def test_a_fetch_without_its_state_fails_as_lost(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=20, num_checkpoints=5)
    bench.store([1, 2], contents(1, 2), states={3: 1})
    bench.await_contents("host", 1, 2, states=[1])
    result = bench.fetch(contents(1, 2), [4, 5], checkpoint=1)
    assert isinstance(result, KVFailure)
    assert (result.kind, "the state after block" in result.message) == ("lost", True)


def test_a_damaged_state_fails_the_fetch_and_is_deleted(
    new_bench: NewBench, tmp_path: Path
) -> None:
    bench = new_bench(tmp_path / "kv", num_checkpoints=5)
    bench.store([1], contents(1), states={3: 1})
    bench.await_contents("disk", 1, states=[1])
    (path,) = (tmp_path / "kv" / STATES.hex()).iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    result = bench.fetch(contents(1), [4], checkpoint=1)
    assert isinstance(result, KVFailure)
    assert result.kind == "damaged"
    bench.await_contents("disk", 1)
    assert not path.exists()


def test_the_file_of_a_block_is_not_read_as_that_of_a_state(
    new_bench: NewBench, tmp_path: Path
) -> None:
    """The header names the layout, which differs even if block and state have the same size."""
    bench = new_bench(tmp_path / "kv", num_checkpoints=5, state_bytes=BLOCK_BYTES)
    bench.store([1], contents(1), states={3: 1})
    bench.await_contents("disk", 1, states=[1])
    block, state = (tmp_path / "kv" / each.hex() / content(1).hex() for each in (LAYOUT, STATES))
    state.write_bytes(block.read_bytes())
    result = bench.fetch(contents(1), [4], checkpoint=1)
    assert isinstance(result, KVFailure)
    assert (result.kind, "does not match this block" in result.message) == ("damaged", True)


def test_a_state_takes_the_places_of_several_blocks(new_bench: NewBench) -> None:
    """A state has the size of 4.5 blocks. With nine places, the oldest blocks make room for it."""
    bench = new_bench(host_blocks=9, num_checkpoints=5)
    bench.store([1, 2, 3, 4, 5, 6], contents(1, 2, 3, 4, 5, 6))
    bench.await_contents("host", 1, 2, 3, 4, 5, 6)
    bench.store([], [], states={3: 6})
    bench.await_contents("host", 3, 4, 5, 6, states=[6])
    bench.store([], [], states={2: 5})
    bench.await_contents("host", states=[5])
    bench.store([], [], states={})


def test_host_memory_that_is_too_small_for_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="less than one block and one recurrent state"):
        TierBench(None, 5, num_checkpoints=3)


def test_a_state_that_waits_for_the_disk_is_written_whole(
    new_bench: NewBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system writes a few parts at a time."""
    monkeypatch.setattr(disk_module, "MAX_PARTS", 2)
    first = new_bench(tmp_path / "kv", num_checkpoints=5)
    was = first.state(3)
    first.store([1], contents(1), states={3: 1})
    first.tiers.close()
    second = new_bench(tmp_path / "kv", num_checkpoints=5)
    second.wipe()
    second.await_contents("disk", 1, states=[1])
    assert isinstance(second.fetch(contents(1), [4], checkpoint=2), KVFetched)
    assert second.state(2) == was


def test_a_state_of_a_model_without_one_is_refused(new_bench: NewBench) -> None:
    bench = new_bench(host_blocks=9)
    with pytest.raises(ValueError, match="the model has none"):
        bench.store([], [], states={3: 1})


# ---- places of host memory
def filled(tier: HostTier, *contents: bytes, count: int = 1) -> list[Places]:
    """Reserve `count` places in `tier` for each of these contents and publish them. Return the
    places."""
    found = []
    for content in contents:
        places = tier.reserve(count)
        assert places is not None
        tier.publish(content, places)
        found.append(places)
    tier.check()
    return found


def test_a_published_block_is_found_in_its_tier() -> None:
    tier = HostTier(2)
    a, b = filled(tier, b"a", b"b")
    assert {a, b} == {(0,), (1,)}
    assert (tier.hold(b"a"), tier.hold(b"b"), tier.hold(b"c")) == (a, b, None)


def test_a_reserved_place_is_not_found_and_not_reserved_again() -> None:
    tier = HostTier(1)
    places = tier.reserve(1)
    assert places is not None
    assert (tier.reserve(1), tier.num_published) == (None, 0)
    tier.give_back(places)
    assert tier.reserve(1) == places


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
    (places,) = filled(tier, b"a")
    tier.hold(b"a")
    tier.hold(b"a")
    tier.release(b"a")
    assert tier.reserve(1) is None
    tier.release(b"a")
    assert tier.reserve(1) == places
    assert b"a" not in tier


def test_the_same_content_has_one_place() -> None:
    tier = HostTier(2)
    filled(tier, b"a", b"a")
    assert tier.num_published == 1
    tier.hold(b"a")
    assert tier.reserve(1) is not None


def test_a_freed_place_is_reused_before_one_that_was_never_used() -> None:
    tier = HostTier(100)
    places = tier.reserve(1)
    assert places is not None
    tier.give_back(places)
    assert tier.reserve(1) == places


def test_a_content_of_several_places_is_dropped_whole() -> None:
    tier = HostTier(7)
    filled(tier, b"a")
    filled(tier, b"b", b"c", count=3)
    tier.touch(b"a")
    assert tier.reserve(1) is not None
    assert [content in tier for content in (b"a", b"b", b"c")] == [True, False, True]
    assert tier.num_published == 4
    tier.check()


def test_nothing_is_dropped_for_a_content_that_does_not_fit() -> None:
    tier = HostTier(5)
    filled(tier, b"a", b"b")
    filled(tier, b"c", count=3)
    tier.hold(b"c")
    assert tier.reserve(3) is None
    assert [content in tier for content in (b"a", b"b", b"c")] == [True, True, True]
    assert tier.reserve(2) is not None


def test_a_tier_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        HostTier(0)


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_never_lose_a_place_or_a_held_block(seed: int) -> None:
    rng, tier = random.Random(seed), HostTier(6)
    filling: list[Places] = []
    held: list[tuple[bytes, Places]] = []
    for _ in range(2000):
        content = bytes([rng.randrange(20)])
        match rng.randrange(6):
            case 0 | 1 if (places := tier.reserve(rng.choice([1, 1, 2, 4]))) is not None:
                filling.append(places)
            case 2 if filling:
                tier.publish(content, filling.pop(rng.randrange(len(filling))))
            case 3 if filling:
                tier.give_back(filling.pop())
            case 4 if (places := tier.hold(content)) is not None:
                held.append((content, places))
            case 5 if held:
                tier.release(held.pop(rng.randrange(len(held)))[0])
        tier.check()
        assert all(tier.hold(content) == places for content, places in held)
        for content, _ in held:
            tier.release(content)
