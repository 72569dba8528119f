"""A gateway with several models: each request goes to the engine of the model that it names, and
waits until that model is loaded."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from protocol.engine.messages import Generate, Hello
from protocol.engine.model_card import CardFile, write_card
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, error_of, events_of, send_post
from tests.support.scripted_engine import ScriptedEngine, scripted_card, text_reply
from tests.support.scripted_supervisor import ScriptedSupervisor
from tests.support.waiting import eventually

HI = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "chat stream": ("/v1/chat/completions", {"messages": HI, "stream": True}),
    "batch": ("/v1/chat/completions/batch", {"messages": [HI]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi", "store": False}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 20}),
    "generate": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {}, "output_mode": "text"},
    ),
}
TEXT_ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", {"prompt": "hi"}),
    "tokenize content": ("/tokenize", {"content": "hi"}),
    "apply template": ("/apply-template", {"messages": HI}),
    "tokenize chat": ("/tokenize", {"messages": HI}),
    "detokenize": ("/detokenize", {"tokens": [1]}),
    "chat tokens": ("/v1/chat/completions/input_tokens", {"messages": HI}),
    "message tokens": ("/v1/messages/count_tokens", {"messages": HI}),
    "response tokens": ("/v1/responses/input_tokens", {"input": "hi"}),
    "render chat": ("/v1/chat/completions/render", {"messages": HI}),
    "render completion": ("/v1/completions/render", {"prompt": "hi"}),
    "render message": ("/v1/messages/render", {"messages": HI, "max_tokens": 20}),
    "render response": ("/v1/responses/render", {"input": "hi"}),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # a short path, for sockets
        yield Path(name)


def new_engine(folder: Path, name: str) -> ScriptedEngine:
    card = scripted_card(name=f"own-{name}", digest=name * 16)
    return ScriptedEngine(f"ipc://{folder}/{name}.sock", card=card)


def says(engine: ScriptedEngine, text: str) -> None:
    engine.script = lambda generate: text_reply(text)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[GatewayProcess, ScriptedEngine, ScriptedEngine]]:
    """A gateway with the models "a" (also called "alias") and "b", and their engines."""
    with new_engine(folder, "a") as a, new_engine(folder, "b") as b:
        models = [
            {"served_name": ["a", "alias"], "engine": a.address},
            {"served_name": ["b"], "engine": b.address},
        ]
        with GatewayProcess(models=models) as gateway:
            yield gateway.await_ready(), a, b


Pair = tuple[GatewayProcess, ScriptedEngine, ScriptedEngine]


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_is_answered_by_the_model_that_it_names(route: str, pair: Pair) -> None:
    gateway, a, b = pair
    says(a, "I am Alice")
    says(b, "I am Bob")
    path, body = ROUTES[route]
    for name, text in (("a", "Alice"), ("b", "Bob"), ("alias", "Alice")):
        answer = gateway.post(path, body | {"model": name})
        assert answer.status_code == 200, answer.text
        if "stream" in route:
            chunks = events_of(answer.content)
            found = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        else:
            found = answer.text
        assert text in found


@pytest.mark.parametrize("route", [*ROUTES, *TEXT_ROUTES])
def test_an_unknown_model_is_a_404_that_names_all_models(route: str, pair: Pair) -> None:
    gateway, _, _ = pair
    path, body = (ROUTES | TEXT_ROUTES)[route]
    message = error_of(gateway.post(path, body | {"model": "c"}), 404)["message"]
    assert "'c'" in message
    assert "a, alias, b" in message


@pytest.mark.parametrize("route", [*ROUTES, *TEXT_ROUTES])
def test_a_request_without_a_model_is_a_400_that_names_the_field(route: str, pair: Pair) -> None:
    gateway, _, _ = pair
    path, body = (ROUTES | TEXT_ROUTES)[route]
    message = error_of(gateway.post(path, body), 400)["message"]
    assert message.startswith("model: ")
    if "messages" not in path:  # Anthropic requires the field in any case
        assert "a, alias, b" in message


@pytest.mark.parametrize("route", TEXT_ROUTES)
def test_the_text_routes_take_a_model(route: str, pair: Pair) -> None:
    gateway, _, _ = pair
    path, body = TEXT_ROUTES[route]
    assert gateway.post(path, body | {"model": "b"}).status_code == 200


def test_the_tokenizer_of_each_model_is_described(pair: Pair) -> None:
    gateway, _, _ = pair
    url = gateway.url + "/tokenizer_info"
    assert requests.get(url + "?model=b", timeout=5).json()["eos_token"] == "<eos>"
    assert error_of(requests.get(url, timeout=5), 400)["message"].startswith("model: ")


def test_all_models_are_listed_under_all_names(pair: Pair) -> None:
    gateway, _, _ = pair
    listed = requests.get(gateway.url + "/v1/models", timeout=5).json()["data"]
    assert [(m["id"], m["root"], m["state"]) for m in listed] == [
        ("a", "own-a", "ready"),
        ("alias", "own-a", "ready"),
        ("b", "own-b", "ready"),
    ]
    page = requests.get(
        gateway.url + "/v1/models?after_id=a",
        headers={"anthropic-version": "2023-06-01"},
        timeout=5,
    ).json()
    assert [m["id"] for m in page["data"]] == ["alias", "b"]
    one = requests.get(gateway.url + "/v1/models/b", timeout=5).json()
    assert one == listed[2]
    for name in ("c", "a:b"):  # a:b would be an adapter `b` of the model `a`
        assert requests.get(f"{gateway.url}/v1/models/{name}", timeout=5).status_code == 404


def test_an_abort_finds_the_request_of_any_model(pair: Pair) -> None:
    gateway, a, b = pair
    a.is_paused = b.is_paused = True
    before = len(a.generates), len(b.generates)
    with ThreadPoolExecutor() as pool:
        body = {"token_ids": [1], "sampling_params": {}}
        answers = [
            pool.submit(
                gateway.post,
                ROUTES["generate"][0],
                body | {"model": name, "request_id": f"r-{name}"},
            )
            for name in ("a", "b")
        ]
        a.await_generates(before[0] + 1)
        b.await_generates(before[1] + 1)
        report = gateway.post(
            "/inference/v1/abort_requests", {"request_ids": ["r-b", "r-x", "r-a"]}
        )
        a.is_paused = b.is_paused = False
        assert report.json() == {"aborted": ["r-b", "r-a"], "unknown": ["r-x"]}
        for answer in answers:
            assert answer.result().json()["choices"][0]["finish_reason"] == "abort"


def test_metrics_have_the_model_as_a_label(pair: Pair) -> None:
    gateway, _, _ = pair
    for name in ("a", "b", "b"):
        assert gateway.post("/v1/completions", {"model": name, "prompt": "hi"}).status_code == 200
    text = requests.get(gateway.url + "/metrics", timeout=5).text
    for line in (
        'tidegate_prompt_tokens_total{model_name="a"}',
        'tidegate_choices_total{finish="stop",model_name="b"}',
        'tidegate_stage_seconds_count{model_name="b",stage="tokenize"}',
        'tidegate_engine_up{model_name="a"} 1.0',
        'tidegate_engine_up{model_name="b"} 1.0',
        'tidegate_engine_free_blocks{model_name="b"} 7.0',
    ):
        assert line in text
    for name in ("a", "b"):
        assert f'vllm:generation_tokens_total{{model_name="{name}"}}' in text


def test_the_access_log_names_the_model(pair: Pair) -> None:
    gateway, _, _ = pair
    answer = gateway.post(
        "/v1/completions",
        {"model": "alias", "prompt": "hi"},
        headers={"X-Request-Id": "the-logged-one"},
    )
    assert answer.status_code == 200
    assert eventually(lambda: "id=the-logged-one model=a " in gateway.log)


def test_the_server_is_ready_only_if_each_model_is(folder: Path) -> None:
    with new_engine(folder, "d") as d:
        models = [
            {"served_name": ["d"], "engine": d.address},
            {"served_name": ["e"], "engine": f"ipc://{folder}/e.sock"},
        ]
        with GatewayProcess(models=models) as gateway:
            gateway.await_status("/v1/models/d", 200)
            answer = requests.get(gateway.url + "/readyz", timeout=5)
            assert answer.status_code == 503
            states = [(m["id"], m["ready"]) for m in answer.json()["models"]]
            assert states == [("d", True), ("e", False)]
            assert gateway.post("/v1/completions", {"model": "d", "prompt": "x"}).status_code == 200
            assert gateway.post("/v1/completions", {"model": "e", "prompt": "x"}).status_code == 503
            with new_engine(folder, "e"):
                ready = gateway.await_status("/readyz", 200).json()
                assert [m["engines"][0]["ready"] for m in ready["models"]] == [True, True]


# ---- loaded on first use


class OnDemand:
    """A gateway with the model "a", which is ready, and "b", which is loaded on first use."""

    def __init__(self, folder: Path, a: ScriptedEngine, **config: Any) -> None:
        self.folder = folder
        self.b = new_engine(folder, "b2")
        card = folder / "b2.card"
        write_card(card, CardFile(card=self.b.card, max_len=321))
        self.supervisor = ScriptedSupervisor(
            folder / "control.sock", {"a": "ready", "b": "unloaded"}
        )
        models = [
            {"served_name": ["a"], "engine": a.address},
            {
                "served_name": ["b"],
                "engine": self.b.address,
                "expected_card": str(card),
                "load": "first-use",
            },
        ]
        control = str(self.supervisor.path)
        self.gateway = GatewayProcess(models=models, control=control, **config)
        self.pool = ThreadPoolExecutor()

    def ask(self, name: str = "b", **fields: Any) -> Future[requests.Response]:
        body = {"model": name, "prompt": "hi"} | fields
        return self.pool.submit(self.gateway.post, "/v1/completions", body)

    def load(self) -> contextlib.AbstractContextManager[ScriptedEngine]:
        self.supervisor.set("b", "loading")
        self.supervisor.set("b", "ready")
        return self.b

    def end(self) -> None:
        """Report that "b" is unloaded, after its engine has ended."""
        self.b.kill()
        self.supervisor.set("b", "unloaded")

    def get(self, path: str) -> Any:
        return requests.get(self.gateway.url + path, timeout=5).json()


@contextlib.contextmanager
def on_demand(**config: Any) -> Iterator[OnDemand]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with new_engine(folder, "a") as a:
            scene = OnDemand(folder, a, **config)
            with scene.supervisor, scene.gateway, scene.pool:
                scene.gateway.await_ready()
                yield scene


@pytest.fixture(scope="module")
def shared_scene() -> Iterator[OnDemand]:
    with on_demand() as scene:
        yield scene


@pytest.fixture
def scene(shared_scene: OnDemand) -> OnDemand:
    """A scene in which "b" is unloaded, its engine has ended for the gateway as well, and the
    supervisor has received nothing yet."""
    shared_scene.supervisor.reset()
    shared_scene.supervisor.set("b", "unloaded")

    def has_ended() -> bool:
        _, b = shared_scene.get("/readyz")["models"]
        return not any(engine["ready"] for engine in b["engines"])

    assert eventually(has_ended), "the gateway still has the engine of the last test"
    shared_scene.supervisor.await_report(lambda r: not r.kept and not r.open.get("b"))
    shared_scene.b.reset()
    return shared_scene


def test_a_request_loads_its_model_and_waits_for_it(scene: OnDemand) -> None:
    answers = [scene.ask() for _ in range(5)]
    scene.supervisor.await_start("b")
    scene.supervisor.await_report(lambda r: r.kept == {"b": 5})
    assert scene.ask("a").result().status_code == 200
    says(scene.b, "at last")
    with scene.load():
        for answer in answers:
            assert answer.result().json()["choices"][0]["text"] == "at last"
        scene.supervisor.await_report(lambda r: not r.kept)
    assert scene.supervisor.started == ["b"]


def test_a_model_that_does_not_fit_is_refused_with_the_supervisors_message(scene: OnDemand) -> None:
    scene.supervisor.on_start = lambda model: "needs 9.0 GiB, and 4.0 GiB are free"
    answer = scene.ask().result()
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert "needs 9.0 GiB, and 4.0 GiB are free" in answer.json()["error"]["message"]
    scene.supervisor.await_report(lambda r: not r.kept)


def test_a_model_whose_load_fails_is_refused_and_requested_again_by_the_next(
    scene: OnDemand,
) -> None:
    answer = scene.ask()
    scene.supervisor.await_start("b")
    scene.supervisor.set("b", "loading")
    scene.supervisor.set("b", "failed", "the weights are damaged")
    assert answer.result().status_code == 503
    assert "the weights are damaged" in answer.result().json()["error"]["message"]
    again = scene.ask()
    assert eventually(lambda: scene.supervisor.started == ["b", "b"])
    with scene.load():
        assert again.result().status_code == 200


def test_a_wait_ends_with_the_queue_timeout_of_its_request(scene: OnDemand) -> None:
    answer = scene.ask(queue_timeout_s=0.2).result()
    assert "queue_timeout_s of 0.2 s" in error_of(answer, 429)["message"]
    answer = scene.ask(timeout_s=0.2).result()
    assert answer.status_code == 504
    scene.supervisor.await_report(lambda r: not r.kept)


def test_a_client_that_disconnects_waits_no_more(scene: OnDemand) -> None:
    with connect(scene.gateway.port) as client:
        send_post(client, "/v1/completions", {"model": "b", "prompt": "hi"})
        scene.supervisor.await_start("b")
        scene.supervisor.await_report(lambda r: r.kept == {"b": 1})
    scene.supervisor.await_report(lambda r: not r.kept and not r.open)
    with scene.load() as b:
        assert scene.ask().result().status_code == 200
        assert len(b.generates) == 1


def test_requests_wait_while_their_model_is_unloaded_and_loaded_again(scene: OnDemand) -> None:
    with scene.load() as b:
        assert scene.ask().result().status_code == 200
        b.is_paused = True
        running = scene.ask()
        b.await_generates(2)
        scene.supervisor.set("b", "stopping")
        scene.supervisor.await_report(lambda r: r.open == {"b": 1})
        kept = scene.ask()
        scene.supervisor.await_report(lambda r: r.kept == {"b": 1})
        assert len(b.generates) == 2
        b.is_paused = False
        assert running.result().status_code == 200
        scene.supervisor.await_report(lambda r: r.kept == {"b": 1} and not r.open.get("b"))
    scene.supervisor.set("b", "unloaded")
    with scene.load():
        assert kept.result().status_code == 200, kept.result().text


def test_a_kept_request_is_not_sent_to_the_engine_of_an_earlier_load(scene: OnDemand) -> None:
    with scene.load() as b:
        assert scene.ask().result().status_code == 200
        scene.supervisor.set("b", "stopping")
        kept = scene.ask()
        scene.supervisor.await_report(lambda r: r.kept == {"b": 1} and not r.open.get("b"))
        b.is_silent = True  # it has ended, and its connection breaks later
        scene.supervisor.set("b", "unloaded")
        scene.supervisor.set("b", "loading")
        scene.supervisor.set("b", "ready")
        assert eventually(lambda: {Hello, Generate} & set(b.ignored)), "it sends neither"
        assert Generate not in b.ignored
    b.is_silent = False
    with b:
        assert kept.result().status_code == 200, kept.result().text


def test_a_lost_connection_to_the_supervisor_is_made_again(scene: OnDemand) -> None:
    answer = scene.ask()
    scene.supervisor.await_start("b")
    scene.supervisor.disconnect()
    assert eventually(lambda: scene.supervisor.started == ["b", "b"])
    scene.supervisor.await_report(lambda r: r.kept == {"b": 1})
    with scene.load():
        assert answer.result().status_code == 200


def test_a_model_can_be_put_to_sleep_and_woken_up(scene: OnDemand) -> None:
    def stop(model: str) -> None:
        scene.supervisor.set(model, "stopping")
        threading.Timer(0.05, scene.end).start()

    scene.supervisor.on_stop = stop
    with scene.load():
        assert scene.gateway.post("/wake_up?model=b", None).json() == {"is_sleeping": False}
        assert scene.get("/is_sleeping?model=b") == {"is_sleeping": False}
        slept = scene.gateway.post("/sleep?level=1&model=b", None)
        assert (slept.status_code, slept.json()) == (200, {"is_sleeping": True})
        assert scene.supervisor.stopped == ["b"]
        assert scene.get("/is_sleeping?model=b") == {"is_sleeping": True}
        assert scene.get("/readyz")["ready"]
    woken = scene.pool.submit(scene.gateway.post, "/wake_up?model=b", None)
    scene.supervisor.await_start("b")
    with scene.load():
        assert woken.result().json() == {"is_sleeping": False}


def test_a_request_of_ollama_without_a_prompt_loads_and_unloads_its_model(scene: OnDemand) -> None:
    scene.supervisor.on_stop = lambda model: scene.end()
    for path in ("/api/generate", "/api/chat"):
        with scene.load():
            loaded = scene.gateway.post(path, {"model": "b:latest"})
            assert loaded.json()["done_reason"] == "load"
            assert "b:latest" in str(scene.get("/api/ps"))
            unloaded = scene.gateway.post(path, {"model": "b:latest", "keep_alive": 0})
            assert (unloaded.status_code, unloaded.json()["done_reason"]) == (200, "unload")
        assert scene.supervisor.stopped[-1] == "b"
        assert "b:latest" not in str(scene.get("/api/ps"))
        assert "b:latest" in str(scene.get("/api/tags"))
    assert (
        scene.gateway.post("/api/generate", {"model": "c", "keep_alive": "0s"}).status_code == 404
    )


def test_sleep_names_its_model_and_reports_the_supervisors_refusal(scene: OnDemand) -> None:
    assert scene.gateway.post("/sleep", None).status_code == 400
    assert scene.gateway.post("/sleep?model=c", None).status_code == 404
    scene.supervisor.on_stop = lambda model: "a roll is in progress"
    refused = scene.gateway.post("/sleep?model=a", None)
    assert "a roll is in progress" in error_of(refused, 503)["message"]


@pytest.fixture(scope="module")
def fresh() -> Iterator[OnDemand]:
    """A scene in which "b" has never been loaded, with a short --load-timeout-s."""
    with on_demand(load_timeout_s=1.0) as scene:
        yield scene


def test_an_unloaded_model_is_listed_and_the_server_is_ready_without_it(fresh: OnDemand) -> None:
    listed = fresh.get("/v1/models")["data"]
    assert [(m["id"], m["root"], m["state"]) for m in listed] == [
        ("a", "own-a", "ready"),
        ("b", "own-b2", "unloaded"),
    ]
    assert listed[1]["max_model_len"] == 321
    assert listed[1]["default_sampling"]["temperature"] == 0.7
    assert "formats" not in listed[1]
    health = fresh.get("/readyz")
    assert [(m["state"], m["is_wanted"]) for m in health["models"]] == [
        ("ready", True),
        ("unloaded", False),
    ]


def test_a_server_is_not_ready_before_the_states_of_its_models_are_known(folder: Path) -> None:
    with ScriptedSupervisor(folder / "late.sock", {"f": "unloaded", "g": "unloaded"}) as supervisor:
        supervisor.is_late = True
        models = [
            {"served_name": [name], "engine": f"ipc://{folder}/{name}.sock", "load": "first-use"}
            for name in ("f", "g")
        ]
        with GatewayProcess(models=models, control=str(supervisor.path)) as gateway:
            gateway.await_status("/livez", 200)
            for path in ("/readyz", "/startupz"):
                answer = requests.get(gateway.url + path, timeout=5)
                assert answer.status_code == 503
                assert "the supervisor has not reported" in answer.json()["why"]
            supervisor.set("f", "unloaded")
            states = gateway.await_status("/readyz", 200).json()["models"]
            assert [each["state"] for each in states] == ["unloaded", "unloaded"]
            gateway.await_status("/startupz", 200)


def test_a_wait_ends_with_the_load_timeout(fresh: OnDemand) -> None:
    answer = fresh.ask().result()
    assert "--load-timeout-s" in error_of(answer, 503)["message"]


def test_a_drain_ends_the_requests_that_wait() -> None:
    with on_demand() as scene:
        answer = scene.ask()
        scene.supervisor.await_start("b")
        scene.gateway.process.terminate()
        assert answer.result().status_code == 503
