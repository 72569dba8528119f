"""Compiled kernels compared with torch, for every instruction set that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from tests.support.kernels import (
    NAMES,
    assert_near,
    dequantised,
    native_kernels,
    randn,
    random_blocks,
)
from worker.checkpoint.quant_blocks import BlockKind
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedEmbedding, PackedLinear, PackedPart, pack
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.kv.rounding import ROUNDED
from worker.layers.norm import Norm
from worker.layers.rope import inverse_frequencies, rotation
from worker.spec.model_spec import Activation, MlpSpec, NormSpec, Xielu
from worker.spec.rope_config import RopeConfig

CPU = torch.device("cpu")
NORM = NormSpec(eps=1e-5)
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 7, 13, 140]
"""Numbers of rows that form one tile, tiles of unequal size, and more than one block."""

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=NAMES)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return native_kernels(request.param)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 96), (5, 576), (2, 1040)])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_norm_equals_its_reference(
    native: NativeKernels, dtype: torch.dtype, rows: int, size: int, has_delta: bool
) -> None:
    x, norm = randn(rows, size, dtype=dtype), Norm(NORM, randn(size, dtype=dtype, seed=1))
    delta = randn(rows, size, dtype=dtype, seed=2) if has_delta else None
    theirs = x.clone()
    expected = TorchKernels().add_norm(theirs, delta, norm)
    assert_near(native.add_norm(x, delta, norm), expected)
    assert torch.equal(x, theirs)


def test_a_scaled_result_is_normalised_before_it_is_added(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    x, delta = (randn(3, 96, dtype=dtype, seed=seed) for seed in (0, 1))
    norm, post_norm = (Norm(NORM, randn(96, dtype=dtype, seed=seed)) for seed in (2, 3))
    sums = [x.clone(), x.clone()]
    both: list[Kernels] = [TorchKernels(), native]
    results = [
        kernels.add_norm(total, delta.clone(), norm, post_norm=post_norm, scale=0.4)
        for kernels, total in zip(both, sums, strict=True)
    ]
    assert torch.equal(*sums)
    assert torch.equal(sums[0], x + post_norm(delta) * 0.4)
    assert_near(*results)


@pytest.mark.parametrize(("rows", "inner"), [(1, 16), (4, 1536), (9, 272)])
@pytest.mark.parametrize("is_gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_equal_their_reference(
    native: NativeKernels,
    dtype: torch.dtype,
    activation: Activation,
    is_gated: bool,
    rows: int,
    inner: int,
) -> None:
    if activation in ("clamped_swiglu", "xielu") and is_gated != (activation != "xielu"):
        pytest.skip("this activation always has a gate, or never")
    mlp = MlpSpec(
        intermediate=inner,
        activation=activation,
        is_gated=is_gated,
        alpha=1.7,
        limit=7.0,
        xielu=Xielu(1.3, 0.9, 0.5, -1e-2) if activation == "xielu" else None,
    )
    made = randn(rows, (1 + is_gated) * inner, dtype=dtype, scale=4.0)
    made[0, :3] = torch.tensor([-200.0, 200.0, 0.0])  # e^x underflows and overflows
    expected = TorchKernels().activate(made.clone(), mlp)
    assert_near(native.activate(made, mlp), expected)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (5, 1, 128)])
@pytest.mark.parametrize("rounds_kv", [False, True], ids=["as numbers", "rounded"])
def test_rotation_and_cache_write_equal_their_reference(
    native: NativeKernels,
    dtype: torch.dtype,
    rounds_kv: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    tokens = 5
    qkv = randn(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    frequencies = inverse_frequencies(RopeConfig(head_dim, 1e4))
    cos_sin = rotation(torch.tensor([0, 3, 77, 4000, 9]), frequencies, dtype)
    slots = torch.tensor([9, 4, 31, 12, 30])
    qkv[1, -head_dim:] = 0
    kv_dtype = ROUNDED if rounds_kv else dtype
    caches = [KVCache(2, 8, 4, kv_heads, head_dim, kv_dtype, CPU) for _ in range(2)]
    theirs = TorchKernels().place(qkv.clone(), cos_sin, caches[0], 1, slots)
    ours = native.place(qkv, cos_sin, caches[1], 1, slots)
    assert_near(ours, theirs)
    if not rounds_kv:
        assert_near(caches[1].k, caches[0].k)
        assert torch.equal(caches[1].v, caches[0].v)
        return
    # A number that is almost in the middle of two integers may become either.
    for one, other in zip(*(cache.layer(1) for cache in caches), strict=True):
        one, other = (each.flatten(0, 1)[slots] for each in (one, other))
        apart = one[..., :head_dim].int() - other[..., :head_dim].int()
        assert apart.abs().max() <= 1
        assert apart.count_nonzero() <= apart.numel() / 100
        scales = [each[..., head_dim:].contiguous().view(torch.float32) for each in (one, other)]
        torch.testing.assert_close(*scales, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)


@pytest.mark.parametrize("kind", BlockKind)
@pytest.mark.parametrize(("outputs", "blocks_of_row"), [(32, 1), (70, 2), (33, 5)])
def test_quantised_weights_give_the_result_of_the_dequantised_numbers(
    native: NativeKernels, dtype: torch.dtype, kind: BlockKind, outputs: int, blocks_of_row: int
) -> None:
    inputs = blocks_of_row * kind.weights
    blocks = random_blocks(kind, outputs, inputs)
    linear = PackedLinear(native, pack(native, blocks), randn(outputs, dtype=dtype))
    x = randn(max(ROWS), inputs, dtype=dtype)
    expected = x.double() @ dequantised(blocks).double().T + linear.bias.double()
    for rows in ROWS:
        assert_near(linear(x[:rows]), expected[:rows].to(dtype))


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (70, 64), (33, 544)])
def test_packed_dense_weights_give_the_result_of_their_numbers(
    native: NativeKernels, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight = randn(outputs, inputs, dtype=dtype)
    linear = PackedLinear(native, pack(native, weight))
    x = randn(max(ROWS), inputs, dtype=dtype)
    expected = x.double() @ weight.double().T
    for rows in ROWS:
        assert_near(linear(x[:rows]), expected[:rows].to(dtype))
        assert_near(linear.to_float(x[:rows]), expected[:rows].float())


@pytest.mark.parametrize("kind", BlockKind)
def test_packed_weights_equal_the_numbers_of_the_file(
    native: NativeKernels, dtype: torch.dtype, kind: BlockKind
) -> None:
    """The identity matrix as input gives the weights themselves as output."""
    blocks = random_blocks(kind, 40, 512)
    linear = PackedLinear(native, pack(native, blocks))
    weights = linear.to_float(torch.eye(512, dtype=dtype)).T
    torch.testing.assert_close(weights, dequantised(blocks), rtol=0, atol=1e-8)


@pytest.mark.usefixtures("threads")
def test_parts_of_different_types_give_the_results_of_separate_matrices(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    parts: list[PackedPart] = [
        random_blocks(BlockKind.Q2_K, 70, 512),
        randn(32, 512, dtype=dtype),
        random_blocks(BlockKind.Q4_1, 16, 512),
    ]
    bias, x = randn(118, dtype=dtype), randn(13, 512, dtype=dtype)
    together = PackedLinear(native, pack(native, *parts), bias)(x)
    separate = [
        PackedLinear(native, pack(native, part), rows)(x)
        for part, rows in zip(parts, torch.split(bias, [70, 32, 16]), strict=True)
    ]
    assert torch.equal(together, torch.cat(separate, dim=1))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", BlockKind)
def test_a_packed_embedding_has_the_rows_of_its_matrix(
    native: NativeKernels, dtype: torch.dtype, kind: BlockKind
) -> None:
    blocks, numbers = random_blocks(kind, 40, 512), randn(34, 512, dtype=dtype)
    table = PackedEmbedding(native, pack(native, blocks, numbers), dtype)
    ids = torch.tensor([73, 0, 39, 40, 31, 32, 0])
    whole = torch.cat([dequantised(blocks), numbers.float()])
    torch.testing.assert_close(table(ids), whole[ids].to(dtype), rtol=2**-7, atol=1e-7)
    assert torch.equal(table(torch.arange(40, 74)), numbers)
    with pytest.raises(IndexError, match="vocabulary"):
        table(torch.tensor([74]))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", [*BlockKind, None])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    native: NativeKernels, dtype: torch.dtype, kind: BlockKind | None
) -> None:
    if kind is None:
        matrix = pack(native, randn(70, 320, dtype=dtype))
    else:
        matrix = pack(native, random_blocks(kind, 70, 512 if kind.weights > 32 else 320))
    linear, x = PackedLinear(native, matrix), randn(140, matrix.inputs, dtype=dtype)
    together = linear(x)
    for row in (0, 11, 12, 131, 132, 139):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    assert torch.equal(linear(x[:17]), together[:17])


def test_extreme_scales_are_unpacked_exactly(native: NativeKernels, dtype: torch.dtype) -> None:
    blocks = random_blocks(BlockKind.Q4_0, 32, 32)
    scales = torch.tensor([2.0**-24, 3 * 2.0**-24, 1023 * 2.0**-24, 2.0**-14, -4092.0, 0.0])
    halves = scales.half().repeat(6)[:32].numpy().view("uint8").reshape(32, 1, 2)
    blocks.raw[:, :, :2] = halves
    assert blocks.is_sound
    linear = PackedLinear(native, pack(native, blocks))
    ours = linear.to_float(torch.eye(32, dtype=dtype)).T
    torch.testing.assert_close(ours, dequantised(blocks), rtol=0, atol=0)


def test_extreme_exponents_are_unpacked_exactly(native: NativeKernels, dtype: torch.dtype) -> None:
    blocks = random_blocks(BlockKind.MXFP4, 32, 32)
    blocks.raw[:, 0, 0] = [0, 1, 2, 3, 127, 200, 250, 0] * 4  # 0 and 1 give subnormal numbers
    assert blocks.is_sound
    linear = PackedLinear(native, pack(native, blocks))
    ours = linear.to_float(torch.eye(32, dtype=dtype)).T
    torch.testing.assert_close(ours, dequantised(blocks), rtol=0, atol=0)


def test_arguments_that_would_crash_a_kernel_are_refused(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    linear = PackedLinear(native, pack(native, randn(32, 64, dtype=dtype)))
    with pytest.raises(ValueError, match=r"must be \[N, 64\]"):
        linear(randn(2, 32, dtype=dtype))
    with pytest.raises(ValueError, match="contiguous"):
        linear(randn(64, 2, dtype=dtype).T)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        pack(native, randn(32, 40, dtype=dtype))
    with pytest.raises(ValueError, match="kernels support"):
        native.activate(randn(2, 32, dtype=torch.float64), MlpSpec(intermediate=16))
