"""A short convolution and its two gates, in torch: the definition of the compiled kernel.

Legend: T tokens of the step, R rows, N tokens of each row, C width of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.layers.recurrence import advance, convolved
from worker.slots.states import StepStates
from worker.spec.recurrent import ShortConvSpec


def short_conv(
    spec: ShortConvSpec,
    conv: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    states: StepStates,
    offset: int,
) -> Tensor:
    """Compute a step of one layer and change the states of its rows. Arguments and result are those
    of `Kernels.short_conv`."""
    before, after, inner = inputs.chunk(3, dim=1)
    gated = before * inner
    out = torch.zeros_like(gated)

    def compute(tokens: Tensor, held: Tensor) -> None:
        """Write the convolution of `tokens` [R, N], indexes in the step, and change `held` [R,
        items], the states of the rows."""
        tail = held.view(len(held), spec.kernel - 1, spec.conv_width)
        out[tokens] = convolved(gated[tokens], tail, conv)

    advance(states, offset, spec.state_items, compute)
    return (out if bias is None else out.add_(bias)).mul_(after)
