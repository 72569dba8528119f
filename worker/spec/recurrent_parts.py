"""The tensors of recurrent mixers in a model's files (recurrent_tensors.py). Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from worker.spec import recurrent_tensors
from worker.spec.layer_tensors import MixerTensors
from worker.spec.matrices import FusedMatrix, NormTensor, VectorTensor
from worker.spec.model_spec import LayerSpec
from worker.spec.recurrent import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, RgLruSpec, ShortConvSpec
from worker.spec.recurrent_tensors import ConvTensors
from worker.spec.tensor_names import ENDINGS, LRU_GATES
from worker.spec.tensor_parts import TensorParts


class RecurrentParts(TensorParts):
    """Makes the tensors of token mixers with a recurrent state."""

    def _recurrence(self, layer: LayerSpec, index: int) -> MixerTensors:
        match layer.recurrent:
            case GatedDeltaSpec() as delta:
                return self._gated_delta(delta, index)
            case Mamba1Spec() as mamba:
                return self._mamba1(mamba, index)
            case Mamba2Spec() as mamba:
                return self._mamba2(mamba, index)
            case RgLruSpec() as lru:
                return self._rg_lru(lru, index)
            case ShortConvSpec() as conv:
                return self._short_conv(conv, index)
        raise AssertionError("the layer has no recurrence")

    def _gated_delta(self, delta: GatedDeltaSpec, index: int) -> MixerTensors:
        hidden, key, value = self.spec.hidden, delta.key_width, delta.value_width
        decay_up = gate_up = None
        if delta.decay_rank:
            made = {"delta_q": (key,), "delta_k": (key,), "delta_v": (value,)}
            ranks = {"delta_a": (delta.decay_rank,), "delta_z": (delta.gate_rank,)}
            inputs = self._parts(index, made | ranks, hidden)
            rows = self._part("delta_a_up", delta.num_value_heads * delta.decays, index)
            decay_up = FusedMatrix((rows,), delta.decay_rank)
            gate_up = FusedMatrix((self._part("delta_z_up", value, index),), delta.gate_rank)
        elif "delta_qkvz" in self.names:
            group = delta.num_value_heads // delta.num_key_heads
            widths = (delta.key_dim, delta.key_dim, *(group * delta.value_dim,) * 2)
            heads = delta.num_key_heads
            inputs = self._by_head(index, "delta_qkvz", heads, widths, columns=hidden)
        else:
            joint = {"delta_qkv": (2 * key + value,)}
            separate = {"delta_q": (key,), "delta_k": (key,), "delta_v": (value,)}
            made = separate if "delta_q" in self.names else joint
            inputs = self._parts(index, {**made, "delta_z": (value,)}, hidden)
        if delta.decay_rank:
            gates = self._parts(index, {"delta_b": (delta.num_value_heads,)}, hidden)
        elif "delta_ba" in self.names:
            heads, group = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
            gates = self._by_head(index, "delta_ba", heads, (group, group), columns=hidden)
        else:
            of_heads = (delta.num_value_heads,)
            gates = self._parts(index, {"delta_b": of_heads, "delta_a": of_heads}, hidden)
        return recurrent_tensors.GatedDeltaTensors(
            inputs=FusedMatrix(inputs, hidden),
            gates=FusedMatrix(gates, hidden),
            conv=self._conv("delta_conv", index, delta.kernel, {"q": key, "k": key, "v": value}),
            decay=VectorTensor(self._name("delta_decay", index), delta.num_value_heads),
            bias=VectorTensor(
                self._name("delta_bias", index), delta.num_value_heads * delta.decays
            ),
            norm=NormTensor(self.names.roles["delta_norm"].format(i=index), delta.value_dim),
            output=FusedMatrix((self._part("delta_output", hidden, index),), value),
            is_factor=self.names.stores_decay_factors,
            decay_up=decay_up,
            gate_up=gate_up,
        )

    def _conv(self, role: str, index: int, kernel: int, channels: Mapping[str, int]) -> ConvTensors:
        """Return the tensors of a convolution.

        channels   number of channels of each part, by the name of the part
        """
        template, (ending, _) = self.names.roles[role], self.names.endings.get(role, ENDINGS)
        total = sum(channels.values())
        if "{t}" in template:
            size = -(-total // len(channels))
            last = total - size * (len(channels) - 1)
            channels = {part: size for part in channels} | {[*channels][-1]: last}
        elif "{p}" not in template:
            channels = {"": total}
        parts = tuple(
            (template.format(i=index, p=part, t=part) + ending, count)
            for part, count in channels.items()
        )
        return ConvTensors(parts, kernel)

    def _mamba1(self, mamba: Mamba1Spec, index: int) -> MixerTensors:
        hidden, width, roles = self.spec.hidden, mamba.channels, self.names.roles
        of_made = ("mamba_step_norm", "mamba_b_norm", "mamba_c_norm")
        norms: list[NormTensor] = []
        if mamba.norms == "with weights":
            sizes = zip(of_made, mamba.made_widths, strict=True)
            norms = [NormTensor(roles[role].format(i=index), size) for role, size in sizes]

        def matrix(role: str, rows: int, columns: int, bias: bool = False) -> FusedMatrix:
            return FusedMatrix((self._part(role, rows, index),), columns, bias)

        def bias(role: str) -> VectorTensor:
            return VectorTensor(self._name(role, index, is_bias=True), width)

        return recurrent_tensors.Mamba1Tensors(
            inputs=matrix("mamba_inputs", 2 * width, hidden, mamba.bias),
            conv=self._conv("mamba_conv", index, mamba.kernel, {"": width}),
            conv_bias=bias("mamba_conv") if mamba.conv_bias else None,
            made=matrix("mamba_made", sum(mamba.made_widths), width),
            norms=tuple(norms),
            step=matrix("mamba_step", width, mamba.rank),
            bias=bias("mamba_step"),
            decay=self._name("mamba_decay", index),
            skip=VectorTensor(self._name("mamba_skip", index), width),
            output=matrix("mamba_output", hidden, width, mamba.bias),
            decay_shape=(width, mamba.state),
            is_factor=self.names.stores_decay_factors,
            plain_sizes=tuple(mamba.made_widths) if mamba.norms == "without weights" else (),
        )

    def _mamba2(self, mamba: Mamba2Spec, index: int) -> MixerTensors:
        hidden, heads = self.spec.hidden, mamba.num_heads
        inputs = (self._part("mamba_inputs", mamba.input_width, index),)
        conv_bias = self._name("mamba_conv", index, is_bias=True)
        return recurrent_tensors.Mamba2Tensors(
            inputs=FusedMatrix(inputs, hidden, mamba.bias),
            conv=self._conv("mamba_conv", index, mamba.kernel, {"": mamba.conv_width}),
            conv_bias=VectorTensor(conv_bias, mamba.conv_width) if mamba.conv_bias else None,
            decay=VectorTensor(self._name("mamba_decay", index), heads),
            bias=VectorTensor(self._name("mamba_bias", index), heads),
            skip=VectorTensor(self._name("mamba_skip", index), heads),
            norm=None
            if mamba.norm is None
            else NormTensor(self.names.roles["mamba_norm"].format(i=index), mamba.output_width),
            output=FusedMatrix(
                (self._part("mamba_output", hidden, index),), mamba.output_width, mamba.bias
            ),
            is_factor=self.names.stores_decay_factors,
            num_scales=0 if mamba.input_scales is None else mamba.input_width,
        )

    def _rg_lru(self, lru: RgLruSpec, index: int) -> MixerTensors:
        hidden, width, dim, heads = self.spec.hidden, lru.width, lru.head_dim, lru.num_heads

        def gates(head: int) -> FusedMatrix:
            parts = (self._part(role, dim, index, head, heads) for role in LRU_GATES)
            return FusedMatrix(tuple(parts), dim)

        inputs = self._parts(index, {"lru_x": (width,), "lru_gate": (width,)}, hidden)
        input_bias, decay_bias = (self._name(role, index, is_bias=True) for role in LRU_GATES)
        return recurrent_tensors.RgLruTensors(
            inputs=FusedMatrix(inputs, hidden, True),
            conv=self._conv("lru_conv", index, lru.kernel, {"": width}),
            conv_bias=VectorTensor(self._name("lru_conv", index, is_bias=True), width),
            gates=tuple(map(gates, range(heads))),
            gate_biases=(input_bias, decay_bias),
            decay=VectorTensor(self._name("lru_decay", index), width),
            output=FusedMatrix((self._part("lru_output", hidden, index),), width, True),
        )

    def _short_conv(self, conv: ShortConvSpec, index: int) -> MixerTensors:
        hidden, width = self.spec.hidden, conv.width
        inputs, output = (
            self._part("conv_in", 3 * width, index),
            self._part("conv_out", hidden, index),
        )
        bias = self.names.roles["conv"].format(i=index) + ENDINGS[1]
        return recurrent_tensors.ShortConvTensors(
            inputs=FusedMatrix((inputs,), hidden, conv.bias),
            conv=self._conv("conv", index, conv.kernel, {"": width}),
            bias=VectorTensor(bias, width) if conv.bias else None,
            output=FusedMatrix((output,), width, conv.bias),
        )
