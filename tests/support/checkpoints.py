"""Tiny random Llama checkpoints, and directories of checkpoints as users get them.

`transformers` writes the weights and the config, so it is an oracle for our readers. No two
dimensions are equal, so a transposed or misplaced tensor has the wrong shape. `gguf_files` writes
GGUF files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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


def random_llama(**changes: Any) -> transformers.LlamaForCausalLM:
    """Return a Llama with grouped-query attention. Its random weights are so large that attention
    is sharp.

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
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, a few merges and three special tokens. It has fewer tokens than
    VOCAB, as in many real models."""
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_directory(path: Path, model: transformers.LlamaForCausalLM, **save: Any) -> Path:
    """Write a model, the tiny tokenizer and a chat template as transformers does. Return `path`.

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
