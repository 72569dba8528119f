"""Models of all quantised types that stay packed: the compiled kernels give the logits of the
dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from protocol.config.worker import WeightForm
from tests.support.checkpoints import random_llama
from tests.support.eager import BLOCK_TOKENS, CPU, EagerStepper, some_tokens
from tests.support.family_models import random_model
from tests.support.gguf_files import write_gguf
from tests.support.kernels import native_kernels
from worker.attention.select import select_attention
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.loading.decoder import load_model
from worker.loading.header import ModelHeader, read_header
from worker.spec.kernel_sizes import BLOCK_FORMATS
from worker.startup.memory_plan import PlannedModel, weights_bytes

NUM_TOKENS = 40
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
}


def q4_k_m(name: str) -> Kind:
    """Return the type of a matrix in a file of type Q4_K_M: Q6_K for the head and, in half of the
    layers, for the value and down projections; otherwise Q4_K."""
    is_large = name.startswith("output") or "attn_v" in name or "ffn_down" in name
    return Kind.Q6_K if is_large and not name.startswith(("blk.1.", "blk.2.")) else Kind.Q4_K


def eight_bits(name: str) -> Kind:
    """Return the type of a matrix in a file of type Q8_0."""
    return Kind.F32 if ".ssm_a" in name or ".ssm_conv1d" in name else Kind.Q8_0


def logits(path: Path, kernels: Kernels, form: WeightForm) -> Tensor:
    loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=kernels, weights=form)
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=loaded.model.kernels)
    stepper = EagerStepper(loaded, [some_tokens(NUM_TOKENS)], attention)
    return stepper.run([(NUM_TOKENS - 1,), (1,)])[0]


MIXES: dict[str, Kind | Callable[[str], Kind]] = {"Q4_K_M": q4_k_m}
MIXES |= {name: Kind[name] for name in BLOCK_FORMATS}


@pytest.mark.parametrize("mix", MIXES)
def test_packed_weights_give_the_logits_of_the_dequantised_ones(tmp_path: Path, mix: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(**SIZES), MIXES[mix])
    exact = logits(path, TorchKernels(), "dense")
    packed = logits(path, native_kernels(), "packed")
    errors = (packed - exact).norm(dim=1) / exact.norm(dim=1)
    # The attention of random weights is so sharp that a rounding may change which token is seen.
    assert errors.median() <= 1e-3


def test_a_mixed_file_needs_little_more_memory_than_its_size(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(**SIZES), q4_k_m)
    loaded = load_model(
        path, dtype=torch.float32, device=CPU, kernels=native_kernels(), weights="packed"
    )
    assert loaded.card.weights_bytes < 1.1 * path.stat().st_size


LATENT: dict[str, dict[str, int]] = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "kimi_linear": {"linear_head_dim": 32},
}
"""Model type -> sizes that blocks of 32 divide."""


@pytest.mark.parametrize("model_type", LATENT)
def test_a_file_with_latent_attention_needs_little_more_memory_than_its_size(
    tmp_path: Path, model_type: str
) -> None:
    sizes = {"hidden_size": 192, "moe_intermediate_size": 128}
    theirs = random_model(model_type, **sizes, **LATENT[model_type])
    path = write_gguf(tmp_path / "tiny.gguf", theirs, eight_bits)
    header = read_header(path)
    assert isinstance(header, ModelHeader)
    loaded = load_model(
        path, dtype=torch.float32, device=CPU, kernels=native_kernels(), weights="packed"
    )
    size = loaded.card.weights_bytes
    assert size < 1.1 * path.stat().st_size
    planned = PlannedModel(header.name, header.tensors, header.kinds, is_packed=True)
    assert abs(weights_bytes(planned, "float32") - size) <= 0.02 * size
