"""Heads for drafts in files: which checkpoints have one, what is refused, and what memory they
take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.config.worker import WorkerConfig
from protocol.engine.sampling import SamplingParams
from protocol.worker.steps import MAX_HEAD_LAG
from tests.support.checkpoints import random_llama, write_directory
from tests.support.draft_heads import MODEL_TYPES, write_with_head
from tests.support.eager import some_tokens
from tests.support.family_models import SPARSE_NEMOTRON, random_model
from tests.support.gguf_files import write_gguf
from tests.support.gguf_heads import write_gguf_with_head
from tests.support.kernels import native_kernels
from tests.support.peak_memory import MeasuredProposer
from tests.support.replica import Replica, load, load_own_head
from worker.loading.draft_header import read_draft_head
from worker.loading.header import ModelHeader, read_header
from worker.spec.step_limits import STEP_TOKENS, StepLimits
from worker.startup.memory_plan import PlannedModel, weights_bytes
from worker.startup.preflight import preflight
from worker.startup.step_memory import HEAD_INPUTS, proposing_bytes

SUFFIXES = ["", ".gguf"]
CHANGES: dict[str, dict[str, Any]] = {"nemotron_h": SPARSE_NEMOTRON}
"""GGUF files of a Nemotron-H have no layers with one MLP if others have experts."""


def config(path: Path, **options: object) -> WorkerConfig:
    return WorkerConfig(model=str(path), device="cpu", max_len=64, **options)  # type: ignore[arg-type]


def written(tmp_path: Path, model_type: str, suffix: str) -> Path:
    """Write a model with a head as safetensors, or as a GGUF file if that is the suffix."""
    folder = tmp_path / "model"
    folder.mkdir()
    head = write_with_head(folder, model_type, **CHANGES.get(model_type, {}))
    if not suffix:
        return folder
    return write_gguf_with_head(tmp_path / f"model{suffix}", folder, head.theirs)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_head_takes_the_memory_that_is_planned(
    tmp_path: Path, model_type: str, suffix: str
) -> None:
    path = written(tmp_path, model_type, suffix)
    header = read_header(path)
    own = read_draft_head(header)
    planned = PlannedModel(header.name, own.tensors, own.kinds, is_packed=False)
    head = load_own_head(path, load(path))
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in head.model.weights.tensors()}
    assert weights_bytes(planned, "float32") == sum(sizes.values())
    plans = [preflight([config(path, draft_head=used)]) for used in (False, True)]
    weights = [found.plans[0].weights_bytes for found in plans]
    assert weights[0] < weights[1]
    per_token = [found.plans[0].longest_kv_bytes for found in plans]
    assert per_token[0] < per_token[1], "the head has keys and values"


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_5_text"])
def test_the_work_of_a_head_takes_less_memory_than_is_planned(
    tmp_path: Path, model_type: str
) -> None:
    """A step computes a prompt of STEP_TOKENS tokens, and the head proposes after it."""
    write_with_head(tmp_path, model_type, hidden_size=192)
    loaded = load(tmp_path, kernels=native_kernels(), weights="packed")
    head = load_own_head(tmp_path, loaded)
    replica = Replica(loaded, head=head, options={"speculation": "mtp"}, max_slots=1)
    drafter = replica.runner.draft_model
    assert drafter is not None
    replica.runner.draft_model = measured = MeasuredProposer(drafter)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    replica.add(some_tokens(STEP_TOKENS, seed=1), params)
    replica.run()
    limits = StepLimits(1, STEP_TOKENS, max_drafts=8, planned_tokens=STEP_TOKENS)
    hidden = head.spec.hidden
    planned = proposing_bytes(head.spec, 4, limits, hidden, is_head=True)
    inputs = 4 * STEP_TOKENS * HEAD_INPUTS * head.spec.hidden
    assert inputs < measured.peak <= planned - 4 * STEP_TOKENS * hidden


def test_memory_is_planned_for_the_hidden_states_that_slots_keep(tmp_path: Path) -> None:
    head = write_with_head(tmp_path, "glm4_moe")
    work = [
        preflight([config(tmp_path, draft_head=True, max_slots=slots)]).plans[0].work_bytes
        for slots in (1, 1001)
    ]
    plain = [
        preflight([config(tmp_path, max_slots=slots)]).plans[0].work_bytes for slots in (1, 1001)
    ]
    kept = 4 * MAX_HEAD_LAG * head.theirs.config.hidden_size
    assert (work[1] - work[0]) - (plain[1] - plain[0]) == 1000 * kept


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_head_has_the_same_weights_in_a_gguf_file(tmp_path: Path, model_type: str) -> None:
    folder = written(tmp_path, model_type, "")
    theirs = random_model(model_type, **CHANGES.get(model_type, {}))
    file = write_gguf_with_head(tmp_path / "model.gguf", folder, theirs)
    heads = [load_own_head(path, load(path)).model for path in (folder, file)]
    weights = [list(head.weights.tensors()) for head in heads]
    torch.testing.assert_close(*weights)


def test_a_head_without_a_norm_has_that_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    head = write_with_head(folder, "glm4_moe")
    own = "blk.4.nextn.shared_head_norm.weight"
    file = write_gguf_with_head(tmp_path / "model.gguf", folder, head.theirs, skips=own)
    loaded = load_own_head(file, load(file))
    norm = head.theirs.get_decoder().norm.weight
    x = torch.randn(3, 96)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
    torch.testing.assert_close(loaded.model.normed(x), expected.detach())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_checkpoint_without_a_head_is_refused_with_the_other_methods(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"plain{suffix}"
    if suffix:
        write_gguf(path, random_llama())
    else:
        write_directory(path, random_llama())
    found = preflight([config(path, draft_head=True)])
    kind = "file" if suffix else "checkpoint"
    assert f"the {kind} plain has no head for multi-token prediction" in found.error
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


def test_a_damaged_head_of_a_gguf_file_is_refused_only_if_it_is_used(tmp_path: Path) -> None:
    head = write_with_head(tmp_path / "model", "qwen3_5_text")
    missing = "blk.4.nextn.enorm.weight"
    file = write_gguf_with_head(
        tmp_path / "model.gguf", tmp_path / "model", head.theirs, skips=missing
    )
    assert not preflight([config(file)]).error
    found = preflight([config(file, draft_head=True)])
    assert f"tensor {missing!r} is missing" in found.error
    assert "--speculation ngram" in found.remedy


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
