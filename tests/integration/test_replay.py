"""State cannot leak: a recorded stream of plans is executed in new, reused and poisoned memory.

A leak is a result that depends on what a slot or a block held before its present owner. So slots
without an owner are filled with zeros, with plausible values, or with NaN and impossible numbers,
and newly assigned blocks are filled with a large number or NaN. Every token and every bit of every
logprob must stay the same.

Then the slot table is made careless, with one field and in one way at a time, and some replay must
detect it. This shows that the tests find leaks. Run pytest with -s to see which replay detects
which leak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
from msgspec.structs import replace as changed
from torch import Tensor

from protocol.engine.messages import Output
from protocol.engine.sampling import DryBreaker, SamplingParams
from protocol.worker.steps import NO_ADAPTER, SlotInit, StepPlan, StepResult
from tests.support.plans import slot_init
from tests.support.recording import (
    BLOCK_TOKENS,
    MAX_LEN,
    MAX_SLOTS,
    NUM_REQUESTS,
    Recording,
    make_requests,
    num_bindings,
    own_slots,
    record,
    replay,
    tiny_model,
)
from worker.slots.fields import slot_fields
from worker.slots.table import RestPolicy, SlotField, SlotTable, SlotWrite
from worker.step.slot_registry import Poison

pytestmark = pytest.mark.long

SEED = 15
ADAPTERS = ("", "", "a", "", "b", "a")
"""LoRA adapters of the requests, in turn: slots change hands between requests with and without
one."""
TURN_STEPS = 80
"""Steps that a replay executes before the next one's turn."""
FIELDS = {f.name: f for f in slot_fields(MAX_LEN, MAX_LEN // BLOCK_TOKENS)}
MODES: dict[str, Poison | None] = {"reuse": None, **{p.name.lower(): p for p in Poison}}
ELSEWHERE = "read only for rows with bad words, for which it is written: num_bad_words is the guard"
DRY_OFF = "DRY changes nothing, because the other one of dry_multiplier and dry_window is 0"
NO_BREAKER = "no breaker is found, because the other three counts are 0"
UNUSED = "read only for rows with an adapter, for which it is written"
SURVIVORS = {
    ("num_bad", "lazily"): ELSEWHERE,
    ("longest_bad_word", "lazily"): ELSEWHERE,
    ("adapter_generation", "lazily"): UNUSED,
    ("dry_multiplier", "lazily"): DRY_OFF,
    ("dry_window", "lazily"): DRY_OFF,
    ("num_heads", "lazily"): NO_BREAKER,
    ("num_breakers", "lazily"): NO_BREAKER,
    ("num_tails", "lazily"): NO_BREAKER,
    ("num_tail_ends", "lazily"): NO_BREAKER,
}
"""Resets that can be left out undetected, and why that is no leak. They are not replayed."""
LATE = {("len", "once"): "wild"}
"""Resets whose lack is detected late, and the mode that detects it. Only that mode is replayed."""
SPECIAL = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=9,
    min_p=0.125,
    frequency_penalty=1.5,
    presence_penalty=-0.5,
    repetition_penalty=2.0,
    min_tokens=3,
    logit_bias={4: 1.5},
    logprobs=3,
    prompt_logprobs=0,
    bad_words=[[5, 6]],
    allowed_token_ids=[8, 9],
    logprob_token_ids=[10],
    logprobs_of="both",
)
"""Parameters that give a slot's fields other values than those of a plain request."""
FILTERED = SamplingParams(
    temperature=0.5,
    top_p=0.25,
    top_k=9,
    min_p=0.125,
    typical_p=0.75,
    top_n_sigma=1.5,
    dynatemp_range=0.25,
    dynatemp_exponent=2.0,
    xtc_probability=0.5,
    xtc_threshold=0.125,
    dry_multiplier=0.5,
    dry_base=1.5,
    dry_allowed_length=4,
    dry_penalty_last_n=30,
    dry_breakers=[DryBreaker([11, 12]), DryBreaker([13], [15, 16])],
)
"""The same for the filters of a chain, with which other fields are plain."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(
        tiny_model(tmp_path_factory.mktemp("model")), make_requests(SEED, adapters=ADAPTERS)
    )


@pytest.fixture(scope="module")
def expected(recorded: Recording) -> list[StepResult]:
    """Return the results if every binding has a slot that was never used before."""
    bindings = num_bindings(recorded.steps)
    assert bindings > 20 * MAX_SLOTS
    return list(replay(recorded, own_slots(recorded.steps), max_slots=bindings))


# ---- the contents of the stream


def test_the_stream_has_every_kind_of_request_and_event(recorded, expected):
    plans = [step.plan for step in recorded.steps]
    inits = [init for plan in plans for init in plan.bind]
    logprobs = [result.logprobs for result in expected if result.logprobs]
    computed = [(init.num_computed, len(init.tokens), init.prompt_tokens) for init in inits]
    assert len(make_requests(SEED)) == NUM_REQUESTS == 200
    assert sum(0 < done < known for done, known, _ in computed) > 20, "found in the prefix cache"
    assert sum(0 < done == known - 1 for done, known, _ in computed) > 30, "prefilled"
    assert sum(len(step.arrived) for step in recorded.steps) > 30, "by another engine"
    assert sum(outputs[-1].usage.fetched_tokens for outputs in recorded.outputs.values()) > 300
    assert sum(prompt < known for _, known, prompt in computed) > 10, "resumed"
    assert sum(outputs[-1].usage.preemptions for outputs in recorded.outputs.values()) > 10
    assert recorded.num_aborted_in_flight > 5
    assert any(max(plan.row_tokens.tolist()) > 1 and plan.num_decodes > 1 for plan in plans)
    assert sum(plan.row_drafts is not None for plan in plans) > 20, "speculation"
    assert sum(has_masked_drafts(plan) for plan in plans) > 10, "drafts of answers with grammars"
    assert any(0 in plan.row_samples.tolist() for plan in plans), "chunked prompts"
    assert sum(init.adapter != NO_ADAPTER for init in inits) > 60
    assert len({init.adapter for init in inits}) == 3, "two adapters, and none"
    assert sum(mixes_adapters(plan, bound) for plan, bound in bound_slots(plans)) > 50
    assert any({i.slot for i in plan.bind} & {r.slot for r in plan.release} for plan in plans)
    assert sum(step.masks is not None for step in recorded.steps) > 20
    assert sum(result.prompt_logprobs is not None for result in expected) > 10
    assert any(columns.asked is not None for columns in logprobs)
    assert any(columns.drawn is not None for columns in logprobs)
    assert not any(len(result.failed) for result in expected), "nothing failed"


def bound_slots(plans: Iterable[StepPlan]) -> Iterator[tuple[StepPlan, dict[int, SlotInit]]]:
    """Yield each plan with the slots that are bound in it."""
    bound: dict[int, SlotInit] = {}
    for plan in plans:
        bound |= {init.slot: init for init in plan.bind}
        yield plan, bound


def mixes_adapters(plan: StepPlan, bound: dict[int, SlotInit]) -> bool:
    """Return whether rows of a step have different adapters, or some have none."""
    return len({bound[slot].adapter for slot in plan.row_slots.tolist()}) > 1


def has_masked_drafts(plan: StepPlan) -> bool:
    """Return whether a mask applies to a row with drafts."""
    if plan.masked is None or plan.row_drafts is None:
        return False
    counts, samples = plan.row_drafts.tolist(), plan.row_samples.tolist()
    rows = [count for count, sampled in zip(counts, samples, strict=True) if sampled]
    drafted = [count > 0 for count in rows for _ in range(1 + count)]
    return any(drafted[place] for place in plan.masked.tolist())


def test_live_results_equal_those_without_reused_slots(recorded, expected):
    assert [changed(step.result, compute_s=0.0) for step in recorded.steps] == expected


# ---- nothing leaks


BLOCK_POISONS = {"plausible": 1e4, "wild": float("nan")}
"""Mode -> the value with which newly assigned blocks are filled too."""


@pytest.mark.parametrize("mode", MODES)
def test_reused_slots_and_blocks_give_the_results_of_new_ones(recorded, expected, mode):
    value = BLOCK_POISONS.get(mode)
    results = replay(recorded, recorded.steps, poison=MODES[mode], block_poison=value)
    assert list(results) == expected


def test_the_replay_detects_blocks_that_are_not_zeroed(recorded, expected):
    results = replay(recorded, recorded.steps, block_poison=float("nan"), zeroes=False)
    assert first_difference(results, expected) is not None


# ---- the tests detect leaks


class Careless(SlotTable):
    """A slot table that resets one field incorrectly.

    once     writes it for the slot's first occupant only. A table that never writes it does the
             same wrong for the others, so it is as easy to detect
    lazily   writes it only for requests whose value differs from a plain request's
    fill     writes only what `init` returns, not the rest of the row
    derive   does not derive the field
    """

    field = ""
    way = ""

    def _resets(self, inits: Sequence[SlotInit]) -> list[SlotWrite]:
        rest = [write for write in super()._resets(inits) if write.field.name != self.field]
        kept = [init for init in inits if self._writes(init)]
        return rest + [w for w in super()._resets(kept) if w.field.name == self.field]

    def _writes(self, init: SlotInit) -> bool:
        match self.way:
            case "once":
                return init.generation == 1
            case "lazily":
                return not is_plain(self.fields[self.field], init)
            case _:
                return True

    def _fill(self, field: SlotField, slots: Tensor) -> None:
        if (field.name, "fill") != (self.field, self.way):
            super()._fill(field, slots)

    def _derive(self, field: SlotField, slots: Tensor) -> None:
        if (field.name, "derive") != (self.field, self.way):
            super()._derive(field, slots)


def is_plain(field: SlotField, init: SlotInit) -> bool:
    """Return whether the field has the value of a request without special parameters."""
    assert field.init is not None
    plain = changed(
        init, params=SamplingParams(), stop_ids=[], adapter=NO_ADAPTER, adapter_generation=0
    )
    return np.array_equal(field.init(init), field.init(plain))


def ways() -> Iterator[tuple[str, str]]:
    """Yield every field with each way to be careless with it. Only scalars can be written
    lazily, such as the count of a list: an empty list writes nothing anyway."""
    specials = [
        slot_init(0, [1], stop_ids=[3], params=params, adapter=1, adapter_generation=2)
        for params in (SPECIAL, FILTERED)
    ]
    for field in FIELDS.values():
        if field.init is not None:
            yield field.name, "once"
            if not field.shape and not all(is_plain(field, each) for each in specials):
                yield field.name, "lazily"
        if field.rest is RestPolicy.FILL and field.shape:
            yield field.name, "fill"
        if field.rest is RestPolicy.DERIVED:
            yield field.name, "derive"


def first_difference(
    results: Iterable[StepResult], expected: list[StepResult], start: int = 0
) -> str | None:
    """Return where a replay differs and how; None if it does not. An exception is a difference too:
    impossible numbers raise one when they are used as an index. `start` is the number of the first
    step."""
    step = start - 1
    try:
        for step, (result, right) in enumerate(zip(results, expected, strict=True), start):
            if result != right:
                return f"other results in step {step}"
    except (IndexError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__} in step {step + 1}"
    return None


def caught_by(
    recorded: Recording,
    expected: list[StepResult],
    kind: type[SlotTable],
    modes: Iterable[str],
) -> str:
    """Return a mode that detects the leak, and how; "" if no mode does. The modes take turns, in
    the given order. A mode that detects a leak usually does so early, and the others need not
    continue then."""
    replays = {
        mode: replay(recorded, recorded.steps, poison=MODES[mode], kind=kind) for mode in modes
    }
    for start in range(0, len(expected), TURN_STEPS):
        right = expected[start : start + TURN_STEPS]
        for mode, results in replays.items():
            if difference := first_difference(islice(results, len(right)), right, start):
                return f"{mode}: {difference}"
    return ""


@pytest.mark.timeout(1200)  # half a minute alone; much longer on busy cores
def test_the_replays_detect_each_reset_that_is_left_out(recorded, expected):
    undetected = set()
    for name, way in sorted(set(ways()) - SURVIVORS.keys()):
        kind = type("Careless", (Careless,), {"field": name, "way": way})
        modes = [LATE[name, way]] if (name, way) in LATE else reversed(MODES)
        found = caught_by(recorded, expected, kind, modes)
        print(f"{name:20} {way:7} {found or 'undetected'}")
        if not found:
            undetected.add((name, way))
    assert not undetected


def test_every_field_has_a_careless_table():
    assert {name for name, _ in ways()} == FIELDS.keys()
    assert SURVIVORS.keys() | LATE.keys() <= set(ways())
    lazy = {name for name, way in ways() if way == "lazily"}
    assert lazy > {"temperature", "min_len", "num_asked", "logprobs_of", "num_stop_ids"}


# ---- with a draft model


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Return a recording of a model that is its own draft model, so drafts are often verified."""
    loaded = tiny_model(tmp_path_factory.mktemp("model"))
    return record(loaded, make_requests(12, 80), draft=loaded)


def test_proposals_of_a_draft_model_depend_on_no_earlier_occupant(followed):
    """The draft model has no field in the slot table. Its blocks are zeroed together with the
    model's."""
    plans = [step.plan for step in followed.steps]
    assert sum(plan.wanted is not None and any(plan.wanted.tolist()) for plan in plans) > 20
    assert sum(plan.row_drafts is not None for plan in plans) > 20
    assert any(has_masked_drafts(plan) for plan in plans)
    bindings = num_bindings(followed.steps)
    expected = list(replay(followed, own_slots(followed.steps), max_slots=bindings))
    for poison, value in ((None, None), (Poison.PLAUSIBLE, 1e4), (Poison.WILD, float("nan"))):
        results = replay(followed, followed.steps, poison=poison, block_poison=value)
        assert list(results) == expected


# ---- one and two steps in flight


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def logprobs_of(outputs: list[Output]) -> list[float]:
    """Return all logprobs, of prompt and answer. With two steps in flight chunks are cut at other
    places, so the last bits may differ."""
    entries = [entry for output in outputs for entry in (*output.prompt_logprobs, *output.logprobs)]
    lists = ([t.logprob, *t.top_logprobs, *t.asked_logprobs, *t.drawn_logprobs] for t in entries)
    return [value for values in lists for value in values]


def test_two_steps_in_flight_give_the_results_of_one(recorded):
    alone = record(recorded.loaded, make_requests(SEED, adapters=ADAPTERS), steps_in_flight=1)
    assert alone.outputs.keys() == recorded.outputs.keys()
    for one, two in zip(alone.outputs.values(), recorded.outputs.values(), strict=True):
        if "abort" in (one[-1].finish, two[-1].finish):
            shorter = min(len(tokens_of(one)), len(tokens_of(two)))
            assert tokens_of(one)[:shorter] == tokens_of(two)[:shorter]
        else:
            assert (tokens_of(one), one[-1].finish) == (tokens_of(two), two[-1].finish)
            assert logprobs_of(one) == pytest.approx(logprobs_of(two), abs=1e-4)
