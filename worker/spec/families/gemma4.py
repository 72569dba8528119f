"""Gemma 4, dense and with experts.

Layers with a window and layers without one have heads of different sizes. The last layers may read
the keys and values of earlier ones. In small models, each layer has inputs of its own
(`LayerInputsSpec`). In models with experts, each layer has an MLP and experts beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.errors import UnusableModel
from worker.spec.facts import KVHeads
from worker.spec.families.family import DEFAULTS, FULL, SLIDING, ConfigFields, ModelFamily, every
from worker.spec.fields import Fields
from worker.spec.model_spec import LayerInputsSpec, LayerSpec, MlpSpec, ModelSpec
from worker.spec.rope_config import RopeConfig, layered_rope_config
from worker.spec.tensor_names import TensorNames, names_of

DEFAULT_ROPES: Mapping[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def read_gemma4(config: ConfigFields) -> ModelSpec:
    kinds = config.layer_types(every(6))
    kinds[-1] = FULL  # as in transformers
    first_shared = config.num_layers - config.integer("num_kv_shared_layers")
    activation, bias = config.activation("hidden_activation"), config.flag("attention_bias")
    sees_images = config.get("use_bidirectional_attention") == "vision"
    mlp, beside = config.mlp(activation=activation), _experts(config)
    wide = config.mlp(activation=activation, intermediate=2 * mlp.intermediate)
    ropes: dict[tuple[str, int], RopeConfig] = {}
    layers = []
    for index, kind in enumerate(kinds):
        is_shared, heads = index >= first_shared, _heads(config, index, kind)
        rope = ropes.setdefault((kind, heads.dim), _rope(config, kind, heads.dim))
        attention = config.attention(
            rope,
            num_kv_heads=heads.count,
            head_dim=heads.dim,
            scale=1.0,
            window=config.window if kind == SLIDING else None,
            sees_whole_runs=sees_images and kind == SLIDING,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head",
            value_norm=not is_shared,
            keys_as_values=config.flag("attention_k_eq_v") and kind == FULL and not is_shared,
            kv_of=kv_source(kinds, first_shared, kind) if is_shared else None,
        )
        layers.append(
            LayerSpec(
                attention=attention,
                mlp=wide if is_shared and config.flag("use_double_wide_mlp") else mlp,
                beside=beside,
                scaled=True,
                order="both",
            )
        )
    cap = config.get("final_logit_softcapping")
    return config.model(
        layers,
        config.rms_norm(),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logits_soft_cap=None if cap is None else config.positive("final_logit_softcapping"),
        layer_inputs=layer_inputs_of(config),
    )


def _rope(config: ConfigFields, kind: str, head_dim: int) -> RopeConfig:
    if config.get("rope_parameters") is None:
        config = ConfigFields({"rope_parameters": DEFAULT_ROPES}, config.architecture, "defaults")
    theta = DEFAULT_ROPES[kind]["rope_theta"]
    return layered_rope_config(config, head_dim, kind, theta="rope_theta", default_theta=theta)


def _heads(config: ConfigFields, index: int, kind: str) -> KVHeads:
    """Return the key/value heads of a layer. Older configs name those of the layers without a
    window at the top level, newer ones have an object for each layer that differs."""
    changes: Any = {}
    if config.get("per_layer_config") is not None:
        changes = _changes(config.get("per_layer_config"), index)
    elif kind == FULL:
        changes = {"head_dim": config.get("global_head_dim")}
        if config.flag("attention_k_eq_v"):
            changes["num_key_value_heads"] = config.get("num_global_key_value_heads")
    own = Fields(changes, f"per_layer_config of layer {index}")
    count = own.integer("num_key_value_heads", config.num_kv_heads)
    return KVHeads(count, own.integer("head_dim", config.head_dim))


def _changes(per_layer: Any, index: int) -> Any:
    """Return the object of a layer in `per_layer_config`. Its keys are numbers of layers, which may
    begin with zeros."""
    if not isinstance(per_layer, dict):
        raise UnusableModel(f"per_layer_config is {per_layer!r:.80}, not an object")
    found = [value for key, value in per_layer.items() if str(key).lstrip("0") == str(index or "")]
    return found[0] if found else {}


def kv_source(kinds: list[str], first_shared: int, kind: str) -> int:
    """Return the layer whose keys and values the shared layers of a kind read: the last one of that
    kind that has its own."""
    owners = [index for index in range(max(first_shared, 0)) if kinds[index] == kind]
    if not owners:
        raise UnusableModel(
            f"num_kv_shared_layers is {len(kinds) - first_shared}, but no layer of type {kind} "
            "before these has keys and values"
        )
    return owners[-1]


def _experts(config: ConfigFields) -> MlpSpec | None:
    if not config.flag("enable_moe_block"):
        return None
    return config.mlp(
        activation=config.activation("hidden_activation"),
        intermediate=config.integer("moe_intermediate_size"),
        num_experts=config.integer("num_experts"),
        top_k=config.integer("top_k_experts"),
        router_norm=True,
        expert_factors=True,
    )


def layer_inputs_of(config: ConfigFields) -> LayerInputsSpec | None:
    """Return the per-layer inputs of a model; None if it has none."""
    width = config.integer("hidden_size_per_layer_input", 0)
    if not width:
        return None
    rows, pad = config.integer("vocab_size_per_layer_input"), config.get("pad_token_id")
    return LayerInputsSpec(
        width=width,
        table_rows=rows,
        activation=config.activation("hidden_activation"),
        image_row=pad if isinstance(pad, int) and 0 <= pad < rows else 0,
        table_scale=width**0.5,
        projection_scale=max(config.integer("hidden_size"), 1) ** -0.5,
        sum_scale=2.0**-0.5,
    )


LAYER = "model.layers.{i}."
DENSE_NAMES = {
    "post_attention_norm": LAYER + "post_attention_layernorm",
    "mlp_norm": LAYER + "pre_feedforward_layernorm",
    "post_mlp_norm": LAYER + "post_feedforward_layernorm",
    "inputs_table": "model.embed_tokens_per_layer",
    "inputs_projection": "model.per_layer_model_projection",
    "inputs_norm": "model.per_layer_projection_norm",
    "input_gate": LAYER + "per_layer_input_gate",
    "input_projection": LAYER + "per_layer_projection",
    "input_norm": LAYER + "post_per_layer_input_norm",
}
"""The names that Gemma 3n has, too."""
NAMES = DENSE_NAMES | {
    "factor": LAYER + "layer_scalar",
    "beside_mlp_norm": LAYER + "post_feedforward_layernorm_1",
    "beside_norm": LAYER + "pre_feedforward_layernorm_2",
    "beside_post_norm": LAYER + "post_feedforward_layernorm_2",
    "router": LAYER + "router.proj",
    "router_norm": LAYER + "router.scale",
    "expert_factors": LAYER + "router.per_expert_scale",
    "expert_gate_up": LAYER + "experts.gate_up_proj",
    "expert_down": LAYER + "experts.down_proj",
}
WITHOUT_ENDING = ("factor", "router_norm", "expert_factors", "expert_gate_up", "expert_down")


def gemma4_names(spec: ModelSpec) -> TensorNames:
    """Return the tensor names of a model."""
    endings = dict.fromkeys(WITHOUT_ENDING, ("", ""))
    return names_of(NAMES, endings=endings, unused=unused_names(spec))


def unused_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return what the names of unused tensors start with, which files may have: those of keys and
    values in layers that read the keys and values of others."""
    shared = [
        index
        for index, layer in enumerate(spec.layers)
        if layer.attention is not None and layer.attention.kv_of is not None
    ]
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return tuple(f"model.layers.{i}.self_attn.{part}" for i in shared for part in parts)


FAMILIES = (
    ModelFamily(
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        defaults={
            key: value for key, value in DEFAULTS.items() if key not in ("hidden_act", "rope_theta")
        }
        | {
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "sliding_window": 512,
            "layer_types": None,
            "final_logit_softcapping": None,
            "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
            "per_layer_config": None,
        },
        read=read_gemma4,
        names=gemma4_names,
        # The tokens of an image see each other. Those of a text are causal.
        only={"use_bidirectional_attention": (None, False, "vision")},
    ),
)
