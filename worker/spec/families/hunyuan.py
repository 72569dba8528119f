"""The dense family of Hunyuan, whose queries and keys are normed after their rotation."""

from __future__ import annotations

from worker.spec.families.family import DEFAULTS, ConfigFields, ModelFamily
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.tensor_names import names_of


def read_hunyuan_dense(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Hunyuan describes. In published configs, the type of the
    rotary embeddings is "dynamic", but with an `alpha` they do not depend on a text's length."""
    bias = config.flag("attention_bias")
    attention = config.attention(
        config.rope(has_alpha=True),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        norms_rotated=True,
    )
    layer = LayerSpec(attention=attention, mlp=config.mlp())
    return config.model([layer] * config.num_layers, config.rms_norm())


NAMES = {
    "q_norm": "model.layers.{i}.self_attn.query_layernorm",
    "k_norm": "model.layers.{i}.self_attn.key_layernorm",
}
FAMILIES = (
    ModelFamily(
        architecture="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        defaults=DEFAULTS | {"vocab_size": 290943, "rms_norm_eps": 1e-5, "attention_bias": False},
        read=read_hunyuan_dense,
        names=lambda spec: names_of(NAMES),
    ),
)
