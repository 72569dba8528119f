"""The families of OLMoE, OLMo 2, OLMo 3, OLMo Hybrid and EXAONE 4. All have norms of queries and
keys. Except in OLMoE, layers with attention have norms after attention and MLP, not before."""

from __future__ import annotations

from worker.spec.families.family import (
    DEFAULTS,
    FULL,
    LINEAR,
    SLIDING,
    ConfigFields,
    ModelFamily,
    every,
)
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.recurrent import GatedDeltaSpec
from worker.spec.rope_config import has_rope, layered_rope_config
from worker.spec.tensor_names import names_of

DELTA_EPS = 1e-5
"""Added to the mean square in the norms of gated delta nets; `rms_norm_eps` is that of the other
norms."""


def read_olmoe(config: ConfigFields) -> ModelSpec:
    bias = config.flag("attention_bias")
    attention = config.attention(
        config.rope(), qkv_bias=bias, output_bias=bias, qk_norm="projection"
    )
    experts = config.mlp(
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        renormalize=config.flag("norm_topk_prob"),
    )
    layer = LayerSpec(attention=attention, mlp=experts)
    return config.model([layer] * config.num_layers, config.rms_norm())


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


def read_olmo_hybrid(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of OLMo Hybrid describes. Gated delta nets have norms before
    the blocks. Without a `rope_theta`, attention has no rotary embeddings."""
    bias, mlp, last = config.flag("attention_bias"), config.mlp(), config.num_layers - 1
    attention = config.attention(
        config.rope() if has_rope(config) else None,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="projection",
    )

    def kind_of(index: int) -> str:
        return FULL if index % 4 == 3 or index == last < 3 else LINEAR

    layer_of = {
        FULL: LayerSpec(attention=attention, mlp=mlp, order="post"),
        LINEAR: LayerSpec(recurrent=_gated_delta(config), mlp=mlp),
    }
    kinds = config.layer_types(kind_of, known=(FULL, LINEAR))
    return config.model([layer_of[kind] for kind in kinds], config.rms_norm())


def _gated_delta(config: ConfigFields) -> GatedDeltaSpec:
    key_heads = config.integer("linear_num_key_heads", config.num_heads)
    width = config.integer("hidden_size") * 3 // 4
    key_dim = config.integer("linear_key_head_dim", width // max(key_heads, 1))
    return GatedDeltaSpec(
        num_key_heads=key_heads,
        num_value_heads=config.integer("linear_num_value_heads", config.num_heads),
        key_dim=key_dim,
        value_dim=config.integer("linear_value_head_dim", 2 * key_dim),
        kernel=config.integer("linear_conv_kernel_dim"),
        eps=DELTA_EPS,
        beta_scale=2.0 if config.flag("linear_allow_neg_eigval") else 1.0,
    )


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
HYBRID_NAMES = NAMES | {
    "delta_q": "model.layers.{i}.linear_attn.q_proj",
    "delta_k": "model.layers.{i}.linear_attn.k_proj",
    "delta_v": "model.layers.{i}.linear_attn.v_proj",
    "delta_z": "model.layers.{i}.linear_attn.g_proj",
    "delta_b": "model.layers.{i}.linear_attn.b_proj",
    "delta_a": "model.layers.{i}.linear_attn.a_proj",
    "delta_conv": "model.layers.{i}.linear_attn.{p}_conv1d",
    "delta_decay": "model.layers.{i}.linear_attn.A_log",
    "delta_bias": "model.layers.{i}.linear_attn.dt_bias",
    "delta_norm": "model.layers.{i}.linear_attn.o_norm",
    "delta_output": "model.layers.{i}.linear_attn.o_proj",
}
OTHER_NAMES = {
    "attention_norm": ("model.layers.{i}.attention_layer_norm",),
    "mlp_norm": ("model.layers.{i}.feedforward_layer_norm",),
    "post_attention_norm": ("model.layers.{i}.feedforward_layer_norm",),
    "delta_conv": (
        "model.layers.{i}.linear_attn.{t}_conv1d",
        "model.layers.{i}.linear_attn.conv1d",
    ),
}
"""Other names of some roles, which other versions of transformers write."""
OLMO_DEFAULTS = DEFAULTS | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}
FAMILIES = (
    ModelFamily(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        defaults=OLMO_DEFAULTS
        | {
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        aliases={"num_local_experts": "num_experts"},
        read=read_olmoe,
        names=lambda spec: names_of(),
    ),
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
        architecture="OlmoHybridForCausalLM",
        model_type="olmo_hybrid",
        defaults=DEFAULTS
        | {
            "vocab_size": 100352,
            "hidden_size": 3840,
            "num_attention_heads": 30,
            "max_position_embeddings": 65536,
            "attention_bias": False,
            "layer_types": None,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        only={"hidden_act": ("silu", "swish")},  # it is also that of the convolutions
        read=read_olmo_hybrid,
        names=lambda spec: names_of(
            HYBRID_NAMES,
            endings=dict.fromkeys(("delta_decay", "delta_bias"), ("", "")),
            unused=("mtp.",),
            others=OTHER_NAMES,
        ),
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
