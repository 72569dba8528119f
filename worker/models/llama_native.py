"""The Llama forward pass as one call of the compiled kernels per step, if all linears are packed.

csrc/forward.h and decode.h correspond to llama.py line by line. Control does not return to Python
between linears, and threads are woken once per step. Steps with so many rows that dense weights are
faster are computed by llama.py instead (layers/hybrid_linear.py).

Legend in llama.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from itertools import accumulate
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from worker.attention.native_paged import NativePlan
from worker.kernels import structs
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels, address, dtype_code
from worker.kernels.packed import PackedLinear, PackedMatrix
from worker.kv.cache import KVCache
from worker.layers.hybrid_linear import NEVER, HybridLinear
from worker.layers.rope import attention_factor, inverse_frequencies
from worker.models.config import LlamaConfig

if TYPE_CHECKING:
    from worker.models.llama import LlamaLayer, LlamaWeights

ALIGNMENT = 64
KEPT_BYTES = 64 << 20
LINEARS = ("qkv", "output", "gate_up", "down")


class WholePass:
    """The whole forward pass of a model, as one call of a compiled function.

    The C structs hold addresses of the weights, so this object keeps a reference to the weights.
    `use_cache` fills in the addresses of the KV cache.
    """

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, head: PackedMatrix, kernels: NativeKernels
    ) -> None:
        self._config = config
        self._weights = weights
        self.kernels = kernels
        self.dtype_code = dtype_code(weights.embedding, weights.norm)
        self._inv_freq = inverse_frequencies(config.head_dim, config.rope)
        self._heads = structs.CHeads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._layers = (structs.CLayer * len(weights.layers))(*map(_layer, weights.layers))
        self.head = structs.CHead(address(weights.norm), head.struct, config.norm_eps)
        self._from_rows = min(map(_from_rows, weights.layers))
        self._memory = PassMemory()
        self._cache = 0
        self.vocab = len(weights.embedding)

    @classmethod
    def of(cls, config: LlamaConfig, weights: LlamaWeights, kernels: Kernels) -> Self | None:
        """Return the pass, or None if the kernels are torch's or a linear is not packed."""
        linears = (getattr(layer, name) for layer in weights.layers for name in LINEARS)
        if not isinstance(kernels, NativeKernels) or not isinstance(weights.head, PackedLinear):
            return None
        if not all(isinstance(linear, PackedLinear | HybridLinear) for linear in linears):
            return None
        return cls(config, weights, weights.head.matrix, kernels)

    def is_for(self, tokens: int) -> bool:
        """Return whether a step of `tokens` tokens uses packed weights, and so this pass."""
        return tokens < self._from_rows

    def __call__(self, token_ids: Tensor, plan: NativePlan, cache: KVCache) -> Tensor:
        """Compute a step as `Llama` does, but return the hidden states [T, hidden] in float32."""
        count, batch = len(token_ids), plan.batch
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.vocab:
            raise ValueError("a token is not in the vocabulary")
        assert count == len(batch.positions) == len(batch.slot_mapping)
        assert token_ids.dtype == batch.positions.dtype == torch.int64
        hidden = torch.empty(count, self._config.hidden)
        step = self.forward(count, cache, self._memory)
        step.x = address(hidden)
        step.rows = plan.rows
        step.ids, step.positions = address(token_ids), address(batch.positions)
        step.slot_mapping = address(batch.slot_mapping)
        self.kernels.library.forward(self.dtype_code, torch.get_num_threads(), byref(step))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of the hidden states [S, hidden] float32."""
        assert hidden.dtype == torch.float32
        assert hidden.shape[1:] == (self._config.hidden,)
        logits = torch.empty(len(hidden), self.head.weight.outputs)
        (normed,) = self._memory.take([hidden.numel() * self._weights.norm.itemsize])
        self.kernels.library.logits(
            self.dtype_code,
            torch.get_num_threads(),
            byref(self.head),
            address(hidden),
            len(hidden),
            normed,
            address(logits),
        )
        return logits

    def forward(self, count: int, cache: KVCache, memory: PassMemory) -> structs.CForward:
        """Return the argument struct for a step of `count` tokens, with scratch space in `memory`.

        The caller fills in the fields of the tokens (`x`, `ids`, `positions`, `slot_mapping`) and
        of the rows (`rows`).
        """
        config, size = self._config, self._weights.embedding.itemsize
        self.use_cache(cache)
        q_width = config.num_heads * config.head_dim
        widths = (
            config.head_dim,
            config.head_dim,
            config.hidden,
            q_width + 2 * config.num_kv_heads * config.head_dim,
            q_width,
            2 * config.intermediate,
            config.intermediate,
        )
        names = ("cos", "sin", "normed", "qkv", "attended", "gate_up", "active")
        scratch = memory.take([count * width * size for width in widths])
        return structs.CForward(
            layers=ctypes.addressof(self._layers),
            num_layers=len(self._layers),
            tokens=count,
            hidden=config.hidden,
            inner=config.intermediate,
            heads=self._heads,
            embedding=address(self._weights.embedding),
            inv_freq=address(self._inv_freq),
            eps=config.norm_eps,
            rope_factor=attention_factor(config.rope),
            **dict(zip(names, scratch, strict=True)),
        )

    def use_cache(self, cache: KVCache) -> None:
        """Make this step and later ones use `cache`, whose numbers must have the weights' dtype."""
        if self._cache == cache.k.data_ptr():
            return
        assert dtype_code(cache.k, cache.v) == self.dtype_code
        for index, layer in enumerate(self._layers):
            layer.k_cache, layer.v_cache = map(address, cache.layer(index))
        self._cache = cache.k.data_ptr()


class PassMemory:
    """Scratch memory that one step after the other uses.

    Reusing memory is fast because its pages are mapped already. Memory of more than KEPT_BYTES is
    replaced as soon as a step needs less.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, sizes: Sequence[int]) -> list[int]:
        """Return addresses of areas with these sizes in bytes. The next call reuses the memory."""
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        needed = ends[-1] + ALIGNMENT
        if not needed <= len(self._bytes) <= max(needed, KEPT_BYTES):
            self._bytes = torch.empty(needed, dtype=torch.uint8)
        start = -(-self._bytes.data_ptr() // ALIGNMENT) * ALIGNMENT
        return [start + end for end in (0, *ends[:-1])]


def _layer(layer: LlamaLayer) -> structs.CLayer:
    linears = [_packed(getattr(layer, name)) for name in LINEARS]
    return structs.CLayer(
        address(layer.attention_norm),
        address(layer.mlp_norm),
        *(linear.matrix.struct for linear in linears),
        *(address(linear.bias) for linear in linears),
    )


def _packed(linear: PackedLinear | HybridLinear) -> PackedLinear:
    return linear.packed if isinstance(linear, HybridLinear) else linear


def _from_rows(layer: LlamaLayer) -> int:
    linears = [getattr(layer, name) for name in LINEARS]
    return min(each.min_dense_rows if isinstance(each, HybridLinear) else NEVER for each in linears)
