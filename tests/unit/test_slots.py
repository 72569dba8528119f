"""The slot table: how slots are bound, and that no value outlives its request. Also the search for
per-slot tensors outside the table."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import worker.sampling.sampler
from protocol.engine.sampling import DryBreaker, SamplingParams
from protocol.worker.steps import NO_CHECKPOINT, SlotInit, StepPlan
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.tiny_model import (
    BLOCK_TOKENS,
    CPU,
    MAX_LEN,
    TinyModel,
    tiny_cache,
    tiny_runner,
    tiny_slots,
)
from worker.batch.batch import read_rows, step_states
from worker.sampling.sampler import TokenChoice
from worker.slots.features import ALL
from worker.slots.fields import STATE
from worker.slots.states import StepStates
from worker.slots.table import RestPolicy, SlotField, SlotTable
from worker.step.runner import Runner
from worker.step.slot_registry import CheckedRunner, Poison, check_registry, rows_for, strays


def scalar(name: str, **more: Any) -> SlotField:
    settings: dict[str, Any] = {
        "dtype": torch.int32,
        "rest": RestPolicy.FILL,
        "init": lambda init: init.slot,
        **more,
    }
    return SlotField(name=name, **settings)


def rows(table: SlotTable, slot: int) -> dict[str, list[object]]:
    """Return the values of a slot's row that may be read: guarded fields only up to their count."""
    seen = {}
    for name, field in table.fields.items():
        row = table[name][slot]
        seen[name] = (row[: int(table[field.guard][slot])] if field.guard else row).tolist()
    return seen


FULL = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=9,
    min_p=0.125,
    frequency_penalty=1.5,
    presence_penalty=-0.5,
    repetition_penalty=2.0,
    min_tokens=3,
    max_tokens=9,
    logit_bias={4: 1.5, 2: -2.0},
    logprobs=3,
    prompt_logprobs=0,
    bad_words=[[5, 6], [7]],
    allowed_token_ids=[8, 9],
    logprob_token_ids=[10],
    logprobs_of="both",
    typical_p=0.75,
    top_n_sigma=1.5,
    dynatemp_range=0.25,
    dynatemp_exponent=2.0,
    xtc_probability=0.5,
    xtc_threshold=0.125,
    mirostat=2,
    mirostat_tau=4.0,
    mirostat_eta=0.5,
    dry_multiplier=0.5,
    dry_base=1.5,
    dry_allowed_length=4,
    dry_penalty_last_n=30,
    dry_breakers=[DryBreaker([12, 11]), DryBreaker([13], [15, 16, 17])],
    samplers=["penalties", "dry", "typ_p", "top_k", "temperature"],
)


def test_binding_writes_every_field_of_the_row():
    table = tiny_slots(3)
    init = slot_init(
        1,
        [7, 8, 9],
        prompt_tokens=2,
        blocks=[5],
        seed=-3,
        stop_ids=[1],
        params=FULL,
        adapter=6,
        adapter_generation=4,
        mirostat_mu=3.5,
    )
    table.bind(init)
    table.flush()
    no_blocks = [0] * (MAX_LEN // BLOCK_TOKENS - 1)
    assert rows(table, 1) == {
        "token_ids": [7, 8, 9],
        "len": 3,
        "block_table": [5, *no_blocks],
        "prompt_len": 2,
        "adapter": 6,
        "adapter_generation": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": 0,
        "filter_order": 0x1,  # Mirostat replaces the other filters
        "chain_temperature": 0.5,
        "chain_top_p": 0.25,
        "chain_min_p": 0.125,
        "chain_top_k": 9,
        "typical_p": 0.75,
        "top_n_sigma": 1.5,
        "dynatemp_range": 0.25,
        "dynatemp_exponent": 2.0,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.125,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.5,
        "mirostat_mu": 3.5,
        "dry_multiplier": 0.5,
        "dry_base": 1.5,
        "dry_allowed": 4,
        "dry_window": 30,
        "num_heads": 3,
        "heads_ids": [11, 12, 13],
        "num_breakers": 2,
        "head_ends": [2, 3],
        "num_tails": 3,
        "tails_ids": [15, 16, 17],
        "num_tail_ends": 2,
        "tail_ends": [0, 3],
        "longest_tail": 3,
        "frequency_penalty": 1.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 2.0,
        "seed": -3,
        "min_len": 5,
        "num_logprobs": 3,
        "logprobs_of": 2,
        "num_prompt_logprobs": 0,
        "num_bias": 2,
        "bias_ids": [4, 2],
        "bias_values": [1.5, -2.0],
        "num_stop_ids": 1,
        "stop_ids": [1],
        "num_allowed": 2,
        "allowed_ids": [8, 9],
        "num_asked": 1,
        "asked_ids": [10],
        "num_bad": 3,
        "bad_ids": [5, 6, 7],
        "num_bad_words": 2,
        "longest_bad_word": 2,
        "bad_ends": [2, 3],
        "features": ALL,
    }


@pytest.mark.parametrize("poison", [None, *Poison])
def test_a_row_has_no_data_of_its_former_owner(poison):
    table = tiny_slots(2, poison=poison)
    table.bind(slot_init(0, range(20), blocks=[1, 2, 3, 4, 5], stop_ids=[5, 6, 7], params=FULL))
    table.flush()
    table.release(0, 1)
    table.bind(slot_init(0, [3], generation=2, blocks=[9]))
    table.flush()
    fresh = tiny_slots(2)
    fresh.bind(slot_init(0, [3], generation=2, blocks=[9]))
    fresh.flush()
    assert rows(table, 0) == rows(fresh, 0)


def test_many_slots_are_bound_in_one_flush_and_others_are_left_alone():
    table = tiny_slots(5)
    for slot in (3, 0, 4):
        table.bind(slot_init(slot, [slot, slot + 1], blocks=[slot + 1]))
    table.flush()
    assert table["token_ids"][:, :3].tolist() == [
        [0, 1, 0],
        [0, 0, 0],
        [0, 0, 0],
        [3, 4, 0],
        [4, 5, 0],
    ]


def test_appended_blocks_are_at_the_plans_indexes():
    table = tiny_slots(3)
    table.bind(slot_init(0, [1], blocks=[7]))
    table.flush()
    table.bind(slot_init(2, [1], blocks=[8]))
    table.stage_items("block_table", np.array([0, 2, 0]), np.array([1, 1, 2]), np.array([4, 5, 6]))
    table.flush()
    assert table["block_table"][:, :4].tolist() == [[7, 4, 6, 0], [0, 0, 0, 0], [8, 5, 0, 0]]


def test_a_new_owners_drafts_replace_the_length_that_its_binding_wrote():
    table = tiny_slots(3)
    for slot in (0, 2):
        table.bind(slot_init(slot, [1, 2, 3]))
    table.stage_items("len", np.array([2]), np.array([0]), np.array([5]))
    table.flush()
    assert table["len"].tolist() == [3, 0, 5]


def test_a_sampled_token_is_the_token_at_its_position():
    table = tiny_slots(3)
    for slot in (0, 2):
        table.bind(slot_init(slot, [1, 2, 3]))
    table.flush()
    table.append_tokens(torch.tensor([2, 0]), torch.tensor([3, 3]), torch.tensor([50, 60]))
    assert rows(table, 0)["token_ids"] == [1, 2, 3, 60]
    assert rows(table, 2)["token_ids"] == [1, 2, 3, 50]


@pytest.mark.parametrize("stale", [4, 6])
def test_a_release_of_another_generation_raises_and_frees_nothing(stale: int):
    table = tiny_slots(1)
    table.bind(slot_init(0, [1], generation=4))
    table.release(0, 4)
    table.bind(slot_init(0, [2], generation=5))
    with pytest.raises(ValueError, match=f"bound to generation 5; generation {stale} cannot"):
        table.release(0, stale)
    with pytest.raises(ValueError, match="already bound"):
        table.bind(slot_init(0, [3], generation=7))
    table.flush()
    assert rows(table, 0)["token_ids"] == [2]
    table.release(0, 5)


def test_a_second_release_raises():
    table = tiny_slots(1)
    table.bind(slot_init(0, [1], generation=4))
    table.release(0, 4)
    with pytest.raises(ValueError, match="slot 0 is free; generation 4 cannot be released"):
        table.release(0, 4)


def test_a_binding_released_before_the_flush_leaves_no_trace():
    table = tiny_slots(1)
    table.bind(slot_init(0, [9, 9, 9], generation=1))
    table.release(0, 1)
    table.bind(slot_init(0, [1], generation=2))
    table.flush()
    assert table["token_ids"][0, :3].tolist() == [1, 0, 0]


def test_items_staged_for_a_released_owner_do_not_reach_the_next():
    table = tiny_slots(2)
    table.bind(slot_init(0, [1], blocks=[7], generation=1))
    table.bind(slot_init(1, [1], blocks=[8], generation=1))
    table.stage_items("block_table", np.array([0, 1]), np.array([1, 1]), np.array([5, 6]))
    table.release(0, 1)
    table.bind(slot_init(0, [1], blocks=[9], generation=2))
    table.flush()
    assert table["block_table"][:, :3].tolist() == [[9, 0, 0], [8, 6, 0]]


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (slot_init(2, [1]), "slot 2 does not exist"),
        (slot_init(-1, [1]), "slot -1"),
        (slot_init(0, [1], generation=9), "already bound"),
        (slot_init(1, [1], generation=3), "not new"),
        (slot_init(1, [1] * (MAX_LEN + 1), generation=4), "do not fit into token_ids"),
        (slot_init(1, [1], generation=4, blocks=[1] * 13), "do not fit into block_table"),
        (slot_init(1, [1], generation=4, stop_ids=[1] * 200), "do not fit into stop_ids"),
    ],
)
def test_a_plan_that_contradicts_the_table_is_refused_and_changes_nothing(init: SlotInit, message):
    table = tiny_slots(2)
    table.bind(slot_init(0, [5], generation=3))
    table.bind(slot_init(1, [6], generation=3))
    table.flush()
    table.release(1, 3)
    before = [tensor.clone() for tensor in table.tensors()]
    with pytest.raises(ValueError, match=message):
        table.bind(init)
    table.flush()
    assert all(map(torch.equal, before, table.tensors()))


@pytest.mark.parametrize(("slot", "index"), [(1, 0), (0, -1), (0, MAX_LEN // BLOCK_TOKENS)])
def test_items_of_free_slots_or_beyond_the_row_are_refused(slot, index):
    table = tiny_slots(2)
    table.bind(slot_init(0, [5]))
    with pytest.raises(ValueError, match="block_table"):
        table.stage_items("block_table", np.array([slot]), np.array([index]), np.array([1]))


@pytest.mark.parametrize("poison", Poison)
def test_poison_covers_the_whole_row_of_a_freed_slot_and_no_other(poison):
    table = tiny_slots(2, poison=poison)
    for slot in (0, 1):
        table.bind(slot_init(slot, range(MAX_LEN), params=FULL))
    table.flush()
    kept = rows(table, 1)
    table.release(0, 1)
    for field in table.fields.values():
        value = poison.value[field.dtype.is_floating_point]
        row = table[field.name][0].double()
        assert torch.equal(row.nan_to_num(-1), torch.full_like(row, value).nan_to_num(-1))
    assert rows(table, 1) == kept


# ---- recurrent states
STATE_ITEMS, NUM_CHECKPOINTS = 6, 3


def slots_with_states(max_slots: int, poison: Poison | None = None) -> SlotTable:
    """Return a table with a recurrent state in each slot, and checkpoints: all items of checkpoint
    n are n."""
    table = tiny_slots(
        max_slots, poison=poison, state_items=STATE_ITEMS, num_checkpoints=NUM_CHECKPOINTS
    )
    for number in range(1, 1 + NUM_CHECKPOINTS):
        table.checkpoints[STATE][number] = number
    return table


def values(rows_of: torch.Tensor) -> list[float]:
    """Return the value of each row, all of whose items are equal."""
    assert torch.equal(rows_of.nan_to_num(-1), rows_of[:, :1].expand_as(rows_of).nan_to_num(-1))
    return rows_of[:, 0].tolist()


@pytest.mark.parametrize("poison", [None, *Poison])
def test_binding_restores_the_state_from_a_checkpoint_or_from_zeros(poison: Poison | None):
    table = slots_with_states(4, poison)
    table[STATE][1] = 9.0
    table.bind(slot_init(0, [1, 2, 3], num_computed=2, checkpoint=3))
    table.bind(slot_init(2, [1, 2, 3]))
    table.bind(slot_init(3, [1, 2, 3], num_computed=1, checkpoint=1))
    table.flush()
    assert values(table[STATE]) == [3.0, 9.0, 0.0, 1.0]
    assert values(table.checkpoints[STATE]) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("poison", [None, *Poison])
def test_a_slot_has_no_state_of_its_former_owner(poison: Poison | None):
    table = slots_with_states(1, poison)
    table.bind(slot_init(0, [1, 2], num_computed=1, checkpoint=2))
    table.flush()
    table[STATE][0] = 9.0
    table.release(0, 1)
    table.bind(slot_init(0, [1], generation=2))
    table.flush()
    assert values(table[STATE]) == [0.0]


def test_two_slots_restored_from_one_checkpoint_do_not_share_their_states():
    table = slots_with_states(2)
    for slot in (0, 1):
        table.bind(slot_init(slot, [1, 2], num_computed=1, checkpoint=2))
    table.flush()
    table[STATE][0] += 5
    assert values(table[STATE]) == [7.0, 2.0]
    assert values(table.checkpoints[STATE]) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("num_computed", "checkpoint", "message"),
    [
        (2, NO_CHECKPOINT, "the state after 2 positions cannot be that of checkpoint 0"),
        (0, 1, "the state after 0 positions cannot be that of checkpoint 1"),
        (2, NUM_CHECKPOINTS + 1, "checkpoint 4 does not exist"),
        (2, -1, "checkpoint -1 does not exist"),
    ],
)
def test_a_binding_without_the_checkpoint_of_its_positions_is_refused(
    num_computed: int, checkpoint: int, message: str
):
    table = slots_with_states(2)
    init = slot_init(1, [1, 2, 3], num_computed=num_computed, checkpoint=checkpoint)
    with pytest.raises(ValueError, match=message):
        table.bind(init)
    table.flush()
    table.bind(slot_init(1, [1, 2, 3]))


def test_a_table_without_states_needs_no_checkpoint():
    table = tiny_slots(1)
    table.bind(slot_init(0, [1, 2, 3], num_computed=2))
    assert table.checkpoints == {}


@pytest.mark.parametrize("poison", Poison)
def test_a_released_state_and_checkpoints_that_were_never_saved_hold_poison(poison: Poison):
    table = tiny_slots(2, poison=poison, state_items=STATE_ITEMS, num_checkpoints=NUM_CHECKPOINTS)
    floating = torch.tensor(poison.value[1]).nan_to_num(-1).item()
    kept = table.checkpoints[STATE]
    assert values(kept.nan_to_num(-1)) == [0.0, *[floating] * NUM_CHECKPOINTS]
    assert values(table[STATE].nan_to_num(-1)) == [floating] * 2
    for slot in (0, 1):
        table.bind(slot_init(slot, [1]))
    table.flush()
    table.release(0, 1)
    assert values(table[STATE].nan_to_num(-1)) == [floating, 0.0]


def step_states_of(plan: StepPlan, table: SlotTable) -> StepStates:
    states = step_states(plan, read_rows(plan), table)
    assert states is not None
    return states


def test_a_plan_without_states_to_save_has_those_of_its_rows():
    table = slots_with_states(5)
    plan = step_plan(
        rows=[(3, 0, 4, False), (1, 6, 1, True), (4, 2, 3, True)], drafts={4: [7, 8], 1: []}
    )
    states = step_states_of(plan, table)
    assert states.memory.data_ptr() == table[STATE].data_ptr()
    assert states.slots.tolist() == [1, 3, 4]
    assert states.firsts.tolist() == [0, 1, 5]
    assert states.counts.tolist() == [1, 4, 3]
    assert states.kept.tolist() == [1, 4, 1]
    assert states.has_drafts
    assert [states.saves(row) for row in range(3)] == [[], [], []]
    bare = tiny_slots(5)
    assert step_states(plan, read_rows(plan), bare) is None


def test_the_states_to_save_are_ordered_by_row_and_position():
    table = slots_with_states(5)
    plan = step_plan(
        rows=[(3, 8, 4, False), (1, 6, 1, True), (4, 2, 3, True)],
        saves=[(3, 12, 2), (1, 7, 3), (3, 9, 1)],
    )
    states = step_states_of(plan, table)
    assert [states.saves(row) for row in range(3)] == [[(1, 3)], [(1, 1), (4, 2)], []]


@pytest.mark.parametrize(
    "save",
    [
        (3, 8, 1),  # the row's tokens come after position 8
        (3, 13, 1),  # the row ends at position 12
        (1, 8, 1),
        (2, 9, 1),  # slot 2 has no row in the step
        (7, 9, 1),
        (3, 9, NO_CHECKPOINT),
        (3, 9, NUM_CHECKPOINTS + 1),
        (3, 9, -1),
    ],
    ids=str,
)
def test_a_save_of_a_state_that_no_row_computes_is_refused(save: tuple[int, int, int]):
    table = slots_with_states(5)
    plan = step_plan(step=6, rows=[(3, 8, 4, False), (1, 6, 1, True)], saves=[(3, 10, 2), save])
    with pytest.raises(ValueError, match="step 6: a state cannot be saved as planned"):
        step_states_of(plan, table)


# ---- declaring a field
def test_a_slot_field_must_declare_the_rest_of_its_row():
    with pytest.raises(TypeError, match="rest"):
        SlotField(name="x", dtype=torch.int32, init=lambda init: 0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rest": RestPolicy.GUARDED},
        {"rest": RestPolicy.GUARDED, "guard": "n"},
        {"guard": "n"},
        {"rest": RestPolicy.DERIVED},
        {"rest": RestPolicy.DERIVED, "derive": print},
        {"derive": print},
        {"init": None},
        {"rest": RestPolicy.RESTORED},
        {"shape": (2, 2)},
        {"shape": (2,), "host": True},
        {"written_by": ("sampler",), "host": True},
    ],
)
def test_a_contradictory_field_cannot_be_declared(wrong):
    with pytest.raises(ValueError, match="slot field x"):
        scalar("x", **wrong)


def test_a_guard_is_a_filled_scalar_of_the_table():
    row = scalar("x", shape=(4,), rest=RestPolicy.GUARDED, guard="n", init=lambda init: [1])
    with pytest.raises(ValueError, match="guard"):
        SlotTable([row], 1, CPU)
    with pytest.raises(ValueError, match="guard"):
        SlotTable([row, scalar("n", shape=(2,), init=lambda init: [1])], 1, CPU)
    SlotTable([row, scalar("n", init=lambda init: 1)], 1, CPU)


def test_a_derived_field_is_rebuilt_from_the_new_owners_fields():
    def doubled(table: SlotTable, slots: torch.Tensor) -> None:
        table["twice"][slots] = table["once"][slots] * 2

    twice = scalar("twice", rest=RestPolicy.DERIVED, init=None, derive=doubled)
    table = SlotTable([twice, scalar("once", init=lambda init: init.seed)], 2, CPU)
    init = slot_init(1, [1], seed=21)
    table.bind(init)
    table.flush()
    assert table["twice"].tolist() == [0, 42]
    table.release(1, 1)
    table.bind(replace(init, generation=2, seed=4))
    table.flush()
    assert table["twice"].tolist() == [0, 8]


# ---- tensors outside the table
NUM_ROWS = 13


def used_runner() -> Runner:
    """Return a runner after two steps, so that it has everything that the first step makes."""
    runner = tiny_runner(tiny_slots(NUM_ROWS), tiny_cache(20))
    plan = step_plan(bind=[slot_init(2, [1, 2, 3], blocks=[4], params=GREEDY)], zero=[4])
    runner.step(plan)
    runner.step(step_plan(rows=[(2, 0, 3, True)]))
    return runner


def kept() -> torch.Tensor:
    return torch.zeros(NUM_ROWS, 2)


def closure(project: Any) -> Any:
    hidden = kept()
    return lambda x: project(x) + hidden.sum()


def cached() -> Any:
    made = lru_cache(kept)
    made()
    return made


class Holder:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = kept()

    def call(self) -> None: ...


HIDINGS: dict[str, Callable[[Any], tuple[Any, str, Any]]] = {
    "a dict": lambda c: (c.model, "memory", {"last": [kept()]}),
    "the cache": lambda c: (c.cache, "lengths", kept()),
    "numpy in attention": lambda c: (c.attention, "seen", (np.zeros((2, NUM_ROWS)),)),
    "a closure": lambda c: (c.model, "logits", closure(c.model.logits)),
    "a default": lambda c: (c.model, "logits", lambda x, memory=kept(): x),  # noqa: B008
    "a partial": lambda c: (c.model, "logits", partial(torch.add, kept())),
    "an lru_cache": lambda c: (c.model, "made", cached()),
    "a bound method": lambda c: (c.model, "held", Holder().call),
}
"""Place -> function from a runner's components to (owner, attribute, value that keeps a tensor)."""


def test_a_worker_has_no_tensors_outside_the_slot_table():
    check_registry(used_runner())


@pytest.mark.parametrize("place", HIDINGS)
def test_a_stray_tensor_is_found_in_every_hiding_place(place):
    runner: Any = used_runner()
    setattr(*HIDINGS[place](runner.components))
    assert len(strays(runner)) == 1
    with pytest.raises(RuntimeError, match="outside the slot table"):
        check_registry(runner)


def test_a_stray_tensor_in_a_module_or_a_class_is_found(monkeypatch):
    runner: Any = used_runner()
    monkeypatch.setattr(worker.sampling.sampler, "LAST", {1: kept()}, raising=False)
    assert len(strays(runner)) == 1
    monkeypatch.setattr(TokenChoice, "last", kept(), raising=False)
    assert len(strays(runner)) == 2


def test_the_holder_of_a_stray_tensor_is_named():
    runner: Any = used_runner()
    runner.components.model.memory = {"last": [kept()]}
    (found,) = strays(runner)
    assert found == "(13, 2) torch.float32 held by tests.support.tiny_model.TinyModel"


def test_a_view_of_the_slot_table_is_not_a_stray():
    runner: Any = used_runner()
    tables = [runner.components.slots["token_ids"].view(-1), runner.components.slots["len"].numpy()]
    runner.components.model.views = [*tables, runner.components.slots["block_table"][3:].t()]
    assert strays(runner) == []


def test_a_state_object_of_a_slot_is_not_a_stray_until_the_slot_drops_it():
    runner: Any = used_runner()
    slots = runner.components.slots
    slots.states[0] = state = {"layer": [kept()]}
    assert strays(runner) == []
    slots.states.clear()
    runner.components.model.memory = state
    assert len(strays(runner)) == 1


def test_a_slot_has_no_state_object_when_it_is_bound_and_none_after_its_release():
    table = tiny_slots(NUM_ROWS)
    table.states[1] = "of an earlier request"
    table.bind(slot_init(1, [3, 4]))
    assert table.states == {}
    table.states[1] = "of this request"
    table.release(1, 1)
    assert table.states == {}


def test_the_number_of_rows_equals_no_other_dimension():
    model: Any = TinyModel(vocab=11, max_len=13)
    model.odd = np.zeros((2, 3, 17))
    assert rows_for(5, [model]) == 19
    assert rows_for(19, [model]) == 19
    assert rows_for(20, [model]) == 23


def test_a_checked_runner_searches_itself_after_1_2_4_and_8_steps() -> None:
    runner = tiny_runner(tiny_slots(NUM_ROWS), tiny_cache(20), kind=CheckedRunner)
    runner.step(step_plan())
    runner.step(step_plan())
    runner.kept = kept()  # type: ignore[attr-defined]
    runner.step(step_plan())
    with pytest.raises(RuntimeError, match="outside the slot table"):
        runner.step(step_plan())
    runner.step(step_plan())
