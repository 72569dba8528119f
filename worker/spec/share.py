"""Divides a model among the ranks of a tensor parallel group. Needs no torch.

Every rank holds a share of each layer: some of the heads, some of the columns between the two
matrices of an MLP, or some of the experts. It also holds some rows of the embedding and of the
output head. Norms, routers and learned positions are on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from protocol.config.worker import Activations, WeightForm
from worker.errors import UnusableModel
from worker.spec.model_spec import LayerSpec, ModelSpec

NOT_DIVIDED = "--tensor-parallel does not support models that transformers computes"


@dataclass(frozen=True, slots=True)
class MatrixCut:
    """The part of a tensor that a rank of a group holds.

    rows      ranges of rows, in the model's order; the rank stacks them
    columns   range of columns
    whole     rows and columns of the whole matrix
    """

    rows: tuple[range, ...]
    columns: range
    whole: tuple[int, int]


@dataclass(frozen=True, slots=True)
class VectorCut:
    """The part of a vector of `whole` items that a rank of a group holds."""

    items: range
    whole: int


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor of the files: a range of each axis. `whole` is the tensor's shape."""

    ranges: tuple[range, ...]
    whole: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(each.start, each.stop) for each in self.ranges)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one rank of a group. `vocab_size` is that of the whole model."""

    rank: int
    size: int
    vocab_size: int

    @property
    def vocabulary(self) -> range:
        """The tokens whose rows of the embedding and of the output head this rank holds. The last
        rank may have fewer than the others."""
        first = self.rank * self.vocabulary_width
        return range(first, min(first + self.vocabulary_width, self.vocab_size))

    @property
    def vocabulary_width(self) -> int:
        """The most tokens of a rank."""
        return -(-self.vocab_size // self.size)

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what must be added once, such as a bias after a sum."""
        return self.rank == 0

    def experts(self, num_experts: int) -> range:
        """Return the experts that this rank computes."""
        return range(
            self.rank * num_experts // self.size, (self.rank + 1) * num_experts // self.size
        )

    def ranges(self, widths: Sequence[int]) -> tuple[range, ...]:
        """Return this rank's range in each of several consecutive sections, counted from the start
        of the first one. Each section is divided evenly among the ranks.

        widths   the rank's part of each section
        """
        found, start = [], 0
        for width in widths:
            first = start + self.rank * width
            found.append(range(first, first + width))
            start += self.size * width
        return tuple(found)


def check_dense(weights: WeightForm, activations: Activations) -> None:
    """Raise UnusableModel if packed weights are required, which cannot be divided."""
    for option, is_required in (
        ("--weights packed", weights == "packed"),
        ("--activations int8", activations == "int8"),
    ):
        if is_required:
            raise UnusableModel(
                "the weights of a tensor parallel group are dense", remedy=f"serve without {option}"
            )


def divided(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the spec of what each of `size` ranks computes: fewer heads, and narrower MLPs without
    experts. Raises UnusableModel if something cannot be divided evenly."""
    if spec.norm.kind == "layer" and "projection" in {each.qk_norm for each in spec.attentions}:
        raise UnusableModel(
            f"{spec.architecture} has layer norms over the queries of all heads, which "
            "--tensor-parallel does not support"
        )
    if spec.state_items:
        raise UnusableModel(
            f"{spec.architecture} has recurrent layers, which --tensor-parallel does not support",
            remedy="serve without --tensor-parallel",
        )
    if spec.altup is not None or any(layer.laurel is not None for layer in spec.layers):
        raise UnusableModel(
            f"{spec.architecture} has several streams of hidden states, or linear branches beside "
            "its attention, which --tensor-parallel does not support",
            remedy="serve without --tensor-parallel",
        )
    if spec.layer_inputs is not None or any(
        layer.beside or layer.scaled or (layer.attention and layer.attention.kv_of is not None)
        for layer in spec.layers
    ):
        raise UnusableModel(
            f"{spec.architecture} has layers with inputs, factors or experts of their own, or that "
            "share keys and values, which --tensor-parallel does not support",
            remedy="serve without --tensor-parallel",
        )
    if any(layer.has_one_block for layer in spec.layers):
        raise UnusableModel(
            f"{spec.architecture} has layers with only attention or only an MLP, which "
            "--tensor-parallel does not support",
            remedy="serve without --tensor-parallel",
        )
    if any(each.latent is not None for each in spec.attentions):
        raise UnusableModel(
            f"{spec.architecture} has latent attention, which --tensor-parallel does not support",
            remedy="serve without --tensor-parallel",
        )
    if any(each.gated for each in spec.attentions) or any(mlp.shared for mlp in spec.mlps):
        raise UnusableModel(
            f"{spec.architecture} has gates of attention or shared experts, which "
            "--tensor-parallel does not support",
            remedy="serve without --tensor-parallel",
        )
    for layer in set(spec.layers):
        for what, count in _divided_evenly(layer).items():
            if count % size:
                raise UnusableModel(_refusal(count, what, size), remedy=_other_sizes(spec))
        for mlp in layer.mlps:
            if 1 < mlp.num_experts < size:
                raise UnusableModel(
                    _refusal(mlp.num_experts, "experts", size), remedy=_other_sizes(spec)
                )
    if not Share(size - 1, size, spec.vocab_size).vocabulary:
        raise UnusableModel(_refusal(spec.vocab_size, "tokens", size), remedy=_other_sizes(spec))
    layers = {layer: _divided_layer(layer, size) for layer in set(spec.layers)}
    return replace(spec, layers=tuple(layers[layer] for layer in spec.layers))


def _divided_evenly(layer: LayerSpec) -> Mapping[str, int]:
    """Return a mapping: what is divided equally among the ranks, such as "heads" -> its number. A
    key/value head is never on several ranks."""
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None
    assert mlp is not None
    counts = {"heads": attention.num_heads, "key/value heads": attention.num_kv_heads}
    return counts if mlp.num_experts > 1 else counts | {"columns of an MLP": mlp.intermediate}


def _divided_layer(layer: LayerSpec, size: int) -> LayerSpec:
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None
    assert mlp is not None
    heads, kv_heads = attention.num_heads // size, attention.num_kv_heads // size
    if mlp.num_experts == 1:
        mlp = replace(mlp, intermediate=mlp.intermediate // size)
    return replace(
        layer, attention=replace(attention, num_heads=heads, num_kv_heads=kv_heads), mlp=mlp
    )


def _refusal(count: int, what: str, size: int) -> str:
    return f"the model's {count} {what} cannot be divided among {size} ranks"


def _other_sizes(spec: ModelSpec) -> str:
    """Return advice for an error: the numbers of ranks among which the model can be divided."""
    layers = set(spec.layers)
    common = math.gcd(*(count for each in layers for count in _divided_evenly(each).values()))
    experts = [mlp.num_experts for mlp in spec.mlps if mlp.num_experts > 1]
    sizes = [
        size
        for size in range(2, min([common, *experts]) + 1)
        if common % size == 0 and Share(size - 1, size, spec.vocab_size).vocabulary
    ]
    if not sizes:
        return "serve without --tensor-parallel"
    return f"use --tensor-parallel {' or '.join(map(str, sizes))}"
