"""Translates the metadata of GGUF files of Nemotron-H, Falcon-H1, Jamba and Mamba to the keys of
config.json. Needs no torch.

llama.cpp has two architectures for Nemotron-H: `nemotron_h_moe` has experts in all layers without a
token mixer, `nemotron_h` has MLPs there.
"""

from __future__ import annotations

from worker.checkpoint.gguf_config import Config, Metadata, rms
from worker.errors import UnusableModel
from worker.spec.families.family import FULL, LINEAR, UNLIMITED_CONTEXT
from worker.spec.families.nemotron import EXPERTS, MLP


def nemotron_h(metadata: Metadata) -> Config:
    """Return the keys of Nemotron-H besides those of `of_whole_model`. A layer without key/value
    heads and without an MLP has Mamba-2. The layer for drafts follows those of the model."""
    tensors, experts = metadata.file.tensors, metadata.integer("expert_count", 0)
    count = metadata.num_layers - metadata.integer("nextn_predict_layers", 0)
    widths = metadata.by_layer("feed_forward_length")[:count]
    heads = metadata.by_layer("attention.head_count_kv")[:count]
    inner = EXPERTS if experts else MLP
    kinds = [
        inner if width else FULL if kv_heads else LINEAR
        for width, kv_heads in zip(widths, heads, strict=True)
    ]
    mamba_heads = metadata.integer("ssm.time_step_rank")
    norms = [f"attention.layer_norm_{kind}epsilon" for kind in ("rms_", "")]
    found: Config = {
        "layers_block_type": kinds,
        "num_key_value_heads": max([*heads, 1]),
        "head_dim": metadata.head_dim,
        "intermediate_size": max([*widths, 1]),
        "layer_norm_epsilon": metadata.number(norms[norms[0] not in metadata]),
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": metadata.integer("ssm.inner_size") // max(mamba_heads, 1),
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "n_groups": metadata.integer("ssm.group_count"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in tensors),
    }
    return found | _experts(metadata, experts) if experts else found


def _experts(metadata: Metadata, count: int) -> Config:
    groups = metadata.integer("expert_group_count", 1)
    found = {
        "n_routed_experts": count,
        "num_experts_per_tok": metadata.shared("expert_used_count"),
        "moe_intermediate_size": metadata.shared("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length"
        ),
        "moe_latent_size": metadata.integer("moe_latent_size", 0) or None,
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
    }
    if groups > 1:
        return found | {
            "n_group": groups,
            "topk_group": metadata.integer("expert_group_used_count"),
        }
    return found


def falcon_h1(metadata: Metadata) -> Config:
    """Return the keys of Falcon-H1 besides those of `common`. The converter multiplies the weights
    by the factors of the config, so none are left. As in llama.cpp, a norm follows the gate."""
    tensors = metadata.file.tensors
    inner, heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    return rms(metadata) | {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(heads, 1),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in tensors),
        "projectors_bias": any(name.endswith(".ssm_out.bias") for name in tensors),
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in tensors),
        "mamba_norm_before_gate": False,
    }


def jamba(metadata: Metadata) -> Config:
    """Return the keys of Jamba besides those of `of_whole_model`. A layer without key/value heads
    has Mamba-1, and a layer with a router has experts."""
    tensors, heads = metadata.file.tensors, metadata.by_layer("attention.head_count_kv")
    has_experts = [
        f"blk.{index}.ffn_gate_inp.weight" in tensors for index in range(metadata.num_layers)
    ]
    if len(set(heads) - {0}) > 1:
        raise UnusableModel(
            f"{metadata.key('attention.head_count_kv')} must be 0 or the same number in each layer"
        )
    hidden = max(metadata.integer("embedding_length"), 1)
    return {
        **rms(metadata),
        **_period(metadata, "attn_layer", [count != 0 for count in heads]),
        **_period(metadata, "expert_layer", has_experts),
        "num_key_value_heads": max([*heads, 1]),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_experts": metadata.integer("expert_count", 0),
        "num_experts_per_tok": metadata.integer("expert_used_count", 1),
        "mamba_expand": metadata.integer("ssm.inner_size") // hidden,
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_dt_rank": metadata.integer("ssm.time_step_rank"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in tensors),
    }


def _period(metadata: Metadata, kind: str, found: list[bool]) -> Config:
    """Return the period and the offset of the layers that are of this kind. Raises UnusableModel if
    they are not periodic.

    found   whether each layer is of this kind
    """
    count = len(found)
    places = [index for index, is_found in enumerate(found) if is_found]
    offset = places[0] if places else count
    period = places[1] - offset if len(places) > 1 else count + 1
    if places != list(range(offset, count, period)) or offset >= period:
        raise UnusableModel(
            f"{metadata.file.path}: layers of one kind must be periodic, but {kind}s are {places}"
        )
    return {f"{kind}_period": period, f"{kind}_offset": offset}


def mamba_family(metadata: Metadata) -> str:
    """Return the class of a file of `mamba`: only Falcon Mamba has norms of dt, B and C."""
    has_norms = metadata.flag("ssm.dt_b_c_rms", False)
    return "FalconMambaForCausalLM" if has_norms else "MambaForCausalLM"


def mamba(metadata: Metadata) -> Config:
    """Return the keys of Mamba or Falcon Mamba besides those of `of_whole_model`. As in llama.cpp,
    all norms have the same epsilon."""
    found = _without_attention(metadata) | {
        "intermediate_size": metadata.integer("ssm.inner_size"),
        "time_step_rank": metadata.integer("ssm.time_step_rank"),
    }
    if mamba_family(metadata) == "FalconMambaForCausalLM":
        found["mixer_rms_eps"] = found["layer_norm_epsilon"]
    return found


def mamba2(metadata: Metadata) -> Config:
    """Return the keys of Mamba-2 besides those of `of_whole_model`."""
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    return _without_attention(metadata) | {
        "num_heads": heads,
        "head_dim": inner // max(heads, 1),
        "expand": inner // max(metadata.integer("embedding_length"), 1),
        "n_groups": metadata.integer("ssm.group_count"),
    }


def _without_attention(metadata: Metadata) -> Config:
    """Return the keys that all models without attention have. The converter writes the same
    context for all of them, since their configs have none."""
    tensors = metadata.file.tensors
    return {
        "max_position_embeddings": min(metadata.integer("context_length"), UNLIMITED_CONTEXT),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "use_bias": any(name.endswith(".ssm_in.bias") for name in tensors),
    }
