"""In what form weights are held: packed for the compiled kernels, or dense for torch."""

from __future__ import annotations

from protocol.config import WeightForm
from worker.kernels import native, packed
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedLinear
from worker.kernels.twin import TorchKernels
from worker.layers.linear import Linear
from worker.loading.blocks import stacked
from worker.loading.errors import UnusableModel
from worker.loading.weights import MakeLinear, Matrix, dense
from worker.models.config import LlamaConfig


def fitting(kernels: Kernels, config: LlamaConfig) -> Kernels:
    """The kernels, if they are made for such a model; else torch's."""
    fits = native.fits(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        sizes=(config.hidden, config.intermediate),
    )
    return kernels if fits else TorchKernels()


def maker(kernels: Kernels, form: WeightForm) -> MakeLinear:
    """Raises UnusableModel where packed weights are asked for and there are no kernels for them."""
    if isinstance(kernels, NativeKernels) and form != "dense":
        return lambda matrix: pack(kernels, matrix)
    if form == "packed":
        raise UnusableModel("packed weights need compiled kernels that fit the model")
    return dense


def pack(kernels: NativeKernels, matrix: Matrix) -> Linear:
    """From the file's blocks, if all parts have sound ones of one kind; else from numbers."""
    blocks = stacked(matrix.blocks())
    if blocks is not None:
        return PackedLinear(kernels, packed.pack_blocks(kernels, blocks), matrix.bias)
    values = matrix.values()
    if not packed.fits(values.shape[1]):
        return dense(matrix)
    return PackedLinear(kernels, packed.pack_dense(kernels, values), matrix.bias)
