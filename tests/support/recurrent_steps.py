"""Computes the tokens of some requests with one recurrent layer, in any steps.

Legend: N tokens of a request, T tokens of a step, C width of the convolution, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from torch import Tensor

from tests.support.kernels import randn
from worker.kernels.base import Kernels
from worker.layers.delta_rule import DeltaWeights
from worker.layers.mamba1_rule import Mamba1Weights, ScanInputs
from worker.layers.mamba2_rule import Mamba2Weights
from worker.layers.rg_lru_rule import LruInputs, LruWeights
from worker.slots.states import StepStates
from worker.spec.model_spec import Activation
from worker.spec.recurrent import (
    GatedDeltaSpec,
    Mamba1Spec,
    Mamba2Spec,
    NormPlace,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
)

OFFSET, REST = 5, 3
"""Numbers of other layers in a state, before and after those of the layer."""

Weights = Mapping[str, Tensor]
Inputs = tuple[Tensor, ...]
"""The inputs of some tokens, each [N, ...]."""


@dataclass(frozen=True)
class RecurrentLayer:
    """A layer with random weights.

    weights       all tensors of the layer
    make_inputs   (number of tokens, seed) -> random inputs
    rule          (kernels, weights, inputs, states, offset) -> results [T, ...]
    """

    name: str
    spec: RecurrentSpec
    weights: Weights
    make_inputs: Callable[[int, int], Inputs]
    rule: Callable[[Kernels, Weights, Inputs, StepStates, int], Tensor]

    def compute(self, kernels: Kernels, inputs: Inputs, states: StepStates, offset: int) -> Tensor:
        return self.rule(kernels, self.weights, inputs, states, offset)

    def __str__(self) -> str:
        return self.name


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return randn(*shape, dtype=torch.float32, seed=seed, scale=scale)


def delta_layer(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    *,
    tiled: bool = False,
    beta_scale: float = 1.0,
    by_row: bool = False,
) -> RecurrentLayer:
    """Return a gated delta net. The decays of its inputs are between about 0.1 and 1.

    by_row   whether each row of a state has a decay of its own, as in Kimi Linear
    """
    spec = GatedDeltaSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kernel=kernel,
        eps=1e-6,
        tiled=tiled,
        beta_scale=beta_scale,
        decay_rank=int(by_row),
        gate="sigmoid" if by_row else "silu",
    )
    spec.check()
    weights = {
        "conv": numbers(kernel, spec.conv_width, seed=6),
        "decay": -numbers(value_heads, seed=8).abs() - 0.1,
        "bias": numbers(value_heads * spec.decays, seed=11) - 1,
        "norm": numbers(value_dim, seed=13),
    }

    def make_inputs(tokens: int, seed: int) -> Inputs:
        return (
            numbers(tokens, spec.conv_width + spec.value_width, seed=seed),
            numbers(tokens, value_heads * (1 + spec.decays), seed=seed + 1),
        )

    def rule(
        kernels: Kernels, weights: Weights, inputs: Inputs, states: StepStates, offset: int
    ) -> Tensor:
        made, gates = inputs
        return kernels.gated_delta(spec, DeltaWeights(**weights), made, gates, states, offset)

    sizes = f"{key_heads}-{value_heads}x{key_dim}x{value_dim}-{kernel}"
    name = f"delta-{sizes}{'-tiled' * tiled}{'-twice' * (beta_scale == 2)}{'-rows' * by_row}"
    return RecurrentLayer(name, spec, weights, make_inputs, rule)


def mamba_layer(
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state: int,
    kernel: int,
    *,
    conv_bias: bool = True,
    limits: tuple[float, float] = (0.0, inf),
    norm: NormPlace = "after gate",
) -> RecurrentLayer:
    """Return a Mamba-2 layer. The decays of its inputs are between about 0.1 and 1."""
    spec = Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state=state,
        kernel=kernel,
        eps=1e-5,
        conv_bias=conv_bias,
        limits=limits,
        norm=norm,
    )
    spec.check()
    weights = {
        "conv": numbers(kernel, spec.conv_width, seed=6),
        "decay": -numbers(num_heads, seed=8).abs() - 0.1,
        "bias": numbers(num_heads, seed=11),
        "skip": numbers(num_heads, seed=12),
    }
    if norm is not None:
        weights["norm"] = numbers(spec.output_width, seed=13)
    if conv_bias:
        weights["conv_bias"] = numbers(spec.conv_width, seed=7)

    def make_inputs(tokens: int, seed: int) -> Inputs:
        return (numbers(tokens, spec.input_width, seed=seed),)

    def rule(
        kernels: Kernels, weights: Weights, inputs: Inputs, states: StepStates, offset: int
    ) -> Tensor:
        named = Mamba2Weights(
            conv=weights["conv"],
            conv_bias=weights.get("conv_bias"),
            decay=weights["decay"],
            bias=weights["bias"],
            skip=weights["skip"],
            norm=weights.get("norm"),
        )
        return kernels.mamba2(spec, named, inputs[0], states, offset)

    name = f"mamba-{num_heads}x{head_dim}x{state}-{num_groups}-{kernel}{'-bias' * conv_bias}"
    if norm != "after gate":
        name += f"-{norm or 'no norm'}".replace(" ", "-")
    return RecurrentLayer(name, spec, weights, make_inputs, rule)


def mamba1_layer(
    channels: int, state: int, kernel: int, *, conv_bias: bool = True
) -> RecurrentLayer:
    """Return a Mamba-1 layer, whose recurrence reads the result of the convolution. The decays of
    its inputs are between about 0.1 and 1."""
    spec = Mamba1Spec(
        channels=channels, state=state, rank=1, kernel=kernel, eps=1e-6, conv_bias=conv_bias
    )
    spec.check()
    weights = {
        "conv": numbers(kernel, channels, seed=6),
        "decay": -numbers(channels, state, seed=8).abs() - 0.1,
        "bias": numbers(channels, seed=11),
        "skip": numbers(channels, seed=12),
    }
    if conv_bias:
        weights["conv_bias"] = numbers(channels, seed=7)

    def make_inputs(tokens: int, seed: int) -> Inputs:
        """Return what is convolved and the gate, dt, and B and C."""
        widths = (2 * channels, channels, 2 * state)
        return tuple(numbers(tokens, each, seed=seed + i) for i, each in enumerate(widths))

    def rule(
        kernels: Kernels, weights: Weights, inputs: Inputs, states: StepStates, offset: int
    ) -> Tensor:
        named = Mamba1Weights(
            conv=weights["conv"],
            conv_bias=weights.get("conv_bias"),
            decay=weights["decay"],
            bias=weights["bias"],
            skip=weights["skip"],
        )
        before, gate = inputs[0].chunk(2, dim=1)
        b, c = (each.contiguous() for each in inputs[2].chunk(2, dim=1))
        x = kernels.mamba1_conv(spec, named, before, states, offset)
        scanned = ScanInputs(x, inputs[1].contiguous(), b, c, gate)
        return kernels.mamba1_scan(spec, named, scanned, states, offset)

    name = f"mamba1-{channels}x{state}-{kernel}{'-bias' * conv_bias}"
    return RecurrentLayer(name, spec, weights, make_inputs, rule)


def lru_layer(
    num_heads: int, head_dim: int, kernel: int, activation: Activation = "gelu_tanh"
) -> RecurrentLayer:
    """Return an RG-LRU layer, whose gates are random and not made of its convolution. The decays of
    its inputs are between about 0.1 and 1."""
    spec = RgLruSpec(num_heads=num_heads, head_dim=head_dim, kernel=kernel, activation=activation)
    spec.check()
    width = spec.width
    weights = {
        "conv": numbers(kernel, width, seed=6),
        "conv_bias": numbers(width, seed=7),
        "decay": -numbers(width, seed=8).abs() - 0.01,
        "input_bias": numbers(width, seed=11),
        "decay_bias": numbers(width, seed=12),
    }

    def make_inputs(tokens: int, seed: int) -> Inputs:
        """Return what is convolved and the gate, and what the other gates are made of."""
        return tuple(numbers(tokens, 2 * width, seed=seed + i) for i in range(2))

    def rule(
        kernels: Kernels, weights: Weights, inputs: Inputs, states: StepStates, offset: int
    ) -> Tensor:
        named = LruWeights(**weights)
        before, gate = inputs[0].chunk(2, dim=1)
        x = kernels.rg_lru_conv(spec, named, before, states, offset)
        assert inputs[1].shape[1] == 2 * width
        by_head = inputs[1].unflatten(1, (num_heads, -1)).transpose(0, 1).contiguous()
        return kernels.rg_lru_scan(spec, named, LruInputs(x, by_head, gate), states, offset)

    name = f"lru-{num_heads}x{head_dim}-{kernel}-{activation}"
    return RecurrentLayer(name, spec, weights, make_inputs, rule)


def conv_layer(width: int, kernel: int, *, bias: bool = False) -> RecurrentLayer:
    """Return a short convolution."""
    spec = ShortConvSpec(width=width, kernel=kernel, bias=bias)
    spec.check()
    weights = {"conv": numbers(kernel, width, seed=6)}
    if bias:
        weights["bias"] = numbers(width, seed=7)

    def make_inputs(tokens: int, seed: int) -> Inputs:
        return (numbers(tokens, 3 * width, seed=seed),)

    def rule(
        kernels: Kernels, weights: Weights, inputs: Inputs, states: StepStates, offset: int
    ) -> Tensor:
        return kernels.short_conv(
            spec, weights["conv"], weights.get("bias"), inputs[0], states, offset
        )

    name = f"conv-{width}-{kernel}{'-bias' * bias}"
    return RecurrentLayer(name, spec, weights, make_inputs, rule)


@dataclass(frozen=True)
class StepRow:
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
class RecurrentRequests:
    """Some requests, each with a slot, and a layer that computes them.

    states    [requests, items] what the states are before the first token
    earlier   number of tokens of each request before those
    results   of each request: [N, ...], zeros for tokens that are not computed
    saved     (request, number of its tokens) -> the state that was saved after them
    """

    kernels: Kernels
    layer: RecurrentLayer
    inputs: Sequence[Inputs]
    states: Tensor
    earlier: Sequence[int]
    memory: Tensor = field(init=False)
    results: list[Tensor] = field(init=False)
    saved: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        items = OFFSET + self.layer.spec.state_items + REST
        #: Row 0 is another request's; those of the requests are in reverse order.
        self.memory = numbers(1 + len(self.inputs), items, seed=9)
        for request in range(len(self.inputs)):
            self.state(request).copy_(self.states[request])
        self.results = [torch.zeros(len(each[0]), 0) for each in self.inputs]
        self._computed = [0] * len(self.inputs)

    def state(self, request: int) -> Tensor:
        return self.memory[self._slot(request), OFFSET:-REST]

    def step(self, *rows: StepRow) -> None:
        """Compute rows, which have different requests, and accept their drafts."""
        saves = [(i, n) for i, row in enumerate(rows) for n in row.saves]
        checkpoints = torch.zeros(1 + len(saves), self.memory.shape[1])
        counts = np.array([row.count for row in rows])
        states = StepStates(
            memory=self.memory,
            checkpoints=checkpoints,
            slots=np.array([self._slot(row.request) for row in rows]),
            starts=np.array([self._start(row.request) for row in rows]),
            firsts=counts.cumsum() - counts,
            counts=counts,
            kept=counts - [row.drafts for row in rows],
            save_rows=np.array([i for i, _ in saves], np.int64),
            save_counts=np.array([n for _, n in saves], np.int64),
            save_ids=np.arange(len(saves))[::-1] + 1,
        )
        inputs = joined([self._inputs(row) for row in rows])

        def compute(states: StepStates) -> Tensor:
            return self.layer.compute(self.kernels, inputs, states, OFFSET)

        results = compute(states)
        states.on_accepted(compute)
        states.accept(np.array([row.accepted for row in rows]))
        for row, result in zip(rows, results.split(counts.tolist()), strict=True):
            first, right = self._computed[row.request], row.count - row.drafts + row.accepted
            if not self.results[row.request].numel():
                size = (len(self.inputs[row.request][0]), *result.shape[1:])
                self.results[row.request] = torch.zeros(size)
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

    def _start(self, request: int) -> int:
        return self.earlier[request] + self._computed[request]

    def _inputs(self, row: StepRow) -> Inputs:
        first, right = self._computed[row.request], row.count - row.drafts + row.accepted
        ours = part(self.inputs[row.request], first, first + right)
        return joined([ours, self.layer.make_inputs(row.count - right, 77)])


def part(inputs: Inputs, first: int, end: int) -> Inputs:
    return tuple(each[first:end] for each in inputs)


def joined(parts: Sequence[Inputs]) -> Inputs:
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def recurrent_requests(kernels: Kernels, layer: RecurrentLayer, *lengths: int) -> RecurrentRequests:
    """Return a request for each of `lengths`, its number of tokens. Their states are random. The
    first one has no earlier tokens."""
    states = numbers(len(lengths), layer.spec.state_items, seed=5, scale=0.3)
    inputs = [layer.make_inputs(n, 10 * (i + 1)) for i, n in enumerate(lengths)]
    return RecurrentRequests(kernels, layer, inputs, states, range(len(lengths)))
