"""Tiny random Llama checkpoints, written as users get them: a directory, or one GGUF file.

`transformers` and `gguf` write everything themselves, so they are oracles for our readers. No two
dimensions are equal, so a transposed or misplaced tensor has the wrong shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, quants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 320
SPECIAL = ["<|end|>", "<|start|>", "<|stop|>"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def random_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a model with grouped heads, and weights so large that attention is sharp.

    changes   fields of its LlamaConfig
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, a few merges and three special tokens.

    VOCAB is larger than this, as in many real models.
    """
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_directory(path: Path, model: LlamaForCausalLM, **save: Any) -> Path:
    """Write a model, its tokenizer and its chat template as transformers does.

    save   options of save_pretrained, such as max_shard_size
    """
    model.save_pretrained(path, **save)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<|start|>",
        "eos_token": {"content": "<|stop|>", "special": True},
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, float | str | int] | None = None,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does.

    Rows of queries and keys are interleaved, and vectors are stored in float32.

    metadata   keys to add
    """
    config: Any = model.config
    tokenizer = tiny_tokenizer()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([piece for piece, _ in vocab])
    writer.add_token_types([3 if piece in SPECIAL else 1 for piece, _ in vocab])
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        _add_tensor(writer, config, name, tensor.numpy(), kind)
    _add_rope_scaling(writer, config)
    for key, value in (metadata or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](key, value)  # type: ignore[operator]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def _add_tensor(
    writer: GGUFWriter, config: Any, name: str, data: Any, kind: GGMLQuantizationType
) -> None:
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, number in heads.items():
        if projection in name:
            halves = data.reshape(number, 2, config.head_dim // 2, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
    for theirs, files in GGUF_NAMES.items():
        name = name.replace(theirs, files)
    kind = kind if data.ndim == 2 else GGMLQuantizationType.F32
    writer.add_tensor(name, quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)


def _add_rope_scaling(writer: GGUFWriter, config: Any) -> None:
    """Write the rope scaling. In GGUF files, the scaling of Llama 3 is one factor per pair."""
    rope = config.rope_parameters
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] != "llama3":
        return
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for pair in range(config.head_dim // 2):
        length = 2 * np.pi * rope["rope_theta"] ** (2 * pair / config.head_dim)
        smooth = (low / length - 1) / (low / high - 1)
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if length < high else rope["factor"] if length > low else between)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
