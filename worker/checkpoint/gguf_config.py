"""Translates a GGUF file's metadata to the keys of config.json. Needs no torch.

`common` returns the keys that all architectures have. The function of an architecture returns the
other keys. If a file lacks an optional key, llama.cpp's default is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from worker.checkpoint.gguf_file import GGMLType, GGUFFile
from worker.errors import UnusableModel
from worker.spec.families.family import FULL, LINEAR, SLIDING
from worker.spec.fields import Fields
from worker.spec.model_spec import checked_layers

Config = dict[str, Any]
ROPE_FREQS = "rope_freqs.weight"
FINETUNED = "rope.scaling.finetuned"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


class Metadata:
    """The metadata of a GGUF file that belong to its architecture. The methods take names without
    the architecture: "block_count" stands for "llama.block_count" in a file of that architecture.

    A value that is missing and has no default, or that has the wrong type, raises UnusableModel,
    which names the key.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.fields = Fields(file.metadata, str(file.path))
        self.file = file
        self.architecture = self.fields.text("general.architecture")

    def key(self, name: str) -> str:
        """Return the full key of `name`, with the architecture."""
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.fields

    def get(self, name: str) -> Any:
        return self.fields.get(self.key(name))

    def integer(self, name: str, *default: int) -> int:
        return self.fields.integer(self.key(name), *default)

    def number(self, name: str, *default: float) -> float:
        return self.fields.number(self.key(name), *default)

    def positive(self, name: str, *default: float) -> float:
        return self.fields.positive(self.key(name), *default)

    def flag(self, name: str, *default: bool) -> bool:
        return self.fields.flag(self.key(name), *default)

    @property
    def num_layers(self) -> int:
        return checked_layers(self.integer("block_count"))

    def shared(self, name: str, *default: int) -> int:
        """Return an integer that a file may also store as a list with an item for each layer.
        Raises UnusableModel if the items differ."""
        found = self.get(name)
        if not isinstance(found, list):
            return self.integer(name, *default)
        if len(found) != self.num_layers or any(each != found[0] for each in found):
            raise UnusableModel(
                f"{self.key(name)} must be the same number for each of the {self.num_layers} layers"
            )
        return Fields({name: found[0]}, self.key(name)).integer(name)

    def by_layer(self, name: str) -> list[int]:
        """Return the integer of each layer: the items of a list, or one number for all."""
        found = self.get(name)
        if not isinstance(found, list):
            return [self.integer(name)] * self.num_layers
        if len(found) != self.num_layers or not all(isinstance(each, int) for each in found):
            raise UnusableModel(f"{self.key(name)} must have {self.num_layers} integers")
        return found

    @property
    def num_heads(self) -> int:
        return self.shared("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Return the number of key/value heads of the layers with attention. A list has 0 for each
        of the other layers."""
        found = self.get("attention.head_count_kv")
        counts = {each for each in found if each} if isinstance(found, list) else set()
        if len(counts) == 1 and isinstance(count := counts.pop(), int):
            return count
        return self.shared("attention.head_count_kv", self.num_heads)

    @property
    def head_dim(self) -> int:
        default = self.integer("embedding_length") // max(self.num_heads, 1)
        head_dim = self.integer("attention.key_length", default)
        if self.integer("attention.value_length", head_dim) != head_dim:
            name = self.key("attention.value_length")
            raise UnusableModel(f"{name} differs from the head dimension {head_dim}: not supported")
        return head_dim

    @property
    def window(self) -> int | None:
        """Return the window, in tokens, of the layers that have one; None if the key is missing or
        0."""
        return self.integer("attention.sliding_window", 0) or None

    def factors(self, name: str, width: int) -> list[float]:
        """Return the factors of the rotary frequencies in the tensor `name`, one per pair of the
        `width` rotated items. Raises UnusableModel if the tensor has another type or shape."""
        info = self.file.tensors[name]
        if info.kind is not GGMLType.F32 or info.shape != (width // 2,):
            raise UnusableModel(f"tensor {name} must have {width // 2} numbers of type F32")
        return list(struct.unpack(f"<{width // 2}f", self.file.content(name)))


# ---- to config.json


def of_whole_model(metadata: Metadata) -> Config:
    """Return the keys of config.json that all architectures have and that are not about layers."""
    tensors = metadata.file.tensors
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": metadata.num_heads,
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        # Whether there are biases is read from the tensors.
        "attention_bias": False,
        "mlp_bias": False,
    }


def common(metadata: Metadata) -> Config:
    """Return the keys of config.json of an architecture whose layers have equal sizes."""
    has_experts_only = "expert_feed_forward_length" in metadata
    return of_whole_model(metadata) | {
        "intermediate_size": metadata.shared("feed_forward_length", *[1] * has_experts_only),
        "num_key_value_heads": metadata.num_kv_heads,
        "head_dim": metadata.head_dim,
        "rope_parameters": rope_parameters(metadata),
    }


def rope_parameters(metadata: Metadata, head_dim: int | None = None) -> Config:
    """Return `rope_parameters`. A factor without a type means linear scaling.

    head_dim   numbers of a head, some of which are rotated; None: those of plain attention

    Factors in the tensor ROPE_FREQS are added to the spec afterwards (gguf_header.py).
    """
    head_dim = metadata.head_dim if head_dim is None else head_dim
    theta = metadata.number("rope.freq_base", 10000.0)
    if theta <= 1:
        raise UnusableModel(f"{metadata.key('rope.freq_base')} is {theta}; it must be above 1")
    rope = {"rope_theta": theta, "rope_type": "default", **_partial(metadata, head_dim)}
    kind = metadata.get("rope.scaling.type") or "linear"
    if kind == "longrope" or SHORT_FACTORS in metadata.file.tensors:
        return rope | _long(metadata, head_dim)
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if metadata.number(f"rope.scaling.{name}", 1.0) != 1.0:
            raise UnusableModel(f"{metadata.key(f'rope.scaling.{name}')} is not supported")
    match kind:
        case "none":
            return rope
        case "linear":
            factor = _factor(metadata)
            return rope if factor == 1.0 else rope | {"rope_type": "linear", "factor": factor}
        case "yarn":
            return rope | _yarn(metadata)
    raise UnusableModel(f"rope scaling {kind!r} is not supported in GGUF files")


def _partial(metadata: Metadata, head_dim: int) -> Config:
    width = metadata.integer("rope.dimension_count", head_dim)
    if width == head_dim:
        return {"partial_rotary_factor": 1.0}
    # Half a dimension is added, because the reader multiplies by head_dim and rounds down.
    return {"partial_rotary_factor": (width + 0.5) / max(head_dim, 1)}


def _factor(metadata: Metadata) -> float:
    """Return the linear factor, from the current or the older key; 1 if it is 0 or missing."""
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        if name in metadata:
            return metadata.positive(name) if metadata.number(name) else 1.0
    return 1.0


def _yarn(metadata: Metadata) -> Config:
    rope: Config = {"rope_type": "yarn", "factor": metadata.positive("rope.scaling.factor")}
    original = "rope.scaling.original_context_length"
    if original in metadata:
        rope["original_max_position_embeddings"] = metadata.integer(original)
    for name in ("beta_fast", "beta_slow"):
        rope[name] = metadata.number(f"rope.scaling.yarn_{name}", 0.0)
    return rope


def _long(metadata: Metadata, head_dim: int) -> Config:
    if SHORT_FACTORS not in metadata.file.tensors:
        raise UnusableModel(f"{metadata.file.path} has no tensor {SHORT_FACTORS!r}")
    width = metadata.integer("rope.dimension_count", head_dim)
    return {
        "rope_type": "longrope",
        "short_factor": metadata.factors(SHORT_FACTORS, width),
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", metadata.integer("context_length")
        ),
        "attention_factor": metadata.positive("rope.scaling.attn_factor", 1.0),
    }


def rms(metadata: Metadata) -> Config:
    return {"rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon")}


def layer_norm(key: str) -> Callable[[Metadata], Config]:
    return lambda metadata: {key: metadata.number("attention.layer_norm_epsilon")}


def windows_pattern(metadata: Metadata, interval: int) -> Config:
    """Return `layer_types`: which layers have windows.

    interval   used if the metadata have no pattern: every `interval`-th layer has no window
    """
    pattern = metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, int):
        interval, pattern = max(pattern, 1), None
    count = metadata.num_layers
    slides = pattern or [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(slides, list) or len(slides) != count:
        name = metadata.key("attention.sliding_window_pattern")
        raise UnusableModel(f"{name} must have an item for each of the {count} layers")
    return {"layer_types": [SLIDING if is_sliding else FULL for is_sliding in slides]}


def windows(metadata: Metadata, interval: int) -> Config:
    if metadata.window is None:
        return {"sliding_window": None, "layer_types": [FULL] * metadata.num_layers}
    return {"sliding_window": metadata.window, **windows_pattern(metadata, interval)}


def ropes_by_kind(metadata: Metadata, sliding_theta: float) -> Config:
    """Return `rope_parameters` with an object for each kind of layer. Only the frequencies of
    layers without windows are scaled."""
    return {
        "rope_parameters": {
            FULL: rope_parameters(metadata),
            SLIDING: {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", sliding_theta),
            },
        }
    }


def llama(metadata: Metadata) -> Config:
    return rms(metadata) | {"sliding_window": metadata.window, **_experts(metadata)}


def _experts(metadata: Metadata) -> Config:
    experts = metadata.integer("expert_count", 0)
    if not experts:
        return {}
    top_k = metadata.integer("expert_used_count")
    return {"num_local_experts": experts, "num_experts_per_tok": top_k}


def qwen3_moe(metadata: Metadata) -> Config:
    """Return the keys of Qwen3-MoE besides those of `common`. As in llama.cpp, the weights of the
    chosen experts are always divided by their sum."""
    inner = metadata.integer("expert_feed_forward_length")
    experts = {**_experts(metadata), "moe_intermediate_size": inner, "norm_topk_prob": True}
    return rms(metadata) | experts


def with_axes(
    config: Callable[[Metadata], Config], metadata: Metadata, *, is_interleaved: bool = True
) -> Config:
    """Return the keys that `config` reads, and those of M-RoPE, whose rotary positions of an image
    have several axes. The fourth section is always 0."""
    found, rope = metadata.get("rope.dimension_sections"), rope_parameters(metadata)
    rope["mrope_section"] = found[:3] if isinstance(found, list) else None
    return config(metadata) | {"rope_parameters": rope, "mrope_interleaved": is_interleaved}


def qwen2_moe(metadata: Metadata) -> Config:
    """Return the keys of Qwen2-MoE besides those of `common`. As in llama.cpp, the weights of the
    chosen experts are never divided by their sum."""
    own = {"norm_topk_prob": False, "qkv_bias": False}  # biases are read from the tensors
    return rms(metadata) | _shared_experts(metadata) | own


def _shared_experts(metadata: Metadata) -> Config:
    """Return the keys of experts, one of which computes every token."""
    shared = metadata.integer("expert_shared_feed_forward_length")
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared,
    }


def qwen_hybrid(metadata: Metadata) -> Config:
    """Return the keys of Qwen3-Next and Qwen3.5 besides those of `common`. Their files count the
    layers for drafts among the model's."""
    num_layers = metadata.num_layers - metadata.integer("nextn_predict_layers", 0)
    recurrent = metadata.get("attention.recurrent_layers")
    if recurrent is None:
        interval = max(metadata.integer("full_attention_interval", 4), 1)
        recurrent = [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(recurrent, list) or len(recurrent) < num_layers:
        name = metadata.key("attention.recurrent_layers")
        raise UnusableModel(f"{name} must have an item for each of the {num_layers} layers")
    value_heads = metadata.integer("ssm.time_step_rank")
    found = {
        "num_hidden_layers": num_layers,
        "layer_types": [LINEAR if is_linear else FULL for is_linear in recurrent[:num_layers]],
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(value_heads, 1),
    }
    if metadata.integer("expert_count", 0):
        found |= _shared_experts(metadata) | {"norm_topk_prob": True}
    return rms(metadata) | found


def gpt_oss(metadata: Metadata) -> Config:
    """Return the keys of gpt-oss besides those of `common`. The ends of its YaRN ramp are not
    rounded. GGUF files do not store this, so `truncate` (`YarnScaling`) is set here."""
    rope = rope_parameters(metadata)
    return {
        **rms(metadata),
        **windows(metadata, 2),
        **_experts(metadata),
        "rope_parameters": rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def phi3(metadata: Metadata) -> Config:
    return rms(metadata) | {"sliding_window": metadata.window}


def olmo2(metadata: Metadata) -> Config:
    """Return the keys of OLMo 2 or OLMo 3 besides those of `common`. Files of both name the same
    architecture, but only those of OLMo 3 have a window."""
    config = rms(metadata)
    if metadata.window is None:
        return config
    theta = metadata.number("rope.freq_base", 10000.0)
    return config | windows(metadata, 4) | ropes_by_kind(metadata, theta)


def exaone4(metadata: Metadata) -> Config:
    return rms(metadata) | windows(metadata, 4)


def granite(metadata: Metadata) -> Config:
    """Return the keys of Granite 3, or of dense Granite 4, besides those of `common`. Only the
    latter may have no rotary embeddings (`is_rotated`)."""
    usual = max(metadata.head_dim, 1) ** -0.5
    dense = {
        "position_embedding_type": None,
        "layer_types": [FULL] * metadata.num_layers,
        "num_local_experts": 0,
        "shared_intermediate_size": metadata.shared("feed_forward_length"),
    }
    return {
        **({} if is_rotated(metadata) else dense),
        **rms(metadata),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", 0.0) or usual,
        "logits_scaling": metadata.positive("logit_scale"),
    }


def granite_moe(metadata: Metadata) -> Config:
    """Return the keys of Granite 3 with experts besides those of `common`. Only some of these
    models have a shared MLP."""
    found = granite(metadata) | _experts(metadata)
    if shared := metadata.integer("expert_shared_feed_forward_length", 0):
        found["shared_intermediate_size"] = shared
    return found


def _attends(metadata: Metadata) -> list[bool]:
    """Return whether each layer has attention: the others have no key/value heads."""
    kv_heads = metadata.get("attention.head_count_kv")
    if not isinstance(kv_heads, list) or len(kv_heads) != metadata.num_layers:
        name = metadata.key("attention.head_count_kv")
        raise UnusableModel(f"{name} must have an item for each of {metadata.num_layers} layers")
    return [each != 0 for each in kv_heads]


def lfm2(metadata: Metadata) -> Config:
    """Return the keys of LFM2 and LFM2-MoE besides those of `common`. As in llama.cpp, the weights
    of the chosen experts are always divided by their sum."""
    tensors = metadata.file.tensors
    found: Config = {
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "layer_types": [FULL if each else "conv" for each in _attends(metadata)],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in tensors),
        "block_auto_adjust_ff_dim": False,
    }
    if experts := metadata.integer("expert_count", 0):
        found |= {
            "num_experts": experts,
            "num_experts_per_tok": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
            "num_dense_layers": metadata.integer("leading_dense_block_count", 0),
            "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in tensors),
            "norm_topk_prob": True,
            "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        }
    return found


def granite_hybrid(metadata: Metadata) -> Config:
    """Return the keys of Granite 4 H besides those of `common`: a layer without key/value heads has
    Mamba-2."""
    tensors = metadata.file.tensors
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    found: Config = {
        "position_embedding_type": "rope" if is_rotated(metadata) else None,
        "layer_types": [FULL if each else LINEAR for each in _attends(metadata)],
        "num_local_experts": 0,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(heads, 1),
        "mamba_expand": inner // max(metadata.integer("embedding_length"), 1),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in tensors),
    }
    if metadata.integer("expert_count", 0):
        shared = metadata.integer("expert_shared_feed_forward_length")
        found |= {**_experts(metadata), "shared_intermediate_size": shared}
    elif up := tensors.get("blk.0.ffn_up.weight"):
        found["shared_intermediate_size"] = up.shape[0]
    return granite(metadata) | found


def is_rotated(metadata: Metadata) -> bool:
    """Return whether a Granite model has rotary embeddings: the key FINETUNED, as in llama.cpp, or
    True if the key is missing."""
    return metadata.flag(FINETUNED, True)


def cohere2(metadata: Metadata) -> Config:
    return {
        **layer_norm("layer_norm_eps")(metadata),
        "sliding_window": metadata.integer("attention.sliding_window"),
        **windows_pattern(metadata, 4),
        "logit_scale": metadata.number("logit_scale"),
    }


def starcoder2(metadata: Metadata) -> Config:
    has_biases = "blk.0.attn_q.bias" in metadata.file.tensors
    return layer_norm("norm_epsilon")(metadata) | {"use_bias": has_biases}


def stablelm(metadata: Metadata) -> Config:
    return {
        **layer_norm("layer_norm_eps")(metadata),
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
    }


def gpt2(metadata: Metadata) -> Config:
    inner = metadata.shared("feed_forward_length")
    return layer_norm("layer_norm_epsilon")(metadata) | {"n_inner": inner}


def gpt_neox(metadata: Metadata) -> Config:
    return {
        **layer_norm("layer_norm_eps")(metadata),
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in metadata.file.tensors,
    }
