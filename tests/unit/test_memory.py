"""How many KV blocks fit, what the machine grants, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.config.worker import WorkerConfig
from protocol.preflight import GIB
from worker.loading.errors import UnusableModel
from worker.startup import device, machine, memory
from worker.startup.memory_plan import KVBudget, kv_budget

CPU = torch.device("cpu")


def budget(context_tokens: int = 8192, free: int = 64 * GIB, **config: Any) -> KVBudget:
    """Blocks of 16 tokens and one MiB."""
    return kv_budget(
        WorkerConfig(model="m", **config),
        context_tokens=context_tokens,
        block_bytes=1 << 20,
        free_bytes=free,
    )


def test_blocks_that_are_named_are_the_blocks_there_are() -> None:
    assert budget(kv_blocks=100) == KVBudget(100, 99 * 16)
    assert budget(kv_blocks=100, max_len=50) == KVBudget(100, 50)
    assert budget(kv_blocks=10_000) == KVBudget(10_000, 8192)


def test_memory_that_is_named_is_filled_with_blocks() -> None:
    assert budget(kv_memory_gib=1.5) == KVBudget(1536, 8192)


def test_else_every_slot_gets_an_average_request_and_one_the_longest() -> None:
    assert budget(max_slots=64) == KVBudget(64 * 64 + 1, 8192)
    assert budget(max_slots=1) == KVBudget(512 + 1, 8192)
    assert budget(max_slots=8, max_len=100) == KVBudget(8 * 100 // 16 + 1, 100)


def test_but_no_more_than_a_quarter_of_what_is_free() -> None:
    assert budget(max_slots=64, free=8 * GIB) == KVBudget(2048, 8192)
    assert budget(max_slots=64, free=GIB) == KVBudget(256, 255 * 16)


@pytest.mark.parametrize(
    ("config", "free", "message"),
    [
        ({"max_len": 9000}, 64 * GIB, "max_len is 9,000; the model's context is 8,192"),
        ({"max_len": 8192, "kv_blocks": 512}, 64 * GIB, "hold 8,176 tokens, less than max_len"),
        ({"max_len": 8192}, GIB, "256 KV blocks hold 4,080 tokens"),
        ({"kv_blocks": 1}, 64 * GIB, "1 KV blocks hold 0 tokens"),
        ({"kv_blocks": 2048}, GIB, "2,048 KV blocks take 2.00 GiB; 1.00 GiB are free"),
        ({"kv_memory_gib": 3}, 2 * GIB, "3.00 GiB; 2.00 GiB are free"),
        ({}, 1 << 20, "0 KV blocks hold 0 tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused_with_the_numbers(
    config: dict[str, Any], free: int, message: str
) -> None:
    with pytest.raises(UnusableModel) as refused:
        budget(free=free, **config)
    assert message in refused.value.message


@given(
    st.integers(1, 200_000),
    st.integers(0, 1 << 36),
    st.integers(1, 512),
    st.sampled_from([1, 16, 256]),
    st.integers(0, 4096),
    st.integers(0, 100_000),
)
def test_a_budget_holds_its_longest_request_and_fits_into_what_is_free(
    context: int, free: int, slots: int, block_tokens: int, kv_blocks: int, max_len: int
) -> None:
    try:
        found = budget(
            context,
            free,
            max_slots=slots,
            block_tokens=block_tokens,
            kv_blocks=kv_blocks,
            max_len=max_len,
        )
    except UnusableModel:
        return
    assert 1 <= found.max_len <= min(context, (found.num_blocks - 1) * block_tokens)
    assert found.max_len == max_len or not max_len
    assert found.num_blocks << 20 <= free


def test_the_container_counts_and_pages_that_can_be_dropped_are_free(tmp_path: Path) -> None:
    assert machine.cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 250\n")
    assert machine.cgroup_free_bytes(tmp_path) == 550
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cgroup_free_bytes(tmp_path) is None


def test_older_containers_say_it_elsewhere(tmp_path: Path) -> None:
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("1000\n")
    (old / "memory.usage_in_bytes").write_text("900\n")
    (old / "memory.stat").write_text("total_inactive_file 50\n")
    assert machine.cgroup_free_bytes(tmp_path) == 150


def test_the_machine_says_what_is_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   42 kB\n")
    assert machine.available_bytes(tmp_path / "meminfo") == 42 * 1024
    assert memory.free_bytes(CPU) > 0


def test_threads_are_the_cores_we_may_use() -> None:
    assert machine.choose_threads(3, cores=8, quota=1.0) == 3
    assert machine.choose_threads(0, cores=8, quota=None) == 8
    assert machine.choose_threads(0, cores=8, quota=2.5) == 2
    assert machine.choose_threads(0, cores=8, quota=0.5) == 1
    assert machine.choose_threads(0, cores=2, quota=16.0) == 2
    assert machine.allowed_cores() >= 1


def test_a_quota_is_read_from_either_kind_of_control_group(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert machine.cpu_quota(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert machine.cpu_quota(tmp_path) == 2.5


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16", torch.bfloat16),
        ("flags\t\t: fpu avx2 amx_bf16", torch.bfloat16),
        ("Features\t: fp asimd bf16", torch.bfloat16),
        ("flags\t\t: fpu avx2 avx512f", torch.float32),
        ("processor : 0", torch.float32),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_computes_in_it(
    tmp_path: Path, flags: str, dtype: torch.dtype
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    read = machine.cpu_flags(tmp_path / "cpuinfo")
    assert device.choose_dtype("auto", CPU, cpu_flags=read) == dtype
    assert device.choose_dtype("float32", CPU, cpu_flags=read) == torch.float32
    assert device.choose_dtype("bfloat16", CPU, cpu_flags=frozenset()) == torch.bfloat16
    cuda = torch.device("cuda", 0)
    assert device.choose_dtype("auto", cuda, cpu_flags=frozenset()) == torch.bfloat16


def test_the_cpu_is_had_everywhere_and_cuda_where_there_is_one() -> None:
    assert device.choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert device.choose_device("auto") == CPU
        with pytest.raises(UnusableModel, match="no CUDA device"):
            device.choose_device("cuda")
        with pytest.raises(UnusableModel, match="device cuda:3 was requested"):
            device.choose_device("cuda:3")


def test_a_gpu_is_called_what_others_call_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(uuid="0a1b-2c", pci_domain_id=0, pci_bus_id=59, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: told)
    gpu = torch.device("cuda", 1)
    assert device.identity_of(CPU) is None
    assert device.identity_of(gpu) == "gpu-0a1b-2c"
    del told.uuid  # an older torch does not tell
    assert device.identity_of(gpu) == "gpu-00:3b:00"
    del told.pci_bus_id
    assert device.identity_of(gpu) == "gpu-1"
