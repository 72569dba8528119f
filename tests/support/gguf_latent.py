"""Facts and tensors of GGUF files of models with latent attention, as llama.cpp's converter writes
them."""

from __future__ import annotations

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
    "glm4_moe_lite": MODEL_ARCH.DEEPSEEK2,
    "youtu": MODEL_ARCH.DEEPSEEK2,
    "mistral4": MODEL_ARCH.MISTRAL4,
    "minicpm3": MODEL_ARCH.MINICPM3,
}
"""model_type -> architecture of the GGUF file."""
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
    rope = config.rope_parameters
    if (scale := rope.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
    if config.model_type == "mistral4":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
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
