"""The tensors of one layer of a model, and the matrices that they form. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from worker.spec.share import MatrixCut, VectorCut
from worker.spec.tensor_names import ENDINGS, Endings, RowOrder

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One tensor of a matrix that consists of several tensors, stacked by rows.

    rows    number of rows that are read
    index   index of the expert, if the tensor holds several
    of      number of experts that the tensor holds
    cut     the part of the tensor that is read; None: all of it
    """

    name: str
    rows: int
    order: RowOrder | None = None
    is_transposed: bool = False
    index: int | None = None
    of: int = 1
    endings: Endings = ENDINGS
    cut: MatrixCut | None = None

    @property
    def weight(self) -> str:
        """Return the name of the weight."""
        return self.name + self.endings[0]

    @property
    def bias(self) -> str:
        """Return the name of the bias."""
        return self.name + self.endings[1]

    def shape(self, columns: int) -> Shape:
        """Return the shape of the weight in the file. `columns` is the number of columns that are
        read."""
        rows, columns = (self.rows, columns) if self.cut is None else self.cut.whole
        return self._stacked((columns, rows) if self.is_transposed else (rows, columns))

    @property
    def bias_shape(self) -> Shape:
        """Return the shape of the bias in the file."""
        return self._stacked((self.rows if self.cut is None else self.cut.whole[0],))

    def _stacked(self, shape: Shape) -> Shape:
        return shape if self.index is None else (self.of, *shape)


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """Matrices with the same input, which are computed as one matrix."""

    parts: tuple[MatrixPart, ...]
    columns: int
    has_bias: bool = False

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def names(self) -> list[str]:
        """Return the names of the weights."""
        return [part.weight for part in self.parts]

    @property
    def runs(self) -> list[tuple[MatrixPart, ...]]:
        """Return the parts, those of one tensor that follow each other together."""
        runs = groupby(self.parts, key=lambda part: (part.name, part.index))
        return [tuple(parts) for _, parts in runs]

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each weight and bias in the file."""
        for part in self.parts:
            yield part.weight, part.shape(self.columns)
            if self.has_bias:
                yield part.bias, part.bias_shape


@dataclass(frozen=True, slots=True)
class NormTensor:
    """A norm's weight [size], and its bias if it has one.

    cut      the items that are read; None: all. A norm with a bias is never cut
    ending   end of the name of the weight
    """

    name: str
    size: int
    has_bias: bool = False
    cut: VectorCut | None = None
    ending: str = ENDINGS[0]

    @property
    def weight(self) -> str:
        """Return the name of the weight."""
        return self.name + self.ending

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        yield self.weight, (self.size if self.cut is None else self.cut.whole,)
        if self.has_bias:
            yield f"{self.name}.bias", (self.size,)


@dataclass(frozen=True, slots=True)
class VectorTensor:
    """A vector [size]. `name` is its whole name, to which no ending is added.

    cut   the items that are read; None: all
    """

    name: str
    size: int
    cut: VectorCut | None = None

    @property
    def whole(self) -> int:
        """Return the number of items in the file."""
        return self.size if self.cut is None else self.cut.whole


@dataclass(frozen=True, slots=True)
class ConvTensors:
    """The weights of a convolution over the last `kernel` tokens: one tensor [channels, 1, kernel],
    or several, of consecutive channels.

    parts   name and number of channels of each tensor
    """

    parts: tuple[tuple[str, int], ...]
    kernel: int

    @property
    def items(self) -> int:
        return self.kernel * sum(channels for _, channels in self.parts)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        for name, channels in self.parts:
            yield name, (channels, 1, self.kernel)


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
    """

    qkv: FusedMatrix
    q_norm: NormTensor | None
    k_norm: NormTensor | None
    sinks: VectorTensor | None
    output: FusedMatrix
    v_norm_size: int = 0

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.qkv, self.output

    @property
    def norms(self) -> tuple[NormTensor, ...]:
        return tuple(norm for norm in (self.q_norm, self.k_norm) if norm)

    @property
    def float_items(self) -> int:
        return self.v_norm_size + (0 if self.sinks is None else self.sinks.size)

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return ()

    def others(self) -> Iterator[tuple[str, Shape]]:
        if self.sinks is not None:
            yield self.sinks.name, (self.sinks.whole,)


@dataclass(frozen=True, slots=True)
class GatedDeltaTensors:
    """The tensors of a gated delta net (spec/recurrent.py).

    inputs   stacks the rows of the queries, keys, values and output gates
    gates    stacks the rows of beta and of the decay, one for each value head; it stays dense
    conv     of all queries, keys and values
    decay    the factor of the decay if `is_factor`, or else the logarithm of its amount
    bias     is added to the projected decay
    norm     over the output of each head. Its weight has no offset
    """

    inputs: FusedMatrix
    gates: FusedMatrix
    conv: ConvTensors
    decay: VectorTensor
    bias: VectorTensor
    norm: NormTensor
    output: FusedMatrix
    is_factor: bool

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        """Return the matrices that can be packed."""
        return self.inputs, self.output

    @property
    def float_items(self) -> int:
        vectors = self.decay.size + self.bias.size + self.norm.size
        return self.conv.items + vectors

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return (self.gates,)

    def others(self) -> Iterator[tuple[str, Shape]]:
        yield from self.conv.tensors()
        yield self.decay.name, (self.decay.size,)
        yield self.bias.name, (self.bias.size,)
        yield from self.norm.tensors()


@dataclass(frozen=True, slots=True)
class Mamba2Tensors:
    """The tensors of a Mamba-2 layer (spec/recurrent.py).

    inputs      rows of the gate, of x, B and C, and of dt
    conv        of x, B and C; `conv_bias` [conv_width], None: there is none
    decay       the factor of the decay if `is_factor`, or else the logarithm of its amount
    bias        is added to the projected dt
    skip        the factor of x in the result
    norm        over the result; None: it is not normed. Its weight has no offset
    num_scales  number of the factors of the projected inputs, which are not in the files
    """

    inputs: FusedMatrix
    conv: ConvTensors
    conv_bias: VectorTensor | None
    decay: VectorTensor
    bias: VectorTensor
    skip: VectorTensor
    norm: NormTensor | None
    output: FusedMatrix
    is_factor: bool
    num_scales: int = 0

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.inputs, self.output

    @property
    def vectors(self) -> tuple[VectorTensor, ...]:
        found = (self.conv_bias, self.decay, self.bias, self.skip)
        return tuple(vector for vector in found if vector is not None)

    @property
    def float_items(self) -> int:
        vectors = sum(vector.size for vector in self.vectors) + self.num_scales
        vectors += 0 if self.norm is None else self.norm.size
        return self.conv.items + vectors

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return ()

    def others(self) -> Iterator[tuple[str, Shape]]:
        yield from self.conv.tensors()
        for vector in self.vectors:
            yield vector.name, (vector.size,)
        if self.norm is not None:
            yield from self.norm.tensors()


@dataclass(frozen=True, slots=True)
class ShortConvTensors:
    """The tensors of a short convolution (spec/recurrent.py).

    inputs   stacks the rows of both gates and of the input: B, C and x
    bias     [width], of the convolution; None: it has none
    """

    inputs: FusedMatrix
    conv: ConvTensors
    bias: VectorTensor | None
    output: FusedMatrix

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.inputs, self.output

    @property
    def float_items(self) -> int:
        return self.conv.items + (0 if self.bias is None else self.bias.size)

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return ()

    def others(self) -> Iterator[tuple[str, Shape]]:
        yield from self.conv.tensors()
        if self.bias is not None:
            yield self.bias.name, (self.bias.size,)


MixerTensors = AttentionTensors | GatedDeltaTensors | Mamba2Tensors | ShortConvTensors
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
        mixed = (matrix for mixer in self.mixers for matrix in mixer.matrices)
        return *mixed, *inner, *latent, *inputs

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        """Return the matrices that stay dense: some of the mixer's, those of the routers, and that
        of the shared expert's score."""
        routers = (self.router, self.beside.router if self.beside else None)
        mixed = (matrix for mixer in self.mixers for matrix in mixer.dense)
        found = (*mixed, *routers, self.shared.gate if self.shared else None)
        return tuple(matrix for matrix in found if matrix is not None)

    @property
    def norms(self) -> tuple[NormTensor, ...]:
        """Return the norms whose weights have the model's offset."""
        inner = self.mixer.norms if isinstance(self.mixer, AttentionTensors) else ()
        blocks = [self.post_attention_norm, self.mlp_norm, self.post_mlp_norm]
        if self.beside is not None:
            blocks += [self.beside.mlp_norm, self.beside.norm, self.beside.result_norm]
        if self.inputs is not None:
            blocks.append(self.inputs.norm)
        return tuple(norm for norm in (self.attention_norm, *inner, *blocks) if norm)

    @property
    def vectors(self) -> tuple[VectorTensor, ...]:
        """Return the vectors outside the mixer, which are loaded as float32."""
        beside = (self.beside.router_norm, self.beside.factors) if self.beside else ()
        found = (self.choice_bias, *beside, self.factor)
        return tuple(vector for vector in found if vector is not None)

    @property
    def float_items(self) -> int:
        """Return how many numbers are kept as float32 whatever the dtype is, without norms."""
        kept = (vector.size for vector in self.vectors if vector is not self.factor)
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
