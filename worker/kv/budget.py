"""Size of the K/V cache: the number of blocks, and the longest request that they can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import KVGroups, max_held_blocks, max_request_tokens
from protocol.shared.state_memory import num_empty_blocks
from protocol.tools.start_facts import GIB
from worker.errors import NotEnoughMemory, UnusableModel
from worker.spec.facts import ModelFacts
from worker.spec.kv_blocks import are_empty
from worker.spec.step_limits import StepLimits

AVERAGE_REQUEST_TOKENS = 1024
"""Prompt and answer of an average request, in tokens. The default size of the cache follows from
this number."""
FREE_SHARE = 4
"""If the user has not configured the cache's size, the cache gets at most 1/FREE_SHARE of the free
memory of a CPU."""
MAX_DEFAULT_BLOCKS = 1 << 20
"""Most blocks of a cache whose size the user has not configured. The engine keeps a record of each,
so a GPU full of the small blocks of a small model would slow down its start."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Size of the K/V cache. `num_blocks` includes the null block. `max_len` is the longest prompt
    plus answer of one request, in tokens."""

    num_blocks: int
    max_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDemand:
    """The requests and steps that a K/V cache must hold.

    context_tokens   the model's limit
    block_bytes      size of one block, in all layers that it stores
    limits           the largest step
    window           window of all layers in tokens, see protocol/engine/kv_window.py; None: no
                     blocks are freed before the request ends, or `groups` describes the window
    groups           the K/V groups; None: a block stores all layers
    num_states       number of slots and checkpoints if blocks store nothing (kv_blocks.py), and so
                     memory does not limit their number; None: blocks store keys and values
    """

    context_tokens: int
    block_bytes: int
    limits: StepLimits
    window: int | None = None
    groups: KVGroups | None = None
    num_states: int | None = None

    def with_states(self, num_checkpoints: int, models: Sequence[ModelFacts]) -> KVDemand:
        """Return the demand with `num_states`, if no layer has attention.

        models   the model, and its draft model if there is one
        """
        num_states = self.limits.max_slots + num_checkpoints
        return replace(self, num_states=num_states) if are_empty(models) else self

    def longest_request_blocks(self, options: WorkerConfig) -> int:
        """Return the number of blocks, including the null block, that a cache needs to compute a
        request of `context_tokens` tokens."""
        return self.held_blocks(options, self.context_tokens) + 1

    def held_blocks(self, options: WorkerConfig, num_tokens: int, num_new: int = 0) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds at a time, if each
        step computes up to `num_new` tokens; 0: as many as memory is planned for."""
        return max_held_blocks(
            num_tokens,
            num_new or self.limits.planned_tokens,
            block_tokens=options.block_tokens,
            window=self.window,
            groups=self.groups,
        )


def kv_budget(
    options: WorkerConfig,
    demand: KVDemand,
    *,
    free_bytes: int,
    default_bytes: int | None = None,
) -> KVBudget:
    """Return the number of K/V blocks to allocate, and the longest request that they can hold.

    free_bytes       free memory for the cache
    default_bytes    size of the cache if the user has not configured it, at most `free_bytes`;
                     None: enough for average requests (`_enough_blocks`)

    Raises NotEnoughMemory, with the numbers, if a request of options.max_len would never fit, and
    UnusableModel if options.max_len exceeds the model's context.
    """
    context_tokens, block_bytes = demand.context_tokens, demand.block_bytes
    if options.max_len > context_tokens:
        raise UnusableModel(
            f"max_len is {options.max_len:,}; the model's context is {context_tokens:,} tokens",
            remedy=f"--max-len {context_tokens}, or less",
        )
    num_blocks = _affordable(options, demand, free_bytes, default_bytes)
    max_blocks = free_bytes // block_bytes
    if num_blocks > max_blocks:
        option = f"--kv-blocks {max_blocks}"
        if not options.kv_blocks:
            option = f"--kv-memory-gib {round_down(free_bytes / GIB)}"
        raise NotEnoughMemory(
            f"{num_blocks:,} KV blocks take {in_gib(num_blocks * block_bytes)}; "
            f"{in_gib(free_bytes)} are free",
            remedy=f"{option}, or less",
        )
    size = options.block_tokens
    max_len = max_request_tokens(
        options.max_len or context_tokens,
        num_blocks=num_blocks,
        block_tokens=size,
        window=demand.window,
        groups=demand.groups,
    )
    held = (num_blocks - 1) * size if demand.groups is None else max_len
    if max_len < (options.max_len or options.block_tokens):
        limit = "too few for a request"
        if options.max_len:
            limit = f"less than max_len ({options.max_len:,})"
        needed = demand.held_blocks(options, options.max_len or size, 1)
        if demand.window is not None and needed * size < options.max_len:
            limit += f"; a window of {demand.window:,} tokens needs {needed + 1:,} blocks"
        raise NotEnoughMemory(
            f"{num_blocks:,} KV blocks hold {max(held, 0):,} tokens, {limit}",
            remedy=_longer_or_shorter(options, needed, held, block_bytes, max_blocks),
        )
    return KVBudget(num_blocks, max_len)


def _affordable(
    options: WorkerConfig, demand: KVDemand, free_bytes: int, default_bytes: int | None
) -> int:
    """Return the configured number of blocks, or the number that fits the configured memory. If
    neither is configured, return the number that fits `default_bytes`; if it is None, return
    enough blocks for the requests, but at most 1/FREE_SHARE of the free memory. If blocks store
    nothing, return at most `num_empty_blocks`."""
    if options.kv_blocks:
        return options.kv_blocks
    if demand.num_states is not None:
        longest = demand.held_blocks(options, options.max_len or demand.context_tokens)
        most = int(options.kv_memory_gib * GIB) or free_bytes // FREE_SHARE
        return min(num_empty_blocks(demand.num_states, longest), most // demand.block_bytes)
    if options.kv_memory_gib:
        return int(options.kv_memory_gib * GIB) // demand.block_bytes
    if default_bytes is not None:
        return min(default_bytes // demand.block_bytes, MAX_DEFAULT_BLOCKS)
    return min(_enough_blocks(options, demand), free_bytes // FREE_SHARE // demand.block_bytes)


def _enough_blocks(options: WorkerConfig, demand: KVDemand) -> int:
    """Return the number of blocks for max_slots average requests and for one of the longest."""
    wanted_len = options.max_len or demand.context_tokens
    longest, average = (
        demand.held_blocks(options, num_tokens)
        for num_tokens in (wanted_len, min(wanted_len, AVERAGE_REQUEST_TOKENS))
    )
    return max(demand.limits.max_slots * average, longest) + 1


def _longer_or_shorter(
    options: WorkerConfig, needed: int, held: int, block_bytes: int, max_blocks: int
) -> str:
    """Return advice for an error: options that enlarge the cache or shorten requests, as far as
    either is possible.

    needed   blocks that the request needs, without the null block
    held     tokens that fit in the cache
    """
    blocks, ways = needed + 1, []
    if blocks <= max_blocks:
        memory = f"--kv-memory-gib {_round_up(blocks * block_bytes / GIB)}"
        ways.append(f"--kv-blocks {blocks}" if options.kv_blocks else memory)
    if held >= options.block_tokens:
        ways.append(f"--max-len {held}")
    return ", or ".join(ways) or "use a smaller model"


def in_gib(num_bytes: int) -> str:
    """Return a size in GiB as text, such as "1.50 GiB"."""
    return f"{num_bytes / GIB:.2f} GiB"


def _round_up(gib: float) -> float:
    return -(-int(gib * 1000 + 1) // 10) / 100


def round_down(gib: float) -> float:
    """Return `gib` rounded down to two decimals, as the value of an option."""
    return int(gib * 100) / 100
