"""Heads for drafts in files: which checkpoints have one, what is refused, and what memory they
take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.config.worker import WorkerConfig
from tests.support.checkpoints import random_llama, write_directory
from tests.support.draft_heads import MODEL_TYPES, write_with_head
from tests.support.gguf_files import write_gguf
from tests.support.replica import load, load_own_head
from worker.loading.draft_header import read_draft_head
from worker.loading.header import ModelHeader, read_header
from worker.startup.memory_plan import PlannedModel, weights_bytes
from worker.startup.preflight import preflight


def config(path: Path, **options: object) -> WorkerConfig:
    return WorkerConfig(model=str(path), device="cpu", max_len=64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_head_takes_the_memory_that_is_planned(tmp_path: Path, model_type: str) -> None:
    write_with_head(tmp_path, model_type)
    header = read_header(tmp_path)
    own = read_draft_head(header)
    planned = PlannedModel(header.name, own.tensors, own.kinds, is_packed=False)
    head = load_own_head(tmp_path, load(tmp_path))
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in head.model.weights.tensors()}
    assert weights_bytes(planned, "float32") == sum(sizes.values())
    plans = [preflight([config(tmp_path, draft_head=used)]) for used in (False, True)]
    weights = [found.plans[0].weights_bytes for found in plans]
    assert weights[0] < weights[1]
    per_token = [found.plans[0].longest_kv_bytes for found in plans]
    assert per_token[0] < per_token[1], "the head has keys and values"


@pytest.mark.parametrize("suffix", ["", ".gguf"])
def test_a_checkpoint_without_a_head_is_refused_with_the_other_methods(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"plain{suffix}"
    if suffix:
        write_gguf(path, random_llama())
    else:
        write_directory(path, random_llama())
    found = preflight([config(path, draft_head=True)])
    reason = "has no head for multi-token prediction"
    assert ("are not read from GGUF files" if suffix else reason) in found.error
    assert "--speculation ngram" in found.remedy
    assert "--draft-model" in found.remedy
    assert not preflight([config(path)]).error


def changed(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint, or remove them."""
    file = path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in changes.items():
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "tensor 'mtp.norm.weight' is missing"),
        (torch.ones(95), "mtp.norm.weight has shape (95,); the config requires (96,)"),
        (torch.ones(96, dtype=torch.int8), "mtp.norm.weight"),
    ],
)
def test_a_damaged_head_is_refused_only_if_it_is_used(
    tmp_path: Path, tensor: torch.Tensor | None, message: str
) -> None:
    write_with_head(tmp_path, "qwen3_5_text")
    changed(tmp_path, **{"mtp.norm.weight": tensor})
    if tensor is None or tensor.is_floating_point():
        assert not preflight([config(tmp_path)]).error
    found = preflight([config(tmp_path, draft_head=True)])
    assert message in found.error


def test_a_config_alone_has_a_random_head_if_it_says_so(tmp_path: Path) -> None:
    write_with_head(tmp_path, "qwen3_5_text")
    text = (tmp_path / "config.json").read_text()
    for keys, has_head in (("", False), ('"mtp_num_hidden_layers": 1,', True)):
        path = tmp_path / "alone.json"
        path.write_text(text.replace("{", "{" + keys, 1))
        header = read_header(path)
        assert isinstance(header, ModelHeader)
        assert (header.draft_head is not None) == has_head
    head = load_own_head(path, load(path))
    assert head.read_bytes > 0
