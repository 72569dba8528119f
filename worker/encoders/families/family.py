"""The base of all families of encoders.

As for decoders (worker/spec/families/family.py), a missing key has the value that its transformers
config class gives it, and keys that would change the result and are not understood are refused by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.encoders.spec import EncoderLayerSpec, EncoderSpec, HeadSpec
from worker.errors import UnusableModel
from worker.spec.families.family import ConfigFields
from worker.spec.fields import Fields
from worker.spec.model_spec import NormSpec
from worker.spec.tensor_names import TensorNames

COMPUTED = ("position_ids", "token_type_ids", "rotary_emb.inv_freq")
"""Ends of names of tensors that older checkpoints store although the config determines them."""
SCORE_FUNCTIONS = {
    "torch.nn.modules.activation.Sigmoid": True,
    "torch.nn.modules.linear.Identity": False,
}
"""Name of the function of a score -> whether it is the sigmoid; otherwise it changes nothing."""
SCORES = "ForSequenceClassification"
"""End of the architecture of a model that scores."""


class EncoderConfig(ConfigFields):
    """The fields of an encoder's config.json, with the family's defaults for missing keys."""

    @property
    def scores(self) -> bool:
        """Return whether the model has a head that scores."""
        return self.architecture.endswith(SCORES)

    def layer(self, **values: Any) -> EncoderLayerSpec:
        """Return the spec of a layer, with the fields `values`."""
        hidden, heads = self.integer("hidden_size"), self.num_heads
        if heads < 1 or hidden % heads:
            raise UnusableModel(f"{heads} heads cannot divide {hidden} numbers evenly")
        usual: dict[str, Any] = {
            "num_heads": heads,
            "head_dim": hidden // heads,
            "intermediate": self.integer("intermediate_size"),
        }
        if "activation" not in values:
            usual["activation"] = self.activation()
        return EncoderLayerSpec(**(usual | values))

    def encoder(
        self, layers: Sequence[EncoderLayerSpec], norm: NormSpec, **values: Any
    ) -> EncoderSpec:
        """Return the spec of an encoder with these layers and the fields `values`. Equal layers
        become one object."""
        shared: dict[EncoderLayerSpec, EncoderLayerSpec] = {}
        usual: dict[str, Any] = {
            "architecture": self.architecture,
            "vocab_size": self.integer("vocab_size"),
            "hidden": self.integer("hidden_size"),
            "context_tokens": self.integer("max_position_embeddings"),
            "layers": tuple(shared.setdefault(layer, layer) for layer in layers),
            "norm": norm,
        }
        return EncoderSpec(**(usual | values))

    def head(self, **values: Any) -> HeadSpec | None:
        """Return the head of a model that scores; None for other models. Raises UnusableModel if it
        has several labels, or an unknown function for its score."""
        if not self.scores:
            return None
        check_one_label(self)
        return HeadSpec(has_sigmoid=has_sigmoid(self), **values)


def check_one_label(config: Fields) -> None:
    """Raise UnusableModel if the head of a model has several labels. Their number is that of
    `id2label`, or 2, which is transformers' default."""
    names = config.get("id2label")
    is_given = isinstance(names, dict) and names
    if (labels := len(names) if is_given else config.integer("num_labels", 2)) != 1:
        raise UnusableModel(
            f"a model with {labels} labels classifies; only models with one label, which score, "
            "are supported"
        )


def has_sigmoid(config: Fields) -> bool:
    """Return whether scores are sigmoids. sentence-transformers stores the function under one of
    two keys; its default for one label is the sigmoid."""
    nested = Fields(config.get("sentence_transformers", {}), "sentence_transformers")
    name = nested.get("activation_fn", config.get("sbert_ce_default_activation_function"))
    if name is not None and name not in SCORE_FUNCTIONS:
        raise UnusableModel(f"activation_fn {name!r:.80} is not supported")
    return name is None or SCORE_FUNCTIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """How configs of some classes of transformers are read into an EncoderSpec."""

    #: Names of the classes in `architectures`. The first one is used if a config names none.
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    #: Values of keys that a config lacks.
    defaults: Mapping[str, Any]
    #: Makes the spec from a config with all defaults.
    read: Callable[[EncoderConfig], EncoderSpec]
    #: Returns the names of the model's tensors in its files.
    names: Callable[[EncoderSpec], TensorNames]
    #: Starts of names of tensors that are not used, without the names' prefix.
    unused: tuple[str, ...] = ()
    #: Key -> the only values that are supported.
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    #: Another name for a key, as in older configs -> the key.
    aliases: Mapping[str, str] = field(default_factory=dict)
    #: Keys that may be null, besides those whose default is None.
    nullable: frozenset[str] = frozenset()

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Return whether a parsed config.json belongs to this family."""
        architectures = config.get("architectures")
        if architectures is None:
            return config.get("model_type") in self.model_types
        if len(architectures) != 1 or architectures[0] not in self.architectures:
            return False
        return config.get("model_type") in (None, *self.model_types)

    def spec(self, config: Mapping[str, Any], source: str = "config.json") -> EncoderSpec:
        """Return the model that a parsed config.json describes.

        source   name of the config in error messages

        Raises UnusableModel, naming the field, if a value is null, wrong or not supported.
        """
        architecture = (config.get("architectures") or self.architectures)[0]
        named = {key: config[alias] for alias, key in self.aliases.items() if alias in config}
        values = {**self.defaults, **named, **config}
        for key, default in self.defaults.items():
            if values[key] is None and default is not None and key not in self.nullable:
                raise UnusableModel(f"{source}: {key!r} is null")
        for key, supported in {**UNSUPPORTED, **self.only}.items():
            if (value := values.get(key)) not in supported:
                raise UnusableModel(f"{key} {value!r:.80} is not supported for {architecture}")
        return self.read(EncoderConfig(values, architecture, source))


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
    "chunk_size_feed_forward": (None, 0),
    "is_encoder_decoder": (None, False),
}
"""Keys of several classes that change the result, with the values that do not."""
