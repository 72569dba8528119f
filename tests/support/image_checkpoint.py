"""A tiny random checkpoint of a model that reads images, complete with tokenizer, template and the
settings of its image processor."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from tests.support.image_models import SMOLVLM
from tests.support.wrapper_models import random_wrapper, write_wrapper

NUM_ROWS = 1
"""Rows of each tile of an image."""


def write_smolvlm(folder: Path) -> Path:
    """Write a SmolVLM to `folder`, and return it. An image is at most a dozen tiles."""
    inner = tokenizers.Tokenizer.from_buffer(SMOLVLM.tokenizer_json)
    model = random_wrapper(
        "SmolVLMForConditionalGeneration",
        "llama",
        vocab_size=inner.get_vocab_size(),
        eos_token_id=inner.token_to_id("<|im_end|>"),
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
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 28},
            "do_image_splitting": True,
        },
        "processor_config.json": {"image_seq_len": NUM_ROWS},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
