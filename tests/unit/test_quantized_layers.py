"""Quantised safetensors: refusals, layers that stay packed, and the memory plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from protocol.config.worker import WeightForm
from tests.support.checkpoints import random_llama
from tests.support.eager import CPU
from tests.support.kernels import native_kernels
from tests.support.quantized_files import (
    FORMATS,
    QuantFormat,
    awq,
    change_config,
    compressed,
    gptq,
    write_quantized,
)
from worker.checkpoint.quant_blocks import BLOCK_WEIGHTS, BlockKind, dequantized
from worker.errors import UnusableModel
from worker.loading.decoder import load_model, open_weights
from worker.loading.header import ModelHeader, read_header
from worker.spec.quantization import PACKED_AS, read_quantization
from worker.startup.memory_plan import PlannedModel, expanded_kinds, weights_bytes

SIZES = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
DOWN = "model.layers.0.mlp.down_proj"
GPTQ, PACKED = "gptq 4 bits", "packed 4 bits"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the path of a format's checkpoint. The first call for a format
    writes the checkpoint."""
    written: dict[str, Path] = {}
    model = random_llama(**SIZES)

    def get(name: str) -> Path:
        if name not in written:
            folder = tmp_path_factory.mktemp("models")
            written[name] = write_quantized(folder, model, FORMATS[name])[0]
        return written[name]

    return get


def header_of(path: Path) -> ModelHeader:
    header = read_header(path)
    assert isinstance(header, ModelHeader)
    return header


def refusal(path: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        read_header(path)
    return refused.value.message


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def copy_of(form: QuantFormat, path: Path) -> Path:
    return write_quantized(path, random_llama(**SIZES), form)[0]


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_hold_the_numbers_up_to_the_rounding_of_their_type(
    checkpoints: Callable[[str], Path], name: str
) -> None:
    header = header_of(checkpoints(name))
    source, kind = open_weights(header), FORMATS[name].kind
    assert header.quantized is not None
    for tensor, layer in header.quantized.layers.items():
        assert header.kinds[tensor] == kind
        blocks = source.blocks(tensor)
        assert blocks is not None
        assert blocks.is_sound
        assert blocks.kind is BlockKind[PACKED_AS[kind]]
        numbers = torch.empty(layer.rows, layer.columns)
        source.read_into(tensor, numbers)
        theirs = numbers.numpy().reshape(-1, BLOCK_WEIGHTS)
        ours = dequantized(blocks.kind, blocks.raw.reshape(len(theirs), -1))
        largest = np.abs(theirs).max(axis=1, keepdims=True)
        # A minimum of Q4_1 is rounded to 1/2048, and is at most 15 steps; others to half a step.
        share = 15 / 2048 if blocks.kind is BlockKind.Q4_1 else 0.6 / 127
        assert (np.abs(ours - theirs) <= share * largest + 1e-7).all()
        if name in EXACT:
            assert np.array_equal(ours, theirs)


EXACT = (GPTQ, PACKED)
"""Formats whose numbers fit blocks without rounding: the scales are exact in float16, and the zero
points are powers of two."""


@pytest.mark.parametrize("name", FORMATS)
def test_planned_weights_equal_the_loaded_weights(
    checkpoints: Callable[[str], Path], name: str
) -> None:
    path = checkpoints(name)
    header = header_of(path)
    kernels = native_kernels()
    for packs in (True, False):
        form: WeightForm = "packed" if packs else "dense"
        loaded = load_model(path, dtype=torch.float32, device=CPU, kernels=kernels, weights=form)
        planned = PlannedModel(header.name, header.tensors, header.kinds, packs)
        assert weights_bytes(planned, "float32") == loaded.card.weights_bytes
        assert expanded_kinds(planned) == (set() if packs else {FORMATS[name].kind})


def test_the_digest_covers_the_config_of_the_quantisation(
    tmp_path: Path, checkpoints: Callable[[str], Path]
) -> None:
    def digest(path: Path) -> str:
        return load_model(path, dtype=torch.float32, device=CPU).card.digest

    path = copy_of(FORMATS[GPTQ], tmp_path)
    first = digest(path)
    assert digest(checkpoints(GPTQ)) == first
    change_config(path, gptq(4, 32, v2=True).config)
    assert digest(path) != first


# ---- refusals


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return FORMATS[name].config | fields


def weights(**fields: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
    return compressed("pack-quantized", base | fields)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "quantization_config is not an object"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not supported; supported: gptq"),
        ({"quant_method": ["gptq"]}, "['gptq'] are not supported"),
        (changed(GPTQ, bits=3), "bits 3 is not supported; supported: 4 and 8"),
        (changed(GPTQ, bits="4"), "'bits' is '4', not an integer"),
        (changed(GPTQ, group_size=0), "group_size is 0"),
        (changed(GPTQ, checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (changed(GPTQ, dynamic={"-:.*": {}}), "'dynamic' is not supported"),
        (changed(GPTQ, is_marlin_format=True), "is_marlin_format True"),
        (changed(GPTQ, sym="yes"), "'sym' is 'yes'"),
        (changed(GPTQ, rotation="hadamard"), "'rotation' is not supported"),
        (changed("awq", version="gemv"), "version 'gemv'"),
        (changed("awq", zero_point="no"), "'zero_point' is 'no'"),
        (changed("awq", method="gptq"), "method 'gptq'"),
        (changed("awq", checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (changed("awq", dynamic={"-:.*": {}}), "'dynamic' is not supported for awq"),
        (changed("awq", bits=8), "bits 8 is not supported"),
        (changed("awq", modules_to_not_convert="gate"), "'modules_to_not_convert' is not a list"),
        (changed("fp8 blocks", weight_block_size=[128]), "'weight_block_size' is [128]"),
        (changed("fp8 blocks", fmt="e5m2"), "fmt 'e5m2'"),
        (changed("fp8 blocks", modules_to_convert=["embed"]), "modules_to_convert ['embed']"),
        (weights(num_bits=3), "num_bits 3 is not supported"),
        (weights(strategy="tensor"), "strategy 'tensor' is not supported for pack-quantized"),
        (weights(strategy="token"), "strategy 'token' is not supported"),
        (weights(dynamic=True), "'dynamic' is not supported for weights"),
        (weights(block="2x2"), "weights: 'block' is not supported"),
        (changed(PACKED, format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        (changed(PACKED, config_groups={}), "'config_groups' is not an object with groups"),
        (changed(PACKED, kv_cache_scheme={"num_bits": 8}), "'kv_cache_scheme' is not supported"),
        (changed(PACKED, transform_config={"a": 1}), "'transform_config' is not supported"),
        (changed(PACKED, sparsity_config={"format": "sparse-24"}), "sparsity_config.format"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(UnusableModel) as refused:
        read_quantization({"quantization_config": config})
    assert message in refused.value.message


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"{DOWN}.{name}")


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{DOWN}.{name}": tensor})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (GPTQ, drop("scales"), f"tensor '{DOWN}.scales' is missing"),
        (GPTQ, drop("qweight"), f"tensor '{DOWN}.weight' is missing"),
        (GPTQ, put("qzeros", torch.zeros(1, 8, dtype=torch.int32)), "qzeros has shape (1, 8)"),
        (GPTQ, put("scales", torch.zeros(5, 64, dtype=torch.int32)), "scales has dtype I32"),
        (GPTQ, put("weight", torch.zeros(64, 160)), "the files have both"),
        (GPTQ, put("bias", torch.ones(64)), "unexpected tensors"),
        (PACKED, put("weight_zero_point", torch.zeros(1)), "has zero points"),
        ("fp8 blocks", put("weight", torch.zeros(64, 160).to(torch.float8_e5m2)), "dtype F8_E5M2"),
    ],
)
def test_files_that_do_not_fit_the_config_are_refused(
    tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    path = copy_of(FORMATS[name], tmp_path)
    change_tensors(path, change)
    assert message in refusal(path)


def test_a_group_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = copy_of(FORMATS[GPTQ], tmp_path)
    change_tensors(path, put("g_idx", torch.full((160,), 5, dtype=torch.int32)))
    with pytest.raises(UnusableModel, match="g_idx names a group that does not exist"):
        load_model(path, dtype=torch.float32, device=CPU)


def test_a_bias_of_zeros_beside_a_quantised_layer_is_ignored(tmp_path: Path) -> None:
    path = copy_of(awq(32), tmp_path)
    change_tensors(path, put("bias", torch.zeros(64)))
    assert header_of(path).spec.layers[0].mlp.bias is False


def test_each_layer_has_the_scheme_that_fits_its_tensors(tmp_path: Path) -> None:
    groups = {
        name: next(iter(FORMATS[name].config["config_groups"].values()))
        for name in ("packed 8 bits", PACKED)
    }
    path = copy_of(FORMATS[PACKED], tmp_path)
    change_config(path, changed(PACKED, config_groups=groups))
    assert header_of(path).kinds[f"{DOWN}.weight"] == "INT4"
