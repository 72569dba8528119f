"""Checks whether workers can serve their models.

    python -P -m worker.startup.preflight CONFIGS
    python -P -m worker.startup.preflight --each CONFIGS
    python -P -m worker.startup.preflight --each --free-bytes=N CONFIGS

CONFIGS is a JSON list of WorkerConfig. Without `--each` they are the workers of one server, and the
output is one `Preflight` as JSON. With `--each` they are alternatives: each worker is checked as if
it were alone, and the output is a list of `Preflight`. `--free-bytes` is the free memory of the
device in place of what is free now, because other models of the server may be loaded.

Only the headers of the files are read, and memory is planned. No weight is read and torch is not
imported, so a failure shows within a moment.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from protocol.config.base import NO_PATH
from protocol.config.worker import WorkerConfig
from protocol.engine.model_card import ModelCard
from protocol.tools.start_facts import ModelPlan, Preflight
from worker.attention.limits import check_attention_option
from worker.checkpoint.text import check_draft
from worker.device import machine
from worker.device.cpuinfo import cpu_flags
from worker.device.environment import visible_devices
from worker.encoders.header import EncoderHeader
from worker.errors import REMEDY, NotEnoughMemory, UnusableModel
from worker.kernels.library import first_compiled, selected
from worker.kernels.number_types import number_types
from worker.kv.budget import in_gib
from worker.loading.draft_header import read_draft_head
from worker.loading.header import (
    AnyHeader,
    ModelHeader,
    read_any_header,
    read_header,
)
from worker.loading.transformers_header import TransformersHeader
from worker.spec.kv_blocks import check_chunks
from worker.spec.model_spec import ModelSpec
from worker.spec.share import NOT_DIVIDED, check_dense
from worker.startup.card import card_of_text
from worker.startup.check_device import CPU, choose_device
from worker.startup.encoder_memory import dtype_of, extra_bytes, only_encodes, plan_encoder
from worker.startup.memory_facts import stored_facts
from worker.startup.memory_plan import (
    PlannedModel,
    PlannedTransformersModel,
    is_packed,
    plan_memory,
)
from worker.vision.memory import planned_image_bytes
from worker.vision.support import find_images

EACH, FREE_BYTES = "--each", "--free-bytes="


def preflight(
    configs: Sequence[WorkerConfig], visible: str | None = None, free_bytes: int | None = None
) -> Preflight:
    """Return the plans of the workers, in order, or the first error. Memory that is planned for one
    worker is not available to the next.

    visible      value of CUDA_VISIBLE_DEVICES, for error messages
    free_bytes   memory of each device to plan with; None: what is free now
    """
    taken: defaultdict[str, int] = defaultdict(int)
    plans, cards = [], []
    try:
        for config in configs:
            header = read_any_header(Path(config.model), config.pooling)
            cards.append(_card(header))
            if not config.local_size:  # all workers are on other machines
                continue
            plan = _plan(config, header, taken, visible, free_bytes)
            taken[plan.device] += plan.device_bytes
            taken[CPU] += plan.tier_bytes
            plans.append(plan)
    except UnusableModel as error:
        return Preflight(
            error=error.message,
            remedy=error.remedy or REMEDY,
            is_memory=isinstance(error, NotEnoughMemory),
        )
    folder = next((Path(config.measurements) for config in configs if config.measurements), None)
    return Preflight(plans=plans, card=next(iter(cards), None), memory=stored_facts(folder))


def _card(header: AnyHeader) -> ModelCard:
    card = card_of_text(
        header.name,
        header.spec.architecture,
        header.text,
        vocab_size=header.vocab_size,
        context_tokens=header.spec.context_tokens,
    )
    if isinstance(header, TransformersHeader):
        return card
    return replace(card, generates=not only_encodes(header), encoding=header.encoding)


def _plan(
    config: WorkerConfig,
    header: AnyHeader,
    taken: defaultdict[str, int],
    visible: str | None,
    free_bytes: int | None,
) -> ModelPlan:
    found = find_images(config)  # checks --mmproj of any model
    if isinstance(header, EncoderHeader) or only_encodes(header):
        return _plan_encoder(config, header, taken, visible, free_bytes)
    headers = [header]
    if isinstance(header.spec, ModelSpec):
        check_chunks(header.spec, config.block_tokens)
    if config.draft_model:
        headers.append(read_header(Path(config.draft_model)))
        check_draft(headers[1], headers[0])
    head = read_draft_head(header) if config.draft_head else None
    device = choose_device(config.device, visible, config.local_rank)
    check_attention_option(config.attention, is_cpu=device.name == CPU)
    flags = cpu_flags()
    has_kernels = has_compiled_kernels(config, device.name, flags)
    is_gpu = device.name != CPU
    dtype, kv_dtype, *_ = number_types(config, is_gpu=is_gpu, cpu_flags=flags)
    extra = extra_bytes(config, header, dtype, is_gpu=is_gpu)
    images = 0
    if isinstance(header, ModelHeader) and header.generates:
        images = planned_image_bytes(config, header.spec, found.files, device=device.name)
    free = device.free_bytes if free_bytes is None else free_bytes
    free -= taken[device.name] + extra + images
    if device.name == CPU:  # shared with the ranks that follow
        free //= config.local_size - config.local_rank
    shares = [(config.rank, config.world_size), (0, 1)]  # every rank has the whole draft model
    models = [
        _planned(header, config, *share, has_kernels=has_kernels)
        for header, share in zip(headers, shares, strict=False)
    ]
    if head is not None:
        assert isinstance(models[0], PlannedModel)
        models.append(PlannedModel(header.name, head.tensors, head.kinds, models[0].is_packed))
    try:
        plan = plan_memory(
            replace(config, kv_dtype=kv_dtype),
            models,
            device=device.name,
            dtype=dtype,
            free_bytes=free,
            host_bytes=machine.free_host_bytes() - taken[CPU],
            total_bytes=device.total_bytes,
        )
    except NotEnoughMemory as error:
        if not images:
            raise
        text = f"{error.message}, after {in_gib(images)} for images"
        remedy = f"{error.remedy}; or keep fewer encoded images (--image-cache-mib)"
        if not Path(config.model).is_dir():
            remedy += f"; or serve text only (--mmproj {NO_PATH})"
        raise NotEnoughMemory(text, remedy=remedy) from None
    return replace(
        plan,
        image_bytes=images,
        image_refusal=found.cause or found.reason,
        free_bytes=plan.free_bytes + images,
    )


def _plan_encoder(
    config: WorkerConfig,
    header: AnyHeader,
    taken: defaultdict[str, int],
    visible: str | None,
    free_bytes: int | None,
) -> ModelPlan:
    """Return the plan of a model that only encodes."""
    assert not isinstance(header, TransformersHeader)
    device = choose_device(config.device, visible, config.local_rank)
    is_gpu, flags = device.name != CPU, cpu_flags()
    planned = None
    if isinstance(header, ModelHeader):
        has_kernels = has_compiled_kernels(config, device.name, flags)
        planned = _planned(header, config, 0, 1, has_kernels=has_kernels)
    usual = number_types(config, is_gpu=is_gpu, cpu_flags=flags)
    return plan_encoder(
        config,
        header,
        planned,
        device=device.name,
        dtype=dtype_of(config, header, usual.dtype, is_gpu=is_gpu),
        free_bytes=(device.free_bytes if free_bytes is None else free_bytes) - taken[device.name],
    )


def _planned(
    header: ModelHeader | TransformersHeader,
    config: WorkerConfig,
    rank: int,
    size: int,
    *,
    has_kernels: bool,
) -> PlannedModel | PlannedTransformersModel:
    """Return the facts about a model for the memory plan of one of `size` ranks that share it."""
    if isinstance(header, TransformersHeader) and size > 1:
        raise UnusableModel(NOT_DIVIDED)
    if isinstance(header, TransformersHeader):
        if config.weights == "packed":
            raise UnusableModel(
                "packed weights are not possible for models that transformers computes",
                remedy="serve without --weights packed",
            )
        if config.activations == "int8":
            raise UnusableModel(
                "activations in int8 are not possible for models that transformers computes",
                remedy="serve without --activations int8",
            )
        return PlannedTransformersModel(header.name, header.spec)
    if size > 1:
        check_dense(config.weights, config.activations)
        tensors = header.tensors.for_rank(rank, size)
        return PlannedModel(header.name, tensors, header.kinds, is_packed=False)
    packs = is_packed(header.spec, config.weights, config.activations, has_kernels=has_kernels)
    return PlannedModel(header.name, header.tensors, header.kinds, packs)


def has_compiled_kernels(config: WorkerConfig, device: str, flags: frozenset[str]) -> bool:
    """Return whether the worker will use compiled kernels. Raises UnusableModel if the configured
    kernels are not available."""
    if device != CPU or config.kernels == "torch":
        return False
    sets = selected(config.kernels, flags)
    if not sets:
        raise UnusableModel(
            f"this processor cannot run kernels {config.kernels!r}",
            remedy="serve with --kernels auto",
        )
    is_compiled = first_compiled(sets) is not None
    if not is_compiled and config.kernels != "auto":
        raise UnusableModel(
            f"kernels {config.kernels!r} are not compiled",
            remedy="reinstall with a C++ compiler, or serve with --kernels auto",
        )
    return is_compiled


def main() -> int:
    logging.disable()  # the worker will log the same lines when it loads the model
    *options, configs_json = sys.argv[1:]
    configs = msgspec.json.decode(configs_json, type=list[WorkerConfig])
    free = [int(each.removeprefix(FREE_BYTES)) for each in options if each.startswith(FREE_BYTES)]
    check = partial(preflight, visible=visible_devices(), free_bytes=next(iter(free), None))
    found = [check([each]) for each in configs] if EACH in options else check(configs)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
