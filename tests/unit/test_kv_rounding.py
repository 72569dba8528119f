"""Tests of worker/kv/rounding.py, which rounds keys and values to eight bits with torch.

test_kernels.py and test_attention.py use it as the reference for the compiled kernels.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.kv.rounding import ROUNDED, head_bytes, numbers_of, round_heads, stored_width

SCALES = st.floats(-30, 30)
"""Heads are multiplied by ten to the power of one of these numbers."""


def test_a_head_is_integers_and_then_its_scale() -> None:
    stored = round_heads(torch.tensor([-254.0, 3.0, 0.9, 0.0]))
    assert stored.tolist() == [-127, 2, 0, 0, *(0, 0, 0, 0x40)]  # 3 / 2 to even; 2.0 in float32
    assert numbers_of(stored, torch.float32).tolist() == [-254.0, 4.0, 0.0, 0.0]


@given(st.integers(0, 1 << 30), SCALES, st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_number_is_off_by_half_a_scale_at_most(
    seed: int, power: float, dtype: torch.dtype
) -> None:
    heads = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(seed)) * 10**power
    heads = heads.to(dtype).float()
    back = numbers_of(round_heads(heads), torch.float32)
    most = heads.abs().amax(-1, keepdim=True)
    assert ((back - heads).abs() <= most / 127 * 0.5001).all()
    at = heads.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(back.gather(-1, at), heads.gather(-1, at), rtol=1e-6, atol=0)


def test_a_head_depends_on_no_other() -> None:
    heads = torch.randn(4, 3, 32) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    together = round_heads(heads)
    assert all(
        torch.equal(round_heads(heads[i, j]), together[i, j]) for i in range(4) for j in range(3)
    )


def test_zeros_are_kept_and_fresh_memory_reads_as_zeros() -> None:
    zeros = torch.zeros(2, 8)
    assert torch.equal(numbers_of(round_heads(zeros), torch.float32), zeros)
    fresh = torch.zeros(2, stored_width(8, ROUNDED), dtype=ROUNDED)
    assert torch.equal(numbers_of(fresh, torch.float32), zeros)


@pytest.mark.parametrize("wild", ["nan", "inf", "-inf"])
def test_a_head_that_is_not_finite_stays_so(wild: str) -> None:
    head = torch.ones(16)
    head[3] = float(wild)
    assert not numbers_of(round_heads(head), torch.float32).isfinite().any()


def test_a_cache_in_the_models_dtype_is_read_as_it_is() -> None:
    numbers = torch.randn(2, 8).bfloat16()
    assert numbers_of(numbers, torch.bfloat16) is numbers
    assert (head_bytes(64, torch.bfloat16), head_bytes(64, ROUNDED)) == (128, 68)
