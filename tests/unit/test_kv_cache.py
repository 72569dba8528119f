"""The paged cache: tokens lie where their slots say, and zeroing touches nothing else."""

from __future__ import annotations

import torch

from worker.kv.cache import KVCache, block_bytes

SHAPE = (3, 5, 4, 2, 8)


def cache_of_ones() -> KVCache:
    cache = KVCache(*SHAPE, torch.float32, torch.device("cpu"))
    cache.k.fill_(1)
    cache.v.fill_(1)
    return cache


def test_a_fresh_cache_is_zero_and_has_the_shape_it_was_asked_for() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(*SHAPE, dtype, torch.device("cpu"))
        for tensor in (cache.k, cache.v):
            assert (tensor.shape, tensor.dtype) == (SHAPE, dtype)
            assert not tensor.any()
        assert (cache.num_blocks, cache.block_tokens) == (5, 4)


def test_tokens_are_written_where_their_slots_say_and_in_their_layer_only() -> None:
    cache = cache_of_ones()
    k, v = torch.full((2, 2, 8), 5.0), torch.full((2, 2, 8), 7.0)
    cache.write(1, k, v, torch.tensor([4 * 4 + 3, 2 * 4]))
    for tensor, value in ((cache.k, 5), (cache.v, 7)):
        assert (tensor[1, 4, 3] == value).all()
        assert (tensor[1, 2, 0] == value).all()
        assert (tensor == value).sum() == 2 * 2 * 8


def test_zeroing_a_block_clears_it_in_every_layer_and_leaves_the_others() -> None:
    cache = cache_of_ones()
    cache.zero(torch.tensor([1, 4]))
    for tensor in (cache.k, cache.v):
        assert not tensor[:, [1, 4]].any()
        assert tensor[:, [0, 2, 3]].all()


def test_zeroing_no_block_is_nothing() -> None:
    cache = cache_of_ones()
    cache.zero(torch.tensor([], dtype=torch.int64))
    assert cache.k.all()


def test_the_bytes_of_a_block_are_those_of_the_tensors() -> None:
    cache = KVCache(*SHAPE, torch.bfloat16, torch.device("cpu"))
    assert 5 * block_bytes(3, 4, 2, 8, torch.bfloat16) == cache.k.nbytes + cache.v.nbytes
