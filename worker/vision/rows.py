"""The rows of images that the worker keeps, and those that a step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """

    index: Tensor
    rows: Tensor

    def put(self, x: Tensor) -> None:
        """Write the rows into the embeddings x [T, hidden]."""
        places = (self.index >= 0).nonzero()[:, 0]
        x[places] = self.rows[self.index[places]].to(x.dtype)


def step_images(
    rows: BatchRows, images: Mapping[int, Sequence[Attachment]], kept: Mapping[str, Tensor]
) -> StepImages | None:
    """Return the rows of images that the step's positions need; None if they need none.

    images   slot -> the images of its request
    kept     digest -> rows

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
                    parts.append(kept[image.digest][at + low - first : at + high - first])
                    count += high - low
                at += length
    if index is None:
        return None
    return StepImages(torch.from_numpy(index), torch.cat(parts))
