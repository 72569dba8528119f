"""The family of Apertus: MLPs without gates, whose activation xIELU has learned numbers."""

from __future__ import annotations

from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.tensor_names import XIELU_ROLES, names_of


def read_apertus(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Apertus describes. Its MLPs have no biases."""
    bias, own = config.flag("attention_bias"), config.text("hidden_act") == "xielu"
    attention = config.attention(
        config.rope(default=LLAMA3), qkv_bias=bias, output_bias=bias, qk_norm="head"
    )
    activation = "xielu" if own else config.activation()
    layer = LayerSpec(attention=attention, mlp=config.mlp(activation=activation, is_gated=False))
    return config.model([layer] * config.num_layers, config.rms_norm())


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Rope parameters of a config that has none."""
NAMES = {
    "attention_norm": "model.layers.{i}.attention_layernorm",
    "mlp_norm": "model.layers.{i}.feedforward_layernorm",
    **{
        role: f"model.layers.{{i}}.mlp.act_fn.{role.removeprefix('xielu_')}" for role in XIELU_ROLES
    },
}
FAMILIES = (
    ModelFamily(
        architecture="ApertusForCausalLM",
        model_type="apertus",
        defaults=DEFAULTS
        | {
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "hidden_act": "xielu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
            "attention_bias": False,
        },
        read=read_apertus,
        names=lambda spec: names_of(NAMES, endings=dict.fromkeys(XIELU_ROLES, ("", ""))),
    ),
)
