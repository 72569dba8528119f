"""Heads for drafts in GGUF files, as llama.cpp's converter writes them: as one more block after
those of the model, which `block_count` includes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.support.gguf_files import ARCHITECTURES, NEMOTRON_MOE, write_gguf
from tests.support.gguf_latent import DEEPSEEK32

Array = NDArray[np.float32]
QWEN = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}
"""Tensors of the heads of Qwen that belong to no layer -> their names in a layer."""
NEMOTRON = re.compile(r"mtp\.layers\.[01]\.(eh_proj|enorm|hnorm|final_layernorm)(\.weight)")
SECOND_NORM = "mtp.layers.1.norm.weight"
"""The norm before the experts of Nemotron's head. Its two layers become one block, in which this
norm has a name of its own."""


def write_gguf_with_head(path: Path, folder: Path, model: Any, **options: Any) -> Path:
    """Write a model with the head in its directory as a GGUF file, and return `path`.

    folder    written by `write_with_head`, which returns `model` as `theirs`
    options   options of `write_gguf`
    """
    config = model.config
    metadata = _facts(config) | options.pop("metadata", {})
    return write_gguf(path, model, metadata=metadata, head=head_tensors(folder, config), **options)


def head_tensors(folder: Path, config: Any) -> dict[str, Array]:
    """Return the tensors of the head in a directory, named like those of the model's layer after
    the last."""
    index = config.num_hidden_layers
    layer, found = f"model.layers.{index}.", {}
    for name, data in load_file(folder / "model.safetensors").items():
        if name.startswith(layer):
            found[name] = data
        elif name.startswith("mtp."):
            found[_renamed(name, index)] = data
    return found


def _renamed(name: str, index: int) -> str:
    base, _, ending = name.rpartition(".")
    if base in QWEN:
        return f"model.layers.{index}.{QWEN[base]}.{ending}"
    if name == SECOND_NORM:
        return f"blk.{index}.post_attention_norm.weight"
    if own := NEMOTRON.fullmatch(name):
        part = own[1].replace("final_layernorm", "shared_head.norm")
        return f"model.layers.{index}.{part}{own[2]}"
    of_layer = name.split(".", 3)[3]
    first = "backbone" if of_layer.startswith(("mixer.", "norm.")) else "model"
    return f"{first}.layers.{index}.{of_layer}"


def _facts(config: Any) -> dict[str, int | list[int] | list[bool]]:
    """Return the keys that the head adds to the file or changes. Lists have an item for its
    block."""
    name = MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    found: dict[str, int | list[int] | list[bool]] = {
        "block_count": config.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
    }
    match config.model_type:
        case "deepseek_v32":
            name = DEEPSEEK32
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            is_linear = [kind == "linear_attention" for kind in config.layer_types]
            found["attention.recurrent_layers"] = [*is_linear, False]
        case "nemotron_h":
            name, kinds = NEMOTRON_MOE, [*config.layer_types, "full_attention"]
            heads = [config.num_key_value_heads * (kind == "full_attention") for kind in kinds]
            widths = [config.moe_intermediate_size * (kind == "moe") for kind in kinds[:-1]]
            found["attention.head_count_kv"] = heads
            found["feed_forward_length"] = [*widths, config.moe_intermediate_size]
    return {f"{name}.{key}": value for key, value in found.items()}
