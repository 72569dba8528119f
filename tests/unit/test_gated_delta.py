"""The compiled gated delta net equals torch's, and a token has the same bits however it is
computed, for every instruction set that this machine can run."""

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

from tests.support.delta_steps import (
    OFFSET,
    DeltaRequests,
    DeltaRow,
    delta_inputs,
    delta_requests,
    delta_spec,
)
from tests.support.kernels import NAMES, assert_near, native_kernels, randn
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels
from worker.slots.states import StepStates
from worker.spec.recurrent import GatedDeltaSpec

SPECS = [
    delta_spec(*sizes)
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
SPECS.append(delta_spec(3, 6, 12, 20, 4, tiled=True))
"""Heads may be no whole vectors. Values may be one tile of columns, several, and a part of one."""


@pytest.fixture(params=NAMES)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return native_kernels(request.param)


@dataclass(frozen=True)
class DeltaCase:
    """A layer, the number of tokens of each request, steps that compute them all, and threads."""

    spec: GatedDeltaSpec
    lengths: list[int]
    steps: list[list[DeltaRow]]
    threads: int

    def run(self, kernels: Kernels) -> DeltaRequests:
        requests = delta_requests(kernels, self.spec, *self.lengths)
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
def delta_rows(draw: st.DrawFn, request: int, left: int) -> tuple[DeltaRow, int]:
    """Return a row that computes some of the `left` tokens of a request, and their number. Some are
    drafts, after which wrong drafts may follow. States are saved also after those."""
    right = draw(st.sampled_from([1, left, draw(st.integers(1, left))]))
    wrong = draw(st.sampled_from([0, 0, 1, 3]))
    accepted = draw(st.integers(0, right - 1)) if draw(st.booleans()) else 0
    count = right + wrong
    saves = draw(st.lists(st.integers(1, count), max_size=3)) if draw(st.booleans()) else []
    return DeltaRow(request, count, accepted + wrong, accepted, tuple(sorted(saves))), right


@st.composite
def delta_cases(draw: st.DrawFn) -> DeltaCase:
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    left, steps = list(lengths), []
    while any(left):
        rows: list[DeltaRow] = []
        for request in draw(st.permutations([i for i, n in enumerate(left) if n])):
            if not rows or draw(st.booleans()):
                row, right = draw(delta_rows(request, left[request]))
                left[request] -= right
                rows.append(row)
        steps.append(rows)
    spec = draw(st.sampled_from(SPECS))
    return DeltaCase(spec, lengths, steps, threads=draw(st.integers(1, 3)))


def prefix_alone(requests: DeltaRequests, request: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Compute the first tokens of a request alone, in one step. Return their results, and the state
    after them."""
    alone = DeltaRequests(
        requests.kernels,
        requests.spec,
        requests.conv,
        [requests.inputs[request].part(0, num_tokens)],
        requests.states[request : request + 1],
    )
    alone.step(DeltaRow(0, num_tokens))
    return alone.results[0], alone.state(0)


@settings(max_examples=60, deadline=None)
@given(case=delta_cases())
@pytest.mark.parametrize("name", NAMES)
def test_any_steps_give_the_bits_of_each_request_alone_in_one_step(
    name: str, case: DeltaCase
) -> None:
    requests = case.run(native_kernels(name))
    for request, length in enumerate(case.lengths):
        results, state = prefix_alone(requests, request, length)
        assert torch.equal(requests.results[request], results)
        assert torch.equal(requests.state(request), state)
    for (request, num_tokens), saved in requests.saved.items():
        assert torch.equal(saved, prefix_alone(requests, request, num_tokens)[1])


@settings(max_examples=60, deadline=None)
@given(case=delta_cases())
@pytest.mark.parametrize("name", NAMES)
def test_any_steps_equal_those_in_torch(name: str, case: DeltaCase) -> None:
    ours, theirs = case.run(native_kernels(name)), case.run(TorchKernels())
    for one, other in zip(ours.results, theirs.results, strict=True):
        assert_near(one, other)
    assert_near(ours.memory, theirs.memory)
    assert ours.saved.keys() == theirs.saved.keys()
    for at, saved in ours.saved.items():
        assert_near(saved, theirs.saved[at])


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_many_tokens_equal_torch_and_single_tokens(
    native: NativeKernels, spec: GatedDeltaSpec
) -> None:
    whole, single, theirs = (
        delta_requests(kernels, spec, 150) for kernels in (native, native, TorchKernels())
    )
    whole.step(DeltaRow(0, 150))
    theirs.step(DeltaRow(0, 150))
    for _ in range(150):
        single.step(DeltaRow(0, 1))
    assert_near(whole.results[0], theirs.results[0])
    assert_near(whole.memory, theirs.memory)
    assert torch.equal(single.results[0], whole.results[0])
    assert torch.equal(single.memory, whole.memory)


def test_numbers_of_other_slots_and_layers_stay(native: NativeKernels) -> None:
    spec = delta_spec(1, 2, 33, 130, 4)
    requests = delta_requests(native, spec, 4, 1, 3)
    before = requests.memory.clone()
    requests.step(DeltaRow(0, 4, drafts=2, accepted=1), DeltaRow(1, 1))
    for request in (0, 1):
        assert not torch.equal(requests.memory, before)
        requests.state(request).copy_(requests.states[request])
    assert torch.equal(requests.memory, before)


def test_inputs_may_be_columns_of_a_wider_tensor(native: NativeKernels) -> None:
    results = []
    for is_wide in (False, True):
        requests = delta_requests(native, SPECS[1], 7)
        if is_wide:
            wide = [torch.cat([each, each], dim=1) for each in requests.inputs[0].all]
            columns = [each[:, : each.shape[1] // 2] for each in wide]
            requests.inputs = [type(requests.inputs[0])(*columns)]
        requests.step(DeltaRow(0, 7))
        results.append((requests.results[0], requests.memory))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("decay", [0.0, -1e-3, -50.0, -1e4])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 100.0])
def test_extreme_inputs_equal_torch(native: NativeKernels, decay: float, scale: float) -> None:
    both = []
    for kernels in (native, TorchKernels()):
        requests = delta_requests(kernels, SPECS[1], 6)
        requests.inputs[0].decay.fill_(decay)
        requests.inputs[0].qkv.mul_(scale)
        requests.state(0)[: SPECS[1].tail_items].mul_(scale)
        requests.step(DeltaRow(0, 6))
        both.append(requests)
    assert_near(both[0].results[0], both[1].results[0])
    assert_near(both[0].memory, both[1].memory)


def step_states(spec: GatedDeltaSpec) -> StepStates:
    """Return the states of two rows of 3 and 2 tokens, with three saves."""
    return StepStates(
        memory=randn(4, OFFSET + spec.state_items, dtype=torch.float32),
        checkpoints=torch.zeros(4, OFFSET + spec.state_items),
        slots=np.array([3, 1]),
        firsts=np.array([0, 3]),
        counts=np.array([3, 2]),
        kept=np.array([3, 2]),
        save_rows=np.array([0, 0, 1]),
        save_counts=np.array([1, 3, 2]),
        save_ids=np.array([1, 2, 3]),
    )


def compute(kernels: Kernels, spec: GatedDeltaSpec, states: StepStates, offset: int) -> Tensor:
    inputs, conv = delta_inputs(spec, 5), randn(spec.kernel, spec.conv_width, dtype=torch.float32)
    return kernels.gated_delta(spec, conv, *inputs.all, states, offset)


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


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_wrong_row_is_refused_before_anything_is_written(case: str) -> None:
    row, changes = BAD_ROWS[case]
    native, spec = native_kernels(), SPECS[1]
    states = step_states(spec)
    arrays: dict[str, Any] = {name: np.array(each) for name, each in changes.items()}
    changed = replace(states, **arrays)
    before = states.memory.clone()
    with pytest.raises(ValueError, match=f"^row {row} "):
        compute(native, spec, changed, OFFSET)
    assert torch.equal(states.memory, before)
    assert not states.checkpoints.any()
    compute(native, spec, states, OFFSET)


def test_wrong_tensors_are_refused() -> None:
    native, spec = native_kernels(), SPECS[1]
    states = step_states(spec)
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
            compute(native, spec, bad, OFFSET)
    for offset in (-1, OFFSET + 1):
        with pytest.raises(AssertionError):
            compute(native, spec, states, offset)
    inputs, conv = delta_inputs(spec, 5), randn(spec.kernel, spec.conv_width, dtype=torch.float32)
    tensors = {"conv": conv, "qkv": inputs.qkv, "beta": inputs.beta, "decay": inputs.decay}
    for name, tensor in tensors.items():
        for bad_tensor in (tensor.double(), tensor[:, :-1], tensor[:-1]):
            arguments = {**tensors, name: bad_tensor}
            with pytest.raises(AssertionError):
                native.gated_delta(spec, **arguments, states=states, offset=OFFSET)
