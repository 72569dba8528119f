"""The Llama family: Llama, SmolLM2, and Mistral without its window. The reference forward pass.

Legend: T tokens in the step, S rows that need logits, H query heads, H_kv key/value heads, D head
dim, I intermediate, V vocab. All projections are stored as torch does, [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import Attention, AttentionBatch
from worker.attention.native_paged import NativePlan
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.layers.linear import Linear
from worker.layers.rope import attention_factor, inverse_frequencies, rotation
from worker.models.config import LlamaConfig
from worker.models.llama_native import WholePass


@dataclass(slots=True)
class LlamaLayer:
    """Weights of a layer. qkv [(H + 2 H_kv) * D, hidden]: queries, keys, values; gate_up [2 I,
    hidden]: gate, up."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class LlamaWeights:
    """All weights: embedding [V, hidden]; `head` maps hidden to V, with the same numbers if
    they are tied."""

    embedding: Tensor
    layers: list[LlamaLayer]
    norm: Tensor
    head: Linear


class Llama:
    """The model: its forward pass and its logits. It has no state of any request.

    whole   the forward pass in one call, if kernels and weights support it; its result is float32.
            None: layers are computed one after the other
    """

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, kernels: Kernels | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels or TorchKernels()
        self._inv_freq = inverse_frequencies(config.head_dim, config.rope).to(weights.norm.device)
        self._rope_factor = attention_factor(config.rope)
        self.whole = WholePass.of(config, weights, self.kernels)

    @torch.inference_mode()
    def __call__(
        self, token_ids: Tensor, batch: AttentionBatch, cache: KVCache, attention: Attention
    ) -> Tensor:
        """Return hidden [T, hidden], before the final norm, of token_ids [T] int64.

        Writes this step's keys and values to the cache.
        """
        plan = attention.plan(batch)
        count = len(token_ids)
        if self.whole is not None and isinstance(plan, NativePlan) and self.whole.is_for(count):
            return self.whole(token_ids, plan, cache)
        x = self.weights.embedding.index_select(0, token_ids)
        turn = rotation(batch.positions, self._inv_freq, x.dtype, self._rope_factor)
        kernels, eps = self.kernels, self.config.norm_eps
        delta: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            normed = kernels.add_norm(x, delta, layer.attention_norm, eps)
            q = kernels.place(layer.qkv(normed), turn, cache, index, batch.slot_mapping)
            seen = attention.run(q, *cache.layer(index), plan)
            normed = kernels.add_norm(x, layer.output(seen.flatten(1)), layer.mlp_norm, eps)
            delta = layer.down(kernels.silu_mul(layer.gate_up(normed)))
        return x.add_(delta) if delta is not None else x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of hidden [S, hidden]."""
        if self.whole is not None and hidden.dtype == torch.float32:
            return self.whole.logits(hidden)
        normed = self.kernels.add_norm(hidden, None, self.weights.norm, self.config.norm_eps)
        return self.weights.head.to_float(normed)
