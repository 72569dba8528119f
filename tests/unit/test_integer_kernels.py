"""Linears that round their inputs to eight bits, compared with torch, for every instruction set
that this machine can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.kernels import (
    NAMES,
    assert_near,
    dequantised,
    native_kernels,
    randn,
    random_blocks,
)
from worker.checkpoint.quant_blocks import BlockKind
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedLinear, PackedPart, pack

DTYPES = [torch.float32, torch.bfloat16]
GROUP = 32
REFINED_OF = 12
"""One group of this many is refined."""
MOST_ROWS = 140
"""More than one block of rows."""

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=NAMES)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return native_kernels(request.param)


def rounded(x: Tensor) -> Tensor:
    """Return x [N, inputs] as the kernels round it, in float64: each group of 32 numbers to eight
    bits, and the remainders of the groups with the greatest scales as well."""
    groups = x.float().view(len(x), -1, GROUP)
    integers, scales = to_eight_bits(groups)
    whole = integers * scales.double()
    num_refined = -(-groups.shape[1] // REFINED_OF)
    order = scales.squeeze(-1).sort(dim=1, descending=True, stable=True).indices[:, :num_refined]
    is_refined = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, order, True)
    removed = groups.double() - whole
    integers, scales = to_eight_bits(removed.float())
    remainders = integers * scales.double() * is_refined.unsqueeze(-1)
    return (whole + remainders).view(x.shape)


def to_eight_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers of groups [N, groups, GROUP] float32, in float64, and the scales
    [N, groups, 1] float32."""
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # `127 / largest` rounds twice
    products = groups.double() * inverse.double()
    return products.nan_to_num(0, posinf=0, neginf=0).round(), largest / 127


def odd_rows(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return [count, inputs] random numbers, in which some groups are zero or tiny, have one large
    number, or become only the integers 127 and -127."""
    x = randn(count, inputs, dtype=dtype)
    groups = x.view(-1, GROUP)
    groups[1::7] = 0
    groups[2::7] *= 1e-38
    groups[3::7, 5] = 300
    groups[4::7] = groups[4::7].sign() + 0.0
    return x


@pytest.mark.parametrize("kind", BlockKind)
@pytest.mark.parametrize(("outputs", "blocks_of_row"), [(32, 1), (70, 5), (32, 30)])
def test_integers_give_the_result_of_the_rounded_inputs(
    native: NativeKernels, dtype: torch.dtype, kind: BlockKind, outputs: int, blocks_of_row: int
) -> None:
    blocks = random_blocks(kind, outputs, blocks_of_row * kind.weights)
    linear = PackedLinear(native, pack(native, blocks, rounds_inputs=True))
    x = odd_rows(MOST_ROWS, blocks.inputs, dtype)
    weights = dequantised(blocks).double()
    near = rounded(x)
    expected = near @ weights.T
    size = near.abs() @ weights.abs().T  # sums of the magnitudes
    for rows in (1, 2, 7, 13, MOST_ROWS):
        error = (linear.to_float(x[:rows]).double() - expected[:rows]).abs()
        # A minimum may cancel most of a sum of integers, so errors are relative to more than this.
        assert (error <= 1e-5 * size[:rows] + 1e-30).all()


@pytest.mark.parametrize("kind", BlockKind)
def test_rows_of_integers_are_multiplied_exactly(
    native: NativeKernels, dtype: torch.dtype, kind: BlockKind
) -> None:
    """Rounding changes no group that is zero, or that has only integers up to 127 and contains 127.
    No sum of products overflows, even if all inputs are 127 or -127."""
    blocks = random_blocks(kind, 40, 512)
    linear = PackedLinear(native, pack(native, blocks, rounds_inputs=True))
    plain = PackedLinear(native, pack(native, blocks))
    identity = torch.eye(512, dtype=dtype) * 127
    torch.testing.assert_close(
        linear.to_float(identity), plain.to_float(identity), rtol=1e-6, atol=1e-7
    )
    largest = torch.full((1, 512), 127.0, dtype=dtype)
    for x in (largest, -largest):
        expected = x.double() @ dequantised(blocks).double().T
        size = x.abs().double() @ dequantised(blocks).double().abs().T
        assert ((linear.to_float(x).double() - expected).abs() <= 1e-6 * size).all()


def test_parts_that_are_not_quantised_get_inputs_that_are_not_rounded(
    native: NativeKernels, dtype: torch.dtype
) -> None:
    parts: list[PackedPart] = [
        random_blocks(BlockKind.Q2_K, 70, 512),
        randn(32, 512, dtype=dtype),
        random_blocks(BlockKind.Q4_1, 16, 512),
    ]
    x = randn(13, 512, dtype=dtype)
    together = PackedLinear(native, pack(native, *parts, rounds_inputs=True))(x)
    separate = [PackedLinear(native, pack(native, part, rounds_inputs=True))(x) for part in parts]
    assert torch.equal(together, torch.cat(separate, dim=1))
    assert_near(separate[1], PackedLinear(native, pack(native, parts[1]))(x))


@pytest.mark.parametrize("kind", BlockKind)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    native: NativeKernels, dtype: torch.dtype, kind: BlockKind
) -> None:
    matrix = pack(native, random_blocks(kind, 70, 1536), rounds_inputs=True)
    linear, x = PackedLinear(native, matrix), odd_rows(MOST_ROWS, 1536, dtype)
    together = linear(x)
    for row in (0, 11, 12, 131, 132, 139):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])
    assert torch.equal(linear(x[:17]), together[:17])


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "places", [[40], [1500], [*range(0, 1536, 100)]], ids=["one group", "the last group", "many"]
)
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(
    native: NativeKernels, dtype: torch.dtype, odd: float, places: list[int]
) -> None:
    """With many places, more groups are not finite than are refined."""
    linear = PackedLinear(
        native, pack(native, random_blocks(BlockKind.Q4_1, 32, 1536), rounds_inputs=True)
    )
    x = randn(3, 1536, dtype=dtype)
    good = linear(x)
    x[1, places] = odd
    result = linear(x)
    assert not result[1].isfinite().any()
    assert torch.equal(result[::2], good[::2])
