"""Chooses the form of a model's weights: packed for the compiled kernels, dense for torch, or both.

If both forms are in memory, a step uses the form that was measured to be faster for its number of
rows (autotune.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from protocol.config.worker import Activations, WeightForm
from worker.checkpoint.quant_blocks import QuantBlocks
from worker.device import machine
from worker.device.device import free_bytes
from worker.errors import UnusableModel
from worker.kernels import packed, prepacked
from worker.kernels.base import Kernels
from worker.kernels.library import VERSION
from worker.kernels.native import NativeKernels
from worker.kernels.number_types import FASTEST
from worker.kernels.packed import PackedEmbedding, PackedHeads, PackedLinear, PackedMatrix
from worker.kernels.reference import TorchKernels
from worker.kv.budget import FREE_SHARE
from worker.layers.embedding import Embedding
from worker.layers.hybrid_linear import NEVER, HybridLinear
from worker.layers.linear import Dense, HeadLinears, Linear
from worker.layers.mlp import ExpertMlp
from worker.loading.layouts import DenseLayout, Matrix, WeightLayout
from worker.models.autotune import dense_from, in_words, mixture_costs, step_costs
from worker.models.autotune_cache import example_input, row_times
from worker.models.compiled import is_fitting
from worker.models.decoder import DecoderLayer, DecoderWeights
from worker.spec import kernel_sizes as sizes
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.recurrent import GatedDeltaSpec

log = logging.getLogger(__name__)

QUANTISED = frozenset(sizes.BLOCK_FORMATS.values())
NARROWED_ROWS = 64
"""Rows whose bits are checked together: few, because the check ends at the first that fails."""
BITS_BEYOND_BFLOAT16 = 0xFFFF
"""Bits of a float32 that are 0 in a number of bfloat16."""
LEAST_WEIGHTS = 1 << 20
"""Layers with fewer weights are not measured: they gain nothing from dense copies, and their
times are too short to be reliable."""


def fitting(kernels: Kernels, spec: ModelSpec) -> Kernels:
    """Return `kernels` if they support the model, else torch's. Only compiled kernels have
    limits."""
    if not isinstance(kernels, NativeKernels) or is_fitting(spec):
        return kernels
    log.warning(
        "serving with torch's kernels, which are several times slower: the compiled kernels do not "
        "support the model's dimensions"
    )
    return TorchKernels()


def layout(
    kernels: Kernels,
    form: WeightForm,
    dtype: torch.dtype,
    activations: Activations = "auto",
    *,
    rounds_floats: bool = False,
) -> WeightLayout:
    """Return the weight layout for the options `form` and `activations` and a model of dtype
    `dtype`.

    - "packed": packed weights. Raises UnusableModel without compiled kernels.
    - "dense", or no compiled kernels: dense weights.
    - "auto" with compiled kernels: packed weights.
    - "both" with compiled kernels: packed weights, to which `settle` may add dense copies.

    With activations "int8", quantised weights round their inputs. "auto" does so if the kernels
    multiply integers faster (number_types.py), in float32 only with `rounds_floats`. Raises
    UnusableModel if activations are "int8" and the weights are dense.
    """
    if isinstance(kernels, NativeKernels) and form != "dense":
        may_round = dtype == torch.bfloat16 or rounds_floats
        is_faster = FASTEST[kernels.name].multiplies_integers
        rounds = activations == "int8" or (activations == "auto" and may_round and is_faster)
        return PackedLayout(kernels, dtype, may_copy=form == "both", rounds_inputs=rounds)
    if form == "packed":
        raise UnusableModel("packed weights need compiled kernels that fit the model")
    if activations == "int8":
        raise UnusableModel("activations in int8 need packed weights")
    return DenseLayout()


class PackedLayout:
    """Makes layers with packed weights: linears of every matrix whose size allows it, and
    embeddings that the file stores in quantised blocks. Other layers are dense."""

    def __init__(
        self,
        kernels: NativeKernels,
        dtype: torch.dtype,
        *,
        may_copy: bool,
        rounds_inputs: bool = False,
    ) -> None:
        """Make layers for a model of dtype `dtype`.

        may_copy        wrap linears so that `settle` can add dense copies
        rounds_inputs   round the inputs of quantised weights to eight bits
        """
        self._kernels, self._dtype, self._may_copy = kernels, dtype, may_copy
        self._rounds_inputs = rounds_inputs
        self._dense = DenseLayout()

    def linear(self, matrix: Matrix) -> Linear:
        packed_matrix = pack(self._kernels, matrix, rounds_inputs=self._rounds_inputs)
        if packed_matrix is None:
            return self._dense.linear(matrix)
        linear = PackedLinear(self._kernels, packed_matrix, matrix.bias)
        if not self._may_copy:
            return linear
        return HybridLinear(linear, lambda: prepacked.Prepacked(matrix.values(), matrix.bias))

    def plain(self, matrix: Matrix) -> Linear:
        values = matrix.values()
        if not sizes.can_pack(values.shape[1]):
            return Dense(values, matrix.bias)
        numbers = packed.pack(self._kernels, narrowed(values), rounds_inputs=self._rounds_inputs)
        return PackedLinear(self._kernels, numbers, matrix.bias)

    def heads(self, matrices: Sequence[Matrix]) -> HeadLinears:
        made = [pack(self._kernels, each, rounds_inputs=self._rounds_inputs) for each in matrices]
        if None in made:
            return self._dense.heads(matrices)
        return PackedHeads([PackedLinear(self._kernels, each) for each in made if each])

    def head(self, matrix: Matrix) -> Linear:
        return self.linear(matrix)

    def embedding(self, matrix: Matrix) -> Embedding:
        blocks = _sound_blocks(matrix)
        if None in blocks:
            return self._dense.embedding(matrix)
        whole = packed.pack(self._kernels, *filter(None, blocks))
        return PackedEmbedding(self._kernels, whole, self._dtype)

    def tied_embedding(self, head: Linear) -> Embedding:
        linear = head.packed if isinstance(head, HybridLinear) else head
        if isinstance(linear, PackedLinear):
            return PackedEmbedding(self._kernels, linear.matrix, self._dtype)
        return self._dense.tied_embedding(linear)


def pack(
    kernels: NativeKernels, matrix: Matrix, *, rounds_inputs: bool = False
) -> PackedMatrix | None:
    """Read and pack a matrix. Return None if its number of columns does not allow it.

    Quantised blocks of the file are packed as they are. A part that has none, or whose scales are
    not valid (`QuantBlocks.is_sound`), is packed as numbers. These get their inputs unrounded, but
    with `rounds_inputs` their sums have the same bits on every instruction set (csrc/multiply.h).
    """
    blocks = _sound_blocks(matrix)
    if None not in blocks:
        return packed.pack(kernels, *filter(None, blocks), rounds_inputs=rounds_inputs)
    values = matrix.values()
    if not sizes.can_pack(values.shape[1]):
        return None
    if not any(blocks):
        return packed.pack(kernels, narrowed(values), rounds_inputs=rounds_inputs)
    numbers = torch.split(values, list(matrix.rows))
    parts = [part or narrowed(rows) for part, rows in zip(blocks, numbers, strict=True)]
    return packed.pack(kernels, *parts, rounds_inputs=rounds_inputs)


def narrowed(values: Tensor) -> Tensor:
    """Return numbers [outputs, inputs] in bfloat16 if it represents all of them. So the weights of
    most files take half of the memory of float32, and the same products come of them."""
    if values.dtype != torch.float32:
        return values
    rows_bits = torch.split(values.view(torch.int32), NARROWED_ROWS)
    if any(bool((bits & BITS_BEYOND_BFLOAT16).any()) for bits in rows_bits):
        return values
    return values.bfloat16()


def _sound_blocks(matrix: Matrix) -> list[QuantBlocks | None]:
    """Return the quantised blocks of each part; None for a part without valid ones."""
    return [part if part is not None and part.is_sound else None for part in matrix.blocks()]


def settle(
    spec: ModelSpec,
    weights: DecoderWeights,
    dtype: torch.dtype,
    kernels: Kernels,
    folder: Path | None,
) -> list[tuple[int, float]]:
    """Finalize the linears of a loaded model: measure the first layer, choose from how many rows on
    steps use dense weights, and read the dense copies.

    Return (rows, seconds) for each measured number of rows: the time that all linears take in a
    step. Return [] if nothing was measured: not on a CPU, a first layer with only one block, or too
    small. Models with mixtures of experts are never dense.

    folder   directory that caches the measurements; None disables the cache
    """
    first = weights.layers[0]
    layer = _linears(first)
    num_weights = sum(linear.num_weights for linear in layer)
    is_measured = weights.embedding.device.type == "cpu" and num_weights >= LEAST_WEIGHTS
    costs: list[tuple[int, float]] = []
    from_rows = NEVER
    last = weights.layers[-1]
    if isinstance(last.mlp, ExpertMlp):
        if weights.embedding.device.type == "cpu" and not last.spec.has_one_block:
            costs = _mixture_costs(weights, last.mlp, dtype, kernels, folder)
    elif is_measured and is_typical(first.spec):
        twice = [each for each in layer if isinstance(each, HybridLinear)]
        may_be = len(twice) == len(layer) and may_be_dense(twice, dtype, len(weights.layers))
        inputs = _inputs(spec, dtype)
        table = row_times(
            [*map(str, _circumstances(layer, inputs, dtype, kernels, may_be))],
            layer,
            _reader(twice) if may_be else None,
            inputs,
            folder,
        )
        costs = step_costs(table, len(weights.layers))
        from_rows = dense_from(table) or NEVER
        log.debug("linears of a step: %s", in_words(table))
    _settle(weights, from_rows)
    return costs


def _mixture_costs(
    weights: DecoderWeights,
    mixture: ExpertMlp,
    dtype: torch.dtype,
    kernels: Kernels,
    folder: Path | None,
) -> list[tuple[int, float]]:
    """Measure the last layer, whose MLP is `mixture`. Return (rows, seconds) as `settle` does; []
    if some of the linears are not packed, or too small."""
    layer, expert = weights.layers[-1], mixture.experts[0]
    of_experts = {id(each) for each in mixture.experts}
    linears = [
        _packed(getattr(owner, name))
        for owner, name in layer.linears
        if id(owner) not in of_experts
    ]
    of_expert = [_packed(getattr(owner, name)) for owner, name in expert.linears]
    packed_ones = [[each for each in part if each is not None] for part in (of_expert, linears)]
    num_weights = mixture.spec.num_experts * sum(each.num_weights for each in packed_ones[0])
    if None in (*linears, *of_expert) or num_weights < LEAST_WEIGHTS:
        return []
    tables = []
    for part in packed_ones:
        inputs = [example_input(each.matrix.inputs, dtype) for each in part]
        of = map(str, _circumstances(part, inputs, dtype, kernels, may_be=False))
        tables.append(row_times([*of], part, None, inputs, folder))
    return mixture_costs(
        *tables,
        num_experts=mixture.spec.num_experts,
        top_k=mixture.spec.top_k,
        mixtures=sum(isinstance(each.mlp, ExpertMlp) for each in weights.layers),
        layers=len(weights.layers),
    )


def _packed(linear: Linear) -> PackedLinear | None:
    packed = linear.packed if isinstance(linear, HybridLinear) else linear
    return packed if isinstance(packed, PackedLinear) else None


def is_typical(layer: LayerSpec) -> bool:
    """Return whether the linears of a layer are a measure of those of all layers: it has one token
    mixer and an MLP without experts."""
    is_plain = not (layer.has_one_block or layer.has_two_mixers)
    return is_plain and all(mlp.num_experts == 1 for mlp in layer.mlps)


def may_be_dense(layer: Sequence[HybridLinear], dtype: torch.dtype, layers: int) -> bool:
    """Return whether the model may have dense copies of its packed weights.

    They need bfloat16, a processor on which oneDNN multiplies it, and free memory for all layers.
    In float32, packed weights are exact, and no copies are made.

    layer    the linears of one layer
    layers   the number of layers
    """
    if dtype != torch.bfloat16 or not prepacked.is_possible():
        return False
    needed = layers * sum(each.dense_bytes for each in layer)
    has_room = needed <= free_bytes(torch.device("cpu")) // FREE_SHARE
    if not has_room:
        log.info("dense copies of the weights do not fit in memory (%d MiB needed)", needed >> 20)
    return has_room


def _settle(weights: DecoderWeights, from_rows: int) -> None:
    """Make the layers dense from `from_rows` rows on. The head, which computes only sampled
    rows, stays packed."""
    copied = 0
    with torch.inference_mode():
        for layer in weights.layers:
            for owner, name in layer.linears:
                linear = getattr(owner, name)
                if isinstance(linear, HybridLinear):
                    setattr(owner, name, linear.finalize(from_rows))
                    copied += linear.dense_bytes
        if isinstance(weights.head, HybridLinear):
            weights.head = weights.head.finalize(NEVER)
    if copied and from_rows < NEVER:
        log.info("dense copies of weights for %d rows and more: %d MiB", from_rows, copied >> 20)


def _reader(layer: Sequence[HybridLinear]) -> Callable[[], list[Linear]]:
    reads = [each.read_dense for each in layer]
    return lambda: [read() for read in reads if read is not None]


def _linears(layer: DecoderLayer) -> list[Linear]:
    return [getattr(owner, name) for owner, name in layer.linears]


def _inputs(spec: ModelSpec, dtype: torch.dtype) -> list[Tensor]:
    """Return an input for each linear of the first layer."""
    layer = spec.layers[0]
    assert layer.mlp is not None
    widths = [spec.hidden, *_mixed_widths(layer, spec.hidden), spec.hidden, layer.mlp.intermediate]
    if spec.layer_inputs is not None:
        widths += [spec.hidden, spec.layer_inputs.width]
    if layer.laurel is not None:
        widths += [spec.hidden, layer.laurel]
    return [example_input(width, dtype) for width in widths]


def _mixed_widths(layer: LayerSpec, hidden: int) -> list[int]:
    """Return the widths of the inputs of the token mixer's linears but the first."""
    if isinstance(layer.recurrent, GatedDeltaSpec):
        ranks = (layer.recurrent.decay_rank, layer.recurrent.gate_rank)
        return [layer.recurrent.output_width, *(rank for rank in ranks if rank)]
    if layer.recurrent is not None:
        return [layer.recurrent.output_width]
    assert layer.attention is not None
    latent, width = layer.attention.latent, layer.attention.result_width
    if latent is None or not latent.query_rank:
        return [width]
    of_indexer = [] if latent.indexer is None else [latent.query_rank, hidden]
    return [latent.query_rank, *of_indexer, width]


def _circumstances(
    layer: Sequence[Linear],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    kernels: Kernels,
    may_be: bool,
) -> list[object]:
    """Return everything that the measured times depend on: machine, software and sizes."""
    sizes = [
        (x.shape[1], linear.num_weights, sum(tensor.nbytes for tensor in linear.tensors()))
        for x, linear in zip(inputs, layer, strict=True)
    ]
    forms = [_form(linear) for linear in layer]
    about = (machine.cpu_name(), torch.get_num_threads(), torch.__version__, VERSION)
    return [*about, kernels.name, dtype, may_be, *forms, *sizes]


def rounds_inputs(weights: DecoderWeights) -> bool:
    """Return whether any linear of the model rounds its inputs."""
    layers = (slot for layer in weights.layers for slot in layer.linears)
    return _rounds_inputs(weights.head) or any(
        _rounds_inputs(getattr(owner, name)) for owner, name in layers
    )


def _rounds_inputs(linear: Linear) -> bool:
    packed = linear.packed if isinstance(linear, HybridLinear) else linear
    if not isinstance(packed, PackedLinear):
        return False
    matrix = packed.matrix.struct
    is_quantised = any(part.format in QUANTISED for part in matrix.parts[: matrix.num_parts])
    return bool(matrix.rounds_inputs) and is_quantised


def _form(linear: Linear) -> str:
    """Return the name of the linear's class, and whether it rounds its inputs."""
    return f"{type(linear).__name__} {'int8' if _rounds_inputs(linear) else ''}"
