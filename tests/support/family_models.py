"""Tiny random models of every model family, with options of its config toggled."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support import latent_models
from tests.support.checkpoints import VOCAB
from worker.spec.families.registry import FAMILIES

MODEL_TYPES = [family.model_type for family in FAMILIES]
HYBRIDS = [
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *(
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "falcon_h1",
        "olmo_hybrid",
        "jamba",
        "bamba",
        "kimi_linear",
        "recurrent_gemma",
    ),
]
"""Model types some of whose layers are recurrent."""
WITHOUT_ATTENTION = ["mamba", "falcon_mamba", "mamba2"]
"""Model types all of whose layers are recurrent."""
RECURRENT = [*HYBRIDS, *WITHOUT_ATTENTION]
UNDIVIDED = {
    **dict.fromkeys(RECURRENT, "has recurrent layers"),
    **dict.fromkeys(
        (
            *("qwen2_moe", "granitemoeshared", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"),
            "llama4_text",
        ),
        "shared experts",
    ),
    **dict.fromkeys({*latent_models.VARIANTS} - {*RECURRENT}, "has latent attention"),
    "gemma3n_text": "several streams",
    "gemma4_text": "share keys",
}
"""Model types whose weights ranks of a tensor parallel group cannot share -> words of the
reason."""
FULL, SLIDING, MAMBA = "full_attention", "sliding_attention", "linear_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""No two of these sizes are equal, so most transposed or misplaced tensors have the wrong shape."""
DELTA_SIZES: dict[str, Any] = {
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
GRANITE_MOE: dict[str, Any] = {
    "embedding_multiplier": 2.5,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "intermediate_size": 64,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
HYBRID: dict[str, Any] = {
    "initializer_range": 0.04,  # with larger weights, transformers differs from itself
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    **DELTA_SIZES,
}
ERNIE_MOE: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "moe_k": 2,
    "moe_num_experts": 5,
    "moe_num_shared_experts": 2,
}
GROWING: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.3,
}
"""Rope parameters of a Ministral 3 whose queries grow every 16 tokens."""
GLM_MOE: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "n_routed_experts": 6,
    "first_k_dense_replace": 1,
}
MAMBA_SIZES: dict[str, Any] = {
    "state_size": 20,
    "time_step_rank": 12,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,  # tied, they would make random models repeat one token
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    **latent_models.OWN_SIZES,
    "gemma": {"head_dim": 32, "initializer_range": 0.05},
    "arcee": {"head_dim": 32},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "glm4_moe": GLM_MOE,
    "ernie4_5": {"head_dim": 32},
    "ernie4_5_moe": ERNIE_MOE,
    "minimax_m2": {
        "head_dim": 32,
        "intermediate_size": 48,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
    "olmoe": {"intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2},
    "llama": {"head_dim": 32},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "mistral": {"head_dim": 32},
    "ministral": {"head_dim": 32},
    "ministral3": {"head_dim": 32, "rope_parameters": GROWING},
    "hunyuan_v1_dense": {"head_dim": 32},
    "apertus": {"head_dim": 32},
    "hunyuan_v1_moe": {
        "head_dim": 32,
        "intermediate_size": 64,
        "num_experts": 5,
        "moe_topk": 2,
    },
    "llama4_text": {
        "head_dim": 32,
        "intermediate_size": 64,
        "intermediate_size_mlp": 160,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 16,
        "floor_scale": 8,
        "attn_scale": 0.3,
    },
    "phimoe": {"num_local_experts": 5, "intermediate_size": 64, "router_jitter_noise": 0.1},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 40},
    "gemma3_text": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 40},
    "gemma3n_text": {
        "head_dim": 32,
        "sliding_window": 24,
        "layer_types": [SLIDING, FULL] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB - 60,
        "intermediate_size": [160, 128, 96, 160, 192, 64],
        "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.8, 0.3, 0.9],
        "laurel_rank": 64,
        "initializer_range": 0.05,
    },
    "gemma4_text": {
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 24,
        "layer_types": [SLIDING, FULL] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "initializer_range": 0.05,
    },
    "seed_oss": {"head_dim": 32},
    "granite": {
        "embedding_multiplier": 2.5,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE | {"shared_intermediate_size": 144},
    "granitemoehybrid": {
        "embedding_multiplier": 2.5,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "shared_intermediate_size": 144,
        "intermediate_size": 48,
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 12,
        "mamba_d_state": 20,
    },
    "qwen3_next": {
        **HYBRID,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {
        **HYBRID,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 64},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "nemotron_h": {
        "head_dim": 32,
        "layers_block_type": [MAMBA, "mlp", FULL, "moe", MAMBA, "moe"],
        "num_hidden_layers": 6,
        "mamba_num_heads": 12,
        "mamba_head_dim": 12,
        "ssm_state_size": 20,
        "n_groups": 2,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 80,
        "initializer_range": 0.08,
    },
    "falcon_h1": {
        "mamba_d_ssm": 144,
        "mamba_n_heads": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 20,
        "embedding_multiplier": 2.5,
        "lm_head_multiplier": 3.0,
        "mlp_multipliers": [0.7, 0.4],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.9, 0.7, 1.1, 0.8, 0.6],
        "initializer_range": 0.08,
    },
    "olmo_hybrid": {**DELTA_SIZES, "initializer_range": 0.08},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 12,
        "mamba_d_state": 20,
        "initializer_range": 0.08,
    },
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mamba_d_state": 20,
        "mamba_dt_rank": 12,
        "initializer_range": 0.08,
    },
    "recurrent_gemma": {
        "intermediate_size": 320,
        "lru_width": 144,
        "attention_window_size": 50,
        "w_init_variance_scale": 0.25,
        "final_w_init_variance_scale": 12.0,
        "tie_word_embeddings": False,
    },
    "mamba": MAMBA_SIZES | {"initializer_range": 0.12},
    "falcon_mamba": MAMBA_SIZES,
    "mamba2": {
        "num_heads": 8,
        "head_dim": 24,
        "n_groups": 2,
        "state_size": 12,
        "chunk_size": 16,
        "initializer_range": 0.08,
    },
    "gpt2": {"n_inner": 160},
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 24,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
}
WITH_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
"""The keys of a Gemma 4 with experts."""
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 128,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear rope": {"rope_parameters": LINEAR},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
}
WINDOW = {"sliding_window": 24}
BIASED = {"attention_bias": True}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
OF_MAMBA: dict[str, dict[str, Any]] = {
    "tied": TIED,
    "biases": {"use_bias": True, "use_conv_bias": False},
    "usual rank": {"time_step_rank": "auto"},
    "long convolution": {"conv_kernel": 6},
    "short convolution": {"conv_kernel": 2},
    "one state": {"state_size": 1, "mixer_rms_eps": 0.1},
    "as wide as the hidden states": {"intermediate_size": 96},
    "residuals in the dtype": {"residual_in_fp32": False},
    "large eps": {"layer_norm_epsilon": 0.1},
}

DENSE_GRANITE: dict[str, Any] = {
    "layer_types": ["full_attention"] * 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
    "intermediate_size": 160,
    "position_embedding_type": "rope",
}
"""The keys of a dense Granite 4, which is computed like a Granite 3."""

DENSE_NEMOTRON = {"layers_block_type": [MAMBA, "mlp", MAMBA, FULL, "mlp", MAMBA]}
SPARSE_NEMOTRON = {"layers_block_type": [MAMBA, "moe", FULL, "moe", MAMBA, "moe"]}
"""A Nemotron-H whose layers without a token mixer are MLPs, or mixtures of experts."""

WHOLE_HEADS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
}
STRETCHED = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
}
"""The rotary embeddings of Hunyuan, whose base is larger by a power of alpha."""
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    **latent_models.VARIANTS,
    "apertus": {
        "tied": TIED,
        "biases": BIASED,
        "silu": {"hidden_act": "silu"},
        "usual rope": {"rope_parameters": None},
        **ROPES,
    },
    "gemma": {"untied": UNTIED, "biases": BIASED, "one key/value head": {"num_key_value_heads": 1}},
    "arcee": {"tied": TIED, "biases": BIASED | {"mlp_bias": True}, **ROPES},
    "nemotron": {
        "tied": TIED,
        "biases": BIASED | {"mlp_bias": True},
        "whole heads": WHOLE_HEADS,
        "wide heads": {"head_dim": 32},
    },
    "glm": {"tied": TIED, "no biases": {"attention_bias": False}, "whole heads": WHOLE_HEADS},
    "glm4": {"tied": TIED, "no biases": {"attention_bias": False}, "whole heads": WHOLE_HEADS},
    "glm4_moe": {
        "tied": TIED,
        "biases": BIASED,
        "norms": {"use_qk_norm": True, "head_dim": 32},
        "groups of experts": {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3},
        "not renormalised": {"norm_topk_prob": False},
        "scaled": {"routed_scaling_factor": 2.5, "n_shared_experts": 2},
        "no dense layers": {"first_k_dense_replace": 0},
    },
    "ernie4_5": {"untied": UNTIED, "biases": {"use_bias": True}, **ROPES},
    "ernie4_5_moe": {
        "untied": UNTIED,
        "every second": {"moe_layer_interval": 2},
        "some layers": {"moe_layer_start_index": 0, "moe_layer_end_index": 2},
        "nothing shared": {"moe_num_shared_experts": 0},
        "one expert": {"moe_k": 1},
    },
    "minimax_m2": {
        "tied": TIED,
        "whole heads": WHOLE_HEADS,
        "one expert": {"num_experts_per_tok": 1},
    },
    "olmoe": {
        "tied": TIED,
        "biases": BIASED,
        "renormalised": {"norm_topk_prob": True},
        **ROPES,
    },
    "llama": {
        "tied": TIED,
        "biases": BIASED | {"mlp_bias": True},
        "narrow heads": {"head_dim": 16},
        "one key/value head": {"num_key_value_heads": 1},
        "as many key/value heads": {"num_key_value_heads": 6},
        **ROPES,
    },
    "granite": {"tied": TIED, "biases": BIASED | {"mlp_bias": True}, **ROPES},
    "granitemoe": {"tied": TIED, "biases": BIASED, **ROPES},
    "granitemoeshared": {
        "tied": TIED,
        "biases": BIASED,
        "no shared": {"shared_intermediate_size": 0},
    },
    "granitemoehybrid": {
        "tied": TIED,
        "biases": BIASED,
        "biases of Mamba": {"mamba_proj_bias": True, "mamba_conv_bias": False},
        "groups": {"mamba_n_groups": 3},
        "limits": {"time_step_limit": [0.4, 1.1]},
        "rope": {"position_embedding_type": "rope"},
        "dense": {"num_local_experts": 0},
        "only attention": DENSE_GRANITE,
        "no attention": {"layer_types": [MAMBA] * 4},
        "wide heads": DENSE_GRANITE | {"head_dim": 32, "intermediate_size": 48},
        "no rope": DENSE_GRANITE | {"position_embedding_type": "nope"},
    },
    "seed_oss": {
        "tied": TIED,
        "no biases": {"attention_bias": False},
        "all biases": {"attention_out_bias": True, "mlp_bias": True},
        **ROPES,
    },
    "smollm3": {
        "untied": UNTIED,
        "windows": {"use_sliding_window": True, **WINDOW},
        "all rotated": {"no_rope_layers": [1, 1, 1, 1]},
        "none rotated": {"no_rope_layers": [0, 0, 0, 0]},
        "every second": {"no_rope_layer_interval": 2},
        **ROPES,
    },
    "mistral": {"window": WINDOW, "no window": {"sliding_window": None}, "tied": TIED, **ROPES},
    "ministral": {
        "window": WINDOW,
        "some windows": WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        **ROPES,
    },
    "ministral3": {
        "window": WINDOW,
        "tied": TIED,
        "plain rope": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 7,
            }
        },
    },
    "hunyuan_v1_dense": {"tied": TIED, "biases": BIASED, "stretched base": STRETCHED, **ROPES},
    "hunyuan_v1_moe": {
        "tied": TIED,
        "biases": BIASED,
        "stretched base": STRETCHED,
        "one expert": {"moe_topk": 1},
        "by layer": {"moe_topk": [1, 3, 2, 5]},
        **ROPES,
    },
    "llama4_text": {
        "tied": TIED,
        "biases": BIASED,
        "no chunks": {"attention_chunk_size": None},
        "long chunks": {"attention_chunk_size": 32},
        "no norms": {"use_qk_norm": False},
        "no growth": {"attn_temperature_tuning": False},
        "all rotated": {"no_rope_layers": [1, 1, 1, 1]},
        "none rotated": {"no_rope_layers": [0, 0, 0, 0], "moe_layers": []},
        "every second": {"no_rope_layer_interval": 2},
        "experts everywhere": {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1},
        "some experts": {"moe_layers": [0, 1]},
        "dense": {"moe_layers": []},
        "chunks without rope": {
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [0, 1, 1, 0],
        },
        "no ramp": {"rope_parameters": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}},
        **ROPES,
    },
    "phimoe": {
        "window": WINDOW,
        "tied": TIED,
        "biases": BIASED | {"lm_head_bias": True},
        "no jitter": {"router_jitter_noise": 0.0},
        "much jitter": {"router_jitter_noise": 0.5},
        "long rope": {"rope_parameters": LONG | {"short_mscale": 1.2, "long_mscale": 1.3}},
    },
    "mixtral": {"window": WINDOW, "one expert": {"num_experts_per_tok": 1}, "tied": TIED},
    "qwen2": {
        "tied": TIED,
        "windows": {"use_sliding_window": True, "max_window_layers": 2, **WINDOW},
        **ROPES,
    },
    "qwen2_moe": {
        "renormalised": {"norm_topk_prob": True},
        "dense layers": {"mlp_only_layers": [1]},
        "windows": {"use_sliding_window": True, "max_window_layers": 3, **WINDOW},
        "no biases": {"qkv_bias": False},
        "tied": TIED,
    },
    "qwen3": {
        "tied": TIED,
        "biases": BIASED,
        "windows": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
        **ROPES,
    },
    "qwen3_moe": {
        "renormalised": {"norm_topk_prob": True},
        "dense layers": {"mlp_only_layers": [1], "decoder_sparse_step": 1},
        "every second layer": {"decoder_sparse_step": 2},
        "window": {"use_sliding_window": True, **WINDOW},
        "biases": BIASED,
    },
    "qwen3_next": {
        "not renormalised": {"norm_topk_prob": False},
        "dense layers": {"mlp_only_layers": [1]},
        "every second": {"layer_types": ["full_attention", "linear_attention"] * 2},
        "biases": BIASED,
        "whole heads": {"partial_rotary_factor": 1.0},
    },
    "qwen3_5_text": {
        "tied": TIED,
        "every second": {"layer_types": ["linear_attention", "full_attention"] * 2},
        "long convolution": {"linear_conv_kernel_dim": 7},
        "one head for each": {"linear_num_key_heads": 6},
        "biases": BIASED,
    },
    "qwen3_5_moe_text": {"tied": TIED, "one expert": {"num_experts_per_tok": 1}},
    "nemotron_h": {
        "dense": DENSE_NEMOTRON,
        "experts": SPARSE_NEMOTRON,
        "no state": {"layers_block_type": [FULL, "mlp"] * 3},
        "no attention": {"layers_block_type": [MAMBA, "moe"] * 3},
        "attention first": {"layers_block_type": [FULL, MAMBA, "moe"] * 2},
        "MLP first": {"layers_block_type": ["mlp", "moe", MAMBA, "mlp", FULL, FULL]},
        "biases": {"use_bias": True},
        "no bias of convolutions": DENSE_NEMOTRON | {"use_conv_bias": False},
        "biases of MLPs": {"layers_block_type": [MAMBA, "mlp", FULL] * 2, "mlp_bias": True},
        "many groups": SPARSE_NEMOTRON | {"n_groups": 6},
        "limits": {"time_step_min": 0.6, "time_step_limit": [0.6, float("inf")]},
        "silu": {"mlp_hidden_act": "silu"},
        "latent experts": SPARSE_NEMOTRON | {"moe_latent_size": 64},
        "groups of experts": SPARSE_NEMOTRON
        | {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3},
        "not renormalised": SPARSE_NEMOTRON | {"norm_topk_prob": False},
        "scaled": SPARSE_NEMOTRON | {"routed_scaling_factor": 2.5},
        "long convolution": DENSE_NEMOTRON | {"conv_kernel": 6},
    },
    "falcon_h1": {
        "tied": TIED,
        "biases of MLPs": {"mlp_bias": True},
        "biases of attention": BIASED | {"attention_in_multiplier": 1.0},
        "biases of Mamba": {
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "ssm_in_multiplier": 1.0,
            "mamba_conv_bias": False,
        },
        "norm before the gate": {"mamba_rms_norm": True},
        "norm after the gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        "limits": {"time_step_limit": [0.4, 1.1]},
        "as many key/value heads": {"num_key_value_heads": 6},
        "wide heads": {"head_dim": 32},
        "by expansion": {"mamba_d_ssm": None},
        **ROPES,
    },
    "bamba": {
        "tied": TIED,
        "biases": BIASED | {"mlp_bias": True},
        "biases of Mamba": {"mamba_proj_bias": True, "mamba_conv_bias": False},
        "groups": {"mamba_n_groups": 3},
        "limits": {"time_step_limit": [0.4, 1.1]},
        "more attention": {"attn_layer_indices": [0, 3]},
        "wide heads": {"head_dim": 32},
    },
    "jamba": {
        "tied": TIED,
        "biases of Mamba": {"mamba_proj_bias": True, "mamba_conv_bias": False},
        "usual rank": {"mamba_dt_rank": "auto"},
        "long convolution": {"mamba_d_conv": 6},
        "short convolution": {"mamba_d_conv": 2},
        # A norm of one number magnifies rounding, less so with a large eps.
        "one state": {"mamba_d_state": 1, "rms_norm_eps": 1e-4},
        "as wide as the hidden states": {"mamba_expand": 1},
        "dense": {"num_experts": 1, "num_experts_per_tok": 1},
        "experts everywhere": {"expert_layer_period": 1, "expert_layer_offset": 0},
        "one expert": {"num_experts_per_tok": 1},
        "attention first": {"attn_layer_period": 2, "attn_layer_offset": 0},
        "only attention": {"attn_layer_period": 1, "attn_layer_offset": 0},
        "no attention": {"attn_layer_period": 8, "attn_layer_offset": 7},
        "as many key/value heads": {"num_key_value_heads": 6},
    },
    "recurrent_gemma": {
        "tied": TIED,
        "biases": BIASED,
        "as wide as the hidden states": {"lru_width": None},
        "narrow": {"lru_width": 48},
        "long convolution": {"conv1d_width": 6},
        "short convolution": {"conv1d_width": 2},
        "silu": {"hidden_activation": "silu"},
        "gelu": {"hidden_activation": "gelu"},
        "squared relu": {"hidden_activation": "relu2"},
        "small cap": {"logits_soft_cap": 2.0},
        "window": {"attention_window_size": 24},
        "long window": {"attention_window_size": 2048},
        "window of one": {"attention_window_size": 1},
        "attention first": {"block_types": ["attention", "recurrent"]},
        "only attention": {"block_types": ["attention"]},
        "no attention": {"block_types": ["recurrent"]},
        "one key/value head": {"num_key_value_heads": 1},
        "as many key/value heads": {"num_key_value_heads": None},
        "wide heads": {"head_dim": 32},
        "usual rope": {"rope_parameters": None},
        "whole heads": WHOLE_HEADS,
        "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "large eps": {"rms_norm_eps": 0.1},
    },
    "mamba": OF_MAMBA | {"one state": {"state_size": 1}},
    "falcon_mamba": OF_MAMBA | {"large eps": {"mixer_rms_eps": 0.1}},
    "mamba2": {
        "tied": TIED,
        "biases": {"use_bias": True, "use_conv_bias": False},
        "one group": {"n_groups": 1},
        "a group for each head": {"n_groups": 8},
        "limits of dt": {"time_step_limit": (0.3, 0.6)},
        "long convolution": {"conv_kernel": 6},
        "short convolution": {"conv_kernel": 2},
        "one state": {"state_size": 1},
        "as wide as the hidden states": {"expand": 1},
        "residuals in the dtype": {"residual_in_fp32": False},
        "large eps": {"layer_norm_epsilon": 0.1},
    },
    "lfm2": {
        "untied": UNTIED,
        "biases": {"conv_bias": True},
        "long convolution": {"conv_L_cache": 6},
        "short convolution": {"conv_L_cache": 2},
        "wide": {"block_ffn_dim_multiplier": 1.7},
        "not adjusted": {"block_auto_adjust_ff_dim": False},
        "by index": {"layer_types": None, "full_attn_idxs": [0, 3]},
        "one with attention": {"layer_types": ["conv"] * 3 + ["full_attention"]},
        "no convolutions": {"layer_types": ["full_attention"] * 4},
        "as many key/value heads": {"num_key_value_heads": 6},
        **ROPES,
    },
    "lfm2_moe": {
        "untied": UNTIED,
        "biases": {"conv_bias": True},
        "no choice biases": {"use_expert_bias": False},
        "not renormalised": {"norm_topk_prob": False},
        "scaled": {"routed_scaling_factor": 2.5},
        "no dense layers": {"num_dense_layers": 0},
        "only dense layers": {"num_dense_layers": 4},
        "one expert": {"num_experts_per_tok": 1},
        "all experts": {"num_experts_per_tok": 5},
        "long convolution": {"conv_L_cache": 6},
    },
    "gemma2": {
        "untied": UNTIED,
        "biases": BIASED,
        "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "small caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        "all full": {"layer_types": ["full_attention"] * 4},
    },
    "gemma3_text": {
        "untied": UNTIED,
        "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        "every second": {"sliding_window_pattern": 2},
        "scaled": {
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    },
    "gemma3n_text": {
        "untied": UNTIED,
        "biases": BIASED,
        "small cap": {"final_logit_softcapping": 1.5},
        "nothing shared": {"num_kv_shared_layers": 0},
        "nothing sparse": {"activation_sparsity_pattern": None},
        "one width": {"intermediate_size": 160},
        "two streams": {"altup_num_inputs": 2},
        "another active stream": {"altup_num_inputs": 5, "altup_active_idx": 3},
        "not scaled": {"altup_correct_scale": False},
        "narrow branch": {"laurel_rank": 20},
        "a row for each token": {"vocab_size_per_layer_input": VOCAB},
        "all full": {"layer_types": [FULL] * 6},
        "scaled rope": {
            "rope_parameters": {
                FULL: LINEAR | {"rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    },
    "gemma4_text": {
        "untied": UNTIED,
        "biases": BIASED,
        "cap": {"final_logit_softcapping": 1.5},
        "no inputs": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        "nothing shared": {"num_kv_shared_layers": 0},
        "double width": {"use_double_wide_mlp": True},
        "equal heads": {"global_head_dim": 32},
        "keys as values": {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
        },
        "experts": {**WITH_EXPERTS, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        "everything": {**WITH_EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
        "all full": {"layer_types": [FULL] * 6},
        "scaled": {
            "rope_parameters": {
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 5000.0,
                    "factor": 2.0,
                },
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    },
    "phi3": {
        "window": WINDOW,
        "tied": TIED,
        "partial": {"partial_rotary_factor": 0.5},
        "long rope": {"rope_parameters": LONG, "original_max_position_embeddings": 128},
    },
    "olmo2": {"tied": TIED, "biases": BIASED, **ROPES},
    "olmo3": {"windows": WINDOW, "biases": BIASED | WINDOW},
    "olmo_hybrid": {
        "tied": TIED,
        "biases": BIASED,
        "positive eigenvalues": {"linear_allow_neg_eigval": False},
        "no rope": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        "every second": {"layer_types": ["full_attention", "linear_attention"] * 2},
        "three layers": {"num_hidden_layers": 3},
        "usual heads": dict.fromkeys(DELTA_SIZES),
        "long convolution": {"linear_conv_kernel_dim": 7},
        "as many key/value heads": {"num_key_value_heads": 6},
        **ROPES,
    },
    "exaone4": {
        "windows": WINDOW,
        "no windows": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        "every second": WINDOW | {"sliding_window_pattern": 2},
        **ROPES,
    },
    "gpt2": {
        "untied": UNTIED,
        "by layer": {"scale_attn_by_inverse_layer_idx": True},
        "unscaled": {"scale_attn_weights": False},
        "gelu": {"activation_function": "gelu"},
        "no inner": {"n_inner": None},
    },
    "gpt_neox": {
        "one after the other": {"use_parallel_residual": False},
        "no biases": {"attention_bias": False},
        "whole heads": {"rotary_pct": 1.0},
        "tied": TIED,
    },
    "starcoder2": {"window": WINDOW, "no biases": {"use_bias": False}, "untied": UNTIED},
    "stablelm": {
        "biases": {"use_qkv_bias": True},
        "parallel": {"use_parallel_residual": True},
        "half": {"partial_rotary_factor": 0.5},
        "tied": TIED,
    },
    "cohere2": {
        "windows": WINDOW,
        "every second": WINDOW | {"sliding_window_pattern": 2},
        "biases": BIASED | WINDOW,
        "untied": UNTIED,
        "scaled": {"logit_scale": 2.0},
    },
    "gpt_oss": {
        "no biases": {"attention_bias": False},
        "all full": {"layer_types": ["full_attention"] * 4},
        "clamped": {"swiglu_limit": 0.5, "swiglu_alpha": 3.0},
        "one expert": {"num_experts_per_tok": 1},
        "tied": TIED,
        **ROPES,
    },
}
CASES = [
    (model_type, variant, changes)
    for model_type in MODEL_TYPES
    for variant, changes in {"plain": {}, **VARIANTS.get(model_type, {})}.items()
]


def random_model(model_type: str, **changes: Any) -> Any:
    """Return transformers' model with random weights, biases and norms. `changes` are fields of its
    config."""
    settings = SIZES | OWN_SIZES.get(model_type, {}) | changes
    if model_type == "gpt_neox":
        del settings["num_key_value_heads"]
    if model_type == "mamba2":
        width = settings.get("expand", 2) * settings["hidden_size"]
        settings["num_heads"] = width // settings["head_dim"]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    # Mistral 4's class is found only inside that of its wrapper.
    found = transformers.Mistral4ForCausalLM if model_type == "mistral4" else None
    model = (found or transformers.AutoModelForCausalLM.from_config)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif name.endswith("recurrent_param"):  # of decays between about 0.3 and 0.99
                parameter.uniform_(-6, -1)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias")):
                buffer.normal_(0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.8, 1.2)
    return model
