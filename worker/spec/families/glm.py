"""The families of GLM-4: GLM-4 9B and 32B, whose rotary embeddings turn neighbouring items of a
part of each head, and GLM-4.5 to 4.7, with experts."""

from __future__ import annotations

from typing import Any

from worker.errors import UnusableModel
from worker.spec import draft_head
from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from worker.spec.tensor_names import TensorNames, names_of, neighbour_orders

ROTATED = 0.5
"""The share of each head that is rotated, if a config does not say."""


def read_glm(config: ConfigFields) -> ModelSpec:
    layer = LayerSpec(attention=_attention(config), mlp=config.mlp())
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_glm4(config: ConfigFields) -> ModelSpec:
    layer = LayerSpec(attention=_attention(config), mlp=config.mlp(), order="both")
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_glm4_moe(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of GLM-4.5 to 4.7 describes. Raises UnusableModel, naming the
    field, if a value is not supported."""
    attention = _attention(config, qk_norm="head" if config.flag("use_qk_norm") else "none")
    dense, experts = config.mlp(), _experts(config)
    first = config.integer("first_k_dense_replace")
    layers = [
        LayerSpec(attention=attention, mlp=dense if index < first else experts)
        for index in range(config.num_layers)
    ]
    return config.model(layers, config.rms_norm())


def _attention(config: ConfigFields, **changes: Any) -> AttentionSpec:
    rope, bias = config.rope(partial=ROTATED), config.flag("attention_bias")
    return config.attention(rope, qkv_bias=bias, **changes)


def _experts(config: ConfigFields) -> MlpSpec:
    shared = config.integer("n_shared_experts")
    if shared < 1:
        raise UnusableModel(f"n_shared_experts is {shared}; it must be above zero")
    return config.grouped_experts(shared=config.integer("moe_intermediate_size") * shared)


FUSED = {"gate_up": "model.layers.{i}.mlp.gate_up_proj"}
FOUR_NORMS = {
    "post_attention_norm": "model.layers.{i}.post_self_attn_layernorm",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "post_mlp_norm": "model.layers.{i}.post_mlp_layernorm",
}
CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
SHARED_NAMES = {
    "shared_gate": "model.layers.{i}.mlp.shared_experts.gate_proj",
    "shared_up": "model.layers.{i}.mlp.shared_experts.up_proj",
    "shared_down": "model.layers.{i}.mlp.shared_experts.down_proj",
}


def with_choice_bias(
    spec: ModelSpec, *roles: dict[str, str], name: str = CHOICE_BIAS
) -> TensorNames:
    """Return the usual names, with `roles`, of a model whose experts have choice biases. Published
    files also have a head for drafts, whose layer follows the others.

    name   name of the choice biases in a layer
    """
    return names_of(
        *roles,
        {"choice_bias": f"model.layers.{{i}}.{name}"},
        endings={"choice_bias": ("", "")},
        unused=(f"model.layers.{spec.num_layers}.",),
    )


def _glm4_names(spec: ModelSpec) -> TensorNames:
    """Return the names of GLM-4 9B and 32B, and of the text part of GLM-OCR, whose files have a
    layer for drafts after the others."""
    unused = (f"model.layers.{spec.num_layers}.",)
    return names_of(FUSED, FOUR_NORMS, orders=neighbour_orders(spec), unused=unused)


GLM_DEFAULTS: dict[str, Any] = DEFAULTS | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "attention_bias": True,
}
FAMILIES = (
    ModelFamily(
        architecture="GlmForCausalLM",
        model_type="glm",
        defaults=GLM_DEFAULTS,
        nullable=frozenset({"num_key_value_heads", "head_dim"}),
        read=read_glm,
        names=lambda spec: names_of(FUSED, orders=neighbour_orders(spec)),
    ),
    ModelFamily(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        defaults=GLM_DEFAULTS,
        read=read_glm4,
        names=_glm4_names,
    ),
    ModelFamily(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        defaults=DEFAULTS
        | {
            "vocab_size": 151552,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        needed={"head_dim": 128},  # a head of 4096 / 96 numbers cannot be rotated by half
        read=read_glm4_moe,
        names=lambda spec: with_choice_bias(spec, SHARED_NAMES),
        draft_head=draft_head.after_layers,
    ),
)
