"""Choice of the attention backend: the compiled kernels if they support the model, else torch's."""

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
    """`block_tokens` of the cache, `dtype` of queries and cache; `kernels` that fit the model."""
    kernels = kernels or TorchKernels()
    if isinstance(kernels, NativeKernels):
        return NativePagedAttention(kernels, block_tokens)
    return TorchPagedAttention(block_tokens, dtype)
