"""The families of OLMo 2, OLMo 3 and EXAONE 4. They have norms after attention and MLP, not before,
and norms of queries and keys."""

from __future__ import annotations

from worker.spec.families.family import DEFAULTS, FULL, SLIDING, ConfigFields, ModelFamily, every
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.rope_config import layered_rope_config
from worker.spec.tensor_names import names_of


def read_olmo2(config: ConfigFields) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(
        config.rope(), qkv_bias=bias, output_bias=bias, qk_norm="projection"
    )
    layer = LayerSpec(attention=attention, mlp=config.mlp(), order="post")
    return config.model([layer] * config.num_layers, config.rms_norm())


def read_olmo3(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of OLMo 3 describes. In older configs, the `rope_theta` at the
    top level is only for layers with full attention."""
    bias, mlp = config.flag("attention_bias"), config.mlp()
    ropes = {
        kind: layered_rope_config(config, config.head_dim, kind, theta=theta, default_theta=5e5)
        for kind, theta in ((SLIDING, ""), (FULL, "rope_theta"))
    }
    layers = [
        LayerSpec(
            attention=config.attention(
                ropes[kind],
                window=config.window if kind == SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm="projection",
            ),
            mlp=mlp,
            order="post",
        )
        for kind in config.layer_types(every(4))
    ]
    return config.model(layers, config.rms_norm())


def read_exaone4(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of EXAONE 4 describes. If there are windows, layers with full
    attention have no rotary embeddings."""
    window, mlp, rope = config.window, config.mlp(), config.rope()

    def kind_of(index: int) -> str:
        # Published configs have "LLLG" here. It is not read beside their layer_types.
        return FULL if window is None else every(config.integer("sliding_window_pattern"))(index)

    layers = [
        LayerSpec(
            attention=config.attention(
                rope if window is None or kind == SLIDING else None,
                window=window if kind == SLIDING else None,
                qk_norm="head",
            ),
            mlp=mlp,
            order="post",
        )
        for kind in config.layer_types(kind_of)
    ]
    return config.model(layers, config.rms_norm())


NAMES = {
    "post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
}
OLMO_DEFAULTS = DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}
FAMILIES = (
    ModelFamily(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        defaults=OLMO_DEFAULTS,
        read=read_olmo2,
        names=lambda spec: names_of(NAMES),
    ),
    ModelFamily(
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        defaults=OLMO_DEFAULTS | {"rope_theta": None, "sliding_window": 4096, "layer_types": None},
        nullable=frozenset({"sliding_window"}),
        read=read_olmo3,
        names=lambda spec: names_of(NAMES),
    ),
    ModelFamily(
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        defaults=DEFAULTS
        | {
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
        },
        nullable=frozenset({"sliding_window", "sliding_window_pattern", "num_key_value_heads"}),
        read=read_exaone4,
        names=lambda spec: names_of(NAMES),
    ),
)
