"""The compiled kernels measure the parts of a step while `timed_kernels` is active."""

from __future__ import annotations

import ctypes
from time import perf_counter

import pytest
import torch

from protocol.tools.bench import PARTS
from tests.support.kernels import native_kernels, randn
from worker.benchmark.parts import PartsClock, timed_kernels
from worker.kernels.packed import PackedLinear, pack


@pytest.fixture
def linear() -> PackedLinear:
    kernels = native_kernels()
    return PackedLinear(kernels, pack(kernels, randn(64, 128, dtype=torch.float32)))


def test_the_time_of_a_linear_counts_for_linears_and_no_time_is_lost(linear: PackedLinear) -> None:
    clock, x = PartsClock(), randn(4, 128, dtype=torch.float32)
    with timed_kernels(linear.kernels, clock), clock.part("overhead"):
        started = perf_counter()
        linear(x)
        elapsed = perf_counter() - started
    assert clock.seconds.keys() == set(PARTS)
    assert clock.seconds["linears"] > 0
    assert clock.seconds["attention"] == clock.seconds["head"] == clock.seconds["other layers"] == 0
    assert sum(clock.seconds.values()) >= elapsed > clock.seconds["linears"]


def test_afterwards_the_kernels_measure_nothing(linear: PackedLinear) -> None:
    times = (ctypes.c_int64 * len(PARTS))()
    library, x = linear.kernels.library, randn(4, 128, dtype=torch.float32)
    library.time_parts(ctypes.addressof(times))
    clock = PartsClock()
    with timed_kernels(linear.kernels, clock), clock.part("overhead"):
        linear(x)
    assert linear.kernels.library is library
    linear(x)
    assert not any(times)
