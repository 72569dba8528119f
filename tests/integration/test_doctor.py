"""`tidegate doctor` reports whether this machine can serve a model, and if not, why."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sparse_checkpoint import write_sparse_llama
from tests.support.tiny_checkpoint import write_tiny_llama
from tools.__main__ import main


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_a_model_that_can_be_served_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "cache"))
    code, found = examined(capsys, str(write_tiny_llama(tmp_path)))
    assert code == 0
    assert "LlamaForCausalLM, context of 128 tokens" in found["model"]["said"]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    assert f"torch {torch.__version__} for {build}" in found["compute"]["said"]
    if not torch.cuda.is_available():
        assert found["gpu"]["said"].startswith("none: ") or found["driver"]["remedy"]
    assert found["tokenizer"]["verdict"] == "ok"
    assert str(tmp_path / "cache") in found["cache"]["said"]
    assert not (tmp_path / "cache").exists()  # it changes nothing


def test_an_unsupported_architecture_and_a_taken_port_are_bad_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_llama(tmp_path, architectures=["BertLMHeadModel"])
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, found = examined(capsys, str(path), "--port", str(port))
    assert code == 1
    assert found[f"port {port}"]["verdict"] == "bad"
    assert "pid" in found[f"port {port}"]["said"]
    assert found["model"]["verdict"] == "bad"
    assert "BertLMHeadModel" in found["model"]["said"]


def test_an_image_encoder_that_the_model_cannot_use_is_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examined(capsys, str(write_tiny_llama(tmp_path)), "--mmproj", "encoder.gguf")
    assert code == 1
    assert "encoder.gguf is for GGUF files" in found["model"]["said"]
    assert found["model"]["remedy"] == "serve without --mmproj"


def test_a_tokenizer_that_a_gateway_cannot_use_is_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_llama(tmp_path)
    (path / "tokenizer.json").write_text('{"model": {}}')
    code, found = examined(capsys, str(path))
    assert code == 1
    assert found["model"]["verdict"] == "ok"
    assert found["tokenizer"]["verdict"] == "bad"
    assert found["tokenizer"]["said"].startswith("the model's tokenizer cannot be used: ")
    assert found["tokenizer"]["remedy"] == "fetch the model's files again, or use another model"


@pytest.mark.parametrize(
    ("model", "remedy"),
    [("smolm2-135m", "did you mean smollm2-135m"), ("./none.gguf", "no such file or directory")],
)
def test_a_model_that_does_not_exist_is_bad_with_the_advice_of_serve(
    capsys: pytest.CaptureFixture[str], model: str, remedy: str
) -> None:
    code, found = examined(capsys, model)
    assert code == 1
    assert found["model"]["said"] == f"no model {model!r}"
    assert found["model"]["remedy"].startswith(remedy)
    assert main(["serve", model]) == 5
    assert f"no model {model!r}: {remedy}" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_bad_with_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examined(capsys, str(write_sparse_llama(tmp_path, num_hidden_layers=1000)))
    assert code == 1
    assert found["memory"]["verdict"] == "bad"
    assert "GiB for weights" in found["memory"]["said"]
    assert "a smaller model" in found["memory"]["remedy"]
