"""The interface of the operations between the linear layers of a forward pass.

`reference.py` implements it with torch, and is its definition. `native.py` implements it with
compiled kernels for CPUs, and `gpu.py` with Triton kernels.

Legend: T tokens in the step, H query heads, H_kv key/value heads, D head dim, I intermediate.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

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


class Kernels(Protocol):
    """The operations between the linear layers of a forward pass. They hold no state.

    Sums are computed in float32 or better, and results are rounded to the tensors' dtype.
    """

    #: Name in logs and options.
    name: str

    def cos_sin(
        self, positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, factor: float
    ) -> CosSin:
        """Return the cos and sin of a step's rotary angles, as `rotation` of layers/rope.py does.

        positions   [T] int64
        inv_freq    [width / 2] float32
        dtype       dtype of the result
        """
        ...

    def add_norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: Norm | None,
        *,
        post_norm: Norm | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Add the result of a block, `delta`, to x in place: after `post_norm`, and times `scale`.
        Return the norm of x; x itself if `norm` is None.

        x, delta, returns   [T, hidden]; delta may be overwritten, and None adds nothing
        """
        ...

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
        """Normalise and rotate queries and keys, write keys and values to the cache, and return the
        queries.

        qkv            [T, (H + 2 H_kv) * D]; may be overwritten
        cos_sin        [T, 1, width] each: the first `width` items of a head are rotated. None:
                       queries and keys are not rotated
        layer          index of the layer in `cache`, which gets the keys and values
        slot_mapping   [T] int64, see AttentionBatch. A negative entry is padding, which only steps
                       on a GPU have: nothing is written for it
        q_norm         norm over each head (weight [D]) or over all heads together ([H * D]); None:
                       no norm. k_norm likewise
        returns        [T, H, D]; may be a slice of qkv
        """
        ...

    def activate(self, inner: Tensor, mlp: MlpSpec) -> Tensor:
        """Return the activation [T, I] of an MLP.

        inner   [T, 2 I], the columns of the gate and then those of up; [T, I] if `mlp` has no gate.
                May be overwritten
        """
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return the sigmoid of each number of x [T, N], in x's dtype."""
        ...

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        """Make each number of logits [S, V] float32 `cap * tanh(x / cap)`, and return them."""
        ...

    def gated_delta(
        self,
        spec: GatedDeltaSpec,
        weights: DeltaWeights,
        inputs: Tensor,
        gates: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        """Compute what a gated delta net does between its linears (layers/delta_rule.py): the
        convolution, the recurrence, the norm and the gate. Return the results, change the states,
        and save those that the step saves. All numbers are float32.

        inputs    [T, C + value heads * value dim] queries, keys and values before the convolution,
                  then the gates of the results
        gates     [T, value heads * (1 + decays)] what beta is made of, then what the decays are
                  made of
        offset    index of the layer's first number in a state
        returns   [T, value heads * value dim]. If a token belongs to no row of `states`, its
                  result has any value
        """
        ...

    def mamba1_conv(
        self,
        spec: Mamba1Spec,
        weights: Mamba1Weights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        """Compute the convolution of a Mamba-1 layer and its SiLU (layers/mamba1_rule.py): return
        the results, change the tails in the states, and save those that the step saves. All numbers
        are float32.

        inputs    [T, C]
        offset    index of the layer's first number in a state
        returns   [T, C]. If a token belongs to no row of `states`, its result has any value
        """
        ...

    def mamba1_scan(
        self,
        spec: Mamba1Spec,
        weights: Mamba1Weights,
        inputs: ScanInputs,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        """Compute the recurrence of a Mamba-1 layer, and multiply its results by the SiLU of the
        gate (layers/mamba1_rule.py). Return them, change the matrices in the states, and save those
        that the step saves. All numbers are float32.

        offset    index of the layer's first number in a state, which is one of its tail
        returns   [T, C]. If a token belongs to no row of `states`, its result has any value
        """
        ...

    def mamba2(
        self,
        spec: Mamba2Spec,
        weights: Mamba2Weights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        """Compute what a Mamba-2 layer does between its linears (layers/mamba2_rule.py): the
        convolution, the recurrence, the gate and the norm. Return the results, change the states,
        and save those that the step saves. All numbers are float32.

        inputs    [T, heads * head dim + C + heads] the gate, then x, B and C before the
                  convolution, then dt
        offset    index of the layer's first number in a state
        returns   [T, heads * head dim]. If a token belongs to no row of `states`, its result has
                  any value
        """
        ...

    def rg_lru_conv(
        self,
        spec: RgLruSpec,
        weights: LruWeights,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        """Compute the convolution of an RG-LRU layer (layers/rg_lru_rule.py): return the results,
        change the tails in the states, and save those that the step saves. All numbers are float32.

        inputs    [T, C]
        offset    index of the layer's first number in a state
        returns   [T, C]. If a token belongs to no row of `states`, its result has any value
        """
        ...

    def rg_lru_scan(
        self,
        spec: RgLruSpec,
        weights: LruWeights,
        inputs: LruInputs,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        """Compute the recurrence of an RG-LRU layer, and multiply its results by the activation of
        their gate (layers/rg_lru_rule.py). Return them, change the numbers of the recurrence in the
        states, and save those that the step saves. All numbers are float32.

        offset    index of the layer's first number in a state, which is one of its tail
        returns   [T, C]. If a token belongs to no row of `states`, its result has any value
        """
        ...

    def short_conv(
        self,
        spec: ShortConvSpec,
        conv: Tensor,
        bias: Tensor | None,
        inputs: Tensor,
        states: StepStates,
        offset: int,
    ) -> Tensor:
        """Compute a short convolution and its gates (layers/short_conv_rule.py): return the
        results, change the states, and save those that the step saves. All numbers are float32.

        conv      [kernel, C], oldest token first
        bias      [C] is added to the convolution; None: nothing is
        inputs    [T, 3 C] the gate before the convolution, the gate after it, and x
        offset    index of the layer's first number in a state
        returns   [T, C]. If a token belongs to no row of `states`, its result has any value
        """
        ...

    def index_scores(
        self,
        queries: Tensor,
        weights: Tensor,
        index_keys: Tensor,
        block_table: Tensor,
        rows: Tensor,
        visible: Tensor,
    ) -> Tensor:
        """Return the scores [n, N] float32 that an indexer gives the tokens that n tokens of a step
        see: for each index key, the sum over the heads of weight * relu(query . key)
        (`IndexerSpec`). N is at least the largest number of visible tokens; the scores of others
        are -inf.

        queries       [n, H, D]
        weights       [n, H] float32
        index_keys    [B, block_tokens, 1, W] the layer's index keys in the cache
        block_table   [R, M], see AttentionBatch
        rows          [n] int64, on the CPU, ascending: the row of each token
        visible       [n] int64, on the CPU: how many tokens it sees
        """
        ...
