"""Every model family as a GGUF file, against transformers: the logits are the same.

The files are written as llama.cpp's converter writes them (`tests.support.gguf_files`).
"""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES

from tests.support.checkpoints import VOCAB
from tests.support.eager import EagerStepper, assert_same, expected, load, some_tokens
from tests.support.family_models import CASES, SPARSE_NEMOTRON, VARIANTS, random_model
from tests.support.gguf_files import ARCHITECTURES, GRANITE_HYBRID, NEMOTRON_MOE, write_gguf
from tests.support.gguf_latent import DEEPSEEK32
from worker.checkpoint.gguf_families import FAMILIES
from worker.errors import UnusableModel

NUM_TOKENS = 61
UNSTORED = {
    "granite": {"llama3 rope"},
    "granitemoehybrid": {"limits", "rope", "wide heads", "no rope", "biases of Mamba"},
    "seed_oss": {"llama3 rope"},
    "smollm3": {"windows", "all rotated", "none rotated", "every second"},
    "mistral": {"window"},
    "ministral3": {"window", "plain rope"},
    **{key: {"yarn rope", "halves"} for key in ("deepseek_v2", "deepseek_v3", "youtu")},
    "deepseek_v32": {"yarn rope", "by layer"},
    "glm4_moe_lite": {"yarn rope", "halves", "by layer"},
    "mistral4": {"halves"},
    "minicpm3": {
        *("plain queries", "one head", "no factors", "usual values"),
        *("yarn rope", "equal scales"),
    },
    "kimi_linear": {"not renormalised", "by layer"},
    "mixtral": {"window"},
    "qwen2": {"windows", "llama3 rope"},
    "qwen3": {"windows", "llama3 rope"},
    "qwen3_moe": {"window", "dense layers", "every second layer"},
    "lfm2_moe": {"untied", "not renormalised", "scaled"},
    "nemotron_h": {"plain", "MLP first", "biases", "limits", "silu"},
    "falcon_h1": {
        *("tied", "biases of Mamba", "norm before the gate", "limits", "by expansion"),
        *("linear rope", "llama3 rope", "yarn rope"),
    },
    "falcon_mamba": {"large eps", "one state"},
    "mamba2": {"limits of dt"},
    "qwen2_moe": {"renormalised", "dense layers", "windows"},
    "qwen3_next": {"not renormalised", "dense layers"},
    "olmoe": {"renormalised"},
    "ernie4_5_moe": {"some layers"},
    "apertus": {"silu"},
    "hunyuan_v1_dense": {"llama3 rope"},
    "hunyuan_v1_moe": {"by layer", "llama3 rope"},
    "phimoe": {"no jitter", "much jitter", "long rope"},
    "llama4_text": {
        *("no chunks", "long chunks", "no norms", "no growth", "all rotated", "none rotated"),
        *("every second", "some experts", "dense", "chunks without rope"),
    },
    "gemma": {"untied"},
    "gemma2": {"untied", "no caps", "all full"},
    "gemma3_text": {"every second", "caps"},
    "gemma3n_text": {"not scaled"},
    "gemma4_text": {"biases", "scaled", "all full"},
    "olmo2": {"llama3 rope"},
    "gpt2": {"by layer", "unscaled", "gelu"},
    "starcoder2": {"window"},
    "cohere2": {"every second", "biases", "untied"},
    "gpt_oss": {"all full", "clamped", "yarn rope"},
}
"""Variants whose options llama.cpp's converter does not write, or refuses."""
FIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "falcon_mamba": {"mixer_rms_eps": 1e-5},
    "minicpm3": {"dim_model_base": 256, "v_head_dim": 16},
    "phimoe": {"router_jitter_noise": 0.01},
    "llama4_text": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "gemma3n_text": {"vocab_size_per_layer_input": VOCAB},
}
"""Options that GGUF files do not store, with the only value that llama.cpp computes with."""
STORED = [
    (model_type, variant, changes | FIXED.get(model_type, {}))
    for model_type, variant, changes in CASES
    if model_type in ARCHITECTURES and variant not in UNSTORED.get(model_type, set())
]


VISION = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"}
"""Architecture of the text parts of models of images -> the model type that computes the same.
Their files have the keys and tensors of this type, and the sections of M-RoPE."""


def test_every_architecture_is_tried() -> None:
    written = {MODEL_ARCH_NAMES[ARCHITECTURES[model_type]] for model_type, _, _ in STORED}
    others = {GRANITE_HYBRID, NEMOTRON_MOE, DEEPSEEK32}
    assert written | VISION.keys() | others == FAMILIES.keys()


@pytest.mark.parametrize("architecture", VISION)
def test_the_text_part_of_a_model_of_images_is_read(tmp_path: Path, architecture: str) -> None:
    model_type = VISION[architecture]
    theirs, tokens = random_model(model_type, **FIXED.get(model_type, {})), some_tokens(NUM_TOKENS)
    sections = {f"{architecture}.rope.dimension_sections": [8, 4, 4, 0]}
    file = tmp_path / "tiny.gguf"
    loaded = load(write_gguf(file, theirs, metadata=sections, architecture=architecture))
    assert_same(EagerStepper(loaded, [tokens]).run([(61,)])[0], expected(theirs, tokens))


@pytest.mark.parametrize(
    ("model_type", "variant", "changes"), STORED, ids=[f"{a} {b}" for a, b, _ in STORED]
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, model_type: str, variant: str, changes: dict[str, Any]
) -> None:
    theirs, tokens = random_model(model_type, **changes), some_tokens(NUM_TOKENS)
    loaded = load(write_gguf(tmp_path / "tiny.gguf", theirs))
    logits = expected(theirs, tokens)
    atol = 1e-4 * max(1.0, float(logits.abs().max()) / 10)
    assert_same(EagerStepper(loaded, [tokens]).run([(30,), (1,), (30,)])[0], logits, atol)


@pytest.mark.parametrize("drafts", [1, 2])
def test_the_layers_for_drafts_of_a_glm4_moe_are_left_out(tmp_path: Path, drafts: int) -> None:
    theirs, tokens = random_model("glm4_moe"), some_tokens(NUM_TOKENS)
    more = {f"blk.{4 + i}.attn_norm.weight": np.ones(96, np.float32) for i in range(drafts)}
    metadata: dict[str, float | str | int] = {"glm4moe.block_count": 4 + drafts}
    file = write_gguf(tmp_path / "a.gguf", theirs, metadata=metadata, more=more)
    with pytest.raises(UnusableModel, match="missing"):
        load(file)
    metadata["glm4moe.nextn_predict_layers"] = drafts
    file = write_gguf(tmp_path / "b.gguf", theirs, metadata=metadata, more=more)
    assert_same(EagerStepper(load(file), [tokens]).run([(61,)])[0], expected(theirs, tokens))


def test_the_layer_for_drafts_of_a_nemotron_h_is_left_out(tmp_path: Path) -> None:
    """It follows the layers of the model, and has attention and experts."""
    theirs, tokens = random_model("nemotron_h", **SPARSE_NEMOTRON), some_tokens(NUM_TOKENS)
    metadata: dict[str, int | list[int]] = {
        "nextn_predict_layers": 1,
        "block_count": 7,
        "feed_forward_length": [0, 48, 0, 48, 0, 48, 48],
        "attention.head_count_kv": [0, 0, 2, 0, 0, 0, 2],
    }
    path = write_gguf(
        tmp_path / "tiny.gguf",
        theirs,
        metadata={f"{NEMOTRON_MOE}.{key}": value for key, value in metadata.items()},
        more={"blk.6.attn_norm.weight": np.ones(96, np.float32)},
    )
    assert_same(
        EagerStepper(load(path), [tokens]).run([(NUM_TOKENS,)])[0], expected(theirs, tokens)
    )


def test_a_gemma_3n_reads_zeros_for_tokens_without_per_layer_inputs(tmp_path: Path) -> None:
    """The converter adds rows of zeros to the table, so these tokens do not read its first row."""
    theirs, tokens = random_model("gemma3n_text"), [each or 1 for each in some_tokens(NUM_TOKENS)]
    rows = theirs.config.vocab_size_per_layer_input
    loaded = load(write_gguf(tmp_path / "tiny.gguf", theirs))
    with torch.no_grad():
        theirs.model.embed_tokens_per_layer.weight[0] = 0
    assert max(tokens) >= rows
    assert_same(EagerStepper(loaded, [tokens]).run([(61,)])[0], expected(theirs, tokens))


def test_a_gemma_3n_without_cutoffs_drops_gates_in_its_first_ten_layers(tmp_path: Path) -> None:
    shares = [0.95] * 10 + [0.0] * 2
    theirs = random_model(
        "gemma3n_text",
        num_hidden_layers=12,
        layer_types=["sliding_attention", "full_attention"] * 6,
        intermediate_size=96,
        activation_sparsity_pattern=shares,
        vocab_size_per_layer_input=VOCAB,
    )
    tokens, key = some_tokens(NUM_TOKENS), "gemma3n.activation_sparsity_scale"
    loaded = load(write_gguf(tmp_path / "tiny.gguf", theirs, skips=key))
    # With twice as many layers as usual, rounding adds up: transformers in float32 is as far from
    # itself in float64.
    ours = EagerStepper(loaded, [tokens]).run([(61,)])[0]
    assert_same(ours, expected(theirs, tokens), 3e-4)


REFUSED: list[tuple[str, dict[str, list[Any]], str]] = [
    ("gemma3n_text", {"gemma3n.activation_sparsity_scale": [0.5] * 5}, "each of 6 layers"),
    ("gemma3n_text", {"gemma3n.activation_sparsity_scale": [40.0] * 6}, "within 0..1"),
    ("apertus", {"xielu.beta": [0.5] * 3}, "for each of 4 layers"),
    ("apertus", {"xielu.beta": ["0.5"] * 4}, "'xielu.beta' is '0.5'"),
    ("jamba", {"jamba.attention.head_count_kv": [2, 2, 0, 0]}, "attn_layers are [0, 1]"),
    ("jamba", {"jamba.attention.head_count_kv": [2, 0, 3, 0]}, "or the same number"),
]


@pytest.mark.parametrize(("model_type", "metadata", "message"), REFUSED, ids=str)
def test_metadata_that_the_family_cannot_have_are_refused(
    tmp_path: Path, model_type: str, metadata: dict[str, list[Any]], message: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_model(model_type), metadata=metadata)
    with pytest.raises(UnusableModel) as refused:
        load(path)
    assert message in refused.value.message


def test_the_long_rope_of_phimoe_has_the_factor_of_phi3(tmp_path: Path) -> None:
    """The converter does not write the factor of the config."""
    rope = VARIANTS["phimoe"]["long rope"]["rope_parameters"]
    scale = (1 + log(512 / 128) / log(128)) ** 0.5
    rope = rope | {"short_mscale": scale, "long_mscale": scale}
    theirs = random_model("phimoe", rope_parameters=rope, router_jitter_noise=0.01)
    tokens, loaded = some_tokens(NUM_TOKENS), load(write_gguf(tmp_path / "tiny.gguf", theirs))
    assert loaded.spec.context_tokens == 128
    assert_same(EagerStepper(loaded, [tokens]).run([(61,)])[0], expected(theirs, tokens))


def test_the_norms_of_llama_4_depend_on_the_number_of_experts(tmp_path: Path) -> None:
    """The files do not say whether queries and keys have norms. Only the largest model has none."""
    changes = FIXED["llama4_text"] | {"num_local_experts": 128, "use_qk_norm": False}
    theirs, tokens = random_model("llama4_text", **changes), some_tokens(NUM_TOKENS)
    loaded = load(write_gguf(tmp_path / "tiny.gguf", theirs))
    assert_same(EagerStepper(loaded, [tokens]).run([(61,)])[0], expected(theirs, tokens))


def test_older_files_with_a_tensor_for_each_expert_are_read(tmp_path: Path) -> None:
    theirs, tokens = random_model("mixtral"), some_tokens(NUM_TOKENS)
    path = write_gguf(tmp_path / "tiny.gguf", theirs, stacks_experts=False)
    logits = expected(theirs, tokens)
    assert_same(EagerStepper(load(path), [tokens]).run([(NUM_TOKENS,)])[0], logits)
