"""The kernels for a GPU. Each call is one launch of a Triton kernel (triton/layers.py).

Legend in base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels.reference import TorchKernels, heads_of
from worker.kernels.triton import layers
from worker.kv.cache import PagedCache
from worker.layers.delta_rule import DeltaWeights
from worker.layers.mamba1_rule import Mamba1Weights, ScanInputs
from worker.layers.mamba2_rule import Mamba2Weights
from worker.layers.norm import Norm
from worker.layers.rg_lru_rule import LruInputs, LruWeights
from worker.layers.rope import CosSin
from worker.slots.states import StepStates
from worker.spec.model_spec import MlpSpec
from worker.spec.recurrent import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, RgLruSpec, ShortConvSpec

WIDE = 256
"""Number of items that a warp loads at once: 16 bytes of 2-byte numbers in each of its threads."""


class TritonKernels:
    """The `Kernels` (base.py) in Triton. Layer norms and rounded caches are torch's. A norm over
    all heads together is a launch of its own."""

    name = "triton"

    def __init__(self) -> None:
        self._torch = TorchKernels()

    def cos_sin(
        self, positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, factor: float
    ) -> CosSin:
        tokens, half = len(positions), len(inv_freq)
        cos, sin = positions.new_empty(2, tokens, 1, 2 * half, dtype=dtype).unbind()
        layers.cos_sin[(tokens,)](
            positions=positions,
            inv_freq=inv_freq,
            factor=factor,
            cos=cos,
            sin=sin,
            HALF=half,
            BLOCK=_power(half),
            num_warps=1,
        )
        return cos, sin

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: Norm | None,
        *,
        post_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        if not (_is_rms(norm) and _is_rms(post_norm)):
            return self._torch.add_norm(x, delta, norm, post_norm=post_norm, scale=scale)
        out = x if norm is None else torch.empty_like(x)
        _launch_add_norm(x, delta, norm, out, post_norm=post_norm, scale=scale)
        return out

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
        is_plain = not cache.is_rounded and cache.layer(layer)[0].is_contiguous()
        if not (is_plain and _is_rms(q_norm) and _is_rms(k_norm)):
            return self._torch.place(
                qkv, cos_sin, cache, layer, slot_mapping, q_norm=q_norm, k_norm=k_norm
            )
        own = cache.heads(layer)
        kv_heads, head_dim = own.count, own.dim
        heads = heads_of(qkv, head_dim)
        num_q = heads.shape[1] - 2 * kv_heads
        if q_norm is not None and q_norm.weight.numel() != head_dim:
            q, k, _ = torch.split(heads, [num_q, kv_heads, kv_heads], dim=1)
            for part, norm in ((q, q_norm), (k, k_norm)):
                _launch_add_norm(part.flatten(1), None, norm, out=part.flatten(1))
            q_norm = k_norm = None
        _launch_place(heads, cos_sin, *cache.layer(layer), slot_mapping, q_norm, k_norm)
        return heads[:, :num_q]

    def activate(self, inner: Tensor, mlp: MlpSpec) -> Tensor:
        if mlp.xielu is not None:
            return self._torch.activate(inner, mlp)
        size = inner.shape[1] // 2 if mlp.is_gated else inner.shape[1]
        out = inner.new_empty(len(inner), size)
        block = min(4 * WIDE, _power(size))
        layers.activate[(len(inner), -(-size // block))](
            inner=inner,
            out=out,
            inner_stride=inner.stride(0),
            alpha=mlp.alpha,
            limit=mlp.limit,
            SIZE=size,
            ACTIVATION=mlp.activation,
            IS_GATED=mlp.is_gated,
            BLOCK=block,
            num_warps=_warps(block),
        )
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._torch.sigmoid(x)

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        return self._torch.cap_logits(logits, cap)

    def gated_delta(
        self,
        spec: GatedDeltaSpec,
        weights: DeltaWeights,
        inputs: Tensor,
        gates: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return self._torch.gated_delta(spec, weights, inputs, gates, states, offset)

    def mamba1_conv(
        self,
        spec: Mamba1Spec,
        weights: Mamba1Weights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return self._torch.mamba1_conv(spec, weights, inputs, states, offset)

    def mamba1_scan(
        self,
        spec: Mamba1Spec,
        weights: Mamba1Weights,
        inputs: ScanInputs,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return self._torch.mamba1_scan(spec, weights, inputs, states, offset)

    def mamba2(
        self,
        spec: Mamba2Spec,
        weights: Mamba2Weights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return self._torch.mamba2(spec, weights, inputs, states, offset)

    def rg_lru_conv(
        self,
        spec: RgLruSpec,
        weights: LruWeights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return self._torch.rg_lru_conv(spec, weights, inputs, states, offset)

    def rg_lru_scan(
        self,
        spec: RgLruSpec,
        weights: LruWeights,
        inputs: LruInputs,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return self._torch.rg_lru_scan(spec, weights, inputs, states, offset)

    def short_conv(
        self,
        spec: ShortConvSpec,
        conv: Tensor,
        bias: Tensor | None,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        return self._torch.short_conv(spec, conv, bias, inputs, states, offset)

    def index_scores(
        self,
        queries: Tensor,
        weights: Tensor,
        index_keys: Tensor,
        block_table: Tensor,
        rows: Tensor,
        visible: Tensor,
    ) -> Tensor:
        return self._torch.index_scores(queries, weights, index_keys, block_table, rows, visible)


def _launch_add_norm(
    x: Tensor,
    delta: Tensor | None,
    norm: Norm | None,
    out: Tensor,
    *,
    post_norm: Norm | None = None,
    scale: float = 1.0,
) -> None:
    """Launch the kernel of `add_norm` for RMS norms, which writes the norm to `out`."""
    rows, size = x.shape
    block = _power(size)
    layers.add_norm[(rows,)](
        x=x,
        delta=delta,
        post_weight=None if post_norm is None else post_norm.weight,
        weight=None if norm is None else norm.weight,
        out=out,
        x_stride=x.stride(0),
        delta_stride=0 if delta is None else delta.stride(0),
        out_stride=out.stride(0),
        post_eps=0.0 if post_norm is None else post_norm.spec.eps,
        scale=scale,
        eps=0.0 if norm is None else norm.spec.eps,
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(block // 2, most=16),
    )


def _launch_place(
    heads: Tensor,
    cos_sin: CosSin | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
) -> None:
    """Launch the kernel of `place` for heads [T, H + 2 H_kv, D] and norms over each head."""
    tokens, num_heads, head_dim = heads.shape
    kv_heads = k_cache.shape[2]
    num_q = num_heads - 2 * kv_heads
    cos, sin = cos_sin or (None, None)
    half = 0 if cos is None else cos.shape[-1] // 2
    block_half, block_rest = _power(half), _power(head_dim - 2 * half)
    part = max(block_half, block_rest)
    block_heads = min(_power(num_q), max(1, 4 * WIDE // part))
    num_blocks = -(-num_q // block_heads) + -(-kv_heads // block_heads)
    layers.place[(tokens, num_blocks)](
        qkv=heads,
        cos=cos,
        sin=sin,
        q_weight=None if q_norm is None else q_norm.weight,
        k_weight=None if k_norm is None else k_norm.weight,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        qkv_stride=heads.stride(0),
        q_eps=0.0 if q_norm is None else q_norm.spec.eps,
        k_eps=0.0 if k_norm is None else k_norm.spec.eps,
        H=num_q,
        H_KV=kv_heads,
        D=head_dim,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
        BLOCK_D=_power(head_dim),
        num_warps=_warps(block_heads * part),
    )


def _is_rms(norm: Norm | None) -> bool:
    """Return whether `norm` is not a layer norm."""
    return norm is None or norm.spec.kind == "rms"


def _power(size: int) -> int:
    """Return the least power of two that is at least `size`, and 1 for 0."""
    return 1 << max(0, size - 1).bit_length()


def _warps(items: int, most: int = 4) -> int:
    """Return the number of warps, a power of two, that load `items` items in one wide load each."""
    return min(most, max(1, items // WIDE))
