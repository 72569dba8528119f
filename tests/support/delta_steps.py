"""Computes the tokens of some requests with one gated delta net, in any steps.

Legend: N tokens of a request, C width of the convolution, H value heads, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from tests.support.kernels import randn
from worker.kernels.base import Kernels
from worker.slots.states import StepStates
from worker.spec.recurrent import GatedDeltaSpec

OFFSET, REST = 5, 3
"""Numbers of other layers in a state, before and after those of the layer."""


def delta_spec(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    *,
    tiled: bool = False,
) -> GatedDeltaSpec:
    spec = GatedDeltaSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kernel=kernel,
        eps=1e-6,
        tiled=tiled,
    )
    spec.check()
    return spec


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of some tokens: qkv [N, C], beta [N, H], decay [N, H]."""

    qkv: Tensor
    beta: Tensor
    decay: Tensor

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv, self.beta, self.decay

    def part(self, first: int, end: int) -> DeltaInputs:
        return DeltaInputs(*(each[first:end] for each in self.all))


def delta_inputs(spec: GatedDeltaSpec, tokens: int, seed: int = 0) -> DeltaInputs:
    """Return random inputs. The decays are between about 0.3 and 1."""
    heads, dtype = spec.num_value_heads, torch.float32
    return DeltaInputs(
        randn(tokens, spec.conv_width, dtype=dtype, seed=seed),
        randn(tokens, heads, dtype=dtype, seed=seed + 1).sigmoid(),
        -softplus(randn(tokens, heads, dtype=dtype, seed=seed + 2) - 1),
    )


@dataclass(frozen=True)
class DeltaRow:
    """The tokens of one request in a step.

    count      number of tokens, of which the last `drafts` are drafts
    accepted   number of drafts that are right; the others get wrong inputs
    saves      after how many of the row's tokens its state is saved
    """

    request: int
    count: int
    drafts: int = 0
    accepted: int = 0
    saves: tuple[int, ...] = ()


@dataclass
class DeltaRequests:
    """Some requests, each with a slot, and a layer that computes them.

    states    [requests, items] what the states are before the first token
    results   of each request: [N, H, V], zeros for tokens that are not computed
    saved     (request, number of its tokens) -> the state that was saved after them
    """

    kernels: Kernels
    spec: GatedDeltaSpec
    conv: Tensor
    inputs: Sequence[DeltaInputs]
    states: Tensor
    memory: Tensor = field(init=False)
    results: list[Tensor] = field(init=False)
    saved: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        items = OFFSET + self.spec.state_items + REST
        #: Row 0 is another request's; those of the requests are in reverse order.
        self.memory = randn(1 + len(self.inputs), items, dtype=torch.float32, seed=9)
        for request in range(len(self.inputs)):
            self.state(request).copy_(self.states[request])
        sizes = (self.spec.num_value_heads, self.spec.value_dim)
        self.results = [torch.zeros(len(each.qkv), *sizes) for each in self.inputs]
        self._computed = [0] * len(self.inputs)

    def state(self, request: int) -> Tensor:
        return self.memory[self._slot(request), OFFSET:-REST]

    def step(self, *rows: DeltaRow) -> None:
        """Compute rows, which have different requests, and accept their drafts."""
        saves = [(i, n) for i, row in enumerate(rows) for n in row.saves]
        checkpoints = torch.zeros(1 + len(saves), self.memory.shape[1])
        counts = np.array([row.count for row in rows])
        states = StepStates(
            memory=self.memory,
            checkpoints=checkpoints,
            slots=np.array([self._slot(row.request) for row in rows]),
            firsts=counts.cumsum() - counts,
            counts=counts,
            kept=counts - [row.drafts for row in rows],
            save_rows=np.array([i for i, _ in saves], np.int64),
            save_counts=np.array([n for _, n in saves], np.int64),
            save_ids=np.arange(len(saves))[::-1] + 1,
        )
        parts = zip(*(self._inputs(row).all for row in rows), strict=True)
        qkv, beta, decay = (torch.cat(part) for part in parts)

        def compute(states: StepStates) -> Tensor:
            return self.kernels.gated_delta(self.spec, self.conv, qkv, beta, decay, states, OFFSET)

        results = compute(states)
        states.on_accepted(compute)
        states.accept(np.array([row.accepted for row in rows]))
        for row, result in zip(rows, results.split(counts.tolist()), strict=True):
            first, right = self._computed[row.request], row.count - row.drafts + row.accepted
            self.results[row.request][first : first + right] = result[:right]
            self._computed[row.request] += right
        for (i, n), checkpoint in zip(saves, states.save_ids.tolist(), strict=True):
            row = rows[i]
            wrong = row.drafts - row.accepted
            if n <= row.count - wrong:
                at = row.request, self._computed[row.request] - row.count + wrong + n
                self.saved[at] = checkpoints[checkpoint, OFFSET:-REST]
            else:
                assert not checkpoints[checkpoint].any()

    def _slot(self, request: int) -> int:
        return len(self.inputs) - request

    def _inputs(self, row: DeltaRow) -> DeltaInputs:
        first, right = self._computed[row.request], row.count - row.drafts + row.accepted
        ours = self.inputs[row.request].part(first, first + right)
        wrong = delta_inputs(self.spec, row.count - right, seed=77)
        return DeltaInputs(*map(torch.cat, zip(ours.all, wrong.all, strict=True)))


def delta_requests(kernels: Kernels, spec: GatedDeltaSpec, *lengths: int) -> DeltaRequests:
    """Return a request for each of `lengths`, its number of tokens. Their states are random."""
    states = randn(len(lengths), spec.state_items, dtype=torch.float32, seed=5, scale=0.3)
    conv = randn(spec.kernel, spec.conv_width, dtype=torch.float32, seed=6)
    inputs = [delta_inputs(spec, n, seed=10 * (i + 1)) for i, n in enumerate(lengths)]
    return DeltaRequests(kernels, spec, conv, inputs, states)
