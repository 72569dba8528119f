"""Loads the tensors of a model's files into the model's fused matrices, one tensor at a time.

A source reads a tensor, by its name in the files, straight into its part of the fused matrix. Only
a tensor that must be reordered, transposed or packed is held twice, while it is converted. A rank
of a tensor parallel group reads only its parts of the tensors, if the source can (`PartSource`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from worker.checkpoint.quant_blocks import QuantBlocks
from worker.layers.altup import AltUp, StreamEnds
from worker.layers.delta_rule import DeltaWeights
from worker.layers.gated_delta import GatedDelta
from worker.layers.group import Group
from worker.layers.latent_attention import LatentAttention
from worker.layers.laurel import Laurel
from worker.layers.layer_inputs import InputGate, InputTable
from worker.layers.linear import Linear
from worker.layers.mamba1 import Mamba1
from worker.layers.mamba1_rule import Mamba1Weights
from worker.layers.mamba2 import Mamba2, input_scales
from worker.layers.mamba2_rule import Mamba2Weights
from worker.layers.mlp import ExpertMlp, ExpertsBeside, Latent, Mlp, SharedExpert
from worker.layers.norm import Norm
from worker.layers.parallel import GatheredHead, JointlyNormed, SharedEmbedding, SummedLinear
from worker.layers.short_conv import ShortConv
from worker.loading.layouts import DenseLayout, Matrix, WeightLayout, WeightSource
from worker.loading.parts import cut_blocks, of_heads, read_box, read_part
from worker.models.decoder import (
    AttentionBlock,
    DecoderLayer,
    DecoderWeights,
    Recurrence,
    TokenMixer,
)
from worker.models.draft_head import DraftHeadWeights
from worker.spec.draft_head import DraftHeadTensors
from worker.spec.latent_tensors import LatentAttentionTensors
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
from worker.spec.matrices import FusedMatrix, MatrixPart, NormTensor, VectorTensor
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec, Xielu
from worker.spec.recurrent import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, ShortConvSpec
from worker.spec.recurrent_tensors import (
    ConvTensors,
    GatedDeltaTensors,
    Mamba1Tensors,
    Mamba2Tensors,
    ShortConvTensors,
)
from worker.spec.share import Box, VectorCut
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


class _Loader:
    def __init__(
        self,
        tensors: ModelTensors,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        layout: WeightLayout,
        group: Group | None,
    ) -> None:
        self._tensors = tensors
        self._source = source
        self._dtype = dtype
        self._device = device
        self._layout = layout
        self._group = group

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

    def _recurrence(self, layer: LayerSpec, tensors: MixerTensors) -> Recurrence:
        match layer.recurrent, tensors:
            case GatedDeltaSpec() as delta, GatedDeltaTensors():
                return self._gated_delta(delta, tensors)
            case Mamba1Spec() as mamba, Mamba1Tensors():
                return self._mamba1(mamba, tensors)
            case Mamba2Spec() as mamba, Mamba2Tensors():
                return self._mamba2(mamba, tensors)
            case ShortConvSpec() as conv, ShortConvTensors():
                return self._short_conv(conv, tensors)
        raise AssertionError("the layer has no recurrence")

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
        )

    def _plain_norm(self, size: int) -> Norm:
        """Return a norm without a weight."""
        ones = torch.ones(size, dtype=torch.float32, device=self._device)
        return Norm(NormSpec(eps=self._tensors.spec.norm.eps), ones)

    def _gated_delta(self, spec: GatedDeltaSpec, tensors: GatedDeltaTensors) -> GatedDelta:
        return GatedDelta(
            spec=spec,
            inputs=self._fused(tensors.inputs),
            gates=self._plain(tensors.gates),
            weights=DeltaWeights(
                conv=self._taps(tensors.conv),
                decay=self._decay(tensors),
                bias=self._vector(tensors.bias),
                norm=self._norm_weight(tensors.norm),
            ),
            output=self._fused(tensors.output),
            decay_up=None if tensors.decay_up is None else self._fused(tensors.decay_up),
            gate_up=None if tensors.gate_up is None else self._fused(tensors.gate_up),
        )

    def _mamba1(self, spec: Mamba1Spec, tensors: Mamba1Tensors) -> Mamba1:
        decay = torch.empty(tensors.decay_shape, dtype=torch.float32, device=self._device)
        self._source.read_into(tensors.decay, decay)
        weights = [self._norm_weight(each) for each in tensors.norms]
        weights += [
            torch.ones(size, dtype=torch.float32, device=self._device)
            for size in tensors.plain_sizes
        ]
        return Mamba1(
            spec=spec,
            inputs=self._fused(tensors.inputs),
            made=self._plain(tensors.made),
            norms=tuple(Norm(NormSpec(eps=spec.eps), weight) for weight in weights),
            step=self._plain(tensors.step),
            weights=Mamba1Weights(
                conv=self._taps(tensors.conv),
                conv_bias=self._vector_or_none(tensors.conv_bias),
                decay=decay if tensors.is_factor else decay.exp_().neg_(),
                bias=self._vector(tensors.bias),
                skip=self._vector(tensors.skip),
            ),
            output=self._fused(tensors.output),
        )

    def _mamba2(self, spec: Mamba2Spec, tensors: Mamba2Tensors) -> Mamba2:
        return Mamba2(
            spec=spec,
            inputs=self._fused(tensors.inputs),
            weights=Mamba2Weights(
                conv=self._taps(tensors.conv),
                conv_bias=self._vector_or_none(tensors.conv_bias),
                decay=self._decay(tensors),
                bias=self._vector(tensors.bias),
                skip=self._vector(tensors.skip),
                norm=None if tensors.norm is None else self._norm_weight(tensors.norm),
            ),
            output=self._fused(tensors.output),
            scales=input_scales(spec, self._device),
        )

    def _short_conv(self, spec: ShortConvSpec, tensors: ShortConvTensors) -> ShortConv:
        return ShortConv(
            spec=spec,
            inputs=self._fused(tensors.inputs),
            conv=self._taps(tensors.conv),
            bias=self._vector_or_none(tensors.bias),
            output=self._fused(tensors.output),
        )

    def _taps(self, tensors: ConvTensors) -> Tensor:
        """Read the weights of a convolution, [kernel, width] float32."""
        parts = []
        for name, shape in tensors.tensors():
            part = torch.empty(shape, dtype=torch.float32, device=self._device)
            self._source.read_into(name, part)
            parts.append(part[:, 0])
        return torch.cat(parts).T.contiguous()

    def _decay(self, tensors: GatedDeltaTensors | Mamba2Tensors) -> Tensor:
        """Read the factors of the decay, [heads] float32."""
        decay = self._vector(tensors.decay)
        return decay if tensors.is_factor else decay.exp_().neg_()

    def _norm_weight(self, tensor: NormTensor) -> Tensor:
        """Read the weight of a norm that a recurrence computes, float32 and without an offset."""
        return self._vector(VectorTensor(tensor.weight, tensor.size))

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

    def _norm_or_none(self, tensor: NormTensor | None, spec: NormSpec) -> Norm | None:
        return None if tensor is None else self._norm(tensor, spec)

    def _norm(self, tensor: NormTensor, spec: NormSpec) -> Norm:
        dtype = torch.float32 if spec.offset and spec.kind == "rms" else self._dtype
        weight = torch.empty(tensor.size, dtype=dtype, device=self._device)
        self._read_vector(tensor.weight, weight, tensor.cut)
        bias = None
        if tensor.has_bias:
            bias = self._empty(tensor.size)
            self._source.read_into(f"{tensor.name}.bias", bias)
        return Norm(spec, weight.add_(spec.offset), bias)

    def _vector_or_none(self, tensor: VectorTensor | None) -> Tensor | None:
        return None if tensor is None else self._vector(tensor)

    def _vector(self, tensor: VectorTensor) -> Tensor:
        """Read a vector [size] float32."""
        vector = torch.empty(tensor.size, dtype=torch.float32, device=self._device)
        self._read_vector(tensor.name, vector, tensor.cut)
        return vector

    def _read_vector(self, name: str, target: Tensor, cut: VectorCut | None) -> None:
        if cut is None:
            self._source.read_into(name, target)
        else:
            read_box(self._source, name, target, Box((cut.items,), (cut.whole,)))

    def _fused(self, matrix: FusedMatrix) -> Linear:
        return self._layout.linear(self._matrix(matrix))

    def _plain(self, matrix: FusedMatrix) -> Linear:
        return self._layout.plain(self._matrix(matrix))

    def _matrix(self, matrix: FusedMatrix) -> Matrix:
        return Matrix(
            tuple(sum(part.rows for part in run) for run in matrix.runs),
            lambda: [self._blocks(run) for run in matrix.runs],
            lambda: self._values(matrix),
            self._bias(matrix),
        )

    def _blocks(self, parts: Sequence[MatrixPart]) -> QuantBlocks | None:
        """Return the blocks of parts of one tensor."""
        part = parts[0]
        if part.is_transposed:
            return None
        blocks = self._source.blocks(part.weight, part.index)
        if blocks is not None and part.cut is not None:
            blocks = cut_blocks(blocks, [each.cut for each in parts if each.cut is not None])
        if blocks is None or part.order is None:
            return blocks
        return QuantBlocks(blocks.kind, blocks.raw[part.order.file_rows_of(len(blocks.raw))])

    def _values(self, matrix: FusedMatrix) -> Tensor:
        """Read the parts of a fused matrix, and return them stacked by rows."""
        whole = self._empty(matrix.rows, matrix.columns)
        targets = torch.split(whole, [part.rows for part in matrix.parts])
        for part, target in zip(matrix.parts, targets, strict=True):
            read_part(self._source, part.weight, target, part, matrix.columns)
        return whole

    def _bias(self, matrix: FusedMatrix) -> Tensor | None:
        if not matrix.has_bias:
            return None
        whole = self._empty(matrix.rows)
        targets = torch.split(whole, [part.rows for part in matrix.parts])
        for part, target in zip(matrix.parts, targets, strict=True):
            read_part(self._source, part.bias, target, part, None)
        return whole

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
