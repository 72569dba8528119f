"""Keys and values rounded to eight bits in the cache (`--kv-dtype int8`).

A head of D numbers is stored as D integers from -127 to 127, followed by their scale, a float32 in
four bytes. A number is its integer times the scale. Each head of each token has its own scale. So
the bytes that are stored for a token do not depend on the other tokens written with it.
csrc/stored_kv.h rounds in the same way, up to ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.config.worker import KVDtype
from worker.spec.kernel_sizes import SCALE_BYTES

ROUNDED = torch.int8
"""dtype of a cache that stores rounded heads."""
MOST = 127


def choose_kv_dtype(wanted: KVDtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the K/V cache of a model in `dtype`."""
    return {"auto": dtype, "bfloat16": torch.bfloat16, "int8": ROUNDED}[wanted]


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of items of a head in a cache of this dtype."""
    return head_dim + SCALE_BYTES if dtype == ROUNDED else head_dim


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of a head in a cache of this dtype."""
    return stored_width(head_dim, dtype) * dtype.itemsize


def round_heads(numbers: Tensor) -> Tensor:
    """Return heads [..., D] as they are stored, [..., D + SCALE_BYTES] int8.

    A head with NaN or an infinite number gets a scale that is not finite, so `numbers_of` returns
    no finite number for it.
    """
    numbers = numbers.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    # If all numbers of a head are 0, the inverse is infinite, and 0 times infinity is NaN.
    inverse = torch.full_like(largest, MOST) / largest
    integers = (numbers * inverse).round_().nan_to_num_(0.0, 0.0, 0.0)
    scales = (largest / MOST).contiguous().view(ROUNDED)
    return torch.cat([integers.to(ROUNDED), scales], dim=-1)


def numbers_of(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., D] in `dtype` of heads [..., stored_width] from a cache."""
    if stored.dtype != ROUNDED:
        return stored.to(dtype)
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored[..., :-SCALE_BYTES].float().mul_(scales).to(dtype)
