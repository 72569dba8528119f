"""The base of all families: defaults of missing keys, and readers of common keys.

A missing key has the value that its transformers config class gives it; a test compares all of
them. A null is accepted where that class accepts it. Keys that would change the result and are not
understood are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from worker.errors import UnusableModel
from worker.spec.draft_head import HeadForm
from worker.spec.fields import Fields
from worker.spec.model_spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    checked_layers,
)
from worker.spec.quantization import read_quantization
from worker.spec.rope_config import LongRopeScaling, RopeConfig, rope_config
from worker.spec.tensor_names import TensorNames

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""Activation's name in a config -> our name. The names that map to gelu_tanh mean the same
function."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
OLDER_KINDS = {"attention": FULL, "mamba": LINEAR}
"""Kinds of layers in older configs -> their names now."""

UNLIMITED_CONTEXT = 1 << 17
"""Context of models whose config has no limit, such as Mamba's."""
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "tie_word_embeddings": False,
}
"""Defaults of transformers' LlamaConfig, which most families share."""


class ConfigFields(Fields):
    """The fields of a config.json, with the family's defaults for missing keys, and readers of the
    parts that most families share. All readers raise UnusableModel, naming the field, if a value is
    not supported."""

    def __init__(self, values: Mapping[str, Any], architecture: str, source: str) -> None:
        super().__init__(values, source)
        self.architecture = architecture

    @property
    def num_layers(self) -> int:
        return checked_layers(self.integer("num_hidden_layers"))

    @property
    def num_heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key/value heads: `num_heads` if the config's value is null."""
        return self.integer("num_key_value_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.integer("head_dim", self.integer("hidden_size") // max(self.num_heads, 1))

    @property
    def window(self) -> int | None:
        """Return `sliding_window`; None if it is null or absent."""
        return None if self.get("sliding_window") is None else self.integer("sliding_window")

    def rope(
        self,
        *,
        partial: float | None = None,
        default: Mapping[str, Any] | None = None,
        has_alpha: bool = False,
    ) -> RopeConfig:
        """Return the rotary embeddings of the config. The arguments are those of `rope_config`."""
        return self.rope_of(self.head_dim, partial=partial, default=default, has_alpha=has_alpha)

    def rope_of(
        self,
        head_dim: int,
        *,
        partial: float | None = None,
        default: Mapping[str, Any] | None = None,
        has_alpha: bool = False,
    ) -> RopeConfig:
        """Return the rotary embeddings of heads of `head_dim` numbers."""
        return rope_config(self, head_dim, partial=partial, default=default, has_alpha=has_alpha)

    def attention(self, rope: RopeConfig | None, **changes: Any) -> AttentionSpec:
        """Return the spec of plain attention, with the fields `changes` replaced."""
        head_dim = self.head_dim
        usual: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": head_dim,
            "rope": rope,
            "scale": max(head_dim, 1) ** -0.5,
        }
        return AttentionSpec(**(usual | changes))

    def activation(self, key: str = "hidden_act") -> Activation:
        name = self.text(key)
        if name not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise UnusableModel(f"{key} {name!r:.80} is not supported; supported: {known}")
        return ACTIVATIONS[name]

    def mlp(self, **changes: Any) -> MlpSpec:
        """Return the spec of a gated MLP, with the fields `changes` replaced."""
        usual: dict[str, Any] = {}
        if "intermediate" not in changes:
            usual["intermediate"] = self.integer("intermediate_size")
        if "activation" not in changes:
            usual["activation"] = self.activation()
        return MlpSpec(**(usual | changes))

    def grouped_experts(self, **changes: Any) -> MlpSpec:
        """Return the spec of experts that are chosen by group, from the sigmoids of the router's
        scores and a bias of each, with the fields `changes` replaced. The expert that computes
        every token has no score."""
        usual: dict[str, Any] = {
            "intermediate": self.integer("moe_intermediate_size"),
            "num_experts": self.integer("n_routed_experts"),
            "top_k": self.integer("num_experts_per_tok"),
            "router": "sigmoid",
            "choice_bias": True,
            "num_groups": self.integer("n_group"),
            "top_groups": self.integer("topk_group"),
            "renormalize": self.flag("norm_topk_prob"),
            "sum_eps": 1e-20,
            "expert_scale": self.number("routed_scaling_factor"),
            "scores_shared": False,
        }
        return self.mlp(**(usual | changes))

    def layer_types(
        self, default: Callable[[int], str], *, known: Collection[str] = (FULL, SLIDING)
    ) -> list[str]:
        """Return the kind of each layer, one of `known`. If the config has no list `layer_types`,
        `default` returns the kind of the layer with a given index."""
        kinds = self.get("layer_types")
        if kinds is None:
            kinds = [default(index) for index in range(self.num_layers)]
        if not isinstance(kinds, list) or len(kinds) != self.num_layers:
            raise UnusableModel(f"layer_types must be a list of {self.num_layers} layers")
        kinds = [OLDER_KINDS.get(str(kind), str(kind)) for kind in kinds]
        if others := sorted(set(kinds) - {*known}):
            raise UnusableModel(
                f"layers of type {others[0]!r} are not supported for {self.architecture}"
            )
        return kinds

    def rms_norm(self, key: str = "rms_norm_eps", *, offset: float = 0.0) -> NormSpec:
        return NormSpec(eps=self.number(key), offset=offset)

    def limits(self, key: str) -> tuple[float, float]:
        """Return the least and the largest value that `key` allows: no limits if it is null."""
        match self.get(key):
            case None:
                return 0.0, inf
            case [int() | float() as least, int() | float() as most]:
                return float(least), float(most)
            # JSON has no infinity.
            case [int() | float() as least, "inf" | "Infinity" | {"__float__": "Infinity"}]:
                return float(least), inf
        raise UnusableModel(f"config.json: {key!r} is {self.get(key)!r:.80}, not two numbers")

    def layer_norm(self, key: str, *, bias: bool = True) -> NormSpec:
        return NormSpec(kind="layer", eps=self.number(key), bias=bias)

    def model(self, layers: Sequence[LayerSpec], norm: NormSpec, **changes: Any) -> ModelSpec:
        """Return the spec of a model with these layers. Equal layers become one object. `changes`
        replace other fields of the spec."""
        shared: dict[LayerSpec, LayerSpec] = {}
        usual: dict[str, Any] = {
            "architecture": self.architecture,
            "vocab_size": self.integer("vocab_size"),
            "hidden": self.integer("hidden_size"),
            "layers": tuple(shared.setdefault(layer, layer) for layer in layers),
            "norm": norm,
            "tied_embeddings": self.flag("tie_word_embeddings"),
        }
        if "context_tokens" not in changes:
            usual["context_tokens"] = self.integer("max_position_embeddings")
        for layer in shared:
            rope = layer.attention.rope if layer.attention else None
            if rope is not None and isinstance(rope.scaling, LongRopeScaling):
                limit = min(usual["context_tokens"], rope.scaling.original_context)
                usual["context_tokens"] = limit
        return ModelSpec(**(usual | changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """How configs of one class of transformers are read into a ModelSpec.

    architecture, model_type   the names by which a config.json refers to the class
    defaults                   values of keys that a config lacks
    read                       makes the spec from a config with all defaults
    names                      returns the names of the model's tensors in its files
    other_types                other values of `model_type`, of configs that belong to code beside a
                               model
    nullable                   keys that may be null, besides those in NULLABLE and those whose
                               default is None
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    read: Callable[[ConfigFields], ModelSpec]
    names: Callable[[ModelSpec], TensorNames]
    #: Keys that this class does not read -> the value that has the same effect.
    ignored: Mapping[str, Any] = field(default_factory=dict)
    nullable: frozenset[str] = frozenset()
    other_types: frozenset[str] = frozenset()
    #: Key -> the only values that are supported.
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    #: Another name of a key -> the key.
    aliases: Mapping[str, str] = field(default_factory=dict)
    #: Methods of `quantization_config` that only this family has.
    quantizations: frozenset[str] = frozenset()
    #: Returns the form of the heads for drafts in published files; None: they have none.
    draft_head: Callable[[ModelSpec], HeadForm | None] = lambda spec: None
    #: Keys that a config must have, because their defaults are not supported -> a supported value.
    needed: Mapping[str, Any] = field(default_factory=dict)
    #: Other names of the class in published configs.
    published: tuple[str, ...] = ()
    #: Keys that published configs have and that decide how a step is computed -> a usual value.
    typical: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, config: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
        """Return the model that a parsed config.json describes.

        source   name of the config in error messages

        Raises UnusableModel, naming the field, if a value is null, wrong or not supported.
        """
        values = {self.aliases.get(key, key): value for key, value in config.items()}
        values = {**self.defaults, **values, **self.ignored}
        for key in self.defaults:
            if values[key] is None and not self.is_nullable(key):
                raise UnusableModel(f"{source}: {key!r} is null")
        unread = {key: each for key, each in UNSUPPORTED.items() if key not in self.defaults}
        for key, supported in {**unread, **self.only}.items():
            if (value := values.get(key)) not in supported:
                raise UnusableModel(f"{key} {value!r:.80} is not supported for {self.model_type}")
        read_quantization(values, self.quantizations)  # refuses other methods early
        return self.read(ConfigFields(values, self.architecture, source))

    @property
    def architectures(self) -> tuple[str, ...]:
        """Return all names of the class in configs."""
        return self.architecture, *self.published

    def is_nullable(self, key: str) -> bool:
        """Return whether `key`, one of `defaults`, may be null in a config."""
        return self.defaults[key] is None or key in NULLABLE | self.nullable


NULLABLE = frozenset({"rope_theta"})
"""Keys that may be null in every family. A null `rope_theta` needs one in the rope parameters."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "per_layer_config": (None,),
    "use_bidirectional_attention": (None, False),
    "is_decoder": (None, True, False),
    "add_cross_attention": (None, False),
    "clip_qkv": (None,),
}
"""Keys of several classes that change the result, with the values that do not. A family that reads
such a key has a default for it."""


def every(interval: int, *, regular: str = SLIDING, last: str = FULL) -> Callable[[int], str]:
    """Return a function from a layer's index to its kind: every `interval`-th layer is `last`, the
    others are `regular`. Raises UnusableModel if `interval` is below 1."""
    if interval < 1:
        raise UnusableModel(f"a pattern of {interval} layers is not supported")
    return lambda index: regular if (index + 1) % interval else last
