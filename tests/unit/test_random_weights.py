"""A config.json alone describes a model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.tiny_checkpoint import CONFIG
from worker.checkpoint.random_weights import RandomWeights
from worker.errors import UnusableModel
from worker.loading.decoder import LoadedModel, load_model
from worker.models.decoder import DecoderModel
from worker.quantize.writing import quantize_model

CPU = torch.device("cpu")


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(path, dtype=dtype, device=CPU)


def decoder(path: Path) -> DecoderModel:
    model = load(path).model
    assert isinstance(model, DecoderModel)
    return model


def test_a_config_gives_a_model_with_all_its_weights(tmp_path: Path) -> None:
    loaded = load(write_config(tmp_path), torch.bfloat16)
    assert (loaded.card.name, loaded.card.dtype) == ("config", "bfloat16")
    hidden, inner, layers, vocab, kv = 32, 48, 2, 97, 16
    matrices = vocab * hidden + layers * (2 * hidden + 2 * kv + 3 * inner) * hidden
    assert loaded.card.num_parameters == matrices + (2 * layers + 1) * hidden


def test_the_same_config_gives_the_same_weights(tmp_path: Path) -> None:
    one, other = (decoder(write_config(tmp_path)) for _ in range(2))
    assert all(map(torch.equal, one.tensors(), other.tensors()))


def test_layers_have_different_weights(tmp_path: Path) -> None:
    first, second = decoder(write_config(tmp_path)).weights.layers
    x = torch.eye(32)
    assert not torch.equal(first.mixer.qkv(x), second.mixer.qkv(x))


def test_matrices_keep_the_variance_of_their_inputs() -> None:
    matrix = torch.empty(300, 200)
    RandomWeights().read_into("q_proj.weight", matrix)
    assert (torch.randn(100, 200) @ matrix.T).var().item() == pytest.approx(1, abs=0.1)


def test_experts_of_one_tensor_have_different_weights() -> None:
    experts = torch.empty(2, 8, 8)
    for index, expert in enumerate(experts):
        RandomWeights().read_into("experts.weight", expert, index)
    assert not torch.equal(*experts)


def test_norms_are_one_and_biases_zero() -> None:
    norm, bias = torch.empty(4), torch.empty(4)
    RandomWeights().read_into("norm.weight", norm)
    RandomWeights().read_into("norm.bias", bias)
    assert (norm.tolist(), bias.tolist()) == ([1.0] * 4, [0.0] * 4)


def test_a_config_of_quantised_weights_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnusableModel, match="random weights are never quantised"):
        load(path)


def test_random_weights_cannot_be_written_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match="is not a directory of safetensors"):
        quantize_model(write_config(tmp_path), tmp_path / "a.gguf", "Q4_1", lambda *_: None)
