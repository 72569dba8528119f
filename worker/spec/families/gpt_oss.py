"""The family of gpt-oss: mixtures of experts with attention sinks, and windows in every second
layer.

Its files hold all experts of a layer in one tensor, in which gate and up alternate: as numbers,
[experts, in, out], or in the blocks of MXFP4, [experts, out, in].
"""

from __future__ import annotations

from worker.spec.families.family import DEFAULTS, SLIDING, ConfigFields, ModelFamily, every
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.tensor_names import RowOrder, TensorNames, names_of

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rope parameters for a config that has none."""


def read_gpt_oss(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of gpt-oss describes. `hidden_act` is not read, as in
    transformers."""
    rope, bias = config.rope(default=ROPE), config.flag("attention_bias")
    mlp = config.mlp(
        activation="clamped_swiglu",
        bias=True,
        num_experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        alpha=config.number("swiglu_alpha"),
        limit=config.positive("swiglu_limit"),
    )
    layers = [
        LayerSpec(
            attention=config.attention(
                rope,
                window=config.window if kind == SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
                sinks=True,
            ),
            mlp=mlp,
        )
        for kind in config.layer_types(every(2))
    ]
    return config.model(layers, config.rms_norm())


def gpt_oss_names(spec: ModelSpec) -> TensorNames:
    stacked = ("", "_bias")
    return names_of(
        {
            "router": "model.layers.{i}.mlp.router",
            "expert_gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
            "expert_down": "model.layers.{i}.mlp.experts.down_proj",
        },
        orders={"expert_gate_up": RowOrder((spec.mlps[0].intermediate, 2), (1, 0))},
        transposed=frozenset({"expert_gate_up", "expert_down"}),
        endings={"expert_gate_up": stacked, "expert_down": stacked, "sinks": ("", "")},
    )


FAMILIES = (
    ModelFamily(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        defaults=DEFAULTS
        | {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        nullable=frozenset({"sliding_window"}),
        aliases={"num_experts": "num_local_experts"},
        quantizations=frozenset({"mxfp4"}),
        read=read_gpt_oss,
        names=gpt_oss_names,
    ),
)
