"""Configs of tiny models with latent attention, and options of each that are toggled."""

from __future__ import annotations

from typing import Any

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 128,
    "q_lora_rank": 224,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 48,
    "initializer_range": 0.1,
}
EXPERTS: dict[str, Any] = {
    **LATENT,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.707,
    "mscale_all_dim": 0.8,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": EXPERTS,
    "deepseek_v3": EXPERTS,
    "deepseek_v32": EXPERTS
    | {
        "index_topk": 8,
        "index_n_heads": 16,
        "index_head_dim": 64,
        # A token of padding has an embedding of zeros, and so equal scores for all tokens.
        "pad_token_id": None,
    },
    "glm4_moe_lite": {key: each for key, each in EXPERTS.items() if key != "first_k_dense_replace"},
    "mistral4": EXPERTS
    | {
        "first_k_dense_replace": 0,
        "rope_parameters": {
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 16,
        },
    },
    "minicpm3": LATENT | {"dim_model_base": 24},
    "youtu": LATENT,
    "kimi_linear": {
        **LATENT,
        "moe_intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_heads": 6,
        "linear_head_dim": 16,
        "initializer_range": 0.08,
    },
}
PLAIN_QUERIES = {"q_lora_rank": None}
"""The queries are made of the hidden states."""
OF_ALL: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True},
    "plain queries": PLAIN_QUERIES,
    "yarn rope": {"rope_parameters": YARN},
    "equal scales": {"rope_parameters": YARN | {"mscale": 0.8}},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "v_head_dim": 96},
}
HALVES = {"rope_interleave": False}
GROUPS = {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
SIGMOIDS: dict[str, dict[str, Any]] = {
    "groups of experts": GROUPS,
    "not renormalised": {"norm_topk_prob": False},
    "scaled": {"routed_scaling_factor": 2.5, "n_shared_experts": 1},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v2": {
        **OF_ALL,
        "tied": TIED,
        "groups of experts": {"topk_method": "group_limited_greedy", **GROUPS},
        "scaled": {"routed_scaling_factor": 2.5, "n_shared_experts": 1},
        "no dense layers": {"first_k_dense_replace": 0},
    },
    "deepseek_v3": {
        **OF_ALL,
        **SIGMOIDS,
        "tied": TIED,
        "halves": HALVES,
        "no dense layers": {"first_k_dense_replace": 0},
    },
    "deepseek_v32": {
        **{name: each for name, each in OF_ALL.items() if name != "plain queries"},
        **SIGMOIDS,
        # With 8 tokens, the two scores at the limit are equal but for rounding.
        "one head": OF_ALL["one head"] | {"index_topk": 7},
        "tied": TIED,
        "no dense layers": {"first_k_dense_replace": 0},
        "by layer": {"mlp_layer_types": ["sparse", "dense"] * 2},
        "fewer tokens": {"index_topk": 3},
        "all tokens": {"index_topk": 512},
        "index keys that are rotated as a whole": {"index_head_dim": 32, "index_n_heads": 20},
    },
    "glm4_moe_lite": {
        **OF_ALL,
        **SIGMOIDS,
        "halves": HALVES,
        "by layer": {"mlp_layer_types": ["sparse", "dense"] * 2},
    },
    "mistral4": {
        "biases": {"attention_bias": True},
        "plain queries": PLAIN_QUERIES,
        **SIGMOIDS,
        "halves": HALVES,
        "one dense layer": {"first_k_dense_replace": 1},
    },
    "minicpm3": {
        **OF_ALL,
        "untied": UNTIED,
        "no factors": {"scale_depth": None, "dim_model_base": None, "scale_emb": 1},
        "usual values": {"v_head_dim": None},
        "biases of MLPs": {"mlp_bias": True},
    },
    "youtu": {**OF_ALL, "untied": UNTIED, "halves": HALVES},
    "kimi_linear": {
        "tied": TIED,
        **SIGMOIDS,
        "ranks of queries": {"q_lora_rank": 224},
        "by layer": {"mlp_layer_types": ["sparse", "dense"] * 2},
        "usual layers": {"layer_types": None, "num_hidden_layers": 6, "mlp_layer_types": None},
        "long convolution": {"linear_conv_kernel_dim": 7},
        "no attention": {"layer_types": ["linear_attention"] * 4},
    },
}
