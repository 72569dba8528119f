"""The names of a model's tensors in its files, and the orders in which the files store their rows.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from worker.errors import UnusableModel

if TYPE_CHECKING:
    from worker.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Order of a tensor's rows in a file that differs from the model's order. To get the model's
    order, reshape the rows to `shape` and transpose its axes to `axes`.

    Each item of the first axis may be followed by `kept` rows, which both have in the same place.
    The first axis must then stay the first.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    kept: int = 0

    def __post_init__(self) -> None:
        assert self.kept == 0 or self.axes[0] == 0

    def file_rows_of(self, count: int) -> list[int]:
        """Return the place in the file of each of a tensor's `count` rows in the model's order."""
        rows = _file_rows(self)
        assert len(rows) == count, f"an order of {len(rows)} rows for {count}"
        return list(rows)

    def model_rows_of(self, count: int) -> list[int]:
        """Return the place in the model's order of each of a tensor's `count` rows in the file."""
        return sorted(range(count), key=self.file_rows_of(count).__getitem__)


@cache
def _file_rows(order: RowOrder) -> tuple[int, ...]:
    """Return `RowOrder.file_rows`. All layers of a model have the same orders."""
    item = prod(order.shape[1:])
    strides = [prod(order.shape[axis + 1 :]) for axis in range(len(order.shape))]
    strides[0] += order.kept
    places = [0]
    for axis in order.axes:
        steps = range(0, order.shape[axis] * strides[axis], strides[axis])
        places = [place + step for place in places for step in steps]
    if not order.kept:
        return tuple(places)
    return tuple(
        row
        for first in range(order.shape[0])
        for row in (
            *places[first * item : (first + 1) * item],
            *range(first * strides[0] + item, (first + 1) * strides[0]),
        )
    )


def interleaved(heads: int, width: int, kept: int = 0) -> RowOrder:
    """Return the row order of a projection whose file alternates between the rows of the first and
    the second half of the rotated part of each head.

    heads   number of heads
    width   rows of the rotated part of a head
    kept    rows of the part of a head that is not rotated and follows it
    """
    return RowOrder((heads, width // 2, 2), (0, 2, 1), kept)


def neighbour_orders(spec: ModelSpec) -> dict[str, RowOrder]:
    """Return the row orders of queries and keys in files whose rotary embeddings turn neighbouring
    items of a head, also in layers without rotary embeddings. Raises UnusableModel if the items
    that are turned are not pairs."""
    attention = spec.attentions[0]
    ropes = [each.rope for each in spec.attentions if each.rope is not None]
    width = ropes[0].width if ropes else attention.head_dim
    if width % 2:
        raise UnusableModel(f"heads of {width} numbers are not pairs of neighbours")
    rest = attention.head_dim - width
    return {
        "q": interleaved(attention.num_heads, width, rest),
        "k": interleaved(attention.num_kv_heads, width, rest),
    }


Endings = tuple[str, str]
ENDINGS: Endings = (".weight", ".bias")
"""Ends of the names of weights and biases."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a model's tensors in its files.

    `roles` maps a role, which is a tensor's place in the model, to a name. In the name, `{i}` is
    the index of the layer and `{e}` that of the expert. If the name of an expert's role has no
    `{e}`, one tensor holds all experts, with the expert as its first axis. `{p}` in the name of a
    convolution is "q", "k" or "v", whose channels have a tensor each. With `{t}`, each of these
    tensors has a third of all channels. Names have no ending: ENDINGS, or the role's entry in
    `endings`, is added.
    """

    roles: Mapping[str, str]
    #: Role -> order of its rows in the file.
    orders: Mapping[str, RowOrder] = field(default_factory=dict)
    #: Roles of matrices that the file stores as [in, out].
    transposed: frozenset[str] = frozenset()
    #: Names of weights that the file stores as [out, in] although `transposed` has their role.
    by_rows: frozenset[str] = frozenset()
    #: Role -> ends of the names of its weight and its bias.
    endings: Mapping[str, Endings] = field(default_factory=dict)
    #: Ends of names of tensors that older checkpoints store although the config determines them.
    computed: tuple[str, ...] = ("rotary_emb.inv_freq",)
    #: Whether the files store the factors of decays, below zero, and not their logarithms.
    stores_decay_factors: bool = False
    #: Begins of names of tensors that the model itself does not use: those of its head for drafts.
    unused: tuple[str, ...] = ()
    #: Role -> names that some files have in place of its own.
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Prefix of names. Some files have `other_prefix` in its place.
    prefix: str = ""
    other_prefix: str = ""

    @property
    def with_other_prefix(self) -> TensorNames:
        """Return the names with `other_prefix` in place of `prefix`."""
        prefix, other = self.prefix, self.other_prefix
        roles = {
            role: other + name.removeprefix(prefix) if name.startswith(prefix) else name
            for role, name in self.roles.items()
        }
        return replace(self, roles=roles, prefix=other, other_prefix=prefix)

    def __contains__(self, role: str) -> bool:
        return role in self.roles


def names_of(*changes: Mapping[str, str], **options: object) -> TensorNames:
    """Return the usual tensor names of Hugging Face checkpoints, with `changes` (role -> name) and
    with `options`, which are fields of TensorNames."""
    roles = dict(USUAL)
    for change in changes:
        roles |= change
    return TensorNames(roles, **options)  # type: ignore[arg-type]


LRU_GATES = ("lru_input_gate", "lru_decay_gate")
"""Roles of the matrices that make the gates of an RG-LRU, in the order of their rows."""
NEVER_QUANTIZED = frozenset(LRU_GATES)
"""Roles of matrices that belong to no linear layer of transformers, so that no method quantises
them."""
XIELU_ROLES = ("xielu_alpha_p", "xielu_alpha_n", "xielu_beta", "xielu_eps")
"""Roles of the numbers of an xIELU, in the order of `Xielu.of`."""
USUAL = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{i}.input_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "q_norm": "model.layers.{i}.self_attn.q_norm",
    "k_norm": "model.layers.{i}.self_attn.k_norm",
    "sinks": "model.layers.{i}.self_attn.sinks",
    "output": "model.layers.{i}.self_attn.o_proj",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
    "router": "model.layers.{i}.mlp.gate",
    "expert_gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "expert_up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "expert_down": "model.layers.{i}.mlp.experts.{e}.down_proj",
}


def with_stacked_experts(
    names: TensorNames, shapes: Mapping[str, tuple[int, ...]], hidden: int
) -> TensorNames:
    """Return `names` as the files spell them, if they have one tensor for all experts of a layer.

    shapes   name -> shape of the tensors in the files. transformers writes the second matrix of the
             experts as [experts, hidden, intermediate], publishers with the last axes swapped
    hidden   width of the hidden states
    """
    roles = {"expert_gate_up": "gate_up_proj", "expert_down": "down_proj"}
    down = names.roles.get("expert_down", "")
    experts = down.partition("{e}.")[0] if "{e}." in down else down[: down.rfind(".") + 1]
    begin = experts.partition("{i}")[0]
    found = [
        shape
        for name, shape in shapes.items()
        if name.startswith(begin) and name.endswith(".mlp.experts.down_proj")
    ]
    if not found:
        return names
    return replace(
        names,
        roles={**names.roles, **{role: experts + name for role, name in roles.items()}},
        transposed=names.transposed | (set() if found[0][1] == hidden else roles.keys()),
        endings={**names.endings, **dict.fromkeys(roles, ("", "_bias"))},
    )


def with_found_prefix(names: TensorNames, found: Sequence[str]) -> TensorNames:
    """Return `names` as the files spell them: with the other prefix, if no tensor has the first."""
    prefix = names.prefix
    if not prefix or any(name.startswith(prefix) for name in found):
        return names
    return names.with_other_prefix
