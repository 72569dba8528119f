"""A tiny random checkpoint of a model that reads images, complete with tokenizer, template and the
settings of its image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tests.support.image_models import SMOLVLM
from tests.support.wrapper_models import random_wrapper, write_wrapper

NUM_ROWS = 1
"""Rows of each tile of an image."""


def write_smolvlm(
    folder: Path,
    *,
    tile_rows: int = NUM_ROWS,
    tile_size: int = 28,
    longest_edge: int = 112,
    whole: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a SmolVLM to `folder`, and return it. An image is at most a dozen tiles.

    tile_rows      rows of each tile of an image
    tile_size      length of the side of a tile, in pixels
    longest_edge   longest side of an image, in pixels; a longer one is scaled
    whole          keys of the config, see random_wrapper
    changes        keys of the text part's config
    """
    inner = tokenizers.Tokenizer.from_buffer(SMOLVLM.tokenizer_json)
    model = random_wrapper(
        "SmolVLMForConditionalGeneration",
        "llama",
        whole=whole,
        vocab_size=inner.get_vocab_size(),
        eos_token_id=inner.token_to_id("<|im_end|>"),
        **changes,
    )
    model.config.image_token_id = inner.token_to_id(SMOLVLM.pad)
    write_wrapper(folder, model)
    (folder / "tokenizer.json").write_bytes(SMOLVLM.tokenizer_json)
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": SMOLVLM.template,
            **SMOLVLM.named,
        },
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": longest_edge},
            "max_image_size": {"longest_edge": tile_size},
            "do_image_splitting": True,
        },
        "processor_config.json": {"image_seq_len": tile_rows},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
