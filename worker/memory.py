"""How many KV blocks there will be, and so how long a request may become.

`kv_budget` is pure; `free_bytes` reads the machine. A server must be able to finish any request it
accepts, so the cache holds at least one of the longest: where the user named the length that is a
condition, where they did not the length gives way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.config.worker import WorkerConfig
from worker.loading.errors import NotEnoughMemory, UnusableModel

AVERAGE_REQUEST_TOKENS = 1024
"""Of prompt and answer, where nobody says how much memory the cache may have."""
FREE_SHARE = 4
"""Then it gets at most one part in so many of what is free."""
GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class KVBudget:
    """num_blocks: including the null block; max_len: tokens of prompt and answer of one request."""

    num_blocks: int
    max_len: int


def kv_budget(
    config: WorkerConfig, *, context_tokens: int, block_bytes: int, free_bytes: int
) -> KVBudget:
    """context_tokens: the model's limit; block_bytes: of one block in all layers.

    Raises NotEnoughMemory, with the numbers, where a request of config.max_len could never be held,
    and UnusableModel where the model was not made for one so long.
    """
    if config.max_len > context_tokens:
        raise UnusableModel(
            f"max_len is {config.max_len:,}; the model was made for {context_tokens:,} tokens"
        )
    wanted_len = config.max_len or context_tokens
    num_blocks = config.kv_blocks or _affordable(config, wanted_len, block_bytes, free_bytes)
    if num_blocks * block_bytes > free_bytes:
        raise NotEnoughMemory(
            f"{num_blocks:,} KV blocks take {num_blocks * block_bytes / GIB:.2f} GiB; "
            f"{free_bytes / GIB:.2f} GiB are free"
        )
    held = (num_blocks - 1) * config.block_tokens
    if held < (config.max_len or config.block_tokens):
        raise NotEnoughMemory(
            f"{num_blocks:,} KV blocks hold {max(held, 0):,} tokens, less than max_len "
            f"({config.max_len or config.block_tokens:,}); raise kv_blocks or kv_memory_gib"
        )
    return KVBudget(num_blocks, min(wanted_len, held))


def _affordable(config: WorkerConfig, wanted_len: int, block_bytes: int, free_bytes: int) -> int:
    """Blocks for the memory named, or for max_slots average requests and one of the longest."""
    if config.kv_memory_gib:
        return int(config.kv_memory_gib * GIB) // block_bytes
    average = min(wanted_len, AVERAGE_REQUEST_TOKENS)
    tokens = max(config.max_slots * average, wanted_len)
    blocks = -(-tokens // config.block_tokens) + 1
    return min(blocks, free_bytes // FREE_SHARE // block_bytes)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated, on the device or in this container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine = available_bytes()
    container = cgroup_free_bytes()
    return machine if container is None else min(machine, container)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What the system could hand out without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{meminfo} does not say how much memory is available")


def cgroup_free_bytes(cgroup: Path = CGROUP) -> int | None:
    """Limit minus use of the control group (version 2, then 1); None where it has no limit.

    File pages that can be dropped are counted as use by the kernel, but not here.
    """
    for limit, used, stat, dropped in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            most = (cgroup / limit).read_text().strip()
            taken = int((cgroup / used).read_text())
            pages = _statistic((cgroup / stat).read_text(), dropped)
        except (OSError, ValueError):
            continue
        return max(0, int(most) - taken + pages) if most.isdigit() else None
    return None


def _statistic(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
