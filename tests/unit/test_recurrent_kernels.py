"""The compiled kernels of recurrent layers equal torch's, and a token has the same bits however it
is computed, for every instruction set that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kernels import FLOAT_NAMES, assert_near, native_kernels
from tests.support.recurrent_steps import (
    OFFSET,
    RecurrentLayer,
    RecurrentRequests,
    StepRow,
    conv_layer,
    delta_layer,
    lru_layer,
    mamba1_layer,
    mamba_layer,
    numbers,
    part,
    recurrent_requests,
)
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels
from worker.slots.states import StepStates

DELTAS = [
    delta_layer(*sizes)
    for sizes in (
        (1, 1, 12, 20, 2),
        (2, 4, 12, 20, 4),
        (1, 3, 16, 64, 3),
        (2, 2, 7, 100, 5),
        (1, 2, 5, 1, 9),
        (1, 2, 33, 130, 4),
        (2, 4, 128, 128, 4),
    )
]
DELTAS.append(delta_layer(3, 6, 12, 20, 4, tiled=True))
DELTAS.append(delta_layer(2, 4, 12, 24, 4, beta_scale=2.0))
DELTAS.append(delta_layer(3, 3, 20, 20, 4, by_row=True))
DELTAS.append(delta_layer(2, 2, 33, 130, 3, by_row=True))
DELTAS.append(delta_layer(2, 4, 128, 128, 4, by_row=True))
MAMBAS = [
    mamba_layer(1, 1, 1, 1, 2),
    mamba_layer(4, 20, 2, 12, 4),
    mamba_layer(3, 7, 3, 33, 3, conv_bias=False),
    mamba_layer(2, 64, 1, 128, 4, limits=(0.2, 0.9)),
    mamba_layer(2, 35, 1, 16, 5),
    mamba_layer(6, 98, 3, 64, 4, conv_bias=False, limits=(0.5, 0.5)),
    mamba_layer(4, 20, 2, 12, 4, norm=None),
    mamba_layer(4, 20, 2, 12, 4, norm="before gate"),
]
MAMBAS_1 = [
    mamba1_layer(1, 1, 2),
    mamba1_layer(20, 16, 4),
    mamba1_layer(7, 5, 3, conv_bias=False),
    mamba1_layer(130, 33, 5),
    mamba1_layer(64, 128, 9, conv_bias=False),
]
CONVS = [
    conv_layer(1, 2),
    conv_layer(20, 3, bias=True),
    conv_layer(64, 3),
    conv_layer(200, 9),
    conv_layer(130, 4, bias=True),
]
LRUS = [
    lru_layer(1, 1, 2),
    lru_layer(3, 20, 4, "silu"),
    lru_layer(2, 64, 4, "relu2"),
    lru_layer(2, 130, 3, "gelu"),
    lru_layer(5, 7, 9),
]
LAYERS = [*DELTAS, *MAMBAS, *MAMBAS_1, *CONVS, *LRUS]
"""Heads and channels may be no whole vectors. A matrix may be one tile, several, and a part of
one."""
KINDS = [DELTAS[1], MAMBAS[1], MAMBAS_1[1], CONVS[1], LRUS[1]]
"""One layer of each kind."""


@pytest.fixture(params=FLOAT_NAMES)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return native_kernels(request.param)


@dataclass(frozen=True)
class RecurrentCase:
    """A layer, the number of tokens of each request, steps that compute them all, and threads."""

    layer: RecurrentLayer
    lengths: list[int]
    steps: list[list[StepRow]]
    threads: int

    def run(self, kernels: Kernels) -> RecurrentRequests:
        requests = recurrent_requests(kernels, self.layer, *self.lengths)
        with num_threads(self.threads):
            for rows in self.steps:
                requests.step(*rows)
        return requests


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@st.composite
def step_rows(draw: st.DrawFn, request: int, left: int) -> tuple[StepRow, int]:
    """Return a row that computes some of the `left` tokens of a request, and their number. Some are
    drafts, after which wrong drafts may follow. States are saved also after those, and before the
    first token."""
    right = draw(st.sampled_from([1, left, draw(st.integers(1, left))]))
    wrong = draw(st.sampled_from([0, 0, 1, 3]))
    accepted = draw(st.integers(0, right - 1)) if draw(st.booleans()) else 0
    count = right + wrong
    saves = draw(st.lists(st.integers(0, count), max_size=3)) if draw(st.booleans()) else []
    return StepRow(request, count, accepted + wrong, accepted, tuple(sorted(saves))), right


@st.composite
def recurrent_cases(draw: st.DrawFn) -> RecurrentCase:
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    left, steps = list(lengths), []
    while any(left):
        rows: list[StepRow] = []
        for request in draw(st.permutations([i for i, n in enumerate(left) if n])):
            if not rows or draw(st.booleans()):
                row, right = draw(step_rows(request, left[request]))
                left[request] -= right
                rows.append(row)
        steps.append(rows)
    layer = draw(st.sampled_from(LAYERS))
    return RecurrentCase(layer, lengths, steps, threads=draw(st.integers(1, 3)))


def prefix_alone(
    requests: RecurrentRequests, request: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Compute the first tokens of a request alone, in one step. Return their results, and the state
    after them."""
    alone = RecurrentRequests(
        requests.kernels,
        requests.layer,
        [part(requests.inputs[request], 0, num_tokens)],
        requests.states[request : request + 1],
        requests.earlier[request : request + 1],
    )
    alone.step(StepRow(0, num_tokens))
    return alone.results[0], alone.state(0)


@settings(max_examples=100, deadline=None)
@given(case=recurrent_cases())
@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_any_steps_give_the_bits_of_each_request_alone_in_one_step(
    name: str, case: RecurrentCase
) -> None:
    requests = case.run(native_kernels(name))
    for request, length in enumerate(case.lengths):
        results, state = prefix_alone(requests, request, length)
        assert torch.equal(requests.results[request], results)
        assert torch.equal(requests.state(request), state)
    for (request, num_tokens), saved in requests.saved.items():
        assert torch.equal(saved, prefix_alone(requests, request, num_tokens)[1])


@settings(max_examples=100, deadline=None)
@given(case=recurrent_cases())
@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_any_steps_equal_those_in_torch(name: str, case: RecurrentCase) -> None:
    ours, theirs = case.run(native_kernels(name)), case.run(TorchKernels())
    for one, other in zip(ours.results, theirs.results, strict=True):
        assert_near(one, other)
    assert_near(ours.memory, theirs.memory)
    assert ours.saved.keys() == theirs.saved.keys()
    for at, saved in ours.saved.items():
        assert_near(saved, theirs.saved[at])


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_many_tokens_equal_torch_and_single_tokens(
    native: NativeKernels, layer: RecurrentLayer
) -> None:
    whole, single, theirs = (
        recurrent_requests(kernels, layer, 150) for kernels in (native, native, TorchKernels())
    )
    whole.step(StepRow(0, 150))
    theirs.step(StepRow(0, 150))
    for _ in range(150):
        single.step(StepRow(0, 1))
    assert_near(whole.results[0], theirs.results[0])
    assert_near(whole.memory, theirs.memory)
    assert torch.equal(single.results[0], whole.results[0])
    assert torch.equal(single.memory, whole.memory)


@pytest.mark.parametrize("layer", [DELTAS[5], MAMBAS[2], MAMBAS_1[3], CONVS[4], LRUS[3]], ids=str)
def test_numbers_of_other_slots_and_layers_stay(
    native: NativeKernels, layer: RecurrentLayer
) -> None:
    requests = recurrent_requests(native, layer, 4, 1, 3)
    before = requests.memory.clone()
    requests.step(StepRow(0, 4, drafts=2, accepted=1), StepRow(1, 1))
    for request in (0, 1):
        assert not torch.equal(requests.memory, before)
        requests.state(request).copy_(requests.states[request])
    assert torch.equal(requests.memory, before)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_numbers_of_other_requests_do_not_stay_in_scratch_memory(
    native: NativeKernels, layer: RecurrentLayer
) -> None:
    """Drafts change a copy of the state. If a request computes NaN, the next one does not."""
    for other in KINDS:
        broken = recurrent_requests(native, other, 4)
        for each in (*broken.inputs[0], broken.memory):
            each.fill_(torch.nan)
        broken.step(StepRow(0, 4, drafts=3))
    requests = recurrent_requests(native, layer, 4)
    requests.step(StepRow(0, 4, drafts=3, accepted=3))
    assert requests.results[0].isfinite().all()
    assert requests.memory.isfinite().all()


@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_inputs_may_be_columns_of_a_wider_tensor(
    native: NativeKernels, layer: RecurrentLayer
) -> None:
    results = []
    for is_wide in (False, True):
        requests = recurrent_requests(native, layer, 7)
        if is_wide:
            wide = [torch.cat([each, each], dim=1) for each in requests.inputs[0]]
            requests.inputs = [tuple(each[:, : each.shape[1] // 2] for each in wide)]
        states = step_states(layer, counts=[7])
        states.memory[:, OFFSET:] = requests.states[0]
        results.append((layer.compute(native, requests.inputs[0], states, OFFSET), states.memory))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def both_after(layer: RecurrentLayer, native: NativeKernels, **changes: Any) -> None:
    """Check that both kernels compute the same six tokens. `changes` are those of `extreme`."""
    both = []
    for kernels in (native, TorchKernels()):
        requests = recurrent_requests(kernels, layer, 6)
        extreme(requests, **changes)
        requests.step(StepRow(0, 6))
        both.append(requests)
    assert_near(both[0].results[0], both[1].results[0])
    assert_near(both[0].memory, both[1].memory)


def extreme(requests: RecurrentRequests, *, scale: float, first: int, fill: float) -> None:
    """Multiply the first `first` columns of the first input, and the tail of the state, by `scale`.
    Fill the other columns, or the last input if there are several, with `fill`."""
    (inputs,), tail = requests.inputs, requests.layer.spec.tail_items
    inputs[0][:, :first].mul_(scale)
    rest = inputs[0][:, first:] if len(inputs) == 1 else inputs[-1]
    rest.fill_(fill)
    requests.state(0)[:tail].mul_(scale)


@pytest.mark.parametrize("decay", [0.0, -1e-3, -50.0, -1e4])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 100.0])
def test_extreme_inputs_of_delta_nets_equal_torch(
    native: NativeKernels, decay: float, scale: float
) -> None:
    layer = DELTAS[1]
    both_after(layer, native, scale=scale, first=layer.spec.conv_width, fill=decay)


@pytest.mark.parametrize("layer", [MAMBAS[1], MAMBAS[3]], ids=str)
@pytest.mark.parametrize("step", [0.0, -1e4, -30.0, -1.0, 19.9, 20.1, 1e4])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 100.0])
def test_extreme_inputs_of_mamba_equal_torch(
    native: NativeKernels, layer: RecurrentLayer, step: float, scale: float
) -> None:
    width = layer.spec.output_width + layer.spec.conv_width
    both_after(layer, native, scale=scale, first=width, fill=step)


@pytest.mark.parametrize("layer", [MAMBAS_1[1], MAMBAS_1[3]], ids=str)
@pytest.mark.parametrize("step", [0.0, -1e4, -30.0, -1.0, 19.9, 20.1, 1e4])
def test_extreme_steps_of_mamba_1_equal_torch(
    native: NativeKernels, layer: RecurrentLayer, step: float
) -> None:
    both = []
    for kernels in (native, TorchKernels()):
        requests = recurrent_requests(kernels, layer, 6)
        requests.inputs[0][1].fill_(step)
        requests.step(StepRow(0, 6))
        both.append(requests)
    assert_near(both[0].results[0], both[1].results[0])
    assert_near(both[0].memory, both[1].memory)


@pytest.mark.parametrize("layer", [LRUS[1], LRUS[3]], ids=str)
@pytest.mark.parametrize("gate", [-1e4, -30.0, -9.0, 0.0, 30.0, 1e4])
@pytest.mark.parametrize("decay", [-1e-7, -1e-3, -1.0, -200.0])
def test_extreme_gates_of_an_rg_lru_equal_torch(
    native: NativeKernels, layer: RecurrentLayer, gate: float, decay: float
) -> None:
    """A decay of almost 1 leaves the inputs a share of almost 0, which has all of its digits."""
    weights = {**layer.weights, "decay": torch.full_like(layer.weights["decay"], decay)}
    both = []
    for kernels in (native, TorchKernels()):
        requests = recurrent_requests(kernels, replace(layer, weights=weights), 1, 6)
        requests.inputs[1][1].fill_(gate)
        requests.step(StepRow(1, 6))
        both.append(requests)
    assert_near(both[0].results[1], both[1].results[1])
    assert_near(both[0].memory, both[1].memory)


def test_a_step_of_mamba_that_is_no_number_stays_none(native: NativeKernels) -> None:
    layer = MAMBAS[3]
    inputs = layer.make_inputs(5, 1)
    inputs[0][1, -1] = torch.nan
    states = step_states(layer)
    results = layer.compute(native, inputs, states, OFFSET)
    assert results.isnan().any(1).tolist() == [False, True, True, False, False]


def step_states(layer: RecurrentLayer, counts: list[int] | None = None) -> StepStates:
    """Return the states of a row for each of `counts`, without saves. By default they are two rows
    of 3 and 2 tokens, with three saves."""
    items, saves = layer.spec.state_items, [0, 0, 1] if counts is None else []
    each = np.array(counts or [3, 2])
    return StepStates(
        memory=numbers(4, OFFSET + items),
        checkpoints=torch.zeros(4, OFFSET + items),
        slots=np.array([3, 1])[: len(each)],
        starts=np.array([0, 9])[: len(each)],
        firsts=each.cumsum() - each,
        counts=each,
        kept=each.copy(),
        save_rows=np.array(saves, np.int64),
        save_counts=np.array([1, 3, 2])[: len(saves)],
        save_ids=np.array([1, 2, 3])[: len(saves)],
    )


def compute(kernels: Kernels, layer: RecurrentLayer, states: StepStates, offset: int) -> Tensor:
    return layer.compute(kernels, layer.make_inputs(5, 0), states, offset)


BAD_ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "a slot that does not exist": (1, {"slots": [3, 4]}),
    "a negative slot": (0, {"slots": [-1, 1]}),
    "a negative token": (0, {"firsts": [-1, 3]}),
    "a token that does not exist": (1, {"firsts": [0, 4]}),
    "a huge index of a token": (1, {"firsts": [0, 2**63 - 1]}),
    "a negative number of tokens": (0, {"counts": [-1, 2]}),
    "more tokens kept than computed": (1, {"kept": [3, 3]}),
    "a negative number of kept tokens": (1, {"kept": [3, -1]}),
    "a save of a row that does not exist": (2, {"save_rows": [0, 0, 2]}),
    "saves in another order than the rows": (0, {"save_rows": [1, 0, 0]}),
    "saves in another order than the tokens": (0, {"save_counts": [3, 1, 2]}),
    "a negative save": (0, {"save_counts": [-1, 3, 2]}),
    "a checkpoint that does not exist": (1, {"save_ids": [1, 2, 4]}),
    "the checkpoint of zeros": (0, {"save_ids": [1, 0, 3]}),
}


@pytest.mark.parametrize("layer", KINDS, ids=str)
@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_wrong_row_is_refused_before_anything_is_written(
    case: str, layer: RecurrentLayer
) -> None:
    row, changes = BAD_ROWS[case]
    native, states = native_kernels(), step_states(layer)
    arrays: dict[str, Any] = {name: np.array(each) for name, each in changes.items()}
    changed = replace(states, **arrays)
    before = states.memory.clone()
    with pytest.raises(ValueError, match=f"^row {row} "):
        compute(native, layer, changed, OFFSET)
    assert torch.equal(states.memory, before)
    assert not states.checkpoints.any()
    compute(native, layer, states, OFFSET)


@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_wrong_states_are_refused(layer: RecurrentLayer) -> None:
    native, states = native_kernels(), step_states(layer)
    bad_states = [
        replace(states, memory=states.memory.double()),
        replace(states, memory=states.memory[:, :-1]),
        replace(states, memory=states.memory.T.contiguous().T),
        replace(states, checkpoints=states.checkpoints[:, 1:]),
        replace(states, slots=states.slots.astype(np.int32)),
        replace(states, kept=np.array([3, 2, 0])),
        replace(states, counts=np.array([[3, 0], [2, 0]])[:, 0]),
        replace(states, save_ids=states.save_ids[:2]),
    ]
    for bad in bad_states:
        with pytest.raises(AssertionError):
            compute(native, layer, bad, OFFSET)
    for offset in (-1, OFFSET + 1):
        with pytest.raises(AssertionError):
            compute(native, layer, states, offset)


@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_wrong_tensors_are_refused(layer: RecurrentLayer) -> None:
    native, states = native_kernels(), step_states(layer)
    inputs = layer.make_inputs(5, 0)
    for name, tensor in layer.weights.items():
        for bad in (tensor.double(), tensor[..., :-1], tensor[:-1]):
            with pytest.raises(AssertionError):
                layer.rule(native, {**layer.weights, name: bad}, inputs, states, OFFSET)
    for at, tensor in enumerate(inputs):
        shorter = [tensor[:-1]] if len(inputs) > 1 else []  # the number of tokens is its length
        for bad in (tensor.double(), tensor[:, :-1], tensor.T.contiguous().T[:, :-1], *shorter):
            wrong = (*inputs[:at], bad, *inputs[at + 1 :])
            with pytest.raises((AssertionError, ValueError)):  # a row may have too many tokens
                layer.compute(native, wrong, states, OFFSET)
    layer.compute(native, inputs, states, OFFSET)
