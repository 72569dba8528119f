"""The tensors of token mixers with a recurrent state (recurrent.py). Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from worker.spec.matrices import FusedMatrix, NormTensor, Shape, VectorTensor


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
class GatedDeltaTensors:
    """The tensors of a gated delta net (spec/recurrent.py).

    inputs   stacks the rows of the queries, keys, values and output gates. If the gates and the
             decays have a rank, it has the rows that make what `decay_up` and `gate_up` read
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
    decay_up: FusedMatrix | None = None
    gate_up: FusedMatrix | None = None

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        """Return the matrices that can be packed."""
        ups = (each for each in (self.decay_up, self.gate_up) if each is not None)
        return self.inputs, *ups, self.output

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
class Mamba1Tensors:
    """The tensors of a Mamba-1 layer (spec/recurrent.py).

    inputs      rows of x before the convolution, and of the gate
    conv        of x; `conv_bias` [channels], None: there is none
    made        rows of the input of `step`, of B and of C; it stays dense, and so does `step`
    norms       those of these three, whose weights have no offset; empty: the files have none
    plain_sizes
                sizes of norms of these three, whose weights are 1 and not in the files
    step        [channels, rank] makes dt, to which `bias` is added
    decay       [channels, state], the factor of the decay if `is_factor`, or else the logarithm of
                its amount
    skip        the factor of x in the result
    """

    inputs: FusedMatrix
    conv: ConvTensors
    conv_bias: VectorTensor | None
    made: FusedMatrix
    norms: tuple[NormTensor, ...]
    step: FusedMatrix
    bias: VectorTensor
    decay: str
    skip: VectorTensor
    output: FusedMatrix
    decay_shape: Shape
    is_factor: bool
    plain_sizes: tuple[int, ...] = ()

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.inputs, self.output

    @property
    def vectors(self) -> tuple[VectorTensor, ...]:
        found = (self.conv_bias, self.bias, self.skip)
        return tuple(vector for vector in found if vector is not None)

    @property
    def float_items(self) -> int:
        shapes = self.conv.items + math.prod(self.decay_shape)
        vectors = sum(vector.size for vector in self.vectors)
        return shapes + vectors + sum(norm.size for norm in self.norms) + sum(self.plain_sizes)

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return self.made, self.step

    def others(self) -> Iterator[tuple[str, Shape]]:
        yield from self.conv.tensors()
        yield self.decay, self.decay_shape
        for vector in self.vectors:
            yield vector.name, (vector.size,)
        for norm in self.norms:
            yield from norm.tensors()


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
class RgLruTensors:
    """The tensors of an RG-LRU layer (spec/recurrent.py).

    inputs       rows of x before the convolution, and of the gate of the results
    conv         of x; `conv_bias` [channels]
    gates        [2 * head_dim, head_dim] of each head: rows of the gates of the inputs and of the
                 decays
    gate_biases  names of the biases [heads, head_dim] of both kinds of gates
    decay        [channels], what the factors of the decays are made of
    """

    inputs: FusedMatrix
    conv: ConvTensors
    conv_bias: VectorTensor
    gates: tuple[FusedMatrix, ...]
    gate_biases: tuple[str, str]
    decay: VectorTensor
    output: FusedMatrix

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.inputs, *self.gates, self.output

    @property
    def bias_shape(self) -> Shape:
        """Return the shape of the biases of one kind of gates."""
        return len(self.gates), self.gates[0].columns

    @property
    def float_items(self) -> int:
        biases = len(self.gate_biases) * math.prod(self.bias_shape)
        return self.conv.items + self.conv_bias.size + self.decay.size + biases

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return ()

    def others(self) -> Iterator[tuple[str, Shape]]:
        yield from self.conv.tensors()
        for vector in (self.conv_bias, self.decay):
            yield vector.name, (vector.size,)
        for name in self.gate_biases:
            yield name, self.bias_shape


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
