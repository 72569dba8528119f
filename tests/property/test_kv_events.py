"""Under random operations, a subscriber of KV events knows exactly what is in the prefix cache."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.blocks.hash import root_hash
from tests.support.engines import a_card
from tests.support.examples import examples
from tests.support.storm import RequestStorm, SmallCacheStorm, WindowStorm
from tests.support.vllm_events import CacheMirror

OPERATIONS = examples(1_000, 10_000)
DIGEST = a_card().digest
CONTENT_BYTES = 32
"""Length of a content hash. Longer keys in the cache are of the layers with a window."""
PLAIN: dict[str, Any] = {"kv_events": "ipc:///nowhere/events.sock"}


def storm_of(seed: int, namespaces: list[str], window_blocks: int | None = None) -> RequestStorm:
    config: dict[str, Any] = {**PLAIN, "kv_events_namespace": namespaces, "prefix_cache": True}
    if window_blocks is None:
        return RequestStorm(seed, **config)
    return WindowStorm(seed, window_blocks, **config)


def cached_contents(storm: RequestStorm) -> set[bytes]:
    contents = storm.bench.engine.scheduler.pool.cache.items().values()
    return {content for content in contents if len(content) == CONTENT_BYTES}


@pytest.mark.parametrize(
    ("seed", "window_blocks"), [(3, None), (4, None), (105, None), (207, None), (5, 0), (103, 2)]
)
def test_a_subscriber_knows_the_whole_cache(seed: int, window_blocks: int | None) -> None:
    storm = storm_of(seed, ["", "x"], window_blocks)
    mirror = CacheMirror([root_hash(DIGEST, ""), root_hash(DIGEST, "x")])
    for _ in range(OPERATIONS):
        storm.operate()
        for event in storm.bench.engine.drain_kv_events():
            mirror.apply(event)
        assert mirror.cached == cached_contents(storm)
    assert mirror.num_removed > 20, "too few blocks were evicted"


def test_blocks_that_were_fetched_from_tiers_are_reported() -> None:
    storm = SmallCacheStorm(7, ["host", "disk"], **PLAIN, kv_events_namespace=["", "x"])
    mirror = CacheMirror([root_hash(DIGEST, ""), root_hash(DIGEST, "x")])
    for _ in range(OPERATIONS):
        storm.operate()
        for event in storm.bench.engine.drain_kv_events():
            mirror.apply(event)
        assert mirror.cached == cached_contents(storm)
    assert storm.bench.engine.stats().num_tier_loaded


@pytest.mark.parametrize("seed", [3, 105])
def test_only_the_named_namespace_is_reported(seed: int) -> None:
    """The mirror knows the root of this namespace only, so a block of another one would fail."""
    storm = storm_of(seed, ["x"])
    mirror = CacheMirror([root_hash(DIGEST, "x")])
    for _ in range(OPERATIONS):
        storm.operate()
        for event in storm.bench.engine.drain_kv_events():
            mirror.apply(event)
        assert mirror.cached <= cached_contents(storm)
    assert mirror.num_stored > 20
