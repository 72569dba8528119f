"""The interface by which a layer adds the terms of LoRA adapters. lora/table.py implements it.

Legend: T tokens in the step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from worker.spec.model_spec import AdaptedLinear

LayerAdapters = Callable[[AdaptedLinear, Tensor, Tensor], None]
"""Adds the terms of all tokens, for one layer, to the result [T, outputs] of a linear, in place.
The arguments are the linear, its input [T, inputs] and its result."""


def adapted(
    adapters: LayerAdapters | None, linear: AdaptedLinear, x: Tensor, result: Tensor
) -> Tensor:
    """Return the result of a linear with the terms of the tokens' adapters, if they have any."""
    if adapters is not None:
        adapters(linear, x, result)
    return result
