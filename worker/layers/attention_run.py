"""The inputs of a layer's attention that come from the step and not from the layer before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.attention.base import Attention
from worker.attention.selection import Selection
from worker.kv.cache import PagedCache
from worker.layers.rope import CosSin


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """The attention of one layer in one step of T tokens.

    angles      of the rotation; None: nothing is rotated
    factors     [T, 1, 1] of the queries; None: there are none
    place       index of the keys and values that are read, among those of all layers (`layer_heads`
                of the model's spec). The layer writes its own
    slots       [T] where keys and values are written
    plan        of `attention`
    selection   of the layer's indexer. None: it has none, or all tokens are selected in this step
    """

    angles: CosSin | None
    factors: Tensor | None
    cache: PagedCache
    place: int
    slots: Tensor
    attention: Attention
    plan: Any
    selection: Selection | None = None
