"""A model of another family than the default one, with its published tokenizer and template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.family_models import random_model
from tests.support.server import Server
from tests.support.tokenizers import REAL_TOKENIZERS

QWEN3 = REAL_TOKENIZERS / "qwen3"
VOCAB_SIZE = 151_936


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """Return a Qwen3 of random weights with the published tokenizer and chat template."""
    if not QWEN3.exists():
        pytest.skip(f"the tokenizer in {QWEN3} is missing")
    model = random_model(
        "qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        max_position_embeddings=4096,
    )
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QWEN3 / name, tmp_path)
    return tmp_path


def test_a_random_qwen3_is_served_and_its_formats_are_found(qwen3: Path) -> None:
    with Server("--served-name", "qwen", "--max-slots", "4", model=str(qwen3)) as server:
        (listed,) = requests.get(f"{server.url}/v1/models").json()["data"]
        assert "tool calls: hermes" in json.dumps(listed)
        assert "reasoning: qwen3" in json.dumps(listed)
        body: dict[str, Any] = {
            "model": "qwen",
            "messages": [{"role": "user", "content": "How warm is it?"}],
            "max_completion_tokens": 8,
            "ignore_eos": True,
        }
        answer = requests.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 8, answer
