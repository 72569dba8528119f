"""Divides a GPU's memory: what the weights, a step and captured graphs need, and the rest for K/V.

This is arithmetic only. worker/startup/profile_run.py measures the memory of a step once the
weights are loaded; before that, memory_plan.py estimates it.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.config.worker import WorkerConfig
from worker.errors import NotEnoughMemory
from worker.kv.budget import KVBudget, KVDemand, in_gib, kv_budget, round_down
from worker.spec.step_limits import StepLimits

RESERVE_BYTES = 512 << 20
"""Memory for captured graphs without their logits, for workspaces of libraries, and for gaps
between the allocations of torch."""
GRAPH_LOGITS = 2
"""Copies of the logits of all slots that captured graphs hold."""
SMALLER_STEP = "a smaller --token-budget or --max-slots, with which a step takes less"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """The memory of a GPU that holds the weights, but no K/V cache yet. All numbers are bytes."""

    total_bytes: int
    #: Memory that nothing uses. The weights, other processes and this process's CUDA context are
    #: not in it.
    free_bytes: int
    weights_bytes: int
    #: The most that the slots and the largest step use at a time.
    step_bytes: int
    reserve_bytes: int

    @property
    def available_bytes(self) -> int:
        """The largest K/V cache that fits."""
        return max(self.free_bytes - self.step_bytes - self.reserve_bytes, 0)

    def kv_bytes(self, share: float) -> int:
        """Return the size of the K/V cache with which the worker uses at most `share` of the total
        memory, and which fits."""
        allowed = int(self.total_bytes * share) - self._other_bytes
        return max(min(allowed, self.available_bytes), 0)

    @property
    def largest_share(self) -> float:
        """The share of the total memory that the worker uses if the K/V cache gets all that is
        available, rounded down to two decimals."""
        return round_down((self._other_bytes + self.available_bytes) / self.total_bytes)

    @property
    def _other_bytes(self) -> int:
        """The memory that the worker needs beside the K/V cache."""
        return self.weights_bytes + self.step_bytes + self.reserve_bytes


def reserve_bytes(limits: StepLimits, vocab_size: int) -> int:
    """Return the memory that neither the largest step nor the K/V cache may use."""
    return RESERVE_BYTES + GRAPH_LOGITS * 4 * limits.max_slots * vocab_size


def gpu_kv_budget(options: WorkerConfig, demand: KVDemand, memory: GpuMemory) -> KVBudget:
    """Return the number of K/V blocks to allocate on a GPU, and the longest request that they can
    hold.

    `options.kv_blocks` or `options.kv_memory_gib` is the size of the cache, if one of them is set.
    Otherwise the cache gets what `options.gpu_memory` leaves.

    Raises NotEnoughMemory, with all numbers and the options to change, if the cache does not fit or
    cannot hold a request of `options.max_len`, and UnusableModel if `options.max_len` exceeds the
    model's context.
    """
    try:
        return kv_budget(
            options,
            demand,
            free_bytes=memory.available_bytes,
            default_bytes=memory.kv_bytes(options.gpu_memory),
        )
    except NotEnoughMemory as error:
        numbers = _numbers(options, demand.limits, memory)
        remedy = ", or ".join([error.remedy, *_ways(options, memory)])
        raise NotEnoughMemory(f"{numbers}; {error.message}", remedy=remedy) from None


def _numbers(options: WorkerConfig, limits: StepLimits, memory: GpuMemory) -> str:
    """Return a phrase for errors: how the memory is used."""
    numbers = (
        f"the GPU has {in_gib(memory.total_bytes)}; with {in_gib(memory.weights_bytes)} of weights "
        f"loaded, {in_gib(memory.free_bytes)} are free; the largest step "
        f"({limits.token_budget:,} tokens of {limits.max_slots:,} requests) takes "
        f"{in_gib(memory.step_bytes)}, and {in_gib(memory.reserve_bytes)} are kept in reserve"
    )
    if _is_named(options):
        return numbers
    left = in_gib(memory.kv_bytes(options.gpu_memory))
    return f"{numbers}; --gpu-memory {options.gpu_memory:g} leaves {left} for the KV cache"


def _ways(options: WorkerConfig, memory: GpuMemory) -> list[str]:
    """Return further options that make room for the K/V cache."""
    ways = []
    if not _is_named(options) and memory.largest_share > options.gpu_memory:
        ways.append(f"--gpu-memory {memory.largest_share:g}")
    return [*ways, SMALLER_STEP]


def _is_named(options: WorkerConfig) -> bool:
    return bool(options.kv_blocks or options.kv_memory_gib)
