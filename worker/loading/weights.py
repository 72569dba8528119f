"""Loads the weights of a model from its files, one tensor at a time (tensor_reader.py)."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker.layers.altup import AltUp, StreamEnds
from worker.layers.group import Group
from worker.layers.indexer import Indexer
from worker.layers.latent_attention import LatentAttention
from worker.layers.laurel import Laurel
from worker.layers.layer_inputs import InputGate, InputTable
from worker.layers.linear import Linear
from worker.layers.mlp import ExpertMlp, ExpertsBeside, Latent, Mlp, SharedExpert
from worker.layers.norm import Norm
from worker.layers.parallel import GatheredHead, JointlyNormed, SharedEmbedding, SummedLinear
from worker.loading.layouts import DenseLayout, WeightLayout, WeightSource
from worker.loading.parts import of_heads
from worker.loading.recurrent_layers import RecurrentReader
from worker.models.decoder import (
    AttentionBlock,
    DecoderLayer,
    DecoderWeights,
    TokenMixer,
)
from worker.models.draft_head import DraftHeadWeights
from worker.spec.draft_head import DraftHeadTensors
from worker.spec.latent import IndexerSpec
from worker.spec.latent_tensors import IndexerTensors, LatentAttentionTensors
from worker.spec.layer_tensors import (
    AltUpTensors,
    AttentionTensors,
    BesideTensors,
    LaurelTensors,
    LayerInputTensors,
    LayerTensors,
    MixerTensors,
    SharedTensors,
)
from worker.spec.matrices import FusedMatrix
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec, Xielu
from worker.spec.tensors import ModelTensors


def load_weights(
    tensors: ModelTensors,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: WeightLayout | None = None,
    group: Group | None = None,
) -> DecoderWeights:
    """Read every tensor of the model, or a rank's parts of them, and return the weights. Check the
    tensors of the whole model with `tensors.check` first.

    source   reads the files
    layout   makes the layers; None: DenseLayout
    group    the group of the rank whose tensors these are; None: they are the whole model's
    """
    assert (group is None) == (tensors.share is None)
    with torch.inference_mode():
        return _Loader(tensors, source, dtype, device, layout or DenseLayout(), group).load()


def load_draft_head(
    tensors: DraftHeadTensors,
    source: WeightSource,
    model: DecoderWeights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: WeightLayout,
) -> DraftHeadWeights:
    """Read the tensors of a head for drafts. It shares the embedding and the head of `model`."""
    with torch.inference_mode():
        loader = _Loader(tensors, source, dtype, device, layout, None)
        return loader.load_draft_head(tensors, model)


class _Loader(RecurrentReader):
    def load(self) -> DecoderWeights:
        spec, tensors = self._tensors.spec, self._tensors
        head = self._layout.head(self._matrix(tensors.head))
        if spec.tied_embeddings:
            embedding = self._layout.tied_embedding(head)
        else:
            embedding = self._layout.embedding(self._matrix(tensors.embedding_matrix))
        positions = None
        if tensors.positions is not None:
            positions = self._empty(spec.learned_positions, spec.hidden)
            self._source.read_into(tensors.positions, positions)
        layers = [
            self._layer(layer, tensors.layer(index)) for index, layer in enumerate(spec.layers)
        ]
        norm = self._norm(tensors.norm, spec.norm)
        if self._group is not None and tensors.share is not None:
            embedding = SharedEmbedding(embedding, tensors.share, self._group)
            head = GatheredHead(head, tensors.share, self._group)
        return DecoderWeights(
            embedding, positions, layers, norm, head, self._input_table(), self._stream_ends()
        )

    def load_draft_head(self, tensors: DraftHeadTensors, model: DecoderWeights) -> DraftHeadWeights:
        layers = [self._layer(e, tensors.layer(i)) for i, e in enumerate(tensors.spec.layers)]
        norm, kind = self._norm(tensors.norm, tensors.spec.norm), tensors.spec.norm
        return DraftHeadWeights(
            embedding_norm=self._norm(tensors.embedding_norm, kind),
            hidden_norm=self._norm(tensors.hidden_norm, kind),
            projection=self._fused(tensors.projection),
            decoder=DecoderWeights(model.embedding, None, layers, norm, model.head),
        )

    def _input_table(self) -> InputTable | None:
        spec, tensors = self._tensors.spec.layer_inputs, self._tensors.layer_inputs
        if spec is None or tensors is None:
            return None
        table = self._layout.embedding(self._matrix(tensors.table))
        norm = self._norm(tensors.norm, self._tensors.spec.norm)
        return InputTable(spec, table, self._fused(tensors.project), norm)

    def _stream_ends(self) -> StreamEnds | None:
        tensors = self._tensors.streams
        if tensors is None:
            return None
        merge = [self._fused(matrix) for matrix in tensors.merge]
        return StreamEnds(self._fused(tensors.spread), merge)

    def _layer(self, layer: LayerSpec, tensors: LayerTensors) -> DecoderLayer:
        norm, inputs = self._tensors.spec.norm, self._input_gate(tensors.inputs)
        return DecoderLayer(
            spec=layer,
            attention_norm=self._norm_or_none(tensors.attention_norm, norm),
            mixer=None if tensors.mixer is None else self._mixer(layer, tensors.mixer),
            post_attention_norm=self._norm_or_none(tensors.post_attention_norm, norm),
            mlp_norm=self._norm_or_none(tensors.mlp_norm, norm),
            mlp=None if layer.mlp is None else self._mlp(layer.mlp, tensors),
            post_mlp_norm=self._norm_or_none(tensors.post_mlp_norm, norm),
            beside=self._beside(layer.beside, tensors.beside),
            inputs=None if tensors.altup else inputs,
            recurrence=None
            if tensors.recurrence is None
            else self._recurrence(layer, tensors.recurrence),
            factor=1.0 if tensors.factor is None else float(self._vector(tensors.factor)),
            laurel=None if tensors.laurel is None else self._laurel(tensors.laurel),
            altup=self._altup(tensors.altup, inputs),
        )

    def _laurel(self, tensors: LaurelTensors) -> Laurel:
        inputs, outputs = self._fused(tensors.inputs), self._fused(tensors.outputs)
        return Laurel(inputs, outputs, self._norm(tensors.norm, self._tensors.spec.norm))

    def _altup(self, tensors: AltUpTensors | None, inputs: InputGate | None) -> AltUp | None:
        spec = self._tensors.spec
        if tensors is None or spec.altup is None or inputs is None:
            return None
        # The router reads the norm of its input, divided by the number of hidden states.
        weight = self._vector(tensors.router_norm).div_(spec.hidden)
        return AltUp(
            spec=spec.altup,
            router=self._plain(tensors.router),
            router_norm=Norm(NormSpec(eps=spec.norm.eps), weight),
            predictions=self._values(tensors.predictions),
            corrections=self._values(tensors.corrections),
            scale=self._vector_or_none(tensors.scale),
            inputs=inputs,
        )

    def _beside(self, mlp: MlpSpec | None, tensors: BesideTensors | None) -> ExpertsBeside | None:
        if mlp is None or tensors is None:
            return None
        spec = self._tensors.spec
        # The router reads the norm of its input, times its weight and hidden ** -0.5.
        weight = self._vector(tensors.router_norm).mul_(spec.hidden**-0.5)
        experts = ExpertMlp(
            mlp,
            self._plain(tensors.router),
            [
                Mlp(mlp, self._fused(each.gate_up), self._fused(each.down))
                for each in tensors.experts
            ],
            router_norm=Norm(NormSpec(eps=spec.norm.eps), weight),
            factors=self._vector(tensors.factors),
        )
        norms = (tensors.mlp_norm, tensors.norm, tensors.result_norm)
        mlp_norm, norm, result_norm = (self._norm(each, spec.norm) for each in norms)
        return ExpertsBeside(mlp_norm, norm, experts, result_norm)

    def _input_gate(self, tensors: LayerInputTensors | None) -> InputGate | None:
        spec = self._tensors.spec
        if tensors is None or spec.layer_inputs is None:
            return None
        width, activation = spec.layer_inputs.width, spec.layer_inputs.activation
        return InputGate(
            MlpSpec(intermediate=width, activation=activation),
            self._fused(tensors.gate),
            self._fused(tensors.project),
            self._norm(tensors.norm, spec.norm),
        )

    def _mixer(self, layer: LayerSpec, tensors: MixerTensors) -> TokenMixer:
        if layer.attention is None:
            return self._recurrence(layer, tensors)
        if isinstance(tensors, LatentAttentionTensors):
            return self._latent_attention(layer.attention, tensors)
        assert isinstance(tensors, AttentionTensors)
        return self._attention(layer.attention, tensors)

    def _attention(self, attention: AttentionSpec, tensors: AttentionTensors) -> AttentionBlock:
        norm = self._tensors.spec.norm
        qkv = self._fused(tensors.qkv)
        q_norm = self._norm_or_none(tensors.q_norm, norm)
        k_norm = self._norm_or_none(tensors.k_norm, norm)
        if attention.qk_norm == "projection" and self._group is not None:
            assert q_norm is not None
            assert k_norm is not None
            qkv, q_norm, k_norm = JointlyNormed(qkv, q_norm, k_norm, self._group), None, None
        sinks = self._vector_or_none(tensors.sinks)
        if tensors.plain_norm_size:
            q_norm = k_norm = self._plain_norm(tensors.plain_norm_size)
        v_norm = self._plain_norm(tensors.v_norm_size) if tensors.v_norm_size else None
        output = self._summed(tensors.output)
        return AttentionBlock(attention, qkv, q_norm, k_norm, sinks, output, v_norm)

    def _latent_attention(
        self, attention: AttentionSpec, tensors: LatentAttentionTensors
    ) -> LatentAttention:
        latent = attention.latent
        assert latent is not None
        norm = NormSpec(eps=latent.eps)
        indexer = None
        if latent.indexer is not None and tensors.indexer is not None:
            indexer = self._indexer(latent.indexer, tensors.indexer)
        if tensors.up is None:
            key_up = [self._matrix(each) for each in tensors.key_up]
            value_up = [self._matrix(each) for each in tensors.value_up]
        else:
            blocks = self._source.blocks(tensors.up.names[0])
            key_up, value_up = of_heads(tensors, self._values(tensors.up), blocks)
        return LatentAttention(
            spec=attention,
            inputs=self._fused(tensors.inputs),
            q_norm=self._norm_or_none(tensors.q_norm, norm),
            queries=None if tensors.queries is None else self._fused(tensors.queries),
            kv_norm=self._norm(tensors.kv_norm, norm),
            key_up=self._layout.heads(key_up),
            value_up=self._layout.heads(value_up),
            output=self._fused(tensors.output),
            indexer=indexer,
        )

    def _indexer(self, spec: IndexerSpec, tensors: IndexerTensors) -> Indexer:
        return Indexer(
            spec=spec,
            queries=self._fused(tensors.queries),
            keys=self._fused(tensors.keys),
            key_norm=self._norm(tensors.key_norm, NormSpec(kind="layer", eps=spec.eps, bias=True)),
            weights=self._plain(tensors.weights),
        )

    def _mlp(self, mlp: MlpSpec, tensors: LayerTensors) -> Mlp | ExpertMlp:
        if tensors.xielu:
            numbers = [float(self._vector(each)) for each in tensors.xielu]
            mlp = replace(mlp, xielu=Xielu.of(*numbers))
        if tensors.router is None:
            (only,) = tensors.mlps
            return Mlp(mlp, self._fused(only.gate_up), self._summed(only.down))
        router = self._plain(tensors.router)
        experts = [
            Mlp(mlp, self._fused(each.gate_up), self._fused(each.down)) for each in tensors.mlps
        ]
        first, latent = self._tensors.experts(mlp).start, tensors.latent
        return ExpertMlp(
            mlp,
            router,
            experts,
            first,
            self._group,
            self._shared(mlp, tensors.shared),
            self._vector_or_none(tensors.choice_bias),
            latent=Latent(self._fused(latent.inputs), self._fused(latent.outputs))
            if latent
            else None,
        )

    def _shared(self, mlp: MlpSpec, tensors: SharedTensors | None) -> SharedExpert | None:
        if tensors is None:
            return None
        whole = replace(mlp, intermediate=mlp.shared, num_experts=1, top_k=1, shared=0, latent=0)
        gate_up, down = self._fused(tensors.mlp.gate_up), self._fused(tensors.mlp.down)
        score = None if tensors.gate is None else self._plain(tensors.gate)
        return SharedExpert(Mlp(whole, gate_up, down), score)

    def _summed(self, matrix: FusedMatrix) -> Linear:
        """Return a linear layer whose results the ranks of a group add."""
        linear = self._fused(matrix)
        return linear if self._group is None else SummedLinear(linear, self._group)
