"""The rows of images that the worker keeps, and those that a step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from protocol.engine.attachments import Attachment
from worker.batch.batch import BatchRows, Ints


@dataclass(frozen=True, slots=True)
class StepImages:
    """The rows of images that stand in place of embeddings in a step.

    index       [T] int64: which of `rows` the token reads; -1: its embedding
    rows        [K, hidden] float32
    added       [num_added, K, hidden] float32: what the first layers add at the end to the hidden
                states of these tokens (DeepStack)
    seen_ends   `AttentionBatch.seen_ends`
    """

    index: Tensor
    rows: Tensor
    added: Tensor
    seen_ends: Tensor | None = None

    @classmethod
    def of(cls, index: Tensor, kept: Tensor, seen_ends: Tensor | None = None) -> Self:
        """Return the rows of `kept` [K, 1 + num_added, hidden], as `ImageTower.encode` makes
        them."""
        return cls(
            index, kept[:, 0].contiguous(), kept[:, 1:].transpose(0, 1).contiguous(), seen_ends
        )

    @property
    def num_added(self) -> int:
        return len(self.added)

    def rounded(self, dtype: torch.dtype) -> StepImages:
        """Return rows with the precision of `dtype`."""
        rows, added = (part.to(dtype).float() for part in (self.rows, self.added))
        return replace(self, rows=rows, added=added)

    def put(self, x: Tensor) -> None:
        """Write the rows into the embeddings x [T, hidden]."""
        places = (self.index >= 0).nonzero()[:, 0]
        x[places] = self.rows[self.index[places]].to(x.dtype)

    def add(self, x: Tensor, layer: int) -> None:
        """Add what is added after layer `layer` to its result x [T, hidden]."""
        places = (self.index >= 0).nonzero()[:, 0]
        x[places] += self.added[layer, self.index[places]].to(x.dtype)


def step_images(
    rows: BatchRows,
    images: Mapping[int, Sequence[Attachment]],
    kept: Mapping[str, Tensor],
    *,
    sees_whole_runs: bool = False,
) -> StepImages | None:
    """Return the rows of images that the step's positions need; None if they need none.

    images            slot -> the images of its request
    kept              digest -> rows, as `ImageTower.encode` makes them
    sees_whole_runs   whether the positions of a run see each other

    Raises ValueError if the rows of an image are missing, or if the step has a part of a run whose
    positions see each other.
    """
    seen_ends = _causal_ends(rows) if sees_whole_runs else None
    index: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
    parts: list[Tensor] = []
    count = 0
    spans = zip(rows.slots.tolist(), rows.starts.tolist(), rows.ends.tolist(), strict=True)
    for place, (slot, start, end) in enumerate(spans):
        known = start + int(rows.counts[place])
        for image in images.get(slot, ()):
            at = 0
            for first, length in image.runs:
                low, high = max(first, start), min(first + length, known)
                if low < high:
                    if image.digest not in kept:
                        raise ValueError(f"slot {slot}: image {image.digest[:12]} is not encoded")
                    if index is None:
                        index = np.full(int(rows.ends[-1]), -1, np.int64)
                    begin = end - known + low
                    if seen_ends is not None:
                        if high - low < length:
                            raise ValueError(f"slot {slot}: the step cuts an image at {first}")
                        seen_ends[begin : begin + length] = high
                    index[begin : begin + high - low] = np.arange(count, count + high - low)
                    parts.append(kept[image.digest][at + low - first : at + high - first])
                    count += high - low
                at += length
    if index is None:
        return None
    ends = None if seen_ends is None else torch.from_numpy(seen_ends)
    return StepImages.of(torch.from_numpy(index), torch.cat(parts), ends)


def _causal_ends(rows: BatchRows) -> Ints:
    """Return the position after each of the step's tokens, [T] int64."""
    after = (rows.known - rows.ends).repeat(rows.counts)
    return after + np.arange(1, len(after) + 1)
