"""Brings the fields of a config.json under the names that `ModelShape` reads.

Some families have names of their own for the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import Annotated, Any

import msgspec

Fields = dict[str, Any]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]

MAMBA_FIELDS = {
    "intermediate_size": "mamba_width",
    "time_step_rank": "mamba_dt_rank",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
}
"""Name in the configs of Mamba and Falcon Mamba -> name in `ModelShape`."""
MAMBA2_FIELDS = {
    "num_heads": "mamba_n_heads",
    "n_groups": "mamba_n_groups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
}
"""The same for Mamba-2."""


def with_usual_names(fields: Fields) -> Fields:
    """Return a config with the names of `ModelShape`. Raises msgspec.ValidationError if a value
    that is needed for that is not a number."""
    change = CHANGES.get(str(fields.get("model_type")))
    return fields if change is None else fields | change(fields)


def _without_attention(names: Mapping[str, str], is_tied: bool) -> Callable[[Fields], Fields]:
    """Return the change of a model all of whose layers are recurrent.

    names     name in its config -> name in `ModelShape`
    is_tied   whether the head has the matrix of the embedding, if the config does not say
    """

    def change(fields: Fields) -> Fields:
        return {
            "tie_word_embeddings": fields.get("tie_word_embeddings", is_tied),
            "intermediate_size": 0,
            "num_attention_heads": 1,
            "num_recurrent": _count(fields, "num_hidden_layers", 0),
            **{ours: fields[theirs] for theirs, ours in names.items() if theirs in fields},
        }

    return change


def _grouped_experts(
    experts: int, width: int, first: int, shared: int = 1
) -> Callable[[Fields], Fields]:
    """Return the change of a model whose first layers have no experts. The numbers are used if a
    config has none: of experts, of the width of an expert, of the first layers, and of the experts
    that compute every token."""

    def change(fields: Fields) -> Fields:
        size = _count(fields, "moe_intermediate_size", width)
        dense = _count(fields, "first_k_dense_replace", first)
        if isinstance(kinds := fields.get("mlp_layer_types"), list):
            dense = [*kinds, "sparse"].index("sparse")
        return {
            "num_experts": _count(fields, "n_routed_experts", experts),
            "shared_expert_intermediate_size": size * _count(fields, "n_shared_experts", shared),
            "expert_layer_offset": dense,
        }

    return change


def _kimi_linear(fields: Fields) -> Fields:
    own = fields.get("linear_attn_config") or {}
    linear = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    heads, dim, kernel = (
        _count(own if theirs in own else fields, theirs if theirs in own else ours, usual)
        for theirs, (ours, usual) in zip(names, linear.items(), strict=True)
    )
    experts = _grouped_experts(256, 1024, 1)(
        fields
        | {
            "n_routed_experts": fields.get("num_experts", 256),
            "n_shared_experts": fields.get("num_shared_experts", 1),
        }
    )
    count, full = _count(fields, "num_hidden_layers", 27), own.get("full_attn_layers")
    recurrent = count - (len(full) if isinstance(full, list) else (count - 1) // 4)
    return {
        **experts,
        **({} if fields.get("layer_types") else {"num_recurrent": recurrent}),
        "num_experts_per_tok": _count(fields, "num_experts_per_token", 8),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": kernel,
    }


def _minicpm3(fields: Fields) -> Fields:
    width = _count(fields, "hidden_size", 2560) // max(_count(fields, "num_attention_heads", 40), 1)
    return {"v_head_dim": fields.get("v_head_dim") or width}


def _ernie4_5_moe(fields: Fields) -> Fields:
    size, period = _count(fields, "moe_intermediate_size", 1536), _count(fields, PERIOD, 1)
    start = _count(fields, "moe_layer_start_index", 1)
    # The layers whose index plus one is a multiple of the period, from `start`.
    first = -(-(start + 1) // max(period, 1)) * period - 1
    return {
        "num_experts": _count(fields, "moe_num_experts", 64),
        "num_experts_per_tok": _count(fields, "moe_k", 6),
        "shared_expert_intermediate_size": size * _count(fields, "moe_num_shared_experts", 2),
        "expert_layer_period": period,
        "expert_layer_offset": first,
    }


def _hunyuan_moe(fields: Fields) -> Fields:
    chosen = fields.get("moe_topk", 1)
    return {
        "num_experts_per_tok": max(chosen, default=0) if isinstance(chosen, list) else chosen,
        "moe_intermediate_size": None,  # a list, which the model does not read
        "shared_expert_intermediate_size": _count(fields, "intermediate_size", 11008),
    }


def _llama4(fields: Fields) -> Fields:
    size, period = _count(fields, "intermediate_size", 8192), _count(fields, STEP, 1)
    return {
        "num_experts": _count(fields, "num_local_experts", 16),
        "num_experts_per_tok": _count(fields, "num_experts_per_tok", 1),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
        "intermediate_size": _count(fields, "intermediate_size_mlp", 16384),
        "expert_layer_period": period,
        "expert_layer_offset": max(period, 1) - 1,
        "num_recurrent": 0,  # layers with chunks have attention
    }


def _bamba(fields: Fields) -> Fields:
    attends = msgspec.convert(fields.get("attn_layer_indices") or [], list[int])
    count = _count(fields, "num_hidden_layers", 32)
    recurrent = count - len({index for index in attends if 0 <= index < count})
    return {"num_recurrent": recurrent}


def _recurrent_gemma(fields: Fields) -> Fields:
    usual = ["recurrent", "recurrent", "attention"]
    kinds = msgspec.convert(fields.get("block_types") or usual, list[str])
    layers = islice(cycle(kinds), _count(fields, "num_hidden_layers", 26))
    return {
        "tie_word_embeddings": fields.get("tie_word_embeddings", True),
        # Both halves of the first matrix of an MLP together.
        "intermediate_size": _count(fields, "intermediate_size", 7680) // 2,
        "lru_width": fields.get("lru_width") or _count(fields, "hidden_size", 2560),
        "num_recurrent": [*layers].count("recurrent"),
    }


def _without_gates(fields: Fields) -> Fields:
    return {"mlp_matrices": 2}


def _count(fields: Fields, name: str, default: int) -> int:
    found: int = msgspec.convert(fields.get(name, default), Count)
    return found


PERIOD, STEP = "moe_layer_interval", "interleave_moe_layer_step"
CHANGES: dict[str, Callable[[Fields], Fields]] = {
    "mamba": _without_attention(MAMBA_FIELDS, is_tied=True),
    "falcon_mamba": _without_attention(MAMBA_FIELDS, is_tied=True),
    "mamba2": _without_attention(MAMBA2_FIELDS, is_tied=False),
    "glm4_moe": _grouped_experts(128, 1408, 1),
    "deepseek_v2": _grouped_experts(64, 1407, 0, shared=2),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2"), _grouped_experts(256, 2048, 3)),
    "glm4_moe_lite": _grouped_experts(64, 1536, 1),
    "mistral4": _grouped_experts(128, 2048, 0),
    "minicpm3": _minicpm3,
    "kimi_linear": _kimi_linear,
    "ernie4_5_moe": _ernie4_5_moe,
    "hunyuan_v1_moe": _hunyuan_moe,
    "llama4_text": _llama4,
    "bamba": _bamba,
    "recurrent_gemma": _recurrent_gemma,
    "nemotron": _without_gates,
    "arcee": _without_gates,
    "apertus": _without_gates,
}
"""`model_type` -> the fields that replace those of its config."""
