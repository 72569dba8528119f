"""From named tensors in files to the fused tensors of a model, one tensor at a time.

A source knows names, as Hugging Face spells them, and how to write one tensor into memory that the
model has already allocated: nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.layers.linear import Dense, Linear
from worker.loading.blocks import Blocks
from worker.loading.errors import UnusableModel
from worker.models.config import LlamaConfig
from worker.models.llama import Layer, LlamaWeights


class WeightSource(Protocol):
    def names(self) -> Set[str]:
        """Every tensor in the files."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_into(self, name: str, target: Tensor) -> None:
        """Write the tensor into `target`, of the same shape, converting to its dtype and device."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """A matrix as it is quantised in the files; None where it is not, or not in such blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the model, of one part or several below one another, before it is read.

    blocks  of each part;   values  reads all of them as numbers [out, in];   bias  [out] or None
    """

    blocks: Callable[[], list[Blocks | None]]
    values: Callable[[], Tensor]
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
    """Every tensor of the source is used and every part of the model filled, or UnusableModel."""
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
        self._unread = {n for n in source.names() if not n.endswith("rotary_emb.inv_freq")}
        self._dtype = dtype
        self._device = device
        self._make = make

    def load(self) -> LlamaWeights:
        config = self._config
        embedding = self._tensor("model.embed_tokens.weight", config.vocab_size, config.hidden)
        layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        norm = self._tensor("model.norm.weight", config.hidden)
        weights = LlamaWeights(embedding, layers, norm, self._head(embedding))
        if self._unread:
            some = ", ".join(sorted(self._unread)[:3])
            raise UnusableModel(f"{len(self._unread)} tensors are not of this architecture: {some}")
        return weights

    def _head(self, embedding: Tensor) -> Linear:
        if self._config.tied_embeddings:
            self._unread.discard("lm_head.weight")  # a copy, where somebody saved it all the same
            name = "model.embed_tokens.weight"
            return self._make(Matrix(lambda: [self._source.blocks(name)], lambda: embedding, None))
        rows, columns = embedding.shape
        return self._fused({"lm_head": rows}, columns, bias=False)

    def _layer(self, prefix: str) -> Layer:
        config = self._config
        hidden, inner = config.hidden, config.intermediate
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            attention_norm=self._tensor(prefix + "input_layernorm.weight", hidden),
            qkv=self._fused(
                {attention + "q_proj": q, attention + "k_proj": kv, attention + "v_proj": kv},
                hidden,
                bias=config.attention_bias,
            ),
            output=self._fused({attention + "o_proj": hidden}, q, bias=config.output_bias),
            mlp_norm=self._tensor(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._fused(
                {mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, bias=config.mlp_bias
            ),
            down=self._fused({mlp + "down_proj": hidden}, inner, bias=config.mlp_bias),
        )

    def _fused(self, parts: dict[str, int], columns: int, *, bias: bool) -> Linear:
        """Parts (name -> rows) below one another."""
        weights = {f"{name}.weight": (count, columns) for name, count in parts.items()}
        biases = {f"{name}.bias": (count,) for name, count in parts.items()}
        for name, shape in weights.items():
            self._check(name, shape)
        matrix = Matrix(
            lambda: [self._source.blocks(name) for name in weights],
            lambda: self._read(weights),
            self._stacked(biases) if bias else None,
        )
        made = self._make(matrix)
        self._unread -= weights.keys()
        return made

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._stacked({name: shape})

    def _stacked(self, parts: Mapping[str, tuple[int, ...]]) -> Tensor:
        """Parts (name -> shape) below one another. Memory is taken only for shapes that agree."""
        for name, shape in parts.items():
            self._check(name, shape)
        self._unread -= parts.keys()
        return self._read(parts)

    def _read(self, parts: Mapping[str, tuple[int, ...]]) -> Tensor:
        rows = [shape[0] for shape in parts.values()]
        columns = next(iter(parts.values()))[1:]
        whole = torch.empty((sum(rows), *columns), dtype=self._dtype, device=self._device)
        for name, target in zip(parts, torch.split(whole, rows), strict=True):
            self._source.read_into(name, target)
        return whole

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._unread:
            raise UnusableModel(f"the files hold no tensor {name!r}")
        if self._source.shape(name) != shape:
            raise UnusableModel(
                f"{name} has shape {self._source.shape(name)}, by the config it should be {shape}"
            )
