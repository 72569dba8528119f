"""Families with layer norms: GPT-2, GPT-NeoX (Pythia), StarCoder 2, StableLM 2 and Cohere 2."""

from __future__ import annotations

from typing import Any

from worker.spec.families.family import DEFAULTS, SLIDING, ConfigFields, ModelFamily, every
from worker.spec.model_spec import LayerOrder, LayerSpec, ModelSpec
from worker.spec.tensor_names import RowOrder, TensorNames, names_of, neighbour_orders


def read_gpt2(config: ConfigFields) -> ModelSpec:
    by_index = config.flag("scale_attn_by_inverse_layer_idx")
    scale = config.attention(None).scale if config.flag("scale_attn_weights") else 1.0
    hidden = config.integer("hidden_size")
    mlp = config.mlp(intermediate=config.integer("n_inner", 4 * hidden), is_gated=False, bias=True)
    layers = [
        LayerSpec(
            attention=config.attention(
                None,
                scale=scale / (index + 1) if by_index else scale,
                qkv_bias=True,
                output_bias=True,
            ),
            mlp=mlp,
        )
        for index in range(config.num_layers)
    ]
    positions = config.integer("max_position_embeddings")
    norm = config.layer_norm("layer_norm_epsilon")
    return config.model(layers, norm, learned_positions=positions)


def read_gpt_neox(config: ConfigFields) -> ModelSpec:
    bias = config.flag("attention_bias")
    share = config.positive("partial_rotary_factor")
    attention = config.attention(config.rope(partial=share), qkv_bias=bias, output_bias=bias)
    order: LayerOrder = "parallel" if config.flag("use_parallel_residual") else "pre"
    mlp = config.mlp(is_gated=False, bias=True)
    layer = LayerSpec(attention=attention, mlp=mlp, order=order)
    return config.model([layer] * config.num_layers, config.layer_norm("layer_norm_eps"))


def read_starcoder2(config: ConfigFields) -> ModelSpec:
    bias = config.flag("use_bias")
    attention = config.attention(
        config.rope(), window=config.window, qkv_bias=bias, output_bias=bias
    )
    layer = LayerSpec(attention=attention, mlp=config.mlp(is_gated=False, bias=bias))
    return config.model([layer] * config.num_layers, config.layer_norm("norm_epsilon"))


def read_stablelm(config: ConfigFields) -> ModelSpec:
    attention = config.attention(config.rope(partial=0.25), qkv_bias=config.flag("use_qkv_bias"))
    order: LayerOrder = "parallel_one_norm" if config.flag("use_parallel_residual") else "pre"
    layer = LayerSpec(attention=attention, mlp=config.mlp(), order=order)
    return config.model([layer] * config.num_layers, config.layer_norm("layer_norm_eps"))


def read_cohere2(config: ConfigFields) -> ModelSpec:
    """Return the model that a config of Cohere 2 describes. Only layers with a window have rotary
    embeddings."""
    bias, mlp, rope = config.flag("attention_bias"), config.mlp(), config.rope()
    window = config.integer("sliding_window")
    layers = [
        LayerSpec(
            attention=config.attention(
                rope if kind == SLIDING else None,
                window=window if kind == SLIDING else None,
                qkv_bias=bias,
                output_bias=bias,
            ),
            mlp=mlp,
            order="parallel_one_norm",
        )
        for kind in config.layer_types(every(config.integer("sliding_window_pattern")))
    ]
    norm = config.layer_norm("layer_norm_eps", bias=False)
    return config.model(layers, norm, logits_scale=config.number("logit_scale"))


def _without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in DEFAULTS.items() if key not in keys}


ROPE_KEYS = ("rope_theta", "rope_parameters")


def gpt2_names(spec: ModelSpec) -> TensorNames:
    layer = "transformer.h.{i}."
    return TensorNames(
        {
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
            "attention_norm": layer + "ln_1",
            "qkv": layer + "attn.c_attn",
            "output": layer + "attn.c_proj",
            "mlp_norm": layer + "ln_2",
            "up": layer + "mlp.c_fc",
            "down": layer + "mlp.c_proj",
        },
        transposed=frozenset({"qkv", "output", "up", "down"}),
        computed=("attn.bias", "attn.masked_bias"),
        prefix="transformer.",
    )


def gpt_neox_names(spec: ModelSpec) -> TensorNames:
    """Return the tensor names, and the row order of the fused projection: the file stores the
    query, key and value rows of the first head, then those of the next one, and so on."""
    layer, attention = "gpt_neox.layers.{i}.", spec.attentions[0]
    return TensorNames(
        {
            "embedding": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
            "attention_norm": layer + "input_layernorm",
            "qkv": layer + "attention.query_key_value",
            "output": layer + "attention.dense",
            "mlp_norm": layer + "post_attention_layernorm",
            "up": layer + "mlp.dense_h_to_4h",
            "down": layer + "mlp.dense_4h_to_h",
        },
        orders={"qkv": RowOrder((attention.num_heads, 3, attention.head_dim), (1, 0, 2))},
        computed=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    )


STARCODER2_NAMES = {
    "up": "model.layers.{i}.mlp.c_fc",
    "down": "model.layers.{i}.mlp.c_proj",
}
FAMILIES = (
    ModelFamily(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        defaults=_without("rms_norm_eps", "intermediate_size", "num_key_value_heads", *ROPE_KEYS)
        | {
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "n_inner": None,
            "hidden_act": "gelu_new",
            "max_position_embeddings": 1024,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        ignored={"intermediate_size": 1, "num_key_value_heads": None, "head_dim": None},
        aliases={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
        },
        read=read_gpt2,
        names=gpt2_names,
    ),
    ModelFamily(
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        defaults=_without("rms_norm_eps", "num_key_value_heads")
        | {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
        },
        ignored={"num_key_value_heads": None, "head_dim": None},
        aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        read=read_gpt_neox,
        names=gpt_neox_names,
    ),
    ModelFamily(
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        defaults=_without("rms_norm_eps")
        | {
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "sliding_window": None,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        read=read_starcoder2,
        names=lambda spec: names_of(STARCODER2_NAMES),
    ),
    ModelFamily(
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        defaults=_without("rms_norm_eps")
        | {
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "qk_layernorm": False,
        },
        ignored={"head_dim": None},
        only={"qk_layernorm": (False,)},
        read=read_stablelm,
        names=lambda spec: names_of(),
    ),
    ModelFamily(
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        defaults=_without("rms_norm_eps")
        | {
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
            "logit_scale": 0.0625,
        },
        ignored={"head_dim": None},
        read=read_cohere2,
        names=lambda spec: names_of(orders=neighbour_orders(spec)),
    ),
)
