"""Vectors of decoders equal those made from the hidden states that transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protocol.config.worker import WorkerConfig
from protocol.engine.encoding import Pooling
from protocol.worker.steps import EncodePlan
from tests.support.checkpoints import write_directory
from tests.support.encoder_models import encode_inputs, pooled, some_inputs, write_modules
from tests.support.family_models import random_model
from worker.device import device
from worker.device.timing import StartupTiming
from worker.encoders.runner import EncodeRunner
from worker.errors import UnusableModel
from worker.loading.header import read_any_header
from worker.startup.assembly import assemble
from worker.startup.encoder_memory import check_options, extra_bytes
from worker.startup.encoding import Assembled
from worker.startup.preflight import preflight

LENGTHS = [5, 1, 2, 90, 9, 33, 8, 1, 31]
TOLERANCE = 1e-4
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {},
    "gpt2": {},
    "qwen3_moe": {},
}


@pytest.fixture(autouse=True)
def one_process_assembles_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows to set the number of threads only once per process."""
    monkeypatch.setattr(device, "set_threads", lambda threads: None)


def assembled(path: Path, **options: Any) -> Assembled:
    config = WorkerConfig(
        model=str(path), dtype="float32", threads=1, kv_blocks=64, token_budget=256, **options
    )
    return assemble(config, StartupTiming())


def encoder_of(path: Path, **options: Any) -> EncodeRunner:
    encoder = assembled(path, **options).encoder
    assert encoder is not None
    return encoder


def vectors(runner: EncodeRunner, inputs: list[list[int]]) -> Tensor:
    result = runner.launch(EncodePlan(step=1, inputs=encode_inputs(inputs))).result()
    assert not len(result.failed)
    return torch.tensor(result.vectors.tolist()).view(result.vectors.shape)


def wanted(model: Any, inputs: list[list[int]], pooling: Pooling) -> Tensor:
    with torch.no_grad():
        states = [model.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in inputs]
    return torch.stack([pooled(hidden, pooling) for hidden in states])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_vectors_of_a_chat_model_with_an_option(
    kind: str, pooling: Pooling, kernels: Any, tmp_path: Path
) -> None:
    model = random_model(kind, **KINDS[kind])
    write_directory(tmp_path, model)
    inputs = some_inputs(LENGTHS)
    runner = encoder_of(tmp_path, pooling=pooling, kernels=kernels)
    found = vectors(runner, inputs)
    assert float((found - wanted(model, inputs, pooling)).abs().max()) < TOLERANCE
    alone = torch.cat([vectors(runner, [ids]) for ids in inputs])
    assert float((found - alone).abs().max()) < 1e-5


def test_an_embedding_model_without_its_head_only_encodes(tmp_path: Path) -> None:
    """As Qwen3-Embedding: the base model alone, and module files that name the last token."""
    model = random_model("qwen3")
    write_directory(tmp_path, model)
    model.base_model.save_pretrained(tmp_path)
    write_modules(tmp_path, "last", hidden=96, max_tokens=100)
    runner, encoder, ready, *_ = assembled(tmp_path)
    assert runner is None
    assert encoder is not None
    assert not ready.model.generates
    assert ready.model.encoding.max_tokens == ready.max_len == 100
    inputs = some_inputs(LENGTHS)
    found = vectors(encoder, inputs)
    assert float((found - wanted(model, inputs, "last")).abs().max()) < TOLERANCE


def test_an_input_longer_than_the_token_budget_is_computed(tmp_path: Path) -> None:
    model = random_model("qwen3")
    write_directory(tmp_path, model)
    model.base_model.save_pretrained(tmp_path)
    write_modules(tmp_path, "mean", hidden=96)
    inputs = some_inputs([400])
    found = vectors(encoder_of(tmp_path), inputs)
    assert float((found - wanted(model, inputs, "mean")).abs().max()) < TOLERANCE


def test_a_chat_model_has_no_vectors_unless_asked(tmp_path: Path) -> None:
    write_directory(tmp_path, random_model("llama"))
    runner, encoder, ready, *_ = assembled(tmp_path)
    assert runner is not None
    assert encoder is None
    assert ready.model.encoding is None


def test_a_model_with_vectors_still_generates(tmp_path: Path) -> None:
    write_directory(tmp_path, random_model("llama"))
    runner, _, ready, *_ = assembled(tmp_path, pooling="last")
    assert runner is not None
    assert ready.model.generates
    assert ready.model.encoding.pooling == "last"


def test_an_earlier_input_that_was_not_finite_leaves_nothing_behind(tmp_path: Path) -> None:
    model = random_model("llama")
    with torch.no_grad():
        model.base_model.embed_tokens.weight[6] = torch.inf
    write_directory(tmp_path, model)
    runner = encoder_of(tmp_path, pooling="mean")
    bad = runner.launch(EncodePlan(step=1, inputs=encode_inputs([[6] * 30, [7, 8]]))).result()
    assert bad.failed.tolist() == [0]
    vectors(runner, [[7, 8, 9]])


def test_the_memory_of_encoding_is_planned(tmp_path: Path) -> None:
    """A model that also generates needs a step of its longest input, and a small cache."""
    write_directory(tmp_path, random_model("llama"))
    header = read_any_header(tmp_path, "last")
    config = WorkerConfig(model=str(tmp_path), pooling="last")
    extra = extra_bytes(config, header, "float32", is_gpu=False)
    assert extra > 512 * 96 * 4
    assert extra_bytes(config, read_any_header(tmp_path), "float32", is_gpu=False) == 0
    assert not preflight([config]).error


@pytest.mark.parametrize("options", [{"draft_model": "x"}, {"kv_host_gib": 1.0}])
def test_options_that_need_a_cache_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    model = random_model("qwen3")
    write_directory(tmp_path, model)
    model.base_model.save_pretrained(tmp_path)
    write_modules(tmp_path, "last", hidden=96)
    with pytest.raises(UnusableModel, match="not possible with a model that only encodes"):
        check_options(WorkerConfig(model=str(tmp_path), **options))
