"""Quantised matrices made by the libraries of their formats: we read the same numbers as the
libraries do. `tests/support/library_formats.py` wrote the files, tests/data/quantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import random_llama, write_directory
from tests.support.library_formats import COLUMNS, EXPECTED, FORMATS, ROWS
from tests.support.quantized_files import change_config
from worker.loading.decoder import open_weights
from worker.loading.header import ModelHeader, read_header

DATA = Path(__file__).parents[1] / "data" / "quantized"
LAYER = "model.layers.0.mlp.down_proj"
SIZES = {"num_hidden_layers": 1, "hidden_size": ROWS, "intermediate_size": COLUMNS}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    return write_directory(path, random_llama(**SIZES, num_attention_heads=4))


@pytest.mark.parametrize("name", FORMATS)
def test_we_read_the_numbers_that_the_library_reads(tmp_path: Path, dense: Path, name: str) -> None:
    file = DATA / f"{name}.safetensors"
    with safe_open(file, framework="pt") as opened:
        config = json.loads(opened.metadata()["quantization_config"])
    path = shutil.copytree(dense, tmp_path / "model")
    weights, stored = load_file(path / "model.safetensors"), load_file(file)
    expected = stored.pop(EXPECTED)
    del weights[f"{LAYER}.weight"]
    weights |= {f"{LAYER}.{end}": tensor for end, tensor in stored.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    change_config(path, config)
    header = read_header(path)
    assert isinstance(header, ModelHeader)
    found = torch.empty(ROWS, COLUMNS)
    open_weights(header).read_into(f"{LAYER}.weight", found)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
