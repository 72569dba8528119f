"""The kernels in torch, for any device: the definition of the others, and their fallback.

Legend in base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.device.staging import upload_one
from worker.kv.cache import PagedCache
from worker.kv.rounding import numbers_of
from worker.layers.activation import ACTIVATIONS
from worker.layers.delta_rule import DeltaWeights, gated_delta
from worker.layers.mamba1_rule import Mamba1Weights, ScanInputs, mamba1_conv, mamba1_scan
from worker.layers.mamba2_rule import Mamba2Weights, mamba2
from worker.layers.norm import Norm
from worker.layers.rg_lru_rule import LruInputs, LruWeights, rg_lru_conv, rg_lru_scan
from worker.layers.rope import CosSin, rotate, rotation
from worker.layers.short_conv_rule import short_conv
from worker.slots.states import StepStates
from worker.spec.model_spec import MlpSpec, Xielu
from worker.spec.recurrent import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, RgLruSpec, ShortConvSpec


class TorchKernels:
    name = "torch"

    def cos_sin(
        self, positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, factor: float
    ) -> CosSin:
        return rotation(positions, inv_freq, dtype, factor)

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: Norm | None,
        *,
        post_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        if delta is not None:
            x.add_(scaled(delta, post_norm, scale))
        return x if norm is None else norm(x)

    def place(
        self,
        qkv: Tensor,
        cos_sin: CosSin | None,
        cache: PagedCache,
        layer: int,
        slot_mapping: Tensor,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Tensor:
        own = cache.heads(layer)
        kv_heads, head_dim = own.count, own.dim
        heads = heads_of(qkv, head_dim)
        num_q = heads.shape[1] - 2 * kv_heads
        q, k, v = torch.split(heads, [num_q, kv_heads, kv_heads], dim=1)
        norm_heads(q, q_norm)
        norm_heads(k, k_norm)
        turn_heads(heads[:, : num_q + kv_heads], cos_sin)
        cache.write(layer, k, v, slot_mapping)
        return q

    def activate(self, inner: Tensor, mlp: MlpSpec) -> Tensor:
        if mlp.activation == "clamped_swiglu":
            return _clamped_swiglu(inner, mlp)
        if mlp.xielu is not None:
            return _xielu(inner, mlp.xielu)
        act = ACTIVATIONS[mlp.activation]
        if not mlp.is_gated:
            return act(inner)
        gate, up = inner.chunk(2, dim=-1)
        return act(gate).mul_(up)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        return logits.div_(cap).tanh_().mul_(cap)

    def gated_delta(
        self,
        spec: GatedDeltaSpec,
        weights: DeltaWeights,
        inputs: Tensor,
        gates: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return gated_delta(spec, weights, inputs, gates, states, offset)

    def mamba1_conv(
        self,
        spec: Mamba1Spec,
        weights: Mamba1Weights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return mamba1_conv(spec, weights, inputs, states, offset)

    def mamba1_scan(
        self,
        spec: Mamba1Spec,
        weights: Mamba1Weights,
        inputs: ScanInputs,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return mamba1_scan(spec, weights, inputs, states, offset)

    def mamba2(
        self,
        spec: Mamba2Spec,
        weights: Mamba2Weights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return mamba2(spec, weights, inputs, states, offset)

    def rg_lru_conv(
        self,
        spec: RgLruSpec,
        weights: LruWeights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return rg_lru_conv(spec, weights, inputs, states, offset)

    def rg_lru_scan(
        self,
        spec: RgLruSpec,
        weights: LruWeights,
        inputs: LruInputs,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return rg_lru_scan(spec, weights, inputs, states, offset)

    def short_conv(
        self,
        spec: ShortConvSpec,
        conv: Tensor,
        bias: Tensor | None,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return short_conv(spec, conv, bias, inputs, states, offset)

    def index_scores(
        self,
        queries: Tensor,
        weights: Tensor,
        index_keys: Tensor,
        block_table: Tensor,
        rows: Tensor,
        visible: Tensor,
    ) -> Tensor:
        return index_scores(queries, weights, index_keys, block_table, rows, visible)


def index_scores(
    queries: Tensor,
    weights: Tensor,
    index_keys: Tensor,
    block_table: Tensor,
    rows: Tensor,
    visible: Tensor,
) -> Tensor:
    """Return the scores of `Kernels.index_scores`, for heads that are multiplied by all keys
    first."""
    device = queries.device
    columns = -(-int(visible.max()) // index_keys.shape[1])
    if rows[0] == rows[-1]:  # tokens of one row share its keys
        rows = rows[:1]
    table = block_table.index_select(0, upload_one(rows, device))[:, :columns]
    found = index_keys.index_select(0, table.flatten())
    keys = numbers_of(found, torch.float32).float().view(len(rows), -1, queries.shape[2])
    products = torch.matmul(queries.float(), keys.transpose(1, 2)).relu_()
    scores = torch.matmul(weights[:, None], products).squeeze(1)
    is_hidden = torch.arange(scores.shape[1], device=device) >= upload_one(visible, device)[:, None]
    return scores.masked_fill_(is_hidden, float("-inf"))


def scaled(delta: Tensor, post_norm: Norm | None, scale: float) -> Tensor:
    """Return `delta` [T, hidden], which may be overwritten, after `post_norm` and times `scale`."""
    delta = delta if post_norm is None else post_norm(delta)
    return delta if scale == 1.0 else delta.mul_(scale)


def heads_of(rows: Tensor, size: int) -> Tensor:
    """Return a view [T, N, size] of rows [T, N * size]."""
    return rows.view(len(rows), rows.shape[1] // size, size)


def norm_heads(heads: Tensor, norm: Norm | None) -> None:
    """Replace heads [T, H, D] by their norm, over each head or over all heads together."""
    if norm is not None:
        parts = heads_of(heads.flatten(1), norm.weight.numel())
        parts.copy_(norm(parts))


def turn_heads(heads: Tensor, cos_sin: CosSin | None) -> None:
    """Rotate heads [T, H, D] in place, if there are angles."""
    if cos_sin is not None:
        part = heads[..., : cos_sin[0].shape[-1]]
        part.copy_(rotate(part, *cos_sin))


def turned(q: Tensor, cos_sin: CosSin | None, head_dim: int, norm: Norm | None) -> Tensor:
    """Return queries [T, H * D] as heads [T, H, D], normalised and rotated. `q` may be
    overwritten."""
    heads = heads_of(q, head_dim)
    norm_heads(heads, norm)
    turn_heads(heads, cos_sin)
    return heads


def _clamped_swiglu(gate_up: Tensor, mlp: MlpSpec) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate.clamp_(max=mlp.limit)
    up.clamp_(min=-mlp.limit, max=mlp.limit).add_(1)
    return torch.sigmoid(mlp.alpha * gate).mul_(gate).mul_(up)


def _xielu(up: Tensor, own: Xielu) -> Tensor:
    x = up.float()
    above = own.positive * x * x
    below = (torch.expm1(x.clamp(max=own.eps)) - x) * own.negative
    return torch.where(x > 0, above, below).add_(x, alpha=own.beta).to(up.dtype)
