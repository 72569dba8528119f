"""Model dimensions that the compiled kernels support, and sizes of packed matrices. Needs no torch.

The constants are those of csrc/packed.h and csrc/attention.h. Tests compare them.
"""

from __future__ import annotations

ALIGNMENT = 64
"""Bytes to which the start of a packed matrix is aligned."""
PANEL, GROUP = 32, 32
"""A matrix is cut into panels of PANEL rows, and a panel into groups of GROUP columns. The last
panel is padded with zeros."""
Q4, Q8, BF16, F32 = range(4)
"""Formats of packed matrices."""
GROUP_BYTES = (128 + PANEL * GROUP // 2, 64 + PANEL * GROUP, PANEL * GROUP * 2, PANEL * GROUP * 4)
"""Bytes of a group in each format."""

DIM_MULTIPLE, SIZE_MULTIPLE = 32, 16
"""Head dims must be a multiple of the first, hidden and intermediate sizes of the second."""
MAX_DIM, MAX_GROUP = 256, 32
"""Largest head dim, and most query heads that share a key/value head."""


def fits(*, heads: int, kv_heads: int, head_dim: int, sizes: tuple[int, ...]) -> bool:
    """Return whether the kernels support these dimensions.

    sizes   hidden and intermediate size
    """
    return (
        head_dim % DIM_MULTIPLE == 0
        and head_dim <= MAX_DIM
        and heads // kv_heads <= MAX_GROUP
        and all(size % SIZE_MULTIPLE == 0 for size in sizes)
    )


def can_pack(inputs: int) -> bool:
    """Return whether a matrix with `inputs` columns can be packed."""
    return inputs % GROUP == 0


def packed_bytes(fmt: int, outputs: int, inputs: int) -> int:
    """Return the bytes of a packed matrix, without the padding for its alignment."""
    return -(-outputs // PANEL) * (inputs // GROUP) * GROUP_BYTES[fmt]
