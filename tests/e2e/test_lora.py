"""A whole server with LoRA adapters: names, lists, loading and unloading while answers stream, and
what is refused. Its logprobs are those of PEFT."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from protocol.sdk.client import Client
from protocol.wire.errors import UnknownModel
from tests.support.adapters import logprobs, peft_model, write_adapter
from tests.support.commands import run_command
from tests.support.eager import expected
from tests.support.http import error_of, json_of
from tests.support.server import Server
from tests.support.tiny_checkpoint import FITTING, write_tiny_llama
from tests.support.waiting import HANG_S, eventually
from tools.__main__ import main

pytestmark = pytest.mark.long

PROMPT = [5, 17, 33, 60, 8, 21]
LONG_TOKENS = 3000
MAX_LORAS = 4


class AdapterScene:
    """The server, its directory of adapters, and PEFT's models by the adapter's name."""

    def __init__(self, server: Server, adapters: Path, models: dict[str, Any]) -> None:
        self.server, self.adapters, self.models = server, adapters, models

    def post(self, path: str, body: Any) -> requests.Response:
        return requests.post(self.server.url + path, json=body, timeout=60)

    def load(self, name: str, path: str | None = None) -> requests.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path or name})

    def unload(self, name: str) -> requests.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def listed(self) -> dict[str, Any]:
        found = requests.get(self.server.url + "/v1/models", timeout=20).json()["data"]
        return {entry["id"]: entry for entry in found}

    def complete(self, model: str | None = None, **options: Any) -> requests.Response:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
        return self.post("/v1/completions", body | ({} if model is None else {"model": model}))

    def tokens(self, model: str | None = None, **options: Any) -> list[int]:
        return json_of(self.complete(model, return_token_ids=True, **options))["choices"][0][
            "token_ids"
        ]

    def metrics(self) -> str:
        return requests.get(self.server.url + "/metrics", timeout=20).text


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Write a model and its adapters. Return the model's directory, that of the adapters, and
    PEFT's models by the adapter's name."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model")
    write_tiny_llama(folder, max_position_embeddings=8192, **FITTING)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    adapters = tmp_path_factory.mktemp("adapters")
    models = {"": base}
    for seed, name in enumerate(["fr", "de", "it", "nl", "pl"], 1):
        models[name] = peft_model(base, seed=seed, r=4 * seed)
        write_adapter(adapters / name, models[name])
    return folder, adapters, models


@pytest.fixture(scope="module")
def scene(files: tuple[Path, Path, dict[str, Any]]) -> Iterator[AdapterScene]:
    folder, adapters, models = files
    names = ("--served-name", "tiny:97", "--served-name", "tiny")
    options = (*names, "--dtype", "float32", "--lora", f"fr={adapters / 'fr'}")
    more = ("--lora-dir", str(adapters), "--max-loras", str(MAX_LORAS), "--max-lora-rank", "16")
    with Server(*options, *more, model=str(folder)) as server:
        yield AdapterScene(server, adapters, models)


@pytest.fixture(autouse=True)
def only_the_first(scene: AdapterScene) -> Iterator[None]:
    """Unload the adapters that a test has loaded, and load the first one again."""
    yield
    for name, entry in scene.listed().items():
        if entry["parent"] is not None and name != "fr":
            assert scene.unload(name).status_code == 200
    if "fr" not in scene.listed():
        assert scene.load("fr").status_code == 200


def test_an_adapter_is_addressed_by_its_name_with_or_without_that_of_the_model(scene):
    answers = {model: scene.tokens(model) for model in (None, "tiny:97", "fr", "tiny:97:fr")}
    assert answers[None] == answers["tiny:97"] != answers["fr"] == answers["tiny:97:fr"]
    for model in ("fr", "tiny:97:fr"):
        assert scene.complete(model).json()["model"] == model


@pytest.mark.parametrize("name", ["it", "other:fr", "tiny:97:it", ":fr", "fr:", "tiny:97:fr:fr"])
def test_an_unknown_adapter_is_a_404_that_lists_the_models(scene, name):
    answer = scene.complete(name)
    assert "tiny:97, tiny, fr" in error_of(answer, 404)["message"]
    assert answer.json()["error"]["param"] == "model"


def test_adapters_are_listed_with_the_model_that_they_change(scene):
    assert scene.load("de", "de/../de").status_code == 200
    listed = scene.listed()
    assert list(listed) == ["tiny:97", "tiny", "fr", "de"]
    assert listed["tiny:97"]["parent"] is None
    assert (listed["de"]["parent"], listed["de"]["root"]) == ("tiny:97", "de/../de")
    assert listed["fr"]["root"] == str(scene.adapters / "fr")
    one = requests.get(scene.server.url + "/v1/models/tiny:97:de", timeout=20)
    assert (one.status_code, one.json()["id"]) == (200, "de")


def test_logprobs_of_several_adapters_in_one_batch_are_those_of_peft(scene):
    for name in ("de", "it"):
        assert scene.load(name).status_code == 200
    names = ["", "fr", "de", "it"] * 4
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(
            pool.map(lambda name: scene.complete(name or None, logprobs=5, echo=False), names)
        )
    for name, answer in zip(names, answers, strict=True):
        body = answer.json()["choices"][0]
        found = scene.complete(name or None, return_token_ids=True).json()["choices"][0]
        ids = found["token_ids"]
        right = logprobs(expected(scene.models[name], [*PROMPT, *ids]))
        places = range(len(PROMPT) - 1, len(PROMPT) - 1 + len(ids))
        wanted = [float(right[place, token]) for place, token in zip(places, ids, strict=True)]
        assert body["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-4)


def test_a_changed_adapter_of_the_same_name_never_uses_old_blocks(scene, tmp_path):
    prompt = [9 + n % 70 for n in range(64)]
    before = scene.tokens("fr", prompt=prompt)
    assert scene.unload("fr").status_code == 200
    assert scene.load("fr", "nl").status_code == 200
    usage = scene.complete("fr", prompt=prompt).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert scene.tokens("fr", prompt=prompt) != before
    assert scene.unload("fr").status_code == 200
    assert scene.load("fr").status_code == 200
    assert scene.tokens("fr", prompt=prompt) == before


# ---- loading and unloading while answers stream


def streamed(scene: AdapterScene, model: str, num_tokens: int) -> Iterator[int]:
    """Yield the tokens of a streamed answer."""
    body: Any = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"model": model, "stream": True, "return_token_ids": True}
    url = scene.server.url + "/v1/completions"
    with requests.post(url, json=body, stream=True, timeout=120) as answer:
        assert answer.status_code == 200, answer.text
        for line in answer.iter_lines():
            data = line.removeprefix(b"data: ")
            if line.startswith(b"data: ") and data != b"[DONE]":
                for choice in json.loads(data)["choices"]:
                    yield from choice.get("token_ids") or []


def test_unloading_lets_open_streams_finish_and_refuses_new_requests(scene):
    whole = scene.tokens("fr", max_tokens=LONG_TOKENS)
    stream = streamed(scene, "fr", LONG_TOKENS)
    begun = [next(stream)]
    with ThreadPoolExecutor(2) as pool:
        unloading = pool.submit(scene.unload, "fr")
        assert eventually(lambda: "fr" not in scene.listed())
        assert scene.complete("fr").status_code == 404
        assert not unloading.done()
        # The name is free: another adapter gets it, in another row.
        assert scene.load("fr", "de").status_code == 200
        other = scene.tokens("fr")
        assert begun + list(stream) == whole
        assert unloading.result().status_code == 200
    assert scene.tokens("fr") == other != whole[: len(other)]
    assert scene.unload("fr").status_code == 200


def test_streams_are_not_disturbed_by_loading_and_unloading_others(scene):
    expected_tokens = {name: scene.tokens(name, max_tokens=600) for name in ("tiny:97", "fr")}
    stop = False

    def churn(name: str) -> int:
        count = 0
        while not stop:
            assert scene.load(name).status_code == 200
            scene.tokens(name)
            assert scene.unload(name).status_code == 200
            count += 1
        return count

    with ThreadPoolExecutor(8) as pool:
        churning = [pool.submit(churn, name) for name in ("de", "it")]
        names = ["tiny:97", "fr"] * 3
        found = list(pool.map(lambda name: list(streamed(scene, name, 600)), names))
        stop = True
        assert all(each.result() >= 1 for each in churning)
    for name, tokens in zip(names, found, strict=True):
        assert tokens == expected_tokens[name]


def test_the_client_library_loads_and_unloads(scene):
    with Client(scene.server.address) as client:
        client.load_adapter("de", "de")
        assert [info.name for info in client.adapters] == ["fr", "de"]
        assert client.unload_adapter("de").name == "de"
        assert [info.name for info in client.adapters] == ["fr"]
        with pytest.raises(UnknownModel, match="no adapter 'de'"):
            client.unload_adapter("de")
        with pytest.raises(UnknownModel, match="no adapter 'de'"):
            client.generate(PROMPT, adapter="de").tokens()
        assert client.generate(
            PROMPT, adapter="fr", temperature=0.0, max_tokens=8, ignore_eos=True
        ).tokens() == scene.tokens("fr")


def test_the_command_loads_unloads_and_lists(scene, capsys):
    def run(*words: str) -> tuple[int, str]:
        code = main(["lora", *words, "--port", str(scene.server.port)])
        return code, capsys.readouterr().out

    code, out = run("load", "de", "de")
    assert (code, out.split()[:3]) == (0, ["de", "rank", "8"])
    assert [line.split()[0] for line in run("list")[1].splitlines()] == ["fr", "de"]
    assert run("unload", "de") == (0, "unloaded de\n")
    assert main(["lora", "unload", "de", "--port", str(scene.server.port)]) == 1
    assert "there is no adapter 'de'" in capsys.readouterr().err


# ---- refusals


def refusal(answer: requests.Response, status: int) -> str:
    error = error_of(answer, status)
    return f"{error['param']}: {error['message']}"


def test_bounds_and_wrong_fields_are_named(scene):
    load = "/v1/load_lora_adapter"
    assert "lora_name" in refusal(scene.load("a:b", "de"), 400)
    assert "lora_name" in refusal(scene.load("x" * 129, "de"), 400)
    assert "lora_path" in refusal(scene.load("de", "x" * 5000), 400)
    assert "lora_path" in refusal(scene.post(load, {"lora_name": "de"}), 400)
    assert "is the name of a model" in refusal(scene.load("tiny", "de"), 400)
    assert "loaded already" in refusal(scene.load("fr"), 400)
    assert "load_inplace" in refusal(
        scene.post(load, {"lora_name": "fr", "lora_path": "fr", "load_inplace": True}), 400
    )
    assert "lora_name" in refusal(scene.unload("nobody"), 404)
    assert "is an adapter" in refusal(
        scene.post("/v1/embeddings", {"model": "fr", "input": "w1"}), 400
    )
    assert "rank 20" in refusal(scene.load("pl"), 400)
    assert "--max-lora-rank 16" in refusal(scene.load("pl"), 400)


def test_a_damaged_adapter_is_refused_and_its_row_is_free_again(scene):
    damaged = shutil.copytree(scene.adapters / "de", scene.adapters / "damaged")
    config = damaged / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    for _ in range(MAX_LORAS + 1):
        assert "use_dora is not supported" in refusal(scene.load("damaged"), 400)
    assert scene.tokens("fr")


# ---- metrics


def test_requests_are_counted_by_adapter_and_routers_see_which_are_in_use(scene):
    stream = streamed(scene, "fr", 2 * LONG_TOKENS)
    next(stream)
    samples = (
        'running_lora_adapters="fr"',
        f'max_lora="{MAX_LORAS}"',
        'tidegate_engine_adapters_running{adapter="fr"} 1.0',
        'tidegate_engine_adapter_requests_total{adapter="fr"}',
    )

    def are_exported() -> bool:
        text = scene.metrics()
        return all(sample in text for sample in samples)

    assert eventually(are_exported)
    assert len(list(stream)) == 2 * LONG_TOKENS - 1


# ---- other servers


def test_prompts_are_handed_over_with_their_adapter(scene, files):
    """With --split, one engine computes the prompt, and another one continues from its K/V."""
    folder, adapters, models = files
    prompt = [5 + n % 80 for n in range(900)]
    wanted = [scene.tokens(name, prompt=prompt) for name in (None, "fr")]
    options = ("--dtype", "float32", "--lora", f"fr={adapters / 'fr'}", "--lora-dir", str(adapters))
    with Server("--split", *options, model=str(folder)) as server:
        split = AdapterScene(server, adapters, models)
        assert [split.tokens(name, prompt=prompt) for name in (None, "fr")] == wanted
        assert split.load("de").status_code == 200
        assert split.tokens("de", prompt=prompt) not in wanted
        assert "tidegate_handovers_total 3.0" in split.metrics()
        assert split.unload("de").status_code == 200
        assert split.complete("de").status_code == 404


def test_the_steps_of_a_journal_with_adapters_are_repeated(files, tmp_path, capfd):
    folder, adapters, models = files
    options = ("--dtype", "float32", "--lora", f"fr={adapters / 'fr'}", "--journal", str(tmp_path))
    with Server(*options, model=str(folder)) as server:
        served = AdapterScene(server, adapters, models)
        assert served.tokens("fr", logprobs=1) != served.tokens(None, logprobs=1)
    assert main(["replay", str(tmp_path), "--weights"]) == 0
    out = capfd.readouterr().out
    assert "all decisions are the same" in out
    assert "computed again: 16 of 16 tokens are equal, 16 of 16 logprobs" in out


def test_an_engine_that_is_restarted_after_a_crash_loads_its_adapters_again(files, tmp_path):
    folder, adapters, models = files
    for name in ("fr", "de", "it"):
        shutil.copytree(adapters / name, tmp_path / name)
    options = ("--dtype", "float32", "--lora", f"fr={tmp_path / 'fr'}", "--lora-dir", str(tmp_path))
    with Server(*options, "--restart", model=str(folder)) as server:
        served = AdapterScene(server, tmp_path, models)
        for name in ("de", "it"):
            assert served.load(name).status_code == 200
        assert served.unload("fr").status_code == 200
        assert served.load("fr", "de").status_code == 200
        wanted = [served.tokens(name) for name in ("fr", "de")]
        assert wanted[0] == wanted[1]
        shutil.rmtree(tmp_path / "it")
        with Client(server.address) as client:
            os.kill(client.get_status().stats.worker.engine_pid, signal.SIGKILL)
        with Client(server.address, wait_s=HANG_S) as client:
            assert {info.name: info.path for info in client.adapters} == {"de": "de", "fr": "de"}
        assert eventually(lambda: served.complete("it").status_code == 404)
        assert {name for name, entry in served.listed().items() if entry["parent"]} == {"fr", "de"}
        assert [served.tokens(name) for name in ("fr", "de")] == wanted
        server.line_with("the adapter 'it' (it) is missing after the restart", on_stderr=True)


def test_adapters_that_were_changed_at_run_time_are_there_after_a_rolling_restart(
    files, tmp_path, capfd
):
    folder, adapters, models = files
    started = [text for name in ("fr", "it") for text in ("--lora", f"{name}={adapters / name}")]
    options = ("--dtype", "float32", "--replicas", "2", "--lora-dir", str(adapters))
    with Server(*options, *started, model=str(folder)) as server:
        served = AdapterScene(server, adapters, models)
        for name in ("fr", "it"):
            assert served.unload(name).status_code == 200
        assert served.load("fr", "de").status_code == 200
        wanted = served.tokens("fr")
        restarted = run_command(capfd, "restart", "--port", str(server.port))
        assert restarted.code == 0, restarted.err
        paths = {name: entry["root"] for name, entry in served.listed().items() if entry["parent"]}
        assert paths == {"fr": "de"}
        assert [served.tokens("fr") for _ in range(4)] == [wanted] * 4


def test_adapters_that_were_changed_at_run_time_are_there_when_their_model_is_loaded_again(files):
    folder, adapters, models = files
    options = ("--dtype", "float32", "--lora-dir", str(adapters))
    on_demand = ("--load", "first-use", "--max-loaded", "1")
    with Server(*options, *on_demand, models=[f"{name}={folder}" for name in ("a", "b")]) as server:
        served = AdapterScene(server, adapters, models)
        plain = served.tokens("a")
        body = {"model": "a", "lora_name": "fr", "lora_path": "de"}
        assert served.post("/v1/load_lora_adapter", body).status_code == 200
        wanted = served.tokens("a:fr")
        assert wanted != plain
        served.tokens("b")  # takes the place of a
        assert served.tokens("a") == plain
        assert served.tokens("a:fr") == wanted
