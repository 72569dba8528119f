"""BitNet's checkpoints as they are published: packed weights, and those of the training.

Each linear layer equals that of transformers to the bit. The logits of whole models are close, but
not as close as those of other models: a layer rounds its inputs to 8 bits, so the last bits of an
input in the middle between two numbers decide. With inputs that are not rounded they differ by 2.5
to 3 %.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.quantization_config import BitNetQuantConfig

from tests.support.checkpoints import write_directory
from tests.support.eager import EagerStepper, expected, load, some_tokens
from tests.support.transformers_models import random_model
from worker.errors import UnusableModel
from worker.models.hf_bitnet import BitLinear, install, read_packed, unpacked
from worker.spec.architectures import BitNetMode

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch, "compile", lambda function: function)  # there may be no compiler
    from transformers.integrations.bitnet import (
        AutoBitLinear,
        pack_weights,
        replace_with_bitnet_linear,
    )

NUM_TOKENS = 61
MODES: list[BitNetMode] = ["offline", "online"]


def published(mode: BitNetMode) -> dict[str, str]:
    return {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": mode,
    }


def as_trained(model: Any, mode: BitNetMode) -> tuple[Any, dict[str, Tensor]]:
    """Return a random model with transformers' layers for BitNet, and the tensors of its file."""
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
    del weights["lm_head.weight"]
    settings = BitNetQuantConfig(linear_class="autobitlinear", quantization_mode=mode)
    replace_with_bitnet_linear(model, ["lm_head"], settings)
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, AutoBitLinear):
            continue
        layer.to_empty(device="cpu")
        if layer.bias is not None:
            layer.bias.data.copy_(weights[f"{name}.bias"])
        weight = weights[f"{name}.weight"]
        if mode == "offline":
            size = weight.abs().mean()
            weight = (weight / size).round().clamp(-1, 1)
            layer.weight_scale.fill_(size)
            weights[f"{name}.weight_scale"] = layer.weight_scale.clone()
            weights[f"{name}.weight"] = pack_weights(weight.clone())
        layer.weight.data.copy_(weight)
    return model.eval(), weights


def checkpoint(path: Path, mode: BitNetMode) -> Any:
    """Write a checkpoint as it is published. Return transformers' model."""
    model = random_model("bitnet", tie_word_embeddings=True)
    write_directory(path, model)
    theirs, weights = as_trained(model, mode)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    change(path, quantization_config=published(mode))
    return theirs


def change(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_each_linear_layer_equals_that_of_transformers(
    tmp_path: Path, mode: BitNetMode, dtype: torch.dtype
) -> None:
    theirs = checkpoint(tmp_path, mode).to(dtype)
    ours, factors = random_model("bitnet", tie_word_embeddings=True).to(dtype), None
    if mode == "offline":
        tensors, factors = read_packed([tmp_path / "model.safetensors"], dtype)
        ours.load_state_dict(tensors, strict=False)
    install(ours, factors)
    layers = {name: each for name, each in theirs.named_modules() if is_linear(each)}
    assert {name for name, each in ours.named_modules() if is_linear(each)} == layers.keys()
    assert len(layers) == 7 * 4
    for name, layer in layers.items():
        inputs = torch.randn(3, 9, layer.in_features).to(dtype)
        assert torch.equal(ours.get_submodule(name)(inputs), layer(inputs)), name


def is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, BitLinear | AutoBitLinear)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_published_checkpoint_has_the_logits_of_transformers(
    tmp_path: Path, mode: BitNetMode
) -> None:
    theirs, tokens = checkpoint(tmp_path, mode), some_tokens(NUM_TOKENS)
    loaded, logits = load(tmp_path), expected(theirs, tokens)
    for steps in [(61,)], [(7,), (1,), (30,), (23,)]:
        found = EagerStepper(loaded, [tokens]).run(steps)[0]
        assert float((found - logits).norm()) < 0.01 * float(logits.norm())


def test_every_row_of_packed_weights_is_unpacked() -> None:
    weights = torch.randint(-1, 2, (12, 5))
    assert torch.equal(unpacked(pack_weights(weights.clone()), torch.float32), weights.float())


@pytest.mark.parametrize(
    "change_to",
    [
        {"linear_class": "bitlinear"},
        {"quantization_mode": "other"},
        {"use_rms_norm": True},
        {"modules_to_not_convert": ["model.layers.0"]},
        {"quant_method": "awq"},
        {"new_key": 1},
    ],
    ids=str,
)
def test_other_kinds_of_layers_are_refused(tmp_path: Path, change_to: dict[str, Any]) -> None:
    checkpoint(tmp_path, "online")
    change(tmp_path, quantization_config=published("online") | change_to)
    with pytest.raises(UnusableModel, match=r"quantization_config .* is not supported for BitNet"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight_scale", None, "weight_scale' is missing"),
        ("model.layers.1.mlp.up_proj.weight_scale", torch.ones(3), "another shape than"),
        ("model.norm.weight_scale", torch.ones(1), "norm.weight_scale' is not a tensor"),
        ("model.layers.1.mlp.up_proj.weight", None, "up_proj.weight' is missing"),
        (
            "model.layers.1.mlp.up_proj.weight",
            torch.zeros(3, 96, dtype=torch.uint8),
            "up_proj.weight' has another shape",
        ),
    ],
)
def test_a_packed_checkpoint_with_other_tensors_is_refused_by_name(
    tmp_path: Path, name: str, value: Tensor | None, message: str
) -> None:
    checkpoint(tmp_path, "offline")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {name: value}
    present = {key: each for key, each in tensors.items() if each is not None}
    save_file(present, file, metadata={"format": "pt"})
    with pytest.raises(UnusableModel, match=message):
        load(tmp_path)
