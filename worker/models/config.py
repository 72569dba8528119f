"""What a model of the Llama family is made of, read from a config.json that is not trusted.

Everything that changes the computation is either understood here or refused by name: a model that
loads computes what its makers meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.layers.rope import (
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)
from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
MAX_DIMENSION = 1 << 24


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """H query heads share H_kv key/value heads; head dim D need not be hidden / H."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    norm_eps: float
    rope: RopeConfig
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
    """From the parsed config.json. Raises UnusableModel, naming the field."""
    fields = Fields(config, "config.json")
    architecture = _architecture(fields)
    _refuse_the_unknown(fields)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    attention_bias = fields.flag("attention_bias")
    return LlamaConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden // max(num_heads, 1)),
        context_tokens=fields.integer("max_position_embeddings", 2048),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _architecture(fields: Fields) -> str:
    named = fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise UnusableModel(f"architecture {named} is not supported; known: {list(ARCHITECTURES)}")
    return str(named[0])


def _refuse_the_unknown(fields: Fields) -> None:
    """What would silently change the answers if it were ignored."""
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise UnusableModel(f"hidden_act {activation!r} is not supported, only 'silu'")
    if fields.get("quantization_config") is not None:
        method = Fields(fields.get("quantization_config"), "quantization_config").get(
            "quant_method"
        )
        raise UnusableModel(f"safetensors quantised with {method!r} are not supported")
    context_tokens = fields.integer("max_position_embeddings", 2048)
    window = fields.integer("sliding_window", context_tokens)
    if window < context_tokens:
        raise UnusableModel(f"sliding_window {window} is shorter than the context: not supported")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnusableModel("partial_rotary_factor is not supported")


def _rope(fields: Fields) -> RopeConfig:
    """Newer files write `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = Fields(given, "rope_parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1:
        raise UnusableModel(f"rope_theta {theta} is not above 1")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnusableModel("partial_rotary_factor is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    return RopeConfig(theta, _scaling(kind, rope, fields))


def _scaling(kind: Any, rope: Fields, fields: Fields) -> Scaling:
    match kind:
        case "default":
            return NoScaling()
        case "linear":
            return LinearScaling(rope.positive("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=rope.positive("factor"),
                low_freq_factor=rope.positive("low_freq_factor"),
                high_freq_factor=rope.positive("high_freq_factor"),
                original_context=rope.integer("original_max_position_embeddings"),
            )
        case "yarn":
            return _yarn(rope, fields)
    raise UnusableModel(f"rope_type {kind!r} is not supported")


def _yarn(rope: Fields, fields: Fields) -> YarnScaling:
    if rope.get("mscale") is not None or rope.get("mscale_all_dim") is not None:
        raise UnusableModel("yarn with mscale is not supported")
    factor = rope.positive("factor")
    context = fields.integer("max_position_embeddings", 2048)
    return YarnScaling(
        factor=factor,
        original_context=rope.integer("original_max_position_embeddings", context),
        attention_factor=rope.number("attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )
