"""Blocks in the worker's tiers: stored when published, and loaded instead of computed again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.worker.kv import KVReport, KVTierNews, TierSource
from tests.support.engines import Bench, answer

PROMPT = list(range(1, 91))  # 22 blocks of 4, and 2 tokens
OTHER = list(range(90, 0, -1))


def bench(*tiers: str, num_blocks: int = 25, **options: object) -> Bench:
    return Bench(
        tiers=tiers or ("disk",),
        num_blocks=num_blocks,
        max_len=120,
        **options,  # type: ignore[arg-type]
    )


def ask(engine: Bench, prompt: list[int] = PROMPT, max_tokens: int = 5, **options: object) -> int:
    number = engine.add(prompt, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    return number


def evicted(*tiers: str, **options: Any) -> Bench:
    """Return a bench that has answered PROMPT. Its blocks are in the tiers, but no longer in the
    prefix cache."""
    engine = bench(*tiers, **options)
    ask(engine)
    engine.run()
    engine.on_kv_report(engine.tiers.report())
    forget(engine)
    engine.tiers.used.clear()
    return engine


def forget(engine: Bench) -> None:
    """Fill the prefix cache with other blocks, so that those of PROMPT are evicted."""
    for name in ("this", "that"):
        ask(engine, OTHER, namespace=name)
        engine.run()


def load(engine: Bench, fault: str = "", seconds: float = 0.001) -> None:
    """Complete the oldest fetch and report it to the engine."""
    engine.on_kv_report(engine.tiers.carry_out(next(iter(engine.tiers.jobs)), fault, seconds))


def test_computed_blocks_are_stored_as_they_are_published() -> None:
    engine = bench(token_budget=10)
    ask(engine)
    engine.step()
    assert list(map(len, engine.tiers.stored)) == [2]
    engine.run()
    stored = [content for hashes in engine.tiers.stored for content in hashes]
    assert len(stored) == len(set(stored)) == 23


def test_without_tiers_no_tier_commands_are_sent() -> None:
    engine = Bench()
    ask(engine)
    engine.run()
    assert (engine.tiers.stored, engine.tiers.used) == ([], [])


def test_evicted_blocks_are_loaded_and_not_computed() -> None:
    engine = evicted()
    before = engine.engine.stats().num_computed_tokens
    number = ask(engine)
    engine.plan()
    assert engine.engine.stats().fetching == 1
    load(engine)
    engine.run()
    assert engine.tokens(number) == answer(PROMPT, 5)
    stats = engine.engine.stats()
    assert stats.num_computed_tokens - before == 2 + 4  # the rest of the prompt, then the answer
    usage = engine.usage(number)
    assert (usage.cached_tokens, usage.fetched_tokens) == (88, 0)
    assert (stats.num_fetched_tokens, stats.free_blocks) == (88, stats.total_blocks)


def test_only_blocks_that_are_not_cached_are_loaded() -> None:
    engine = evicted()
    ask(engine, PROMPT[:6] + OTHER[:3])  # one block of PROMPT is cached again
    engine.run()
    number = ask(engine)
    engine.plan()
    (job,) = engine.tiers.jobs.values()
    assert isinstance(job.source, TierSource)
    assert len(job.source.hashes) == len(job.blocks) == 21
    load(engine)
    engine.run()
    assert engine.tokens(number) == answer(PROMPT, 5)
    usage = engine.usage(number)
    assert usage.cached_tokens == 88
    assert engine.engine.stats().num_fetched_tokens == 84


def test_a_prompt_that_fills_its_last_block_computes_that_block() -> None:
    engine = evicted()
    number = ask(engine, PROMPT[:88])
    engine.plan()
    load(engine)
    engine.run()
    assert engine.tokens(number) == answer(PROMPT[:88], 5)
    usage = engine.usage(number)
    assert usage.cached_tokens == 84


def test_blocks_of_another_namespace_are_not_found() -> None:
    engine = evicted()
    ask(engine, namespace="other")
    engine.plan()
    assert not engine.tiers.jobs


@pytest.mark.parametrize("fault", ["lost", "damaged", "timeout"])
@pytest.mark.parametrize("policy", ["recompute", "error"])
def test_blocks_that_cannot_be_loaded_are_computed_for_every_failure_policy(
    fault: str, policy: str
) -> None:
    engine = evicted(kv_on_failure=policy)
    number = ask(engine)
    engine.plan()
    load(engine, fault)
    engine.run()
    assert engine.tokens(number) == answer(PROMPT, 5)
    usage = engine.usage(number)
    assert usage.cached_tokens == 0
    assert engine.engine.stats().num_fetches_failed == {fault: 1}


def test_other_requests_run_while_one_is_being_loaded() -> None:
    engine = evicted(num_blocks=40, max_slots=2)
    slow = ask(engine)
    fast = ask(engine, [5, 6, 7])
    engine.run()
    assert engine.tokens(fast) == answer([5, 6, 7], 5)
    assert engine.tokens(slow) == []
    load(engine)
    engine.run()
    assert engine.tokens(slow) == answer(PROMPT, 5)


def test_an_abort_during_a_load_frees_the_blocks_after_the_report() -> None:
    engine = evicted()
    number = ask(engine)
    engine.plan()
    engine.abort(number)
    stats = engine.engine.stats()
    assert stats.free_blocks < stats.total_blocks, "the worker may still write"
    engine.send_kv_commands()
    load(engine)
    stats = engine.engine.stats()
    assert stats.free_blocks == stats.total_blocks
    assert stats.num_fetches_failed == {"cancelled": 1}


def test_a_prefix_below_kv_load_tokens_is_computed() -> None:
    engine = bench()
    ask(engine)
    engine.run()
    engine.on_kv_report(engine.tiers.report())
    least = 64  # by default
    for length, is_loaded in ((least, False), (least + 1, True)):
        forget(engine)
        ask(engine, PROMPT[:length])
        engine.plan()
        assert bool(engine.tiers.jobs) == is_loaded
        if is_loaded:
            load(engine)
        engine.run()


def test_loading_that_is_slower_than_computing_is_tried_from_time_to_time() -> None:
    engine = evicted()
    loads = []
    for turn in range(40):
        number = ask(engine)
        engine.plan()
        if engine.tiers.jobs:
            loads.append(turn)
            load(engine, seconds=3 * 88 / engine.engine.throughput.tokens_per_s)
        engine.run()
        assert engine.tokens(number) == answer(PROMPT, 5)
        forget(engine)
    assert loads[0] == 0
    assert len(loads) in range(2, 8)
    assert min(after - before for before, after in pairwise(loads)) > 5


def test_a_preempted_request_loads_its_blocks_from_the_tiers() -> None:
    engine = bench(num_blocks=49, max_slots=3, kv_load_tokens=4)
    numbers = [ask(engine, [n, *PROMPT[:60]], max_tokens=20) for n in range(3)]
    while not engine.engine.stats().num_preemptions:
        engine.step()
        engine.on_kv_report(engine.tiers.report())
    for name in ("this", "that"):  # they evict the preempted request's blocks
        ask(engine, OTHER, priority=-1, namespace=name)
    while engine.step() is not None or engine.tiers.jobs:
        if engine.tiers.jobs:
            load(engine)
    stats = engine.engine.stats()
    assert stats.num_fetched_tokens > 40
    for n, number in enumerate(numbers):
        assert engine.tokens(number) == answer([n, *PROMPT[:60]], 20)
        usage = engine.usage(number)
        assert usage.cached_tokens == 0, "cached_tokens counts the first admission only"


def test_used_blocks_are_reported_from_last_to_first() -> None:
    engine = evicted()
    stored = [content for hashes in engine.tiers.stored for content in hashes]
    ask(engine)
    engine.plan()
    load(engine)
    engine.run()
    assert engine.tiers.used == [stored[:23][::-1]]


def test_blocks_that_a_tier_has_lost_are_stored_again_after_they_are_computed() -> None:
    engine = evicted("host", "disk")
    first = engine.tiers.stored[0][0]
    engine.tiers.lose("host", first)
    engine.on_kv_report(engine.tiers.report())
    engine.tiers.stored.clear()
    ask(engine, PROMPT[:6])
    engine.run()
    assert engine.tiers.stored[0] == [first]
    assert first in engine.tiers.kept["host"]


def test_tier_reports_add_up_in_the_statistics() -> None:
    engine = bench()
    news = KVTierNews(
        tier="disk",
        stored=[b"a" * 32, b"b" * 32],
        lost=[],
        num_bytes=77,
        num_stored=3,
        num_dropped=4,
        num_loaded=5,
        num_failed=6,
    )
    for _ in range(2):
        engine.on_kv_report(KVReport(tiers=[news]))
    engine.on_kv_report(KVReport(tiers=[KVTierNews(tier="disk", lost=[b"a" * 32], num_bytes=7)]))
    stats = engine.engine.stats()
    assert (stats.tier_blocks, stats.tier_bytes) == ({"disk": 1}, {"disk": 7})
    assert (stats.num_tier_stored, stats.num_tier_dropped) == ({"disk": 6}, {"disk": 8})
    assert (stats.num_tier_loaded, stats.num_tier_failed) == ({"disk": 10}, {"disk": 12})


def test_tiers_without_the_prefix_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="prefix_cache"):
        EngineConfig(worker=WorkerConfig(model="", kv_host_gib=1), prefix_cache=False)
