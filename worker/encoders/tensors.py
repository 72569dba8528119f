"""The tensors of an encoder: their names in its files, and their shapes. Needs no torch.

The parts are those of worker/spec/tensors.py. Roles that a decoder does not have: "token_types",
"embedding_norm", "offset_bias", and those of a model that scores: "head_dense", "head_norm" and
"head_out".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from worker.encoders.spec import OFFSET_BUCKETS, EncoderSpec
from worker.errors import FETCH_AGAIN, UnusableModel
from worker.spec.matrix_tensors import FusedMatrix, MatrixPart, NormTensor, Shape
from worker.spec.tensor_names import TensorNames


@dataclass(frozen=True, slots=True)
class EncoderLayerTensors:
    """The tensors of a layer. A layer without a norm has None in its place."""

    attention_norm: NormTensor | None
    qkv: FusedMatrix
    q_norm: NormTensor | None
    k_norm: NormTensor | None
    output: FusedMatrix
    mlp_norm: NormTensor
    gate_up: FusedMatrix
    down: FusedMatrix

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> tuple[NormTensor, ...]:
        found = (self.attention_norm, self.q_norm, self.k_norm, self.mlp_norm)
        return tuple(norm for norm in found if norm is not None)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        for norm in self.norms:
            yield from norm.tensors()
        for matrix in self.matrices:
            yield from matrix.tensors()


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """The tensors of the head of a model that scores."""

    dense: FusedMatrix
    norm: NormTensor | None
    out: FusedMatrix

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        yield from self.dense.tensors()
        if self.norm is not None:
            yield from self.norm.tensors()
        yield from self.out.tensors()


class EncoderTensors:
    """All tensors of an encoder in its files.

    unused   starts of names of tensors that the files may hold and that are not used, such as the
             head with which the model was trained
    """

    def __init__(self, spec: EncoderSpec, names: TensorNames, unused: tuple[str, ...] = ()) -> None:
        self.spec = spec
        self.names = names
        self.unused = unused

    @property
    def embedding(self) -> FusedMatrix:
        return FusedMatrix((self._part("embedding", self.spec.vocab_size),), self.spec.hidden)

    @property
    def positions(self) -> FusedMatrix | None:
        """Return the table of learned positions; None if there is none."""
        return self._table("positions", self.spec.learned_positions)

    @property
    def token_types(self) -> FusedMatrix | None:
        """Return the table of token types; None if there is none."""
        return self._table("token_types", self.spec.token_types)

    @property
    def offset_bias(self) -> FusedMatrix | None:
        """Return the table of learned biases of scores; None if there is none."""
        if not self.spec.has_offset_bias:
            return None
        heads = self.spec.layers[0].num_heads
        return FusedMatrix((self._part("offset_bias", OFFSET_BUCKETS),), heads)

    @property
    def embedding_norm(self) -> NormTensor:
        return self._norm("embedding_norm")

    @property
    def final_norm(self) -> NormTensor | None:
        return self._norm("norm") if self.spec.has_final_norm else None

    @property
    def head(self) -> HeadTensors | None:
        head, hidden = self.spec.head, self.spec.hidden
        if head is None:
            return None
        return HeadTensors(
            FusedMatrix((self._part("head_dense", hidden),), hidden, head.dense_bias),
            self._norm("head_norm") if head.has_norm else None,
            FusedMatrix((self._part("head_out", 1),), hidden, head.out_bias),
        )

    def layer(self, index: int) -> EncoderLayerTensors:
        layer, hidden = self.spec.layers[index], self.spec.hidden
        width, inner = layer.width, layer.intermediate
        qkv: tuple[MatrixPart, ...]
        gate_up: tuple[MatrixPart, ...]
        if "qkv" in self.names:
            qkv = (self._part("qkv", 3 * width, index),)
        else:
            qkv = tuple(self._part(role, width, index) for role in ("q", "k", "v"))
        if not layer.is_gated:
            gate_up = (self._part("up", inner, index),)
        elif "gate_up" in self.names:
            gate_up = (self._part("gate_up", 2 * inner, index),)
        else:
            gate_up = tuple(self._part(role, inner, index) for role in ("gate", "up"))
        qk_norms = [
            NormTensor(self._name(role, index), width, has_bias=True) if layer.qk_norm else None
            for role in ("q_norm", "k_norm")
        ]
        return EncoderLayerTensors(
            attention_norm=self._norm("attention_norm", index)
            if layer.has_attention_norm
            else None,
            qkv=FusedMatrix(qkv, hidden, layer.qkv_bias),
            q_norm=qk_norms[0],
            k_norm=qk_norms[1],
            output=FusedMatrix((self._part("output", hidden, index),), width, layer.output_bias),
            mlp_norm=self._norm("mlp_norm", index),
            gate_up=FusedMatrix(gate_up, hidden, layer.up_bias),
            down=FusedMatrix((self._part("down", hidden, index),), inner, layer.down_bias),
        )

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of every tensor of the model."""
        for table in (self.embedding, self.positions, self.token_types, self.offset_bias):
            if table is not None:
                yield from table.tensors()
        yield from self.embedding_norm.tensors()
        for index in range(self.spec.num_layers):
            yield from self.layer(index).tensors()
        if self.final_norm is not None:
            yield from self.final_norm.tensors()
        if self.head is not None:
            yield from self.head.tensors()

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors())

    def check(self, found: Mapping[str, Shape]) -> None:
        """Raise UnusableModel, naming a tensor, unless the files hold all tensors of the model, and
        no others except unused ones."""
        known = set()
        for name, shape in self.tensors():
            if name not in found:
                raise UnusableModel(
                    f"tensor {name!r} is missing from the files", remedy=FETCH_AGAIN
                )
            if found[name] != shape:
                raise UnusableModel(f"{name} has shape {found[name]}; the config requires {shape}")
            known.add(name)
        others = sorted(
            name
            for name in found.keys() - known
            if not name.endswith(self.names.computed) and not name.startswith(self.unused)
        )
        if others:
            some = ", ".join(others[:3])
            raise UnusableModel(f"the files have {len(others)} unexpected tensors: {some}")

    def _table(self, role: str, rows: int) -> FusedMatrix | None:
        return FusedMatrix((self._part(role, rows),), self.spec.hidden) if rows else None

    def _name(self, role: str, index: int | None = None) -> str:
        return self.names.roles[role].format(i=index)

    def _norm(self, role: str, index: int | None = None) -> NormTensor:
        return NormTensor(self._name(role, index), self.spec.hidden, self.spec.norm.bias)

    def _part(self, role: str, rows: int, index: int | None = None) -> MatrixPart:
        return MatrixPart(self._name(role, index), rows)
