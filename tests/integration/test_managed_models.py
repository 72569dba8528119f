"""A gateway whose supervisor changes the models that it serves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from protocol.config.gateway import ModelConfig
from protocol.engine.model_card import CardFile, write_card
from protocol.shared.api_keys import digest_of
from protocol.tools.control import (
    ControlError,
    CopyModel,
    DeleteModel,
    PullEnded,
    PullModel,
    PullProgress,
)
from protocol.wire.errors import DiskFull
from tests.support.gateway_process import GatewayProcess
from tests.support.http import json_of
from tests.support.scripted_engine import ScriptedEngine, scripted_card, text_reply
from tests.support.scripted_supervisor import ScriptedSupervisor
from tests.support.waiting import HANG_S, eventually

ADMIN, USER = "a" * 40, "u" * 40


class ManagedScene:
    """A gateway with the model "own", and an engine for a model that the supervisor may add."""

    def __init__(self, folder: Path) -> None:
        self.own, self.added = (
            ScriptedEngine(
                f"ipc://{folder}/{name}.sock", card=scripted_card(name=name, digest=name * 10)
            )
            for name in ("own", "added")
        )
        self.card = folder / "added.card"
        write_card(self.card, CardFile(card=self.added.card, max_len=321))
        self.supervisor = ScriptedSupervisor(folder / "control.sock", {"own": "ready"})
        self.own_config = ModelConfig(served_name=["own"], engine=self.own.address)
        keys = folder / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(
            f'[keys.admin]\ndigest = "{digest_of(ADMIN)}"\nscopes = ["inference", "admin"]\n'
            f'[keys.user]\ndigest = "{digest_of(USER)}"\nscopes = ["inference"]\n'
        )
        self.gateway = GatewayProcess(
            models=[{"served_name": ["own"], "engine": self.own.address}],
            control=str(self.supervisor.path),
            api_keys=str(keys),
            manage_models=True,
        )
        self.supervisor.hosted = [self.own_config]

    def add(self, *names: str) -> None:
        """Serve the second model under these names. Its key in the supervisor is "added"."""
        added = ModelConfig(
            served_name=list(names),
            key="added",
            engine=self.added.address,
            load="first-use",
            expected_card=str(self.card),
        )
        self.supervisor.hosted = [self.own_config, added]
        self.supervisor.set("added", "unloaded")

    def delete(self) -> None:
        self.supervisor.hosted = [self.own_config]
        self.supervisor.set("added", "stopping")

    def call(
        self, path: str, key: str = ADMIN, method: str = "post", **body: Any
    ) -> requests.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return requests.request(
            method, self.gateway.url + path, json=body, headers=headers, timeout=HANG_S
        )

    def complete(self, name: str) -> requests.Response:
        return self.call("/v1/completions", USER, model=name, prompt="hi")

    @property
    def names(self) -> list[str]:
        answer = json_of(self.call("/v1/models", USER, "get"))
        return [each["id"] for each in answer["data"]]


@pytest.fixture(scope="module")
def shared_scene() -> Iterator[ManagedScene]:
    with tempfile.TemporaryDirectory() as folder:  # a short path, for the sockets
        scene = ManagedScene(Path(folder))
        with scene.own, scene.added, scene.supervisor, scene.gateway:
            scene.gateway.await_ready()
            yield scene


@pytest.fixture
def scene(shared_scene: ManagedScene) -> ManagedScene:
    """A scene with the model "own" alone."""
    shared_scene.supervisor.reset()
    shared_scene.supervisor.hosted = [shared_scene.own_config]
    shared_scene.supervisor.set("own", "ready")
    assert eventually(lambda: shared_scene.names == ["own"])
    return shared_scene


def test_an_added_model_is_listed_loaded_on_use_and_renamed(scene: ManagedScene) -> None:
    scene.added.reset()
    scene.added.script = lambda generate: text_reply("I was added")
    scene.add("added", "alias")
    assert eventually(lambda: scene.names == ["own", "added", "alias"])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(scene.complete, "alias")
        scene.supervisor.await_start("added")
        scene.supervisor.set("added", "ready")
        answer = json_of(waiting.result())
    assert answer["choices"][0]["text"] == "I was added"
    scene.add("renamed")
    scene.supervisor.set("added", "ready")
    assert eventually(lambda: scene.names == ["own", "renamed"])
    assert scene.complete("alias").status_code == 404
    assert json_of(scene.complete("renamed"))["model"] == "renamed"


def test_a_request_that_waits_for_a_deleted_model_is_told_so(scene: ManagedScene) -> None:
    scene.add("added")
    assert eventually(lambda: "added" in scene.names)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(scene.complete, "added")
        scene.supervisor.await_start("added")
        scene.delete()
        error = json_of(waiting.result(), 404)["error"]
    assert error["message"] == "the model added was deleted"
    scene.supervisor.remove("added")
    assert scene.complete("added").status_code == 404
    assert scene.complete("own").status_code == 200


def test_open_requests_of_a_deleted_model_are_reported_until_they_end(scene: ManagedScene) -> None:
    scene.added.reset()
    scene.added.is_paused = True
    scene.add("added")
    scene.supervisor.set("added", "ready")
    assert eventually(lambda: "added" in scene.names)
    with ThreadPoolExecutor() as pool:
        open_request = pool.submit(scene.complete, "added")
        scene.supervisor.await_report(lambda report: report.open.get("added") == 1)
        scene.delete()
        scene.supervisor.await_report(lambda report: report.open.get("added") == 1)
        scene.added.resume()
        assert json_of(open_request.result())["choices"][0]["text"] == "Hello, world!"
    scene.supervisor.await_report(lambda report: not report.open.get("added"))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("post", "/api/pull", {"model": "new"}),
        ("post", "/api/copy", {"source": "own", "destination": "new"}),
        ("delete", "/api/delete", {"model": "own"}),
        ("get", "/v1/library", {}),
    ],
)
def test_only_keys_with_the_scope_admin_manage_models(
    method: str, path: str, body: dict[str, str], scene: ManagedScene
) -> None:
    answer = scene.call(path, USER, method, **body)
    assert answer.status_code == 403
    assert "admin" in answer.text
    assert scene.supervisor.managed == []
    assert "manages_models" not in json_of(scene.call("/version", USER, "get"))
    assert json_of(scene.call("/version", ADMIN, "get"))["manages_models"] is True


def test_a_pull_is_written_as_ollama_does_and_its_failure_ends_the_stream(
    scene: ManagedScene,
) -> None:
    error = DiskFull("not enough disk space for new: 9 GB needed, 1 GB free").info()
    scene.supervisor.on_manage = lambda message: [
        PullProgress(model="new", status="pulling manifest"),
        PullProgress(model="new", status="pulling 8e", digest="sha256:8e", total=9),
        PullEnded(model="new", error=error),
    ]
    answer = scene.call("/api/pull", model="new:latest")
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert [json.loads(line) for line in answer.text.splitlines()] == [
        {"status": "pulling manifest"},
        {"status": "pulling 8e", "digest": "sha256:8e", "total": 9, "completed": 0},
        {"error": error.message},
    ]
    assert scene.supervisor.managed == [PullModel(model="new")]
    assert json_of(scene.call("/api/pull", model="new", stream=False), 507) == {
        "error": error.message
    }


def test_a_refusal_of_the_supervisor_has_its_own_status(scene: ManagedScene) -> None:
    scene.supervisor.on_manage = lambda message: [
        ControlError(message="model: only its operator", code="invalid_request", param="model")
    ]
    for stream in (True, False):
        refused = scene.call("/api/pull", model="new", stream=stream)
        assert json_of(refused, 400) == {"error": "model: only its operator"}
    assert scene.call("/api/delete", method="delete", model="own").status_code == 400


def test_no_model_gets_a_name_that_selects_an_adapter(scene: ManagedScene) -> None:
    loaded = scene.call("/v1/load_lora_adapter", lora_name="Q4_0", lora_path="q4")
    assert loaded.status_code == 200, loaded.text
    scene.supervisor.on_manage = lambda message: [scene.supervisor.states]
    for name in ("own:Q4_0", "own:Q4_0:latest"):
        pulled = scene.call("/api/pull", model=name)
        assert json_of(pulled, 400)["error"] == "model: an adapter is named 'own:Q4_0'"
        copied = scene.call("/api/copy", source="own", destination=name)
        assert json_of(copied, 400)["error"] == "destination: an adapter is named 'own:Q4_0'"
    assert scene.supervisor.managed == []
    assert scene.call("/v1/unload_lora_adapter", lora_name="Q4_0").status_code == 200


def test_names_of_copies_and_deletions_are_read_as_ollamas(scene: ManagedScene) -> None:
    scene.supervisor.on_manage = lambda message: [scene.supervisor.states]
    body = {"source": "own:latest", "destination": "gpt:latest"}
    assert scene.call("/api/copy", **body).status_code == 200
    assert scene.call("/api/delete", method="delete", name="gpt:latest").status_code == 200
    assert scene.supervisor.managed == [
        CopyModel(source="own", destination="gpt"),
        DeleteModel(model="gpt"),
    ]
    missing = scene.call("/api/copy", source="own")
    assert json_of(missing, 400)["error"] == "destination: this field is required"
