"""The forward pass of every family, in torch: the reference for the compiled one (whole_step.py).

Legend: T tokens in the step, S rows that need logits, H query heads, H_kv key/value heads, D head
dim, V vocabulary. All projections are stored as torch does, [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from worker.attention.base import Attention, AttentionBatch
from worker.attention.chunks import in_chunks
from worker.attention.native_paged import NativePlan
from worker.attention.selection import Selection
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.packed import PackedLinear
from worker.kernels.reference import TorchKernels, heads_of, norm_heads, turn_heads, turned
from worker.kv.cache import PagedCache
from worker.layers.altup import AltUp, StreamEnds
from worker.layers.attention_run import AttentionRun
from worker.layers.embedding import Embedding
from worker.layers.gated_delta import GatedDelta
from worker.layers.latent_attention import LatentAttention
from worker.layers.laurel import Laurel
from worker.layers.layer_inputs import InputGate, InputTable
from worker.layers.linear import Linear, linears_in
from worker.layers.low_rank import LayerAdapters, adapted
from worker.layers.mamba1 import Mamba1
from worker.layers.mamba2 import Mamba2
from worker.layers.mlp import ExpertMlp, ExpertsBeside, Mlp
from worker.layers.norm import Norm
from worker.layers.rg_lru import RgLru
from worker.layers.rope import CosSin, attention_factor, inverse_frequencies, turned_by_axes
from worker.layers.short_conv import ShortConv
from worker.lora.table import StepAdapters
from worker.models.whole_step import WholePass
from worker.slots.states import StepStates
from worker.spec.kernel_sizes import SIZE_MULTIPLE
from worker.spec.latent import IndexerSpec
from worker.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from worker.spec.recurrent import Mamba1Spec
from worker.spec.rope_config import QueryGrowth, RopeConfig
from worker.vision.rows import StepImages


@dataclass(slots=True)
class AttentionBlock:
    """Weights of a layer's attention. What it does not have is None.

    qkv     weight [(H + 2 H_kv) * D, hidden]: rows of the queries, then of the keys and the values;
            the gates, if there are any, have H * D rows after the queries. It has no rows of values
            that are the keys, and none of keys and values that an earlier layer makes
    sinks   [H] float32
    q_norm  over each head (weight [D]), or over all heads together ([H * D]); k_norm likewise
    v_norm  over each head; its weight [D] is 1
    """

    spec: AttentionSpec
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: Tensor | None
    output: Linear
    v_norm: Norm | None = None

    @property
    def linears(self) -> list[tuple[Any, str]]:
        return [(self, "qkv"), (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        for norm in (self.q_norm, self.k_norm, self.v_norm):
            if norm is not None:
                yield from norm.tensors()
        if self.sinks is not None:
            yield self.sinks
        for linear in (self.qkv, self.output):
            yield from linear.tensors()


Turn = tuple[CosSin | None, Tensor | None]
"""How queries and keys are turned, and the factors [T, 1, 1] of the queries; None: not at all."""
Seen = tuple[int | None, int | None, bool] | IndexerSpec
"""The tokens that a token sees: a window, chunks and whether an image is seen as a whole, or an
indexer."""
Recurrence = GatedDelta | Mamba1 | Mamba2 | RgLru | ShortConv
TokenMixer = AttentionBlock | LatentAttention | Recurrence


@dataclass(slots=True)
class DecoderLayer:
    """Weights of a layer. A layer without a norm, a token mixer or an MLP has None in its place."""

    spec: LayerSpec
    attention_norm: Norm | None
    mixer: TokenMixer | None
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | ExpertMlp | None
    post_mlp_norm: Norm | None
    beside: ExpertsBeside | None = None
    inputs: InputGate | None = None
    #: The recurrence beside the attention, if the layer has both.
    recurrence: Recurrence | None = None
    #: What the hidden states are multiplied by at the end.
    factor: float = 1.0
    #: The linear branch beside the attention.
    laurel: Laurel | None = None
    #: What predicts and corrects the streams of hidden states. It also reads the layer's inputs.
    altup: AltUp | None = None

    @property
    def norms(self) -> list[Norm]:
        """Return the norms around the layer's blocks."""
        found = (self.attention_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        return [norm for norm in found if norm is not None]

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear layer except those that stay dense,
        so that the caller can replace it."""
        beside = self.beside.experts if self.beside else None
        parts = (self.mixer, self.recurrence, self.mlp, beside, self.inputs)
        found = (*parts, self.altup, self.laurel)
        return [linear for part in found if part is not None for linear in part.linears]

    def tensors(self) -> Iterator[Tensor]:
        for norm in self.norms:
            yield from norm.tensors()
        parts = (self.mixer, self.recurrence, self.mlp, self.beside, self.inputs)
        for part in (*parts, self.altup, self.laurel):
            if part is not None:
                yield from part.tensors()


@dataclass(slots=True)
class DecoderWeights:
    """All weights of a model.

    positions   [context, hidden] if the positions are learned, otherwise None
    head        maps hidden to V; it has the matrix of the embedding if the two are tied
    inputs      makes the per-layer inputs; None: there are none
    streams     makes and merges the streams of hidden states; None: there is one stream
    """

    embedding: Embedding
    positions: Tensor | None
    layers: list[DecoderLayer]
    norm: Norm
    head: Linear
    inputs: InputTable | None = None
    streams: StreamEnds | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors. A tensor that several layers share is yielded several times."""
        yield from self.embedding.tensors()
        if self.positions is not None:
            yield self.positions
        if self.inputs is not None:
            yield from self.inputs.tensors()
        if self.streams is not None:
            yield from self.streams.tensors()
        for layer in self.layers:
            yield from layer.tensors()
        yield from self.norm.tensors()
        yield from self.head.tensors()


class DecoderModel:
    """A model of one of our families: its forward pass and its logits. It implements StepModel, and
    has no state of any request.

    whole   computes the forward pass in one call of the compiled kernels, if they and the weights
            support that; its result is float32. None: each operation is a call of its own
    """

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, kernels: Kernels | None = None
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels or TorchKernels()
        self._seen: list[Seen] = []
        for each in spec.kv_owners:
            self._seen += [(each.window, each.chunk, each.sees_whole_runs), *_selected(each)]
        self._places = spec.kv_places
        self._offsets = _state_offsets(spec)
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self._dtype = dtype
        self._has_float_sum = spec.float_residual and dtype != torch.float32
        # Rounded to the model's dtype, as in training.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        ropes = {each.rope for each in spec.attentions if each.rope is not None}
        self._frequencies = {rope: inverse_frequencies(rope).to(device) for rope in ropes}
        self._growths = {
            growth: torch.tensor(growth.factors(spec.context_tokens), dtype=dtype, device=device)
            for growth in {each.growth for each in spec.attentions}
            if growth is not None
        }
        self.whole = WholePass.of(spec, weights, self.kernels)

    @property
    def keeps_bits(self) -> bool:
        """Return whether a position's result has the same bits in every step: the kernels are
        compiled, and every linear has packed weights in all steps. What torch computes beside them
        does not depend on the other rows."""
        if not isinstance(self.kernels, NativeKernels):
            return False
        if self.whole is not None:
            return self.whole.keeps_bits
        mambas = [each for each in self.spec.recurrents if isinstance(each, Mamba1Spec)]
        if any(mamba.norms and mamba.state % SIZE_MULTIPLE for mamba in mambas):
            return False  # torch computes the norms of B and C, some rows together
        return all(isinstance(each, PackedLinear) for each in linears_in(self.weights))

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the weights, and the copies of some of them that `whole` has
        made."""
        yield from self.weights.tensors()
        if self.whole is not None:
            yield from self.whole.tensors()

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: PagedCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """Return the hidden states [T, hidden] of token_ids [T] int64, before the final norm.
        Writes this step's keys and values to the cache, and changes the states of its rows.

        images   the rows that stand in place of embeddings, and what the first layers add to them;
                 None: there are none
        """
        if images is not None:
            batch = batch.with_seen_ends(images.seen_ends)
        whole = self.whole
        if whole is not None and whole.is_for(len(token_ids)):
            plan = attention.plan(batch)
            if isinstance(plan, NativePlan):
                return whole(token_ids, plan, cache, adapters, images)
        x = self._embedded(token_ids, batch.positions)
        if images is not None:
            images.put(x)
        table = self.weights.inputs
        inputs = None if table is None else table(token_ids, x)
        return self.compute(x, batch, cache, attention, adapters, states, inputs, images)

    @torch.inference_mode()
    def compute(
        self,
        x: Tensor,
        batch: AttentionBatch,
        cache: PagedCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
        inputs: Tensor | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """Compute the layers: return what `__call__` returns, for tokens whose input of the first
        layer is x [T, hidden], which is changed.

        inputs   the per-layer inputs [T, layers, width]; None: the layers have none
        images   what is added to x after the first layers; None: nothing is
        """
        plans = self._plans(batch, cache, attention)
        turns = self._turns(batch, self._dtype)
        ends = self.weights.streams
        streams = None if ends is None else ends.spread_out(x)
        delta: Tensor | None = None
        post_norm: Norm | None = None
        for index, layer in enumerate(self.weights.layers):
            mixer, place, offset = layer.mixer, self._places[index], self._offsets[index]
            terms = None if adapters is None else adapters.for_layer(index, self.kernels)
            if layer.altup is not None and streams is not None:
                streams, x = layer.altup.predicted(streams, self.kernels)
            if mixer is not None:
                normed = self._add_norm(x, delta, layer.attention_norm, post_norm)
                if isinstance(mixer, AttentionBlock | LatentAttention):
                    assert place is not None
                    turn = turns[mixer.spec.rope, mixer.spec.growth]
                    slots = batch.for_entry(cache.entries[place]).slot_mapping
                    run = AttentionRun(*turn, cache, place, slots, attention, plans[place])
                    if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
                        run = replace(run, selection=plans[place + 1])
                    delta = self._attend(mixer, normed, run, terms)
                else:
                    delta = mixer(normed, self.kernels, _some(states), offset, terms)
                if layer.recurrence is not None:  # adapters change only the attention
                    delta += layer.recurrence(normed, self.kernels, _some(states), offset)
                post_norm = layer.post_attention_norm
                if layer.spec.order in ("parallel", "parallel_one_norm"):
                    assert layer.mlp is not None
                    if layer.mlp_norm is not None:
                        normed = self._add_norm(x, None, layer.mlp_norm)
                    delta = delta.add_(layer.mlp(normed, self.kernels, terms))
                    continue
                if layer.laurel is not None:
                    layer.laurel.add(self._add_norm(x, delta, None, post_norm), normed)
                    delta, post_norm = None, None
            if layer.mlp is not None:
                normed = self._add_norm(x, delta, layer.mlp_norm, post_norm)
                delta, post_norm = layer.mlp(normed, self.kernels, terms), layer.post_mlp_norm
            if layer.beside is not None and delta is not None:
                delta = layer.beside(x, delta, self.kernels)
            if layer.altup is not None and streams is not None and inputs is not None:
                self._add_norm(x, delta, None, post_norm)
                streams = layer.altup.corrected(streams, x, inputs[:, index], self.kernels)
                delta, post_norm = None, None
                continue
            if layer.inputs is not None and inputs is not None:
                self._add_norm(x, delta, None, post_norm)
                delta = layer.inputs(x, inputs[:, index], self.kernels)
                post_norm = layer.inputs.norm
            if layer.factor != 1.0:
                self._add_norm(x, delta, None, post_norm).mul_(layer.factor)
                delta, post_norm = None, None
            if images is not None and index < images.num_added:
                images.add(self._add_norm(x, delta, None, post_norm), index)
                delta, post_norm = None, None
        if ends is not None and streams is not None:
            return ends.merged(streams)
        return self._add_norm(x, delta, None, post_norm)

    def _plans(self, batch: AttentionBatch, cache: PagedCache, attention: Attention) -> list[Any]:
        """Return the plan of the step for each layer with keys and values of its own, and the
        selection of an indexer for its index keys; None: they select all tokens. Layers with the
        same entry and limits share one."""
        kinds = [*zip(cache.entries, self._seen, strict=True)]
        plans: dict[tuple[int, Seen], Any] = {}
        alike: dict[Seen, Any] = {}
        for entry, seen in dict.fromkeys(kinds):
            own = batch.for_entry(entry)
            if isinstance(seen, IndexerSpec):
                plans[entry, seen] = Selection.of(own, cache.block_tokens, seen.top)
                continue
            window, chunk, sees_runs = seen
            if own.seen_ends is not None and not sees_runs:
                own = own.with_seen_ends(None)
            if chunk is not None:
                own = in_chunks(own, chunk, cache.block_tokens)
            plans[entry, seen] = alike[seen] = attention.plan(own, window, alike.get(seen))
        return [plans[kind] for kind in kinds]

    def _attend(
        self,
        block: AttentionBlock | LatentAttention,
        x: Tensor,
        run: AttentionRun,
        terms: LayerAdapters | None,
    ) -> Tensor:
        """Return the attention [T, hidden] of x [T, hidden]."""
        if isinstance(block, LatentAttention):
            return block(x, self.kernels, run, terms)
        spec, angles = block.spec, run.angles
        q_norm, k_norm = block.q_norm, block.k_norm
        qkv, gate = adapted(terms, "qkv", x, block.qkv(x)), None
        if spec.gated:
            queries, gate, rest = torch.split(
                qkv, [spec.q_width, spec.q_width, 2 * spec.kv_width], dim=1
            )
            qkv = torch.cat([queries, rest], dim=1)
        if spec.keys_as_values:
            qkv = torch.cat([qkv, qkv[:, spec.q_width :]], dim=1)
        if spec.kv_of is None:
            heads = heads_of(qkv, spec.head_dim)
            norm_heads(heads[:, -spec.num_kv_heads :], block.v_norm)
            if spec.norms_rotated:
                turn_heads(heads[:, : -spec.num_kv_heads], angles)
                norm_heads(heads[:, : spec.num_heads], q_norm)
                norm_heads(heads[:, spec.num_heads : -spec.num_kv_heads], k_norm)
                angles, q_norm, k_norm = None, None, None
            q = self.kernels.place(
                qkv,
                angles,
                run.cache,
                run.place,
                run.slots,
                q_norm=q_norm,
                k_norm=k_norm,
            )
        else:
            q = turned(qkv, angles, spec.head_dim, q_norm)
        if run.factors is not None:
            q = q * run.factors
        seen = run.attention.run(
            q,
            *run.cache.layer(run.place),
            run.plan,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            sinks=block.sinks,
        ).flatten(1)
        if gate is not None:
            seen = seen * self.kernels.sigmoid(gate)
        result = adapted(terms, "output", seen, block.output(seen))
        return result if spec.result_scale == 1.0 else result.mul_(spec.result_scale)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the final norm of hidden [S, hidden], in float32."""
        norm = self.weights.norm
        bias = None if norm.bias is None else norm.bias.float()
        return Norm(norm.spec, norm.weight.float(), bias)(hidden.float())

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of hidden [S, hidden]."""
        if self.whole is not None and hidden.dtype == torch.float32:
            return self.whole.logits(hidden)
        if self._has_float_sum:  # the last norm reads the sum before it is rounded
            normed = self.normed(hidden).to(self._dtype)
        else:
            normed = self._add_norm(hidden, None, self.weights.norm)
        logits = self.weights.head.to_float(normed)
        if self.spec.logits_scale != 1.0:
            logits.mul_(self.spec.logits_scale)
        cap = self.spec.logits_soft_cap
        return logits if cap is None else self.kernels.cap_logits(logits, cap)

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.weights.embedding(token_ids)
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        if self.weights.positions is not None:
            x.add_(self.weights.positions.index_select(0, positions))
        return x.float() if self._has_float_sum else x

    def _turns(
        self, batch: AttentionBatch, dtype: torch.dtype
    ) -> dict[tuple[RopeConfig | None, QueryGrowth | None], Turn]:
        """Return the turn of each layer's queries and keys, by its rope and growth."""
        angles: dict[RopeConfig | None, CosSin | None] = {None: None}
        positions, by_axis = batch.positions, batch.rope_positions
        for rope, frequencies in self._frequencies.items():
            factor = attention_factor(rope)
            if by_axis is None or not rope.axes:
                angles[rope] = self.kernels.cos_sin(positions, frequencies, dtype, factor)
                continue
            of_axes = [self.kernels.cos_sin(each, frequencies, dtype, factor) for each in by_axis]
            angles[rope] = turned_by_axes(of_axes, rope.axes)
        factors: dict[QueryGrowth | None, Tensor | None] = {None: None}
        for growth, of_runs in self._growths.items():
            runs = (positions + growth.offset) // growth.tokens
            runs.clamp_(max=len(of_runs) - 1)
            factors[growth] = of_runs[runs].view(-1, 1, 1)
        return {
            (rope, growth): (angles[rope], factors[growth])
            for rope, growth in {(each.rope, each.growth) for each in self.spec.attentions}
        }

    def _add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm | None, post_norm: Norm | None = None
    ) -> Tensor:
        """Add a block's result `delta` to x [T, hidden] in place, after `post_norm` and times the
        residual scale. Return the norm of x; x itself without a norm.

        If x is float32 and the weights are not, the norm has their dtype.
        """
        scale = self.spec.residual_scale
        if self._has_float_sum:
            if delta is not None:
                self.kernels.add_norm(x, delta.to(x.dtype), None, post_norm=post_norm, scale=scale)
            return x if norm is None else self.kernels.add_norm(x.to(self._dtype), None, norm)
        return self.kernels.add_norm(x, delta, norm, post_norm=post_norm, scale=scale)


def _selected(attention: AttentionSpec) -> tuple[IndexerSpec, ...]:
    """Return the indexer of a layer, if it has one."""
    latent = attention.latent
    return () if latent is None or latent.indexer is None else (latent.indexer,)


def _some(states: StepStates | None) -> StepStates:
    assert states is not None, "a model with recurrent layers needs states"
    return states


def _state_offsets(spec: ModelSpec) -> list[int]:
    """Return, for each layer, how many numbers of a state belong to the layers before it."""
    sizes = [layer.recurrent.state_items if layer.recurrent else 0 for layer in spec.layers]
    return [0, *accumulate(sizes)]
