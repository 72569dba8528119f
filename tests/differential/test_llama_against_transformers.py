"""Our Llama gives the logits of transformers for the same files, in chunks of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support.checkpoints import LLAMA3_ROPE, random_llama, write_directory
from tests.support.eager import EagerStepper, assert_same, expected, load, some_tokens
from tests.support.gguf_files import write_gguf
from worker.attention.reference import ReferenceAttention

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one key/value head": {"num_key_value_heads": 1},
    "as many key/value heads": {"num_key_value_heads": 6},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [[(61,)], [(7,), (1,), (30,), (23,)], [(40,), *[(1,)] * 21]])
def test_logits_equal_those_of_transformers_in_chunks_of_any_size(
    tmp_path: Path, variant: str, steps: list[tuple[int, ...]]
) -> None:
    theirs, tokens = random_llama(**VARIANTS[variant]), some_tokens(61)
    stepper = EagerStepper(load(write_directory(tmp_path, theirs)), [tokens])
    assert_same(stepper.run(steps)[0], expected(theirs, tokens))


def test_requests_in_one_batch_do_not_affect_each_other(tmp_path: Path) -> None:
    theirs = random_llama(rope_parameters=LLAMA3_ROPE)
    requests = [some_tokens(count, seed=count) for count in (50, 9, 33)]
    stepper = EagerStepper(load(write_directory(tmp_path, theirs)), requests)
    steps = [(20, 8, 0), (1, 1, 30), (28, 0, 1), (1, 0, 1), (0, 0, 1)]
    for ours, tokens in zip(stepper.run(steps), requests, strict=True):
        assert_same(ours, expected(theirs, tokens))


def test_the_reference_attention_gives_the_same_logits(tmp_path: Path) -> None:
    theirs, tokens = random_llama(), some_tokens(40)
    loaded = load(write_directory(tmp_path, theirs))
    stepper = EagerStepper(loaded, [tokens], ReferenceAttention())
    assert_same(stepper.run([(25,), (1,), (14,)])[0], expected(theirs, tokens))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_file_gives_the_logits_of_transformers(tmp_path: Path, variant: str) -> None:
    theirs, tokens = random_llama(**VARIANTS[variant]), some_tokens(40)
    stepper = EagerStepper(load(write_gguf(tmp_path / "tiny.gguf", theirs)), [tokens])
    assert_same(stepper.run([(40,)])[0], expected(theirs, tokens))


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
