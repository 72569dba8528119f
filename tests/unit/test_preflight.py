"""The preflight check, which finds out whether a model can be served without importing torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from protocol.config.worker import WorkerConfig
from protocol.tools.start_facts import GIB, CudaDriver, GpuFacts, Preflight
from tests.support.checkpoints import random_llama, write_directory
from tests.support.family_models import random_model
from tests.support.gguf_files import write_gguf
from tests.support.model import smollm2_gguf
from tests.support.sparse_checkpoint import write_sparse_llama
from tests.support.tiny_checkpoint import write_tiny_llama
from tools import doctor_findings as findings
from tools.commands.models import memory_line
from tools.models.preflight import limit, preflight_each
from worker.device import cuda_driver, machine
from worker.device.machine import TorchBuild
from worker.errors import UnusableModel
from worker.startup import gpu_libraries
from worker.startup.check_device import ChosenDevice, choose_device
from worker.startup.preflight import preflight

PROGRAM = """
import sys
import worker.startup.preflight
worker.startup.preflight.main()
print(sorted({"torch", "numpy"} & {*sys.modules}))
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path)


def config(path: Path, **options: Any) -> WorkerConfig:
    return WorkerConfig(model=str(path), **options)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_neither_torch_nor_numpy_is_imported(tmp_path: Path, is_gguf: bool) -> None:
    path = tmp_path / "tiny.gguf"
    path = write_gguf(path, random_llama()) if is_gguf else write_tiny_llama(tmp_path)
    configs = msgspec.json.encode([config(path)]).decode()
    command = [sys.executable, "-P", "-c", PROGRAM, configs]
    lines = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    assert lines[1] == "[]"
    (plan,) = msgspec.json.decode(lines[0], type=Preflight).plans
    assert plan.name in (tmp_path.name, "tiny")


def test_alternatives_are_checked_as_if_each_were_alone(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "large").mkdir()
    large = write_sparse_llama(tmp_path / "large", num_hidden_layers=1000)
    one, none, again = preflight_each([str(tiny), str(large), str(tiny)])
    assert [each.is_memory for each in (one, none, again)] == [False, True, False]
    assert replace(again.plans[0], free_bytes=0) == replace(one.plans[0], free_bytes=0)
    assert memory_line(one).startswith("takes ")
    assert "; requests of up to " in memory_line(one)
    sizes = re.findall(r"([\d.]+) ([GM])B of", memory_line(one))
    total, *parts = (float(number) * {"M": 1e6, "G": 1e9}[unit] for number, unit in sizes)
    assert sum(parts) == pytest.approx(total, rel=0.1), "the parts are the whole"
    assert memory_line(none) == f"cannot be served here: {none.error}; {none.remedy}"


def test_the_memory_of_recurrent_states_is_part_of_the_plan(tmp_path: Path) -> None:
    hybrid = write_directory(tmp_path, random_model("lfm2"))
    (found,) = preflight_each([str(hybrid)])
    (plan,) = found.plans
    assert plan.state_bytes == plan.request_state_bytes * (64 + 256)
    assert (
        "of working memory, 0.5 MB of it for recurrent states: 0.0 MB for each of 64 requests and "
        "256 checkpoints of the prefix cache); requests of up to 512 tokens"
    ) in memory_line(found)


def test_a_model_without_attention_has_no_memory_for_kv(tmp_path: Path) -> None:
    (found,) = preflight_each([str(write_directory(tmp_path, random_model("mamba2")))])
    (plan,) = found.plans
    assert not plan.has_kv
    assert plan.kv_bytes < 1 << 20
    assert " of weights, no K/V, " in memory_line(found)
    text = " ".join(each.fact for each in findings.model(found))
    assert f"for weights ({plan.dtype}), none for K/V, " in text


def test_the_plan_is_for_this_machine(tiny: Path) -> None:
    found = preflight([config(tiny)])
    assert found.error == ""
    (plan,) = found.plans
    assert (plan.context_tokens, plan.max_len, plan.architecture) == (128, 128, "LlamaForCausalLM")
    assert plan.weights_bytes + plan.kv_bytes + plan.work_bytes <= plan.free_bytes


def test_memory_of_the_first_worker_is_not_free_for_the_second(tiny: Path) -> None:
    first, second = preflight([config(tiny, kv_memory_gib=0.25)] * 2).plans
    taken = first.weights_bytes + first.kv_bytes + first.work_bytes
    assert second.free_bytes <= first.free_bytes - taken + GIB  # others use memory meanwhile
    assert second.free_bytes < first.free_bytes


def spoil(path: Path, name: str, content: str) -> None:
    (path / name).write_text(content)


def change(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    spoil(path, "config.json", json.dumps(config | fields))


@pytest.mark.parametrize(
    ("damage", "message", "remedy"),
    [
        (lambda p: change(p, architectures=["Rwkv"]), "'Rwkv'", "another model"),
        (lambda p: change(p, hidden_size=64), "the config requires", "files"),
        (lambda p: change(p, num_hidden_layers=3), "tensor 'model.layers.2", "fetch"),
        (lambda p: spoil(p, "config.json", "{"), "config.json is not valid JSON", "fetch"),
        (lambda p: (p / "config.json").unlink(), "cannot read", "files"),
        (lambda p: (p / "tokenizer.json").unlink(), "no tokenizer.json", "files"),
        (lambda p: (p / "model.safetensors").unlink(), "holds neither", "fetch"),
        (lambda p: spoil(p, "model.safetensors", "x"), "extends past the end of the file", "fetch"),
        (lambda p: spoil(p, "model.safetensors", "\1" + 7 * "\0" + "["), "not valid JSON", "fetch"),
    ],
)
def test_a_model_that_cannot_be_served_is_reported_with_a_remedy(
    tiny: Path, damage: Any, message: str, remedy: str
) -> None:
    damage(tiny)
    found = preflight([config(tiny)])
    assert (found.plans, found.is_memory) == ([], False)
    assert message in found.error
    assert remedy in found.remedy
    assert "\n" not in found.error + found.remedy


def test_a_header_that_contradicts_its_bytes_is_reported_as_damaged(tiny: Path) -> None:
    whole = (tiny / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = "model.norm.weight"
    start, end = header[name]["data_offsets"]
    for entry, message in (
        ({"data_offsets": [start, end + 4]}, "does not match its shape"),
        ({"data_offsets": [start - 4, end - 4]}, "overlap, or leave gaps"),
        ({"data_offsets": [start, -1]}, "damaged or truncated: the header's entry"),
        ({"shape": [64]}, "does not match its shape"),
        ({"dtype": "F64"}, "model.norm.weight has dtype F64; supported: F32, F16, BF16"),
    ):
        text = json.dumps(header | {name: header[name] | entry}).encode()
        content = len(text).to_bytes(8, "little") + text + data
        (tiny / "model.safetensors").write_bytes(content)
        assert message in preflight([config(tiny)]).error
    (tiny / "model.safetensors").write_bytes(whole[:-1])
    assert "its tensors end at byte" in preflight([config(tiny)]).error


def test_too_little_memory_is_reported_as_such(tmp_path: Path) -> None:
    found = preflight([config(write_sparse_llama(tmp_path, num_hidden_layers=1000))])
    assert found.is_memory
    assert "are free" in found.error


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path, tiny: Path) -> None:
    other = tmp_path / "other.gguf"
    write_gguf(other, random_llama())
    found = preflight([config(tiny, draft_model=str(other))])
    assert "have different vocabularies" in found.error
    assert "--draft-model" in found.remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "packed", "kernels": "torch"}, "packed weights need compiled kernels"),
        ({"activations": "int8", "weights": "dense"}, "in int8 need packed weights"),
        ({"activations": "int8", "kernels": "torch"}, "in int8 need packed weights"),
        ({"attention": "flash"}, "attention 'flash' needs a GPU, but the device is the CPU"),
        ({"max_len": 4096}, "max_len is 4,096; the model's context is 128 tokens"),
    ],
    ids=str,
)
def test_options_that_the_model_does_not_support_are_refused(
    tiny: Path, options: dict[str, Any], message: str
) -> None:
    assert message in preflight([config(tiny, **options)]).error


def test_the_installed_torch_is_known_without_importing_it() -> None:
    gpu = "hip" if torch.version.hip else "cuda" if torch.version.cuda else ""
    found = machine.torch_build()
    assert (found.version, found.gpu) == (str(torch.__version__), gpu)
    assert bool(found.toolkit[0]) == bool(gpu)


CPU_BUILD, ROCM = TorchBuild("2.13.0+cpu"), TorchBuild("2.13.0+rocm6.4", "hip", (6, 4))
CUDA = TorchBuild("2.13.0+cu130", "cuda", (13, 0))


def a_driver(*free: int, cuda: tuple[int, int] = (13, 0)) -> CudaDriver:
    """Return a driver that shows GPUs of 80 bytes, with these numbers of free bytes."""
    gpus = [
        GpuFacts(name="H100", capability=(9, 0), total_bytes=80, free_bytes=each) for each in free
    ]
    return CudaDriver(version="580.95", cuda=cuda, gpus=gpus)


README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
NO_GPU = CudaDriver(problem="NVIDIA's driver finds no GPU", remedy="check nvidia-smi")


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(
        wanted: str, build: TorchBuild, driver: CudaDriver, local_rank: int = 0
    ) -> ChosenDevice:
        monkeypatch.setattr(machine, "torch_build", lambda: build)
        monkeypatch.setattr(machine, "free_host_bytes", lambda: 5)
        monkeypatch.setattr(cuda_driver, "read_driver", lambda visible: driver)
        return choose_device(wanted, local_rank=local_rank)

    return choose


@pytest.mark.parametrize(
    ("wanted", "build", "driver", "found"),
    [
        ("auto", CPU_BUILD, a_driver(7), ChosenDevice("cpu", 5)),
        ("cpu", CUDA, a_driver(7), ChosenDevice("cpu", 5)),
        ("auto", CUDA, NO_GPU, ChosenDevice("cpu", 5)),
        ("auto", CUDA, a_driver(7, cuda=(12, 8)), ChosenDevice("cpu", 5)),
        ("auto", CUDA, a_driver(7, 8), ChosenDevice("cuda:0", 7, 80)),
        ("cuda", CUDA, a_driver(7, 8), ChosenDevice("cuda:0", 7, 80)),
        ("cuda:1", CUDA, a_driver(7, 8), ChosenDevice("cuda:1", 8, 80)),
        ("cuda", CUDA, a_driver(7, cuda=(13, 2)), ChosenDevice("cuda:0", 7, 80)),
        ("cuda:1", ROCM, NO_GPU, ChosenDevice("cuda:1", sys.maxsize, sys.maxsize)),
    ],
    ids=str,
)
def test_preflight_chooses_the_device_that_torch_will_choose(
    choose: Any, wanted: str, build: TorchBuild, driver: CudaDriver, found: ChosenDevice
) -> None:
    assert choose(wanted, build, driver) == found


@pytest.mark.parametrize(
    ("wanted", "build", "driver", "message", "remedy"),
    [
        ("cuda", CPU_BUILD, a_driver(7), "(2.13.0+cpu) is a build for CPUs", "torch==2.13.0"),
        ("cuda", CUDA, NO_GPU, "NVIDIA's driver finds no GPU", "check nvidia-smi"),
        ("cuda", CPU_BUILD, NO_GPU, "NVIDIA's driver finds no GPU", "check nvidia-smi"),
        ("cuda", CUDA, a_driver(7, cuda=(12, 8)), "CUDA 13, and this one (580.95)", "update"),
        ("cuda:2", CUDA, a_driver(7, 8), "the visible GPUs are cuda:0, cuda:1", "CUDA_VISIBLE_"),
    ],
    ids=str,
)
def test_a_gpu_that_torch_cannot_use_is_refused_with_the_reason(
    choose: Any, wanted: str, build: TorchBuild, driver: CudaDriver, message: str, remedy: str
) -> None:
    with pytest.raises(UnusableModel) as refused:
        choose(wanted, build, driver)
    assert refused.value.message.startswith(f"device {wanted} was requested, but ")
    assert message in refused.value.message
    assert remedy in refused.value.remedy
    assert refused.value.remedy.startswith("serve with --device cpu, or ")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_each_rank_of_a_group_has_a_gpu_of_its_own(choose: Any, wanted: str) -> None:
    assert choose(wanted, CUDA, a_driver(7, 8), 1) == ChosenDevice("cuda:1", 8, 80)
    with pytest.raises(UnusableModel, match="the visible GPUs are cuda:0, cuda:1"):
        choose(wanted, CUDA, a_driver(7, 8), 2)


def test_without_a_gpu_all_ranks_use_the_cpu(choose: Any) -> None:
    assert choose("auto", CUDA, NO_GPU, 1) == choose("auto", CPU_BUILD, a_driver(7), 1)


def test_a_setting_that_shortens_requests_is_reported(tiny: Path) -> None:
    (plan,) = preflight([config(tiny)]).plans
    assert limit(plan) is None
    assert "64 of the model's 128 tokens" in str(limit(replace(plan, max_len=64)))


def test_the_default_model_needs_no_more_memory_than_the_readme_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (said,) = re.findall(r"^\| memory \| (\d+) GB free for the default", README, re.MULTILINE)
    monkeypatch.setattr(machine, "free_host_bytes", lambda: int(said) * 10**9)
    (plan,) = preflight([config(smollm2_gguf())]).plans
    assert plan.max_len >= 4096


def test_without_a_driver_the_problem_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "DRIVER", "libnothing.so.1")
    found = cuda_driver.read_driver()
    assert (found.gpus, found.cuda) == ([], (0, 0))
    assert found.problem == "NVIDIA's driver is not installed (libnothing.so.1 was not found)"
    assert "--gpus all" in found.remedy


# ---- NVIDIA's driver, answered by a library that is made for the test
SOURCE = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
#ifndef DEVICES
#define DEVICES 2
#endif
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 10; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, device == 10 ? "First" : "Second", size);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? device - 10 : -1;
    return 0;
}
int cuDeviceTotalMem_v2(size_t *total, int device) { *total = (device - 9) * 8ull << 30; return 0; }
#ifdef HAS_UUID
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 16 * i + device - 10;
    return 0;
}
#endif
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    strncpy(text, "570.86.15", size);
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = (void *)0x1234567812345678;
    return strcmp(uuid, "MIG-00102030-4050-6070-8090-a0b0c0d0e0f0");
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    memory->total = 8ull << 30, memory->free = 5ull << 30, memory->used = 3ull << 30;
    return handle != (void *)0x1234567812345678;
}
"""


@pytest.fixture
def library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "driver.c").write_text(SOURCE)
    made = tmp_path / "driver.so"
    files = [str(tmp_path / "driver.c"), "-o", str(made)]
    subprocess.run([compiler, "-shared", "-fPIC", *request.param, *files], check=True)
    monkeypatch.setattr(cuda_driver, "DRIVER", str(made))
    monkeypatch.setattr(cuda_driver, "MANAGEMENT", str(made))


@pytest.mark.parametrize("library", [["-DINIT=0", "-DHAS_UUID"]], indirect=True)
@pytest.mark.usefixtures("library")
def test_a_driver_describes_its_gpus() -> None:
    """The free memory of the second GPU is unknown, because its UUID is not found."""
    found = cuda_driver.read_driver()
    assert (found.version, found.cuda, found.problem) == ("570.86.15", (12, 8), "")
    assert found.gpus == [
        GpuFacts(name="First", capability=(9, 0), total_bytes=8 << 30, free_bytes=5 << 30),
        GpuFacts(name="Second", capability=(9, 1), total_bytes=16 << 30, free_bytes=16 << 30),
    ]


@pytest.mark.parametrize("library", [["-DINIT=0"]], indirect=True)
@pytest.mark.usefixtures("library")
def test_a_driver_without_uuids_reports_the_total_memory_as_free() -> None:
    assert [gpu.free_bytes for gpu in cuda_driver.read_driver().gpus] == [8 << 30, 16 << 30]


NONE_VISIBLE = "no GPU is visible with CUDA_VISIBLE_DEVICES='7'"


@pytest.mark.parametrize(
    ("library", "visible", "problem"),
    [
        (["-DINIT=100"], None, "NVIDIA's driver finds no GPU"),
        (["-DINIT=0", "-DDEVICES=0"], None, "NVIDIA's driver finds no GPU"),
        (["-DINIT=100"], "7", NONE_VISIBLE),
        (["-DINIT=0", "-DDEVICES=0"], "7", NONE_VISIBLE),
        (["-DINIT=999"], "7", "NVIDIA's driver failed with error 999"),
    ],
    indirect=["library"],
)
@pytest.mark.usefixtures("library")
def test_a_driver_without_visible_gpus_names_the_reason(visible: str | None, problem: str) -> None:
    found = cuda_driver.read_driver(visible)
    assert (found.version, found.cuda, found.gpus) == ("570.86.15", (12, 8), [])
    assert found.problem == problem
    assert found.remedy


# ---- libraries for GPUs
def test_flash_attention_is_found_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("_vllm_fa2_C.abi3.so", "_vllm_fa3_C.abi3.so", "_vllm_fa3_C.abi3.so.part", "_C.so"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    fetched = tmp_path / "libraries"
    found = [f"FlashAttention 3 ({folder})", f"FlashAttention 2 ({folder})"]
    assert gpu_libraries.attention_libraries(fetched) == found
    fetched.mkdir()
    (fetched / "_vllm_fa3_C.abi3.so").touch()
    found.insert(0, f"FlashAttention 3 ({fetched})")
    assert gpu_libraries.attention_libraries(fetched) == found


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert gpu_libraries.version_of("no-such-package") == ""
    assert gpu_libraries.version_of("numpy")


def test_a_plan_can_use_the_memory_of_an_earlier_time(tiny: Path) -> None:
    gib = 1 << 30
    (plan,) = preflight([config(tiny)], free_bytes=3 * gib).plans
    assert plan.free_bytes == 3 * gib
    assert plan.weights_bytes + plan.kv_bytes + plan.work_bytes <= 3 * gib
    assert "are free" in preflight([config(tiny)], free_bytes=1 << 20).error
