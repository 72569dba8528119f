"""GGUF files of the llama architecture: their names for things, and their weights dequantised.

llama.cpp's converter interleaves the two halves of each query and key head (its rotary embedding
turns neighbours); reading undoes it, so the model has one layout whatever the file.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.layers.rope import FactorScaling, LinearScaling, NoScaling, RopeConfig, Scaling
from worker.loading.blocks import BLOCK_WEIGHTS, BlockKind, Blocks, dequantized
from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields
from worker.loading.files import ModelFiles
from worker.loading.ggml_types import GGMLType
from worker.loading.gguf_file import GGUFFile
from worker.loading.gguf_text import gguf_text
from worker.models.config import LlamaConfig

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
PIECE_ITEMS = 1 << 18
"""Items dequantised at once: few enough to stay in cache, enough to keep Python out of the way."""
PLAIN_DTYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}


def read_gguf(path: Path) -> ModelFiles:
    """Raises UnusableModel, naming what is damaged or not supported."""
    file = GGUFFile(path)
    config = _config(file)
    weights = GGUFWeights(file, config)
    text = gguf_text(Fields(file.metadata, str(path)), config.vocab_size)
    return ModelFiles(path.stem, config, weights, text, [path])


class GGUFWeights:
    """A WeightSource. Dequantises piece by piece, straight into the target."""

    def __init__(self, file: GGUFFile, config: LlamaConfig) -> None:
        self._file = file
        self._config = config
        self._files_name = {_our_name(n): n for n in file.tensors if n != ROPE_FREQS}

    def names(self) -> Set[str]:
        return self._files_name.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._files_name[name]].shape

    def read_into(self, name: str, target: Tensor) -> None:
        heads = self._interleaved_heads(name)
        if not heads:
            read_tensor(self._file, self._files_name[name], target)
            return
        whole = torch.empty(target.shape, dtype=torch.float32)
        read_tensor(self._file, self._files_name[name], whole)
        half = self._config.head_dim // 2
        target.view(heads, 2, half, -1).copy_(whole.view(heads, half, 2, -1).transpose(1, 2))

    def blocks(self, name: str) -> Blocks | None:
        info = self._file.tensors[self._files_name[name]]
        if info.kind.name not in BlockKind.__members__:
            return None
        raw = self._file.raw(self._files_name[name]).reshape(
            info.shape[0], info.shape[1] // BLOCK_WEIGHTS, -1
        )
        if heads := self._interleaved_heads(name):
            half = self._config.head_dim // 2
            raw = raw.reshape(heads, half, 2, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape)
        return Blocks(BlockKind[info.kind.name], raw)

    def _interleaved_heads(self, name: str) -> int:
        """How many heads of the tensor the converter interleaved; 0 for most tensors."""
        if ".q_proj." in name:
            return self._config.num_heads
        return self._config.num_kv_heads if ".k_proj." in name else 0


def read_tensor(file: GGUFFile, name: str, target: Tensor) -> None:
    """Dequantise into `target`, a contiguous tensor of the same number of items."""
    kind, raw, flat = file.tensors[name].kind, file.raw(name), target.view(-1)
    if kind in PLAIN_DTYPES:
        flat.copy_(torch.from_numpy(raw).view(PLAIN_DTYPES[kind]))
        return
    block_items, block_bytes = kind.block
    step = PIECE_ITEMS // block_items
    blocks = raw.reshape(-1, block_bytes)
    for first in range(0, len(blocks), step):
        # A damaged scale gives infinities or NaN. That is no fault of the arithmetic, and shows
        # where it matters: rows whose logits are not finite fail.
        with np.errstate(all="ignore"):
            values = _dequantized(blocks[first : first + step], kind)
        if values is None:
            raise UnusableModel(f"{file.path}: {kind.name} (of {name}) is not supported")
        flat[first * block_items :][: values.size].copy_(torch.from_numpy(values))


def _dequantized(blocks: NDArray[np.uint8], kind: GGMLType) -> NDArray[np.float32] | None:
    """blocks [N, bytes of a block] -> their numbers, flat; None where nobody can."""
    if kind.name in BlockKind.__members__:
        return dequantized(BlockKind[kind.name], blocks).reshape(-1)
    from gguf.constants import GGMLQuantizationType  # late: it takes long, and is seldom needed
    from gguf.quants import dequantize

    try:
        # As one long row: the package walks over rows in Python, 16 at a time.
        row: NDArray[np.float32]
        (row,) = dequantize(blocks.reshape(1, -1), GGMLQuantizationType(kind))
    except NotImplementedError:
        return None
    return row


def _our_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names are kept."""
    match name.split("."):
        case [stem, ending] if stem in MODEL_TENSORS:
            return f"{MODEL_TENSORS[stem]}.{ending}"
        case ["blk", index, stem, ending] if stem in LAYER_TENSORS:
            return f"model.layers.{index}.{LAYER_TENSORS[stem]}.{ending}"
    return name


def _config(file: GGUFFile) -> LlamaConfig:
    fields = Fields(file.metadata, str(file.path))
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise UnusableModel(
            f"architecture {architecture!r} is not supported in GGUF files, only 'llama'"
        )
    if fields.integer("llama.expert_count", 0):
        raise UnusableModel("mixtures of experts are not supported")
    context_tokens = fields.integer("llama.context_length")
    window = fields.integer("llama.attention.sliding_window", context_tokens)
    if 0 < window < context_tokens:
        raise UnusableModel(f"sliding_window {window} is shorter than the context: not supported")
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
            raise UnusableModel(f"{name} differs from the head's {head_dim}: not supported")
    return head_dim


def _theta(fields: Fields) -> float:
    theta = fields.number("llama.rope.freq_base", 10000.0)
    if theta <= 1:
        raise UnusableModel(f"llama.rope.freq_base {theta} is not above 1")
    return theta


def _scaling(file: GGUFFile, fields: Fields, head_dim: int) -> Scaling:
    kind = fields.text("llama.rope.scaling.type", "none")
    factor = fields.positive("llama.rope.scaling.factor", 1.0)
    if kind not in ("none", "linear"):
        raise UnusableModel(f"rope scaling {kind!r} is not supported in GGUF files")
    if ROPE_FREQS not in file.tensors:
        return LinearScaling(factor) if kind == "linear" and factor != 1.0 else NoScaling()
    if kind != "none" or file.tensors[ROPE_FREQS].shape != (head_dim // 2,):
        raise UnusableModel(f"{ROPE_FREQS} of another shape, or with rope scaling {kind!r} on top")
    factors = torch.empty(head_dim // 2)
    read_tensor(file, ROPE_FREQS, factors)
    return FactorScaling(tuple(factors.tolist()))
