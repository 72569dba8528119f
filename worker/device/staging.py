"""Copies host arrays to the device without waiting for the copies.

On a GPU all arrays of one call are copied together from one pinned buffer; the caching host
allocator keeps the buffer until the copy is done. On the CPU nothing is copied: the tensor shares
the array's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.int64] | NDArray[np.float64]
"""Arrays whose items have eight bytes, so that several of them can share one buffer."""


def upload(arrays: Sequence[Words], device: torch.device) -> list[Tensor]:
    """Return the one-dimensional arrays as tensors on `device`, with the same dtypes. On the CPU
    the tensors share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [array.size for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    np.concatenate([array.view(np.int64) for array in arrays], out=packed.numpy())
    moved = torch.split(packed.to(device, non_blocking=True), sizes)
    return [
        tensor.view(torch.float64) if array.dtype == np.float64 else tensor
        for tensor, array in zip(moved, arrays, strict=True)
    ]


def upload_one(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a one-dimensional int64 or float64 host tensor to `device`. On the CPU, return it."""
    return tensor if device.type == "cpu" else upload([tensor.numpy()], device)[0]


def upload_into(target: Tensor, array: NDArray[np.int64]) -> None:
    """Copy an array to `target` [...] int64 on a GPU, which has the same shape."""
    staged = torch.empty(target.shape, dtype=torch.int64, pin_memory=True)
    staged.numpy()[:] = array
    target.copy_(staged, non_blocking=True)


def upload_bytes(buffer: Any, device: torch.device) -> Tensor:
    """Copy bytes to `device` as a flat uint8 tensor."""
    array = np.frombuffer(buffer, np.uint8)
    staged = torch.empty(array.size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    staged.numpy()[:] = array
    return staged.to(device, non_blocking=True)


def integers(buffer: Any) -> NDArray[np.int64]:
    """Return the int32 items in `buffer`, the `data` of an `Int32` of protocol, as int64."""
    return np.frombuffer(buffer, np.int32).astype(np.int64)
