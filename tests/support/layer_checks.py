"""Checks of the operations between linears, and shapes for them.

In float32, a result must be that of float64 up to the roundings of float32. In bfloat16 it must
have the roundings of the torch kernels, so almost all numbers must be the same.

Legend in worker/kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.support.kernels import randn
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.layers.norm import Norm
from worker.layers.rope import CosSin, inverse_frequencies, rotation
from worker.spec.model_spec import Activation, MlpSpec, NormSpec, Xielu
from worker.spec.rope_config import RopeConfig

CPU = torch.device("cpu")
MAX_ERROR = 1e-5
"""Largest error of a result in float32, relative to the norm of the exact one."""
POISON = 77.0
"""Content of a cache before the test: no kernel computes this number."""
MARGIN = 64
"""Number of columns on each side of the rows that kernels compute with."""
BLOCK_TOKENS, NUM_BLOCKS, LAYER = 4, 20, 1


def assert_exact(ours: Tensor, truth: Tensor) -> None:
    """Check a result in float32 against the exact one in float64."""
    assert ours.shape == truth.shape
    assert (ours.double() - truth).norm() <= MAX_ERROR * truth.norm()


def assert_same_roundings(ours: Tensor, theirs: Tensor) -> None:
    """Check that two results are equal. A few numbers may differ by one rounding, because sums may
    be added up in another order."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if theirs.numel():
        unit = torch.finfo(theirs.dtype).eps
        atol = unit * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=unit, atol=atol)
        assert (ours != theirs).sum() <= max(2, theirs.numel() // 50)


def wide_rows(rows: int, size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return rows [rows, size] that are a slice of more and wider ones, as the parts of qkv are."""
    wide = randn(rows + 2, size + 2 * MARGIN, dtype=dtype, seed=seed, scale=2.0)
    return wide[1:-1, MARGIN:-MARGIN]


@contextmanager
def unchanged_margins(rows: Tensor) -> Iterator[None]:
    """Check that the `with` block changes only the slice that `wide_rows` has returned."""
    whole = torch.empty(0, dtype=rows.dtype).set_(rows.untyped_storage())
    before = whole.clone()
    yield
    before.as_strided(rows.shape, rows.stride(), rows.storage_offset()).copy_(rows)
    assert torch.equal(before, whole)


# ---- Norms.
@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormCase:
    """Arguments of `Kernels.add_norm`. A float32 weight is that of a norm with an offset."""

    rows: int
    size: int
    has_delta: bool = True
    norm: bool = True
    post_norm: bool = False
    offset: float = 0.0
    scale: float = 1.0


ADD_NORMS = [
    AddNormCase(rows=1, size=96),
    AddNormCase(rows=0, size=96),
    AddNormCase(rows=5, size=576),
    AddNormCase(rows=3, size=1000, scale=0.4),
    AddNormCase(rows=2, size=96, has_delta=False),
    AddNormCase(rows=30, size=48, norm=False),
    AddNormCase(rows=4, size=200, norm=False, post_norm=True, scale=0.22),
    AddNormCase(rows=7, size=160, post_norm=True, offset=1.0),
    AddNormCase(rows=3, size=2048, offset=1.0),
]


def random_norm(size: int, dtype: torch.dtype, seed: int, *, offset: float = 0.0) -> Norm:
    weight = randn(size, dtype=torch.float32 if offset else dtype, seed=seed) * 0.3 + 1
    return Norm(NormSpec(eps=1e-3, offset=offset), weight)


def check_add_norm(kernels: Kernels, case: AddNormCase, dtype: torch.dtype) -> None:
    x = wide_rows(case.rows, case.size, dtype, seed=1)
    delta = wide_rows(case.rows, case.size, dtype, seed=2) if case.has_delta else None
    norm = random_norm(case.size, dtype, 3, offset=case.offset) if case.norm else None
    post_norm = random_norm(case.size, dtype, 4, offset=case.offset) if case.post_norm else None
    total = x.clone()
    expected = TorchKernels().add_norm(
        total, None if delta is None else delta.clone(), norm, post_norm=post_norm, scale=case.scale
    )
    exact = x.double()
    if delta is not None:
        exact = exact + case.scale * _rms(delta.double(), post_norm)
    with unchanged_margins(x):
        result = kernels.add_norm(x, delta, norm, post_norm=post_norm, scale=case.scale)
    if dtype == torch.float32:
        assert_exact(x, exact)
        assert_exact(result, _rms(exact, norm))
    else:
        assert_same_roundings(x, total)
        assert_same_roundings(result, expected)


def _rms(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    mean = x.square().mean(-1, keepdim=True)
    return x / (mean + norm.spec.eps).sqrt() * norm.weight.double()


# ---- Queries, keys and values.
@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCase:
    """Arguments of `Kernels.place`.

    width      number of items of a head that are rotated; 0: no rotation
    qk_norm    size of the parts that have a norm: "head", "projection" or "" for none
    padding    number of tokens without a slot
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    qk_norm: str = ""
    offset: float = 0.0
    padding: int = 0


PLACES = [
    PlaceCase(tokens=1, heads=9, kv_heads=3, head_dim=64, width=64),
    PlaceCase(tokens=0, heads=4, kv_heads=4, head_dim=64, width=64),
    PlaceCase(tokens=5, heads=8, kv_heads=2, head_dim=128, width=128, qk_norm="head", padding=2),
    PlaceCase(tokens=3, heads=40, kv_heads=8, head_dim=128, width=128, qk_norm="head"),
    PlaceCase(tokens=4, heads=4, kv_heads=1, head_dim=256, width=256, qk_norm="head", offset=1.0),
    PlaceCase(tokens=6, heads=4, kv_heads=4, head_dim=80, width=32, padding=6),
    PlaceCase(tokens=6, heads=6, kv_heads=2, head_dim=96, width=24, qk_norm="head", padding=1),
    PlaceCase(tokens=14, heads=2, kv_heads=1, head_dim=64, width=0, padding=3),
    PlaceCase(tokens=2, heads=2, kv_heads=2, head_dim=64, width=0, qk_norm="head"),
    PlaceCase(tokens=4, heads=6, kv_heads=2, head_dim=64, width=64, qk_norm="projection"),
]


def random_place(seed: int) -> PlaceCase:
    """Return a case of a random shape."""
    random = Random(seed)
    kv_heads, head_dim = random.randint(1, 5), random.choice([64, 72, 80, 96, 112, 128, 192])
    return PlaceCase(
        tokens=random.randint(1, 5),
        heads=kv_heads * random.randint(1, 5),
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=2 * random.randint(0, head_dim // 2),
        qk_norm=random.choice(["", "head"]),
        padding=random.randint(0, 1),
    )


def check_place(kernels: Kernels, case: PlaceCase, dtype: torch.dtype) -> None:
    kv_heads, head_dim = case.kv_heads, case.head_dim
    qkv = wide_rows(case.tokens, (case.heads + 2 * kv_heads) * head_dim, dtype, seed=5)
    by_head = case.qk_norm == "head"
    q_norm, k_norm = (
        random_norm(head_dim * (1 if by_head else heads), dtype, heads, offset=case.offset)
        if case.qk_norm
        else None
        for heads in (case.heads, kv_heads)
    )
    cos_sin = random_turn(case.tokens, case.width, dtype) if case.width else None
    slots = random_slots(case.tokens, case.padding)
    ours, theirs = (poisoned_cache(case, dtype) for _ in range(2))
    norms = {"q_norm": q_norm, "k_norm": k_norm}
    expected = TorchKernels().place(qkv.clone(), cos_sin, theirs, LAYER, slots, **norms)
    q, k, v = (
        part.double()
        for part in qkv.clone()
        .view(case.tokens, case.heads + 2 * kv_heads, head_dim)
        .split([case.heads, kv_heads, kv_heads], 1)
    )
    with unchanged_margins(qkv):
        result = kernels.place(qkv, cos_sin, ours, LAYER, slots, **norms)
    assert result.shape == (case.tokens, case.heads, head_dim)
    if dtype != torch.float32:
        assert_same_roundings(result, expected)
        assert_same_roundings(ours.k, theirs.k)
        assert torch.equal(ours.v, theirs.v)
        return
    assert_exact(result, _turned(_rms_heads(q, q_norm), cos_sin))
    stored = torch.stack([_turned(_rms_heads(k, k_norm), cos_sin), v])
    for cache in (ours, theirs):
        _assert_stored(cache, stored, slots)


def _assert_stored(cache: KVCache, stored: Tensor, slots: Tensor) -> None:
    """Check that a cache holds stored [2, T, H_kv, D], keys and values. Everything else must be
    unchanged."""
    found = torch.stack([cache.k, cache.v]).flatten(2, 3)
    where = slots[slots >= 0]
    assert_exact(found[:, LAYER, where], stored[:, slots >= 0])
    found[:, LAYER, where] = POISON
    assert (found == POISON).all()


def _rms_heads(heads: Tensor, norm: Norm | None) -> Tensor:
    if norm is None or norm.weight.numel() == heads.shape[-1]:
        return _rms(heads, norm)
    return _rms(heads.flatten(1), norm).view(heads.shape)


def _turned(heads: Tensor, cos_sin: CosSin | None) -> Tensor:
    if cos_sin is None:
        return heads
    cos, sin = (each.double() for each in cos_sin)
    half = cos.shape[-1] // 2
    first, second, rest = heads.tensor_split((half, 2 * half), -1)
    c, s = cos[..., :half], sin[..., half:]
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1)


def random_turn(tokens: int, width: int, dtype: torch.dtype) -> CosSin:
    positions = torch.arange(tokens) * 997 % 4001
    return rotation(positions, inverse_frequencies(RopeConfig(width, 1e4)), dtype)


def random_slots(tokens: int, padding: int) -> Tensor:
    """Return distinct slots outside block 0. `padding` of them, not in a row, are -1."""
    order = torch.randperm(
        BLOCK_TOKENS * (NUM_BLOCKS - 1), generator=torch.Generator().manual_seed(8)
    )
    slots = order[:tokens] + BLOCK_TOKENS
    slots[torch.randperm(tokens, generator=torch.Generator().manual_seed(9))[:padding]] = -1
    return slots


def poisoned_cache(case: PlaceCase, dtype: torch.dtype) -> KVCache:
    cache = KVCache(2, NUM_BLOCKS, BLOCK_TOKENS, case.kv_heads, case.head_dim, dtype, CPU)
    cache.k.fill_(POISON)
    cache.v.fill_(POISON)
    return cache


# ---- Activations.
SIZES: dict[Activation, int] = {"silu": 1536, "gelu": 272, "gelu_tanh": 1100, "relu2": 700}
MLPS = [
    *(
        MlpSpec(intermediate=size, activation=activation, is_gated=is_gated)
        for activation, size in SIZES.items()
        for is_gated in (True, False)
    ),
    MlpSpec(intermediate=1030, activation="clamped_swiglu", alpha=1.7, limit=2.0),
    MlpSpec(
        intermediate=600,
        activation="xielu",
        is_gated=False,
        xielu=Xielu(positive=1.3, negative=0.9, beta=0.5, eps=-1e-2),
    ),
]


def check_activate(kernels: Kernels, mlp: MlpSpec, dtype: torch.dtype, rows: int = 3) -> None:
    size = mlp.intermediate
    inner = wide_rows(rows, 2 * size if mlp.is_gated else size, dtype, seed=6)
    if rows:
        inner[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -9.0])  # e^x underflows and overflows
    expected, exact = TorchKernels().activate(inner.clone(), mlp), _activated(inner.double(), mlp)
    result = kernels.activate(inner, mlp)
    assert result.is_contiguous()
    if dtype == torch.float32:
        assert_exact(result, exact)
    elif mlp.activation != "clamped_swiglu":
        assert_same_roundings(result, expected)
    else:  # torch rounds the result of each operation, and the kernels only the last one
        assert_same_roundings(result, exact.to(dtype))


def _activated(inner: Tensor, mlp: MlpSpec) -> Tensor:
    gate, up = inner.chunk(2, -1) if mlp.is_gated else (inner, torch.ones(()))
    if mlp.activation == "clamped_swiglu":
        gate = gate.clamp(max=mlp.limit)
        up = up.clamp(-mlp.limit, mlp.limit) + 1
        return gate * torch.sigmoid(mlp.alpha * gate) * up
    if (own := mlp.xielu) is not None:
        below = own.negative * (torch.expm1(gate.clamp(max=own.eps)) - gate)
        return torch.where(gate > 0, own.positive * gate**2, below) + own.beta * gate
    return EXACT[mlp.activation](gate) * up


EXACT: dict[Activation, Any] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "relu2": lambda x: x.clamp(min=0).square(),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


# ---- Rotary angles.
def check_cos_sin(kernels: Kernels, width: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 5, 4095, 131_071, 1_000_003])
    inv_freq = inverse_frequencies(RopeConfig(width, 1e4))
    cos, sin = kernels.cos_sin(positions, inv_freq, dtype, 1.25)
    expected = rotation(positions, inv_freq, dtype, 1.25)
    if dtype == torch.float32:
        angles = (positions[:, None].float() * inv_freq).double()[:, None]
        c, s = 1.25 * angles.cos(), 1.25 * angles.sin()
        assert_exact(cos, torch.cat([c, c], -1))
        assert_exact(sin, torch.cat([-s, s], -1))
    else:
        assert_same_roundings(cos, expected[0])
        assert_same_roundings(sin, expected[1])
