"""The structs that describe recurrent layers and their states to the compiled kernels.

Every function checks what the C++ code assumes. A struct points at the tensors and arrays that it
is made of, so it must not outlive them.
"""

from __future__ import annotations

import numpy as np
import torch

from worker.kernels import structs
from worker.kernels.addresses import address
from worker.layers.delta_rule import UNIT_EPS, DeltaWeights
from worker.layers.mamba1_rule import Mamba1Weights, ScanInputs
from worker.layers.mamba2_rule import Mamba2Weights
from worker.layers.rg_lru_rule import LruInputs, LruWeights
from worker.slots.states import StepStates
from worker.spec.recurrent import GatedDeltaSpec, Mamba1Spec, Mamba2Spec, NormPlace, RgLruSpec

NORM_PLACES: tuple[NormPlace, ...] = (None, "after gate", "before gate")
"""In the order of NormPlace in mamba2.h."""


def delta_sizes_struct(spec: GatedDeltaSpec) -> structs.CDeltaSizes:
    return structs.CDeltaSizes(
        spec.num_key_heads,
        spec.num_value_heads,
        spec.key_dim,
        spec.value_dim,
        spec.kernel,
        spec.tiled,
        UNIT_EPS,
        spec.eps,
        spec.beta_scale,
        spec.decays,
        spec.gate == "sigmoid",
    )


def delta_weights_struct(spec: GatedDeltaSpec, weights: DeltaWeights) -> structs.CDeltaWeights:
    """Return the struct that describes `weights` to the kernels. It points at them, so it must not
    outlive them."""
    assert weights.conv.shape == (spec.kernel, spec.conv_width)
    assert weights.decay.shape == (spec.num_value_heads,)
    assert weights.bias.shape == (spec.num_value_heads * spec.decays,)
    assert weights.norm.shape == (spec.value_dim,)
    assert {each.dtype for each in weights.tensors()} == {torch.float32}
    return structs.CDeltaWeights(*map(address, weights.tensors()))


def scan_weights_struct(spec: Mamba1Spec, weights: Mamba1Weights) -> structs.CScanWeights:
    """Return the struct that describes the weights of a recurrence to the kernels."""
    assert weights.decay.shape == (spec.channels, spec.state)
    assert weights.bias.shape == weights.skip.shape == (spec.channels,)
    found = (weights.decay, weights.bias, weights.skip)
    assert {each.dtype for each in found} == {torch.float32}
    return structs.CScanWeights(*map(address, found))


def scan_inputs_struct(spec: Mamba1Spec, inputs: ScanInputs) -> structs.CScanInputs:
    tokens, gate = len(inputs.x), inputs.gate
    assert inputs.x.shape == inputs.step.shape == gate.shape == (tokens, spec.channels)
    assert inputs.b.shape == inputs.c.shape == (tokens, spec.state)
    assert gate.stride(1) == 1
    found = (inputs.x, inputs.step, inputs.b, inputs.c)
    assert {each.dtype for each in (*found, gate)} == {torch.float32}
    return structs.CScanInputs(*map(address, found), gate.data_ptr(), gate.stride(0))


def lru_weights_struct(spec: RgLruSpec, weights: LruWeights) -> structs.CLruWeights:
    """Return the struct that describes the weights of a recurrence to the kernels."""
    found = (weights.decay, weights.input_bias, weights.decay_bias)
    assert {each.shape for each in found} == {(spec.width,)}
    assert {each.dtype for each in found} == {torch.float32}
    return structs.CLruWeights(*map(address, found))


def lru_inputs_struct(spec: RgLruSpec, inputs: LruInputs) -> structs.CLruInputs:
    tokens, gate = len(inputs.x), inputs.gate
    assert inputs.x.shape == gate.shape == (tokens, spec.width)
    assert inputs.gates.shape == (spec.num_heads, tokens, 2 * spec.head_dim)
    assert gate.stride(1) == 1
    assert {each.dtype for each in (inputs.x, inputs.gates, gate)} == {torch.float32}
    return structs.CLruInputs(
        *map(address, (inputs.x, inputs.gates)), gate.data_ptr(), gate.stride(0)
    )


def mamba2_sizes_struct(spec: Mamba2Spec) -> structs.CMamba2Sizes:
    return structs.CMamba2Sizes(
        spec.num_heads,
        spec.head_dim,
        spec.num_groups,
        spec.state,
        spec.kernel,
        NORM_PLACES.index(spec.norm),
        spec.eps,
        *spec.limits,
    )


def mamba2_weights_struct(spec: Mamba2Spec, weights: Mamba2Weights) -> structs.CMamba2Weights:
    """Return the struct that describes `weights` to the kernels. It points at them, so it must not
    outlive them."""
    heads, width = spec.num_heads, spec.conv_width
    assert weights.conv.shape == (spec.kernel, width)
    assert weights.conv_bias is None or weights.conv_bias.shape == (width,)
    assert weights.decay.shape == weights.bias.shape == weights.skip.shape == (heads,)
    assert weights.norm is None or weights.norm.shape == (spec.output_width,)
    assert (weights.norm is None) == (spec.norm is None)
    assert {each.dtype for each in weights.tensors()} == {torch.float32}
    return structs.CMamba2Weights(
        *map(
            address,
            (
                weights.conv,
                weights.conv_bias,
                weights.decay,
                weights.bias,
                weights.skip,
                weights.norm,
            ),
        )
    )


def states_struct(states: StepStates, offset: int, items: int) -> structs.CStates:
    """Return the struct that describes `states` to the kernels. It points at tensors and arrays of
    `states`, so it must not outlive them.

    offset, items   the part of each state that belongs to the layer
    """
    stored = (states.memory, states.checkpoints)
    for each in stored:
        assert each.dtype == torch.float32
        assert each.stride(1) == 1
        assert 0 <= offset <= each.shape[1] - items
    rows = (states.slots, states.starts, states.firsts, states.counts, states.kept)
    saves = (states.save_rows, states.save_counts, states.save_ids)
    for arrays in (rows, saves):
        for array in arrays:
            assert array.dtype == np.int64
            assert array.flags.c_contiguous
            assert array.shape == (len(arrays[0]),)
    return structs.CStates(
        *(each.data_ptr() + offset * each.element_size() for each in stored),
        *(each.stride(0) for each in stored),
        *(len(each) for each in stored),
        *(array.ctypes.data for array in (*rows, *saves)),
        len(states.slots),
        len(states.save_rows),
    )
