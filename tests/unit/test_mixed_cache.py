"""Caches whose layers have different heads: each block holds all layers of its entry, and the
kernels read and write it as they do the cache of equal layers, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.kernels import FLOAT_NAMES, native_kernels
from tests.support.paged import case_of
from worker.attention.base import Attention
from worker.attention.native_paged import NativePagedAttention
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache, MixedCache, PagedCache, cache_bytes, make_cache
from worker.kv.rounding import ROUNDED
from worker.layers.rope import rotation
from worker.spec.facts import KVHeads
from worker.spec.kv_blocks import BlockLayers, LayerPlace, layer_places

CPU = torch.device("cpu")
WIDE, NARROW = KVHeads(1, 64), KVHeads(2, 32)
HEADS = (KVHeads(2, 32), KVHeads(3, 64), KVHeads(1, 32))
LAYERS = BlockLayers(HEADS, tuple(LayerPlace(0, row) for row in range(3)))
BLOCKS, BLOCK_TOKENS = 5, 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, ROUNDED], ids=str)


def mixed(dtype: torch.dtype = torch.float32) -> PagedCache:
    cache = make_cache(LAYERS, BLOCKS, BLOCK_TOKENS, dtype, CPU)
    assert isinstance(cache, MixedCache)
    return cache


def numbers(tokens: int, heads: KVHeads, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads.count, heads.dim, generator=generator)


def attention_of(name: str, block_tokens: int, dtype: torch.dtype) -> Attention:
    if name == "torch":
        return TorchPagedAttention(block_tokens, dtype)
    return NativePagedAttention(native_kernels(name), block_tokens)


# ---- which block stores which layers
def test_layers_with_a_window_share_blocks_as_far_as_those_without_one_have_room() -> None:
    windows = [20, 20, None, 20, None, 20]
    heads = [NARROW, NARROW, WIDE, NARROW, WIDE, NARROW]
    places = layer_places(windows, heads)
    assert places == [(1, 0), (1, 1), (0, 0), (2, 0), (0, 1), (2, 1)]
    larger = [
        KVHeads(4, 32) if window else each for window, each in zip(windows, heads, strict=True)
    ]
    assert [place.entry for place in layer_places(windows, larger)] == [1, 2, 0, 3, 0, 4]


def test_a_layer_that_is_larger_than_all_without_a_window_has_a_block_of_its_own() -> None:
    layers = BlockLayers(
        (KVHeads(1, 32), KVHeads(4, 32), KVHeads(4, 32)),
        tuple(layer_places([None, 20, 20], [KVHeads(1, 32), KVHeads(4, 32), KVHeads(4, 32)])),
    )
    assert (layers.num_entries, layers.width) == (3, 128)


@DTYPES
def test_a_block_is_as_large_as_its_largest_entry(dtype: torch.dtype) -> None:
    heads = (KVHeads(2, 64), KVHeads(2, 32), KVHeads(1, 32))
    layers = BlockLayers(heads, (LayerPlace(0, 0), LayerPlace(1, 0), LayerPlace(1, 1)))
    cache = make_cache(layers, BLOCKS, BLOCK_TOKENS, dtype, CPU)
    assert cache.rows.nbytes == cache_bytes(layers, BLOCKS, BLOCK_TOKENS, dtype)
    full = sum(tensor.nbytes for tensor in cache.layer(0))
    others = sum(tensor.nbytes for layer in (1, 2) for tensor in cache.layer(layer))
    assert cache.rows.nbytes == max(full, others)
    assert cache.num_entries == 2


def test_layers_with_equal_heads_have_the_plain_cache() -> None:
    layers = BlockLayers((NARROW,) * 3, LAYERS.places)
    assert isinstance(make_cache(layers, BLOCKS, BLOCK_TOKENS, torch.float32, CPU), KVCache)


# ---- reading and writing
@DTYPES
def test_each_number_has_one_place_and_the_rows_hold_all_of_them(dtype: torch.dtype) -> None:
    cache = mixed(dtype)
    for layer, heads in enumerate(HEADS):
        assert cache.heads(layer) == heads
        for tensor in cache.layer(layer):
            assert not tensor.any()
            tensor += 1
    every = [tensor for layer in range(3) for tensor in cache.layer(layer)]
    assert all((tensor == 1).all() for tensor in every), "two layers share memory"
    ones = torch.ones(1, dtype=dtype).view(torch.uint8)
    assert torch.equal(
        cache.rows.view(-1, len(ones)), ones.expand(sum(map(Tensor.numel, every)), -1)
    )
    cache.zero(torch.tensor([1, 4]))
    for tensor in every:
        assert not tensor[[1, 4]].any()
        assert tensor[[0, 2, 3]].all()


@DTYPES
@pytest.mark.parametrize("mapping", [[4 * 4 + 3, 2 * 4, 9], [7, -1, 19]])
def test_tokens_are_written_as_into_a_plain_cache(dtype: torch.dtype, mapping: list[int]) -> None:
    cache, number = mixed(dtype), torch.float32 if dtype == ROUNDED else dtype
    k, v = ([numbers(3, heads, seed).to(number) for heads in HEADS] for seed in (1, 2))
    for layer in range(len(HEADS)):
        cache.write(layer, k[layer], v[layer], torch.tensor(mapping))
    for layer, heads in enumerate(HEADS):
        plain = KVCache(1, BLOCKS, BLOCK_TOKENS, heads.count, heads.dim, dtype, CPU)
        plain.write(0, k[layer], v[layer], torch.tensor(mapping))
        for one, other in zip(cache.layer(layer), plain.layer(0), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["torch", *FLOAT_NAMES])
@DTYPES
def test_heads_are_placed_as_into_a_plain_cache(name: str, dtype: torch.dtype) -> None:
    kernels: Kernels = TorchKernels() if name == "torch" else native_kernels(name)
    number = torch.float32 if dtype == ROUNDED else dtype
    cache, mapping = mixed(dtype), torch.tensor([4 * 4 + 3, 2 * 4, 9])
    for layer, heads in enumerate(HEADS):
        plain = KVCache(1, BLOCKS, BLOCK_TOKENS, heads.count, heads.dim, dtype, CPU)
        qkv = numbers(3, KVHeads(4 + 2 * heads.count, heads.dim), layer).to(number).flatten(1)
        turn = rotation(torch.tensor([3, 0, 900]), torch.rand(heads.dim // 2), number)
        ours = kernels.place(qkv.clone(), turn, cache, layer, mapping)
        assert torch.equal(ours, kernels.place(qkv.clone(), turn, plain, 0, mapping))
        for one, other in zip(cache.layer(layer), plain.layer(0), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["torch", *FLOAT_NAMES])
@DTYPES
def test_attention_reads_blocks_between_which_other_layers_lie(
    name: str, dtype: torch.dtype
) -> None:
    number = torch.float32 if dtype == ROUNDED else dtype
    case = case_of((60, 1), (300, 1), (5, 70), dtype=number, kv_dtype=dtype, zeroed=True)
    attention = attention_of(name, case.block_tokens, number)
    plain, other = case.cache(), KVHeads(1, 32)
    layers = BlockLayers((other, plain.heads(0), other), LAYERS.places)
    cache = make_cache(layers, plain.num_blocks, case.block_tokens, dtype, CPU)
    cache.rows.fill_(255)  # not a number
    for ours, theirs in zip(cache.layer(1), plain.layer(0), strict=True):
        assert not ours.is_contiguous()
        ours.copy_(theirs)
    plan = attention.plan(case.batch())
    found = attention.run(case.queries(), *cache.layer(1), plan)
    assert found.isfinite().all()
    assert torch.equal(found, attention.run(case.queries(), *plain.layer(0), plan))
