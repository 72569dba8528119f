"""Writes checkpoints of any size that need little disk space: a real header and a sparse file."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.support.tiny_checkpoint import CONFIG, tiny_tokenizer_json
from worker.spec.families.registry import find_family
from worker.spec.tensors import ModelTensors

LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""The sizes of a model of 70 billion weights."""


def write_sparse_llama(folder: Path, **changes: object) -> Path:
    """Write config.json, tokenizer.json and model.safetensors, in bfloat16, to `folder`."""
    config = CONFIG | LARGE | changes
    header: dict[str, object] = {}
    at = 0
    family = find_family(config)
    spec = family.spec(config)
    for name, shape in ModelTensors(spec, family.names(spec)).tensors():
        end = at + 2 * math.prod(shape)
        if name not in header:  # the head may be the embedding
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
            at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json()))
    return folder
