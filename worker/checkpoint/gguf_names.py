"""The names of tensors in GGUF files, by role: those of all architectures, and those of some.
Needs no torch.

They are the names that llama.cpp's converter writes. Names have no ending: `.weight` or `.bias` is
added (tensor_names.py).
"""

from __future__ import annotations

LAYER = "blk.{i}."
ROLES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": LAYER + "attn_norm",
    "q": LAYER + "attn_q",
    "k": LAYER + "attn_k",
    "v": LAYER + "attn_v",
    "sinks": LAYER + "attn_sinks",
    "q_norm": LAYER + "attn_q_norm",
    "k_norm": LAYER + "attn_k_norm",
    "output": LAYER + "attn_output",
    "mlp_norm": LAYER + "ffn_norm",
    "gate": LAYER + "ffn_gate",
    "up": LAYER + "ffn_up",
    "down": LAYER + "ffn_down",
    "router": LAYER + "ffn_gate_inp",
    "expert_gate": LAYER + "ffn_gate_exps",
    "expert_up": LAYER + "ffn_up_exps",
    "expert_down": LAYER + "ffn_down_exps",
}
SHARED_ROLES = {
    "shared_gate": LAYER + "ffn_gate_shexp",
    "shared_up": LAYER + "ffn_up_shexp",
    "shared_down": LAYER + "ffn_down_shexp",
    "shared_score": LAYER + "ffn_gate_inp_shexp",
}
CHOICE_ROLES = {"choice_bias": LAYER + "exp_probs_b.bias"}
HYBRID_ROLES = {
    "mlp_norm": LAYER + "post_attention_norm",
    "delta_qkv": LAYER + "attn_qkv",
    "delta_z": LAYER + "attn_gate",
    "delta_conv": LAYER + "ssm_conv1d",
    "delta_decay": LAYER + "ssm_a",
    "delta_bias": LAYER + "ssm_dt.bias",
    "delta_norm": LAYER + "ssm_norm",
    "delta_output": LAYER + "ssm_out",
    **SHARED_ROLES,
}
TILED_ROLES = {"delta_b": LAYER + "ssm_beta", "delta_a": LAYER + "ssm_alpha"}
"""Roles of the gated delta nets whose value heads the converter has put in another order."""
MAMBA1_ROLES = {
    "mamba_inputs": LAYER + "ssm_in",
    "mamba_conv": LAYER + "ssm_conv1d",
    "mamba_made": LAYER + "ssm_x",
    "mamba_step_norm": LAYER + "ssm_dt_norm",
    "mamba_b_norm": LAYER + "ssm_b_norm",
    "mamba_c_norm": LAYER + "ssm_c_norm",
    "mamba_step": LAYER + "ssm_dt",
    "mamba_decay": LAYER + "ssm_a",
    "mamba_skip": LAYER + "ssm_d",
    "mamba_output": LAYER + "ssm_out",
}
MAMBA_ROLES = {
    "mamba_inputs": LAYER + "ssm_in",
    "mamba_conv": LAYER + "ssm_conv1d",
    "mamba_decay": LAYER + "ssm_a",
    "mamba_bias": LAYER + "ssm_dt.bias",
    "mamba_skip": LAYER + "ssm_d",
    "mamba_norm": LAYER + "ssm_norm",
    "mamba_output": LAYER + "ssm_out",
}
NEMOTRON_ROLES = {
    **MAMBA_ROLES,
    **SHARED_ROLES,
    **CHOICE_ROLES,
    "mlp_norm": LAYER + "attn_norm",
    "latent_in": LAYER + "ffn_latent_down",
    "latent_out": LAYER + "ffn_latent_up",
}
CONV_ROLES = {
    "conv_in": LAYER + "shortconv.in_proj",
    "conv": LAYER + "shortconv.conv",
    "conv_out": LAYER + "shortconv.out_proj",
    **CHOICE_ROLES,
}
EMBEDDING_NORM = "token_embd_norm"
"""The name of the last norm in some files of LFM2, in which it has the name of the embeddings."""
OLD_EXPERTS = {
    "expert_gate": LAYER + "ffn_gate.{e}",
    "expert_up": LAYER + "ffn_up.{e}",
    "expert_down": LAYER + "ffn_down.{e}",
}
"""Older files have a tensor for each expert."""
INPUT_ROLES = {
    "inputs_table": "per_layer_token_embd",
    "inputs_projection": "per_layer_model_proj",
    "inputs_norm": "per_layer_proj_norm",
    "input_gate": LAYER + "inp_gate",
    "input_projection": LAYER + "proj",
    "input_norm": LAYER + "post_norm",
}
"""Roles of per-layer inputs."""
POST_NORMS = {
    "post_attention_norm": LAYER + "post_attention_norm",
    "post_mlp_norm": LAYER + "post_ffw_norm",
}
GEMMA3N_ROLES = {
    **POST_NORMS,
    **INPUT_ROLES,
    "laurel_in": LAYER + "laurel_l",
    "laurel_out": LAYER + "laurel_r",
    "laurel_norm": LAYER + "laurel_post_norm",
    "altup_router": LAYER + "altup_router",
    "altup_router_norm": LAYER + "altup_router_norm",
    "altup_predictions": LAYER + "altup_predict_coef",
    "altup_corrections": LAYER + "altup_correct_coef",
    "altup_scale": LAYER + "altup_correct_scale",
    "stream_spread": "altup_proj",
    "stream_merge": "altup_unembd_proj",
}
GEMMA4_ROLES = {
    **POST_NORMS,
    **INPUT_ROLES,
    "factor": LAYER + "layer_output_scale",
    "beside_mlp_norm": LAYER + "post_ffw_norm_1",
    "beside_norm": LAYER + "pre_ffw_norm_2",
    "beside_post_norm": LAYER + "post_ffw_norm_2",
    "router_norm": LAYER + "ffn_gate_inp.scale",
    "expert_factors": LAYER + "ffn_down_exps.scale",
}
LATENT_ROLES = {
    "query_down": LAYER + "attn_q_a",
    "query_norm": LAYER + "attn_q_a_norm",
    "query_up": LAYER + "attn_q_b",
    "latent_down": LAYER + "attn_kv_a_mqa",
    "latent_norm": LAYER + "attn_kv_a_norm",
    "key_up": LAYER + "attn_k_b",
    "value_up": LAYER + "attn_v_b",
}
INDEXER_ROLES = {
    "index_queries": LAYER + "indexer.attn_q_b",
    "index_keys": LAYER + "indexer.attn_k",
    "index_norm": LAYER + "indexer.k_norm",
    "index_weights": LAYER + "indexer.proj",
}
WHOLE_UP = {"latent_up": LAYER + "attn_kv_b"}
"""The matrices of the keys and of the values, if a file has both in one tensor."""
KIMI_ROLES = {
    **LATENT_ROLES,
    **SHARED_ROLES,
    **CHOICE_ROLES,
    "delta_q": LAYER + "attn_q",
    "delta_k": LAYER + "attn_k",
    "delta_v": LAYER + "attn_v",
    "delta_a": LAYER + "ssm_f_a",
    "delta_a_up": LAYER + "ssm_f_b",
    "delta_z": LAYER + "ssm_g_a",
    "delta_z_up": LAYER + "ssm_g_b",
    "delta_b": LAYER + "ssm_beta",
    "delta_conv": LAYER + "ssm_conv1d_{p}",
    "delta_decay": LAYER + "ssm_a",
    "delta_bias": LAYER + "ssm_dt.bias",
    "delta_norm": LAYER + "ssm_norm",
    "delta_output": LAYER + "attn_output",
}
FUSED_EXPERTS = {"expert_gate_up": LAYER + "ffn_gate_up_exps"}
FUSED_QKV = {"qkv": LAYER + "attn_qkv"}
WITHOUT_ENDING = (
    *("delta_decay", "delta_bias", "mamba_decay", "mamba_bias", "mamba_skip", "choice_bias"),
    *("router_norm", "expert_factors"),
)
"""Roles whose names have no ending."""
