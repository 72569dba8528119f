"""Every model family against transformers: tiny random checkpoints, with its config's options
toggled, give the same logits however the work is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.checkpoints import VOCAB, write_directory
from tests.support.eager import (
    BLOCK_TOKENS,
    CPU,
    EagerStepper,
    assert_same,
    expected,
    load,
    some_tokens,
)
from tests.support.kernels import native_kernels
from worker.attention.reference import ReferenceAttention
from worker.attention.select import select_attention
from worker.models.families.registry import FAMILIES
from worker.models.load import load_model

NUM_TOKENS = 61
MODEL_TYPES = [family.model_type for family in FAMILIES]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""No two dimensions are equal: a transposed or misplaced tensor has the wrong shape."""
OWN_SIZES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 5,
        "num_experts_per_tok": 2,
    },
    "mistral": {"head_dim": 32},
    "ministral": {"head_dim": 32},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 40},
    "gemma3_text": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 40},
    "seed_oss": {"head_dim": 32},
    "granite": {
        "embedding_multiplier": 2.5,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "gpt2": {"n_inner": 160},
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 128,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear rope": {"rope_parameters": LINEAR},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
}
WINDOW = {"sliding_window": 24}
BIASED = {"attention_bias": True}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"tied": TIED, "biases": BIASED | {"mlp_bias": True}, **ROPES},
    "granite": {"tied": TIED, "biases": BIASED | {"mlp_bias": True}, **ROPES},
    "seed_oss": {
        "tied": TIED,
        "no biases": {"attention_bias": False},
        "all biases": {"attention_out_bias": True, "mlp_bias": True},
        **ROPES,
    },
    "smollm3": {
        "untied": UNTIED,
        "windows": {"use_sliding_window": True, **WINDOW},
        "all rotated": {"no_rope_layers": [1, 1, 1, 1]},
        "none rotated": {"no_rope_layers": [0, 0, 0, 0]},
        "every second": {"no_rope_layer_interval": 2},
        **ROPES,
    },
    "mistral": {"window": WINDOW, "no window": {"sliding_window": None}, "tied": TIED, **ROPES},
    "ministral": {
        "window": WINDOW,
        "some windows": WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        **ROPES,
    },
    "mixtral": {"window": WINDOW, "one expert": {"num_experts_per_tok": 1}, "tied": TIED},
    "qwen2": {
        "tied": TIED,
        "windows": {"use_sliding_window": True, "max_window_layers": 2, **WINDOW},
        **ROPES,
    },
    "qwen3": {
        "tied": TIED,
        "biases": BIASED,
        "windows": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
        **ROPES,
    },
    "qwen3_moe": {
        "renormalised": {"norm_topk_prob": True},
        "dense layers": {"mlp_only_layers": [1], "decoder_sparse_step": 1},
        "every second layer": {"decoder_sparse_step": 2},
        "window": {"use_sliding_window": True, **WINDOW},
        "biases": BIASED,
    },
    "gemma2": {
        "untied": UNTIED,
        "biases": BIASED,
        "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "small caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        "all full": {"layer_types": ["full_attention"] * 4},
    },
    "gemma3_text": {
        "untied": UNTIED,
        "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        "every second": {"sliding_window_pattern": 2},
        "scaled": {
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    },
    "phi3": {
        "window": WINDOW,
        "tied": TIED,
        "partial": {"partial_rotary_factor": 0.5},
        "long rope": {"rope_parameters": LONG, "original_max_position_embeddings": 128},
    },
    "olmo2": {"tied": TIED, "biases": BIASED, **ROPES},
    "olmo3": {"windows": WINDOW, "biases": BIASED | WINDOW},
    "exaone4": {
        "windows": WINDOW,
        "no windows": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        "every second": WINDOW | {"sliding_window_pattern": 2},
        **ROPES,
    },
    "gpt2": {
        "untied": UNTIED,
        "by layer": {"scale_attn_by_inverse_layer_idx": True},
        "unscaled": {"scale_attn_weights": False},
        "gelu": {"activation_function": "gelu"},
        "no inner": {"n_inner": None},
    },
    "gpt_neox": {
        "one after the other": {"use_parallel_residual": False},
        "no biases": {"attention_bias": False},
        "whole heads": {"rotary_pct": 1.0},
        "tied": TIED,
    },
    "starcoder2": {"window": WINDOW, "no biases": {"use_bias": False}, "untied": UNTIED},
    "stablelm": {
        "biases": {"use_qkv_bias": True},
        "parallel": {"use_parallel_residual": True},
        "half": {"partial_rotary_factor": 0.5},
        "tied": TIED,
    },
    "cohere2": {
        "windows": WINDOW,
        "every second": WINDOW | {"sliding_window_pattern": 2},
        "biases": BIASED | WINDOW,
        "untied": UNTIED,
        "scaled": {"logit_scale": 2.0},
    },
}
CASES = [
    (model_type, variant, changes)
    for model_type in MODEL_TYPES
    for variant, changes in {"plain": {}, **VARIANTS.get(model_type, {})}.items()
]


def random_model(model_type: str, **changes: Any) -> Any:
    """Return transformers' model with random weights, biases and norms."""
    settings = SIZES | OWN_SIZES.get(model_type, {}) | changes
    if model_type == "gpt_neox":
        del settings["num_key_value_heads"]
    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def test_every_family_has_variants() -> None:
    assert VARIANTS.keys() == set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("model_type", "variant", "changes"), CASES, ids=[f"{a} {b}" for a, b, _ in CASES]
)
def test_logits_are_those_of_transformers_whole_in_chunks_and_token_by_token(
    tmp_path: Path, model_type: str, variant: str, changes: dict[str, Any]
) -> None:
    theirs, tokens = random_model(model_type, **changes), some_tokens(NUM_TOKENS)
    loaded = load(write_directory(tmp_path, theirs))
    logits = expected(theirs, tokens)
    atol = 1e-4 * max(1.0, float(logits.abs().max()) / 10)
    for steps in [(61,)], [(7,), (1,), (30,), (23,)], [(40,), *[(1,)] * 21]:
        assert_same(EagerStepper(loaded, [tokens]).run(steps)[0], logits, atol)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_requests_in_one_batch_do_not_see_each_other(tmp_path: Path, model_type: str) -> None:
    theirs = random_model(model_type)
    requests = [some_tokens(count, seed=count) for count in (50, 9, 33)]
    stepper = EagerStepper(load(write_directory(tmp_path, theirs)), requests)
    steps = [(20, 8, 0), (1, 1, 30), (28, 0, 1), (1, 0, 1), (0, 0, 1)]
    for ours, tokens in zip(stepper.run(steps), requests, strict=True):
        logits = expected(theirs, tokens)
        assert_same(ours, logits, 1e-4 * max(1.0, float(logits.abs().max()) / 10))


WHOLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "granite": {},
    "seed_oss": {},
    "smollm3": {"use_sliding_window": True, **WINDOW},
    "mistral": WINDOW,
    "ministral": WINDOW,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **WINDOW},
    "qwen3": {},
    "phi3": {},
}
"""Families of which one call of the compiled kernels computes a step."""
BY_OPERATION: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3_text": {},
    "mixtral": WINDOW,
    "cohere2": WINDOW,
    "olmo2": {},
}
"""Families of which the compiled kernels compute single operations: attention at least."""


@pytest.mark.parametrize(("model_type", "changes"), [*WHOLE.items(), *BY_OPERATION.items()])
def test_the_compiled_kernels_give_the_same_logits(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 192, "head_dim": 32} if model_type != "phi3" else {"hidden_size": 192}
    theirs, tokens = random_model(model_type, **(sizes | changes)), some_tokens(400)
    path, kernels = write_directory(tmp_path, theirs), native_kernels()
    loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=kernels, weights="packed")
    assert (loaded.model.whole is not None) == (model_type in WHOLE)
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    logits = expected(theirs, tokens)
    atol = 3e-4 * max(1.0, float(logits.abs().max()) / 10)
    for steps in [(400,)], [(7,), (1,), (300,), (80,), (12,)], [(350,), *[(1,)] * 50]:
        assert_same(EagerStepper(loaded, [tokens], attention).run(steps)[0], logits, atol)


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3", "cohere2"])
def test_the_reference_attention_gives_the_same_logits(tmp_path: Path, model_type: str) -> None:
    theirs, tokens = random_model(model_type, sliding_window=16), some_tokens(40)
    stepper = EagerStepper(load(write_directory(tmp_path, theirs)), [tokens], ReferenceAttention())
    assert_same(stepper.run([(25,), (1,), (14,)])[0], expected(theirs, tokens), 1e-3)


def test_tensors_without_the_prefix_of_the_base_model_are_found(tmp_path: Path) -> None:
    """The files of the first GPT-2 are such."""
    theirs, tokens = random_model("gpt2"), some_tokens(20)
    write_directory(tmp_path, theirs.transformer)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(EagerStepper(load(tmp_path), [tokens]).run([(20,)])[0], expected(theirs, tokens))
