"""Form of the weights: packed for the compiled kernels, dense for torch, or both. With both, the
number of rows of a step chooses, by measured times (autotune.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from protocol.config.worker import WeightForm
from worker.kernels import packed, prepacked, sizes
from worker.kernels.base import Kernels
from worker.kernels.library import VERSION
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedLinear
from worker.kernels.reference import TorchKernels
from worker.layers.hybrid_linear import NEVER, HybridLinear
from worker.layers.linear import Linear
from worker.loading.errors import UnusableModel
from worker.loading.quant_blocks import stacked
from worker.loading.weights import MakeLinear, Matrix, dense
from worker.models.autotune import dense_from, in_words, step_costs
from worker.models.autotune_cache import ROWS, row_times
from worker.models.config import LlamaConfig
from worker.models.llama import LlamaWeights
from worker.models.llama_native import LINEARS
from worker.startup import machine
from worker.startup.device import free_bytes
from worker.startup.memory_plan import FREE_SHARE

log = logging.getLogger(__name__)

LEAST_WEIGHTS = 1 << 20
"""Weights of the smallest layer that is measured. Smaller ones gain nothing, and their times are
unreliable."""


def fitting(kernels: Kernels, config: LlamaConfig) -> Kernels:
    """Return `kernels` if they support the model, else torch's."""
    fits = sizes.fits(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        sizes=(config.hidden, config.intermediate),
    )
    return kernels if fits else TorchKernels()


def maker(kernels: Kernels, form: WeightForm) -> MakeLinear:
    """Return the function that makes a linear layer in `form`.

    With `auto`, layers are packed until `settle` decides. Raises UnusableModel if packed weights
    are requested and there are no kernels for them.
    """
    if isinstance(kernels, NativeKernels) and form == "packed":
        return lambda matrix: pack(kernels, matrix)
    if isinstance(kernels, NativeKernels) and form == "auto":
        return lambda matrix: by_rows(pack(kernels, matrix), matrix)
    if form == "packed":
        raise UnusableModel("packed weights need compiled kernels that fit the model")
    return dense


def by_rows(linear: Linear, matrix: Matrix) -> Linear:
    """Return a layer that can also be dense, if `linear` is packed; otherwise `linear`."""
    if not isinstance(linear, PackedLinear):
        return linear
    return HybridLinear(linear, lambda: prepacked.Prepacked(matrix.values(), matrix.bias))


def settle(
    config: LlamaConfig,
    weights: LlamaWeights,
    dtype: torch.dtype,
    kernels: Kernels,
    folder: Path | None,
) -> list[tuple[int, float]]:
    """Measure a layer, choose the number of rows from which layers are dense, and make the copies.

    Return (rows, seconds) of a step's linears; empty if nothing was measured.

    folder   directory of the measurements
    """
    layer = [getattr(weights.layers[0], name) for name in LINEARS]
    num_weights = sum(linear.num_weights for linear in layer)
    costs: list[tuple[int, float]] = []
    from_rows = NEVER
    if weights.norm.device.type == "cpu" and num_weights >= LEAST_WEIGHTS:
        twice = [each for each in layer if isinstance(each, HybridLinear)]
        may_be = len(twice) == len(layer) and may_be_dense(twice, dtype, len(weights.layers))
        inputs = _inputs(config, dtype)
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


def may_be_dense(layer: Sequence[HybridLinear], dtype: torch.dtype, layers: int) -> bool:
    """Whether dense copies may be made: only in bfloat16, as packed float32 is exact, and only if
    they fit into memory."""
    if dtype != torch.bfloat16 or not prepacked.is_possible():
        return False
    needed = layers * sum(each.dense_bytes for each in layer)
    has_room = needed <= free_bytes(torch.device("cpu")) // FREE_SHARE
    if not has_room:
        log.info("dense copies of the weights do not fit in memory (%d MiB needed)", needed >> 20)
    return has_room


def _settle(weights: LlamaWeights, from_rows: int) -> None:
    """Make the layers dense from `from_rows` rows on. The head, which computes only sampled
    rows, stays packed."""
    copied = 0
    with torch.inference_mode():
        for layer in weights.layers:
            for name in LINEARS:
                linear = getattr(layer, name)
                if isinstance(linear, HybridLinear):
                    setattr(layer, name, linear.finalize(from_rows))
                    copied += linear.dense_bytes
        if isinstance(weights.head, HybridLinear):
            weights.head = weights.head.finalize(NEVER)
    if copied and from_rows < NEVER:
        log.info("dense copies of weights for %d rows and more: %d MiB", from_rows, copied >> 20)


def _reader(layer: Sequence[HybridLinear]) -> Callable[[], list[Linear]]:
    reads = [each.read_dense for each in layer]
    return lambda: [read() for read in reads if read is not None]


def _inputs(config: LlamaConfig, dtype: torch.dtype) -> list[Tensor]:
    """Return noise as the input of each linear of LINEARS."""
    seen = config.num_heads * config.head_dim
    widths = (config.hidden, seen, config.hidden, config.intermediate)
    noise = torch.Generator().manual_seed(0)
    return [torch.randn(max(ROWS), width, generator=noise).to(dtype) for width in widths]


def _circumstances(
    layer: Sequence[Linear],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    kernels: Kernels,
    may_be: bool,
) -> list[object]:
    """Return everything that the times depend on."""
    sizes = [
        (x.shape[1], linear.num_weights, sum(tensor.nbytes for tensor in linear.tensors()))
        for x, linear in zip(inputs, layer, strict=True)
    ]
    forms = [type(linear).__name__ for linear in layer]
    about = (machine.cpu_name(), torch.get_num_threads(), torch.__version__, VERSION)
    return [*about, kernels.name, dtype, may_be, *forms, *sizes]


def pack(kernels: NativeKernels, matrix: Matrix) -> Linear:
    """Pack a matrix from the file's blocks if all parts have valid ones of one kind, else from
    numbers."""
    blocks = stacked(matrix.blocks())
    if blocks is not None:
        return PackedLinear(kernels, packed.pack_blocks(kernels, blocks), matrix.bias)
    values = matrix.values()
    if not sizes.can_pack(values.shape[1]):
        return dense(matrix)
    return PackedLinear(kernels, packed.pack_dense(kernels, values), matrix.bias)
