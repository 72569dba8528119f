"""The Llama family: Llama, SmolLM2, Mistral without its window. A forward pass to be read aloud.

Legend: T tokens in the step, S rows whose logits are wanted, H query heads, H_kv key/value heads,
D head dim, I intermediate, V vocab. All projections are stored as torch does, [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from worker.attention.base import Attention, AttentionBatch
from worker.kv_cache import KVCache
from worker.layers.rope import attention_factor, inverse_frequencies, rotate, rotation
from worker.models.config import LlamaConfig


@dataclass(slots=True)
class Projection:
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Layer:
    """qkv [(H + 2 H_kv) * D, hidden]: queries, keys, values; gate_up [2 I, hidden]: gate, up."""

    attention_norm: Tensor
    qkv: Projection
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(slots=True)
class LlamaWeights:
    """`head` [V, hidden] is `embedding` itself where they are tied."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor


class Llama:
    """Weights and the two things done with them. Holds no state of any request."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self.config = config
        self.weights = weights
        self._inv_freq = inverse_frequencies(config.head_dim, config.rope).to(weights.norm.device)
        self._rope_factor = attention_factor(config.rope)

    @torch.inference_mode()
    def __call__(
        self, token_ids: Tensor, batch: AttentionBatch, cache: KVCache, attention: Attention
    ) -> Tensor:
        """token_ids [T] int64 -> hidden [T, hidden], before the final norm (see `logits`).

        Writes this step's keys and values to the cache.
        """
        x = self.weights.embedding.index_select(0, token_ids)
        plan = attention.plan(batch)
        cos, sin = rotation(batch.positions, self._inv_freq, x.dtype, self._rope_factor)
        for index, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            cache.write(index, k, v, batch.slot_mapping)
            seen = attention.run(q, *cache.layer(index), plan)
            x = x.add_(layer.output(seen.flatten(1)))
            x = x.add_(self._mlp(layer, x))
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden], as the forward pass returns it -> [S, V] float32."""
        return linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """q [T, H, D] and k [T, H_kv, D] rotated in one go, v [T, H_kv, D]."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(self._norm(x, layer.attention_norm))
        qkv = qkv.view(len(x), heads + 2 * kv_heads, self.config.head_dim)
        qk = rotate(qkv[:, : heads + kv_heads], cos, sin)
        return qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down(silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.norm_eps)
