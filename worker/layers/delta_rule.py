"""What a gated delta net computes between its linears, in torch, token by token: the definition of
the compiled kernel.

Legend: T tokens of the step, R rows, N tokens of each row, H value heads, K key dim, V value dim, C
width of the convolution, all as in GatedDeltaSpec. A head has one decay, or one for each of the K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from worker.layers.recurrence import advance, convolved
from worker.slots.states import StepStates
from worker.spec.recurrent import GatedDeltaSpec

UNIT_EPS = 1e-6
"""Added to the squares of a query or a key before it is divided by their root."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a gated delta net beside its linears. All are float32.

    conv    [kernel, C], oldest token first
    decay   [H] factor of the decays, below zero
    bias    [H * decays] is added to what the decays are made of
    norm    [V] weight of the norm over the result of each head
    """

    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.conv, self.decay, self.bias, self.norm)


def gated_delta(
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
    inputs: Tensor,
    gates: Tensor,
    states: StepStates,
    offset: int,
) -> Tensor:
    """Compute a step of one layer and change the states of its rows. Arguments and result are those
    of `Kernels.gated_delta`."""
    qkv, gate = torch.split(inputs, [spec.conv_width, spec.value_width], dim=1)
    heads = spec.num_value_heads
    beta, step = torch.split(gates, [heads, heads * spec.decays], dim=1)
    decay = softplus(step + weights.bias).view(len(step), heads, -1) * weights.decay[:, None]
    out = inputs.new_zeros(len(inputs), spec.num_value_heads, spec.value_dim)
    rule = _Rule(spec, weights.conv, (qkv, beta.sigmoid() * spec.beta_scale, decay), out)
    advance(states, offset, spec.state_items, rule)
    out = rms_norm(out, weights.norm.shape, weights.norm, spec.eps)
    return out.flatten(1) * (silu(gate) if spec.gate == "silu" else gate.sigmoid())


class _Rule:
    """The recurrence over some tokens of a step."""

    def __init__(
        self,
        spec: GatedDeltaSpec,
        conv: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
    ) -> None:
        self._spec, self._conv, self._inputs, self._out = spec, conv, inputs, out

    def __call__(self, tokens: Tensor, held: Tensor) -> None:
        """Write the results of `tokens` [R, N], indexes in the step, and change `held` [R, items],
        the states of the rows."""
        spec = self._spec
        qkv, beta, decay = (each[tokens] for each in self._inputs)
        sizes = [spec.tail_items, spec.state_items - spec.tail_items]
        tail, matrices = torch.split(held, sizes, dim=1)
        tail = tail.view(len(held), spec.kernel - 1, spec.conv_width)
        state = matrices.view(len(held), spec.num_value_heads, spec.key_dim, spec.value_dim)
        q, k, v = self._convolved(qkv, tail)
        factor = decay.exp()
        for at in range(tokens.shape[1]):
            state.mul_(factor[:, at, :, :, None])
            known = torch.einsum("rhkv,rhk->rhv", state, k[:, at])
            change = (v[:, at] - known).mul_(beta[:, at, :, None])
            state.add_(k[:, at, :, :, None] * change[:, :, None, :])
            self._out[tokens[:, at]] = torch.einsum("rhkv,rhk->rhv", state, q[:, at])

    def _convolved(self, qkv: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries and keys [R, N, H, K] and the values [R, N, H, V] of `qkv` [R, N, C],
        and move `tail` [R, kernel - 1, C] on."""
        spec = self._spec
        mixed = silu(convolved(qkv, tail, self._conv))
        q, k, v = torch.split(mixed, [spec.key_width, spec.key_width, spec.value_width], dim=2)
        keys = (*qkv.shape[:2], spec.num_key_heads, spec.key_dim)
        group = spec.num_value_heads // spec.num_key_heads
        q, k = (_unit(each.view(keys)) for each in (q, k))
        if spec.tiled:
            q, k = (each.repeat(1, 1, group, 1) for each in (q, k))
        else:
            q, k = (each.repeat_interleave(group, dim=2) for each in (q, k))
        values = v.view(*qkv.shape[:2], spec.num_value_heads, spec.value_dim)
        return q.mul_(spec.key_dim**-0.5), k, values


def _unit(x: Tensor) -> Tensor:
    """Return vectors [..., K] divided by their length."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + UNIT_EPS)
