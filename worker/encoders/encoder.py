"""The forward pass of every family of encoders, in torch, and the head of models that score.

Legend: T tokens in the step, N inputs in the step, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from worker.encoders.pooling import pool
from worker.encoders.position_bias import alibi_bias, bucketed_bias
from worker.encoders.ragged import RaggedBatch, attend
from worker.encoders.spec import EncoderLayerSpec, EncoderSpec, HeadActivation, HeadSpec
from worker.layers.activation import ACTIVATIONS
from worker.layers.linear import Dense
from worker.layers.norm import Norm
from worker.layers.rope import CosSin, inverse_frequencies, rotate, rotation
from worker.spec.rope_config import RopeConfig


@dataclass(slots=True)
class EncoderLayer:
    """Weights of a layer. A layer without a norm has None in its place.

    qkv       weight [3 * H * D, hidden]: rows of the queries, then of the keys and the values
    gate_up   weight of the gate's rows, then of those of up; without a gate only of up
    """

    spec: EncoderLayerSpec
    attention_norm: Norm | None
    qkv: Dense
    q_norm: Norm | None
    k_norm: Norm | None
    output: Dense
    mlp_norm: Norm
    gate_up: Dense
    down: Dense

    def tensors(self) -> Iterator[Tensor]:
        for norm in (self.attention_norm, self.q_norm, self.k_norm, self.mlp_norm):
            if norm is not None:
                yield from norm.tensors()
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            yield from linear.tensors()


@dataclass(slots=True)
class ScoreHead:
    """The head of a model that scores."""

    spec: HeadSpec
    dense: Dense
    norm: Norm | None
    out: Dense

    def __call__(self, pooled: Tensor) -> Tensor:
        """Return the scores [N, 1] float32 of pooled [N, hidden]."""
        x = HEAD_ACTIVATIONS[self.spec.activation](self.dense(pooled))
        score = self.out(x if self.norm is None else self.norm(x)).float()
        return score.sigmoid() if self.spec.has_sigmoid else score

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.dense, self.norm, self.out):
            if part is not None:
                yield from part.tensors()


HEAD_ACTIVATIONS: dict[HeadActivation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "silu": silu,
    "relu": relu,
    "gelu": ACTIVATIONS["gelu"],
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "none": lambda x: x,
}


@dataclass(slots=True)
class EncoderWeights:
    """All weights of an encoder. Tables are [rows, hidden]; None: there is none.

    offset_bias   [OFFSET_BUCKETS, H]: what each head adds to scores, by bucket of offsets
    """

    embedding: Tensor
    positions: Tensor | None
    token_types: Tensor | None
    offset_bias: Tensor | None
    embedding_norm: Norm
    layers: list[EncoderLayer]
    norm: Norm | None
    head: ScoreHead | None

    def tensors(self) -> Iterator[Tensor]:
        for table in (self.embedding, self.positions, self.token_types, self.offset_bias):
            if table is not None:
                yield table
        yield from self.embedding_norm.tensors()
        for layer in self.layers:
            yield from layer.tensors()
        for part in (self.norm, self.head):
            if part is not None:
                yield from part.tensors()


class Encoder:
    """An encoder: its forward pass. It has no state of any request."""

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        self.spec = spec
        self.weights = weights
        device = weights.embedding.device
        ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
        self._frequencies = {rope: inverse_frequencies(rope).to(device) for rope in ropes}
        # All layers share it.
        self._bias = _bias_by_offset(spec, weights)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def tensors(self) -> Iterator[Tensor]:
        yield from self.weights.tensors()

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Return the hidden states [T, hidden] of a step, after the final norm if there is one."""
        x = self._embedded(batch)
        turns = {
            rope: rotation(batch.positions, frequencies, x.dtype)
            for rope, frequencies in self._frequencies.items()
        }
        for layer in self.weights.layers:
            if layer.spec.order == "post":
                x = _normed(layer.attention_norm, x.add_(self._attention(layer, x, batch, turns)))
                x = layer.mlp_norm(x.add_(_mlp(layer, x)))
            else:
                normed = _normed(layer.attention_norm, x)
                x = x + self._attention(layer, normed, batch, turns)
                x.add_(_mlp(layer, layer.mlp_norm(x)))
        return _normed(self.weights.norm, x)

    def scores(self, hidden: Tensor, batch: RaggedBatch) -> Tensor:
        """Return the scores [N, 1] float32 of the hidden states. The model must have a head."""
        head = self.weights.head
        assert head is not None
        return head(pool(hidden, batch, head.spec.pooling).to(hidden.dtype))

    def _embedded(self, batch: RaggedBatch) -> Tensor:
        weights, spec = self.weights, self.spec
        x = weights.embedding.index_select(0, batch.token_ids)
        if weights.token_types is not None:
            has_second = spec.types_texts and len(weights.token_types) > 1
            if batch.types is None or not has_second:
                x.add_(weights.token_types[0])
            else:
                x.add_(weights.token_types.index_select(0, batch.types))
        if weights.positions is not None:
            x.add_(weights.positions.index_select(0, batch.positions + spec.first_position))
        return weights.embedding_norm(x)

    def _attention(
        self,
        layer: EncoderLayer,
        x: Tensor,
        batch: RaggedBatch,
        turns: dict[RopeConfig, CosSin],
    ) -> Tensor:
        spec = layer.spec
        q, k, v = layer.qkv(x).chunk(3, dim=-1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k, v = (each.reshape(-1, spec.num_heads, spec.head_dim) for each in (q, k, v))
        if spec.rope is not None:
            q, k = _rotated(q, turns[spec.rope]), _rotated(k, turns[spec.rope])
        seen = attend(q, k, v, batch, window=spec.window, bias=self._bias)
        return layer.output(seen.flatten(1))


def _bias_by_offset(spec: EncoderSpec, weights: EncoderWeights) -> Tensor | None:
    """Return the biases of attention scores by the distance of the two tokens (position_bias.py);
    None if the model has none."""
    if weights.offset_bias is not None:
        return bucketed_bias(weights.offset_bias, spec.context_tokens)
    if spec.has_alibi:
        return alibi_bias(spec.layers[0].num_heads, spec.context_tokens).to(weights.embedding)
    return None


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _rotated(heads: Tensor, turns: CosSin) -> Tensor:
    """Return heads [T, H, D], of which the first items are rotated."""
    width = turns[0].shape[-1]
    if width == heads.shape[-1]:
        return rotate(heads, *turns)
    return torch.cat((rotate(heads[..., :width], *turns), heads[..., width:]), dim=-1)


def _mlp(layer: EncoderLayer, x: Tensor) -> Tensor:
    inner, act = layer.gate_up(x), ACTIVATIONS[layer.spec.activation]
    if not layer.spec.is_gated:
        return layer.down(act(inner))
    gate, up = inner.chunk(2, dim=-1)
    return layer.down(act(gate).mul_(up))
