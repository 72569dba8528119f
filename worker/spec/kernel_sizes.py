"""Model dimensions that the compiled kernels support, and sizes of packed matrices. Needs no torch.

The constants are those of csrc/packed.h, csrc/attention.h and csrc/stored_kv.h. Tests compare them.
"""

from __future__ import annotations

from collections.abc import Collection

ALIGNMENT = 64
"""Bytes to which the start of a packed matrix is aligned."""
PANEL, GROUP = 32, 32
"""A matrix is cut into panels of PANEL rows, and a panel into groups of GROUP columns. The last
panel is padded with zeros."""
SPAN = 8
"""Groups that share a header, in formats that have one."""
MAX_PARTS = 5
"""Most parts of a packed matrix: queries, keys, values, and what Kimi Linear makes decays and gates
of."""
MAX_TERM_PARTS = 4
"""Most modules that form a linear which adapters change: queries, keys, values and gates."""
Q4, Q8, BF16, F32, Q5, Q5M, Q3K, Q4K, Q5K, Q6K, Q2K, I4, I4K, F4 = range(14)
"""Formats of packed matrices."""
GROUP_BYTES = {
    Q4: 128 + PANEL * GROUP * 4 // 8,
    Q8: 64 + PANEL * GROUP,
    BF16: PANEL * GROUP * 2,
    F32: PANEL * GROUP * 4,
    Q5: 64 + PANEL * GROUP * 5 // 8,
    Q5M: 128 + PANEL * GROUP * 5 // 8,
    Q3K: 64 + PANEL * GROUP * 3 // 8,
    Q4K: 64 + PANEL * GROUP * 4 // 8,
    Q5K: 64 + PANEL * GROUP * 5 // 8,
    Q6K: 64 + PANEL * GROUP * 6 // 8,
    Q2K: 64 + PANEL * GROUP * 2 // 8,
    I4: 64 + PANEL * GROUP * 4 // 8,
    I4K: 32 + PANEL * GROUP * 4 // 8,
    F4: 32 + PANEL * GROUP * 4 // 8,
}
"""Bytes of a group in each format."""
BLOCK_FORMATS = {
    "Q4_0": Q4,
    "Q4_1": Q4,
    "Q8_0": Q8,
    "Q5_0": Q5,
    "Q5_1": Q5M,
    "IQ4_NL": I4,
    "MXFP4": F4,
    "Q2_K": Q2K,
    "Q3_K": Q3K,
    "Q4_K": Q4K,
    "Q5_K": Q5K,
    "Q6_K": Q6K,
    "IQ4_XS": I4K,
}
"""The format of each block type of GGUF that is packed, always without rounding."""
HEADER_BYTES = {Q2K: 128, Q3K: 64, Q4K: 128, Q5K: 128, Q6K: 64, I4K: 64}
"""Bytes of the header of SPAN groups, in formats that have one."""

DIM_MULTIPLE, SIZE_MULTIPLE = 32, 16
"""Head dims must be a multiple of the first, hidden and intermediate sizes of the second."""
MAX_DIM, MAX_GROUP = 576, 128
"""Largest head dim, and most query heads that share a key/value head."""
SCALE_BYTES = 4
"""Bytes of the scale after each rounded head of a K/V cache (kv/rounding.py)."""


def fits(*, heads: int, kv_heads: int, head_dim: int, sizes: tuple[int, ...]) -> bool:
    """Return whether the kernels support a model with these dimensions.

    sizes   hidden and intermediate sizes
    """
    return (
        head_dim % DIM_MULTIPLE == 0
        and head_dim <= MAX_DIM
        and heads // kv_heads <= MAX_GROUP
        and are_fitting(sizes)
    )


def are_fitting(sizes: Collection[int]) -> bool:
    """Return whether the kernels support these hidden and intermediate sizes."""
    return all(size % SIZE_MULTIPLE == 0 for size in sizes)


def can_pack(inputs: int) -> bool:
    """Return whether a matrix with `inputs` columns can be packed."""
    return inputs % GROUP == 0


def packed_bytes(fmt: int, outputs: int, inputs: int) -> int:
    """Return the size in bytes of [outputs, inputs] numbers packed in the format `fmt`, a constant
    of this file. `inputs` is a multiple of GROUP. The padding for ALIGNMENT is not included."""
    groups = inputs // GROUP
    panel = groups * GROUP_BYTES[fmt] + -(-groups // SPAN) * HEADER_BYTES.get(fmt, 0)
    return -(-outputs // PANEL) * panel
