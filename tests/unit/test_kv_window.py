"""K/V blocks that a window has passed: how they are counted and cached, and for which models and
options they are freed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_core.blocks.prefix_cache import PrefixCache, window_keys
from engine_core.startup import build_engine
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import (
    KVGroups,
    max_held_blocks,
    max_live_blocks,
    max_request_tokens,
    num_passed_blocks,
)
from protocol.wire.cluster_key import ClusterKey
from protocol.worker.steps import NULL_BLOCK, WorkerReady
from tests.support.engines import Bench, a_card
from tools.__main__ import build_parser
from tools.commands import engine as engine_command
from worker.kv.cache import KVCache
from worker.spec.facts import KVHeads
from worker.spec.kv_blocks import layer_places
from worker.startup.kv_window import kv_groups, kv_window

SIZES = (1, 2, 4, 8)


def visible(query: int, window: int, size: int) -> set[int]:
    """Return the indices of the blocks with the positions that the query at `query` attends to."""
    return {p // size for p in range(query + 1) if query - window < p}


def test_a_block_is_passed_when_no_later_query_sees_it() -> None:
    for size, window, computed in product(SIZES, range(1, 12), range(40)):
        passed = num_passed_blocks(computed, size, window)
        seen = set().union(*(visible(q, window, size) for q in range(computed, computed + 20)))
        assert min(seen) == passed


def test_a_step_reads_and_writes_at_most_the_live_blocks() -> None:
    for size, window, count in product(SIZES, range(1, 12), range(1, 7)):
        used = [
            len(set().union(*(visible(q, window, size) for q in range(start, start + count))))
            for start in range(40)
        ]
        assert max(used) == max_live_blocks(count, size, window)


def test_without_a_window_no_block_is_passed_and_a_request_fits_as_a_whole() -> None:
    assert num_passed_blocks(1000, 4, None) == 0
    assert max_live_blocks(3, 4, None) is None
    assert max_request_tokens(100, num_blocks=11, block_tokens=4, window=None) == 40


def test_a_cache_of_one_window_serves_requests_of_any_length() -> None:
    longest = [
        max_request_tokens(1000, num_blocks=1 + blocks, block_tokens=4, window=10)
        for blocks in (2, 3, 4)
    ]
    assert longest == [8, 12, 1000]


@given(st.integers(0, 12), st.sets(st.integers(0, 11)), st.sampled_from(SIZES), st.integers(2, 20))
def test_a_prefix_is_found_if_and_only_if_all_blocks_in_its_window_are_cached(
    length: int, cached: set[int], size: int, window: int
) -> None:
    hashes, cache = [bytes([i]) for i in range(length)], PrefixCache()
    for i in cached:
        cache.publish(bytes([i]), 1 + i, is_draft_computed=False)
    found = cache.match_window(hashes, lambda n: num_passed_blocks(n * size, size, window))
    # The query after a prefix sees the blocks of its window, except its own.
    whole = [n for n in range(length + 1) if visible(n * size, window, size) - {n} <= cached]
    assert len(found) == max(whole)
    needed = visible(len(found) * size, window, size)
    assert found == [1 + i if i in needed else NULL_BLOCK for i in range(len(found))]


@given(st.integers(0, 8), st.sets(st.integers(0, 23)), st.sampled_from(SIZES), st.integers(2, 20))
def test_with_groups_a_prefix_also_needs_all_blocks_of_the_other_layers(
    length: int, cached: set[int], size: int, window: int
) -> None:
    """Column c has three blocks. They are cached if `cached` contains c, c + 8 and c + 16,
    respectively."""
    hashes, cache = [bytes([i]) for i in range(length)], PrefixCache()
    keys = [*hashes, *(window_keys(content, 2)[j] for j in range(2) for content in hashes)]
    numbers = [*range(length), *range(8, 8 + length), *range(16, 16 + length)]
    for key, number in zip(keys, numbers, strict=True):
        if number in cached:
            cache.publish(key, 1 + number, is_draft_computed=False)

    def num_passed(n: int) -> int:
        return num_passed_blocks(n * size, size, window)

    def is_whole(n: int) -> bool:
        seen = visible(n * size, window, size) - {n}
        return {*range(n), *(c + 8 * j for c in seen for j in (1, 2))} <= cached

    found, _ = cache.match_groups(hashes, num_passed, 2)
    assert found == [1 + c for c in range(max(filter(is_whole, range(length + 1))))]
    first = num_passed(len(found))
    columns = cache.window_columns(hashes[first : len(found)], 2)
    assert columns == [[1 + c + 8, 1 + c + 16] for c in range(first, len(found))]


class CountedHashes(list[bytes]):
    """Block hashes that count how often one of them is read by its index."""

    def __init__(self, hashes: Iterable[bytes]) -> None:
        super().__init__(hashes)
        self.num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += isinstance(index, int)
        return super().__getitem__(index)


def test_a_search_that_finds_nothing_reads_one_hash_per_window() -> None:
    hashes, cache = CountedHashes(i.to_bytes(2) for i in range(2000)), PrefixCache()

    def search() -> tuple[int, int]:
        hashes.num_reads = 0
        found = cache.match_window(hashes, lambda n: num_passed_blocks(n * 16, 16, 1601))
        return len(found), hashes.num_reads

    assert search() == (0, 20)
    for i in range(1, 2000, 2):
        cache.publish(i.to_bytes(2), 1 + i, is_draft_computed=False)
    assert search()[0] == 0
    assert search()[1] <= 2 * 2000 // 100 + 1
    cache.publish((0).to_bytes(2), 1, is_draft_computed=False)
    assert search()[0] == 2
    for i in range(0, 1000, 2):
        cache.publish(i.to_bytes(2), 1 + i, is_draft_computed=False)
    assert search()[0] == 1000
    assert search()[1] <= 2 * 2000


def test_a_window_shorter_than_the_prompt_is_cached_after_the_first_request() -> None:
    bench = Bench(kv_window=8, block_tokens=4, num_blocks=10, max_len=200, token_budget=8)
    prompt = list(range(1, 65))
    for _ in range(2):
        number = bench.add(prompt, max_tokens=1, ignore_eos=True)
        bench.run()
    usage = bench.last_output(number).usage
    assert usage is not None
    assert usage.cached_tokens == 60


def test_a_long_prompt_never_holds_more_blocks_than_a_window_and_a_step() -> None:
    bench = Bench(kv_window=8, block_tokens=4, num_blocks=65, max_len=200, token_budget=8)
    bench.add(list(range(90)), max_tokens=90, ignore_eos=True)
    live = max_live_blocks(8, 4, 8)
    assert live is not None
    while bench.step():
        stats = bench.engine.stats()
        assert stats.total_blocks - stats.free_blocks <= live


GROUPS = KVGroups(window=8, window_blocks=3)


def test_a_cache_with_groups_serves_every_request_up_to_its_longest() -> None:
    for size, window, usable in product((1, 4), (3, 10), range(4, 60)):
        groups = KVGroups(window=window, window_blocks=3)
        longest = max_request_tokens(
            1000, num_blocks=1 + usable, block_tokens=size, window=None, groups=groups
        )
        needed, too_many = (
            max_held_blocks(num_tokens, 1, block_tokens=size, window=None, groups=groups)
            for num_tokens in (longest, longest + 1)
        )
        assert needed <= usable < too_many


def test_with_groups_a_long_prompt_holds_a_window_of_the_other_layers() -> None:
    bench = Bench(kv_groups=GROUPS, block_tokens=4, num_blocks=100, max_len=200, token_budget=8)
    bench.add(list(range(90)), max_tokens=90, ignore_eos=True)
    most = []
    while bench.step():
        stats = bench.engine.stats()
        most.append(stats.total_blocks - stats.free_blocks)
    live = max_live_blocks(8, 4, 8)
    assert live is not None
    assert 45 < max(most) <= 45 + 3 * live
    assert bench.engine.stats().num_preemptions == 0


def test_with_groups_a_request_gets_all_blocks_of_its_admission_or_none() -> None:
    bench = Bench(kv_groups=GROUPS, block_tokens=4, num_blocks=30, max_len=60, token_budget=8)
    bench.add(list(range(16)), max_tokens=1, ignore_eos=True)
    assert bench.step() == {0: 8}
    assert bench.engine.stats().free_blocks == 29 - (4 + 3 * 4)
    bench.add(list(range(50, 66)), max_tokens=1, ignore_eos=True)  # would fit without a window
    assert bench.step() == {0: 8}
    assert bench.engine.stats().free_blocks == 29
    assert bench.step() == {0: 8}
    bench.run()
    assert bench.engine.stats().free_blocks == 29


def test_with_groups_a_prompt_is_cached_until_its_last_window() -> None:
    bench = Bench(kv_groups=GROUPS, block_tokens=4, num_blocks=60, max_len=100, token_budget=8)
    prompt = list(range(1, 65))
    for _ in range(2):
        number = bench.add(prompt, max_tokens=1, ignore_eos=True)
        bench.run()
    usage = bench.last_output(number).usage
    assert usage is not None
    assert usage.cached_tokens == 60


def test_an_engine_that_needs_whole_prefixes_refuses_a_window() -> None:
    ready = WorkerReady(
        model=a_card(),
        max_len=512,
        max_slots=8,
        token_budget=256,
        block_tokens=16,
        num_blocks=5,
        kv_window=20,
    )
    config = EngineConfig(worker=WorkerConfig(model=""))
    assert build_engine(ready, config, epoch="e").limits.max_len == 512
    key = ClusterKey(b"k" * 32)  # of a replica
    assert build_engine(ready, config, epoch="e", key=key).limits.kv_window == 20
    with pytest.raises(ValueError, match="kv_window is 20"):
        build_engine(ready, replace(config, role="decode"), epoch="e", key=key)
    with pytest.raises(ValueError, match="kv_window is 20"):
        build_engine(replace(ready, kv_tiers=["host"]), config, epoch="e")
    grouped = replace(ready, kv_window=None, kv_groups=GROUPS, kv_tiers=["host"])
    with pytest.raises(ValueError, match="kv_window is 8"):
        build_engine(grouped, config, epoch="e")


class WindowedModel:
    """The facts about a model that decide whether blocks are freed."""

    context_tokens = 512

    def __init__(self, *layer_windows: int | None) -> None:
        self.layer_windows = layer_windows
        self.num_layers = self.num_kv_layers = len(layer_windows)
        self.layer_heads = (KVHeads(1, 8),) * self.num_layers
        self.window = None if None in layer_windows else layer_windows[0]


@pytest.mark.parametrize(
    ("window", "options", "freed_before"),
    [
        (20, {}, 20),
        (None, {}, None),
        (20, {"kv_host_gib": 1.0}, None),
        (20, {"kv_disk": "/blocks"}, None),
        (20, {"draft_model": "small"}, None),
        (20, {"kv_export": True}, None),
    ],
)
def test_a_worker_that_needs_whole_prefixes_keeps_all_blocks(
    window: int | None, options: dict[str, Any], freed_before: int | None
) -> None:
    model: Any = WindowedModel(window)
    assert kv_window(WorkerConfig(model="m", **options), [model]) == freed_before


@pytest.mark.parametrize(
    ("words", "freed_before"),
    [
        ((), 20),
        (("--kv-address", "tcp://me:5601"), None),
        (("--role", "decode"), None),
        (("--role", "prefill", "--kv-address", "tcp://me:5601"), None),
        (("--tensor-parallel", "2"), 20),
    ],
)
def test_an_engine_with_a_cluster_key_keeps_all_blocks_only_if_it_transfers_kv(
    words: tuple[str, ...], freed_before: int | None
) -> None:
    options = ("engine", "--address", "tcp://0.0.0.0:5600", "--cluster-key", "/key", *words)
    config = engine_command.plan(vars(build_parser("engine").parse_args(options)))[1]
    model: Any = WindowedModel(20)
    assert kv_window(config.worker, [model]) == freed_before


@pytest.mark.parametrize(
    ("layer_windows", "options", "window_blocks"),
    [
        ([20, None], {}, 1),
        ([20] * 5 + [None], {}, 5),
        ([20] * 29 + [None] * 5, {}, 6),
        ([20, 20], {}, None),
        ([None, None], {}, None),
        ([20] + [None] * 9, {}, None),  # a block of 9 layers would store one
        ([512, None], {}, None),
        ([20, None], {"max_len": 20}, None),
        ([20, None], {"draft_model": "small"}, None),
        ([20, None], {"kv_export": True}, None),
    ],
)
def test_layers_form_groups_if_only_some_have_a_window_and_memory_is_saved(
    layer_windows: list[int | None], options: dict[str, Any], window_blocks: int | None
) -> None:
    model: Any = WindowedModel(*layer_windows)
    groups = kv_groups(WorkerConfig(model="m", **options), [model])
    expected = None if window_blocks is None else KVGroups(window=20, window_blocks=window_blocks)
    assert groups == expected


def test_each_layer_has_its_own_place_in_a_column() -> None:
    windows = [20, 20, None, 20, 20, None, 20]
    places = layer_places(windows, [KVHeads(1, 8)] * len(windows))
    assert places == [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1), (3, 0)]
    cache = KVCache(2, 3, 4, 1, 8, torch.float32, torch.device("cpu"), places=places)
    assert cache.num_entries == 4
    for layer in range(len(places)):
        cache.layer(layer)[0][layer % 3].fill_(layer)
        assert (cache.k[places[layer].row, layer % 3] == layer).all()
