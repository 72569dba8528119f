"""The rows of images that the worker keeps, and those that a step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from protocol.engine.attachments import Attachment
from worker.batch.batch import BatchRows


@dataclass(frozen=True, slots=True)
class StepImages:
    """The rows of images that stand in place of embeddings in a step.

    index   [T] int64: which of `rows` the token reads; -1: its embedding
    rows    [K, hidden] float32
    added   [num_added, K, hidden] float32: what the first layers add at the end to the hidden
            states of these tokens (DeepStack)
    """

    index: Tensor
    rows: Tensor
    added: Tensor

    @classmethod
    def of(cls, index: Tensor, kept: Tensor) -> Self:
        """Return the rows of `kept` [K, 1 + num_added, hidden], as `ImageTower.encode` makes
        them."""
        return cls(index, kept[:, 0].contiguous(), kept[:, 1:].transpose(0, 1).contiguous())

    @property
    def num_added(self) -> int:
        return len(self.added)

    def rounded(self, dtype: torch.dtype) -> StepImages:
        """Return rows with the precision of `dtype`."""
        return StepImages(self.index, self.rows.to(dtype).float(), self.added.to(dtype).float())

    def put(self, x: Tensor) -> None:
        """Write the rows into the embeddings x [T, hidden]."""
        places = (self.index >= 0).nonzero()[:, 0]
        x[places] = self.rows[self.index[places]].to(x.dtype)

    def add(self, x: Tensor, layer: int) -> None:
        """Add what is added after layer `layer` to its result x [T, hidden]."""
        places = (self.index >= 0).nonzero()[:, 0]
        x[places] += self.added[layer, self.index[places]].to(x.dtype)


def step_images(
    rows: BatchRows, images: Mapping[int, Sequence[Attachment]], kept: Mapping[str, Tensor]
) -> StepImages | None:
    """Return the rows of images that the step's positions need; None if they need none.

    images   slot -> the images of its request
    kept     digest -> rows, as `ImageTower.encode` makes them

    Raises ValueError if the rows of an image are missing.
    """
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
                    index[begin : begin + high - low] = np.arange(count, count + high - low)
                    parts.append(kept[image.digest][at + low - first : at + high - first].float())
                    count += high - low
                at += length
    if index is None:
        return None
    return StepImages.of(torch.from_numpy(index), torch.cat(parts))
