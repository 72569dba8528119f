"""Translates the metadata of GGUF files with latent attention to the keys of config.json: those of
DeepSeek V2, V3 and V3.2, GLM-4.7 Flash, Kimi K2, Kimi Linear, Youtu, Mistral 4 and MiniCPM3. Needs
no torch."""

from __future__ import annotations

from worker.checkpoint.gguf_config import Config, Metadata, of_whole_model, rms, rope_parameters
from worker.checkpoint.gguf_experts import DRAFTS, SIGMOID
from worker.checkpoint.gguf_mistral import GROWTH
from worker.errors import UnusableModel
from worker.spec.families.family import FULL, LINEAR

SOFTMAX = 1
"""Value of `expert_gating_func`: the weights of experts are the softmax of the router's scores."""
GLM_FLASH = (154880, (47, 48))
"""Tokens and numbers of layers of GLM-4.7 Flash, the only model with sigmoids some of whose files
lack `expert_gating_func`. As in llama.cpp, all other files without it have softmaxes."""
YARN_LOG = "rope.scaling.yarn_log_multiplier"


def deepseek2_family(metadata: Metadata) -> str:
    if not metadata.integer("expert_count", 0):
        return "YoutuForCausalLM"
    is_sigmoid = _gating(metadata) == SIGMOID
    return "DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM"


def latent(metadata: Metadata) -> Config:
    """Return the keys of all these models. Files that hold the matrices of the keys and of the
    values apart have the sizes of heads in keys that end with `_mla`."""
    rotated = metadata.integer("rope.dimension_count")
    length = "attention.key_length_mla"
    query = metadata.integer(length if length in metadata else "attention.key_length")
    has_rank = "attention.q_lora_rank" in metadata and _has_query_rank(metadata)
    rope = rope_parameters(metadata, rotated)
    if scale := metadata.number(YARN_LOG, 0.0):
        rope |= {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}
    return {
        **of_whole_model(metadata),
        **rms(metadata),
        "intermediate_size": metadata.shared("feed_forward_length"),
        "num_hidden_layers": metadata.num_layers - metadata.integer(DRAFTS, 0),
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank") if has_rank else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": query - rotated,
        "rope_parameters": rope,
    }


def deepseek2(metadata: Metadata) -> Config:
    """Return the keys of DeepSeek V2 and V3, Kimi K2, GLM-4.7 Flash or Youtu besides those of
    `latent`. Raises UnusableModel, naming the key, if a value is not supported."""
    length = "attention.value_length_mla"
    value = metadata.integer(length if length in metadata else "attention.value_length")
    found: Config = {"v_head_dim": value}
    if not metadata.integer("expert_count", 0):
        return found
    found |= _experts(metadata)
    renormalises = metadata.flag("expert_weights_norm", False)
    if _gating(metadata) == SIGMOID:
        return found | {"norm_topk_prob": renormalises}
    if renormalises:
        name = metadata.key("expert_weights_norm")
        raise UnusableModel(f"{name} is not supported for experts chosen by a softmax")
    return found | {"topk_method": "greedy" if found["n_group"] == 1 else "group_limited_greedy"}


def deepseek32(metadata: Metadata) -> Config:
    """Return the keys of DeepSeek V3.2 besides those of `latent`. Raises UnusableModel, naming the
    key, if a value is not supported."""
    _check_sigmoid(metadata)
    indexer = "attention.indexer."
    return deepseek2(metadata) | {
        "index_n_heads": metadata.integer(indexer + "head_count"),
        "index_head_dim": metadata.integer(indexer + "key_length"),
        "index_topk": metadata.integer(indexer + "top_k"),
    }


def mistral4(metadata: Metadata) -> Config:
    found = _experts(metadata) | {"norm_topk_prob": metadata.flag("expert_weights_norm", False)}
    rotated = metadata.integer("rope.dimension_count")
    rope = rope_parameters(metadata, metadata.integer("attention.key_length_mla"))
    scale = 10 * metadata.number(YARN_LOG, 0.0)
    growth = {
        "llama_4_scaling_beta": metadata.number(GROWTH, 0.0),
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length"
        ),
    }
    return {
        **found,
        "v_head_dim": metadata.integer("attention.value_length_mla"),
        "qk_rope_head_dim": rotated,
        "rope_parameters": rope | growth | {"mscale": scale, "mscale_all_dim": scale},
    }


def kimi_linear(metadata: Metadata) -> Config:
    """Return the keys of Kimi Linear besides those of `latent`. A layer without key/value heads has
    delta attention, which has as many heads as the others. As in llama.cpp, the weights of the
    chosen experts are renormalised. Raises UnusableModel, naming the key, if a value is not
    supported."""
    _check_sigmoid(metadata)
    kv_heads = metadata.by_layer("attention.head_count_kv")
    return _experts(metadata) | {
        "v_head_dim": metadata.integer("attention.value_length_mla"),
        "layer_types": [FULL if count else LINEAR for count in kv_heads],
        "linear_num_heads": metadata.num_heads,
        "linear_head_dim": metadata.integer("kda.head_dim"),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
    }


def minicpm3(metadata: Metadata) -> Config:
    """Return the keys of MiniCPM3 besides those of `latent`. Its files lack the factors, which are
    those of the published model, as in llama.cpp."""
    return {"v_head_dim": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def _experts(metadata: Metadata) -> Config:
    return {
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": metadata.integer("expert_group_count", 0) or 1,
        "topk_group": metadata.integer("expert_group_used_count", 0) or 1,
    }


def _gating(metadata: Metadata) -> int:
    """Return how the weights of experts are computed. Raises UnusableModel if it is another way."""
    found = metadata.integer("expert_gating_func", 0)
    if not found:
        vocab, layers = GLM_FLASH
        tokens = metadata.file.tensors["token_embd.weight"].shape[0]
        is_flash = tokens == vocab and metadata.num_layers in layers
        return SIGMOID if is_flash else SOFTMAX
    if found not in (SOFTMAX, SIGMOID):
        raise UnusableModel(f"{metadata.key('expert_gating_func')} {found} is not supported")
    return found


def _check_sigmoid(metadata: Metadata) -> None:
    """Raise UnusableModel unless the weights of experts are sigmoids."""
    if (found := _gating(metadata)) != SIGMOID:
        raise UnusableModel(
            f"{metadata.key('expert_gating_func')} is {found}; it must be {SIGMOID} for "
            f"{metadata.architecture}"
        )


def _has_query_rank(metadata: Metadata) -> bool:
    return any(name.endswith(".attn_q_a.weight") for name in metadata.file.tensors)
