"""`tidegate serve --models FILE`: two models in one server answer as each one does alone."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.commands import run_command
from tests.support.http import json_of
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import HANG_S, eventually

OPTIONS = ("--dtype", "float32", "--device", "cpu", "--threads", "1")
PROMPTS = [[5 + place, 6, 7 + 2 * place, 11] for place in range(8)]
Answers = Mapping[str, list[list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the models "a" and "b" and a file that lists them. "b" is loaded on
    first use, and is also called "other"."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        (folder / name).mkdir()
        write_tiny_llama(folder / name, seed)
    (folder / "models.toml").write_text(
        '[[model]]\npath = "a"\n'
        '[[model]]\npath = "b"\nalias = ["other"]\nload = "first-use"\nmax_len = 100\n'
    )
    return folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[Mapping[str, Server]]:
    """Servers with both models ("several") and with each model alone ("a", "b"). They start
    together, because most of the time of a start is that of one thread."""
    several = Server("--models", str(folder / "models.toml"), *OPTIONS, model="")
    alone = {name: Server(*OPTIONS, model=str(folder / name)) for name in "ab"}
    made = {"several": several, **alone}
    with contextlib.ExitStack() as running, ThreadPoolExecutor() as pool:
        list(pool.map(running.enter_context, made.values()))
        yield made


@pytest.fixture(scope="module")
def alone(servers: Mapping[str, Server]) -> Answers:
    """Return the answers of each model in a server of its own."""
    return {name: [complete(servers[name], None, prompt) for prompt in PROMPTS] for name in "ab"}


@pytest.fixture(scope="module")
def server(servers: Mapping[str, Server]) -> Server:
    return servers["several"]


def complete(server: Server, model: str | None, prompt: list[int]) -> list[int]:
    """Return the token ids of a sampled answer with a fixed seed."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 24,
        "seed": 7,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    body |= {"model": model} if model else {}
    return list(
        json_of(requests.post(f"{server.url}/v1/completions", json=body, timeout=HANG_S))[
            "choices"
        ][0]["token_ids"]
    )


def get(server: Server, path: str) -> Any:
    return requests.get(server.url + path, timeout=HANG_S).json()


def test_answers_under_mixed_load_are_those_of_each_model_alone(
    server: Server, alone: Answers
) -> None:
    assert alone["a"] != alone["b"]
    listed = [(m["id"], m["state"]) for m in get(server, "/v1/models")["data"]]
    assert listed == [("a", "ready"), ("b", "unloaded"), ("other", "unloaded")]
    asked = [(name, place) for place in range(len(PROMPTS)) for name in ("a", "b", "other")]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: complete(server, each[0], PROMPTS[each[1]]), asked))
    for (name, place), answer in zip(asked, answers, strict=True):
        assert answer == alone["b" if name == "other" else name][place]


def test_a_model_of_several_sleeps_and_is_woken_up_by_a_request(
    server: Server, alone: Answers
) -> None:
    assert complete(server, "b", PROMPTS[0]) == alone["b"][0]
    slept = requests.post(f"{server.url}/sleep?model=b", timeout=HANG_S)
    assert slept.json() == {"is_sleeping": True}
    assert get(server, "/is_sleeping?model=b") == {"is_sleeping": True}
    assert complete(server, "a", PROMPTS[1]) == alone["a"][1]
    assert eventually(lambda: get(server, "/readyz")["ready"])
    assert complete(server, "b", PROMPTS[1]) == alone["b"][1]
    assert get(server, "/is_sleeping?model=b") == {"is_sleeping": False}


def test_the_tools_show_all_models_and_reach_the_engine_of_each(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    complete(server, "b", PROMPTS[0])
    port = ("--port", str(server.port))
    assert f"port     {server.port}: serves a, b at " in run_command(capfd, "ps").out
    status = run_command(capfd, "status", *port)
    assert status.code == 0
    for name in "ab":
        assert re.search(rf"^{name} +ipc://.*: \d+ running, \d+ waiting", status.out, re.MULTILINE)
        top = run_command(capfd, "top", *port, "--model", name, "--json", "--every-s", "0.05")
        assert json.loads(top.out)["model"] == name
    unknown = run_command(capfd, "top", *port, "--model", "c", "--json")
    assert unknown.code == 2
    assert "--model c: the server's models are a, b" in unknown.err
    assert requests.post(f"{server.url}/sleep?model=b", timeout=HANG_S).status_code == 200
    status = run_command(capfd, "status", *port)
    assert status.code == 0
    assert re.search(r"^b +unloaded$", status.out, re.MULTILINE)
