"""The selection of an indexer, and attention to what it selects, against plain loops."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.kernels import native_kernels
from tests.support.paged import PagedRow, attention_batch, scattered
from tests.support.pretended_device import DEVICE, PretendedDevice, content
from worker.attention.base import Attention
from worker.attention.native_paged import NativePagedAttention
from worker.attention.selection import Selection, largest
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.kv.cache import PagedCache, make_cache
from worker.kv.rounding import numbers_of
from worker.spec.facts import KVHeads
from worker.spec.kv_blocks import BlockLayers, LayerPlace
from worker.spec.latent import TILE_KEYS, IndexerSpec, LatentSpec
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec
from worker.startup.selection_memory import selection_bytes

HEADS, DIM, INDEX_HEADS, INDEX_DIM, BLOCK_TOKENS, TOP = 4, 32, 8, 64, 4, 10
CPU = torch.device("cpu")
SIZES = ((40, 1), (3, 1), (0, 1), (21, 9), (0, 30), (9, 2))
"""Computed and new tokens of each row."""
LAYERS = BlockLayers(
    (KVHeads(1, DIM, is_latent=True), KVHeads(1, INDEX_DIM, is_latent=True)),
    (LayerPlace(0, 0), LayerPlace(0, 1)),
)


def rows_of(*sizes: tuple[int, int]) -> list[PagedRow]:
    needed = [-(-sum(size) // BLOCK_TOKENS) for size in sizes]
    blocks = scattered(sum(needed) + 1, *needed)
    return [PagedRow(*size, own) for size, own in zip(sizes, blocks, strict=True)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(rows: list[PagedRow], dtype: torch.dtype) -> PagedCache:
    """Return a cache with latents and index keys of the rows."""
    num_blocks = 1 + max(block for row in rows for block in row.blocks)
    cache = make_cache(LAYERS, num_blocks, BLOCK_TOKENS, dtype, CPU)
    for number, row in enumerate(rows):
        tokens = row.computed + row.count
        slots = attention_batch([PagedRow(0, tokens, row.blocks)], BLOCK_TOKENS).slot_mapping
        for layer, heads in enumerate(LAYERS.heads):
            new = numbers(tokens, 1, heads.dim, seed=2 * number + layer)
            cache.write(layer, new.to(dtype) if dtype.is_floating_point else new, None, slots)
    return cache


def stored(cache: PagedCache, layer: int, row: PagedRow) -> Tensor:
    """Return what a layer stores for a row, [tokens, D] float32."""
    found = numbers_of(cache.layer(layer)[0][torch.tensor(row.blocks)], torch.float32).float()
    return found.flatten(0, 2)[: row.computed + row.count]


def right_positions(
    queries: Tensor, weights: Tensor, rows: list[PagedRow], cache: PagedCache
) -> list[list[int]]:
    """Return the positions that each token of a step sees, one token at a time."""
    found, token = [], 0
    for row in rows:
        keys = stored(cache, 1, row)
        for seen in range(row.computed + 1, row.computed + row.count + 1):
            products = (keys[:seen] @ queries[token].float().T).relu()
            scores = (products * weights[token]).sum(1).tolist()
            best = sorted(zip((-score for score in scores), range(seen), strict=True))[:TOP]
            found.append(sorted(place for _, place in best))
            token += 1
    return found


def backend_of(name: str) -> tuple[Kernels, Attention]:
    if name == "torch":
        return TorchKernels(), TorchPagedAttention(BLOCK_TOKENS, torch.float32)
    kernels = native_kernels()
    return kernels, NativePagedAttention(kernels, BLOCK_TOKENS)


@pytest.mark.parametrize("backend", ["torch", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("tile_keys", [TILE_KEYS, 64], ids=["large tiles", "small tiles"])
def test_each_token_sees_those_with_the_largest_scores(
    dtype: torch.dtype, tile_keys: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.attention.selection.TILE_KEYS", tile_keys)
    kernels, attention = backend_of(backend)
    rows = rows_of(*SIZES)
    cache, count = filled(rows, dtype), sum(row.count for row in rows)
    queries, weights = numbers(count, INDEX_HEADS, INDEX_DIM, seed=50), numbers(count, 8, seed=51)
    chosen = Selection.of(attention_batch(rows, BLOCK_TOKENS), BLOCK_TOKENS, TOP)
    assert chosen is not None
    found = chosen.positions(queries, weights, cache.layer(1)[0], kernels)
    right = right_positions(queries, weights, rows, cache)
    assert [own[: len(best)] for own, best in zip(found.tolist(), right, strict=True)] == right

    q = numbers(count, HEADS, DIM, seed=52)
    seen = chosen.attend(q, cache.layer(0)[0], found, attention, scale=DIM**-0.5)
    of_rows = [row for row in rows for _ in range(row.count)]
    for token, (row, best) in enumerate(zip(of_rows, right, strict=True)):
        latents = stored(cache, 0, row)[best]
        expected = torch.softmax(q[token] @ latents.T * DIM**-0.5, 1) @ latents
        torch.testing.assert_close(seen[token], expected, rtol=0, atol=1e-5)


def test_nothing_is_selected_in_a_step_of_short_rows() -> None:
    batch = attention_batch(rows_of((TOP - 1, 1), (0, TOP)), BLOCK_TOKENS)
    assert Selection.of(batch, BLOCK_TOKENS, TOP) is None
    assert Selection.of(batch, BLOCK_TOKENS, TOP - 1) is not None


def test_the_earlier_of_equal_scores_are_taken() -> None:
    least = float("-inf")
    scores = torch.tensor(
        [[2.0, 1, 2, 1, 1, 0], [0, 0, 0, 0, 0, 0], [5, least, least, least, least, least]]
    )
    assert largest(scores, 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert largest(scores.flip(1), 3).tolist() == [[1, 3, 5], [0, 1, 2], [0, 1, 5]]


def test_scores_that_are_no_numbers_are_the_last_to_be_taken() -> None:
    none = float("nan")
    assert largest(torch.tensor([[none, 1.0, none, -3.0], [none] * 4]), 2).tolist() == [
        [1, 3],
        [0, 1],
    ]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, as long as these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: Counter[int] = Counter()
        self._now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._add(each)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        self._now += 0 if self._alive[place] else size
        self._alive[place] += 1
        self.most = max(self.most, self._now)
        weakref.finalize(tensor, self._remove, place, size)

    def _remove(self, place: int, size: int) -> None:
        self._alive[place] -= 1
        self._now -= 0 if self._alive[place] else size


@pytest.mark.parametrize("backend", ["torch", "compiled"])
@pytest.mark.parametrize("tokens", [200, 24_000], ids=["a short text", "a long text"])
def test_a_selection_takes_the_memory_that_is_planned(tokens: int, backend: str) -> None:
    kernels, attention = backend_of(backend)
    indexer = IndexerSpec(heads=INDEX_HEADS, dim=INDEX_DIM, top=TOP)
    sizes: dict[str, Any] = {"plain": 16, "value_dim": 16, "query_rank": 32, "indexer": indexer}
    latent = LatentSpec(rank=DIM - 8, rotated=8, **sizes)
    own = AttentionSpec(
        num_heads=4, num_kv_heads=1, head_dim=DIM, rope=None, scale=1.0, latent=latent
    )
    layer = LayerSpec(attention=own, mlp=MlpSpec(intermediate=8))
    spec = ModelSpec(
        architecture="",
        vocab_size=8,
        hidden=8,
        context_tokens=tokens,
        layers=(layer,),
        norm=NormSpec(eps=1e-6),
    )
    rows, count = rows_of((tokens - 150, 150)), 150
    cache = filled(rows, torch.float32)
    queries, weights = numbers(count, INDEX_HEADS, INDEX_DIM), numbers(count, INDEX_HEADS)
    q = numbers(count, HEADS, DIM)
    batch = attention_batch(rows, BLOCK_TOKENS)
    with LiveBytes() as live:
        chosen = Selection.of(batch, BLOCK_TOKENS, TOP)
        assert chosen is not None
        found = chosen.positions(queries, weights, cache.layer(1)[0], kernels)
        chosen.attend(q, cache.layer(0)[0], found, attention, scale=1.0)
    assert live.most <= selection_bytes(spec, 4) + 4 * count * own.work_width


def test_a_gpu_selects_the_same_tokens_and_is_not_waited_for() -> None:
    kernels, attention = backend_of("torch")
    rows = rows_of(*SIZES)
    cache, count = filled(rows, torch.float32), sum(row.count for row in rows)
    inputs = (
        numbers(count, INDEX_HEADS, INDEX_DIM, seed=50),
        numbers(count, INDEX_HEADS, seed=51),
        numbers(count, HEADS, DIM, seed=52),
    )
    batch = attention_batch(rows, BLOCK_TOKENS)

    latents, keys = (cache.layer(place)[0].contiguous() for place in range(2))

    def compute(table: Tensor, *moved: Tensor) -> list[Tensor]:
        chosen = Selection.of(replace(batch, block_table=table), BLOCK_TOKENS, TOP)
        assert chosen is not None
        queries, weights, q, latents, keys = moved
        found = chosen.positions(queries, weights, keys, kernels)
        return [found, chosen.attend(q, latents, found, attention, scale=1.0)]

    right = compute(batch.block_table, *inputs, latents, keys)
    with PretendedDevice() as device:
        moved = [each.to(DEVICE) for each in (*inputs, latents, keys)]
        table = batch.block_table.to(torch.int32).to(DEVICE)
        device.forget()
        found = compute(table, *moved)
    assert device.launches > 0
    assert device.faults == []
    (positions, seen), (expected, attention_of_cpu) = map(content, found), right
    assert torch.equal(positions, expected)
    torch.testing.assert_close(seen, attention_of_cpu, rtol=0, atol=1e-5)
