"""Builds a worker from its config: device, model, memory, slots, and a warm-up step.

Only this file imports all the parts. Facts that are found on the way (context length, number of
blocks) go into WorkerReady, never back into the config.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from protocol.config.worker import WorkerConfig
from protocol.engine.model_card import ModelCard
from protocol.worker.steps import TokenizerRead, WorkerReady
from worker.attention.base import Attention
from worker.attention.select import select_attention
from worker.checkpoint.digest import digest
from worker.checkpoint.text import check_draft
from worker.device import cpuinfo, machine, malloc
from worker.device import device as devices
from worker.device.device import free_bytes
from worker.device.environment import visible_devices
from worker.device.timing import StartupTiming
from worker.errors import UnusableModel
from worker.kernels.base import Kernels
from worker.kernels.fastest import fastest
from worker.kernels.number_types import NumberTypes, number_types
from worker.kernels.select import ChooseKernels, select_kernels
from worker.kv.budget import in_gib
from worker.kv.cache import PagedCache
from worker.layers.group import Group
from worker.loading.decoder import LoadedModel, load_model
from worker.loading.draft_head import LoadedHead, load_head
from worker.loading.header import encoder_header, read_header
from worker.lora.startup import load_adapters
from worker.slots.table import SlotTable
from worker.spec.architectures import (
    TransformersSpec,
    fitting_limits,
    keeps_own_cache,
    request_state_bytes,
)
from worker.spec.kv_blocks import check_chunks
from worker.spec.model_spec import ModelSpec
from worker.spec.step_limits import StepLimits, step_limits
from worker.startup.attention_needs import attention_needs
from worker.startup.check_device import unused_gpu
from worker.startup.encoding import (
    Assembled,
    assemble_encoder,
    assemble_vectors,
    pooling_runner,
    tokenizer_read,
    with_input_limit,
)
from worker.startup.images import ServedImages, load_images
from worker.startup.kv_window import reason_to_keep
from worker.startup.reserve import ReservedMemory, reserve_memory
from worker.startup.runner_parts import RunnerParts
from worker.startup.warm_up import warm_up
from worker.step.decode_fast_path import PlainDecode
from worker.step.decode_graph import CudaGraphs
from worker.step.runner import Runner

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
    if warning := machine.thread_warning(
        config.threads, cores=machine.allowed_cores(), quota=machine.cpu_quota()
    ):
        log.warning("%s", warning)
    device = _device(config)
    if (header := encoder_header(Path(config.model))) is not None:
        return assemble_encoder(config, timing, header, device, on_tokenizer)
    cpu_flags = cpuinfo.cpu_flags()
    types = number_types(config, is_gpu=device.type != "cpu", cpu_flags=cpu_flags)
    dtype: torch.dtype = getattr(torch, types.dtype)
    limits = step_limits(config, is_gpu=device.type != "cpu")
    choose = _chooser(config, dtype) if config.world_size == 1 else None  # equal on all ranks
    kernels = select_kernels(config.kernels, device, cpu_flags=cpu_flags, choose=choose)
    group = None
    if config.world_size > 1:
        with timing("meet the other ranks"):
            group = _group(config, dtype, device, kernels)
    loaded, draft, head = _load(config, timing, types, device, kernels, on_tokenizer, group)
    _check_caches(config, loaded, draft)
    attentions_of = partial(_attentions, config, dtype, device)
    if not loaded.card.generates:
        return assemble_vectors(config, timing, loaded, attentions_of([loaded])[0], dtype, device)
    images, limits = load_images(config, loaded, limits, device, timing)
    adapters, infos = load_adapters(config, loaded.spec, dtype, device, timing)
    with timing("reserve memory"):
        limits = _fitting_limits(config, loaded, limits, device)
        models = [loaded] if draft is None else [loaded, draft]
        parts = RunnerParts(models, attentions_of(models, head), adapters, head)
        attention = parts.attentions[0]
        encoder = pooling_runner(config, loaded, attention, dtype, device, limits.token_budget)
        memory = reserve_memory(config, parts, limits, dtype, device, encoder, images.num_bytes)
    caches = memory.caches
    with timing("warm up"):
        warm_up(parts.runner(memory.slots_of_one(device), caches), caches, memory.max_len)
    decode = None if group else _captured_decode(config, timing, parts, memory.slots, caches)
    malloc.keep_pages()  # after loading, so that its temporary memory has been returned
    _log_model(loaded, types, device, memory, limits)
    ready = WorkerReady(
        model=_card(config, loaded, images),
        max_len=memory.max_len,
        max_slots=limits.max_slots,
        token_budget=limits.token_budget,
        block_tokens=config.block_tokens,
        num_blocks=memory.num_blocks,
        rank=config.rank,
        phases=timing.phases,
        draft_cost=_cost(loaded, draft, head),
        step_costs=loaded.step_costs,
        kv_window=memory.window,
        kv_groups=memory.groups,
        max_adapters=adapters.num_rows,
        adapters=infos,
        has_own_cache=keeps_own_cache(loaded.spec),
        state_bytes=4 * loaded.spec.state_items,
        num_checkpoints=memory.num_checkpoints,
        image_rows=images.num_rows,
    )
    runner = parts.runner(memory.slots, caches, _runner_class(config), decode)
    return Assembled(runner, encoder, with_input_limit(ready), memory.states, images.tower)


def _card(config: WorkerConfig, loaded: LoadedModel, images: ServedImages) -> ModelCard:
    """Return the model's card. Its digest covers the encoder, because K/V depend on that."""
    card = loaded.card
    whole = digest(list(images.files), card.digest.encode()) if images.files else card.digest
    return msgspec.structs.replace(
        card, digest=whole, recommended=config.recommended_sampling, images=images.support
    )


def _device(config: WorkerConfig) -> torch.device:
    """Choose the device and make it the current one."""
    device = devices.choose_device(config.device, devices.gpu_of_rank(config))
    devices.make_current(device)
    if config.device == "auto" and device.type == "cpu" and (why := unused_gpu(visible_devices())):
        log.warning("the CPU computes, although there is a GPU: %s", why)
    return device


def _log_model(
    loaded: LoadedModel,
    types: NumberTypes,
    device: torch.device,
    memory: ReservedMemory,
    limits: StepLimits,
) -> None:
    log.info(
        "model %s dtype=%s rounded=%s (%s) device=%s kernels=%s weights=%d MiB threads=%d "
        "blocks=%d%s max_len=%d%s",
        loaded.card.name,
        loaded.card.dtype,
        ",".join(loaded.rounded) or "none",
        types.reason,
        device,
        loaded.model.kernels.name,
        loaded.card.weights_bytes >> 20,
        torch.get_num_threads(),
        memory.num_blocks,
        "" if loaded.spec.num_kv_layers else " without K/V",
        memory.max_len,
        _states(loaded, memory, limits.max_slots),
    )


def _states(loaded: LoadedModel, memory: ReservedMemory, slots: int) -> str:
    """Return what the log says about the memory of recurrent states; "" if the model has none."""
    size = request_state_bytes(loaded.spec)
    if not size:
        return ""
    taken = in_gib(size * (slots + memory.num_checkpoints))
    return f" states of {slots} slots and {memory.num_checkpoints} checkpoints={taken}"


def _fitting_limits(
    config: WorkerConfig, loaded: LoadedModel, limits: StepLimits, device: torch.device
) -> StepLimits:
    """Return `limits` with fewer slots if recurrent states would take too much memory, and log
    it."""
    free = free_bytes(device) // (config.local_size if device.type == "cpu" else 1)
    fitting = fitting_limits(loaded.spec, limits, config, free)
    if fitting.max_slots < limits.max_slots:
        log.info(
            "at most %d requests are computed at the same time instead of %d, because each has a "
            "recurrent state of %.1f MiB (--max-slots)",
            fitting.max_slots,
            limits.max_slots,
            request_state_bytes(loaded.spec) / (1 << 20),
        )
    return fitting


def _captured_decode(
    config: WorkerConfig,
    timing: StartupTiming,
    parts: RunnerParts,
    slots: SlotTable,
    caches: Sequence[PagedCache],
) -> PlainDecode | None:
    """Capture decode steps as `RunnerParts.captured_decode` does, and log the memory they take.
    Return None if the device is no GPU, or if the config forbids it."""
    device = slots.device
    if device.type != "cuda" or config.decode_graphs != "auto":
        return None
    before = free_bytes(device)
    with timing("capture graphs"):
        decode = parts.captured_decode(slots, caches, CudaGraphs(device))
    if decode is not None:
        taken = in_gib(before - free_bytes(device))
        log.info("decode steps are captured as graphs, which take %s", taken)
    return decode


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


def _load(
    config: WorkerConfig,
    timing: StartupTiming,
    types: NumberTypes,
    device: torch.device,
    kernels: Kernels,
    on_tokenizer: Callable[[TokenizerRead], object],
    group: Group | None,
) -> tuple[LoadedModel, LoadedModel | None, LoadedHead | None]:
    """Return the model, and its draft model or its head for drafts, if one is configured. Every
    rank of a group has a share of the model, and all of the draft model."""
    dtype: torch.dtype = getattr(torch, types.dtype)
    load = partial(
        load_model,
        dtype=dtype,
        device=device,
        kernels=kernels,
        weights=config.weights,
        activations=config.activations,
        rounds_floats=types.rounds_floats,
        kv_dtype=types.kv_dtype,
        pooling=config.pooling,
        measurements=Path(config.measurements) if config.measurements else None,
    )
    with timing("load weights"):
        loaded = load(
            config.model,
            on_header=lambda header: on_tokenizer(tokenizer_read(header)),
            group=group,
        )
    if config.draft_head:
        with timing("load the head"):
            head = load_head(
                read_header(Path(config.model)),
                loaded.model,
                dtype=dtype,
                device=device,
                weights=config.weights,
                activations=config.activations,
                rounds_floats=types.rounds_floats,
            )
        return loaded, None, head
    if not config.draft_model:
        return loaded, None, None
    with timing("load the draft model"):
        draft = load(config.draft_model)
        check_draft(draft.card, loaded.card)
    return loaded, draft, None


def _check_caches(config: WorkerConfig, loaded: LoadedModel, draft: LoadedModel | None) -> None:
    """Raise UnusableModel if a model keeps a cache by itself, and an option needs K/V blocks, if
    blocks do not fit into the chunks of a model, or if the draft model has a recurrent state, for
    which requests have no place."""
    if draft is not None and draft.spec.state_items:
        raise UnusableModel(
            f"{draft.spec.architecture} has recurrent layers, so it cannot be a draft model",
            remedy="use another draft model, or --speculation ngram",
        )
    for model in (loaded, draft):
        if model is not None and isinstance(model.spec, ModelSpec):
            check_chunks(model.spec, config.block_tokens)
        if model is None or not keeps_own_cache(model.spec):
            continue
        reason = reason_to_keep(config)
        if reason:
            raise UnusableModel(
                f"{model.spec.architecture} keeps a cache of its own, so {reason} is not possible",
                remedy=f"serve without {reason}",
            )


def _group(
    config: WorkerConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> Group:
    """Return the group of this rank, once all ranks are there. Raises PeerLost if they cannot be
    reached, and UnusableModel if this rank computes with other hardware or libraries than rank
    0."""
    from worker.startup.process_group import join_group  # imports torch.distributed

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


def _attentions(
    config: WorkerConfig,
    dtype: torch.dtype,
    device: torch.device,
    models: Sequence[LoadedModel],
    head: LoadedHead | None = None,
) -> list[Attention]:
    """Return the attention of each model, and of the head if there is one."""
    found = [_attention(each.spec, each, config, dtype, device) for each in models]
    if head is not None:
        found.append(_attention(head.spec, models[0], config, dtype, device))
    return found


def _attention(
    spec: ModelSpec | TransformersSpec,
    loaded: LoadedModel,
    config: WorkerConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Attention:
    """Return the attention of the kernels that the model uses, or of its GPU."""
    needs = attention_needs(
        spec,
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


def _cost(loaded: LoadedModel, draft: LoadedModel | None, head: LoadedHead | None) -> float | None:
    """Return the cost of a step of the draft model or head relative to a step of the model; None if
    there is neither. It is the ratio of their weights, because reading these takes most of the time
    of a step with few tokens."""
    if head is not None:
        return head.read_bytes / loaded.card.weights_bytes
    return None if draft is None else draft.card.weights_bytes / loaded.card.weights_bytes


def _runner_class(config: WorkerConfig) -> type[Runner]:
    if config.poison_slots == "off":
        return Runner
    from worker.step.slot_registry import CheckedRunner

    return CheckedRunner


def _threads(config: WorkerConfig) -> int:
    return machine.choose_threads(
        config.threads,
        cores=machine.allowed_cores(),
        quota=machine.cpu_quota(),
        local_size=config.local_size,
    )
