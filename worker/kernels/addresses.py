"""The addresses of tensors that the compiled kernels read and write."""

from __future__ import annotations

from torch import Tensor


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first item, or None for None.

    Raises ValueError if the tensor is not contiguous.
    """
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"a kernel needs a contiguous tensor, not {tuple(tensor.stride())}")
    return tensor.data_ptr()


def cache_address(cache: Tensor) -> int:
    """Return the address of the first item of a layer's keys or values, [B, ...]. Raises ValueError
    if the items of a block are not contiguous."""
    if len(cache) and not cache[0].is_contiguous():
        raise ValueError(f"a kernel needs contiguous blocks, not {tuple(cache.stride())}")
    return cache.data_ptr()
