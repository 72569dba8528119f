"""The inputs of a layer's attention that come from the step and not from the layer before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.attention.base import Attention
from worker.kv.cache import PagedCache
from worker.layers.rope import CosSin


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """The attention of one layer in one step of T tokens.

    angles      of the rotation; None: nothing is rotated
    factors     [T, 1, 1] of the queries; None: there are none
    place       number of the layer whose keys and values are read, among those that have some. The
                layer writes its own
    slots       [T] where keys and values are written
    plan        of `attention`
    """

    angles: CosSin | None
    factors: Tensor | None
    cache: PagedCache
    place: int
    slots: Tensor
    attention: Attention
    plan: Any
