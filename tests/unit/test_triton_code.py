"""The tools that check Triton kernels without a GPU."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.support.triton_code import PATCHED, interpreted, recorded_calls, recorded_launches
from worker.kernels.triton import attention as compiled

copy: Any = interpreted("worker.kernels.triton.attention")


def merge_nothing(module: Any) -> None:
    """Launch a kernel for one head of one token, whose only split has no keys."""
    parts, logs = torch.zeros(1, 1, 1, 16), torch.full((1, 1, 1), float("-inf"))
    constants = {"MAX_SPLITS": 2, "D": 16, "D_PADDED": 16}
    out = {"out": torch.zeros(1, 1, 16), "out_row_stride": 16, "out_head_stride": 16}
    module.merge[(1, 1)](part_out=parts, part_logs=logs, num_splits=1, **out, **constants)


def test_the_interpreted_copy_is_not_the_module_that_others_import() -> None:
    assert sys.modules["worker.kernels.triton.attention"] is compiled
    assert copy is not compiled
    assert interpreted("worker.kernels.triton.attention") is copy


def test_an_interpreted_launch_changes_nothing_in_triton() -> None:
    before = [dict(vars(place)) for place in PATCHED]
    with recorded_launches() as launched:
        merge_nothing(copy)
    assert launched == ["merge"]
    assert [dict(vars(place)) for place in PATCHED] == before


def test_a_recorded_call_does_not_run_and_can_be_compiled() -> None:
    with recorded_calls(compiled) as calls:
        merge_nothing(compiled)
    (call,) = calls
    assert call.kernel is compiled.merge
    assert call.grid == (1, 1)
    assert call.compile_for(80).stores == {4: 1}
