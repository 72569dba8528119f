"""Zeroed memory that costs nothing until it is used."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On the CPU the system zeroes a page when it is first touched, so
    unused pages cost nothing. torch.zeros would write every page at once, which takes seconds and
    makes the whole size resident."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
