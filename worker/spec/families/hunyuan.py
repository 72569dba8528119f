"""The families of Hunyuan, with and without experts. Queries and keys are normed after their
rotation."""

from __future__ import annotations

from worker.errors import UnusableModel
from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from worker.spec.tensor_names import names_of


def read_hunyuan_dense(config: ConfigFields) -> ModelSpec:
    layer = LayerSpec(attention=_attention(config), mlp=config.mlp())
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_hunyuan_moe(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Hunyuan with experts describes. The shared expert is as
    wide as the others."""
    experts, size = config.integer("num_experts"), config.integer("intermediate_size")
    if experts < 2:
        raise UnusableModel(f"num_experts is {experts}; it must be above one")
    attention, count = _attention(config), config.num_layers
    chosen = config.get("moe_topk")
    if not isinstance(chosen, list):
        chosen = [config.integer("moe_topk")] * count
    if len(chosen) != count or not all(type(each) is int for each in chosen):
        raise UnusableModel(
            f"moe_topk must be an integer, or a list of one for each of {count} layers"
        )
    layers = [
        LayerSpec(
            attention=attention,
            mlp=config.mlp(num_experts=experts, top_k=top_k, shared=size, scores_shared=False),
        )
        for top_k in chosen
    ]
    return config.model(layers, config.rms_norm())


def _attention(config: ConfigFields) -> AttentionSpec:
    """Return the attention of a config. In published configs, the type of the rotary embeddings is
    "dynamic", but with an `alpha` they do not depend on a text's length."""
    bias = config.flag("attention_bias")
    return config.attention(
        config.rope(has_alpha=True),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        norms_rotated=True,
    )


NAMES = {
    "q_norm": "model.layers.{i}.self_attn.query_layernorm",
    "k_norm": "model.layers.{i}.self_attn.key_layernorm",
}
EXPERT_NAMES = {
    "router": "model.layers.{i}.mlp.gate.wg",
    "shared_gate": "model.layers.{i}.mlp.shared_mlp.gate_proj",
    "shared_up": "model.layers.{i}.mlp.shared_mlp.up_proj",
    "shared_down": "model.layers.{i}.mlp.shared_mlp.down_proj",
}
HUNYUAN_DEFAULTS = DEFAULTS | {
    "vocab_size": 290943,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}
FAMILIES = (
    ModelFamily(
        architecture="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        defaults=HUNYUAN_DEFAULTS,
        read=read_hunyuan_dense,
        names=lambda spec: names_of(NAMES),
    ),
    ModelFamily(
        architecture="HunYuanMoEV1ForCausalLM",
        model_type="hunyuan_v1_moe",
        other_types=frozenset({"hunyuan"}),
        defaults=HUNYUAN_DEFAULTS | {"num_experts": 1, "moe_topk": 1},
        aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        needed={"num_experts": 64},  # one expert would have a router too
        read=read_hunyuan_moe,
        names=lambda spec: names_of(NAMES, EXPERT_NAMES),
    ),
)
