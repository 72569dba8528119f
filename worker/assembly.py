"""A worker put together from its config: device, model, memory, slots, and one step to warm it up.

The only file that knows all the parts. What is discovered on the way (context, blocks) is told in
WorkerReady and written back into no config.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from protocol.arrays import Int32, UInt8
from protocol.config import WorkerConfig
from protocol.sampling import SamplingParams
from protocol.steps import SlotInit, StepPlan, WorkerReady
from worker import device as machine
from worker.attention.select import select_attention
from worker.kv_cache import KVCache, block_bytes
from worker.memory import free_bytes, kv_budget
from worker.models.config import LlamaConfig
from worker.models.load import load_model
from worker.phases import Phases
from worker.registry import rows_for
from worker.runner import Runner
from worker.slot_fields import slot_fields
from worker.slots import Poison, SlotField, SlotTable

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 2
"""A prefill row, so that both a chunk and its decode step have run before the first request."""


def assemble(config: WorkerConfig, phases: Phases) -> tuple[Runner, WorkerReady]:
    """Everything up to the first plan. Raises UnusableModel, saying why in one line."""
    machine.set_threads(_threads(config))
    device = machine.choose_device(config.device)
    dtype = machine.choose_dtype(config.dtype, device, cpu_flags=machine.cpu_flags())
    with phases("load weights"):
        loaded = load_model(config.model, dtype=dtype, device=device)
    with phases("reserve memory"):
        shape = _cache_shape(loaded.config, config)
        budget = kv_budget(
            config,
            context_tokens=loaded.card.context_tokens,
            block_bytes=block_bytes(*shape, dtype),
            free_bytes=free_bytes(device),
        )
        cache = KVCache(shape[0], budget.num_blocks, *shape[1:], dtype, device)
        fields = slot_fields(budget.max_len, -(-budget.max_len // config.block_tokens))
        attention = select_attention(config.block_tokens, dtype=dtype)
        slots = _slot_table(fields, config, device, loaded.model, cache, attention)
    with phases("warm up"):
        spare = SlotTable(fields, 1, device)
        _warm_up(Runner(loaded.model, spare, cache, attention), cache, budget.max_len)
    log.info(
        "model %s dtype=%s device=%s threads=%d blocks=%d max_len=%d",
        loaded.card.name,
        loaded.card.dtype,
        device,
        torch.get_num_threads(),
        budget.num_blocks,
        budget.max_len,
    )
    ready = WorkerReady(
        model=loaded.card,
        max_len=budget.max_len,
        max_slots=config.max_slots,
        block_tokens=config.block_tokens,
        num_blocks=budget.num_blocks,
        phases=phases.told,
    )
    return Runner(loaded.model, slots, cache, attention), ready


def _slot_table(
    fields: Iterable[SlotField], config: WorkerConfig, device: torch.device, *others: object
) -> SlotTable:
    """Poisoned, it has as many rows as none of the `others` has of anything: see registry.py."""
    if config.poison_slots == "off":
        return SlotTable(fields, config.max_slots, device)
    rows = rows_for(config.max_slots, others)
    return SlotTable(fields, rows, device, poison=Poison[config.poison_slots.upper()])


def _threads(config: WorkerConfig) -> int:
    return machine.choose_threads(
        config.threads, cores=machine.allowed_cores(), quota=machine.cpu_quota()
    )


def _cache_shape(model: LlamaConfig, config: WorkerConfig) -> tuple[int, int, int, int]:
    """Layers, tokens of a block, key/value heads, head dim."""
    return model.num_layers, config.block_tokens, model.num_kv_heads, model.head_dim


def _warm_up(runner: Runner, cache: KVCache, max_len: int) -> None:
    """A prompt and, where there is room, one token after it, where nobody's is yet."""
    prompt = min(WARM_UP_TOKENS, max_len)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    blocks = -(-min(prompt + 1, max_len) // cache.block_tokens)
    init = SlotInit(
        slot=0,
        generation=0,
        tokens=Int32.of([0] * prompt),
        prompt_tokens=prompt,
        num_computed=0,
        blocks=Int32.of(range(1, blocks + 1)),
        seed=0,
        stop_ids=[],
        params=params,
    )
    runner.step(_one_row(start=0, count=prompt, bind=[init], samples=prompt < max_len))
    if prompt + 1 < max_len:
        runner.step(_one_row(start=prompt, count=1, bind=[], samples=True))
    cache.zero(torch.arange(1, blocks + 1, device=cache.k.device))


def _one_row(*, start: int, count: int, bind: list[SlotInit], samples: bool) -> StepPlan:
    none = Int32.of([])
    return StepPlan(
        step=0,
        release=none,
        bind=bind,
        block_slots=none,
        block_indexes=none,
        block_ids=none,
        zero_blocks=none,
        row_slots=Int32.of([0]),
        row_starts=Int32.of([start]),
        row_tokens=Int32.of([count]),
        row_samples=UInt8.of([samples]),
        num_decodes=int(count == 1),
    )
