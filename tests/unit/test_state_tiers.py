"""Models with a recurrent state: tiers keep states beside blocks, and a prefix is loaded as far as
both reach.

The echo worker checks that each row starts with the state of the positions before it, and that each
checkpoint that a request starts with is that of its tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from protocol.worker.kv import TierSource, is_state_key, state_key
from tests.support.engines import Bench, answer, guess_with_accuracy

SIZE = 4
"""Tokens of a block."""
PROMPT = list(range(1, 91))  # 22 blocks, and 2 tokens
OTHER = list(range(90, 0, -1))


def bench(*tiers: str, **options: Any) -> Bench:
    fields = {
        "num_blocks": 25,
        "max_len": 120,
        "block_tokens": SIZE,
        "state_bytes": 8,
        "num_checkpoints": 8,
        "state_interval": 64,
        "kv_load_tokens": 4,
    }
    return Bench(tiers=tiers or ("disk",), **(fields | options))


def ask(engine: Bench, prompt: list[int] = PROMPT, max_tokens: int = 5, **options: Any) -> int:
    return engine.add(prompt, max_tokens=max_tokens, **options)


def evicted(*tiers: str, **options: Any) -> Bench:
    """Return a bench that has answered PROMPT. Its blocks and states are in the tiers, but no
    longer in the prefix cache."""
    engine = bench(*tiers, **options)
    ask(engine)
    engine.run()
    engine.on_kv_report(engine.tiers.report())
    forget(engine)
    return engine


def forget(engine: Bench) -> None:
    """Fill the prefix cache with other blocks, so that those of PROMPT are evicted."""
    for name in ("this", "that"):
        ask(engine, OTHER, namespace=name)
        engine.run()


def load(engine: Bench, fault: str = "") -> None:
    """Complete the oldest fetch and report it to the engine."""
    engine.on_kv_report(engine.tiers.carry_out(next(iter(engine.tiers.jobs)), fault))


def loaded(engine: Bench) -> int:
    """Return how many blocks the only fetch loads."""
    (job,) = engine.tiers.jobs.values()
    assert isinstance(job.source, TierSource)
    assert job.checkpoint
    return len(job.source.hashes)


def states(engine: Bench, tier: str = "disk") -> list[bytes]:
    """Return the keys of the states in a tier, those of shorter prefixes first."""
    kept = engine.tiers.kept[tier]
    return sorted(filter(is_state_key, kept), key=lambda key: len(kept[key]))


def check_answer(engine: Bench, number: int, cached: int) -> None:
    assert engine.tokens(number) == answer(PROMPT, 5)
    assert engine.usage(number).cached_tokens == cached
    assert engine.engine.stats().held_checkpoints == 0


def test_each_cached_state_is_stored_with_the_blocks_before_it() -> None:
    engine = bench("host", "disk")
    ask(engine)
    engine.run()
    for tier in ("host", "disk"):
        kept = engine.tiers.kept[tier]
        lengths = [len(kept[key]) for key in states(engine, tier)]
        assert lengths == [64, 88, 92], "at the interval, at the ends of prompt and answer"
        blocks = [key for key in kept if not is_state_key(key)]
        assert len(blocks) == 23


def test_evicted_blocks_and_their_last_state_are_loaded_and_not_computed() -> None:
    engine = evicted()
    before = engine.engine.stats().num_computed_tokens
    number = ask(engine)
    engine.plan()
    assert loaded(engine) == 22
    load(engine)
    engine.run()
    check_answer(engine, number, 88)
    assert engine.engine.stats().num_computed_tokens - before == 2 + 4


@pytest.mark.parametrize(("num_lost", "end"), [(1, 88), (2, 64), (3, 0)])
def test_a_prefix_is_loaded_to_its_last_stored_state(num_lost: int, end: int) -> None:
    engine = evicted()
    kept = engine.tiers.kept["disk"]
    own = [key for key in states(engine) if kept[key][0] == 1]  # not those of OTHER
    for key in own[len(own) - num_lost :]:
        engine.tiers.lose("disk", key)
    engine.on_kv_report(engine.tiers.report())
    number = ask(engine)
    engine.plan()
    assert bool(engine.tiers.jobs) == bool(end)
    if end:
        assert loaded(engine) == end // SIZE
        load(engine)
    engine.run()
    check_answer(engine, number, end)


def test_a_state_in_another_tier_than_its_blocks_is_loaded_too() -> None:
    engine = evicted("host", "disk")
    for tier, is_lost in (("host", is_state_key), ("disk", lambda key: not is_state_key(key))):
        for key in list(filter(is_lost, engine.tiers.kept[tier])):
            engine.tiers.lose(tier, key)
    engine.on_kv_report(engine.tiers.report())
    number = ask(engine)
    engine.plan()
    load(engine)
    engine.run()
    check_answer(engine, number, 88)


def test_a_state_that_is_lost_before_it_is_loaded_makes_the_fetch_fail() -> None:
    engine = evicted()
    number = ask(engine)
    engine.plan()
    for key in states(engine):
        engine.tiers.lose("disk", key)
    load(engine)
    engine.run()
    check_answer(engine, number, 0)
    assert engine.engine.stats().num_fetches_failed == {"lost": 1}


@pytest.mark.parametrize("fault", ["lost", "damaged", "timeout"])
def test_a_failed_load_continues_from_the_cached_prefix(fault: str) -> None:
    engine = evicted()
    ask(engine, PROMPT[:14])
    engine.run()
    number = ask(engine)
    engine.plan()
    assert loaded(engine) == 19
    load(engine, fault)
    engine.run()
    check_answer(engine, number, 12)


def test_loaded_states_are_found_by_the_next_prompt() -> None:
    engine = evicted(num_blocks=60)
    for is_loaded in (True, False):
        number = ask(engine)
        engine.plan()
        assert bool(engine.tiers.jobs) == is_loaded
        if is_loaded:
            load(engine)
        engine.run()
        check_answer(engine, number, 88)


def test_the_next_turn_loads_the_prompt_and_the_answer() -> None:
    engine = bench()
    number = ask(engine, PROMPT[:30], max_tokens=31, ignore_eos=True)
    engine.run()
    history = PROMPT[:30] + engine.tokens(number)
    engine.on_kv_report(engine.tiers.report())
    forget(engine)
    number = ask(engine, [*history, 7])
    engine.plan()
    assert loaded(engine) == 15
    load(engine)
    engine.run()
    assert engine.tokens(number) == answer([*history, 7], 5)
    assert engine.usage(number).cached_tokens == 60


def test_an_answer_that_the_draft_model_has_not_computed_is_stored_too() -> None:
    engine = bench(speculation="model", guess=guess_with_accuracy(0.0), num_blocks=60)
    ask(engine, PROMPT[:6], max_tokens=31, ignore_eos=True)
    engine.run()
    kept = engine.tiers.kept["disk"]
    assert len([key for key in kept if not is_state_key(key)]) == 9
    assert max(len(kept[key]) for key in states(engine)) == 36


def test_used_states_are_reported_just_before_their_blocks() -> None:
    """The last key was used most recently. The blocks at the beginning are kept longest, and a
    state not longer than the block that it follows."""
    engine = evicted()
    engine.tiers.used.clear()
    ask(engine)
    engine.plan()
    load(engine)
    engine.run()
    (keys,) = engine.tiers.used
    for place, key in enumerate(keys):
        if is_state_key(key):
            assert key == state_key(keys[place + 1])
    assert sum(map(is_state_key, keys)) == 3
    assert len(keys) == 23 + 3


def test_states_that_a_tier_has_lost_are_stored_again_after_they_are_computed() -> None:
    engine = evicted()
    kept = engine.tiers.kept["disk"]
    own = [key for key in states(engine) if kept[key][0] == 1]
    for key in own:
        engine.tiers.lose("disk", key)
    engine.on_kv_report(engine.tiers.report())
    ask(engine)
    engine.run()
    assert set(own) <= kept.keys()


def test_the_statistics_count_blocks_and_not_states_as_blocks_in_a_tier() -> None:
    engine = evicted()
    kept = engine.tiers.kept["disk"]
    num_blocks = len([key for key in kept if not is_state_key(key)])
    engine.on_kv_report(engine.tiers.report())
    assert engine.engine.stats().tier_blocks == {"disk": num_blocks}
