"""The families of Phi-3 and Phi-4-mini, and of Phi-3.5-MoE. Files of the first hold fused matrices,
and its rotary embeddings may rotate only part of each head."""

from __future__ import annotations

from dataclasses import replace

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.families.mistral import MIXTRAL_NAMES
from worker.spec.fields import Fields
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.rope_config import LongRopeScaling
from worker.spec.tensor_names import names_of


def read_phi3(config: ConfigFields) -> ModelSpec:
    _check_ropes(config)
    attention = config.attention(config.rope(partial=1.0), window=config.window)
    layer = LayerSpec(attention=attention, mlp=config.mlp())
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_phimoe(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Phi-3.5-MoE describes. Its long rope names the factor of
    cos and sin. The `router_jitter_noise` also decides which scores of experts are near another."""
    _check_ropes(config)
    rope, bias = config.rope(), config.flag("attention_bias")
    if isinstance(rope.scaling, LongRopeScaling):
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        factor = Fields(config.get(name), name).positive("short_mscale")
        rope = replace(rope, scaling=replace(rope.scaling, attention_factor=factor))
    experts = config.mlp(
        num_experts=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        router="sparsemixer",
        jitter=config.number("router_jitter_noise"),
    )
    attention = config.attention(rope, window=config.window, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention=attention, mlp=experts)
    return config.model(
        [layer] * config.num_layers,
        config.layer_norm("rms_norm_eps"),
        head_bias=config.flag("lm_head_bias"),
    )


def _check_ropes(config: ConfigFields) -> None:
    """Raise UnusableModel for scalings of rotary embeddings that the classes do not have."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict):
            raise UnusableModel(f"config.json: {key!r} is {rope!r:.80}, not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "longrope", "su"):
            raise UnusableModel(f"rope_type {kind!r} is not supported for {config.architecture}")


NAMES = {
    "qkv": "model.layers.{i}.self_attn.qkv_proj",
    "gate_up": "model.layers.{i}.mlp.gate_up_proj",
}
FAMILIES = (
    ModelFamily(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        defaults=DEFAULTS
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        read=read_phi3,
        names=lambda spec: names_of(NAMES),
    ),
    ModelFamily(
        architecture="PhimoeForCausalLM",
        published=("PhiMoEForCausalLM",),
        model_type="phimoe",
        defaults=DEFAULTS
        | {
            "vocab_size": 32064,
            "intermediate_size": 6400,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
            "router_jitter_noise": 0.01,
            "attention_bias": False,
            "lm_head_bias": False,
        },
        nullable=frozenset({"num_key_value_heads"}),
        only={"num_experts_per_tok": (2,)},  # the class always chooses two
        read=read_phimoe,
        names=lambda spec: names_of(MIXTRAL_NAMES),
    ),
)
