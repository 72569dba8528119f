"""The states of a step's rows: tokens in spans, saved states and drafts give what computing each
token in a step of its own gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from worker.layers.delta_rule import DeltaWeights, gated_delta
from worker.layers.mamba1_rule import Mamba1Weights, ScanInputs, mamba1_conv, mamba1_scan
from worker.layers.mamba2_rule import Mamba2Weights, mamba2
from worker.layers.recurrence import advance
from worker.layers.rg_lru_rule import LruInputs, LruWeights, rg_lru_conv, rg_lru_scan
from worker.layers.short_conv_rule import short_conv
from worker.slots.states import StepStates
from worker.spec.recurrent import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, RgLruSpec, ShortConvSpec

NUM_SLOTS, NUM_CHECKPOINTS = 7, 9
DELTA = GatedDeltaSpec(
    num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel=3, eps=1e-6
)
MAMBA_1 = Mamba1Spec(channels=7, state=5, rank=2, kernel=4, eps=1e-5)
MAMBA = Mamba2Spec(num_heads=4, head_dim=3, num_groups=2, state=5, kernel=3, eps=1e-5)
LRU = RgLruSpec(num_heads=3, head_dim=5, kernel=4, activation="gelu_tanh")
CONV = ShortConvSpec(width=11, kernel=4)


@dataclass(frozen=True)
class SavedState:
    """The state after `count` tokens of the row, which is copied to a checkpoint."""

    row: int
    count: int
    checkpoint: int


@dataclass(frozen=True)
class Row:
    slot: int
    count: int
    drafts: int = 0
    accepted: int = 0
    start: int = 0


@dataclass(frozen=True)
class Mixer:
    """A recurrence with random inputs for any number of tokens.

    compute   (numbers of the tokens among all, states, offset) -> results [T, width]
    """

    items: int
    compute: Callable[[Tensor, StepStates, int], Tensor]
    is_exact: bool = True


def counter() -> Mixer:
    """A state of two whole numbers, which depend on the order of the tokens."""
    inputs = torch.randint(97, (400,), generator=torch.Generator().manual_seed(1)).float()

    def compute(tokens: Tensor, states: StepStates, offset: int) -> Tensor:
        x, out = inputs[tokens], torch.full((len(tokens), 1), torch.nan)

        def span(at: Tensor, held: Tensor) -> None:
            for each in at.unbind(1):
                held[:, 1] = (2 * held[:, 0] + held[:, 1]) % 89
                held[:, 0] = (3 * held[:, 0] + x[each]) % 97
                out[each] = held.sum(1, keepdim=True)

        advance(states, offset, 2, span)
        return out

    return Mixer(2, compute)


def some_numbers(seed: int) -> Callable[..., Tensor]:
    """Return a function that makes random tensors of a shape."""
    random = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=random)


def delta() -> Mixer:
    some = some_numbers(2)
    weights = DeltaWeights(
        conv=some(DELTA.kernel, DELTA.conv_width),
        decay=-some(DELTA.num_value_heads).abs(),
        bias=some(DELTA.num_value_heads),
        norm=some(DELTA.value_dim),
    )
    inputs = some(400, DELTA.conv_width + DELTA.value_width)
    gates = some(400, 2 * DELTA.num_value_heads)

    def compute(tokens: Tensor, states: StepStates, offset: int) -> Tensor:
        return gated_delta(DELTA, weights, inputs[tokens], gates[tokens], states, offset)

    return Mixer(DELTA.state_items, compute, is_exact=False)


def mamba() -> Mixer:
    some = some_numbers(4)
    weights = Mamba2Weights(
        conv=some(MAMBA.kernel, MAMBA.conv_width),
        conv_bias=some(MAMBA.conv_width),
        decay=-some(MAMBA.num_heads).abs(),
        bias=some(MAMBA.num_heads),
        skip=some(MAMBA.num_heads),
        norm=some(MAMBA.output_width),
    )
    inputs = some(400, MAMBA.input_width)

    def compute(tokens: Tensor, states: StepStates, offset: int) -> Tensor:
        return mamba2(MAMBA, weights, inputs[tokens], states, offset)

    return Mixer(MAMBA.state_items, compute, is_exact=False)


def mamba_1() -> Mixer:
    """The recurrence reads the result of the convolution."""
    some, width, state = some_numbers(5), MAMBA_1.channels, MAMBA_1.state
    weights = Mamba1Weights(
        conv=some(MAMBA_1.kernel, width),
        conv_bias=some(width),
        decay=-some(width, state).abs(),
        bias=some(width),
        skip=some(width),
    )
    inputs, step, gate, b, c = (some(400, each) for each in (width, width, width, state, state))

    def compute(tokens: Tensor, states: StepStates, offset: int) -> Tensor:
        x = mamba1_conv(MAMBA_1, weights, inputs[tokens], states, offset)
        scanned = ScanInputs(x, step[tokens], b[tokens], c[tokens], gate[tokens])
        return mamba1_scan(MAMBA_1, weights, scanned, states, offset)

    return Mixer(MAMBA_1.state_items, compute, is_exact=False)


def lru() -> Mixer:
    """The recurrence reads the result of the convolution."""
    some, width = some_numbers(6), LRU.width
    weights = LruWeights(
        conv=some(LRU.kernel, width),
        conv_bias=some(width),
        decay=-some(width).abs(),
        input_bias=some(width),
        decay_bias=some(width),
    )
    inputs, gate = (some(400, width) for _ in range(2))
    gates = some(LRU.num_heads, 400, 2 * LRU.head_dim)

    def compute(tokens: Tensor, states: StepStates, offset: int) -> Tensor:
        x = rg_lru_conv(LRU, weights, inputs[tokens], states, offset)
        scanned = LruInputs(x, gates[:, tokens], gate[tokens])
        return rg_lru_scan(LRU, weights, scanned, states, offset)

    return Mixer(LRU.state_items, compute, is_exact=False)


def conv(bias: bool) -> Mixer:
    random = torch.Generator().manual_seed(3)
    x, taps = (
        torch.randn(n, each, generator=random)
        for n, each in ((400, 3 * CONV.width), (CONV.kernel, CONV.width))
    )
    added = torch.randn(CONV.width, generator=random) if bias else None

    def compute(tokens: Tensor, states: StepStates, offset: int) -> Tensor:
        return short_conv(CONV, taps, added, x[tokens], states, offset)

    return Mixer(CONV.state_items, compute)


MIXERS: dict[str, Callable[[], Mixer]] = {
    "counter": counter,
    "gated delta": delta,
    "mamba 1": mamba_1,
    "mamba": mamba,
    "rg-lru": lru,
    "short convolution": lambda: conv(bias=False),
    "short convolution with biases": lambda: conv(bias=True),
}


def step_of(
    rows: Sequence[Row], saves: Sequence[SavedState], memory: Tensor, checkpoints: Tensor
) -> StepStates:
    counts = np.array([row.count for row in rows], np.int64)
    ordered = sorted(saves, key=lambda each: (each.row, each.count))
    return StepStates(
        memory,
        checkpoints,
        slots=np.array([row.slot for row in rows], np.int64),
        starts=np.array([row.start for row in rows], np.int64),
        firsts=counts.cumsum() - counts,
        counts=counts,
        kept=counts - np.array([row.drafts for row in rows], np.int64),
        save_rows=np.array([each.row for each in ordered], np.int64),
        save_counts=np.array([each.count for each in ordered], np.int64),
        save_ids=np.array([each.checkpoint for each in ordered], np.int64),
    )


def random_step(seed: int) -> tuple[list[Row], list[SavedState]]:
    """Return rows of a step in any order, some with drafts, and some of the states to save. The
    rows of even slots begin a text."""
    random = np.random.default_rng(seed)
    rows = []
    for slot in random.permutation(NUM_SLOTS)[: random.integers(1, NUM_SLOTS)].tolist():
        count = int(random.choice([1, 1, 2, 4, 9]))
        drafts = int(random.integers(count))
        accepted = int(random.integers(drafts + 1))
        rows.append(Row(slot, count, drafts, accepted, start=slot % 2 * 5))
    places = [(row, count + 1) for row, each in enumerate(rows) for count in range(each.count)]
    chosen = random.permutation(len(places))[: random.integers(NUM_CHECKPOINTS + 1)].tolist()
    ids = (random.permutation(NUM_CHECKPOINTS) + 1).tolist()
    saves = [SavedState(row, count, ids.pop()) for row, count in (places[at] for at in chosen)]
    return rows, saves


@dataclass(frozen=True)
class OneByOne:
    """The results of a row's tokens, each computed in a step of its own, and the states before the
    first and after each of them."""

    results: Tensor
    states: list[Tensor]

    @classmethod
    def of(cls, mixer: Mixer, row: Row, first: int, memory: Tensor, offset: int) -> OneByOne:
        memory, results = memory.clone(), []
        states = [memory[row.slot].clone()]
        none = torch.empty(1, memory.shape[1])
        for token in range(row.count):
            step = step_of([Row(row.slot, 1, start=row.start + token)], [], memory, none)
            results.append(mixer.compute(torch.tensor([first + token]), step, offset))
            states.append(memory[row.slot].clone())
        return cls(torch.cat(results), states)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", MIXERS)
def test_a_step_with_saved_states_and_drafts_is_the_same_as_one_token_after_another(
    name: str, seed: int
) -> None:
    mixer, (rows, saves) = MIXERS[name](), random_step(seed)
    tolerance = {"rtol": 0, "atol": 0} if mixer.is_exact else {"rtol": 1e-5, "atol": 1e-5}
    offset, width = 3, mixer.items + 5
    random = torch.Generator().manual_seed(seed)
    before = torch.randint(9, (NUM_SLOTS, width), generator=random).float() / 4
    memory = before.clone()
    checkpoints = torch.full((1 + NUM_CHECKPOINTS, width), 7.25)
    step = step_of(rows, saves, memory, checkpoints)
    ends = np.cumsum([row.count for row in rows]).tolist()
    singly = [
        OneByOne.of(mixer, row, end - row.count, before, offset)
        for row, end in zip(rows, ends, strict=True)
    ]

    def check(num_known: Sequence[int]) -> None:
        """Check all states after the first num_known[i] tokens of row i."""
        expected = before.clone()
        for row, done, each in zip(rows, num_known, singly, strict=True):
            expected[row.slot] = each.states[done]
        torch.testing.assert_close(memory, expected, **tolerance)
        expected = torch.full_like(checkpoints, 7.25)
        part = slice(offset, offset + mixer.items)
        for save in saves:
            if save.count <= num_known[save.row]:
                expected[save.checkpoint, part] = singly[save.row].states[save.count][part]
        torch.testing.assert_close(checkpoints, expected, **tolerance)

    tokens = torch.arange(ends[-1])
    results = mixer.compute(tokens, step, offset)
    step.on_accepted(lambda accepted: mixer.compute(tokens, accepted, offset))
    torch.testing.assert_close(results, torch.cat([each.results for each in singly]), **tolerance)
    check([row.count - row.drafts for row in rows])
    step.accept(np.array([row.accepted for row in rows], np.int64))
    check([row.count - row.drafts + row.accepted for row in rows])


def test_a_step_without_drafts_computes_nothing_again() -> None:
    memory = torch.zeros(NUM_SLOTS, 2)
    calls: list[StepStates] = []
    step = step_of([Row(0, 3)], [], memory, torch.empty(1, 2))
    step.on_accepted(calls.append)
    step.accept(np.array([0], np.int64))
    assert calls == []
    assert not step.has_drafts


def test_wrong_drafts_compute_nothing_again() -> None:
    memory = torch.zeros(NUM_SLOTS, 2)
    calls: list[StepStates] = []
    step = step_of([Row(0, 3, drafts=2)], [], memory, torch.empty(1, 2))
    step.on_accepted(calls.append)
    step.accept(np.array([0], np.int64))
    assert calls == []


def test_every_layer_computes_only_the_rows_with_accepted_drafts_again() -> None:
    memory = torch.zeros(NUM_SLOTS, 2)
    first: list[StepStates] = []
    second: list[StepStates] = []
    rows = [Row(4, 1), Row(2, 5, drafts=3), Row(1, 3, drafts=2), Row(5, 4, drafts=1)]
    step = step_of(rows, [SavedState(1, 4, 6)], memory, torch.empty(9, 2))
    step.on_accepted(first.append)
    step.on_accepted(second.append)
    step.accept(np.array([0, 2, 0, 1], np.int64))
    (again,) = first
    assert second[0] is again
    assert again.slots.tolist() == [2, 5]
    assert again.firsts.tolist() == [3, 12]
    assert again.counts.tolist() == again.kept.tolist() == [2, 1]
    assert again.saves(0) == [(2, 6)]
    assert again.saves(1) == []
    assert not again.has_drafts
