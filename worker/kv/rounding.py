"""Keys and values rounded to eight bits in the cache (`--kv-dtype int8`).

A head of D numbers is stored as D integers from -127 to 127 and, in the four bytes after them,
their scale in float32: a number is its integer times the scale. Each head of each token has a scale
of its own, so what is stored for a token depends on that token alone, and the law of equal bits
holds. csrc/stored_kv.h is the fast twin of this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.config.worker import KVDtype
from worker.kernels.sizes import SCALE_BYTES

ROUNDED = torch.int8
"""dtype of a cache that stores rounded heads."""
MOST = 127


def choose_kv_dtype(wanted: KVDtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the K/V cache of a model in `dtype`."""
    return ROUNDED if wanted == "int8" else dtype


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the items that a head takes in a cache of this dtype."""
    return head_dim + SCALE_BYTES if dtype == ROUNDED else head_dim


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that a head takes in a cache of this dtype."""
    return stored_width(head_dim, dtype) * dtype.itemsize


def round_heads(numbers: Tensor) -> Tensor:
    """Return heads [..., D] as they are stored, [..., D + SCALE_BYTES] int8.

    A head with NaN or an infinite number gets a scale that is not finite, so `numbers_of` returns
    no finite number for it.
    """
    numbers = numbers.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    # 0 times infinity is NaN, where the head has no number but 0.
    inverse = torch.full_like(largest, MOST) / largest
    integers = (numbers * inverse).round_().nan_to_num_(0.0, 0.0, 0.0)
    scales = (largest / MOST).contiguous().view(ROUNDED)
    return torch.cat([integers.to(ROUNDED), scales], dim=-1)


def numbers_of(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., D] in `dtype` of heads [..., stored_width] from a cache."""
    if stored.dtype != ROUNDED:
        return stored
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[..., :-SCALE_BYTES].float().mul_(scales).to(dtype)
