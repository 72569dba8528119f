"""The rotary positions of a request with images, in models whose positions have several axes.

In Qwen's M-RoPE a position has three coordinates, which turn different pairs of a head. Those of a
text are equal, and grow by one with each token. The tokens of an image have its frames, rows and
columns, from the coordinate on that the next token of a text would have. The text after an image
continues after its longest side, so images take fewer positions than tokens:

    token       a  b  i  i  i  i  i  i  c  d       the image i has 2 rows of 3 columns
    frames      0  1  2  2  2  2  2  2  5  6
    rows        0  1  2  2  2  3  3  3  5  6
    columns     0  1  2  3  4  2  3  4  5  6

All this depends on the attachments alone, so a chunk, a draft or a resumed request has the
positions of a whole prompt. After the last image the three differ from the position in the request
by one number, the shift, which is a field of the slot table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.engine.attachments import Attachment


def rope_shift(images: Sequence[Attachment]) -> int:
    """Return what is added to the positions after the last of a request's images."""
    return sum(map(_change, images))


def turn(positions: NDArray[np.int64], start: int, images: Sequence[Attachment]) -> None:
    """Replace the positions [AXES, n] in the request, which are consecutive and start at `start`
    in each axis, by rotary positions.

    images   those of the request, in order
    """
    shift, end = 0, start + positions.shape[1]
    for image in images:
        if image.first >= end:
            break
        if image.grid is None:
            continue
        low = max(image.first, start)
        if low < image.end:
            rows = np.arange(low - image.first, min(image.end, end) - image.first)
            coordinates = np.stack(np.unravel_index(rows, image.grid))
            positions[:, low - start :][:, : len(rows)] = image.first + shift + coordinates
        change = _change(image)
        positions[:, max(image.end - start, 0) :] += change
        shift += change


def _change(image: Attachment) -> int:
    """Return by how much the positions after an image are moved."""
    if image.grid is None:
        return 0
    _, rows, columns = image.grid
    return max(rows, columns) - image.num_tokens
