"""Files of Llama with metadata that scale RoPE, or with shards in half precision, give the logits
of transformers. Every family is compared in test_families.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.checkpoints import LLAMA3_ROPE, random_llama, write_directory
from tests.support.eager import EagerStepper, assert_same, expected, load, some_tokens
from tests.support.gguf_files import write_gguf

LINEAR_ROPE = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
FACTOR, OLD_FACTOR = "llama.rope.scaling.factor", "llama.rope.scale_linear"
TYPE, WINDOW = "llama.rope.scaling.type", "llama.attention.sliding_window"


@pytest.mark.parametrize(
    ("metadata", "same_as"),
    [
        ({FACTOR: 4.0}, LINEAR_ROPE),
        ({OLD_FACTOR: 4.0}, LINEAR_ROPE),
        ({FACTOR: 4.0, OLD_FACTOR: 9.0}, LINEAR_ROPE),
        ({TYPE: "linear", OLD_FACTOR: 4.0}, LINEAR_ROPE),
        ({FACTOR: 0.0}, {}),
        ({TYPE: "linear"}, {}),
        ({TYPE: "none", FACTOR: 4.0}, {}),
        ({WINDOW: 512}, {}),
        ({WINDOW: 0}, {}),
    ],
    ids=str,
)
def test_rope_scaling_of_a_gguf_file_has_the_meaning_of_llama_cpp(
    tmp_path: Path, metadata: dict[str, Any], same_as: dict[str, Any]
) -> None:
    """Both models have the same weights, because their seed is fixed."""
    theirs, tokens = random_llama(**same_as), some_tokens(40)
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(), metadata=metadata)
    assert_same(EagerStepper(load(path), [tokens]).run([(40,)])[0], expected(theirs, tokens))


def test_linear_scaling_multiplies_each_pairs_own_factor(tmp_path: Path) -> None:
    theirs, tokens = random_llama(rope_parameters=LLAMA3_ROPE), some_tokens(40)
    path = write_gguf(tmp_path / "tiny.gguf", theirs, metadata={FACTOR: 2.0})
    rotary = theirs.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq / 2
    assert_same(EagerStepper(load(path), [tokens]).run([(40,)])[0], expected(theirs, tokens))


def test_shards_in_half_precision_give_the_logits_of_transformers(tmp_path: Path) -> None:
    tokens = some_tokens(20)
    for dtype in (torch.bfloat16, torch.float16):
        model: Any = random_llama()
        model.to(dtype)
        path = write_directory(tmp_path / str(dtype), model, max_shard_size="200KB")
        assert len(list(path.glob("*.safetensors"))) > 1
        theirs = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        ours = EagerStepper(load(path), [tokens]).run([(20,)])[0]
        assert_same(ours, expected(theirs, tokens))
