"""The tensors of a model: their shapes in its files, and the matrices that they form.

The loader, the header check and the memory plan use this list. For a rank of a tensor parallel
group it holds the rank's parts of the tensors (`ModelTensors.for_rank`). Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from worker.errors import FETCH_AGAIN, UnusableModel
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.share import MatrixCut, Share, VectorCut, divided
from worker.spec.tensor_names import ENDINGS, Endings, RowOrder, TensorNames

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

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each weight and bias in the file."""
        for part in self.parts:
            yield part.weight, part.shape(self.columns)
            if self.has_bias:
                yield part.bias, part.bias_shape


@dataclass(frozen=True, slots=True)
class NormTensor:
    """A norm's weight [size], and its bias if it has one.

    cut   the items that are read; None: all. A norm with a bias is never cut
    """

    name: str
    size: int
    has_bias: bool = False
    cut: VectorCut | None = None

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        yield f"{self.name}.weight", (self.size if self.cut is None else self.cut.whole,)
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
class MlpTensors:
    """The tensors of an MLP, or of one expert. `gate_up` stacks the rows of the gate projection and
    of the up projection, in this order. Without a gate, it has only those of the up projection."""

    gate_up: FusedMatrix
    down: FusedMatrix


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of a layer. A layer without a norm, or without sinks, has None in its place.

    mlps   the MLP, or the experts
    """

    attention_norm: NormTensor | None
    qkv: FusedMatrix
    q_norm: NormTensor | None
    k_norm: NormTensor | None
    sinks: VectorTensor | None
    output: FusedMatrix
    post_attention_norm: NormTensor | None
    mlp_norm: NormTensor | None
    router: FusedMatrix | None
    mlps: tuple[MlpTensors, ...]
    post_mlp_norm: NormTensor | None

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        """Return all matrices except the router, which stays dense."""
        mlps = (matrix for mlp in self.mlps for matrix in (mlp.gate_up, mlp.down))
        return self.qkv, self.output, *mlps

    @property
    def norms(self) -> tuple[NormTensor, ...]:
        found = (self.attention_norm, self.q_norm, self.k_norm, self.post_attention_norm)
        return tuple(norm for norm in (*found, self.mlp_norm, self.post_mlp_norm) if norm)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield the name and shape of each tensor in the file. A tensor that holds all experts is
        yielded once for each of them."""
        for norm in self.norms:
            yield from norm.tensors()
        if self.sinks is not None:
            yield self.sinks.name, (self.sinks.whole,)
        for matrix in (*self.matrices, *((self.router,) if self.router else ())):
            yield from matrix.tensors()


NORMS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("post_attention_norm", "post_mlp_norm"),
    "both": ("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"),
    "parallel": ("attention_norm", "mlp_norm"),
    "parallel_one_norm": ("attention_norm",),
}
"""LayerSpec.order -> the norms of a layer."""


class ModelTensors:
    """All tensors of a model in its files, or a rank's parts of them.

    spec    what is computed with the tensors: by the whole model, or by the rank
    share   the rank's share; None: the whole model
    """

    def __init__(self, spec: ModelSpec, names: TensorNames, share: Share | None = None) -> None:
        self.spec = spec
        self.names = names
        self.share = share

    def for_rank(self, rank: int, size: int) -> ModelTensors:
        """Return the parts of the tensors that a rank of a group of `size` ranks holds. Raises
        UnusableModel if the model cannot be divided among them."""
        share = Share(rank, size, self.spec.vocab_size)
        return ModelTensors(divided(self.spec, size), self.names, share)

    @property
    def embedding(self) -> str:
        return f"{self.names.roles['embedding']}.weight"

    @property
    def embedding_matrix(self) -> FusedMatrix:
        return FusedMatrix((self._by_token("embedding"),), self.spec.hidden)

    @property
    def positions(self) -> str | None:
        """Return the tensor name of the learned position embeddings; None if the model has none."""
        if not self.spec.learned_positions:
            return None
        return f"{self.names.roles['positions']}.weight"

    @property
    def norm(self) -> NormTensor:
        spec = self.spec
        return NormTensor(self.names.roles["norm"], spec.hidden, spec.norm.bias)

    @property
    def head(self) -> FusedMatrix:
        """Return the matrix of the output head. If it is tied to the embeddings, this is their
        tensor."""
        role = "embedding" if self.spec.tied_embeddings else "head"
        return FusedMatrix((self._by_token(role),), self.spec.hidden, self.spec.head_bias)

    @property
    def head_name(self) -> str:
        """Return the name that the weight of the output head has if it is not tied to the
        embeddings."""
        return f"{self.names.roles['head']}.weight"

    def layer(self, index: int) -> LayerTensors:
        layer = self.spec.layers[index]
        attention, hidden = layer.attention, self.spec.hidden
        norms = {role: self._norm(role, index) for role in NORMS[layer.order]}
        q_norm = k_norm = None
        if attention.qk_norm != "none":
            by_head = attention.qk_norm == "head"
            q_norm = self._qk_norm("q_norm", index, attention.num_heads, by_head)
            k_norm = self._qk_norm("k_norm", index, attention.num_kv_heads, by_head)
        q, kv = attention.q_width, attention.kv_width
        if "qkv" in self.names:
            qkv = self._parts(index, {"qkv": (q, kv, kv)}, hidden)
        else:
            qkv = self._parts(index, {"q": (q,), "k": (kv,), "v": (kv,)}, hidden)
        return LayerTensors(
            attention_norm=norms.get("attention_norm"),
            qkv=FusedMatrix(qkv, hidden, attention.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=self._sinks(index, attention.num_heads) if attention.sinks else None,
            output=self._summed(index, "output", q, attention.output_bias),
            post_attention_norm=norms.get("post_attention_norm"),
            mlp_norm=norms.get("mlp_norm"),
            router=self._router(layer, index),
            mlps=self._mlps(layer, index),
            post_mlp_norm=norms.get("post_mlp_norm"),
        )

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of every tensor of the model."""
        spec = self.spec
        yield self.embedding, (spec.vocab_size, spec.hidden)
        if self.positions is not None:
            yield self.positions, (spec.learned_positions, spec.hidden)
        for index in range(spec.num_layers):
            yield from self.layer(index).tensors()
        yield from self.norm.tensors()
        yield from self.head.tensors()

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model. A tied head is not counted twice."""
        return sum(math.prod(shape) for shape in dict(self.tensors()).values())

    def check(self, found: Mapping[str, Shape]) -> None:
        """Raise UnusableModel, naming a tensor, unless the files hold exactly the model's tensors.

        found   name -> shape of each tensor in the files; a copy of tied embeddings is allowed, and
                so are tensors that can be computed
        """
        known = {self.head_name} if self.spec.tied_embeddings else set()  # a copy of the embeddings
        for name, shape in self.tensors():
            if name not in found:
                raise UnusableModel(
                    f"tensor {name!r} is missing from the files", remedy=FETCH_AGAIN
                )
            if found[name] != shape:
                raise UnusableModel(f"{name} has shape {found[name]}; the config requires {shape}")
            known.add(name)
        if others := sorted(n for n in found.keys() - known if not self._is_computed(n)):
            some = ", ".join(others[:3])
            raise UnusableModel(f"the files have {len(others)} unexpected tensors: {some}")

    def _is_computed(self, name: str) -> bool:
        return name.endswith(self.names.computed)

    def _norm(self, role: str, index: int) -> NormTensor:
        name = self.names.roles[role].format(i=index)
        return NormTensor(name, self.spec.hidden, self.spec.norm.bias)

    def _qk_norm(self, role: str, index: int, heads: int, by_head: bool) -> NormTensor:
        name, head_dim = self.names.roles[role].format(i=index), self.spec.head_dim
        if by_head:
            return NormTensor(name, head_dim)
        return NormTensor(name, heads * head_dim, cut=self._vector_cut(heads * head_dim))

    def _sinks(self, index: int, heads: int) -> VectorTensor:
        name = self.names.roles["sinks"].format(i=index)
        name += self.names.endings.get("sinks", ENDINGS)[0]
        return VectorTensor(name, heads, self._vector_cut(heads))

    def _vector_cut(self, size: int) -> VectorCut | None:
        """Return this rank's part of a vector that is divided among the ranks, `size` items on
        each. Return None if the model is not divided; all items are read then."""
        if self.share is None:
            return None
        (items,) = self.share.ranges([size])
        return VectorCut(items, size * self.share.size)

    def _router(self, layer: LayerSpec, index: int) -> FusedMatrix | None:
        experts = layer.mlp.num_experts
        if experts == 1:
            return None
        part = self._part("router", experts, index)
        return FusedMatrix((part,), self.spec.hidden, layer.mlp.bias)

    def _mlps(self, layer: LayerSpec, index: int) -> tuple[MlpTensors, ...]:
        mlp = layer.mlp
        if mlp.num_experts == 1:
            return (self._mlp(layer, index),)
        return tuple(self._expert(layer, index, expert) for expert in self.experts(layer))

    def experts(self, layer: LayerSpec) -> range:
        """Return the experts of a layer whose tensors are held."""
        count = layer.mlp.num_experts
        return range(count) if self.share is None else self.share.experts(count)

    def _mlp(self, layer: LayerSpec, index: int) -> MlpTensors:
        mlp, hidden = layer.mlp, self.spec.hidden
        gate_up = self._parts(index, self._gate_up(layer, ""), hidden)
        down = self._summed(index, "down", mlp.intermediate, mlp.bias)
        return MlpTensors(FusedMatrix(gate_up, hidden, mlp.bias), down)

    def _expert(self, layer: LayerSpec, index: int, expert: int) -> MlpTensors:
        """Return the tensors of an expert. They are never cut, because a rank computes whole
        experts."""
        mlp, hidden = layer.mlp, self.spec.hidden

        def part(role: str, rows: int) -> MatrixPart:
            return self._part(role, rows, index, expert, mlp.num_experts)

        widths = self._gate_up(layer, "expert_")
        gate_up = tuple(part(role, sum(sections)) for role, sections in widths.items())
        down = (part("expert_down", hidden),)
        return MlpTensors(
            FusedMatrix(gate_up, hidden, mlp.bias), FusedMatrix(down, mlp.intermediate, mlp.bias)
        )

    def _gate_up(self, layer: LayerSpec, prefix: str) -> Mapping[str, Sequence[int]]:
        """Return role -> rows of each section, for the tensors of the first matrix of an MLP."""
        inner = layer.mlp.intermediate
        if not layer.mlp.is_gated:
            return {f"{prefix}up": (inner,)}
        if f"{prefix}gate_up" in self.names:
            return {f"{prefix}gate_up": (inner, inner)}
        return {f"{prefix}gate": (inner,), f"{prefix}up": (inner,)}

    def _by_token(self, role: str) -> MatrixPart:
        """Return a matrix with a row for each token, of which a rank holds those of its tokens."""
        vocab, share = self.spec.vocab_size, self.share
        if share is None:
            return MatrixPart(self.names.roles[role], vocab)
        hidden, tokens = self.spec.hidden, share.vocabulary
        cut = MatrixCut((tokens,), range(hidden), (vocab, hidden))
        return MatrixPart(self.names.roles[role], len(tokens), cut=cut)

    def _parts(
        self, index: int, sections: Mapping[str, Sequence[int]], columns: int
    ) -> tuple[MatrixPart, ...]:
        """Return the parts of a matrix of which a rank holds some rows.

        sections   role -> rows of each section of the tensor
        """
        return tuple(
            replace(self._part(role, sum(rows), index), cut=self._row_cut(rows, columns))
            for role, rows in sections.items()
        )

    def _row_cut(self, sections: Sequence[int], columns: int) -> MatrixCut | None:
        share = self.share
        if share is None:
            return None
        whole = (sum(sections) * share.size, columns)
        return MatrixCut(share.ranges(sections), range(columns), whole)

    def _summed(self, index: int, role: str, columns: int, has_bias: bool) -> FusedMatrix:
        """Return a matrix of which a rank holds `columns` columns. The ranks add their results, so
        only one of them has the bias."""
        hidden, share = self.spec.hidden, self.share
        part = self._part(role, hidden, index)
        if share is None:
            return FusedMatrix((part,), columns, has_bias)
        (own,) = share.ranges([columns])
        cut = MatrixCut((range(hidden),), own, (hidden, columns * share.size))
        return FusedMatrix((replace(part, cut=cut),), columns, has_bias and share.is_first)

    def _part(
        self, role: str, rows: int, index: int, expert: int | None = None, of: int = 1
    ) -> MatrixPart:
        names, template = self.names, self.names.roles[role]
        is_stacked = expert is not None and "{e}" not in template
        name, endings = template.format(i=index, e=expert), names.endings.get(role, ENDINGS)
        return MatrixPart(
            name=name,
            rows=rows,
            order=names.orders.get(role),
            is_transposed=role in names.transposed and name + endings[0] not in names.by_rows,
            index=expert if is_stacked else None,
            of=of,
            endings=endings,
        )
