"""Calls the compiled kernels of recurrent layers. Legend in base.py.

Every function checks what the C++ code assumes, as those of native.py do.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from worker.kernels import structs
from worker.kernels.addresses import address
from worker.kernels.recurrent_structs import (
    delta_sizes_struct,
    delta_weights_struct,
    lru_inputs_struct,
    lru_weights_struct,
    mamba2_sizes_struct,
    mamba2_weights_struct,
    scan_inputs_struct,
    scan_weights_struct,
    states_struct,
)
from worker.layers.delta_rule import DeltaWeights
from worker.layers.mamba1_rule import Mamba1Weights, ScanInputs
from worker.layers.mamba2_rule import Mamba2Weights
from worker.layers.rg_lru_rule import LruInputs, LruWeights
from worker.slots.states import StepStates
from worker.spec.recurrent import (
    ConvolvedSpec,
    GatedDeltaSpec,
    Mamba1Spec,
    Mamba2Spec,
    RgLruSpec,
    ShortConvSpec,
)


class NativeRecurrence:
    """The operations of recurrent layers (`Kernels`, base.py) of one compiled library."""

    library: ctypes.CDLL

    def gated_delta(
        self,
        spec: GatedDeltaSpec,
        weights: DeltaWeights,
        inputs: Tensor,
        gates: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        tokens, heads = len(inputs), spec.num_value_heads
        assert inputs.shape == (tokens, spec.conv_width + spec.value_width)
        assert inputs.stride(1) == 1
        gates = gates.contiguous()
        assert gates.shape == (tokens, heads + heads * spec.decays)
        assert inputs.dtype == gates.dtype == torch.float32
        out = inputs.new_empty(tokens, spec.value_width)
        bad_row = self.library.gated_delta(
            torch.get_num_threads(),
            byref(delta_sizes_struct(spec)),
            byref(delta_weights_struct(spec, weights)),
            byref(states_struct(states, offset, spec.state_items)),
            tokens,
            inputs.data_ptr(),
            inputs.stride(0),
            *map(address, (gates, out)),
        )
        check_rows(bad_row)
        return out

    def mamba1_conv(
        self,
        spec: Mamba1Spec,
        weights: Mamba1Weights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        taps = weights.conv, weights.conv_bias
        return _convolved(self.library.mamba1_conv, spec, taps, inputs, states, offset)

    def mamba1_scan(
        self,
        spec: Mamba1Spec,
        weights: Mamba1Weights,
        inputs: ScanInputs,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        out = torch.empty_like(inputs.x)
        bad_row = self.library.mamba1_scan(
            torch.get_num_threads(),
            spec.channels,
            spec.state,
            byref(states_struct(states, offset + spec.tail_items, spec.matrix_items)),
            len(out),
            byref(scan_weights_struct(spec, weights)),
            byref(scan_inputs_struct(spec, inputs)),
            address(out),
        )
        check_rows(bad_row)
        return out

    def mamba2(
        self,
        spec: Mamba2Spec,
        weights: Mamba2Weights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        tokens = len(inputs)
        assert inputs.shape == (tokens, spec.input_width)
        assert inputs.stride(1) == 1
        assert inputs.dtype == torch.float32
        out = inputs.new_empty(tokens, spec.output_width)
        bad_row = self.library.mamba2(
            torch.get_num_threads(),
            byref(mamba2_sizes_struct(spec)),
            byref(mamba2_weights_struct(spec, weights)),
            byref(states_struct(states, offset, spec.state_items)),
            tokens,
            inputs.data_ptr(),
            inputs.stride(0),
            address(out),
        )
        check_rows(bad_row)
        return out

    def rg_lru_conv(
        self,
        spec: RgLruSpec,
        weights: LruWeights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        taps = weights.conv, weights.conv_bias
        return _convolved(self.library.rg_lru_conv, spec, taps, inputs, states, offset)

    def rg_lru_scan(
        self,
        spec: RgLruSpec,
        weights: LruWeights,
        inputs: LruInputs,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        out = torch.empty_like(inputs.x)
        bad_row = self.library.rg_lru_scan(
            torch.get_num_threads(),
            spec.num_heads,
            spec.head_dim,
            structs.ACTIVATION_KINDS.index(spec.activation),
            byref(states_struct(states, offset + spec.tail_items, spec.width)),
            len(out),
            byref(lru_weights_struct(spec, weights)),
            byref(lru_inputs_struct(spec, inputs)),
            address(out),
        )
        check_rows(bad_row)
        return out

    def short_conv(
        self,
        spec: ShortConvSpec,
        conv: Tensor,
        bias: Tensor | None,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        tokens, width = len(inputs), spec.width
        assert conv.shape == (spec.kernel, width)
        assert bias is None or (bias.shape == (width,) and bias.dtype == torch.float32)
        assert inputs.shape == (tokens, 3 * width)
        assert inputs.stride(1) == 1
        assert conv.dtype == inputs.dtype == torch.float32
        out = inputs.new_empty(tokens, width)
        bad_row = self.library.short_conv(
            torch.get_num_threads(),
            spec.kernel,
            width,
            byref(states_struct(states, offset, spec.state_items)),
            tokens,
            *map(address, (conv, bias)),
            inputs.data_ptr(),
            inputs.stride(0),
            address(out),
        )
        check_rows(bad_row)
        return out


def _convolved(
    function: Any,
    spec: ConvolvedSpec,
    taps: tuple[Tensor, Tensor | None],
    inputs: Tensor,
    states: StepStates,
    offset: int,
) -> Tensor:
    """Call a function of the library that computes the convolution of inputs [T, C]. Return its
    results [T, C].

    taps   [kernel, C] the weights, and [C] the bias
    """
    (conv, bias), (tokens, width) = taps, (len(inputs), spec.conv_width)
    assert conv.shape == (spec.kernel, width)
    assert bias is None or (bias.shape == (width,) and bias.dtype == torch.float32)
    assert inputs.shape == (tokens, width)
    assert inputs.stride(1) == 1
    assert conv.dtype == inputs.dtype == torch.float32
    out = inputs.new_empty(tokens, width)
    bad_row = function(
        torch.get_num_threads(),
        spec.kernel,
        width,
        byref(states_struct(states, offset, spec.tail_items)),
        tokens,
        *map(address, taps),
        inputs.data_ptr(),
        inputs.stride(0),
        address(out),
    )
    check_rows(bad_row)
    return out


def check_rows(bad_row: int) -> None:
    """Raise ValueError if a kernel has refused the states of a step because of row `bad_row`; -1
    means that it has not."""
    if bad_row >= 0:
        raise ValueError(f"row {bad_row} has tokens or a state that the step does not have")
