"""The number types that `auto` chooses: those that the kernels in use compute fastest."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.config.worker import KernelSet, WorkerConfig
from protocol.tools.start_facts import ModelPlan
from tests.support.checkpoints import random_llama, write_directory
from tests.support.kernels import NAMES, native_kernels
from worker.device import device
from worker.device.timing import StartupTiming
from worker.errors import UnusableModel
from worker.kernels import library
from worker.kernels.instruction_sets import INSTRUCTION_SETS
from worker.kernels.number_types import FASTEST, number_types
from worker.startup import assembly
from worker.startup.preflight import preflight

ALL_FLAGS = frozenset[str]().union(*(each.needs for each in INSTRUCTION_SETS))
AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
FLOAT, BFLOAT = "float32", "bfloat16"
ROUNDS, EXACT = True, False


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a directory with a file for each library, because this machine may lack some."""
    for name in NAMES:
        (tmp_path / f"_{name}{EXTENSION_SUFFIXES[0]}").touch()
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("kernels", "flags", "chosen"),
    [
        ("auto", AVX512 | {"avx512_bf16", "avx512_vnni"}, (BFLOAT, "auto", ROUNDS)),
        ("auto", AVX512, (FLOAT, BFLOAT, ROUNDS)),
        ("auto", AVX2, (FLOAT, BFLOAT, ROUNDS)),
        ("auto", frozenset(), (FLOAT, "auto", EXACT)),
        # A better processor decides as one that has no more than the set.
        ("avx512bf16", ALL_FLAGS, (BFLOAT, "auto", ROUNDS)),
        ("avx512", ALL_FLAGS, (FLOAT, BFLOAT, ROUNDS)),
        ("avx2", ALL_FLAGS, (FLOAT, BFLOAT, ROUNDS)),
        ("generic", ALL_FLAGS, (FLOAT, "auto", EXACT)),
        ("torch", AVX2 | {"avx512_bf16"}, (BFLOAT, "auto", EXACT)),
        ("torch", AVX2 | {"amx_bf16"}, (BFLOAT, "auto", EXACT)),
        ("torch", frozenset({"asimd", "bf16"}), (BFLOAT, "auto", EXACT)),
        ("torch", AVX512, (FLOAT, "auto", EXACT)),
    ],
)
def test_auto_takes_what_the_kernels_compute_fastest(
    kernels: KernelSet, flags: frozenset[str], chosen: tuple[str, str, bool]
) -> None:
    config = WorkerConfig(model="m", kernels=kernels)
    types = number_types(config, is_gpu=False, cpu_flags=flags)
    assert types[:3] == chosen
    assert kernels == "auto" or types.reason == f"this is fastest with the kernels {kernels}"


def test_each_instruction_set_has_its_types() -> None:
    assert [*FASTEST] == NAMES


def test_a_processor_whose_set_is_not_compiled_takes_the_types_of_the_next_one(
    libraries: Path,
) -> None:
    (libraries / f"_avx512bf16{EXTENSION_SUFFIXES[0]}").unlink()
    types = number_types(WorkerConfig(model="m"), is_gpu=False, cpu_flags=ALL_FLAGS)
    assert (types.dtype, types.reason) == (FLOAT, "this is fastest with the kernels avx512")


def test_a_gpu_computes_in_bfloat16() -> None:
    for kernels in ("auto", "avx2"):
        config = WorkerConfig(model="m", kernels=kernels)
        types = number_types(config, is_gpu=True, cpu_flags=AVX2)
        assert types[:3] == (BFLOAT, "auto", EXACT)


@pytest.mark.parametrize("kernels", NAMES)
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_nothing_else_is_rounded_if_the_dtype_is_given(kernels: KernelSet, dtype: str) -> None:
    config = WorkerConfig(model="m", kernels=kernels, dtype=dtype)  # type: ignore[arg-type]
    types = number_types(config, is_gpu=False, cpu_flags=ALL_FLAGS)
    assert types == (dtype, "auto", EXACT, f"--dtype is {dtype}")


@pytest.mark.parametrize("dtype", ["auto", FLOAT])
@pytest.mark.parametrize("kv_dtype", [BFLOAT, "int8"])
def test_the_given_type_of_keys_and_values_wins(dtype: str, kv_dtype: str) -> None:
    config = WorkerConfig(model="m", dtype=dtype, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    assert number_types(config, is_gpu=False, cpu_flags=AVX2).kv_dtype == kv_dtype


def test_the_memory_plan_has_the_types_of_the_kernels(tmp_path: Path) -> None:
    native_kernels("avx2")  # skips the test if they cannot be loaded
    write_directory(tmp_path, random_llama())

    def planned(**options: Any) -> ModelPlan:
        config = WorkerConfig(model=str(tmp_path), kernels="avx2", local_size=1, **options)
        return preflight([config]).plans[0]

    plan, floats = planned(), planned(dtype=FLOAT)
    assert plan.dtype == floats.dtype == FLOAT
    assert plan.longest_kv_bytes * 2 == floats.longest_kv_bytes


def test_a_worker_loads_its_model_in_the_types_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Any] = {}

    def load(*_: Any, **options: Any) -> Any:
        found.update(options)
        raise UnusableModel("the load began")

    native_kernels("avx2")  # skips the test if they cannot be loaded
    monkeypatch.setattr(device, "set_threads", lambda threads: None)
    monkeypatch.setattr(assembly, "load_model", load)
    with pytest.raises(UnusableModel, match="the load began"):
        assembly.assemble(WorkerConfig(model="m", kernels="avx2"), StartupTiming())
    chosen = [found[name] for name in ("dtype", "activations", "rounds_floats", "kv_dtype")]
    assert chosen == [torch.float32, "auto", True, BFLOAT]
