"""Which attention backend serves: today torch's own kernels, on every device."""

from __future__ import annotations

import torch

from worker.attention.base import Attention
from worker.attention.torch_paged import TorchPagedAttention


def select_attention(block_tokens: int, *, dtype: torch.dtype) -> Attention:
    """`block_tokens` of the cache, `dtype` of queries and cache."""
    return TorchPagedAttention(block_tokens, dtype)
