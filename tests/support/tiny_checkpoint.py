"""A Llama of about 19,000 random weights on disk, for tests that start real processes.

Importing torch takes seconds, and most processes that import this module write no weights. So torch
is imported only in the function that writes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.model import smollm2_gguf

if TYPE_CHECKING:
    import torch

VOCAB = 97
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_llama(folder: Path, seed: int = 3, **changes: object) -> Path:
    """Write config.json, tokenizer.json and model.safetensors to `folder`, and return it."""
    from safetensors.torch import save_file

    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json()))
    weights = _weights(seed, config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_roomy_llama(folder: Path) -> Path:
    """Write a model with a context long enough for answers that outlast a test."""
    return write_tiny_llama(folder, max_position_embeddings=16384)


FITTING: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Dimensions that the compiled kernels support, unlike those of CONFIG."""


def write_babbling_llama(folder: Path, **changes: object) -> Path:
    """Write a model with the tokenizer and the chat template of the default model.

    Its weights are random, so it may write any token that is allowed. If a grammar fails to
    constrain an answer, this model shows it sooner than the default model, in a hundredth of the
    time.
    """
    from worker.checkpoint.gguf_file import GGUFFile
    from worker.checkpoint.gguf_tokenizer import gguf_text
    from worker.spec.fields import Fields

    vocab_size = 49152
    path = smollm2_gguf()
    text = gguf_text(Fields(GGUFFile(path).metadata, str(path)), vocab_size)
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 2048}
    write_tiny_llama(folder, **(sizes | changes))  # type: ignore[arg-type]
    (folder / "tokenizer.json").write_bytes(text.tokenizer)
    assert text.chat_template is not None
    (folder / "chat_template.jinja").write_text(text.chat_template)
    return folder


def tiny_tokenizer_json() -> dict[str, object]:
    """Return a tokenizer.json in which each token is a word: w0, w1, ..."""
    vocab = {f"w{number}": number for number in range(VOCAB)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }


def _weights(seed: int, config: dict[str, object]) -> dict[str, torch.Tensor]:
    import torch

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    vocab_size, hidden, inner, heads = (int(str(config[name])) for name in sizes)
    kv = hidden // heads * int(str(config["num_key_value_heads"]))

    random = torch.Generator().manual_seed(seed)

    def weight(out: int, width: int) -> torch.Tensor:
        return torch.randn(out, width, generator=random) * 0.2

    weights = {"model.embed_tokens.weight": weight(vocab_size, hidden)}
    weights["model.norm.weight"] = torch.ones(hidden)
    for layer in range(2):
        at = f"model.layers.{layer}"
        weights[f"{at}.input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{at}.post_attention_layernorm.weight"] = torch.ones(hidden)
        for name, out, width in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{at}.{name}.weight"] = weight(out, width)
    return weights
