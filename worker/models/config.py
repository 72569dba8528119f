"""Reads the config of a Llama or Mistral model from an untrusted config.json.

Every field that changes the computation is either supported here or refused by name, so a model
that loads computes what its authors intended. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields
from worker.models.rope_config import RopeConfig, rope_config

MAX_DIMENSION = 1 << 24


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """A config class of transformers: the keys that it reads, and their defaults."""

    architecture: str
    model_type: str
    #: Key -> the value that the class uses if config.json does not have the key.
    defaults: Mapping[str, Any]
    #: Keys of other classes that this class ignores -> the value that it behaves as if it had.
    ignored: Mapping[str, Any]

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with missing keys filled in and ignored keys replaced."""
        return {**self.defaults, **config, **self.ignored}

    def is_nullable(self, key: str) -> bool:
        """Return whether the key may be null, which then means the same as a missing key."""
        return self.defaults[key] is None


_DEFAULTS = {
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
_LLAMA_DEFAULTS = _DEFAULTS | {"attention_bias": False, "mlp_bias": False}
_MISTRAL_DEFAULTS = _DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
CONFIG_CLASSES = (
    ConfigClass("LlamaForCausalLM", "llama", _LLAMA_DEFAULTS, {"sliding_window": None}),
    ConfigClass(
        "MistralForCausalLM",
        "mistral",
        _MISTRAL_DEFAULTS,
        {"attention_bias": False, "mlp_bias": False},
    ),
)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The config of a Llama or Mistral model.

    `num_heads` query heads share `num_kv_heads` key/value heads. `head_dim` need not be
    hidden / num_heads.
    """

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Most tokens in a context. At most `window`, if that is set.
    context_tokens: int
    norm_eps: float
    rope: RopeConfig
    #: Number of tokens that attention reaches back, if it is less than the context that the model
    #: was trained for. Windows are not implemented: contexts within the window need none, so
    #: longer contexts are not served.
    window: int | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        sizes = [self.vocab_size, self.hidden, self.intermediate, self.num_layers, self.num_heads]
        sizes += [self.num_kv_heads, self.head_dim, self.context_tokens]
        if not all(0 < size <= MAX_DIMENSION for size in sizes):
            raise UnusableModel(
                f"a dimension of the model is not within 1..{MAX_DIMENSION}: {self}"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnusableModel(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise UnusableModel(f"rotary embeddings need an even head_dim, not {self.head_dim}")


def llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Return the config of the model that a parsed config.json describes.

    Missing keys get the defaults of transformers. A key may be null if transformers accepts null
    for it. Raises UnusableModel, naming the field.
    """
    kind = config_class(config)
    fields = Fields(kind.complete(config), "config.json")
    _refuse_the_unknown(fields)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = num_heads
    if not kind.is_nullable("num_key_value_heads") or fields.get("num_key_value_heads") is not None:
        num_kv_heads = fields.integer("num_key_value_heads")
    context_tokens, window = within_window(
        fields.integer("max_position_embeddings"),
        None if fields.get("sliding_window") is None else fields.integer("sliding_window"),
    )
    attention_bias = fields.flag("attention_bias")
    return LlamaConfig(
        architecture=kind.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", hidden // max(num_heads, 1)),
        context_tokens=context_tokens,
        window=window,
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope_config(fields),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def config_class(config: Mapping[str, Any]) -> ConfigClass:
    """Return the config class that a parsed config.json belongs to.

    Raises UnusableModel if the class is not supported, or if `architectures` and `model_type`
    name different classes.
    """
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures is None:
        return _with_model_type(model_type)
    for each in CONFIG_CLASSES:
        if architectures == [each.architecture]:
            if model_type in (None, each.model_type):
                return each
            raise UnusableModel(
                f"config.json contradicts itself: {each.architecture} has the model_type "
                f"{each.model_type!r}, not {model_type!r}",
                remedy="correct 'architectures' or 'model_type'",
            )
    known = ", ".join(each.architecture for each in CONFIG_CLASSES)
    raise UnusableModel(f"architecture {architectures!r:.80} is not supported; supported: {known}")


def _with_model_type(model_type: Any) -> ConfigClass:
    for each in CONFIG_CLASSES:
        if model_type == each.model_type:
            return each
    if model_type is None:
        raise UnusableModel("config.json has neither 'architectures' nor 'model_type'")
    known = ", ".join(each.model_type for each in CONFIG_CLASSES)
    raise UnusableModel(f"model_type {model_type!r:.80} is not supported; supported: {known}")


def within_window(context_tokens: int, window: int | None) -> tuple[int, int | None]:
    """Return the context length to serve, and the window if it limits the context, else None.

    Attention with a window equals plain attention for contexts that fit into the window.
    """
    if window is None or window >= context_tokens:
        return context_tokens, None
    if window < 1:
        raise UnusableModel(f"sliding_window is {window}; it must be above zero")
    return window, window


def _refuse_the_unknown(fields: Fields) -> None:
    """Raise UnusableModel if an unsupported field would change the answers."""
    activation = fields.text("hidden_act")
    if activation not in ("silu", "swish"):
        raise UnusableModel(f"hidden_act {activation!r} is not supported, only 'silu'")
    if fields.get("quantization_config") is not None:
        method = Fields(fields.get("quantization_config"), "quantization_config").get(
            "quant_method"
        )
        raise UnusableModel(f"safetensors quantised with {method!r} are not supported")
    if fields.get("per_layer_config") is not None:
        raise UnusableModel("per_layer_config is not supported")
