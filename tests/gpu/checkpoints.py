"""Writes checkpoints of random weights, for stages that need the same weights in two places."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from worker.checkpoint.random_weights import RandomWeights
from worker.loading.header import ModelHeader, read_header

SHARD_BYTES = 2 << 30


def write_checkpoint(config: Path, folder: Path, device: torch.device) -> Path:
    """Write a model of bfloat16 with random weights, which `device` makes, and a tokenizer whose
    tokens are the words w0, w1, ... Return the folder."""
    header = read_header(config)
    assert isinstance(header, ModelHeader)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(config, folder / "config.json")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(header.vocab_size)))
    source, num_shards = RandomWeights(), 0
    shard: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    tensors = dict(header.tensors.tensors())  # the head may be the embedding
    for number, (name, shape) in enumerate(tensors.items(), 1):
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        source.read_into(name, weight)
        shard[name] = weight.cpu()
        if number == len(tensors) or sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            num_shards += 1
            file = f"model-{num_shards:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
            shard = {}
    index = {"metadata": {"total_size": weight_bytes(header)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def weight_bytes(header: ModelHeader) -> int:
    """Return the bytes of the model's weights in bfloat16."""
    return sum(2 * math.prod(shape) for shape in dict(header.tensors.tensors()).values())


def _tokenizer(vocab_size: int) -> dict[str, object]:
    vocab = {f"w{number}": number for number in range(vocab_size)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
