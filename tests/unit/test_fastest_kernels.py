"""The instruction set that multiplies fastest is chosen by measuring, once for all workers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import partial
from math import isfinite
from pathlib import Path

import pytest
import torch

from protocol.config.worker import KernelSet
from tests.support.kernels import native_kernels
from worker.device.measurements import stored_or_measured
from worker.kernels import select
from worker.kernels.fastest import ROWS, SetTimes, choose, fastest, measure
from worker.kernels.instruction_sets import InstructionSet
from worker.kernels.library import NoKernels
from worker.kernels.native import NativeKernels
from worker.kernels.select import select_kernels

CPU = torch.device("cpu")
FLAGS = frozenset({"avx2", "fma", "f16c"})
BEST: KernelSet = "avx2"
RIVAL: KernelSet = "generic"


@pytest.mark.parametrize(
    ("best", "rival", "chosen"),
    [
        ([1, 1, 1], [1, 1, 1], BEST),
        ([1, 1, 1], [0.95, 0.95, 0.95], BEST),
        ([1, 1, 1], [0.9, 0.9, 0.9], RIVAL),
        ([1, 10, 100], [0.5, 10, 100], RIVAL),
        ([1, 10, 100], [0.5, 20, 100], BEST),
        ([1, 10, 100], [1, 10, 50], RIVAL),
    ],
)
def test_another_set_is_chosen_only_if_it_is_clearly_faster(
    best: list[float], rival: list[float], chosen: str
) -> None:
    assert choose([SetTimes(BEST, best), SetTimes(RIVAL, rival)]) == chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_every_set_is_measured_for_each_number_of_rows(
    dtype: torch.dtype, rounds_inputs: bool
) -> None:
    sets = [native_kernels(BEST), native_kernels(RIVAL)]
    times = measure(sets, dtype, rounds_inputs=rounds_inputs)
    assert [time.name for time in times] == [BEST, RIVAL]
    for time in times:
        assert len(time.seconds) == len(ROWS)
        assert all(isfinite(each) and each > 0 for each in time.seconds)


def chooser(folder: Path, *, processor: str = "this one") -> select.ChooseKernels:
    return partial(
        fastest, dtype=torch.bfloat16, rounds_inputs=False, processor=processor, folder=folder
    )


def test_the_stored_times_decide_and_not_a_second_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement finds the compiler's defaults to be slower. Then its file is changed."""
    monkeypatch.setattr(select, "RIVALS", {BEST: RIVAL})
    native_kernels(BEST)

    def selected(folder: Path | None) -> str:
        choose = None if folder is None else chooser(folder)
        return select_kernels("auto", CPU, cpu_flags=FLAGS, choose=choose).name

    assert selected(None) == BEST
    assert selected(tmp_path) == BEST
    (file,) = tmp_path.iterdir()
    names = file.read_bytes().replace(b'"avx2","seconds":', b'"avx2","seconds":[9,9,9],"was":')
    file.write_bytes(names)
    assert selected(tmp_path) == RIVAL
    assert select_kernels(BEST, CPU, cpu_flags=FLAGS, choose=chooser(tmp_path)).name == BEST


def test_a_set_without_a_compiled_rival_is_taken_without_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(sets: object) -> NativeKernels:
        raise AssertionError("measured")

    native_kernels(BEST)
    monkeypatch.setattr(select, "RIVALS", {BEST: "not compiled"})
    kernels = select_kernels("auto", CPU, cpu_flags=FLAGS, choose=refuse)
    assert kernels.name == BEST


def test_another_processor_is_measured_again(tmp_path: Path) -> None:
    sets = [native_kernels(BEST), native_kernels(RIVAL)]
    for processor in ("this one", "another", "this one"):
        chooser(tmp_path, processor=processor)(sets)
    assert len([*tmp_path.iterdir()]) == 2


def test_workers_that_measure_at_the_same_time_use_the_result_of_the_first(tmp_path: Path) -> None:
    def measured_second() -> int:
        assert stored_or_measured(tmp_path, ["x"], int, lambda: 1) == (1, True)
        return 2

    assert stored_or_measured(tmp_path, ["x"], int, measured_second) == (1, True)
    assert stored_or_measured(tmp_path, ["x"], int, lambda: 3) == (1, True)
    assert len([*tmp_path.iterdir()]) == 1, "no temporary file is left"


def test_a_file_is_written_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: str, target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    assert stored_or_measured(tmp_path, ["x"], int, lambda: 1) == (1, True)
    assert stored_or_measured(tmp_path, ["x"], int, lambda: 2) == (1, True)


def test_times_that_cannot_be_stored_do_not_decide(tmp_path: Path) -> None:
    """The slower set comes first, so a measurement would choose the other."""
    taken = tmp_path / "a file"
    taken.touch()
    sets = [native_kernels(RIVAL), native_kernels(BEST)]
    for folder in (taken, taken / "below"):
        assert chooser(folder)(sets).name == RIVAL
    assert chooser(tmp_path)(sets).name == BEST


def test_incomplete_times_are_measured_again(tmp_path: Path) -> None:
    sets = [native_kernels(BEST), native_kernels(RIVAL)]
    chooser(tmp_path)(sets)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(b'"seconds":[', b'"seconds":[0,'))
    assert chooser(tmp_path)(sets).name == BEST
    assert b"[0," not in file.read_bytes()


def test_a_rival_from_another_version_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    best = native_kernels(BEST)
    monkeypatch.setattr(select, "RIVALS", {BEST: RIVAL})

    def load(sets: Iterable[InstructionSet]) -> tuple[str, ctypes.CDLL, Path]:
        if [each.name for each in sets] == [RIVAL]:
            raise NoKernels("compiled from another version")
        return best.name, best.library, best.file

    monkeypatch.setattr(select, "load", load)
    kernels = select_kernels("auto", CPU, cpu_flags=FLAGS, choose=chooser(tmp_path))
    assert kernels.name == BEST
    assert "kernels for generic are not compared: compiled from another version" in caplog.text
