"""What a Mamba-2 layer computes between its linears, in torch, token by token: the definition of
the compiled kernel.

Legend: T tokens of the step, R rows, N tokens of each row, H heads, P head dim, G groups, S state,
C width of the convolution, all as in Mamba2Spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from worker.layers.recurrence import advance, convolved
from worker.slots.states import StepStates
from worker.spec.recurrent import Mamba2Spec


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The weights of a Mamba-2 layer beside its linears. All are float32.

    conv        [kernel, C], oldest token first
    conv_bias   [C]; None: nothing is added to the convolution
    decay       [H] the factor A, below zero
    bias        [H] is added to the projected dt
    skip        [H] the factor D
    norm        [H * P] weight of the norm over each group of the result; None: it is not normed
    """

    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    bias: Tensor
    skip: Tensor
    norm: Tensor | None

    def tensors(self) -> Iterator[Tensor]:
        yield self.conv
        if self.conv_bias is not None:
            yield self.conv_bias
        yield from (self.decay, self.bias, self.skip)
        if self.norm is not None:
            yield self.norm


def mamba2(
    spec: Mamba2Spec, weights: Mamba2Weights, inputs: Tensor, states: StepStates, offset: int
) -> Tensor:
    """Compute a step of one layer and change the states of its rows. Arguments and result are those
    of `Kernels.mamba2`."""
    gate, mixed, step = torch.split(
        inputs, [spec.output_width, spec.conv_width, spec.num_heads], dim=1
    )
    out = torch.zeros_like(gate)
    step = softplus(step + weights.bias).clamp(*spec.limits)
    advance(states, offset, spec.state_items, _Mamba2Rule(spec, weights, mixed, step, out))
    if weights.norm is None:
        return out * silu(gate)
    if spec.norm == "before gate":
        return _normed(spec, out, weights.norm) * silu(gate)
    return _normed(spec, out * silu(gate), weights.norm)


def _normed(spec: Mamba2Spec, result: Tensor, weight: Tensor) -> Tensor:
    """Return the norm over each group of result [T, H * P]."""
    groups = result.view(len(result), spec.num_groups, -1)
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + spec.eps)
    return (groups * scale).flatten(1) * weight


class _Mamba2Rule:
    """The recurrence over some tokens of a step."""

    def __init__(
        self, spec: Mamba2Spec, weights: Mamba2Weights, mixed: Tensor, step: Tensor, out: Tensor
    ) -> None:
        self._spec, self._weights, self._out = spec, weights, out
        self._mixed, self._step = mixed, step

    def __call__(self, tokens: Tensor, held: Tensor) -> None:
        """Write the results of `tokens` [R, N], indexes in the step, and change `held` [R, items],
        the states of the rows."""
        spec, weights = self._spec, self._weights
        step = self._step[tokens]
        sizes = [spec.tail_items, spec.state_items - spec.tail_items]
        tail, matrices = torch.split(held, sizes, dim=1)
        tail = tail.view(len(held), spec.kernel - 1, spec.conv_width)
        state = matrices.view(len(held), spec.num_heads, spec.head_dim, spec.state)
        x, b, c = self._convolved(self._mixed[tokens], tail)
        factor, added = (step * weights.decay).exp(), x * step[..., None]
        results = weights.skip[:, None] * x
        for at in range(tokens.shape[1]):
            state.mul_(factor[:, at, :, None, None])
            state.add_(added[:, at, :, :, None] * b[:, at, :, None, :])
            results[:, at] += torch.einsum("rhps,rhs->rhp", state, c[:, at])
        self._out[tokens] = results.flatten(2)

    def _convolved(self, mixed: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [R, N, H, P], and B and C [R, N, H, S], of `mixed` [R, N, C], and move `tail`
        [R, kernel - 1, C] on."""
        spec, shape = self._spec, mixed.shape[:2]
        convolution = convolved(mixed, tail, self._weights.conv)
        if self._weights.conv_bias is not None:
            convolution += self._weights.conv_bias
        groups = spec.num_groups * spec.state
        x, b, c = torch.split(silu(convolution), [spec.output_width, groups, groups], dim=2)
        each = spec.num_heads // spec.num_groups
        b, c = (
            part.view(*shape, spec.num_groups, spec.state).repeat_interleave(each, dim=2)
            for part in (b, c)
        )
        return x.view(*shape, spec.num_heads, spec.head_dim), b, c
