"""A gateway without an engine serves routes that need none, and refuses the rest clearly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from protocol.engine.model_card import CardFile, write_card
from protocol.process.exit_codes import ExitCode
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of
from tests.support.ports import free_port
from tests.support.processes import ROOT, Program
from tests.support.scripted_engine import TEMPLATE, byte_tokenizer, thinking_card

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    file = tmp_path_factory.mktemp("card") / "model.card"
    write_card(file, CardFile(card=thinking_card(), max_len=300))
    with GatewayProcess(card=str(file)) as gateway:
        yield gateway.await_ready()


def test_routes_that_need_no_engine_are_served(gateway: GatewayProcess) -> None:
    counted = gateway.post("/tokenize", {"messages": HI}).json()
    assert counted["max_model_len"] == 300
    spelt = gateway.post("/detokenize", {"tokens": counted["tokens"]}).json()
    assert spelt["prompt"] == "<bos><user>Hi<assistant>"
    result = gateway.post("/v1/chat/completions/input_tokens", {"messages": HI}).json()
    assert result["input_tokens"] == counted["count"]
    models = requests.get(gateway.url + "/v1/models", timeout=5).json()
    assert [model["id"] for model in models["data"]] == ["scripted"]
    facts = gateway.await_status("/health", 200).json()
    assert facts["engine"].keys() >= {"epoch", "silence_s"}
    assert set(facts["engine"].values()) == {None}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions", {"messages": HI, "stream": True, "n": 2}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/inference/v1/generate", {"token_ids": [65], "sampling_params": {}}),
        ("/inference/v1/abort_requests", {"request_ids": ["a"]}),
    ],
)
def test_routes_that_need_an_engine_are_refused(
    gateway: GatewayProcess, path: str, body: dict[str, object]
) -> None:
    error = error_of(gateway.post(path, body), 501)
    assert error["code"] == "no_engine"
    assert "--render-only" in error["message"]


def test_bad_requests_are_refused_with_the_usual_errors(gateway: GatewayProcess) -> None:
    response = gateway.post("/v1/chat/completions", {"messages": HI, "temperature": 9})
    assert error_of(response, 400)["param"] == "temperature"


def test_a_directory_of_a_tokenizer_is_served_by_one_command(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    settings = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    port = free_port()
    command = ["-P", "-m", "tools", "serve", "--render-only", str(tmp_path), "--port", str(port)]
    with Program([*command, "--max-len", "128"], cwd=ROOT) as server:
        server.line_with("without an engine", timeout_s=30)
        url = f"http://127.0.0.1:{port}/tokenize"
        result = requests.post(url, json={"messages": HI}, timeout=10).json()
        assert (result["max_model_len"], result["tokens"][0]) == (128, 256)
        models = requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=10).json()
        assert [model["id"] for model in models["data"]] == [tmp_path.name]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"model": {}}, "the model's tokenizer cannot be used"),
        (
            {
                "normalizer": {
                    "type": "Replace",
                    "pattern": {"String": "a"},
                    "content": "a" * 1_000_000,
                }
            },
            "its normalizer can expand one character to more than 64",
        ),
    ],
    ids=["damaged", "exploding"],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, damage: dict[str, object], said: str
) -> None:
    described = json.loads(byte_tokenizer().to_str()) | damage
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    command = ["-P", "-m", "tools", "serve", "--render-only", str(tmp_path)]
    with Program([*command, "--port", str(free_port())], cwd=ROOT) as server:
        assert server.end(timeout_s=60) == ExitCode.BAD_MODEL
        assert said in server.err[-1]


def test_a_directory_without_one_is_refused_in_a_line(tmp_path: Path) -> None:
    command = ["-P", "-m", "tools", "serve", "--render-only", str(tmp_path)]
    with Program([*command, "--port", str(free_port())], cwd=ROOT) as server:
        assert server.end() != 0
        assert "has no tokenizer.json" in "\n".join(server.err)
