"""Two ranks of a tensor parallel group execute the plans that one worker has executed.

The stream has every kind of request and event (test_replay.py). Both ranks must return the tokens
of the one worker, in new, reused and poisoned memory, and each must return the same bits as the
other, because every rank samples for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.worker.steps import Logprobs, StepResult
from tests.support.ranks import in_ranks, load_share
from tests.support.recording import (
    Recording,
    make_requests,
    num_bindings,
    own_slots,
    record,
    replay,
    tiny_model,
)
from tests.support.replica import Executed
from worker.layers.group import Group
from worker.step.slot_registry import Poison

pytestmark = pytest.mark.long

NUM_RANKS = 2
NUM_REQUESTS = 104
"""Four of each kind."""
MODES: dict[str, tuple[Poison | None, float | None]] = {
    "reuse": (None, None),
    "plausible": (Poison.PLAUSIBLE, 1e4),
    "wild": (Poison.WILD, float("nan")),
}
"""Mode -> the content of unused slots, and that of newly assigned blocks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Recording:
    return record(tiny_model(folder), make_requests(15, NUM_REQUESTS))


def replay_in_ranks(
    folder: Path,
    recorded: Recording,
    steps: Sequence[Executed],
    *,
    max_slots: int,
    poison: Poison | None = None,
    block_poison: float | None = None,
) -> list[list[StepResult]]:
    """Return the results of each rank."""

    def run(group: Group) -> list[StepResult]:
        share = load_share(folder, group)
        own = replace(recorded, loaded=share)
        return list(
            replay(
                own,
                [with_heads_of(step, group, share.spec.layer_heads[0].count) for step in steps],
                max_slots=max_slots,
                poison=poison,
                block_poison=block_poison,
            )
        )

    return in_ranks(NUM_RANKS, run)


def with_heads_of(step: Executed, group: Group, heads: int) -> Executed:
    """Return `step` with only the rank's heads of the K/V that arrives."""
    own = slice(group.rank * heads, (group.rank + 1) * heads)
    arrived = [replace(each, k=each.k[..., own, :], v=each.v[..., own, :]) for each in step.arrived]
    return replace(step, arrived=arrived)


@pytest.fixture(scope="module")
def in_new_slots(folder: Path, recorded: Recording) -> list[list[StepResult]]:
    """Return the results of each rank if no slot is used twice."""
    bindings = num_bindings(recorded.steps)
    return replay_in_ranks(folder, recorded, own_slots(recorded.steps), max_slots=bindings)


def test_the_stream_has_every_kind_of_event(recorded):
    """More is in test_replay.py, about a longer stream."""
    plans, results = zip(*((step.plan, step.result) for step in recorded.steps), strict=True)
    inits = [init for plan in plans for init in plan.bind]
    usages = [outputs[-1].usage for outputs in recorded.outputs.values()]
    assert any(0 < init.num_computed < init.prompt_tokens for init in inits), "prefix cache"
    assert any(step.arrived for step in recorded.steps), "K/V of another engine"
    assert sum(usage.preemptions for usage in usages) > 0
    assert any(plan.row_drafts is not None for plan in plans)
    assert any(step.masks is not None for step in recorded.steps)
    assert any(result.logprobs is not None for result in results)
    assert any(result.prompt_logprobs is not None for result in results)


def test_two_ranks_sample_the_tokens_of_one_worker(recorded, in_new_slots):
    assert len(recorded.steps) == len(in_new_slots[0])
    for step, result in zip(recorded.steps, in_new_slots[0], strict=True):
        alone = step.result
        assert (result.tokens, result.counts) == (alone.tokens, alone.counts)
        assert not len(result.failed)
        assert_close(result.logprobs, alone.logprobs)
        assert_close(result.prompt_logprobs, alone.prompt_logprobs)


def assert_close(ours: Logprobs | None, theirs: Logprobs | None) -> None:
    """Check that the same entries have the same tokens, ranks and, nearly, logprobs."""
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    for name in ("rows", "counts", "ids", "ranks", "asked_counts", "drawn_at"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("logprobs", "top_logprobs", "asked", "drawn"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one.tolist(), other.tolist(), atol=1e-4)


def test_every_rank_returns_the_same_bits(in_new_slots):
    first, second = in_new_slots
    assert first == second


@pytest.mark.parametrize("mode", MODES)
def test_reused_slots_and_blocks_give_the_results_of_new_ones(folder, recorded, in_new_slots, mode):
    poison, value = MODES[mode]
    results = replay_in_ranks(
        folder, recorded, recorded.steps, max_slots=7, poison=poison, block_poison=value
    )
    assert results == in_new_slots


def test_a_draft_model_on_every_rank_is_verified_like_with_one_worker(tmp_path):
    """The draft model is whole on each rank, and the model is divided."""
    loaded = tiny_model(tmp_path)
    recorded = record(loaded, make_requests(12, 40), draft=loaded)
    assert sum(step.plan.row_drafts is not None for step in recorded.steps) > 10
    first, second = replay_in_ranks(tmp_path, recorded, recorded.steps, max_slots=7)
    assert first == second
    for step, result in zip(recorded.steps, first, strict=True):
        assert (result.tokens, result.counts) == (step.result.tokens, step.result.counts)
        assert result.proposed == step.result.proposed
