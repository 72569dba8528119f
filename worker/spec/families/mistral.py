"""The families of Mistral: Mistral, Ministral, Ministral 3 and Mixtral. Their layers may have
windows."""

from __future__ import annotations

from typing import Any

from worker.spec.families.family import DEFAULTS, FULL, SLIDING, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.rope_config import query_growth
from worker.spec.tensor_names import names_of


def read_mistral(config: ConfigFields) -> ModelSpec:
    attention = config.attention(config.rope(), window=config.window)
    layer = LayerSpec(attention=attention, mlp=config.mlp())
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_ministral(config: ConfigFields) -> ModelSpec:
    rope, window, mlp = config.rope(), config.window, config.mlp()
    kinds = config.layer_types(lambda index: FULL if window is None else SLIDING)
    layers = [
        LayerSpec(
            attention=config.attention(rope, window=window if kind == SLIDING else None), mlp=mlp
        )
        for kind in kinds
    ]
    return config.model(layers, config.rms_norm())


def read_ministral3(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Ministral 3 describes: its queries grow with their
    positions."""
    default = YARN | {"max_position_embeddings": config.integer("max_position_embeddings")}
    attention = config.attention(
        config.rope(default=default),
        window=config.window,
        growth=query_growth(config, default),
    )
    layer = LayerSpec(attention=attention, mlp=config.mlp())
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_mixtral(config: ConfigFields) -> ModelSpec:
    mlp = config.mlp(
        num_experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
    )
    attention = config.attention(config.rope(), window=config.window)
    return config.model(
        [LayerSpec(attention=attention, mlp=mlp)] * config.num_layers, config.rms_norm()
    )


MIXTRAL_NAMES = {
    "router": "model.layers.{i}.block_sparse_moe.gate",
    "expert_gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
    "expert_up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    "expert_down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
}
MISTRAL_DEFAULTS = DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
YARN: dict[str, Any] = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rope parameters of a Ministral 3 whose config has none."""
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
FAMILIES = (
    ModelFamily(
        architecture="MistralForCausalLM",
        model_type="mistral",
        defaults=MISTRAL_DEFAULTS,
        nullable=frozenset({"sliding_window"}),
        ignored=NO_BIASES,
        read=read_mistral,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="MinistralForCausalLM",
        model_type="ministral",
        defaults=MISTRAL_DEFAULTS | {"layer_types": None},
        nullable=frozenset({"sliding_window", "num_key_value_heads"}),
        ignored=NO_BIASES,
        read=read_ministral,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        defaults=MISTRAL_DEFAULTS
        | {
            "vocab_size": 131072,
            "num_hidden_layers": 34,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        nullable=frozenset({"num_key_value_heads", "head_dim"}),
        ignored=NO_BIASES,
        read=read_ministral3,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        defaults=MISTRAL_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        ignored=NO_BIASES,
        read=read_mixtral,
        names=lambda spec: names_of(MIXTRAL_NAMES),
    ),
)
