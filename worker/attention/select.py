"""Chooses the attention backend: the compiled kernels if the model uses them, otherwise torch."""

from __future__ import annotations

import torch

from worker.attention.base import Attention
from worker.attention.native_paged import NativePagedAttention
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels


def select_attention(
    block_tokens: int, *, dtype: torch.dtype, kernels: Kernels | None = None
) -> Attention:
    """Return the attention backend that belongs to `kernels`.

    block_tokens   tokens in a block of the cache
    dtype          dtype of the queries and of the cache
    kernels        kernels that support the model; None means torch's
    """
    kernels = kernels or TorchKernels()
    if isinstance(kernels, NativeKernels):
        return NativePagedAttention(kernels, block_tokens)
    return TorchPagedAttention(block_tokens, dtype)
