"""Plans a model's memory (weights, K/V cache, working memory) by arithmetic alone, without torch.

The plan is made from the headers of the files, before any weight is loaded. After loading, the
worker calls `kv_budget` again with the memory that is then free. A server must be able to finish
every request that it accepts, so the cache holds at least one request of the maximum length, or one
window if blocks before the window are freed (protocol/engine/kv_window.py). If the user has set
that length, it must fit; otherwise it is reduced to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from protocol.config.worker import Activations, WeightForm, WorkerConfig
from protocol.engine.kv_window import KVGroups, max_request_tokens
from protocol.tools.start_facts import GIB, ModelPlan
from worker.errors import NotEnoughMemory, UnusableModel
from worker.kv.budget import FREE_SHARE, KVDemand, in_gib, kv_budget, round_down
from worker.loading.header import PLAIN_KINDS
from worker.lora.targets import adapter_bytes
from worker.models.compiled import is_fitting
from worker.spec import kernel_sizes as sizes
from worker.spec import quantization
from worker.spec.architectures import (
    TransformersSpec,
    fitting_limits,
    num_checkpoints,
    request_state_bytes,
    state_bytes,
)
from worker.spec.draft_head import DraftHeadTensors
from worker.spec.facts import ModelFacts
from worker.spec.kv_blocks import BlockLayers
from worker.spec.layer_tensors import LayerTensors
from worker.spec.matrices import FusedMatrix, MatrixPart
from worker.spec.model_spec import ModelSpec
from worker.spec.step_limits import StepLimits, step_limits
from worker.spec.tensors import ModelTensors
from worker.startup.gpu_memory import (
    SMALLER_STEP,
    GpuMemory,
    gpu_kv_budget,
    reserve_bytes,
)
from worker.startup.kv_window import kv_groups, kv_window
from worker.startup.step_memory import SLOT_NUMBERS, kept_hidden_bytes, proposing_bytes, step_bytes

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
STORED_AS = {kind: kind for kind in sizes.BLOCK_FORMATS} | quantization.PACKED_AS
"""Quantised types whose matrices stay packed -> the block type that they are packed as."""
DENSE_FORMATS = {"bfloat16": sizes.BF16, "float32": sizes.F32}
PROCESS_BYTES = 256 << 20
"""Memory of all processes without a model. It was measured with a model of a few thousand weights,
and excludes file pages."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Facts about a model that the memory plan needs.

    kinds       the number type of each tensor, by the tensor's name
    is_packed   whether matrices are stored in the layout of the compiled kernels
    """

    name: str
    tensors: ModelTensors
    kinds: Mapping[str, str]
    is_packed: bool

    @property
    def spec(self) -> ModelSpec:
        return self.tensors.spec

    @property
    def layers(self) -> Iterator[LayerTensors]:
        return map(self.tensors.layer, range(self.spec.num_layers))


@dataclass(frozen=True, slots=True)
class PlannedTransformersModel:
    """Facts that the memory plan needs about a model that runs in the transformers library."""

    name: str
    spec: TransformersSpec


AnyPlanned = PlannedModel | PlannedTransformersModel


def is_packed(
    spec: ModelSpec, form: WeightForm, activations: Activations = "auto", *, has_kernels: bool
) -> bool:
    """Return whether the model's matrices are packed. Raises UnusableModel if packed weights, or
    activations that need packed weights, were requested but are impossible. `has_kernels` states
    whether compiled kernels run on this device."""
    fits = has_kernels and is_fitting(spec)
    if activations == "int8" and (form == "dense" or not fits):
        raise UnusableModel(
            "activations in int8 need packed weights, and compiled kernels that fit the model",
            remedy="serve without --activations int8",
        )
    if form == "packed" and not fits:
        raise UnusableModel(
            "packed weights need compiled kernels that fit the model",
            remedy="serve without --weights packed",
        )
    return fits and form != "dense"


def plan_memory(
    options: WorkerConfig,
    models: Sequence[AnyPlanned],
    *,
    device: str,
    dtype: str,
    free_bytes: int,
    host_bytes: int,
    total_bytes: int = 0,
) -> ModelPlan:
    """Return the plan for `models`: the model, and its draft model or head if there is one.

    free_bytes    free memory of the device
    host_bytes    free host memory; the same memory if the device is the CPU
    total_bytes   total memory of the GPU; not used if the device is the CPU

    Raises NotEnoughMemory, with the numbers and the options to change, and UnusableModel if
    `options.max_len` exceeds the model's context.
    """
    model = models[0]
    weights = sum(weights_bytes(each, dtype) for each in models)
    limits = step_limits(options, is_gpu=device != "cpu")
    limits = fitting_limits(model.spec, limits, options, free_bytes - weights)
    step = work_bytes(models, dtype, limits)
    checkpoints = num_checkpoints(model.spec, limits, free_bytes - weights - step)
    demand = _demand(options, models, dtype, limits)
    demand = demand.with_states(checkpoints, [each.spec for each in models])
    work = _total_work_bytes(options, models, dtype, demand, free_bytes - weights)
    one_state = request_state_bytes(model.spec)
    states = one_state * (limits.max_slots + checkpoints)
    expanded = sorted({kind for each in models for kind in expanded_kinds(each)})
    text = _needs(model.name, weights, _form(dtype, expanded), work, free_bytes)
    left, block = free_bytes - weights - work, demand.block_bytes
    least = _least_free_bytes(options, block, device)
    if left < least:
        ways = _smaller(model, dtype, expanded, device)
        if states and limits.max_slots > 1:
            one = states // limits.max_slots
            ways = f"serve with fewer --max-slots, each of which takes {in_gib(one)}; or {ways}"
        raise NotEnoughMemory(text, remedy=ways)
    tier = _tier_bytes(options, left - least if device == "cpu" else host_bytes, text)
    try:
        if device == "cpu":
            budget = kv_budget(options, demand, free_bytes=left - tier)
        else:
            memory = GpuMemory(
                total_bytes=total_bytes,
                free_bytes=free_bytes - weights,
                weights_bytes=weights,
                step_bytes=work,
                reserve_bytes=reserve_bytes(demand.limits, model.spec.vocab_size),
            )
            budget = gpu_kv_budget(options, demand, memory)
    except NotEnoughMemory as error:
        start = text if device == "cpu" else model.name
        raise NotEnoughMemory(f"{start}; {error.message}", remedy=error.remedy) from None
    return ModelPlan(
        name=model.name,
        architecture=model.spec.architecture,
        device=device,
        dtype=dtype,
        context_tokens=demand.context_tokens,
        max_len=budget.max_len,
        weights_bytes=weights,
        kv_bytes=budget.num_blocks * block,
        longest_kv_bytes=demand.longest_request_blocks(options) * block,
        work_bytes=work,
        max_slots=limits.max_slots,
        state_bytes=states,
        request_state_bytes=one_state,
        num_checkpoints=checkpoints if model.spec.state_items else None,
        tier_bytes=tier,
        has_kv=demand.num_states is None,
        free_bytes=free_bytes,
        expanded=expanded,
    )


def _demand(
    options: WorkerConfig, models: Sequence[AnyPlanned], dtype: str, limits: StepLimits
) -> KVDemand:
    """Return the needs of the K/V caches: context length, block size, step limits and windows."""
    specs = [each.spec for each in models]
    groups = kv_groups(options, specs)
    rounds_kv = options.kv_dtype == "int8"
    dtype = "bfloat16" if options.kv_dtype == "bfloat16" else dtype
    return KVDemand(
        context_tokens=specs[0].context_tokens,
        block_bytes=sum(
            block_bytes(spec, options.block_tokens, dtype, groups, rounds_kv=rounds_kv)
            for spec in specs
        ),
        limits=limits,
        window=kv_window(options, specs),
        groups=groups,
    )


def _least_free_bytes(options: WorkerConfig, block_bytes: int, device: str) -> int:
    """Return how much memory must be free for the smallest cache: the null block and one more. By
    default the cache of a CPU gets only 1/FREE_SHARE of the free memory."""
    takes_all = options.kv_blocks or options.kv_memory_gib or device != "cpu"
    return 2 * block_bytes * (1 if takes_all else FREE_SHARE)


def _total_work_bytes(
    options: WorkerConfig,
    models: Sequence[AnyPlanned],
    dtype: str,
    demand: KVDemand,
    free_bytes: int,
) -> int:
    """Return the memory of a step, of the slots, checkpoints and adapters, in bytes. `free_bytes`
    is what the weights leave."""
    model, work = models[0], work_bytes(models, dtype, demand.limits)
    # Slots hold a request's tokens, and no request is longer than the cache can serve.
    longest = max_request_tokens(
        options.max_len or demand.context_tokens,
        num_blocks=max(free_bytes - work, 0) // demand.block_bytes + 1,
        block_tokens=options.block_tokens,
        window=demand.window,
        groups=demand.groups,
    )
    checkpoints = _checkpoint_bytes(model, demand.limits, free_bytes - work)
    slots = 4 * demand.limits.max_slots * longest
    return work + slots + checkpoints + adapters_bytes(options, model, dtype)


def _checkpoint_bytes(model: AnyPlanned, limits: StepLimits, free_bytes: int) -> int:
    """Return the memory of all checkpoints of recurrent states, in bytes. `free_bytes` is what the
    weights and a step leave."""
    return 4 * model.spec.state_items * num_checkpoints(model.spec, limits, free_bytes)


def adapters_bytes(options: WorkerConfig, model: AnyPlanned, dtype: str) -> int:
    """Return the memory of LoRA adapters, in bytes: of adapters with the largest rank for all
    modules, in all rows that adapters can get. Raises UnusableModel if the model cannot have
    adapters."""
    rows = options.adapter_rows if options.lora_dir else len(options.lora)
    if not rows:
        return 0
    return rows * adapter_bytes(model.spec, options.max_lora_rank, DTYPE_BYTES[dtype])


def _needs(name: str, weights: int, form: str, work: int, free_bytes: int) -> str:
    """Return a sentence for errors: the memory that the model needs, and the memory that is
    free."""
    return (
        f"{name} needs {in_gib(weights)} for weights ({form}) and {in_gib(work)} for working "
        f"memory; {in_gib(free_bytes)} are free"
    )


def _tier_bytes(options: WorkerConfig, free_bytes: int, text: str) -> int:
    """Return the size of the K/V host tier in bytes. Raises NotEnoughMemory if it exceeds
    `free_bytes`; the message starts with `text`."""
    tier = int(options.kv_host_gib * GIB)
    if tier > free_bytes:
        raise NotEnoughMemory(
            f"{text}; kv_host_gib is {options.kv_host_gib:g}",
            remedy=f"--kv-host-gib {round_down(free_bytes / GIB):g}, or less",
        )
    return tier


def weights_bytes(model: AnyPlanned, dtype: str) -> int:
    """Return the size of a model's weights after loading, in bytes."""
    if isinstance(model, PlannedTransformersModel):
        return model.spec.num_parameters * DTYPE_BYTES[dtype]
    spec, item, head = model.spec, DTYPE_BYTES[dtype], model.tensors.head
    # Norms with an offset are float32.
    norm_item = DTYPE_BYTES["float32"] if spec.norm.offset else item
    total = _embedding_bytes(model, dtype) + spec.learned_positions * spec.hidden * item
    norms = 1 + model.tensors.num_input_norms
    total += norms * spec.hidden * (norm_item + spec.norm.bias * item)
    if (inputs := model.tensors.layer_inputs) is not None:
        total += _table_bytes(inputs.table, model, dtype) + inputs.norm.size * norm_item
        total += _matrix_bytes(inputs.project, model, dtype)
    total += sum(_matrix_bytes(matrix, model, dtype) for matrix in model.tensors.projections)
    for layer in model.layers:
        for norm in layer.norms:
            total += norm.size * (norm_item + norm.has_bias * item)
        total += layer.float_items * DTYPE_BYTES["float32"]
        for matrix in layer.matrices:
            total += _matrix_bytes(matrix, model, dtype) + matrix.has_bias * matrix.rows * item
        for matrix in layer.dense:
            total += _plain_bytes(matrix, model, dtype) + matrix.has_bias * matrix.rows * item
    return total + _matrix_bytes(head, model, dtype)


def _embedding_bytes(model: PlannedModel, dtype: str) -> int:
    """Return the bytes of the embedding: 0 if it is tied to the head, which is counted
    separately."""
    tied = model.spec.tied_embeddings
    return 0 if tied else _table_bytes(model.tensors.embedding_matrix, model, dtype)


def _table_bytes(matrix: FusedMatrix, model: PlannedModel, dtype: str) -> int:
    """Return the bytes of a table of rows, which is packed only if it is quantised."""
    if _packed_kinds(matrix, model):
        return _matrix_bytes(matrix, model, dtype)
    return matrix.rows * matrix.columns * DTYPE_BYTES[dtype]


def _plain_bytes(matrix: FusedMatrix, model: PlannedModel, dtype: str) -> int:
    """Return the bytes of a matrix whose numbers are never quantised."""
    if _can_pack(matrix, model):
        plain = _plain_format(matrix.parts, model, dtype)
        return _packed_bytes([(plain, matrix.rows)], matrix.columns)
    return matrix.rows * matrix.columns * DTYPE_BYTES[dtype]


def _matrix_bytes(matrix: FusedMatrix, model: PlannedModel, dtype: str) -> int:
    if not _can_pack(matrix, model):
        return matrix.rows * matrix.columns * DTYPE_BYTES[dtype]
    parts = [(_format_of(run, model, dtype), sum(part.rows for part in run)) for run in matrix.runs]
    if not _packed_kinds(matrix, model):  # one part
        parts = [(_plain_format(matrix.parts, model, dtype), matrix.rows)]
    return _packed_bytes(parts, matrix.columns)


def _packed_bytes(parts: Sequence[tuple[int, int]], columns: int) -> int:
    """Return the bytes of a packed matrix, whose parts have these formats and rows."""
    return sizes.ALIGNMENT + sum(sizes.packed_bytes(fmt, rows, columns) for fmt, rows in parts)


def _can_pack(matrix: FusedMatrix, model: PlannedModel) -> bool:
    return model.is_packed and sizes.can_pack(matrix.columns)


def _packed_kinds(matrix: FusedMatrix, model: PlannedModel) -> set[str]:
    """Return the types of the parts that stay quantised; none if the matrix cannot be packed."""
    kinds = {model.kinds[part.weight] for part in matrix.parts if not part.is_transposed}
    return kinds & STORED_AS.keys() if _can_pack(matrix, model) else set()


def _format_of(run: Sequence[MatrixPart], model: PlannedModel, dtype: str) -> int:
    """Return the packed format of parts of one tensor."""
    kind = model.kinds[run[0].weight]
    if kind not in STORED_AS or run[0].is_transposed:
        return _plain_format(run, model, dtype)
    return sizes.BLOCK_FORMATS[STORED_AS[kind]]


def _plain_format(parts: Sequence[MatrixPart], model: PlannedModel, dtype: str) -> int:
    """Return the packed format of parts that do not stay quantised. Numbers of bfloat16 are not
    widened. The worker finds further ones in files of float32, so this may be more than it takes.
    """
    is_narrow = all(model.kinds[part.weight] == "BF16" for part in parts)
    return DENSE_FORMATS["bfloat16" if is_narrow else dtype]


def expanded_kinds(model: AnyPlanned) -> set[str]:
    """Return the quantised number types of those matrices that are dequantised at loading."""
    if isinstance(model, PlannedTransformersModel):
        return set()
    matrices = [matrix for layer in model.layers for matrix in layer.matrices]
    found: set[str] = set()
    tensors, inputs = model.tensors, model.tensors.layer_inputs
    matrices += [inputs.table, inputs.project] if inputs else []
    matrices += tensors.projections
    for matrix in [*matrices, tensors.head, tensors.embedding_matrix]:
        kinds = {model.kinds[name] for name in matrix.names}
        found |= kinds - _packed_kinds(matrix, model)
    return found - PLAIN_KINDS


def block_bytes(
    spec: ModelFacts,
    block_tokens: int,
    dtype: str,
    groups: KVGroups | None = None,
    *,
    rounds_kv: bool = False,
) -> int:
    """Return the memory of one KV block: its keys and values in all layers that it stores.

    rounds_kv   whether keys and values are rounded to eight bits
    """
    layers = BlockLayers.of(spec, by_window=groups is not None)
    item = DTYPE_BYTES[dtype]
    return block_tokens * layers.token_bytes(
        lambda dim: dim + sizes.SCALE_BYTES if rounds_kv else dim * item
    )


def work_bytes(models: Sequence[AnyPlanned], dtype: str, limits: StepLimits) -> int:
    """Return the bytes of working memory. They are for the processes, for the slots without their
    tokens, and for a step or for loading, whichever needs more. The models of a step run one after
    the other."""
    model, item = models[0], DTYPE_BYTES[dtype]
    slots = 4 * limits.max_slots * SLOT_NUMBERS + state_bytes(model.spec, limits)
    is_shared = isinstance(model, PlannedModel) and model.tensors.share is not None
    steps = [step_bytes(model.spec, item, limits, is_shared=is_shared)]
    for other in models[1:]:
        is_head = isinstance(other, PlannedModel) and isinstance(other.tensors, DraftHeadTensors)
        steps.append(proposing_bytes(other.spec, item, limits, model.spec.hidden, is_head=is_head))
        if is_head:
            slots += kept_hidden_bytes(model.spec.hidden, limits.max_slots)
    loading = max(_loading_bytes(each, dtype) for each in models)
    return PROCESS_BYTES + slots + max(*steps, loading)


def _loading_bytes(model: AnyPlanned, dtype: str) -> int:
    """Return the memory of temporary copies while weights are loaded."""
    spec, item = model.spec, DTYPE_BYTES[dtype]
    if isinstance(model, PlannedTransformersModel):
        # A tensor may be read in another dtype, or in parts that are then fused.
        return model.spec.largest_tensor * max(item, DTYPE_BYTES["float32"])
    if not model.is_packed:
        return _whole_bytes(model, item)
    # A matrix that is packed from plain numbers exists twice while it is packed.
    largest = max(m.rows * m.columns for layer in model.layers for m in layer.matrices)
    return max(largest, spec.vocab_size * spec.hidden * (not model.spec.tied_embeddings)) * item


def _whole_bytes(model: PlannedModel, item: int) -> int:
    """Return the bytes of the largest tensor that a rank reads whole although it keeps only a part.
    Only quantised tensors are read whole. Return 0 without a group."""
    if model.tensors.share is None:
        return 0
    matrices = (matrix for layer in model.layers for matrix in layer.matrices)
    parts = (part for each in (*matrices, model.tensors.head) for part in each.parts)
    quantized = (part for part in parts if model.kinds[part.weight] not in PLAIN_KINDS)
    return item * max((math.prod(part.cut.whole) for part in quantized if part.cut), default=0)


def _form(dtype: str, expanded: Sequence[str]) -> str:
    return dtype + (f", expanded from {', '.join(expanded)}" if expanded else "")


def _smaller(model: AnyPlanned, dtype: str, expanded: Sequence[str], device: str) -> str:
    """Return advice for an error: ways to make this model's weights smaller, or a GPU's step."""
    ways = []
    if dtype == "float32" and weights_bytes(model, "bfloat16") < weights_bytes(model, "float32"):
        ways.append("--dtype bfloat16")
    if (
        isinstance(model, PlannedModel)
        and model.is_packed
        and (expanded or PLAIN_KINDS & set(model.kinds.values()))
    ):
        ways.append("a GGUF file of type Q4_K or Q8_0, which stay packed")
    ways.append("a smaller model")
    return "use " + ", or ".join([*ways, SMALLER_STEP] if device != "cpu" else ways)
