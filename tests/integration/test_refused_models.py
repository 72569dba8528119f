"""`tidegate serve` refuses a model that cannot be served: in one line, and leaving no file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.process.exit_codes import ExitCode
from protocol.wire.cluster_key import write_cluster_key
from tests.support.commands import run_command
from tests.support.sparse_checkpoint import write_sparse_llama
from tests.support.tiny_checkpoint import write_tiny_llama


def serve_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str
) -> tuple[int, list[str]]:
    """Run `tidegate serve` in this process. Return its exit code and all lines that it prints."""
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(folder))
    done = run_command(capfd, "serve", *options)
    return done.code, (done.out + done.err).splitlines()


def serve(folder: Path, *options: str, command: str = "serve") -> tuple[int, list[str]]:
    """Run a tidegate command in a new process. Return its exit code and all lines it prints."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools", command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines()


def broken_json(path: Path) -> Path:
    (write_tiny_llama(path) / "config.json").write_text("{")
    return path


def other_architecture(path: Path) -> Path:
    return write_tiny_llama(path, architectures=["BertLMHeadModel"])


def missing_tensor(path: Path) -> Path:
    return write_tiny_llama(path, num_hidden_layers=3)


def missing_weights(path: Path) -> Path:
    (write_tiny_llama(path) / "model.safetensors").unlink()
    return path


def truncated_gguf(path: Path) -> Path:
    (path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0\1")
    return path / "cut.gguf"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (other_architecture, [], "architecture ['BertLMHeadModel'] is not supported"),
        (missing_weights, [], "holds neither model.safetensors nor"),
        (missing_tensor, [], "layers.2.input_layernorm.weight' is missing from the files; fetch"),
        (broken_json, [], "config.json is not valid JSON"),
        (truncated_gguf, [], "the header ends early: the file is truncated; fetch"),
        (write_sparse_llama, ["--max-len", "131072", "--kv-memory-gib", "100000"], "are free"),
        (write_tiny_llama, ["--max-len", "4096"], "context is 128 tokens; --max-len 128"),
        (write_tiny_llama, ["--split", "--kv-memory-gib", "100000"], "KV blocks take"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make: Any,
    options: list[str],
    message: str,
) -> None:
    (tmp_path / "model").mkdir()
    words = (str(make(tmp_path / "model")), "--port", "9180", *options)
    code, lines = serve_here(capfd, monkeypatch, tmp_path, *words)
    assert code == ExitCode.BAD_MODEL, lines
    assert len(lines) == 1
    assert lines[0].startswith("tidegate: ")
    assert message in lines[0]


def test_a_refused_tokenizer_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = write_tiny_llama(tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": split}))
    files = ("--journal", str(tmp_path / "j"), "--response-store", str(tmp_path / "store.db"))
    code, lines = serve(tmp_path, str(model), "--port", "9182", *files)
    assert (code, len(lines)) == (ExitCode.BAD_MODEL, 1), lines
    assert "the model's tokenizer cannot be used" in lines[0]
    left = [path for path in tmp_path.rglob("*") if path.is_file() and model not in path.parents]
    assert left == []


def test_an_engine_refuses_a_model_as_a_server_does(tmp_path: Path) -> None:
    path = str(write_tiny_llama(tmp_path, architectures=["BertLMHeadModel"]))
    key, address = str(tmp_path / "cluster.key"), "tcp://127.0.0.1:9183"
    write_cluster_key(key)
    options = ["--address", address, "--cluster-key", key]
    code, lines = serve(tmp_path, path, *options, command="engine")
    assert (code, len(lines)) == (ExitCode.BAD_MODEL, 1), lines
    assert "BertLMHeadModel" in lines[0]


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_a_missing_gpu_is_refused_before_a_model_is_looked_for(
    tmp_path: Path, command: str
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    options = ["--port", "9181"]
    if command == "engine":
        write_cluster_key(str(tmp_path / "cluster.key"))
        options = ["--address", "tcp://127.0.0.1:9183"]
        options += ["--cluster-key", str(tmp_path / "cluster.key")]
    code, lines = serve(tmp_path, "no-such-model", *options, "--device", "cuda", command=command)
    assert (code, len(lines)) == (ExitCode.BAD_MODEL, 1), lines
    assert "device cuda was requested, but " in lines[0]
    assert "; serve with --device cpu, or install" in lines[0]
