"""All layers of a step in one call of the compiled kernels: csrc/forward.h has the lines of
llama.py, for packed weights. Between its linears nobody returns to Python, and threads are woken
once a step.

Legend in llama.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from worker.attention.native_paged import NativePlan
from worker.kernels import structs
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels, address, numbers
from worker.kernels.packed import PackedLinear
from worker.kv_cache import KVCache
from worker.models.config import LlamaConfig

if TYPE_CHECKING:
    from worker.models.llama import Layer

LINEARS = ("qkv", "output", "gate_up", "down")


class WholePass:
    """Keeps the layers, whose addresses it holds. The caches' are filled in when one is met."""

    def __init__(
        self, config: LlamaConfig, layers: Sequence[Layer], kernels: NativeKernels
    ) -> None:
        self._config = config
        self._layers = layers
        self._kernels = kernels
        self._heads = structs.Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self._told = (structs.Layer * len(layers))(*map(_layer, layers))
        self._cache = 0

    @classmethod
    def of(cls, config: LlamaConfig, layers: Sequence[Layer], kernels: Kernels) -> Self | None:
        """None where the kernels are not compiled ones, or a linear is not packed."""
        linears = (getattr(layer, name) for layer in layers for name in LINEARS)
        if not isinstance(kernels, NativeKernels):
            return None
        if not all(isinstance(linear, PackedLinear) for linear in linears):
            return None
        return cls(config, layers, kernels)

    def __call__(
        self, x: Tensor, turn: tuple[Tensor, Tensor], plan: NativePlan, cache: KVCache
    ) -> Tensor:
        """x [T, hidden] -> the same after all layers, which add to it in float32. turn: as
        `rotation` gives it. Writes to the cache."""
        config, tokens = self._config, len(x)
        self._meet(cache)
        q_width = config.num_heads * config.head_dim
        scratch = [
            x.new_empty(tokens, width)
            for width in (
                config.hidden,
                q_width + 2 * config.num_kv_heads * config.head_dim,
                q_width,
                2 * config.intermediate,
                config.intermediate,
            )
        ]
        added = x.float()
        step = structs.Forward(
            ctypes.addressof(self._told),
            len(self._layers),
            tokens,
            config.hidden,
            config.intermediate,
            self._heads,
            plan.rows,
            *map(address, (plan.batch.slot_mapping, *turn, added, *scratch)),
            config.norm_eps,
        )
        self._kernels.library.forward(
            numbers(x, cache.k, *turn), torch.get_num_threads(), byref(step)
        )
        return added.to(x.dtype)

    def _meet(self, cache: KVCache) -> None:
        if self._cache == cache.k.data_ptr():
            return
        for index, told in enumerate(self._told):
            told.k_cache, told.v_cache = map(address, cache.layer(index))
        self._cache = cache.k.data_ptr()


def _layer(layer: Layer) -> structs.Layer:
    linears: list[PackedLinear] = [getattr(layer, name) for name in LINEARS]
    return structs.Layer(
        address(layer.attention_norm),
        address(layer.mlp_norm),
        *(linear.matrix.struct for linear in linears),
        *(address(linear.bias) for linear in linears),
    )
