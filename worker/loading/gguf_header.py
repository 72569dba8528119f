"""Reads the model spec from a GGUF file's metadata. Needs no torch.

The metadata keys are translated to those of config.json, and the reader of the model's family reads
the result. So both formats of a model give the same spec. Missing metadata get llama.cpp's
defaults. Tensor names and row order are those of llama.cpp's converter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields
from worker.loading.gguf_file import GGMLType, GGUFFile
from worker.models.families.family import FULL, SLIDING
from worker.models.families.registry import find_family
from worker.models.rope_config import FactorScaling, LinearScaling, RopeConfig
from worker.models.spec import LayerSpec, ModelSpec, checked_layers
from worker.models.tensors import RowOrder, TensorNames, interleaved

Config = dict[str, Any]
ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


class Metadata:
    """Metadata of one architecture. Names leave out the architecture and its dot."""

    def __init__(self, file: GGUFFile) -> None:
        self.fields = Fields(file.metadata, str(file.path))
        self.file = file
        self.architecture = self.fields.text("general.architecture")

    def key(self, name: str) -> str:
        """Return the whole name, for an error message."""
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

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count")

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
        """Return the window of layers that have one; zero means none."""
        return self.integer("attention.sliding_window", 0) or None

    def factors(self, name: str, width: int) -> list[float]:
        """Return the factors of the rotary frequencies in a tensor."""
        info = self.file.tensors[name]
        if info.kind is not GGMLType.F32 or info.shape != (width // 2,):
            raise UnusableModel(f"tensor {name} must have {width // 2} numbers of type F32")
        return list(struct.unpack(f"<{width // 2}f", self.file.content(name)))


# ---- from metadata to config.json


def _common(metadata: Metadata) -> Config:
    """Return the keys of config.json that all architectures have."""
    tensors = metadata.file.tensors
    return {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": metadata.num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", metadata.num_heads),
        "head_dim": metadata.head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(metadata),
        # Whether there are biases is read from the tensors.
        "attention_bias": False,
        "mlp_bias": False,
    }


def _rope(metadata: Metadata) -> Config:
    """Return `rope_parameters`. A factor without a type means linear scaling.

    Factors in a tensor are added to the model afterwards, by `_with_rope_factors`.
    """
    theta = metadata.number("rope.freq_base", 10000.0)
    if theta <= 1:
        raise UnusableModel(f"{metadata.key('rope.freq_base')} is {theta}; it must be above 1")
    rope = {"rope_theta": theta, "rope_type": "default", **_partial(metadata)}
    kind = metadata.get("rope.scaling.type") or "linear"
    if kind == "longrope" or SHORT_FACTORS in metadata.file.tensors:
        return rope | _long(metadata)
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


def _partial(metadata: Metadata) -> Config:
    head_dim = metadata.head_dim
    width = metadata.integer("rope.dimension_count", head_dim)
    if width == head_dim:
        return {"partial_rotary_factor": 1.0}
    # Half a dimension more: the reader multiplies by the head's size again and rounds down.
    return {"partial_rotary_factor": (width + 0.5) / max(head_dim, 1)}


def _factor(metadata: Metadata) -> float:
    """Return the linear factor, from the current or the older key. Zero and absent mean 1."""
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


def _long(metadata: Metadata) -> Config:
    if SHORT_FACTORS not in metadata.file.tensors:
        raise UnusableModel(f"{metadata.file.path} has no tensor {SHORT_FACTORS!r}")
    width = metadata.integer("rope.dimension_count", metadata.head_dim)
    return {
        "rope_type": "longrope",
        "short_factor": metadata.factors(SHORT_FACTORS, width),
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length"
        ),
        "attention_factor": metadata.positive("rope.scaling.attn_factor", 1.0),
    }


def _rms(metadata: Metadata) -> Config:
    return {"rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon")}


def _layer_norm(key: str) -> Callable[[Metadata], Config]:
    return lambda metadata: {key: metadata.number("attention.layer_norm_epsilon")}


def _pattern(metadata: Metadata, interval: int) -> Config:
    """Return `layer_types`: which layers have windows.

    interval   if the metadata do not say it: each layer of this number has no window
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


def _windows(metadata: Metadata, interval: int) -> Config:
    if metadata.window is None:
        return {"sliding_window": None, "layer_types": [FULL] * metadata.num_layers}
    return {"sliding_window": metadata.window, **_pattern(metadata, interval)}


def _ropes(metadata: Metadata, sliding_theta: float) -> Config:
    """Return `rope_parameters` with an object for each kind of layer. Only layers without windows
    are scaled."""
    return {
        "rope_parameters": {
            FULL: _rope(metadata),
            SLIDING: {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", sliding_theta),
            },
        }
    }


def _llama(metadata: Metadata) -> Config:
    return _rms(metadata) | {"sliding_window": metadata.window, **_experts(metadata)}


def _experts(metadata: Metadata) -> Config:
    experts = metadata.integer("expert_count", 0)
    if not experts:
        return {}
    top_k = metadata.integer("expert_used_count")
    return {"num_local_experts": experts, "num_experts_per_tok": top_k}


def _qwen3_moe(metadata: Metadata) -> Config:
    """llama.cpp always divides the weights of the chosen experts by their sum."""
    inner = metadata.integer("expert_feed_forward_length")
    experts = {**_experts(metadata), "moe_intermediate_size": inner, "norm_topk_prob": True}
    return _rms(metadata) | experts


def _gpt_oss(metadata: Metadata) -> Config:
    """The ramp of yarn is not rounded to whole pairs here, which GGUF files do not say."""
    rope = _rope(metadata)
    return {
        **_rms(metadata),
        **_windows(metadata, 2),
        **_experts(metadata),
        "rope_parameters": rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _gemma2(metadata: Metadata) -> Config:
    return {
        **_rms(metadata),
        "query_pre_attn_scalar": _gemma_scale(metadata, largest=46),
        "sliding_window": metadata.window or 4096,
        **_pattern(metadata, 2),
        "attn_logit_softcapping": metadata.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.positive("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> Config:
    return {
        **_rms(metadata),
        **_ropes(metadata, 10000.0),
        "query_pre_attn_scalar": _gemma_scale(metadata, largest=62),
        **_windows(metadata, 6),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma_scale(metadata: Metadata, *, largest: int) -> float:
    """Return the number whose root divides the scores. The largest model of a family has its own
    number, and GGUF files show only by the number of layers that a model is the largest."""
    if metadata.num_layers == largest:
        return metadata.integer("embedding_length") // max(metadata.num_heads, 1)
    return metadata.head_dim


def _phi3(metadata: Metadata) -> Config:
    return _rms(metadata) | {"sliding_window": metadata.window}


def _olmo2(metadata: Metadata) -> Config:
    """OLMo 3 has the same architecture, with windows."""
    config = _rms(metadata)
    if metadata.window is None:
        return config
    theta = metadata.number("rope.freq_base", 10000.0)
    return config | _windows(metadata, 4) | _ropes(metadata, theta)


def _exaone4(metadata: Metadata) -> Config:
    return _rms(metadata) | _windows(metadata, 4)


def _granite(metadata: Metadata) -> Config:
    usual = max(metadata.head_dim, 1) ** -0.5
    return {
        **_rms(metadata),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", 0.0) or usual,
        "logits_scaling": metadata.positive("logit_scale"),
    }


def _cohere2(metadata: Metadata) -> Config:
    return {
        **_layer_norm("layer_norm_eps")(metadata),
        "sliding_window": metadata.integer("attention.sliding_window"),
        **_pattern(metadata, 4),
        "logit_scale": metadata.number("logit_scale"),
    }


def _starcoder2(metadata: Metadata) -> Config:
    has_biases = "blk.0.attn_q.bias" in metadata.file.tensors
    return _layer_norm("norm_epsilon")(metadata) | {"use_bias": has_biases}


def _stablelm(metadata: Metadata) -> Config:
    return {
        **_layer_norm("layer_norm_eps")(metadata),
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
    }


def _gpt2(metadata: Metadata) -> Config:
    inner = metadata.integer("feed_forward_length")
    return _layer_norm("layer_norm_epsilon")(metadata) | {"n_inner": inner}


def _gpt_neox(metadata: Metadata) -> Config:
    return {
        **_layer_norm("layer_norm_eps")(metadata),
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in metadata.file.tensors,
    }


# ---- names of tensors

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
OLD_EXPERTS = {
    "expert_gate": LAYER + "ffn_gate.{e}",
    "expert_up": LAYER + "ffn_up.{e}",
    "expert_down": LAYER + "ffn_down.{e}",
}
"""Older files have a tensor for each expert."""
POST_NORMS = {
    "post_attention_norm": LAYER + "post_attention_norm",
    "post_mlp_norm": LAYER + "post_ffw_norm",
}
FUSED_QKV = {"qkv": LAYER + "attn_qkv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How the files of an architecture are read."""

    #: `architectures` of config.json whose families the files may be of.
    families: tuple[str, ...]
    #: Keys of config.json besides those of `_common`.
    config: Callable[[Metadata], Config]
    #: Roles whose names differ from ROLES.
    roles: Mapping[str, str] = field(default_factory=dict)
    #: Whether each query and key head alternates between its two halves, because llama.cpp's rotary
    #: embedding rotates neighbouring items.
    is_interleaved: bool = False
    #: Whether the converter added the norms' offset to their weights.
    has_whole_norms: bool = False
    #: Returns which of several families a file is of.
    choose: Callable[[Metadata], str] | None = None

    def family(self, metadata: Metadata) -> str:
        return self.choose(metadata) if self.choose else self.families[0]


def _llama_family(metadata: Metadata) -> str:
    if metadata.integer("expert_count", 0):
        return "MixtralForCausalLM"
    return "LlamaForCausalLM" if metadata.window is None else "MistralForCausalLM"


def _olmo_family(metadata: Metadata) -> str:
    return "Olmo2ForCausalLM" if metadata.window is None else "Olmo3ForCausalLM"


FAMILIES = {
    "llama": GGUFFamily(
        families=("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        choose=_llama_family,
        config=_llama,
        is_interleaved=True,
    ),
    "qwen2": GGUFFamily(families=("Qwen2ForCausalLM",), config=_rms),
    "qwen3": GGUFFamily(families=("Qwen3ForCausalLM",), config=_rms),
    "qwen3moe": GGUFFamily(families=("Qwen3MoeForCausalLM",), config=_qwen3_moe),
    "gemma2": GGUFFamily(
        families=("Gemma2ForCausalLM",),
        config=_gemma2,
        roles=POST_NORMS,
        has_whole_norms=True,
    ),
    "gemma3": GGUFFamily(
        families=("Gemma3ForCausalLM",),
        config=_gemma3,
        roles=POST_NORMS,
        has_whole_norms=True,
    ),
    "phi3": GGUFFamily(
        families=("Phi3ForCausalLM",),
        config=_phi3,
        roles=FUSED_QKV | {"gate_up": LAYER + "ffn_up"},
    ),
    "olmo2": GGUFFamily(
        families=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        choose=_olmo_family,
        config=_olmo2,
        roles=POST_NORMS,
    ),
    "exaone4": GGUFFamily(families=("Exaone4ForCausalLM",), config=_exaone4, roles=POST_NORMS),
    "granite": GGUFFamily(families=("GraniteForCausalLM",), config=_granite, is_interleaved=True),
    "smollm3": GGUFFamily(families=("SmolLM3ForCausalLM",), config=_rms, is_interleaved=True),
    "seed_oss": GGUFFamily(
        families=("SeedOssForCausalLM",),
        config=_rms,
        roles={"mlp_norm": LAYER + "post_attention_norm"},
    ),
    "cohere2": GGUFFamily(families=("Cohere2ForCausalLM",), config=_cohere2, is_interleaved=True),
    "starcoder2": GGUFFamily(families=("Starcoder2ForCausalLM",), config=_starcoder2),
    "stablelm": GGUFFamily(families=("StableLmForCausalLM",), config=_stablelm),
    "gpt2": GGUFFamily(
        families=("GPT2LMHeadModel",),
        config=_gpt2,
        roles=FUSED_QKV | {"positions": "position_embd"},
    ),
    "gpt-oss": GGUFFamily(
        families=("GptOssForCausalLM",),
        config=_gpt_oss,
        roles={"mlp_norm": LAYER + "post_attention_norm"},
    ),
    "gptneox": GGUFFamily(families=("GPTNeoXForCausalLM",), config=_gpt_neox, roles=FUSED_QKV),
}
"""`general.architecture` -> how it is read."""


def gguf_family(architecture: str) -> GGUFFamily:
    """Return how files of an architecture are read. Raises UnusableModel if it is not supported."""
    if family := FAMILIES.get(architecture):
        return family
    raise UnusableModel(
        f"architecture {architecture!r} is not supported in GGUF files; supported: "
        f"{', '.join(FAMILIES)}"
    )


def gguf_names(file: GGUFFile, spec: ModelSpec) -> TensorNames:
    """Return the names of the tensors in the file of a model."""
    names = architecture_names(file.metadata["general.architecture"], spec)
    if "blk.0.ffn_gate.0.weight" in file.tensors:
        return replace(names, roles={**names.roles, **OLD_EXPERTS})
    return names


def architecture_names(architecture: str, spec: ModelSpec) -> TensorNames:
    """Return the names of the tensors in today's files of an architecture."""
    family = gguf_family(architecture)
    orders: dict[str, RowOrder] = {}
    if family.is_interleaved:
        attention = spec.layers[0].attention
        orders = {
            "q": interleaved(attention.num_heads, attention.head_dim),
            "k": interleaved(attention.num_kv_heads, attention.head_dim),
        }
    computed = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS)
    return TensorNames({**ROLES, **family.roles}, orders=orders, computed=computed)


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """Return the model that the metadata describe. Raises UnusableModel, naming the key."""
    metadata = Metadata(file)
    family = gguf_family(metadata.architecture)
    if "token_embd.weight" not in file.tensors:
        raise UnusableModel(f"{file.path} holds no tensor 'token_embd.weight'")
    config = {"architectures": [family.family(metadata)], **_common(metadata)}
    config |= family.config(metadata)
    spec = find_family(config).spec(config, source=str(file.path))
    if family.has_whole_norms:
        spec = replace(spec, norm=replace(spec.norm, offset=0.0))
    return _with_layers(spec, metadata)


def _with_layers(spec: ModelSpec, metadata: Metadata) -> ModelSpec:
    """Return `spec` with the biases and the factors of rotary frequencies that the file has tensors
    for."""
    tensors = metadata.file.tensors

    def has_bias(*names: str) -> bool:
        return any(f"blk.0.{name}.bias" in tensors for name in names)

    def changed(layer: LayerSpec) -> LayerSpec:
        attention, mlp = layer.attention, layer.mlp
        attention = replace(
            attention,
            rope=attention.rope and _with_rope_factors(attention.rope, metadata),
            qkv_bias=attention.qkv_bias or has_bias("attn_q", "attn_qkv"),
            output_bias=attention.output_bias or has_bias("attn_output"),
        )
        mlp = replace(mlp, bias=mlp.bias or has_bias("ffn_up", "ffn_gate"))
        return replace(layer, attention=attention, mlp=mlp)

    new = {layer: changed(layer) for layer in set(spec.layers)}
    return replace(spec, layers=tuple(new[layer] for layer in spec.layers))


def _with_rope_factors(rope: RopeConfig, metadata: Metadata) -> RopeConfig:
    """Return `rope` with the factors of ROPE_FREQS, multiplied by the linear factor if the model
    has one."""
    if ROPE_FREQS not in metadata.file.tensors:
        return rope
    factor = rope.scaling.factor if isinstance(rope.scaling, LinearScaling) else 1.0
    factors = metadata.factors(ROPE_FREQS, rope.width)
    return replace(rope, scaling=FactorScaling(tuple(factor * each for each in factors)))
