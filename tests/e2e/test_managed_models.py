"""`tidegate serve --manage-models`: clients download, copy and delete models while it runs. The
environment variables of huggingface_hub point to a fake hub."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.fake_hub import FakeHub, FakeRepo
from tests.support.http import json_of
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_roomy_llama, write_tiny_llama
from tests.support.waiting import HANG_S, eventually

OPTIONS = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--manage-models")
OWN = "own"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        for number, name in enumerate(("tiny", "other", "third")):
            folder = tmp_path_factory.mktemp(name)
            write_tiny_llama(folder, seed=number)
            hub.repos[f"tide/{name}"] = FakeRepo(
                {path.name: path.read_bytes() for path in folder.iterdir()}
            )
        roomy = write_roomy_llama(tmp_path_factory.mktemp("roomy"))
        hub.repos["tide/roomy"] = FakeRepo({p.name: p.read_bytes() for p in roomy.iterdir()})
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def start(hub: FakeHub, home: Path) -> Iterator[Callable[..., Server]]:
    """Return a function that makes a server whose downloads come from the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(home / "huggingface"))
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_TOKEN", "")
        patch.setenv("TIDEGATE_HOME", str(home))
        yield lambda model, *more, port=0: Server(
            *OPTIONS, *more, models=[f"{OWN}={model}"], port=port
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_tiny_llama(folder, seed=9)
    return folder


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], model: Path) -> Iterator[Server]:
    with start(model, "--gateways", "2") as running:
        yield running


def pull(server: Server, model: str) -> list[dict[str, Any]]:
    """Return the lines of a streamed download."""
    answer = requests.post(f"{server.url}/api/pull", json={"model": model}, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines() if line.strip()]


def post(server: Server, path: str, **body: Any) -> requests.Response:
    return requests.post(f"{server.url}{path}", json=body, timeout=HANG_S)


def delete(server: Server, model: str) -> requests.Response:
    return requests.delete(f"{server.url}/api/delete", json={"model": model}, timeout=HANG_S)


def complete(server: Server, model: str, max_tokens: int = 4) -> requests.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "model": model}
    return post(server, "/v1/completions", **body)


def names_seen(server: Server, path: str = "/v1/models", key: str = "data") -> set[frozenset[str]]:
    """Return the lists of names that many new connections get, so that each gateway answers."""
    field = "id" if key == "data" else "model"
    answers = [json_of(requests.get(server.url + path, timeout=HANG_S)) for _ in range(24)]
    return {frozenset(each[field] for each in answer[key]) for answer in answers}


def test_a_pulled_model_is_served_by_every_gateway_and_loaded_at_its_first_request(
    server: Server, hub: FakeHub
) -> None:
    lines = pull(server, "tide/tiny")
    assert lines[0] == {"status": "pulling manifest"}
    assert [each["status"] for each in lines[-3:]] == [
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    weights = hub.repos["tide/tiny"].digest("model.safetensors")
    (last,) = [
        each
        for each in lines
        if each.get("digest") == f"sha256:{weights}" and each["completed"] == each["total"]
    ]
    assert last["status"] == f"pulling {weights[:12]}"
    assert names_seen(server) == {frozenset([OWN, "tide/tiny"])}
    assert names_seen(server, "/api/tags", "models") == {
        frozenset([f"{OWN}:latest", "tide/tiny:latest"])
    }
    for _ in range(8):
        answer = json_of(complete(server, "tide/tiny"))
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("tide/tiny", 4)
    assert pull(server, "tide/tiny:latest") == [{"status": "success"}]


def test_two_clients_that_pull_a_model_share_one_download(server: Server, hub: FakeHub) -> None:
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(post, server, "/api/pull", model="tide/other", stream=False)
        lines = pool.submit(pull, server, "tide/other")
        assert json_of(whole.result()) == {"status": "success"}
        assert lines.result()[-1] == {"status": "success"}
    received = [path for method, path, _ in hub.requests if method == "GET" and "/cdn/" in path]
    assert len([path for path in received if "tide/other" in path and "model.safe" in path]) == 1
    assert json_of(complete(server, "tide/other"))["model"] == "tide/other"


@pytest.mark.parametrize(
    "name",
    [
        *("no-such-model", "../secret", "/etc/passwd", "tide/../tiny", "tide/tiny@../main"),
        *("https://127.0.0.1/model.gguf", "file:///etc/passwd", "tide/tiny:../../x.gguf"),
    ],
)
def test_a_name_that_is_no_models_is_refused_before_anything_is_downloaded(
    name: str, server: Server, hub: FakeHub
) -> None:
    before = len(hub.requests)
    answer = post(server, "/api/pull", model=name)
    assert answer.status_code == 404
    assert repr(name) in json_of(answer, 404)["error"]
    assert len(hub.requests) == before


def test_a_download_that_fails_ends_with_an_error_that_names_no_file(
    server: Server, home: Path
) -> None:
    (*_, last) = pull(server, "tide/missing")
    assert "no model 'tide/missing'" in last["error"]
    answer = post(server, "/api/pull", model="tide/missing", stream=False)
    assert "no model 'tide/missing'" in json_of(answer, 404)["error"]
    assert str(home) not in answer.text
    library = json_of(requests.get(f"{server.url}/v1/library", timeout=HANG_S))
    (failed,) = [each for each in library["models"] if each["name"] == "tide/missing"]
    assert "no model" in failed["error"]
    assert not failed["is_served"]


def test_a_copy_is_one_more_name_and_its_deletion_leaves_the_model(server: Server) -> None:
    assert post(server, "/api/copy", source=OWN, destination="gpt:latest").status_code == 200
    assert all("gpt" in names for names in names_seen(server))
    assert json_of(complete(server, "gpt"))["usage"]["completion_tokens"] == 4
    taken = post(server, "/api/copy", source="tide/tiny", destination="gpt")
    assert "destination: another model is named 'gpt'" in json_of(taken, 400)["error"]
    escaping = post(server, "/api/copy", source=OWN, destination="../x")
    assert json_of(escaping, 400)["error"].startswith("destination: ")
    unknown = post(server, "/api/copy", source="nobody", destination="x")
    assert "no model is named 'nobody'" in json_of(unknown, 404)["error"]
    assert delete(server, "gpt").status_code == 200
    assert all("gpt" not in names for names in names_seen(server))
    assert complete(server, "gpt").status_code == 404
    assert complete(server, OWN).status_code == 200


def test_the_operators_models_cannot_be_deleted(server: Server, model: Path) -> None:
    assert "only its operator" in json_of(delete(server, OWN), 400)["error"]
    assert (model / "config.json").exists()
    assert "no model is named" in json_of(delete(server, "nobody"), 404)["error"]


def test_a_deleted_model_finishes_its_open_requests_before_its_files_are_removed(
    server: Server, home: Path
) -> None:
    name, tokens = "tide/roomy", 3000
    assert pull(server, name)[-1] == {"status": "success"}
    folder = home / "huggingface" / "hub" / "models--tide--roomy"
    assert folder.is_dir()
    assert complete(server, name).status_code == 200
    with ThreadPoolExecutor() as pool:
        long = pool.submit(complete, server, name, tokens)
        ready = f"{server.url}/readyz"

        def is_running() -> bool:
            text = requests.get(f"{server.url}/metrics", timeout=HANG_S).text
            return any(
                line.startswith("tidegate_engine_running") and name in line and line.endswith("1.0")
                for line in text.splitlines()
            )

        assert eventually(is_running), requests.get(ready, timeout=HANG_S).text
        deletion = pool.submit(delete, server, name)
        assert eventually(lambda: complete(server, name, 1).status_code == 404)
        assert folder.is_dir(), "its request still runs"
        assert json_of(long.result())["usage"]["completion_tokens"] == tokens
        assert deletion.result().status_code == 200
    assert not folder.exists()
    assert all(name not in names for names in names_seen(server))


def test_a_cancelled_download_leaves_nothing_and_can_be_started_again(
    server: Server, hub: FakeHub, home: Path
) -> None:
    name = "tide/third"

    def entry() -> dict[str, Any]:
        library = json_of(requests.get(f"{server.url}/v1/library", timeout=HANG_S))
        return next((each for each in library["models"] if each["name"] == name), {})

    hub.stalls_after = 1000
    with ThreadPoolExecutor() as pool:
        download = pool.submit(pull, server, name)
        assert eventually(lambda: entry().get("download", {}).get("completed"))
        hub.stalls_after = None
        assert delete(server, name).status_code == 200
        assert download.result()[-1] == {"error": "the download was cancelled"}
    folder = home / "huggingface" / "hub" / "models--tide--third"
    assert eventually(lambda: not folder.exists())
    assert entry() == {}
    assert pull(server, name)[-1] == {"status": "success"}
    assert delete(server, name).status_code == 200


def test_a_restarted_server_has_the_models_that_clients_have_left_it(
    start: Callable[..., Server], model: Path
) -> None:
    with start(model) as server:
        assert pull(server, "tide/third")[-1] == {"status": "success"}
        assert post(server, "/api/copy", source=OWN, destination="gpt").status_code == 200
        assert pull(server, "tide/tiny")[-1] == {"status": "success"}
        assert delete(server, "tide/tiny").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    with start(model, port=server.port) as server:
        assert names_seen(server) == {frozenset([OWN, "gpt", "tide/third"])}
        assert json_of(complete(server, "tide/third"))["usage"]["completion_tokens"] == 4
        assert delete(server, "tide/third").status_code == 200
        assert names_seen(server) == {frozenset([OWN, "gpt"])}
