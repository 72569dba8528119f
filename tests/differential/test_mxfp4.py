"""Experts in MXFP4, in safetensors and GGUF files, have the numbers that transformers decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from protocol.config.worker import WeightForm
from tests.support.checkpoints import write_directory
from tests.support.eager import BLOCK_TOKENS, CPU, EagerStepper, assert_same, expected, some_tokens
from tests.support.family_models import random_model
from tests.support.gguf_files import write_gguf
from tests.support.kernels import native_kernels
from worker.attention.select import select_attention
from worker.errors import UnusableModel
from worker.kernels.packed import PackedLinear
from worker.loading.decoder import LoadedModel, load_model
from worker.loading.header import read_header
from worker.startup.memory_plan import PlannedModel, weights_bytes

EXPERTS = ("gate_up_proj", "down_proj")


def written(path: Path) -> tuple[Any, Path]:
    """Write a gpt-oss model with random experts in MXFP4. Return a model of transformers with the
    decoded numbers, and the directory."""
    theirs = random_model("gpt_oss", hidden_size=192)
    generator = torch.Generator().manual_seed(7)
    packed: dict[str, Tensor] = {}
    for index, layer in enumerate(theirs.model.layers):
        for name in EXPERTS:
            weight = getattr(layer.mlp.experts, name)
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
            weight.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            whole = f"model.layers.{index}.mlp.experts.{name}"
            packed |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
    write_directory(path, theirs)
    stored = load_file(path / "model.safetensors")
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith(EXPERTS)}
    save_file(plain | packed, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (path / "config.json").write_text(json.dumps(config))
    return theirs, path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return written(tmp_path_factory.mktemp("mxfp4"))


def expert_weights(theirs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return gate_up [2 I, hidden], gate first, and down [hidden, I] of each expert of layer 1."""
    experts = theirs.model.layers[1].mlp.experts
    return [
        (torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1).T, down.T)
        for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True)
    ]


def assert_same_logits(loaded: LoadedModel, theirs: Any) -> None:
    tokens = some_tokens(61)
    kernels = loaded.model.kernels
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=kernels)
    logits = expected(theirs, tokens)
    atol = 3e-4 * max(1.0, float(logits.abs().max()) / 10)
    assert_same(
        EagerStepper(loaded, [tokens], attention).run([(40,), (1,), (20,)])[0], logits, atol
    )


@pytest.mark.parametrize("form", ["directory", "GGUF"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_weights_are_the_decoded_numbers(
    model: tuple[Any, Path], tmp_path: Path, form: str, dtype: torch.dtype
) -> None:
    theirs, path = model
    if form == "GGUF":
        path = gguf(tmp_path / "tiny.gguf", theirs)
    loaded = load_model(path, dtype=dtype, device=CPU)
    layer = loaded.model.weights.layers[1]
    for ours, (gate_up, down) in zip(layer.mlp.experts, expert_weights(theirs), strict=True):
        assert torch.equal(ours.gate_up.weight, gate_up.to(dtype))
        assert torch.equal(ours.down.weight, down.to(dtype))
    if dtype == torch.float32:
        assert_same_logits(loaded, theirs)


@pytest.mark.parametrize("form", ["directory", "GGUF"])
def test_packed_weights_are_the_decoded_numbers(
    model: tuple[Any, Path], tmp_path: Path, form: str
) -> None:
    theirs, path = model
    if form == "GGUF":
        path = gguf(tmp_path / "tiny.gguf", theirs)
    kernels = native_kernels()
    loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=kernels, weights="packed")
    layer = loaded.model.weights.layers[1]
    for ours, (gate_up, down) in zip(layer.mlp.experts, expert_weights(theirs), strict=True):
        for linear, weight in ((ours.gate_up, gate_up), (ours.down, down)):
            assert isinstance(linear, PackedLinear)
            assert linear.bias is not None
            numbers = linear(torch.eye(weight.shape[1])) - linear.bias
            torch.testing.assert_close(numbers.T, weight, rtol=0, atol=1e-6)  # of the bias
    assert_same_logits(loaded, theirs)


def gguf(path: Path, theirs: Any) -> Path:
    kinds = (GGMLQuantizationType.F32, GGMLQuantizationType.MXFP4)
    return write_gguf(path, theirs, lambda name: kinds["_exps." in name])


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_memory_plan_counts_the_loaded_weights(
    model: tuple[Any, Path], is_packed: bool
) -> None:
    _, path = model
    header = read_header(path)
    planned = PlannedModel(header.name, header.tensors, header.kinds, is_packed)
    form: WeightForm = "packed" if is_packed else "dense"
    kernels = native_kernels()
    loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=kernels, weights=form)
    found = weights_bytes(planned, "float32") - loaded.card.weights_bytes
    assert 0 <= found < 64 * len(list(loaded.model.weights.tensors()))  # alignment


Tensors = dict[str, Tensor]


def without_scales(tensors: Tensors, name: str) -> Tensors:
    return {key: value for key, value in tensors.items() if key != f"{name}_scales"}


def with_fewer_scales(tensors: Tensors, name: str) -> Tensors:
    return tensors | {f"{name}_scales": tensors[f"{name}_scales"][:, :, 1:].contiguous()}


def in_two_forms(tensors: Tensors, name: str) -> Tensors:
    return tensors | {name: torch.zeros(5, 160, 192)}


def of_other_bytes(tensors: Tensors, name: str) -> Tensors:
    return tensors | {"model.norm.weight": torch.zeros(192, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_scales, "down_proj_scales' is missing from the files"),
        (with_fewer_scales, "this is not MXFP4"),
        (in_two_forms, "down_proj' in two forms"),
        (of_other_bytes, "model.norm.weight has dtype U8"),
    ],
)
def test_damaged_files_are_refused(
    model: tuple[Any, Path], tmp_path: Path, change: Any, message: str
) -> None:
    for file in model[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors, "model.layers.2.mlp.experts.down_proj")
    save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnusableModel, match=message):
        read_header(tmp_path)


def test_bytes_without_a_quantization_config_are_refused(
    model: tuple[Any, Path], tmp_path: Path
) -> None:
    for file in model[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnusableModel, match="has dtype U8"):
        read_header(tmp_path)
