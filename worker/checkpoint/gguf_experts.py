"""Translates the metadata of GGUF files of GLM-4, Ernie 4.5, MiniMax M2, OLMoE, Hunyuan with
experts and Phi-3.5-MoE to the keys of config.json. Needs no torch."""

from __future__ import annotations

from worker.checkpoint.gguf_config import Config, Metadata, phi3, rms, rope_parameters
from worker.errors import UnusableModel

SIGMOID = 2
"""Value of `expert_gating_func`: the weights of experts are sigmoids of the router's scores."""
DRAFTS = "nextn_predict_layers"
"""Key of the number of layers for drafts, which `block_count` includes. They follow the others."""


def glm(metadata: Metadata) -> Config:
    """Return the keys of the first GLM-4 besides those of `common`. Raises UnusableModel for a file
    that was converted from THUDM's own format: it has one matrix for queries, keys and values."""
    if (name := "blk.0.attn_qkv.weight") in metadata.file.tensors:
        raise UnusableModel(f"tensor {name} is not supported: only files of glm-4-9b-hf and later")
    return rms(metadata)


def glm4(metadata: Metadata) -> Config:
    """Return the keys of GLM-4 besides those of `common`. Raises UnusableModel for a model of
    images: its rotary embeddings have sections, and its rows another order."""
    if metadata.get(name := "rope.dimension_sections") is not None:
        raise UnusableModel(f"{metadata.key(name)} is not supported: a model of images")
    return rms(metadata) | _layers(metadata)


def glm4_moe(metadata: Metadata) -> Config:
    _check_sigmoid(metadata)
    tensors = metadata.file.tensors
    return {
        **rms(metadata),
        **_layers(metadata),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": metadata.integer("expert_group_count", 0) or 1,
        "topk_group": metadata.integer("expert_group_used_count", 0) or 1,
    }


def ernie4_5_moe(metadata: Metadata) -> Config:
    return {
        **rms(metadata),
        "moe_num_experts": metadata.integer("expert_count"),
        "moe_k": metadata.integer("expert_used_count"),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step"),
    }


def minimax_m2(metadata: Metadata) -> Config:
    _check_sigmoid(metadata)
    return {
        **rms(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def hunyuan_moe(metadata: Metadata) -> Config:
    """Return the keys of Hunyuan with experts besides those of `common`. The shared expert is as
    wide as the others."""
    return {
        **rms(metadata),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_experts": metadata.integer("expert_count"),
        "moe_topk": metadata.integer("expert_used_count"),
    }


def phimoe(metadata: Metadata) -> Config:
    """Return the keys of Phi-3.5-MoE besides those of `common`. The factor of cos and sin of its
    long rope is the one that the converter computes for Phi-3."""
    rope = rope_parameters(metadata)
    if rope["rope_type"] == "longrope":
        rope["short_mscale"] = rope["attention_factor"]
    return {
        **phi3(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "lm_head_bias": "output.bias" in metadata.file.tensors,
        "rope_parameters": rope,
    }


def olmoe(metadata: Metadata) -> Config:
    """Return the keys of OLMoE besides those of `common`. As in llama.cpp, the weights of the
    chosen experts are never divided by their sum."""
    return {
        **rms(metadata),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "norm_topk_prob": False,
    }


def _layers(metadata: Metadata) -> Config:
    return {"num_hidden_layers": metadata.num_layers - metadata.integer(DRAFTS, 0)}


def _check_sigmoid(metadata: Metadata) -> None:
    """Raise UnusableModel if the weights of experts are not sigmoids. Files without the key have
    sigmoids."""
    if (found := metadata.integer("expert_gating_func", SIGMOID)) not in (0, SIGMOID):
        raise UnusableModel(f"{metadata.key('expert_gating_func')} {found} is not supported")
