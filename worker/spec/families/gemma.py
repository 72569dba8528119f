"""Gemma 1 and 2, and the text model of Gemma 3.

Since Gemma 2, attention and MLP each have a norm before and a norm after them. Norms multiply by
1 + weight. Embeddings are multiplied by sqrt(hidden_size).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker.spec.families.family import DEFAULTS, FULL, SLIDING, ConfigFields, ModelFamily, every
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.rope_config import RopeConfig, layered_rope_config
from worker.spec.tensor_names import names_of


def read_gemma(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Gemma 1 describes. The activation "gelu" in published
    configs means its approximation by tanh, as in transformers."""
    bias = config.flag("attention_bias")
    activation = config.activation()
    mlp = config.mlp(activation="gelu_tanh" if activation == "gelu" else activation)
    attention = config.attention(config.rope(), qkv_bias=bias, output_bias=bias)
    return config.model(
        [LayerSpec(attention=attention, mlp=mlp)] * config.num_layers,
        config.rms_norm(offset=1.0),
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )


def read_gemma2(config: ConfigFields) -> ModelSpec:
    rope = config.rope()
    cap = _cap(config, "attn_logit_softcapping")
    return _model(config, every(2), {SLIDING: rope, FULL: rope}, soft_cap=cap)


def read_gemma3(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Gemma 3 describes. Its `attn_logit_softcapping` is not
    used, as in transformers. In all layers, the tokens of an image see each other."""
    pattern = every(config.integer("sliding_window_pattern"))
    ropes = {
        SLIDING: layered_rope_config(
            config, config.head_dim, SLIDING, theta="rope_local_base_freq", default_theta=1e4
        ),
        FULL: layered_rope_config(
            config, config.head_dim, FULL, theta="rope_theta", default_theta=1e6
        ),
    }
    return _model(config, pattern, ropes, qk_norm="head", sees_whole_runs=True)


def _model(
    config: ConfigFields,
    pattern: Callable[[int], str],
    ropes: dict[str, RopeConfig],
    **attention: Any,
) -> ModelSpec:
    window, bias = config.window, config.flag("attention_bias")
    mlp = config.mlp(activation=config.activation("hidden_activation"))
    layers = [
        LayerSpec(
            attention=config.attention(
                ropes[kind],
                scale=config.positive("query_pre_attn_scalar") ** -0.5,
                window=window if kind == SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
                **attention,
            ),
            mlp=mlp,
            order="both",
        )
        for kind in config.layer_types(pattern)
    ]
    return config.model(
        layers,
        config.rms_norm(offset=1.0),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logits_soft_cap=_cap(config, "final_logit_softcapping"),
    )


def _cap(config: ConfigFields, key: str) -> float | None:
    return None if config.get(key) is None else config.positive(key)


NAMES = {
    "post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
}
GEMMA_DEFAULTS: dict[str, Any] = {
    key: value for key, value in DEFAULTS.items() if key != "hidden_act"
} | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
NULLABLE = frozenset({"sliding_window", "final_logit_softcapping", "attn_logit_softcapping"})
FAMILIES = (
    ModelFamily(
        architecture="GemmaForCausalLM",
        model_type="gemma",
        defaults=DEFAULTS
        | {
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
        },
        read=read_gemma,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        defaults=GEMMA_DEFAULTS,
        nullable=NULLABLE,
        read=read_gemma2,
        names=lambda spec: names_of(NAMES),
    ),
    ModelFamily(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        defaults=GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": None,
        },
        nullable=NULLABLE,
        read=read_gemma3,
        names=lambda spec: names_of(NAMES),
    ),
)
