"""Builds a worker from its config: device, model, memory, slots, and a warm-up step.

Only this file imports all the parts. Facts that are found on the way (context length, number of
blocks) go into WorkerReady, never back into the config.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch

from protocol.config.worker import Poisoning, WorkerConfig
from protocol.kv_window import KVGroups, num_column_blocks
from protocol.model_card import ModelCard
from protocol.steps import TokenizerRead, WorkerReady
from worker.attention.base import Attention
from worker.attention.select import select_attention
from worker.batch.decode_fast_path import PlainDecode
from worker.batch.decode_graph import Capture, CudaGraphs, GraphDecode
from worker.draft.model import DraftModel
from worker.kernels import cpuinfo
from worker.kernels.base import Kernels
from worker.kernels.fastest import fastest
from worker.kernels.select import ChooseKernels, select_kernels
from worker.kv.cache import KVCache, block_bytes, layer_places
from worker.kv.transfer.shared_memory import SharedMemory
from worker.loading.errors import UnusableModel
from worker.loading.header import encoder_header
from worker.loading.text import check_draft
from worker.lora.startup import kept_bytes, load_adapters
from worker.lora.table import AdapterTable
from worker.models.load import LoadedModel, load_model
from worker.models.spec import ModelFacts
from worker.parallel.group import Group
from worker.sampling.select import select_sampling
from worker.slots.fields import slot_fields
from worker.slots.table import SlotField, SlotTable
from worker.startup import device as devices
from worker.startup import machine, malloc
from worker.startup.attention_needs import attention_needs
from worker.startup.check_device import unused_gpu
from worker.startup.device import free_bytes
from worker.startup.encoding import (
    Assembled,
    assemble_encoder,
    assemble_vectors,
    decoder_runner,
    tokenizer_read,
)
from worker.startup.environment import visible_devices
from worker.startup.gpu_memory import GpuMemory, gpu_kv_budget, reserve_bytes
from worker.startup.kv_budget import KVDemand, in_gib, kv_budget
from worker.startup.kv_window import kv_groups, kv_window, num_block_layers, reason_against_groups
from worker.startup.profile_run import CACHE_BLOCKS, CudaAllocator, ProfileRun, measure
from worker.startup.step_limits import StepLimits, step_limits
from worker.startup.timing import StartupTiming
from worker.startup.warm_up import warm_up
from worker.step import Runner

log = logging.getLogger(__name__)


def assemble(
    config: WorkerConfig,
    timing: StartupTiming,
    on_tokenizer: Callable[[TokenizerRead], object] = lambda tokenizer: None,
) -> Assembled:
    """Build everything that the first plan needs. Raises UnusableModel with a one-line reason.

    `on_tokenizer` is called with the model's tokenizer before the weights are loaded.
    """
    devices.set_threads(_threads(config))
    device = devices.choose_device(config.device, devices.gpu_of_rank(config))
    devices.make_current(device)
    if config.device == "auto" and device.type == "cpu" and (why := unused_gpu(visible_devices())):
        log.warning("the CPU computes, although there is a GPU: %s", why)
    if (header := encoder_header(Path(config.model))) is not None:
        return assemble_encoder(config, timing, header, device, on_tokenizer)
    cpu_flags = cpuinfo.cpu_flags()
    dtype = devices.choose_dtype(config.dtype, device, cpu_flags=cpu_flags)
    limits = step_limits(config, is_gpu=device.type != "cpu")
    choose = _chooser(config, dtype) if config.world_size == 1 else None  # equal on all ranks
    kernels = select_kernels(config.kernels, device, cpu_flags=cpu_flags, choose=choose)
    group = None
    if config.world_size > 1:
        with timing("meet the other ranks"):
            group = _group(config, dtype, device, kernels)
    loaded, draft = _load(config, timing, dtype, device, kernels, on_tokenizer, group)
    if not loaded.card.generates:
        attention = _attention(loaded, config, dtype, device)
        return assemble_vectors(config, timing, loaded, attention, dtype, device)
    adapters, infos = load_adapters(config, loaded.spec, dtype, device, timing)
    with timing("reserve memory"):
        models = [loaded] if draft is None else [loaded, draft]
        window, groups = _windows(config, loaded.spec)
        shapes = [_cache_shape(model.spec, config, groups) for model in models]
        attentions = [_attention(model, config, dtype, device) for model in models]
        parts = RunnerParts(models, attentions, adapters)
        make_caches = partial(_caches, models, shapes, groups, device)
        demand = KVDemand(
            context_tokens=loaded.card.context_tokens,
            block_bytes=sum(block_bytes(*shape, loaded.kv_dtype) for shape in shapes),
            limits=limits,
            window=window,
            groups=groups,
        )
        if device.type == "cpu":
            free = free_bytes(device) // config.local_size
            kept = kept_bytes(config, loaded.spec, dtype)
            budget = kv_budget(config, demand, free_bytes=max(free - kept, 0))
        else:
            memory = measured_memory(config, parts, make_caches, limits, device)
            budget = gpu_kv_budget(config, demand, memory)
        num_bytes = budget.num_blocks * block_bytes(*shapes[0], loaded.kv_dtype)
        caches = make_caches(budget.num_blocks, _shared_memory(config, device, num_bytes))
        columns = -(-budget.max_len // config.block_tokens)
        fields = slot_fields(budget.max_len, columns * num_column_blocks(groups))
        others = [*(each.model for each in models), caches, parts.attentions, adapters]
        slots = _slot_table(fields, limits.max_slots, config.poison_slots, device, *others)
    with timing("warm up"):
        warm_up(parts.runner(SlotTable(fields, 1, device), caches), caches, budget.max_len)
    decode = None
    if device.type == "cuda" and config.decode_graphs == "auto" and group is None:
        with timing("capture graphs"):
            decode = _captured_decode(parts, slots, caches, device)
    malloc.keep_pages()  # after loading, so that its temporary memory has been returned
    log.info(
        "model %s dtype=%s rounded=%s device=%s kernels=%s weights=%d MiB threads=%d blocks=%d "
        "max_len=%d",
        loaded.card.name,
        loaded.card.dtype,
        ",".join(loaded.rounded) or "none",
        device,
        loaded.model.kernels.name,
        loaded.card.weights_bytes >> 20,
        torch.get_num_threads(),
        budget.num_blocks,
        budget.max_len,
    )
    ready = WorkerReady(
        model=_with_recommended_sampling(loaded.card, config),
        max_len=budget.max_len,
        max_slots=limits.max_slots,
        token_budget=limits.token_budget,
        block_tokens=config.block_tokens,
        num_blocks=budget.num_blocks,
        rank=config.rank,
        phases=timing.phases,
        draft_cost=None if draft is None else _cost(draft.card, loaded.card),
        step_costs=loaded.step_costs,
        kv_window=window,
        kv_groups=groups,
        max_adapters=adapters.num_rows,
        adapters=infos,
    )
    runner = parts.runner(slots, caches, _runner_class(config), decode)
    if loaded.card.encoding is None:
        return Assembled(runner, None, ready)
    if group is not None:
        raise UnusableModel(
            "a tensor parallel group has no vectors", remedy="serve without --pooling"
        )
    limit = min(loaded.card.encoding.max_tokens, budget.max_len)
    encoding = msgspec.structs.replace(loaded.card.encoding, max_tokens=limit)
    model = msgspec.structs.replace(ready.model, encoding=encoding)
    encoder = decoder_runner(
        config, loaded, parts.attentions[0], dtype, device, limits.token_budget
    )
    return Assembled(runner, encoder, msgspec.structs.replace(ready, model=model))


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The model, and the draft model if there is one, each with its attention. Adapters change only
    the model."""

    models: Sequence[LoadedModel]
    attentions: Sequence[Attention]
    adapters: AdapterTable = field(default_factory=AdapterTable)

    def runner(
        self,
        slots: SlotTable,
        caches: Sequence[KVCache],
        kind: type[Runner] = Runner,
        decode: PlainDecode | None = None,
    ) -> Runner:
        """Return a runner with these slots, and with one cache for each model."""
        model, draft_model = self.models[0], None
        if len(self.models) > 1:
            draft = self.models[1].model
            draft_model = DraftModel(draft, caches[1], self.attentions[1], model.card.vocab_size)
        return kind(
            model.model,
            slots,
            caches[0],
            self.attentions[0],
            draft_model=draft_model,
            decode=decode,
            sampling=select_sampling(model.model.kernels),
            adapters=self.adapters,
        )

    def captured_decode(
        self, slots: SlotTable, caches: Sequence[KVCache], capture: Capture
    ) -> PlainDecode | None:
        """Return captured decode steps, or None if those of the model cannot be captured. No slot
        may be bound. Raises UnusableModel if the capture fails."""
        model, attention = self.models[0].model, self.attentions[0]
        decode = GraphDecode.for_model(model, slots, caches[0], attention, capture)
        if decode is None:
            return None
        try:
            decode.prepare()
        except RuntimeError as error:
            raise UnusableModel(
                f"decode steps cannot be captured: {str(error).partition(chr(10))[0]}",
                remedy="serve with --decode-graphs off",
            ) from error
        return decode


def _captured_decode(
    parts: RunnerParts, slots: SlotTable, caches: Sequence[KVCache], device: torch.device
) -> PlainDecode | None:
    """Capture decode steps as `RunnerParts.captured_decode` does, and log the memory they take."""
    before = free_bytes(device)
    decode = parts.captured_decode(slots, caches, CudaGraphs(device))
    if decode is not None:
        taken = in_gib(before - free_bytes(device))
        log.info("decode steps are captured as graphs, which take %s", taken)
    return decode


def measured_memory(
    config: WorkerConfig,
    parts: RunnerParts,
    make_caches: Callable[[int], list[KVCache]],
    limits: StepLimits,
    device: torch.device,
) -> GpuMemory:
    """Return the memory of a GPU that holds the weights, with the result of a profile run."""
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
        )
        slots = SlotTable(profile.slot_fields(), limits.max_slots, device)
        profile.run(parts.runner(slots, caches))

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


def _chooser(config: WorkerConfig, dtype: torch.dtype) -> ChooseKernels | None:
    """Return the function that chooses the fastest instruction set. Return None if the newest is
    the fastest for this dtype, or if there is no directory for the choice: it must not change
    between starts, because bits depend on it."""
    if dtype != torch.bfloat16 or not config.measurements:
        return None
    return partial(
        fastest,
        dtype=dtype,
        rounds_inputs=config.activations != "bfloat16",
        processor=machine.cpu_name(),
        folder=Path(config.measurements),
    )


def _with_recommended_sampling(card: ModelCard, config: WorkerConfig) -> ModelCard:
    """Return `card` with the catalogue's sampling defaults wherever the model's files give no
    default."""
    defaults = card.defaults.with_fallback(config.recommended_sampling)
    return msgspec.structs.replace(card, defaults=defaults)


def _load(
    config: WorkerConfig,
    timing: StartupTiming,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    on_tokenizer: Callable[[TokenizerRead], object],
    group: Group | None,
) -> tuple[LoadedModel, LoadedModel | None]:
    """Return the model and its draft model, if one is configured. Every rank of a group has a share
    of the model, and all of the draft model."""
    load = partial(
        load_model,
        dtype=dtype,
        device=device,
        kernels=kernels,
        weights=config.weights,
        activations=config.activations,
        kv_dtype=config.kv_dtype,
        pooling=config.pooling,
        measurements=Path(config.measurements) if config.measurements else None,
    )
    with timing("load weights"):
        loaded = load(
            config.model,
            on_header=lambda header: on_tokenizer(tokenizer_read(header)),
            group=group,
        )
    if not config.draft_model:
        return loaded, None
    with timing("load the draft model"):
        draft = load(config.draft_model)
        check_draft(draft.card, loaded.card)
    return loaded, draft


def _group(
    config: WorkerConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> Group:
    """Return the group of this rank, once all ranks are there. Raises PeerLost if they cannot be
    reached, and UnusableModel if this rank computes with other hardware or libraries than rank
    0."""
    from worker.parallel.process_group import join_group  # imports torch.distributed

    facts = {"torch": torch.__version__, "dtype": dtype, "kernels": kernels.name}
    if device.type == "cpu":
        facts |= {"processor": machine.cpu_model(), "threads": torch.get_num_threads()}
    else:
        facts |= {"GPU": torch.cuda.get_device_name(device)}
    group = join_group(
        config.rendezvous,
        config.rank,
        config.world_size,
        facts=", ".join(f"{name} {value}" for name, value in facts.items()),
        device=device,
    )
    log.info("rank %d of %d computes on %s", group.rank, group.size, device)
    if group.rank == 0:
        log.info(
            "the weights of a group are dense, and each operation of a step is a call of its own; "
            "with one worker, weights can stay packed and steps can be one compiled call or graph"
        )
    return group


def _attention(
    loaded: LoadedModel, config: WorkerConfig, dtype: torch.dtype, device: torch.device
) -> Attention:
    """Return the attention of the kernels that the model uses, or of its GPU."""
    needs = attention_needs(
        loaded.spec,
        device,
        block_tokens=config.block_tokens,
        dtype=dtype,
        kv_dtype=loaded.kv_dtype,
    )
    return select_attention(
        config.block_tokens,
        dtype=dtype,
        kernels=loaded.model.kernels,
        wanted=config.attention,
        gpu=needs,
        libraries=Path(config.libraries) if config.libraries else None,
    )


def _cost(draft: ModelCard, model: ModelCard) -> float:
    """Return the cost of a step of the draft model relative to a step of the model. It is the ratio
    of their weights, because reading these takes most of the time of a step with few tokens."""
    return draft.weights_bytes / model.weights_bytes


def _windows(config: WorkerConfig, spec: ModelFacts) -> tuple[int | None, KVGroups | None]:
    """Return the window outside of which all K/V blocks are freed, and the K/V groups; None for
    whichever does not apply. Log them, or why blocks are kept although layers have windows."""
    window, groups = kv_window(config, [spec]), kv_groups(config, [spec])
    windows = [each for each in spec.layer_windows if each is not None]
    if not windows:
        return None, None
    count, longest = f"{len(windows)} of {spec.num_layers}", max(windows)
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


def _shared_memory(
    config: WorkerConfig, device: torch.device, num_bytes: int
) -> SharedMemory | None:
    """Return memory for the model's cache that other workers can map, or None if it is not needed
    or not possible. Raises UnusableModel if the configuration requires it and it is not
    possible."""
    if not config.kv_export or config.kv_mover not in ("auto", "shm"):
        return None
    if device.type == "cpu":
        return SharedMemory(num_bytes)
    if config.kv_mover == "shm":
        raise UnusableModel(
            f"kv_mover is shm, but the KV cache is on device {device}; serve with --kv-mover auto"
        )
    return None


def _slot_table(
    fields: Iterable[SlotField],
    max_slots: int,
    poisoning: Poisoning,
    device: torch.device,
    *others: object,
) -> SlotTable:
    """Return the slot table. The number of rows of a poisoned table equals no dimension of the
    tensors in `others`, so that a search can recognise per-slot tensors
    (debug/slot_registry.py)."""
    if poisoning == "off":
        return SlotTable(fields, max_slots, device)
    from worker.debug.slot_registry import Poison, PoisonedSlots, rows_for

    rows = rows_for(max_slots, others)
    return PoisonedSlots(fields, rows, device, poison=Poison[poisoning.upper()])


def _runner_class(config: WorkerConfig) -> type[Runner]:
    if config.poison_slots == "off":
        return Runner
    from worker.debug.slot_registry import CheckedRunner

    return CheckedRunner


def _threads(config: WorkerConfig) -> int:
    return machine.choose_threads(
        config.threads,
        cores=machine.allowed_cores(),
        quota=machine.cpu_quota(),
        local_size=config.local_size,
    )


def _cache_shape(
    model: ModelFacts, config: WorkerConfig, groups: KVGroups | None
) -> tuple[int, int, int, int]:
    """Return (layers of a block, tokens per block, K/V heads, head dim)."""
    num_layers = num_block_layers(model, groups)
    return num_layers, config.block_tokens, model.num_kv_heads, model.head_dim


def _caches(
    models: Sequence[LoadedModel],
    shapes: Sequence[tuple[int, int, int, int]],
    groups: KVGroups | None,
    device: torch.device,
    num_blocks: int,
    shared: SharedMemory | None = None,
) -> list[KVCache]:
    """Return a cache of `num_blocks` blocks for each model. `shared` is memory for the first."""
    spec, dtype = models[0].spec, models[0].kv_dtype
    return [
        KVCache(
            shape[0],
            num_blocks,
            *shape[1:],
            dtype,
            device,
            shared=memory,
            places=layer_places(spec.layer_windows) if groups is not None else (),
        )
        for shape, memory in zip(shapes, (shared, None), strict=False)
    ]
