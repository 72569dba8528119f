"""The tensors of one layer of a model, and those around all layers. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from worker.spec.latent_tensors import LatentAttentionTensors
from worker.spec.matrices import FusedMatrix, NormTensor, Shape, VectorTensor
from worker.spec.recurrent_tensors import (
    GatedDeltaTensors,
    Mamba1Tensors,
    Mamba2Tensors,
    RgLruTensors,
    ShortConvTensors,
)

NORMS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("post_attention_norm", "post_mlp_norm"),
    "both": ("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"),
    "parallel": ("attention_norm", "mlp_norm"),
    "parallel_one_norm": ("attention_norm",),
}
"""LayerSpec.order -> the norms of a layer with two blocks."""
OF_MLP = frozenset({"mlp_norm", "post_mlp_norm"})
"""The norms of the MLP. The others are those of the token mixer."""


@dataclass(frozen=True, slots=True)
class MlpTensors:
    """The tensors of an MLP, or of one expert. `gate_up` stacks the rows of the gate projection and
    of the up projection, in this order. Without a gate, it has only those of the up projection."""

    gate_up: FusedMatrix
    down: FusedMatrix


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """The tensors of a layer's attention. What it does not have is None.

    qkv   stacks the rows of the queries, of their gates if there are any, of the keys and of the
          values. It has no rows of values that are the keys, and none of keys and values that an
          earlier layer makes
    v_norm_size
          size of the norm of the values, whose weight is not in the files; 0: there is no norm
    plain_norm_size
          the same of queries and keys
    """

    qkv: FusedMatrix
    q_norm: NormTensor | None
    k_norm: NormTensor | None
    sinks: VectorTensor | None
    output: FusedMatrix
    v_norm_size: int = 0
    plain_norm_size: int = 0

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.qkv, self.output

    @property
    def norms(self) -> tuple[NormTensor, ...]:
        return tuple(norm for norm in (self.q_norm, self.k_norm) if norm)

    @property
    def float_items(self) -> int:
        sinks = 0 if self.sinks is None else self.sinks.size
        return self.v_norm_size + self.plain_norm_size + sinks

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return ()

    def others(self) -> Iterator[tuple[str, Shape]]:
        if self.sinks is not None:
            yield self.sinks.name, (self.sinks.whole,)


WithNorms = AttentionTensors | LatentAttentionTensors
"""The mixers whose norms have the model's offset."""
MixerTensors = (
    WithNorms | GatedDeltaTensors | Mamba1Tensors | Mamba2Tensors | RgLruTensors | ShortConvTensors
)
"""The tensors of a token mixer.

matrices      those that can be packed: the input's and the output's
dense         those that stay dense
float_items   numbers that are loaded as float32
others()      name and shape of each tensor in the file that is part of no matrix and of no norm of
              the model
"""


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """The tensors of a shared expert, and of the score that its result is multiplied by. None: it
    is not."""

    mlp: MlpTensors
    gate: FusedMatrix | None


@dataclass(frozen=True, slots=True)
class LatentTensors:
    """The linears around experts that read and return fewer numbers than the hidden states have
    (`MlpSpec.latent`).

    inputs    [latent, hidden]
    outputs   [hidden, latent]
    """

    inputs: FusedMatrix
    outputs: FusedMatrix


@dataclass(frozen=True, slots=True)
class BesideTensors:
    """The tensors of the experts beside an MLP (`LayerSpec.beside`).

    mlp_norm      norm of the MLP's result
    norm          norm of the experts' input
    router_norm   [hidden] the weight of the norm of the router's input
    factors       [experts] what the weights of chosen experts are multiplied by
    result_norm   norm of the experts' result
    """

    mlp_norm: NormTensor
    norm: NormTensor
    router: FusedMatrix
    router_norm: VectorTensor
    factors: VectorTensor
    experts: tuple[MlpTensors, ...]
    result_norm: NormTensor


@dataclass(frozen=True, slots=True)
class LayerInputTensors:
    """The tensors with which a layer reads its per-layer inputs (`LayerInputsSpec`).

    gate      [width, hidden]
    project   [hidden, width]
    """

    gate: FusedMatrix
    project: FusedMatrix
    norm: NormTensor


@dataclass(frozen=True, slots=True)
class LaurelTensors:
    """The tensors of a linear branch beside the attention (`LayerSpec.laurel`).

    inputs    [rank, hidden]
    outputs   [hidden, rank]
    norm      of the result
    """

    inputs: FusedMatrix
    outputs: FusedMatrix
    norm: NormTensor


@dataclass(frozen=True, slots=True)
class AltUpTensors:
    """The tensors with which a layer predicts and corrects N streams (`AltUpSpec`).

    router        [N, hidden]
    router_norm   [hidden] the weight of the norm of the router's input
    predictions   [N * N, N] makes the coefficients of a prediction
    corrections   [N, N] makes those of a correction
    scale         [hidden] what the active stream is multiplied by; None: it is not
    """

    router: FusedMatrix
    router_norm: VectorTensor
    predictions: FusedMatrix
    corrections: FusedMatrix
    scale: VectorTensor | None

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return self.router, self.predictions, self.corrections

    @property
    def vectors(self) -> tuple[VectorTensor, ...]:
        return tuple(each for each in (self.router_norm, self.scale) if each is not None)


@dataclass(frozen=True, slots=True)
class StreamTensors:
    """The tensors around all layers of a model with N streams (`AltUpSpec`).

    spread   [(N - 1) * hidden, hidden] makes all streams but the first
    merge    [hidden, hidden] of each stream but the first
    """

    spread: FusedMatrix
    merge: tuple[FusedMatrix, ...]

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.spread, *self.merge


@dataclass(frozen=True, slots=True)
class InputTableTensors:
    """The tensors that make the per-layer inputs of all layers.

    table     [table_rows, layers * width]
    project   [layers * width, hidden]
    norm      over the `width` numbers of a layer
    """

    table: FusedMatrix
    project: FusedMatrix
    norm: NormTensor

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        for part in (self.table, self.project, self.norm):
            yield from part.tensors()


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of a layer. What the layer does not have is None.

    mixer         its token mixer
    choice_bias   [experts], added to the weights of the experts for the choice only
    mlps          the MLP, or the experts
    shared        the shared expert
    beside        the experts beside the MLP
    inputs        what reads its per-layer inputs
    factor        [1] what the hidden states are multiplied by at the end
    latent        the linears around the experts
    recurrence    the recurrence beside the attention
    laurel        the linear branch beside the attention
    altup         what predicts and corrects the streams
    xielu         [1] each: the numbers of the MLP's xIELU
    """

    attention_norm: NormTensor | None
    mixer: MixerTensors | None
    post_attention_norm: NormTensor | None
    mlp_norm: NormTensor | None
    router: FusedMatrix | None
    choice_bias: VectorTensor | None
    mlps: tuple[MlpTensors, ...]
    shared: SharedTensors | None
    post_mlp_norm: NormTensor | None
    beside: BesideTensors | None = None
    inputs: LayerInputTensors | None = None
    factor: VectorTensor | None = None
    latent: LatentTensors | None = None
    recurrence: MixerTensors | None = None
    laurel: LaurelTensors | None = None
    altup: AltUpTensors | None = None
    xielu: tuple[VectorTensor, ...] = ()

    @property
    def mixers(self) -> tuple[MixerTensors, ...]:
        return tuple(mixer for mixer in (self.mixer, self.recurrence) if mixer is not None)

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        """Return all matrices except those that stay dense."""
        mlps = [*self.mlps, *([self.shared.mlp] if self.shared else [])]
        mlps += self.beside.experts if self.beside else ()
        inner = (matrix for mlp in mlps for matrix in (mlp.gate_up, mlp.down))
        latent = (self.latent.inputs, self.latent.outputs) if self.latent else ()
        inputs = (self.inputs.gate, self.inputs.project) if self.inputs else ()
        laurel = (self.laurel.inputs, self.laurel.outputs) if self.laurel else ()
        mixed = (matrix for mixer in self.mixers for matrix in mixer.matrices)
        return *mixed, *inner, *latent, *inputs, *laurel

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        """Return the matrices that stay dense: some of the mixer's, those of the routers, that of
        the shared expert's score, and those of AltUp."""
        routers = (self.router, self.beside.router if self.beside else None)
        mixed = (matrix for mixer in self.mixers for matrix in mixer.dense)
        altup = self.altup.dense if self.altup else ()
        found = (*mixed, *routers, self.shared.gate if self.shared else None, *altup)
        return tuple(matrix for matrix in found if matrix is not None)

    @property
    def norms(self) -> tuple[NormTensor, ...]:
        """Return the norms whose weights have the model's offset."""
        inner = self.mixer.norms if isinstance(self.mixer, WithNorms) else ()
        blocks = [self.post_attention_norm, self.mlp_norm, self.post_mlp_norm]
        if self.beside is not None:
            blocks += [self.beside.mlp_norm, self.beside.norm, self.beside.result_norm]
        if self.inputs is not None:
            blocks.append(self.inputs.norm)
        if self.laurel is not None:
            blocks.append(self.laurel.norm)
        return tuple(norm for norm in (self.attention_norm, *inner, *blocks) if norm)

    @property
    def vectors(self) -> tuple[VectorTensor, ...]:
        """Return the vectors outside the mixer, which are loaded as float32."""
        beside = (self.beside.router_norm, self.beside.factors) if self.beside else ()
        altup = self.altup.vectors if self.altup else ()
        found = (self.choice_bias, *beside, self.factor, *altup, *self.xielu)
        return tuple(vector for vector in found if vector is not None)

    @property
    def float_items(self) -> int:
        """Return how many numbers are kept as float32 whatever the dtype is, without norms."""
        numbers = (self.factor, *self.xielu)
        kept = (vector.size for vector in self.vectors if vector not in numbers)
        return sum(mixer.float_items for mixer in self.mixers) + sum(kept)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield the name and shape of each tensor in the file. A tensor that holds all experts is
        yielded once for each of them."""
        for norm in self.norms:
            yield from norm.tensors()
        for mixer in self.mixers:
            yield from mixer.others()
        for vector in self.vectors:
            yield vector.name, (vector.size,)
        for matrix in (*self.matrices, *self.dense):
            yield from matrix.tensors()
