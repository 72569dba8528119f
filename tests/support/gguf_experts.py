"""Writes the keys that GGUF files of models with routed and shared experts have in common."""

from __future__ import annotations

from typing import Any

from gguf import GGUFWriter


def add_routed_experts(writer: GGUFWriter, config: Any) -> None:
    """Write the numbers and sizes of the experts, and the groups from which they are chosen."""
    is_kimi = config.model_type == "kimi_linear"
    writer.add_expert_count(config.num_local_experts if is_kimi else config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
