"""Facts and tensors of GGUF files of models with latent attention, as llama.cpp's converter writes
them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter
from numpy.typing import NDArray

from tests.support.gguf_experts import add_routed_experts

Array = NDArray[np.float32]
ARCHITECTURES = {
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v32": MODEL_ARCH.DEEPSEEK2,
    "glm4_moe_lite": MODEL_ARCH.DEEPSEEK2,
    "youtu": MODEL_ARCH.DEEPSEEK2,
    "mistral4": MODEL_ARCH.MISTRAL4,
    "minicpm3": MODEL_ARCH.MINICPM3,
    "kimi_linear": MODEL_ARCH.KIMI_LINEAR,
}
"""model_type -> architecture of the GGUF file. That of DeepSeek V3.2 has another name."""
DEEPSEEK32 = "deepseek32"
INDEXER = {"wq_b": "attn_q_b", "wk": "attn_k", "k_norm": "k_norm", "weights_proj": "proj"}
"""Part of an indexer -> its name in the file. The package `gguf` has no names of this
architecture."""
SOFTMAX = ("deepseek_v2", "mistral4")
"""Model types whose experts are chosen by a softmax."""


def add_facts(writer: GGUFWriter, config: Any) -> None:
    """Write the facts of the model's own architecture."""
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.model_type == "minicpm3":
        writer.add_key_length(query)
        return
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(query)
    writer.add_value_length_mla(config.v_head_dim)
    if config.model_type == "kimi_linear":
        kinds = config.layer_types
        writer.add_head_count_kv([int(kind == "full_attention") for kind in kinds])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_kda_head_dim(config.linear_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        _add_experts(writer, config)
        return
    rope = config.rope_parameters
    if (scale := rope.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
    if config.model_type == "mistral4":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config.model_type == "deepseek_v32":
        writer.add_uint32(f"{DEEPSEEK32}.attention.indexer.head_count", config.index_n_heads)
        writer.add_uint32(f"{DEEPSEEK32}.attention.indexer.key_length", config.index_head_dim)
        writer.add_uint32(f"{DEEPSEEK32}.attention.indexer.top_k", config.index_topk)
    if config.model_type != "youtu":
        _add_experts(writer, config)


def _add_experts(writer: GGUFWriter, config: Any) -> None:
    is_softmax = config.model_type in SOFTMAX
    kinds = getattr(config, "mlp_layer_types", None)
    first = config.first_k_dense_replace if kinds is None else kinds.index("sparse")
    writer.add_leading_dense_block_count(first)
    add_routed_experts(writer, config)
    kind = ExpertGatingFuncType.SOFTMAX if is_softmax else ExpertGatingFuncType.SIGMOID
    writer.add_expert_gating_func(kind)
    if config.norm_topk_prob and config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(True)


def converted(config: Any, name: str, data: Array) -> Iterator[tuple[str, Array]]:
    """Yield a tensor as the converter writes it: the matrices of the keys and of the values apart,
    the first transposed."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.indexer\.(\w+)(\.\w+)", name):
        yield f"blk.{found[1]}.indexer.{INDEXER[found[2]]}{found[3]}", data
        return
    if config.model_type == "kimi_linear":
        name, data = _of_kimi(name, data)
    if name.endswith(".experts.gate_up_proj") or name.endswith(".experts.down_proj"):
        yield name + ".weight", data
    elif name.endswith("e_score_correction_bias"):
        yield name.removesuffix("_bias") + ".bias", data
    elif name.endswith("kv_b_proj.weight") and config.model_type != "minicpm3":
        by_head = data.reshape(config.num_attention_heads, -1, data.shape[-1])
        keys, values = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    else:
        yield name, data


def _of_kimi(name: str, data: Array) -> tuple[str, Array]:
    """Return a tensor of Kimi Linear under the name by which the converter looks it up."""
    if name.endswith(".A_log"):
        return name, -np.exp(data).reshape(1, 1, -1, 1)
    if name.endswith(".dt_bias"):
        return name.removesuffix(".dt_bias") + ".dt_proj.bias", data
    if re.search(r"block_sparse_moe\.(gate|up|down)_proj", name):
        return name.replace("block_sparse_moe", "mlp"), data
    if "_conv1d." in name:
        return name, data.reshape(1, len(data), 1, -1)
    return name, data
