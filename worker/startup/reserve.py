"""Reserves the memory that steps need: a K/V cache for the model and one for its draft model or
head, and the slots.

The caches get what the weights and the largest step leave. On a GPU a profile run measures that
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from protocol.config.worker import Poisoning, WorkerConfig
from protocol.engine.kv_window import KVGroups, num_column_blocks
from worker.device.device import free_bytes
from worker.encoders.runner import EncodeRunner
from worker.errors import UnusableModel
from worker.kv.budget import KVDemand, in_gib, kv_budget
from worker.kv.cache import CountedBlocks, PagedCache, cache_bytes, make_cache
from worker.kv.checkpoint_memory import CheckpointMemory
from worker.kv.transfer.shared_memory import SharedMemory
from worker.loading.decoder import LoadedModel
from worker.lora.startup import kept_bytes
from worker.slots.fields import STATE, slot_fields
from worker.slots.table import SlotField, SlotTable
from worker.spec.architectures import keeps_own_cache, num_checkpoints, state_bytes
from worker.spec.facts import ModelFacts
from worker.spec.kv_blocks import BlockLayers
from worker.spec.step_limits import StepLimits
from worker.startup.encoding import encode_longest, longest_input
from worker.startup.gpu_memory import GpuMemory, gpu_kv_budget, reserve_bytes
from worker.startup.kv_window import kv_groups, kv_window, reason_against_groups
from worker.startup.profile_run import CACHE_BLOCKS, CudaAllocator, ProfileRun, measure
from worker.startup.runner_parts import RunnerParts
from worker.startup.step_memory import kept_hidden_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """The caches and slots of a worker, and the sizes that were found for them.

    num_blocks   blocks of each cache
    max_len      most tokens of a request
    window       window outside of which all K/V blocks are freed; None: none
    groups       the K/V groups; None: none
    caches       a cache for each model
    fields       the fields of `slots`
    num_checkpoints
                 number of checkpoints of recurrent states
    states       their memory; None: there are none
    """

    num_blocks: int
    max_len: int
    window: int | None
    groups: KVGroups | None
    caches: list[PagedCache]
    fields: Sequence[SlotField]
    slots: SlotTable
    num_checkpoints: int
    states: CheckpointMemory | None

    def slots_of_one(self, device: torch.device) -> SlotTable:
        """Return another table with the same fields, for one request."""
        return SlotTable(self.fields, 1, device)


def reserve_memory(
    config: WorkerConfig,
    parts: RunnerParts,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
    encoder: EncodeRunner | None,
    image_bytes: int = 0,
) -> ReservedMemory:
    """Reserve the caches and slots of a worker.

    encoder       encodes with the model; None: the model only generates
    image_bytes   size of the encoded images that are kept

    Raises NotEnoughMemory if there is no room for them, and UnusableModel if the configuration
    requires something impossible.
    """
    loaded = parts.models[0]
    window, groups = _windows(config, loaded.spec)
    layers = [BlockLayers.of(spec, by_window=bool(groups)) for spec in parts.specs]
    one_block = partial(cache_bytes, num_blocks=1, block_tokens=config.block_tokens)
    make_caches = partial(_caches, loaded, layers, config.block_tokens, device)
    demand = KVDemand(
        context_tokens=loaded.card.context_tokens,
        block_bytes=sum(one_block(each, dtype=loaded.kv_dtype) for each in layers),
        limits=limits,
        window=window,
        groups=groups,
    )
    specs = parts.specs
    if device.type == "cpu":
        free = free_bytes(device) // config.local_size
        free -= kept_bytes(config, loaded.spec, dtype) + state_bytes(loaded.spec, limits)
        free -= image_bytes
        free -= kept_hidden_bytes(parts.head_hidden, limits.max_slots)
        checkpoints = num_checkpoints(loaded.spec, limits, free)
        free -= 4 * checkpoints * loaded.spec.state_items
        demand = demand.with_states(checkpoints, specs)
        budget = kv_budget(config, demand, free_bytes=max(free, 0))
    else:
        memory = measured_memory(config, parts, make_caches, limits, device, encoder)
        checkpoints = num_checkpoints(loaded.spec, limits, memory.free_bytes - memory.step_bytes)
        kept = 4 * checkpoints * loaded.spec.state_items + state_bytes(loaded.spec, limits)
        demand = demand.with_states(checkpoints, specs)
        budget = gpu_kv_budget(
            config, demand, replace(memory, reserve_bytes=memory.reserve_bytes + kept)
        )
    num_bytes = budget.num_blocks * one_block(layers[0], dtype=loaded.kv_dtype)
    is_shared = _is_shared(config, device)
    caches = make_caches(budget.num_blocks, SharedMemory(num_bytes) if is_shared else None)
    columns = -(-budget.max_len // config.block_tokens)
    num_blocks = columns * num_column_blocks(groups)
    spec = loaded.spec
    fields = slot_fields(
        budget.max_len, num_blocks, spec.state_items, parts.head_hidden, spec.has_rope_axes
    )
    others = [*parts.weights, caches, parts.attentions, parts.adapters]
    sizes, states = (limits.max_slots, checkpoints), None
    if checkpoints and is_shared:
        states = CheckpointMemory.in_shared_memory(checkpoints, loaded.spec.state_items)
    slots = _slot_table(fields, sizes, states, config.poison_slots, device, *others)
    if checkpoints and states is None:
        states = CheckpointMemory(slots.checkpoints[STATE])
    return ReservedMemory(
        num_blocks=budget.num_blocks,
        max_len=budget.max_len,
        window=window,
        groups=groups,
        caches=caches,
        fields=fields,
        slots=slots,
        num_checkpoints=checkpoints,
        states=states,
    )


def measured_memory(
    config: WorkerConfig,
    parts: RunnerParts,
    make_caches: Callable[[int], list[PagedCache]],
    limits: StepLimits,
    device: torch.device,
    encoder: EncodeRunner | None = None,
) -> GpuMemory:
    """Return the memory of a GPU that holds the weights, with the result of a profile run.

    encoder   encodes with the model, whose longest step counts too; None: the model only generates
    """
    card = parts.models[0].card

    def run() -> None:
        caches = make_caches(CACHE_BLOCKS)
        profile = ProfileRun(
            limits,
            max_len=min(config.max_len or card.context_tokens, card.context_tokens),
            vocab_size=card.vocab_size,
            block_tokens=config.block_tokens,
            num_entries=caches[0].num_entries,
            has_draft=len(caches) > 1,
            state_items=parts.models[0].spec.state_items,
            head_hidden=parts.head_hidden,
        )
        slots = SlotTable(profile.slot_fields(), limits.max_slots, device, num_checkpoints=1)
        profile.run(parts.runner(slots, caches))
        if encoder is not None:
            encode_longest(encoder, longest_input(config, card))

    allocator = CudaAllocator(device)
    step_bytes = measure(run, allocator, limits)
    now_free, total = torch.cuda.mem_get_info(device)
    memory = GpuMemory(
        total_bytes=total,
        free_bytes=now_free,
        weights_bytes=allocator.allocated(),
        step_bytes=step_bytes,
        reserve_bytes=reserve_bytes(limits, card.vocab_size)
        + kept_bytes(config, parts.models[0].spec, getattr(torch, card.dtype)),
    )
    log.info(
        "GPU memory: %s in total, %s free; %s for weights, %s for the largest step, %s in reserve",
        *map(in_gib, (total, now_free, memory.weights_bytes, step_bytes, memory.reserve_bytes)),
    )
    return memory


def _windows(config: WorkerConfig, spec: ModelFacts) -> tuple[int | None, KVGroups | None]:
    """Return the window outside of which all K/V blocks are freed, and the K/V groups; None for
    whichever does not apply. Log them, or why blocks are kept although layers have windows."""
    window, groups = kv_window(config, [spec]), kv_groups(config, [spec])
    windows = [each for each in spec.layer_windows if each is not None]
    if not windows:
        return None, None
    count, longest = f"{len(windows)} of {spec.num_kv_layers}", max(windows)
    if groups is not None:
        log.info("K/V blocks of %s layers are freed once they are %d tokens back", count, longest)
    elif window is not None:
        log.info("K/V blocks are freed once they are %d tokens back", window)
    else:
        log.info(
            "%s layers have a window of at most %d tokens, but all K/V blocks are kept until the "
            "request ends, because of %s",
            count,
            longest,
            reason_against_groups(config, spec),
        )
    return window, groups


def _is_shared(config: WorkerConfig, device: torch.device) -> bool:
    """Return whether other workers can map the memory of the model's cache and of the checkpoints.
    Raises UnusableModel if the configuration requires it and it is not possible."""
    if not config.kv_export or config.kv_mover not in ("auto", "shm"):
        return False
    if device.type == "cpu":
        return True
    if config.kv_mover == "shm":
        raise UnusableModel(
            f"kv_mover is shm, but the KV cache is on device {device}; serve with --kv-mover auto"
        )
    return False


def _slot_table(
    fields: Iterable[SlotField],
    sizes: tuple[int, int],
    states: CheckpointMemory | None,
    poisoning: Poisoning,
    device: torch.device,
    *others: object,
) -> SlotTable:
    """Return the slot table with `sizes`: (slots, checkpoints).

    states   new memory for the checkpoints; None: the table allocates it
    others   hold tensors. The number of rows of a poisoned table equals none of their dimensions,
             so that a search can recognise per-slot tensors (step/slot_registry.py)
    """
    max_slots, num_checkpoints = sizes
    memory = None if states is None else states.states
    if poisoning == "off":
        return SlotTable(fields, max_slots, device, num_checkpoints, checkpoints=memory)
    from worker.step.slot_registry import Poison, PoisonedSlots, rows_for

    rows = rows_for(max_slots, others)
    poison = Poison[poisoning.upper()]
    return PoisonedSlots(fields, rows, device, num_checkpoints, checkpoints=memory, poison=poison)


def _caches(
    loaded: LoadedModel,
    layers: Sequence[BlockLayers],
    block_tokens: int,
    device: torch.device,
    num_blocks: int,
    shared: SharedMemory | None = None,
) -> list[PagedCache]:
    """Return a cache of `num_blocks` blocks for each of `layers`, those of the model `loaded`, and
    of its draft model or head. `shared` is memory for the first."""
    if keeps_own_cache(loaded.spec):
        return [CountedBlocks(block_tokens, device)]
    dtype = loaded.kv_dtype
    return [
        make_cache(each, num_blocks, block_tokens, dtype, device, memory)
        for each, memory in zip(layers, (shared, None), strict=False)
    ]
