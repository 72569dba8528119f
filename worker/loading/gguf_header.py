"""Reads the model config of a GGUF file with the llama architecture. Needs no torch.

Missing keys get llama.cpp's defaults.
"""

from __future__ import annotations

import struct

from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields
from worker.loading.gguf_file import GGMLType, GGUFFile
from worker.models.config import LlamaConfig, within_window
from worker.models.rope_config import FactorScaling, LinearScaling, NoScaling, RopeConfig, Scaling

MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"


def hf_names(file: GGUFFile) -> dict[str, str]:
    """Return the Hugging Face name of each tensor -> its name in the file."""
    names: dict[str, str] = {}
    for name in file.tensors:
        if name != ROPE_FREQS and (other := names.setdefault(_hf_name(name), name)) != name:
            raise UnusableModel(f"{file.path}: {other!r} and {name!r} are the same tensor")
    return names


def _hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor, or `name` itself if it is not known.

    For example, blk.3.attn_q.weight becomes model.layers.3.self_attn.q_proj.weight.
    """
    match name.split("."):
        case [stem, ending] if stem in MODEL_TENSORS:
            return f"{MODEL_TENSORS[stem]}.{ending}"
        case ["blk", index, stem, ending] if stem in LAYER_TENSORS:
            return f"model.layers.{index}.{LAYER_TENSORS[stem]}.{ending}"
    return name


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """Return the config of the model that the metadata describe. Raises UnusableModel, naming the
    key."""
    fields = Fields(file.metadata, str(file.path))
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise UnusableModel(
            f"architecture {architecture!r} is not supported in GGUF files, only 'llama'"
        )
    if fields.integer("llama.expert_count", 0):
        raise UnusableModel("mixtures of experts are not supported")
    context_tokens, window = within_window(
        fields.integer("llama.context_length"),
        fields.integer("llama.attention.sliding_window", 0) or None,
    )
    if "token_embd.weight" not in file.tensors:
        raise UnusableModel(f"{file.path} holds no tensor 'token_embd.weight'")
    hidden = fields.integer("llama.embedding_length")
    num_heads = fields.integer("llama.attention.head_count")
    head_dim = _head_dim(fields, hidden // max(num_heads, 1))
    return LlamaConfig(
        architecture="LlamaForCausalLM",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        intermediate=fields.integer("llama.feed_forward_length"),
        num_layers=fields.integer("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_tokens=context_tokens,
        window=window,
        norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(_theta(fields), _scaling(file, fields, head_dim)),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )


def _head_dim(fields: Fields, default: int) -> int:
    head_dim = fields.integer("llama.attention.key_length", default)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            raise UnusableModel(f"{name} differs from the head dimension {head_dim}: not supported")
    return head_dim


def _theta(fields: Fields) -> float:
    theta = fields.number("llama.rope.freq_base", 10000.0)
    if theta <= 1:
        raise UnusableModel(f"llama.rope.freq_base is {theta}; it must be above 1")
    return theta


def _scaling(file: GGUFFile, fields: Fields, head_dim: int) -> Scaling:
    """Return the rope scaling. A factor without a type means linear scaling.

    If the file has the tensor ROPE_FREQS, its factors are multiplied by the linear factor.
    """
    kind = fields.text("llama.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnusableModel(f"rope scaling {kind!r} is not supported in GGUF files")
    if fields.number("llama.rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnusableModel("llama.rope.scaling.attn_factor is not supported in GGUF files")
    factor = _linear_factor(fields) if kind == "linear" else 1.0
    if ROPE_FREQS in file.tensors:
        return FactorScaling(tuple(factor * each for each in _rope_factors(file, head_dim)))
    return NoScaling() if factor == 1.0 else LinearScaling(factor)


def _linear_factor(fields: Fields) -> float:
    """Return the linear factor, from the current or the older key. Zero and absent mean 1."""
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        if key in fields:
            return fields.positive(key) if fields.number(key) else 1.0
    return 1.0


def _rope_factors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    info = file.tensors[ROPE_FREQS]
    if info.kind is not GGMLType.F32 or info.shape != (head_dim // 2,):
        raise UnusableModel(f"tensor {ROPE_FREQS} must have {head_dim // 2} numbers of type F32")
    return struct.unpack(f"<{head_dim // 2}f", file.content(ROPE_FREQS))
