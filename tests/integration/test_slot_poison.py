"""State cannot leak: one recorded stream of plans, replayed over clean, reused and poisoned memory.

A leak is a result that depends on what a slot or a block held before its present owner. So freed
slots and blocks are filled with zeros, with plausible values or with NaN and impossible ones: every
token and every bit of every logprob must stay. Then each field's reset is disabled in turn, and the
replay must notice: the test can see what it claims to see.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from protocol.arrays import Int32
from protocol.sampling import SamplingParams
from protocol.steps import StepResult
from tests.support.plans import GREEDY, Planner, Recorded, Script, reuse_slots
from tests.support.tiny_model import VOCAB, tiny_cache, tiny_runner, tiny_slots
from worker.slots import Poison, Rest, SlotField, SlotTable

NUM_BLOCKS = 61
MAX_RUNNING = 7
SPECS = [
    GREEDY,
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.6, top_k=3),
    SamplingParams(temperature=1.9, top_p=0.4),
    SamplingParams(temperature=1.8, min_p=0.3),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.0, repetition_penalty=4.0),
    SamplingParams(temperature=0.0, frequency_penalty=1.9),
    SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=-2.0),
    SamplingParams(temperature=0.0, logit_bias={i: 9.0 + i / 64 for i in range(5, 90, 17)}),
    SamplingParams(temperature=1.0, logit_bias={3: 6.0, 50: 5.5}, logprobs=2),
    SamplingParams(temperature=0.0, min_tokens=4, logprobs=0),
    SamplingParams(temperature=0.7, min_tokens=3, logprobs=5, prompt_logprobs=3),
    SamplingParams(temperature=0.0, prompt_logprobs=0),
    SamplingParams(temperature=0.0, allowed_token_ids=list(range(2, 97, 5))),
    SamplingParams(temperature=1.0, bad_words=[[i] for i in range(0, 97, 4)] + [[1, 3], [5] * 4]),
    SamplingParams(temperature=0.8, logprobs=1, logprob_token_ids=[60, 4, 33]),
    SamplingParams(temperature=0.0, logprob_token_ids=[96]),
    SamplingParams(temperature=1.2, top_k=9, logprobs=4, logprobs_of="sampling"),
    SamplingParams(temperature=1.4, top_p=0.6, logprob_token_ids=[7, 8], logprobs_of="both"),
]
SURVIVORS = {
    "generation": "read by nothing within a step; it is for work that outlives a slot's occupant"
}


def scripts(num_requests: int = 120) -> list[Script]:
    """Requests of every kind: chunked prompts, preempted, handed over, aborted early and late."""
    rng = random.Random(11)
    made = []
    for number in range(num_requests):
        params = SPECS[number % len(SPECS)]
        arrives = number // 2
        made.append(
            Script(
                prompt=[rng.randrange(VOCAB) for _ in range(rng.randrange(2, 25))],
                params=params,
                num_new=rng.randrange(4, 12),
                seed=rng.getrandbits(64) - (1 << 63),
                stop_ids=rng.sample(range(VOCAB), rng.choice((1, 30))) if params.min_tokens else [],
                arrives=arrives,
                preempt_after=rng.randrange(1, 4) if number % 5 == 1 else None,
                handed_over=number % 7 == 3,
                abort_at=arrives + rng.randrange(1, 6) if number % 11 == 5 else None,
            )
        )
    return made


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Recorded], list[tuple[object, ...]]]:
    """The stream with a slot of its own for every life, and its results over clean memory."""
    planner = Planner(scripts(), num_blocks=NUM_BLOCKS, max_running=MAX_RUNNING, token_budget=23)
    runner = tiny_runner(tiny_slots(200), tiny_cache(NUM_BLOCKS))
    stream, results = [], []
    while not planner.is_done:
        stream.append(planner.plan())
        result = runner.step(stream[-1].plan)
        planner.commit(result)
        results.append(bits(result))
    assert planner.num_lives > 140
    return stream, results


def bits(result: StepResult) -> tuple[object, ...]:
    """All that a result says, but the time it took. Arrays compare by their bytes."""
    return result.tokens, result.failed, result.logprobs, result.prompt_logprobs


def replay(
    stream: Iterable[Recorded],
    *,
    poison: Poison | None = None,
    block_poison: float | None = None,
    slots: SlotTable | None = None,
) -> list[tuple[object, ...]]:
    cache = tiny_cache(NUM_BLOCKS)
    if block_poison is not None:
        cache.k[:, 1:] = cache.v[:, 1:] = block_poison
    runner = tiny_runner(slots or tiny_slots(MAX_RUNNING, poison=poison), cache)
    results = []
    for step in stream:
        if block_poison is not None:
            cache.k[:, step.freed] = cache.v[:, step.freed] = block_poison
        results.append(bits(runner.step(step.plan)))
    return results


def test_the_stream_has_every_kind_of_request(recorded):
    stream, results = recorded
    plans = [step.plan for step in stream]
    inits = [init for plan in plans for init in plan.bind]
    assert any(init.num_computed == len(init.tokens) - 1 > 0 for init in inits), "prefilled"
    assert any(init.prompt_tokens < len(init.tokens) for init in inits), "resumed"
    assert any(max(plan.row_tokens.tolist(), default=0) > 1 for plan in plans), "prefill"
    assert any(plan.num_decodes > 1 for plan in plans), "decodes together"
    assert any(set(plan.release.tolist()) and plan.bind for plan in plans), "released and bound"
    assert any(result[2] is not None for result in results), "logprobs"
    assert any(result[3] is not None for result in results), "prompt logprobs"
    assert not any(len(result[1]) for result in results), "nothing failed"


@pytest.mark.parametrize("poison", [None, *Poison])
def test_a_reused_slot_answers_like_a_new_one_whatever_its_row_held(recorded, poison):
    stream, results = recorded
    assert replay(reuse_slots(stream), poison=poison) == results


@pytest.mark.parametrize("value", [1e4, float("nan")])
def test_a_reused_block_answers_like_a_new_one_whatever_it_held(recorded, value):
    stream, results = recorded
    assert replay(reuse_slots(stream), poison=Poison.WILD, block_poison=value) == results


def test_without_zeroed_blocks_the_replay_notices(recorded):
    stream, results = recorded
    unzeroed = [Recorded(without_zeroing(step.plan), step.freed) for step in reuse_slots(stream)]
    assert replay(unzeroed, block_poison=float("nan")) != results


def without_zeroing(plan):
    return replace(plan, zero_blocks=Int32.of([]))


class Careless(SlotTable):
    """Binds, but never writes the field named `forgotten`."""

    forgotten = ""

    def _resets(self, inits):
        return [write for write in super()._resets(inits) if write.field.name != self.forgotten]

    def _fill(self, field: SlotField, slots) -> None:
        if field.name != self.forgotten:
            super()._fill(field, slots)


class Unfilled(SlotTable):
    """Writes each row's prefix, but not the rest of it."""

    def _fill(self, field: SlotField, slots) -> None:
        pass


def notices(
    stream: list[Recorded], results: list[tuple[object, ...]], kind: type[SlotTable]
) -> bool:
    """Does a replay with this table, over some poison, go wrong?"""
    for poison in (Poison.WILD, Poison.PLAUSIBLE):
        try:
            if replay(stream, slots=tiny_slots(MAX_RUNNING, poison=poison, kind=kind)) != results:
                return True
        except (IndexError, RuntimeError, ValueError):
            return True
    return False


@pytest.mark.parametrize("name", list(tiny_slots(1).fields))
def test_a_field_that_binding_forgets_is_noticed(recorded, name):
    stream, results = recorded
    kind = type("Forgets", (Careless,), {"forgotten": name})
    assert notices(reuse_slots(stream), results, kind) == (name not in SURVIVORS)


def test_a_row_that_is_not_filled_is_noticed(recorded):
    stream, results = recorded
    assert notices(reuse_slots(stream), results, Unfilled)
    assert any(f.rest is Rest.FILL and f.shape for f in tiny_slots(1).fields.values())


# ---- every per-slot tensor is in the table

SLOTS = 13


def reachable(root: object) -> Iterable[object]:
    """Every object that `root` leads to through attributes, containers and closures."""
    seen: set[int] = set()
    queue = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type | str | bytes):
            continue
        seen.add(id(item))
        yield item
        queue += children(item)


def children(item: object) -> list[object]:
    if isinstance(item, torch.Tensor | np.ndarray):
        return []
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    found = list(getattr(item, "__dict__", {}).values())
    for kind in type(item).__mro__:
        found += [getattr(item, n, None) for n in getattr(kind, "__slots__", ())]
    found += [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
    found.append(getattr(item, "__self__", None))
    return found


def unregistered(runner: object, slots: SlotTable) -> list[object]:
    known = {id(tensor) for tensor in slots.tensors()}
    return [
        item
        for item in reachable(runner)
        if isinstance(item, torch.Tensor | np.ndarray)
        and SLOTS in item.shape[:1]
        and id(item) not in known
    ]


def test_no_tensor_of_one_row_a_slot_exists_outside_the_table():
    slots = tiny_slots(SLOTS)
    runner = tiny_runner(slots, tiny_cache(NUM_BLOCKS))
    planner = Planner(scripts(9), num_blocks=NUM_BLOCKS, max_running=9, token_budget=64)
    while not planner.is_done and planner.num_lives < SLOTS - 1:
        planner.commit(runner.step(planner.plan().plan))
    found = [item for item in reachable(runner) if isinstance(item, torch.Tensor)]
    assert {id(t) for t in slots.tensors()} <= {id(t) for t in found}
    assert unregistered(runner, slots) == []


def test_the_walk_finds_a_tensor_that_was_slipped_in():
    slots = tiny_slots(SLOTS)
    runner = tiny_runner(slots, tiny_cache(NUM_BLOCKS))
    runner._model.memory = {"last": [torch.zeros(SLOTS, 2)]}
    assert len(unregistered(runner, slots)) == 1
