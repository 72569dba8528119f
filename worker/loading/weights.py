"""Loads the tensors of a model's files into the fused matrices of a model, one at a time.

A WeightSource copies each tensor from the files directly into memory that the loader has allocated,
so no tensor is held in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.layers.linear import Dense, Linear
from worker.loading.quant_blocks import QuantBlocks
from worker.models.config import LlamaConfig
from worker.models.llama import LlamaLayer, LlamaWeights
from worker.models.tensors import (
    EMBEDDING,
    NORM,
    FusedMatrix,
    LayerTensors,
    head_matrix,
    layer_tensors,
)


class WeightSource(Protocol):
    """Reads tensors from a model's files. Tensors are named as in Hugging Face checkpoints."""

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy the tensor into `target` of the same shape, converting to its dtype and device."""
        ...

    def blocks(self, name: str) -> QuantBlocks | None:
        """Return the matrix in quantised blocks, or None if the file stores it in another form."""
        ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the model that has not been read yet: one part, or several stacked by rows."""

    #: Reads each part as quantised blocks; None for a part that the file stores in another form.
    blocks: Callable[[], list[QuantBlocks | None]]
    #: Reads all parts as numbers [out, in].
    values: Callable[[], Tensor]
    #: [out]
    bias: Tensor | None


MakeLinear = Callable[[Matrix], Linear]


def dense(matrix: Matrix) -> Linear:
    return Dense(matrix.values(), matrix.bias)


def load_llama(
    config: LlamaConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    make: MakeLinear = dense,
) -> LlamaWeights:
    """Read every tensor of the model. `check_tensors` must have checked the files before.

    make   makes each linear layer from its matrix
    """
    with torch.inference_mode():
        return _Loader(config, source, dtype, device, make).load()


class _Loader:
    def __init__(
        self,
        config: LlamaConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        make: MakeLinear,
    ) -> None:
        self._config = config
        self._source = source
        self._dtype = dtype
        self._device = device
        self._make = make

    def load(self) -> LlamaWeights:
        config = self._config
        embedding = self._read({EMBEDDING: (config.vocab_size, config.hidden)})
        layers = [self._layer(layer_tensors(config, i)) for i in range(config.num_layers)]
        norm = self._norm(NORM)
        return LlamaWeights(embedding, layers, norm, self._head(embedding))

    def _head(self, embedding: Tensor) -> Linear:
        if self._config.tied_embeddings:
            blocks = self._source.blocks
            return self._make(Matrix(lambda: [blocks(EMBEDDING)], lambda: embedding, None))
        return self._fused(head_matrix(self._config))

    def _layer(self, layer: LayerTensors) -> LlamaLayer:
        return LlamaLayer(
            attention_norm=self._norm(layer.attention_norm),
            qkv=self._fused(layer.qkv),
            output=self._fused(layer.output),
            mlp_norm=self._norm(layer.mlp_norm),
            gate_up=self._fused(layer.gate_up),
            down=self._fused(layer.down),
        )

    def _fused(self, matrix: FusedMatrix) -> Linear:
        weights, biases = matrix.weights, matrix.biases
        return self._make(
            Matrix(
                lambda: [self._source.blocks(name) for name in weights],
                lambda: self._read(weights),
                self._read(biases) if biases else None,
            )
        )

    def _norm(self, name: str) -> Tensor:
        return self._read({name: (self._config.hidden,)})

    def _read(self, parts: Mapping[str, tuple[int, ...]]) -> Tensor:
        """Return the tensors in `parts` (name -> shape), stacked by rows."""
        rows = [shape[0] for shape in parts.values()]
        columns = next(iter(parts.values()))[1:]
        whole = torch.empty((sum(rows), *columns), dtype=self._dtype, device=self._device)
        for name, target in zip(parts, torch.split(whole, rows), strict=True):
            self._source.read_into(name, target)
        return whole
