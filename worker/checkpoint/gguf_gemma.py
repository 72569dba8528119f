"""Translates the metadata of GGUF files of Gemma 2, 3, 3n and 4 to the keys of config.json. Needs
no torch."""

from __future__ import annotations

from statistics import NormalDist

from worker.checkpoint.gguf_config import (
    Config,
    Metadata,
    rms,
    ropes_by_kind,
    windows,
    windows_pattern,
)
from worker.errors import UnusableModel
from worker.spec.families.family import FULL
from worker.spec.families.gemma3n import SPARSE_LAYERS, SPARSITY

OWN_KV_LAYERS = 20
"""Number of the first layers of a Gemma 3n that have keys and values, if the file does not say it.
"""


def gemma2(metadata: Metadata) -> Config:
    return {
        **rms(metadata),
        "query_pre_attn_scalar": _gemma_scale(metadata, largest=46),
        "sliding_window": metadata.window or 4096,
        **windows_pattern(metadata, 2),
        "attn_logit_softcapping": metadata.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.positive("final_logit_softcapping", 30.0),
    }


def gemma3(metadata: Metadata) -> Config:
    return {
        **rms(metadata),
        **ropes_by_kind(metadata, 10000.0),
        "query_pre_attn_scalar": _gemma_scale(metadata, largest=62),
        **windows(metadata, 6),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def gemma3n(metadata: Metadata) -> Config:
    """Return the keys of Gemma 3n besides those of `of_whole_model`. The rank of the linear
    branches and the number of rows for per-layer inputs are those of the tensors. As in llama.cpp,
    the factors of the active stream are always applied."""
    tensors, count = metadata.file.tensors, metadata.num_layers
    found = {
        **rms(metadata),
        **ropes_by_kind(metadata, 10000.0),
        "num_key_value_heads": metadata.num_kv_heads,
        "head_dim": metadata.head_dim,
        "intermediate_size": metadata.by_layer("feed_forward_length"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        **windows_pattern(metadata, 5),
        "num_kv_shared_layers": metadata.integer(
            "attention.shared_kv_layers", max(count - OWN_KV_LAYERS, 0)
        ),
        "activation_sparsity_pattern": _dropped_shares(metadata),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 256),
        "altup_num_inputs": metadata.integer("altup.num_inputs", 4),
        "altup_active_idx": metadata.integer("altup.active_idx", 0),
        "altup_correct_scale": True,
        "final_logit_softcapping": metadata.positive("final_logit_softcapping", 30.0),
    }
    if branch := tensors.get("blk.0.laurel_l.weight"):
        found["laurel_rank"] = branch.shape[0]
    if table := tensors.get("per_layer_token_embd.weight"):
        found["vocab_size_per_layer_input"] = table.shape[0]
    return found


def _dropped_shares(metadata: Metadata) -> list[float]:
    """Return the share of the gates that each layer drops. Files store how many standard deviations
    above their mean the gates are cut off: minus infinity if they are not.

    llama.cpp does not read this key: the first 10 layers drop 0.95, as they do in files without it.
    """
    name, count = "activation_sparsity_scale", metadata.num_layers
    cutoffs = metadata.get(name)
    if cutoffs is None:
        return [SPARSITY if index < SPARSE_LAYERS else 0.0 for index in range(count)]
    if (
        not isinstance(cutoffs, list)
        or len(cutoffs) != count
        or not all(isinstance(each, float) for each in cutoffs)
    ):
        raise UnusableModel(f"{metadata.key(name)} must have a number for each of {count} layers")
    return [NormalDist().cdf(cutoff) for cutoff in cutoffs]


def gemma4(metadata: Metadata) -> Config:
    """Return the keys of Gemma 4 besides those of `of_whole_model`. Heads without a window have the
    key `attention.key_length`, the others `attention.key_length_swa`. The factors of rotary
    frequencies are in the tensor ROPE_FREQS."""
    tensors, count = metadata.file.tensors, metadata.num_layers
    found = {
        **rms(metadata),
        **ropes_by_kind(metadata, 10000.0),
        "sliding_window": metadata.window or 512,
        **windows_pattern(metadata, 6),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }
    first_shared = count - found["num_kv_shared_layers"]
    full = [index for index, kind in enumerate(found["layer_types"]) if kind == FULL]
    owners = [index for index in full if index < first_shared]
    found["attention_k_eq_v"] = bool(owners) and f"blk.{owners[0]}.attn_v.weight" not in tensors
    widths = metadata.by_layer("feed_forward_length")
    found["intermediate_size"], found["use_double_wide_mlp"] = widths[0], widths[-1] != widths[0]
    heads, changes = metadata.by_layer("attention.head_count_kv"), {}
    windowed = next((heads[index] for index in range(count) if index not in full), heads[0])
    dims = {"": metadata.integer("attention.key_length"), "_swa": 0}
    dims["_swa"] = metadata.integer("attention.key_length_swa", dims[""])
    for index in range(count):
        wide = widths[0] * (2 if found["use_double_wide_mlp"] and index >= first_shared else 1)
        if widths[index] != wide or (index not in full and heads[index] != windowed):
            raise UnusableModel(
                f"the sizes of layer {index} are not those of a Gemma 4: "
                f"{metadata.key('feed_forward_length')} or "
                f"{metadata.key('attention.head_count_kv')}"
            )
    for index in full:
        changes[str(index)] = {"head_dim": dims[""], "num_key_value_heads": heads[index]}
    found |= {"num_key_value_heads": windowed, "head_dim": dims["_swa"]}
    found["per_layer_config"] = changes
    if table := tensors.get("per_layer_token_embd.weight"):
        found["vocab_size_per_layer_input"] = table.shape[0]
    if experts := metadata.integer("expert_count", 0):
        found |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        }
    return found


def _gemma_scale(metadata: Metadata, *, largest: int) -> float:
    """Return `query_pre_attn_scalar`. Attention scores are divided by its square root.

    The value is the head dimension, except in the largest model of a family, which has
    embedding_length divided by the number of heads. A GGUF file does not store the value, so the
    largest model is recognised by its number of layers.

    largest   number of layers of the family's largest model
    """
    if metadata.num_layers == largest:
        return metadata.integer("embedding_length") // max(metadata.num_heads, 1)
    return metadata.head_dim
