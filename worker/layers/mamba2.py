"""A Mamba-2 layer, the token mixer of most layers of Granite 4 H, in torch, token by token.

Legend: T tokens of the step, R rows, N tokens of each row, H heads, P head dim, G groups, S state,
C width of the convolution, all as in Mamba2Spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from worker.kernels.base import Kernels
from worker.layers.linear import Linear
from worker.layers.low_rank import LayerAdapters, adapted
from worker.layers.norm import Norm
from worker.layers.recurrence import advance, convolved
from worker.slots.states import StepStates
from worker.spec.recurrent import Mamba2Spec


@dataclass(slots=True)
class Mamba2:
    """The weights of a Mamba-2 layer. All but those of the linears are float32.

    inputs      makes the gate, x, B, C and dt: [T, H * P + C + H]
    conv        [kernel, C], oldest token first
    conv_bias   [C]
    decay       [H] the factor A, below zero
    bias        [H] is added to the projected dt
    skip        [H] the factor D
    norm        over each group of the result; its weight is [H * P]
    """

    spec: Mamba2Spec
    inputs: Linear
    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    bias: Tensor
    skip: Tensor
    norm: Norm
    output: Linear

    def __call__(
        self,
        x: Tensor,
        kernels: Kernels,
        states: StepStates,
        offset: int,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """Return the result [T, hidden] for x [T, hidden], and change the states.

        offset   index of the layer's first number in a state
        """
        spec = self.spec
        inputs = adapted(adapters, "qkv", x, self.inputs(x)).float()
        gate, mixed, step = torch.split(
            inputs, [spec.output_width, spec.conv_width, spec.num_heads], dim=1
        )
        step = softplus(step + self.bias).clamp(*spec.limits)
        out = torch.empty_like(gate)
        compute = partial(self._advance, mixed, step, out)
        compute(states, offset)
        states.on_accepted(lambda accepted: compute(accepted, offset))
        gated = out * silu(gate)
        groups = gated.view(len(x), spec.num_groups, -1)
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + spec.eps)
        result = ((groups * scale).flatten(1) * self.norm.weight).to(x.dtype)
        return adapted(adapters, "output", result, self.output(result))

    def _advance(
        self, mixed: Tensor, step: Tensor, out: Tensor, states: StepStates, offset: int
    ) -> None:
        """Write the results of all tokens of `states` to out [T, H * P], and change the states.

        mixed   [T, C] x, B and C before the convolution
        step    [T, H] dt
        """

        def compute(tokens: Tensor, held: Tensor) -> None:
            out[tokens] = self._span(mixed[tokens], step[tokens], held)

        advance(states, offset, self.spec.state_items, compute)

    def _span(self, mixed: Tensor, step: Tensor, held: Tensor) -> Tensor:
        """Return the results [R, N, H * P] for mixed [R, N, C] and step [R, N, H]. Change `held`
        [R, items], the states of the rows."""
        spec, (rows, length) = self.spec, mixed.shape[:2]
        tail, matrices = torch.split(
            held, [spec.tail_items, spec.state_items - spec.tail_items], dim=1
        )
        convolution = convolved(mixed, tail.view(rows, spec.kernel - 1, -1), self.conv)
        if self.conv_bias is not None:
            convolution += self.conv_bias
        groups = spec.num_groups * spec.state
        x, b, c = torch.split(silu(convolution), [spec.output_width, groups, groups], dim=2)
        x = x.view(rows, length, spec.num_heads, spec.head_dim)
        each = spec.num_heads // spec.num_groups
        shape = (rows, length, spec.num_groups, spec.state)
        b, c = (part.view(shape).repeat_interleave(each, dim=2) for part in (b, c))
        state = matrices.view(rows, spec.num_heads, spec.head_dim, spec.state)
        factor, added = (step * self.decay).exp(), x * step[..., None]
        results = self.skip[:, None] * x
        for at in range(length):
            state.mul_(factor[:, at, :, None, None])
            state.add_(added[:, at, :, :, None] * b[:, at, :, None, :])
            results[:, at] += torch.einsum("rhps,rhs->rhp", state, c[:, at])
        return results.flatten(2)

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear that need not stay dense."""
        return [(self, "inputs"), (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.inputs, self.output):
            yield from linear.tensors()
        yield from (self.conv, self.decay, self.bias, self.skip)
        if self.conv_bias is not None:
            yield self.conv_bias
        yield from self.norm.tensors()
