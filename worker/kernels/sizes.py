"""Model dimensions that the compiled kernels support, and sizes of packed matrices. Needs no torch.

The numbers are those of csrc/packed.h and csrc/attention.h; tests compare them.
"""

from __future__ import annotations

ALIGNMENT = 64
PANEL, GROUP = 32, 32
"""Rows and columns of a group; the last panel of rows is filled up."""
Q4, Q8, BF16, F32 = range(4)
"""Formats of a packed matrix."""
GROUP_BYTES = (128 + PANEL * GROUP // 2, 64 + PANEL * GROUP, PANEL * GROUP * 2, PANEL * GROUP * 4)

DIM_MULTIPLE, SIZE_MULTIPLE = 32, 16
MAX_DIM, MAX_GROUP = 256, 32


def fits(*, heads: int, kv_heads: int, head_dim: int, sizes: tuple[int, ...]) -> bool:
    """Return whether the kernels support these dimensions; `sizes`: hidden and intermediate."""
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
    """Return the bytes of a packed matrix, without those for its alignment."""
    return -(-outputs // PANEL) * (inputs // GROUP) * GROUP_BYTES[fmt]
