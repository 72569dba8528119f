"""The forward pass in one call of the compiled kernels per step, if all linears are packed.

csrc/forward.h and decode.h correspond to decoder.py line by line. Nothing returns to Python between
linears, and threads are woken once per step. If a step has so many rows that dense weights are
faster, each of its operations is a call of its own (layers/hybrid_linear.py).

Legend in decoder.py.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator, Sequence
from ctypes import Array, byref
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from worker.attention.native_paged import NativePlan
from worker.kernels import structs
from worker.kernels.addresses import address
from worker.kernels.attention_structs import scoring_struct
from worker.kernels.base import Kernels
from worker.kernels.native import (
    AS_NUMBERS,
    DTYPE_CODES,
    NativeKernels,
    activation_struct,
    stored_as,
)
from worker.kernels.packed import PackedEmbedding, PackedLinear, PackedMatrix, pack
from worker.kv.cache import KVCache, PagedCache
from worker.layers.embedding import DenseEmbedding, Embedding
from worker.layers.gated_delta import GatedDelta
from worker.layers.hybrid_linear import NEVER, HybridLinear
from worker.layers.latent_attention import LatentAttention
from worker.layers.linear import Dense, Linear
from worker.layers.mamba1 import Mamba1
from worker.layers.mamba2 import Mamba2
from worker.layers.mlp import ExpertMlp, Mlp
from worker.layers.norm import Norm
from worker.layers.rg_lru import RgLru
from worker.layers.rope import attention_factor, inverse_frequencies
from worker.layers.short_conv import ShortConv
from worker.lora.table import StepAdapters
from worker.models.compiled import why_not
from worker.spec.model_spec import ModelSpec
from worker.spec.rope_config import AXES, RopeConfig
from worker.vision.rows import StepImages

if TYPE_CHECKING:
    from worker.models.decoder import DecoderLayer, DecoderWeights

log = logging.getLogger(__name__)

ALIGNMENT = 64
KEPT_BYTES = 64 << 20
FLOAT_BYTES = 4


class WholePass:
    """The whole forward pass of a model, as one call of a compiled function.

    The C structs hold addresses of the weights, so this object keeps a reference to the weights.
    `use_cache` fills in the addresses of the KV cache.
    """

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, head: PackedMatrix, kernels: NativeKernels
    ) -> None:
        self._spec = spec
        self._attention = spec.attentions[0]
        self._weights = weights
        self.kernels = kernels
        dtype = weights.embedding.dtype
        self.dtype_code = DTYPE_CODES[dtype]
        ropes = [*dict.fromkeys(each.rope for each in spec.attentions if each.rope is not None)]
        self._frequencies = [inverse_frequencies(rope) for rope in ropes]
        self._axes = [torch.tensor(rope.axes) if rope.axes else None for rope in ropes]
        self._ropes = (structs.CRope * len(ropes))(
            *(
                structs.CRope(address(inv_freq), rope.width, attention_factor(rope), address(axes))
                for rope, inv_freq, axes in zip(ropes, self._frequencies, self._axes, strict=True)
            )
        )
        self._routers = [_router(layer.mlp, kernels) for layer in weights.layers]
        self._mlps = [_mlps(layer) for layer in weights.layers]
        growth = self._attention.growth
        factors = [] if growth is None else growth.factors(spec.context_tokens)
        # Rounded to the model's dtype, as those of the eager decoder.
        self._factors = torch.tensor(factors, dtype=dtype).float()
        self._growth = structs.CGrowth(
            address(self._factors), len(factors), 1 if growth is None else growth.tokens
        )
        self._layers = (structs.CLayer * len(weights.layers))(
            *(_layer(layer, ropes, dtype) for layer in weights.layers)
        )
        for layer, router, mlps in zip(self._layers, self._routers, self._mlps, strict=True):
            layer.mlps = ctypes.addressof(mlps)
            if router is not None:
                layer.router = router.matrix.struct
                layer.router_bias = address(router.bias)
        self.head = structs.CHead(
            _norm(weights.norm, dtype),
            head.struct,
            spec.norm.eps,
            spec.logits_scale,
            spec.logits_soft_cap or 0.0,
        )
        # Rounded to the model's dtype, as in training.
        scale = torch.tensor(spec.embedding_scale, dtype=dtype)
        self._embedding_scale = float(scale)
        self._uses_delta = any(
            layer.post_attention_norm is not None for layer in weights.layers
        ) or any(mlp.num_experts > 1 for mlp in spec.mlps)
        self._from_rows = min(map(_from_rows, weights.layers))
        self._memory = PassMemory()
        # Not the address of its memory: a later cache of another size may have the same one.
        self._cache: ReferenceType[KVCache] | None = None
        self._stored_as = AS_NUMBERS
        self.vocab = weights.embedding.size
        #: Number of positions that can be computed.
        self.max_positions = spec.learned_positions or sys.maxsize

    @classmethod
    def of(cls, spec: ModelSpec, weights: DecoderWeights, kernels: Kernels) -> Self | None:
        """Return the pass of a model. Return None if `kernels` are torch's, if one call cannot
        compute the model (`compiled.why_not`), or if a linear has no packed weights."""
        if not isinstance(kernels, NativeKernels) or not isinstance(weights.head, PackedLinear):
            return None
        linears = (_linear(slot) for layer in weights.layers for slot in layer.linears)
        reason = why_not(spec)
        if not all(isinstance(linear, PackedLinear | HybridLinear) for linear in linears):
            reason = "some of its weights are not packed"
        if reason:
            log.info("each operation of a step is a call of its own, which is slower: %s", reason)
            return None
        return cls(spec, weights, weights.head.matrix, kernels)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the packed routers. The model's weights do not contain those that are copies."""
        for router in self._routers:
            if router is not None:
                yield router.matrix.memory

    @property
    def keeps_bits(self) -> bool:
        """Return whether all steps use packed weights. If so, a position's result has the same bits
        in every step."""
        return self._from_rows == NEVER

    def is_for(self, tokens: int) -> bool:
        """Return whether this pass computes a step of `tokens` tokens. For longer steps, dense
        weights are faster, and each operation is a call of its own."""
        return tokens < self._from_rows

    def __call__(
        self,
        token_ids: Tensor,
        plan: NativePlan,
        cache: PagedCache,
        adapters: StepAdapters | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """Compute a step as `DecoderModel` does, but return the hidden states [T, hidden] in
        float32."""
        count, batch = len(token_ids), plan.batch
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.vocab:
            raise ValueError("a token is not in the vocabulary")
        if int(batch.positions.max()) >= self.max_positions:
            raise ValueError(f"a position exceeds the {self.max_positions} learned ones")
        assert count == len(batch.positions) == len(batch.slot_mapping)
        assert token_ids.dtype == batch.positions.dtype == torch.int64
        assert len(batch.further) == cache.num_entries - 1
        hidden = torch.empty(count, self._spec.hidden)
        step = self.forward(count, cache, self._memory)
        step.x = address(hidden)
        step.rows = plan.rows
        step.ids, step.positions = address(token_ids), address(batch.positions)
        step.slot_mapping = address(batch.slot_mapping)
        if adapters is not None:
            step.adapters = adapters.struct
        if batch.rope_positions is not None and self._spec.has_rope_axes:
            assert batch.rope_positions.shape == (AXES, count)
            step.rope_positions, step.rope_stride = address(batch.rope_positions), count
        if images is not None:
            images = images.rounded(self._weights.embedding.dtype)
            assert len(images.index) == count
            assert images.rows.shape[1] == self._spec.hidden
            step.images = structs.CImageRows(
                address(images.index),
                address(images.rows),
                address(images.added),
                len(images.rows),
                images.num_added,
            )
        self.kernels.library.forward(self.dtype_code, torch.get_num_threads(), byref(step))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of the hidden states [S, hidden] float32."""
        assert hidden.dtype == torch.float32
        assert hidden.shape[1:] == (self._spec.hidden,)
        logits = torch.empty(len(hidden), self.head.weight.outputs)
        (normed,) = self._memory.take([hidden.numel() * self._weights.embedding.dtype.itemsize])
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

    def forward(self, count: int, cache: PagedCache, memory: PassMemory) -> structs.CForward:
        """Return the struct of a step of `count` tokens, with scratch areas in `memory`. The caller
        fills in the fields that depend on the step: x, the rows, and the tokens' ids, positions and
        slots."""
        spec, attention = self._spec, self._attention
        size, mlps = self._weights.embedding.dtype.itemsize, spec.mlps
        inner = max(mlp.top_k * mlp.intermediate for mlp in mlps)
        assigned = max(mlp.top_k if mlp.num_experts > 1 else 0 for mlp in mlps)
        self.use_cache(cache)
        turned = len(self._ropes) * attention.head_dim
        widths = {
            "cos": turned,
            "sin": turned,
            "normed": spec.hidden,
            "qkv": attention.q_width + 2 * attention.kv_width,
            "attended": attention.q_width,
            "gate_up": 2 * inner,
            "active": inner,
            "scores": max(mlp.num_experts for mlp in mlps),
            "gathered": assigned * spec.hidden,
        }
        sizes = {name: count * width * size for name, width in widths.items()}
        sizes["delta"] = count * spec.hidden * FLOAT_BYTES * self._uses_delta
        sizes["parts"] = count * assigned * spec.hidden * FLOAT_BYTES
        scratch = dict(zip(sizes, memory.take([*sizes.values()]), strict=True))
        return structs.CForward(
            layers=ctypes.addressof(self._layers),
            ropes=ctypes.addressof(self._ropes),
            num_layers=len(self._layers),
            num_ropes=len(self._ropes),
            tokens=count,
            hidden=spec.hidden,
            heads=structs.CHeads(attention.num_heads, attention.num_kv_heads, attention.head_dim),
            **_embedding(self._weights.embedding),
            position_embedding=address(self._weights.positions),
            eps=spec.norm.eps,
            embedding_scale=self._embedding_scale,
            residual_scale=spec.residual_scale,
            stored_as=self._stored_as,
            growth=self._growth,
            **scratch,
        )

    def use_cache(self, cache: PagedCache) -> None:
        """Make this step and later ones use `cache`, whose numbers must have the weights' dtype,
        or be rounded."""
        assert isinstance(cache, KVCache), "one call computes layers with equal heads only"
        if self._cache is not None and self._cache() is cache:
            return
        dtype = self._weights.embedding.dtype
        self._stored_as = stored_as(cache.k, cache.v, dtype, self._attention.head_dim)
        for index, layer in enumerate(self._layers):
            layer.k_cache, layer.v_cache = map(address, cache.layer(index))
            layer.entry = cache.entries[index]
        self._cache = ref(cache)


class PassMemory:
    """Scratch memory that every step reuses. Reusing memory is fast because its pages are already
    mapped. Memory of more than KEPT_BYTES is replaced as soon as a step needs less."""

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


def _embedding(embedding: Embedding) -> dict[str, int | None]:
    """Return the fields of CForward for an embedding."""
    if isinstance(embedding, PackedEmbedding):
        return {"packed_embedding": ctypes.addressof(embedding.matrix.struct)}
    assert isinstance(embedding, DenseEmbedding)
    return {"embedding": address(embedding.weight)}


def _layer(layer: DecoderLayer, ropes: Sequence[RopeConfig], dtype: torch.dtype) -> structs.CLayer:
    """Return the struct of a layer without its router and MLPs."""
    block, mlp = layer.mixer, layer.spec.mlp
    assert block is not None
    assert layer.mlp is not None
    assert not isinstance(block, LatentAttention | GatedDelta | Mamba1 | Mamba2 | RgLru | ShortConv)
    assert mlp is not None
    qkv, output = _packed(block.qkv), _packed(block.output)
    attention, q_norm, k_norm = block.spec, block.q_norm, block.k_norm
    return structs.CLayer(
        attention_norm=_norm(layer.attention_norm, dtype),
        post_attention_norm=_norm(layer.post_attention_norm, dtype),
        mlp_norm=_norm(layer.mlp_norm, dtype),
        post_mlp_norm=_norm(layer.post_mlp_norm, dtype),
        q_norm=_norm(q_norm, dtype),
        k_norm=_norm(k_norm, dtype),
        qkv=qkv.matrix.struct,
        output=output.matrix.struct,
        qkv_bias=address(qkv.bias),
        output_bias=address(output.bias),
        scoring=scoring_struct(
            attention.scale,
            attention.soft_cap,
            attention.window,
            block.sinks,
            heads=attention.num_heads,
            sees_runs=attention.sees_whole_runs,
        ),
        q_norm_width=0 if q_norm is None else q_norm.weight.numel(),
        k_norm_width=0 if k_norm is None else k_norm.weight.numel(),
        norms_rotated=attention.norms_rotated,
        rope=-1 if attention.rope is None else ropes.index(attention.rope),
        activation=activation_struct(layer.mlp.spec),
        is_parallel=layer.spec.order in ("parallel", "parallel_one_norm"),
        num_experts=mlp.num_experts,
        top_k=mlp.top_k,
        renormalize=mlp.renormalize,
    )


def _mlps(layer: DecoderLayer) -> Array[structs.CMlp]:
    """Return the structs of a layer's MLP, or of its experts."""
    assert layer.mlp is not None
    mlps = [(_packed(each.gate_up), _packed(each.down)) for each in layer.mlp.experts]
    return (structs.CMlp * len(mlps))(
        *(
            structs.CMlp(
                gate_up.matrix.struct,
                down.matrix.struct,
                address(gate_up.bias),
                address(down.bias),
            )
            for gate_up, down in mlps
        )
    )


def _router(mlp: Mlp | ExpertMlp | None, kernels: NativeKernels) -> PackedLinear | None:
    """Return the router of a mixture of experts, or a packed copy if it is dense; None if there is
    no router."""
    if not isinstance(mlp, ExpertMlp):
        return None
    router = mlp.router
    if isinstance(router, PackedLinear):
        return router
    assert isinstance(router, Dense)
    # Routers are never quantised. With `rounds_inputs`, every instruction set fuses their products,
    # as it does for the other numbers of a model whose inputs are rounded (csrc/multiply.h).
    return PackedLinear(kernels, pack(kernels, router.weight, rounds_inputs=True), router.bias)


def _norm(norm: Norm | None, dtype: torch.dtype) -> structs.CNorm:
    if norm is None:
        return structs.CNorm()
    assert norm.weight.dtype in (dtype, torch.float32)
    assert norm.bias is None or norm.bias.dtype == dtype
    is_float = norm.weight.dtype == torch.float32
    return structs.CNorm(
        address(norm.weight), address(norm.bias), norm.spec.kind == "layer", is_float
    )


def _linear(slot: tuple[Any, str]) -> Linear:
    owner, name = slot
    linear: Linear = getattr(owner, name)
    return linear


def _packed(linear: Linear) -> PackedLinear:
    packed = linear.packed if isinstance(linear, HybridLinear) else linear
    assert isinstance(packed, PackedLinear)
    return packed


def _from_rows(layer: DecoderLayer) -> int:
    linears = [_linear(slot) for slot in layer.linears]
    return min(each.min_dense_rows if isinstance(each, HybridLinear) else NEVER for each in linears)
