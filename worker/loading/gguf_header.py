"""Model spec of a GGUF file, by its architecture. Needs no torch.

Missing keys get llama.cpp's defaults.
"""

from __future__ import annotations

import struct

from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields
from worker.loading.gguf_file import GGMLType, GGUFFile
from worker.models.rope_config import FactorScaling, LinearScaling, NoScaling, RopeConfig, Scaling
from worker.models.spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    checked_layers,
)
from worker.models.tensors import TensorNames, interleaved

ROLES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{i}.attn_norm",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "output": "blk.{i}.attn_output",
    "mlp_norm": "blk.{i}.ffn_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
}
ROPE_FREQS = "rope_freqs.weight"


def gguf_names(spec: ModelSpec) -> TensorNames:
    """Return the names of the tensors in a file of the llama architecture.

    llama.cpp's converter interleaves the two halves of each query and key head, because its rotary
    embedding rotates neighbouring items.
    """
    attention = spec.layers[0].attention
    orders = {
        "q": interleaved(attention.num_heads, attention.head_dim),
        "k": interleaved(attention.num_kv_heads, attention.head_dim),
    }
    return TensorNames(ROLES, orders=orders, computed=(ROPE_FREQS,))


def gguf_spec(file: GGUFFile) -> ModelSpec:
    """Return the model that the metadata describe. Raises UnusableModel, naming the key."""
    fields = Fields(file.metadata, str(file.path))
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise UnusableModel(
            f"architecture {architecture!r} is not supported in GGUF files, only 'llama'"
        )
    if fields.integer("llama.expert_count", 0):
        raise UnusableModel("mixtures of experts are not supported in GGUF files")
    if "token_embd.weight" not in file.tensors:
        raise UnusableModel(f"{file.path} holds no tensor 'token_embd.weight'")
    hidden = fields.integer("llama.embedding_length")
    num_heads = fields.integer("llama.attention.head_count")
    head_dim = _head_dim(fields, hidden // max(num_heads, 1))
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope=RopeConfig(head_dim, _theta(fields), _scaling(file, fields, head_dim)),
        scale=max(head_dim, 1) ** -0.5,
        window=fields.integer("llama.attention.sliding_window", 0) or None,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
    )
    mlp = MlpSpec(
        intermediate=fields.integer("llama.feed_forward_length"),
        bias="blk.0.ffn_gate.bias" in file.tensors,
    )
    num_layers = checked_layers(fields.integer("llama.block_count"))
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        context_tokens=fields.integer("llama.context_length"),
        layers=(LayerSpec(attention=attention, mlp=mlp),) * num_layers,
        norm=NormSpec(eps=fields.number("llama.attention.layer_norm_rms_epsilon")),
        tied_embeddings="output.weight" not in file.tensors,
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
