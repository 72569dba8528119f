"""vllm-router and nginx in front of two servers with scripted engines: the APIs, streams, aborts,
and a server that is killed. The tests are skipped if the programs are not installed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import requests

from tests.support.examples import examples
from tests.support.fronts import Front, Nginx, VllmRouter, nginx_program, router_program
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, events_of, json_of
from tests.support.scripted_engine import (
    ScriptedEngine,
    TokenReply,
    handle_of,
    ids_of,
    text_of,
    text_reply,
)
from tests.support.waiting import eventually

MODEL = "scripted"
HI = [{"role": "user", "content": "Hi"}]
ANSWER = "Hello, world!"
MANY_TOKENS = 400
ENDLESS = TokenReply([[65]] * 100_000)
LONG_STREAM: dict[str, Any] = {
    "model": MODEL,
    "prompt": "x",
    "stream": True,
    "max_tokens": MANY_TOKENS,
}
NUM_REQUESTS, NUM_CLIENTS = examples(60, 2_000), 6


class TwoServers:
    """Two servers, each a gateway with its own scripted engine, ready inside a `with` block."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.engines = [ScriptedEngine(f"ipc://{folder}/engine{number}") for number in range(2)]
        self.gateways = [
            GatewayProcess(engine=engine.address, allowed_host=["llm.example"])
            for engine in self.engines
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine)
            for gateway in self.gateways:
                stack.enter_context(gateway)
            for gateway in self.gateways:
                gateway.await_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def answer_with(self, text: str) -> None:
        for engine in self.engines:
            engine.script = lambda generate: text_reply(text)

    def num_requests(self) -> list[int]:
        return [len(engine.generates) for engine in self.engines]

    def kill(self, which: int) -> None:
        """Kill a gateway with all its processes, while requests are open."""
        os.killpg(self.gateways[which].process.pid, signal.SIGKILL)


def router_of(servers: TwoServers, folder: Path) -> Front:
    return VllmRouter("--worker-urls", *servers.urls, "--policy", "round_robin")


def nginx_of(servers: TwoServers, folder: Path) -> Front:
    return Nginx(folder, [gateway.port for gateway in servers.gateways])


FRONTS: dict[str, Callable[[TwoServers, Path], Front]] = {
    "vllm-router": router_of,
    "nginx": nginx_of,
}


PROGRAMS = {"vllm-router": router_program, "nginx": nginx_program}


@contextmanager
def started(name: str, folder: Path) -> Iterator[tuple[TwoServers, Front]]:
    PROGRAMS[name]()  # before servers are started in vain
    with TwoServers(folder) as servers, FRONTS[name](servers, folder) as front:
        yield servers, front


@pytest.fixture(scope="module", params=list(FRONTS))
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TwoServers, Front]]:
    with started(request.param, tmp_path_factory.mktemp("front")) as both:
        yield both


@pytest.fixture
def behind(shared: tuple[TwoServers, Front]) -> tuple[TwoServers, Front]:
    servers, _ = shared
    for engine in servers.engines:
        engine.reset()
        engine.await_idle()
    return shared


def post(front: Front, path: str, body: Any, **headers: str) -> requests.Response:
    return requests.post(front.url + path, json=body, headers=headers, timeout=60)


def stream_from(front: Front) -> Generator[str, None, None]:
    """Send a request with a long answer, and yield the text of each event as soon as it arrives.
    Closing the generator closes the connection."""
    with requests.post(
        front.url + "/v1/completions", json=LONG_STREAM, stream=True, timeout=60
    ) as response:
        for line in response.iter_lines(chunk_size=1):
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def test_whole_answers_come_from_both_servers(behind: tuple[TwoServers, Front]) -> None:
    servers, front = behind
    for _ in range(4):
        reply = post(front, "/v1/chat/completions", {"model": MODEL, "messages": HI})
        assert json_of(reply)["choices"][0]["message"]["content"] == ANSWER
    reply = post(front, "/v1/completions", {"model": MODEL, "prompt": "x"})
    assert reply.json()["choices"][0]["text"] == ANSWER
    assert min(servers.num_requests()) >= 1


def test_sampling_parameters_and_tools_reach_the_engine(behind: tuple[TwoServers, Front]) -> None:
    servers, front = behind
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    body = {"model": MODEL, "messages": HI, "tools": [tool], "tool_choice": "auto"}
    own = {"temperature": 0.25, "top_k": 3, "min_p": 0.125, "max_tokens": 5, "seed": 7}
    reply = post(front, "/v1/chat/completions", body | own | {"stop": ["zz"]})
    assert reply.status_code == 200, reply.text
    (generate,) = [each for engine in servers.engines for each in engine.generates]
    assert {name: getattr(generate.params, name) for name in own} == own
    assert "clock" in text_of(generate.prompt.tolist())


def test_no_event_of_a_stream_is_held_back(behind: tuple[TwoServers, Front]) -> None:
    """While the engine pauses, the client must receive everything generated so far."""
    servers, front = behind
    for engine in servers.engines:
        engine.script = lambda generate: ENDLESS
    steps = [engine.num_steps for engine in servers.engines]
    with closing(stream_from(front)) as received:
        num_received = len(next(received))
        (which,) = [at for at, engine in enumerate(servers.engines) if engine.generates]
        engine = servers.engines[which]
        for num_awaited in (3, 6, 9):
            engine.await_steps(num_awaited)
            engine.is_paused = True
            num_generated = engine.num_steps - steps[which]
            while num_received < num_generated:
                num_received += len(next(received))
            engine.is_paused = False
        assert num_received >= 18


def test_a_stream_is_passed_on_unchanged(behind: tuple[TwoServers, Front]) -> None:
    _, front = behind
    body = {
        "model": MODEL,
        "messages": HI,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = post(front, "/v1/chat/completions", body)
    events = events_of(reply.content)
    text = "".join(each["delta"].get("content", "") for e in events for each in e["choices"])
    assert text == ANSWER
    assert events[-1]["usage"]["completion_tokens"] == len(ANSWER) + 1


def test_a_client_that_disconnects_aborts_its_request(behind: tuple[TwoServers, Front]) -> None:
    servers, front = behind
    for engine in servers.engines:
        engine.script = lambda generate: ENDLESS
    with closing(stream_from(front)) as received:
        while not next(received):
            pass
    assert eventually(lambda: any(engine.aborts for engine in servers.engines))


def test_other_routes_pass(behind: tuple[TwoServers, Front]) -> None:
    _, front = behind
    models = requests.get(front.url + "/v1/models", timeout=20)
    assert [each["id"] for each in models.json()["data"]] == [MODEL]
    tokens = post(front, "/tokenize", {"model": MODEL, "prompt": "ab", "add_special_tokens": False})
    assert tokens.json()["tokens"] == ids_of("ab")
    response = post(front, "/v1/responses", {"model": MODEL, "input": "Hi", "store": False})
    assert response.json()["output"][0]["content"][0]["text"] == ANSWER
    message = post(
        front,
        "/v1/messages",
        {"model": MODEL, "messages": HI, "max_tokens": 64},
        **{"x-api-key": "x"},
    )
    assert message.json()["content"][0]["text"] == ANSWER
    embeddings = post(front, "/v1/embeddings", {"model": MODEL, "input": "x"})
    assert embeddings.status_code == 400  # the model generates text


def test_errors_are_those_of_the_server(behind: tuple[TwoServers, Front]) -> None:
    _, front = behind
    reply = post(front, "/v1/completions", {"model": MODEL, "prompt": "x", "temperature": 9.0})
    assert error_of(reply, 400)["param"] == "temperature"
    unknown = post(front, "/v1/completions", {"model": "other", "prompt": "x"})
    assert unknown.status_code == 404


def test_an_empty_bearer_is_no_key(behind: tuple[TwoServers, Front]) -> None:
    _, front = behind
    body = {"model": MODEL, "prompt": "x"}
    assert post(front, "/v1/completions", body, Authorization="Bearer ").status_code == 200


@pytest.mark.parametrize("name", list(FRONTS))
def test_no_whole_answer_is_lost_if_a_server_is_killed_under_load(
    name: str, tmp_path: Path
) -> None:
    with started(name, tmp_path) as (servers, front), ThreadPoolExecutor(NUM_CLIENTS) as pool:

        def ask(number: int) -> int:
            body = {"model": MODEL, "prompt": f"prompt {number}", "max_tokens": 40}
            return post(front, "/v1/completions", body).status_code

        for engine in servers.engines:
            engine.step_s = 0.005
        statuses = [pool.submit(ask, number) for number in range(NUM_REQUESTS)]
        assert eventually(lambda: min(servers.num_requests()) > 3)
        servers.kill(0)
        assert Counter(each.result() for each in statuses) == {200: NUM_REQUESTS}


# ---- prefill and decode through the router
def test_the_router_hands_a_prompt_from_a_prefill_to_a_decode_server(tmp_path: Path) -> None:
    router_program()
    with TwoServers(tmp_path) as servers:
        prefill, decode = servers.urls
        p, d = servers.engines
        ways = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        with VllmRouter(*ways, "--prefill", prefill, "--decode", decode) as front:
            chat = {"model": MODEL, "messages": HI, "max_tokens": 20}
            whole = post(front, "/v1/chat/completions", chat)
            assert whole.json()["choices"][0]["message"]["content"] == ANSWER
            streamed = post(front, "/v1/chat/completions", {**chat, "stream": True})
            events = events_of(streamed.content)
            parts = [each["delta"].get("content", "") for e in events for each in e["choices"]]
            assert "".join(parts) == ANSWER
            completion = post(front, "/v1/completions", {"model": MODEL, "prompt": "Hi", "n": 2})
            assert [each["text"] for each in completion.json()["choices"]] == [ANSWER] * 2
        assert [each.kv_readers for each in p.generates] == [1, 1, 2]
        handles = [handle_of(each) for each in p.generates]
        assert [each.kv_handle for each in d.generates] == [*handles, handles[-1]]
        assert all(each.kv_readers == 0 for each in d.generates)
        assert [each.prompt.tolist() for each in d.generates][:2] == [
            each.prompt.tolist() for each in p.generates[:2]
        ]
