"""Safetensors quantised with GPTQ, AWQ, compressed-tensors and FP8: the logits are those of
transformers with the numbers that the formats encode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.eager import (
    BLOCK_TOKENS,
    CPU,
    EagerStepper,
    assert_same,
    expected,
    load,
    some_tokens,
)
from tests.support.family_models import HYBRIDS, random_model
from tests.support.kernels import native_kernels
from tests.support.quantized_files import FORMATS, quantized_copies, write_quantized
from tests.support.wrapper_models import random_wrapper, write_wrapper
from worker.attention.select import select_attention
from worker.loading.decoder import load_model
from worker.loading.header import ModelHeader, read_header

TOKENS = some_tokens(24)


def reference(dense: Path) -> Tensor:
    return expected(AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32), TOKENS)


def scale_of(logits: Tensor) -> float:
    return max(1.0, float(logits.abs().max()) / 10)


@pytest.mark.parametrize("name", FORMATS)
def test_the_logits_are_those_of_the_numbers_and_packed_nearly_so(
    tmp_path: Path, name: str
) -> None:
    model = random_model("llama", num_hidden_layers=2)
    ours, dense = write_quantized(tmp_path, model, FORMATS[name])
    logits = reference(dense)
    assert_same(EagerStepper(load(ours), [TOKENS]).run([(24,)])[0], logits, 1e-4 * scale_of(logits))
    kernels = native_kernels()
    loaded = load_model(ours, dtype=torch.float32, device=CPU, kernels=kernels, weights="packed")
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    found = EagerStepper(loaded, [TOKENS], attention).run([(23,), (1,)])[0]
    errors = (found - logits).norm(dim=1) / logits.norm(dim=1)
    assert errors.median() <= 0.05


FUSED = {
    "phi3": "gptq 4 bits, v2, asymmetric",
    "gpt_neox": "packed 4 bits",
    "qwen3_moe": "fp8 blocks",
    "mixtral": "awq",
    "lfm2": "awq",
    "lfm2_moe": "fp8 blocks",
    "minimax_m2": "fp8 blocks",
    "glm4_moe": "fp8 blocks",
    "glm4": "gptq 4 bits",
    "ernie4_5": "awq",
    "ernie4_5_moe": "packed 4 bits",
    "deepseek_v3": "fp8 blocks",
    "deepseek_v32": "fp8 blocks",
    "glm4_moe_lite": "packed 4 bits",
    "minicpm3": "gptq 4 bits",
    "youtu": "awq",
    "apertus": "gptq 4 bits",
    "hunyuan_v1_moe": "fp8 blocks",
    "phimoe": "awq",
}
KINDS = {"layer_types": ["conv", "full_attention"]}


HYBRID = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 4}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("fp8 blocks", HYBRID),
    "qwen3_next": ("packed 4 bits", HYBRID | EXPERTS),
    "olmo_hybrid": ("packed 4 bits", HYBRID),
    "recurrent_gemma": ("fp8 blocks", {"lru_width": 192}),
    "mamba": ("fp8 blocks", {"time_step_rank": 32}),
    "mamba2": ("packed 4 bits", {}),
    # transformers writes the MLP of a layer without experts under a name that is not published.
    "kimi_linear": (
        "packed 4 bits",
        {
            "linear_head_dim": 32,
            "moe_intermediate_size": 64,
            "mlp_layer_types": ["sparse"] * 4,
        },
    ),
    "granitemoehybrid": ("gptq 4 bits", {"shared_intermediate_size": 160, "num_local_experts": 0}),
}
"""Model type -> the format, and sizes that its groups of columns divide."""


@pytest.mark.parametrize("model_type", RECURRENT)
def test_recurrent_layers_are_quantised_too(tmp_path: Path, model_type: str) -> None:
    """Some tensors of Qwen3-Next hold the rows of several matrices for each head."""
    form, sizes = RECURRENT[model_type]
    model = random_model(model_type, **sizes)
    ours, dense = write_quantized(tmp_path, model, FORMATS[form])
    logits = reference(dense)
    assert_same(EagerStepper(load(ours), [TOKENS]).run([(24,)])[0], logits, 1e-4 * scale_of(logits))
    loaded = load_model(ours, dtype=torch.float32, device=CPU, kernels=native_kernels())
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    found = EagerStepper(loaded, [TOKENS], attention).run([(23,), (1,)])[0]
    errors = (found - logits).norm(dim=1) / logits.norm(dim=1)
    assert errors.median() <= 0.15  # a recurrence makes errors grow


@pytest.mark.parametrize("model_type", FUSED)
def test_fused_layers_and_experts_are_quantised_too(tmp_path: Path, model_type: str) -> None:
    kinds = KINDS if model_type in HYBRIDS else {}
    model = random_model(model_type, num_hidden_layers=2, **kinds)
    ours, dense = write_quantized(tmp_path, model, FORMATS[FUSED[model_type]])
    logits = reference(dense)
    assert_same(EagerStepper(load(ours), [TOKENS]).run([(24,)])[0], logits, 1e-4 * scale_of(logits))


def test_experts_of_the_text_part_of_a_wrapper_are_quantised(tmp_path: Path) -> None:
    """Kimi K2.5 has the `quantization_config` in that of the text part, and quantises experts
    only."""
    model = random_wrapper("Kimi_K25ForConditionalGeneration", "deepseek_v3")
    plain = write_wrapper(tmp_path / "plain", model)
    form = FORMATS["packed 4 bits"]
    ours, dense = quantized_copies(plain, tmp_path, form, only=".mlp.experts.")
    file = ours / "config.json"
    config = json.loads(file.read_text())
    quantization = config.pop("quantization_config")
    config["text_config"] |= {"quantization_config": quantization, "model_type": "kimi_k2"}
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    file.write_text(json.dumps(config))
    names = load_file(ours / "model.safetensors").keys()
    assert "language_model.model.layers.1.mlp.experts.5.down_proj.weight_packed" in names
    assert "language_model.model.layers.1.self_attn.q_a_proj.weight" in names
    theirs = AutoModelForImageTextToText.from_pretrained(dense, dtype=torch.float32)
    logits = expected(theirs, TOKENS)
    assert_same(EagerStepper(load(ours), [TOKENS]).run([(24,)])[0], logits, 1e-4 * scale_of(logits))
    header = read_header(ours)
    assert isinstance(header, ModelHeader)
    assert {kind for name, kind in header.kinds.items() if "experts.5." in name} == {"INT4"}
