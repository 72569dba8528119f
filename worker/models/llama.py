"""The Llama family: Llama, SmolLM2, and Mistral within its window. The reference forward pass.

Legend: T tokens in the step, S rows that need logits, H query heads, H_kv key/value heads, D head
dim, I intermediate, V vocab. All projections are [out, in], as in torch.
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
    """Weights of one layer."""

    #: [hidden]
    attention_norm: Tensor
    #: [(H + 2 H_kv) * D, hidden]: the rows of queries, then of keys, then of values.
    qkv: Linear
    #: [hidden, H * D]
    output: Linear
    #: [hidden]
    mlp_norm: Tensor
    #: [2 I, hidden]: the rows of the gate, then of `up`.
    gate_up: Linear
    #: [hidden, I]
    down: Linear


@dataclass(slots=True)
class LlamaWeights:
    """All weights of a model."""

    #: [V, hidden]
    embedding: Tensor
    layers: list[LlamaLayer]
    #: [hidden]: the final norm.
    norm: Tensor
    #: [V, hidden]. If it is tied to the embedding, it has the same numbers.
    head: Linear


class Llama:
    """A Llama model: its forward pass and its logits. It holds no state of any request."""

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, kernels: Kernels | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels or TorchKernels()
        self._inv_freq = inverse_frequencies(config.head_dim, config.rope).to(weights.norm.device)
        self._rope_factor = attention_factor(config.rope)
        #: The forward pass as one call of the compiled kernels, which returns float32. None if
        #: kernels or weights do not support it: then layers are computed one after the other.
        self.whole = WholePass.of(config, weights, self.kernels)

    @torch.inference_mode()
    def __call__(
        self, token_ids: Tensor, batch: AttentionBatch, cache: KVCache, attention: Attention
    ) -> Tensor:
        """Compute a step: write the K/V of its tokens to `cache`, and return their hidden states.

        token_ids   [T] int64
        returns     [T, hidden], before the final norm
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
            q = kernels.rotate_and_cache(layer.qkv(normed), turn, cache, index, batch.slot_mapping)
            seen = attention.run(q, *cache.layer(index), plan)
            normed = kernels.add_norm(x, layer.output(seen.flatten(1)), layer.mlp_norm, eps)
            delta = layer.down(kernels.silu_mul(layer.gate_up(normed)))
        return x.add_(delta) if delta is not None else x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of the hidden states [S, hidden]."""
        if self.whole is not None and hidden.dtype == torch.float32:
            return self.whole.logits(hidden)
        normed = self.kernels.add_norm(hidden, None, self.weights.norm, self.config.norm_eps)
        return self.weights.head.to_float(normed)
