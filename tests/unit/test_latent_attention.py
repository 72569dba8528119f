"""Attention over latents, of the sizes of DeepSeek V3: all backends of a CPU against the plainest
one, and how often a step reads what is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.kernels import native_kernels
from tests.support.paged import PagedRow, attention_batch, scattered
from worker.attention.base import Attention
from worker.attention.native_paged import NativePagedAttention
from worker.attention.reference import ReferenceAttention
from worker.attention.torch_paged import TorchPagedAttention
from worker.kv.cache import KVCache

HEADS, DIM, BLOCK_TOKENS = 128, 576, 16
CPU = torch.device("cpu")


def cache_of(rows: list[PagedRow], dtype: torch.dtype, kv_dtype: torch.dtype) -> KVCache:
    """Return a cache with the latents of the rows."""
    num_blocks = 1 + max(block for row in rows for block in row.blocks)
    cache = KVCache(1, num_blocks, BLOCK_TOKENS, 1, DIM, kv_dtype, CPU, is_latent=True)
    generator = torch.Generator().manual_seed(3)
    for row in rows:
        tokens = row.computed + row.count
        slots = attention_batch([PagedRow(0, tokens, row.blocks)], BLOCK_TOKENS).slot_mapping
        latents = torch.randn(tokens, 1, DIM, generator=generator).to(dtype)
        cache.write(0, latents, None, slots)
    return cache


def rows_of(*sizes: tuple[int, int]) -> list[PagedRow]:
    """Return rows of (computed, count) tokens."""
    needed = [-(-sum(size) // BLOCK_TOKENS) for size in sizes]
    blocks = scattered(sum(needed) + 1, *needed)
    return [PagedRow(*size, own) for size, own in zip(sizes, blocks, strict=True)]


def attend(attention: Attention, rows: list[PagedRow], cache: KVCache, q: Tensor) -> Tensor:
    plan = attention.plan(attention_batch(rows, BLOCK_TOKENS))
    return attention.run(q, *cache.layer(0), plan, scale=DIM**-0.5)


def queries(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["numbers", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backends_agree(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    rows = rows_of((300, 1), (15, 1), (0, 1), (250, 9), (0, 70))
    cache = cache_of(rows, dtype, kv_dtype or dtype)
    q = queries(sum(row.count for row in rows), dtype)
    right = attend(ReferenceAttention(), rows, cache, q).float()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for backend in (
        TorchPagedAttention(BLOCK_TOKENS, dtype),
        NativePagedAttention(native_kernels(), BLOCK_TOKENS),
    ):
        found = attend(backend, rows, cache, q).float()
        torch.testing.assert_close(found, right, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_of_a_chunk_has_the_bits_of_a_token_alone(dtype: torch.dtype) -> None:
    (row,) = rows_of((250, 40))
    cache, q = cache_of([row], dtype, dtype), queries(40, dtype)
    backend = NativePagedAttention(native_kernels(), BLOCK_TOKENS)
    whole = attend(backend, [row], cache, q)
    for index in (0, 5, 6, 39):
        alone = PagedRow(250 + index, 1, row.blocks)
        one = attend(backend, [alone], cache, q[index : index + 1])
        assert torch.equal(one[0], whole[index])


class Gathered(TorchDispatchMode):
    """Counts the bytes that are gathered from one tensor."""

    def __init__(self, stored: Tensor) -> None:
        super().__init__()
        self._stored = stored.untyped_storage().data_ptr()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index_select.default:
            source = args[0].untyped_storage().data_ptr()
            self.num_bytes += result.nbytes * (source == self._stored)
        return result


def test_a_decode_step_at_32k_tokens_reads_each_latent_once() -> None:
    tokens = 1 << 15
    rows = rows_of((tokens - 1, 1))
    cache, q = cache_of(rows, torch.float32, torch.float32), queries(1, torch.float32)
    backend = TorchPagedAttention(BLOCK_TOKENS, torch.float32)
    with Gathered(cache.k) as gathered:
        attend(backend, rows, cache, q)
    assert gathered.num_bytes == tokens * DIM * cache.k.itemsize
