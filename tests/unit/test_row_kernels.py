"""Compiled operations on the numbers of each row: they equal torch's, and a row has the same bits
beside any others, for every instruction set that this machine can run."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels import FLOAT_NAMES, assert_near, native_kernels, randn
from worker.kernels.native import NativeKernels


@pytest.fixture(params=FLOAT_NAMES)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return native_kernels(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 5, 16, 130])
def test_sigmoids_equal_their_reference_and_do_not_depend_on_the_rows(
    native: NativeKernels, dtype: torch.dtype, width: int
) -> None:
    wide = randn(9, width + 7, dtype=dtype, scale=4.0)
    wide[0, 0], wide[1, 0] = -200.0, 200.0
    x = wide[:, :width]  # its rows are not adjacent
    found = native.sigmoid(x)
    assert_near(found, x.sigmoid())
    for row in range(len(x)):
        assert torch.equal(native.sigmoid(x[row:][:1]), found[row:][:1])


def test_capped_logits_equal_their_reference_and_do_not_depend_on_the_rows(
    native: NativeKernels,
) -> None:
    logits = randn(7, 133, dtype=torch.float32, scale=60.0)
    found = native.cap_logits(logits.clone(), 30.0)
    assert_near(found, 30.0 * torch.tanh(logits / 30.0))
    for row in range(len(logits)):
        one = logits[row:][:1].clone()
        assert torch.equal(native.cap_logits(one, 30.0), found[row:][:1])
