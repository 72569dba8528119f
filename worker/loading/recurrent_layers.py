"""Loads the token mixers with a recurrent state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from worker.layers.delta_rule import DeltaWeights
from worker.layers.gated_delta import GatedDelta
from worker.layers.mamba1 import Mamba1
from worker.layers.mamba1_rule import Mamba1Weights
from worker.layers.mamba2 import Mamba2, input_scales
from worker.layers.mamba2_rule import Mamba2Weights
from worker.layers.norm import Norm
from worker.layers.rg_lru import RgLru
from worker.layers.rg_lru_rule import LruWeights
from worker.layers.short_conv import ShortConv
from worker.loading.tensor_reader import TensorReader
from worker.models.decoder import Recurrence
from worker.spec.layer_tensors import MixerTensors
from worker.spec.matrices import NormTensor, Shape, VectorTensor
from worker.spec.model_spec import LayerSpec, NormSpec
from worker.spec.recurrent import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, RgLruSpec, ShortConvSpec
from worker.spec.recurrent_tensors import (
    ConvTensors,
    GatedDeltaTensors,
    Mamba1Tensors,
    Mamba2Tensors,
    RgLruTensors,
    ShortConvTensors,
)

LRU_DECAY = -8.0
"""Factor of the softplus of a channel's learned number. Their product is the logarithm of the
channel's strongest decay."""


class RecurrentReader(TensorReader):
    """Reads the weights of recurrences."""

    def _recurrence(self, layer: LayerSpec, tensors: MixerTensors) -> Recurrence:
        match layer.recurrent, tensors:
            case GatedDeltaSpec() as delta, GatedDeltaTensors():
                return self._gated_delta(delta, tensors)
            case Mamba1Spec() as mamba, Mamba1Tensors():
                return self._mamba1(mamba, tensors)
            case Mamba2Spec() as mamba, Mamba2Tensors():
                return self._mamba2(mamba, tensors)
            case RgLruSpec() as lru, RgLruTensors():
                return self._rg_lru(lru, tensors)
            case ShortConvSpec() as conv, ShortConvTensors():
                return self._short_conv(conv, tensors)
        raise AssertionError("the layer has no recurrence")

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
        decay = self._floats(tensors.decay, tensors.decay_shape)
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

    def _rg_lru(self, spec: RgLruSpec, tensors: RgLruTensors) -> RgLru:
        input_bias, decay_bias = (
            self._floats(name, tensors.bias_shape).flatten() for name in tensors.gate_biases
        )
        return RgLru(
            spec=spec,
            inputs=self._fused(tensors.inputs),
            gates=self._layout.heads([self._matrix(each) for each in tensors.gates]),
            weights=LruWeights(
                conv=self._taps(tensors.conv),
                conv_bias=self._vector(tensors.conv_bias),
                decay=softplus(self._vector(tensors.decay)).mul_(LRU_DECAY),
                input_bias=input_bias,
                decay_bias=decay_bias,
            ),
            output=self._fused(tensors.output),
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
        parts = [self._floats(name, shape)[:, 0] for name, shape in tensors.tensors()]
        return torch.cat(parts).T.contiguous()

    def _floats(self, name: str, shape: Shape) -> Tensor:
        """Read a tensor of numbers, float32."""
        numbers = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._source.read_into(name, numbers)
        return numbers

    def _decay(self, tensors: GatedDeltaTensors | Mamba2Tensors) -> Tensor:
        """Read the factors of the decay, [heads] float32."""
        decay = self._vector(tensors.decay)
        return decay if tensors.is_factor else decay.exp_().neg_()

    def _norm_weight(self, tensor: NormTensor) -> Tensor:
        """Read the weight of a norm that a recurrence computes, float32 and without an offset."""
        return self._vector(VectorTensor(tensor.weight, tensor.size))
