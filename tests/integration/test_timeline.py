"""The timeline of a request over HTTP: what it says, who may see it, and how long it is kept.

The engine and the gateways are real, and the worker takes the time of a large model on a small GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from protocol.engine.timeline import EngineTimeline
from protocol.shared.api_keys import KeyEntry, digest_of
from protocol.wire.errors import Overloaded
from tests.support.commands import run_command
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, error_of, read_body, read_head, send_post
from tests.support.paced_server import paced_server
from tests.support.scripted_engine import ScriptedEngine, TokenReply
from tests.support.waiting import eventually
from tools.commands.keys import with_key, write

KEYS: dict[str, dict[str, Any]] = {
    "alice": {},
    "bob": {},
    "root": {"scopes": ["inference", "admin"]},
}
GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
LONG = 7900
MOST = 1 << 22
ENGINE = {"max_len": MOST + 100}
UNREAD = [1] * 800_000
"""Tokens of a text that exceeds the kernel's buffers."""


def key_of(name: str) -> str:
    return f"tg-{name:x<43}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    text = ""
    for name, fields in KEYS.items():
        text = with_key(text, name, KeyEntry(digest=digest_of(key_of(name)), **fields))
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(file, text)
    return str(file)


@pytest.fixture(scope="module")
def server(keys: str) -> Iterator[GatewayProcess]:
    with paced_server("llama-3.1-8b", "L4", gateway={"api_keys": keys}, max_len=8192) as gateway:
        yield gateway


def call(gateway: GatewayProcess, method: str, path: str, key: str, **options: Any) -> Any:
    headers = {"Authorization": f"Bearer {key_of(key)}", **options.pop("headers", {})}
    return requests.request(method, gateway.url + path, headers=headers, timeout=60, **options)


def generate(
    gateway: GatewayProcess, key: str, name: str, *, first: int = 1, prompt: int = 8, **params: Any
) -> Any:
    body = {
        "token_ids": list(range(first, first + prompt)),
        "sampling_params": {"max_tokens": 3, "ignore_eos": True, **params},
    }
    return call(gateway, "POST", GENERATE, key, json=body, headers={"X-Request-Id": name})


def timeline(gateway: GatewayProcess, key: str, name: str) -> Any:
    return call(gateway, "GET", f"/v1/requests/{name}/timeline", key)


def causes(found: Any) -> dict[str, str]:
    return {r["cause"]: r["text"] for r in found["choices"][0]["explanation"]}


def test_an_ended_request_has_its_stages_steps_and_times_in_the_gateway(
    server: GatewayProcess,
) -> None:
    assert generate(server, "alice", "whole", first=20_000).status_code == 200
    found = timeline(server, "alice", "whole").json()
    assert found["id"] == "whole"
    assert found["headline"].startswith("took ")
    (choice,) = found["choices"]
    line = choice["timeline"]
    assert (line["finish"], line["generated_tokens"], line["account"]) == ("length", 3, "alice")
    assert [span["stage"] for span in line["stages"]][-2:] == ["prefill", "decode"]
    assert sum(group.get("own_prefill", 0) for group in line["groups"]) == 8
    assert sum(group.get("own_decodes", 0) for group in line["groups"]) == 2
    assert {"prefill", "decode"} <= causes(found).keys()
    gateway = found["gateway"]
    assert gateway["sent_s"] <= gateway["first_token_s"] <= gateway["answered_s"]
    assert gateway["first_token_s"] <= gateway["ended_s"]
    assert found["kept"] == {"requests": 1000, "seconds": 900.0}
    named = timeline(server, "alice", "generate-tokens-whole").json()
    assert named["choices"][0]["timeline"]["groups"] == line["groups"], "the response's id"


def test_an_id_that_is_used_again_names_the_last_request(server: GatewayProcess) -> None:
    for max_tokens in (2, 5):
        assert generate(server, "alice", "again", max_tokens=max_tokens).status_code == 200
    (choice,) = timeline(server, "alice", "again").json()["choices"]
    assert choice["timeline"]["generated_tokens"] == 5


def test_each_choice_has_a_timeline(server: GatewayProcess) -> None:
    assert generate(server, "bob", "both", n=2).status_code == 200
    assert len(timeline(server, "bob", "both").json()["choices"]) == 2


@pytest.fixture(scope="module")
def waiter(server: GatewayProcess) -> str:
    """The name of a request of bob that has waited for a step with a long prompt of alice."""
    with ThreadPoolExecutor(1) as pool:
        long: Future[Any] = pool.submit(generate, server, "alice", "long", prompt=LONG)

        def is_computed() -> bool:
            found = timeline(server, "root", "long")
            return found.status_code == 200 and any(
                span["stage"] == "prefill"
                for choice in found.json()["choices"]
                for span in choice["timeline"].get("stages", [])
            )

        assert eventually(is_computed)
        assert generate(server, "bob", "waiter").status_code == 200
        call(server, "POST", ABORT, "root", json={"request_ids": ["long"]})
        long.result()
    return "waiter"


def test_an_admin_reads_whose_prompt_a_request_has_waited_for(
    server: GatewayProcess, waiter: str
) -> None:
    found = timeline(server, "root", waiter).json()
    text = causes(found)["queue"]
    assert text.startswith("waited ")
    assert text.endswith("behind a 7,900-token prompt of account alice")
    assert "alice" in json.dumps(found)
    assert found["choices"][0]["timeline"]["client"].startswith("gateway-")


def test_the_owner_reads_no_name_of_another_account(server: GatewayProcess, waiter: str) -> None:
    reply = timeline(server, "bob", waiter)
    assert causes(reply.json())["queue"].endswith("behind a 7,900-token prompt of another account")
    assert "alice" not in reply.text
    assert "long" not in [p["name"] for g in _groups(reply.json()) for p in g.get("prompts", [])]


def _groups(found: Any) -> list[Any]:
    return [group for choice in found["choices"] for group in choice["timeline"]["groups"]]


def test_a_key_sees_no_request_of_another_key(server: GatewayProcess, waiter: str) -> None:
    error = error_of(timeline(server, "alice", waiter), 404)
    assert (error["param"], error["code"]) == ("request_id", "request_not_found")
    assert "of this API key" in error["message"]
    assert "1,000 requests after their end, each for up to 15 minutes" in error["message"]
    assert timeline(server, "root", "nobody").status_code == 404


def test_a_request_that_another_process_has_served_lacks_only_the_gateways_times(
    server: GatewayProcess, keys: str
) -> None:
    assert generate(server, "bob", "elsewhere").status_code == 200
    with GatewayProcess(engine=server.config["engine"], api_keys=keys) as another:
        found = timeline(another.await_ready(), "bob", "elsewhere").json()
    assert found["gateway"] is None
    assert "another process" in found["gateway_note"]
    assert found["choices"][0]["timeline"]["generated_tokens"] == 3


def test_a_stream_whose_client_disconnects_says_so_as_the_log_does(
    server: GatewayProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "hung-up"
    sampling = {"max_tokens": 7000, "ignore_eos": True}
    body = {"token_ids": [1, 2], "stream": True, "sampling_params": sampling}
    headers = {"Authorization": f"Bearer {key_of('alice')}", "X-Request-Id": name}
    with connect(server.port) as client, client.makefile("rb") as file:
        send_post(client, GENERATE, body, headers=headers)
        read_head(file)
    assert eventually(lambda: _choice(server, name)["timeline"].get("finish"))
    choice = _choice(server, name)
    assert choice["timeline"]["abort_reason"] == "disconnected"
    assert choice["ended"] == "disconnected: its client disconnected"
    found = run_command(capfd, "why", name, "--engine", server.config["engine"])
    assert (found.code, choice["ended"] in found.out) == (0, True), found
    assert eventually(lambda: [line for line in server.err if name in line])
    assert [line for line in server.err if name in line and "finish=disconnected" in line]


def test_an_abort_by_id_says_so(server: GatewayProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(generate, server, "alice", "named", max_tokens=7000)
        ids = {"request_ids": ["named"]}
        assert eventually(
            lambda: call(server, "POST", ABORT, "root", json=ids).json()["aborted"] == ["named"]
        )
        assert reply.result().json()["choices"][0]["finish_reason"] == "abort"
    assert _choice(server, "named")["ended"] == "aborted: it was aborted by its id"


def _choice(server: GatewayProcess, name: str) -> Any:
    """Return the only choice of the timeline of alice's request."""
    (choice,) = timeline(server, "alice", name).json()["choices"]
    return choice


# ---- with a scripted engine

ENDED = EngineTimeline(name="x", took_s=1.0, finish="length", prompt_tokens=2)


def test_a_chat_shows_the_time_of_its_template_and_tokenizer(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address) as gateway:
        body = {"messages": [{"role": "user", "content": "word " * 50}]}
        name = gateway.await_ready().post("/v1/chat/completions", body).json()["id"]
        engine.timelines = {name: ENDED}
        found = requests.get(f"{gateway.url}/v1/requests/{name}/timeline", timeout=20).json()
    assert found["gateway"]["template_s"] > 0
    assert found["gateway"]["tokenize_s"] > 0
    assert found["headline"].startswith("took ")


def test_a_client_that_reads_late_is_a_cause(engine: ScriptedEngine) -> None:
    engine.script = lambda generate: TokenReply([UNREAD, [65]], "length", None)
    engine.timelines = {"slow": ENDED}
    with (
        GatewayProcess(engine=engine.address) as gateway,
        connect(gateway.await_ready().port, rcvbuf=4096) as client,
        client.makefile("rb") as file,
    ):
        body = {"prompt": "much", "stream": True, "max_tokens": MOST}
        send_post(client, "/v1/completions", body, headers={"X-Request-Id": "slow"})
        url = f"{gateway.url}/v1/requests/slow/timeline"

        def unread_s() -> float:
            found = requests.get(url, timeout=20).json()
            return float((found.get("gateway") or {}).get("unread_s", 0.0))

        assert eventually(lambda: unread_s() > 0.01), "it grows while the client does not read"
        _, headers = read_head(file)
        read_body(file, headers)
        found = requests.get(url, timeout=20).json()
        assert "the client read slowly for" in causes(found)["client"]
        final = found["gateway"]["unread_s"]
        assert requests.get(url, timeout=20).json()["gateway"]["unread_s"] == final


def test_the_engine_of_a_replicated_request_is_found(tmp_path: Path) -> None:
    with (
        ScriptedEngine(f"ipc://{tmp_path}/0") as first,
        ScriptedEngine(f"ipc://{tmp_path}/1") as second,
        GatewayProcess(engines=[first.address, second.address]) as gateway,
    ):
        url = f"{gateway.await_ready().url}/v1/requests"
        second.timelines = {"one": ENDED}
        (found,) = requests.get(f"{url}/one/timeline", timeout=20).json()["choices"]
        assert (found["role"], found["engine"]) == ("replica", 1)
        first.timelines = {"one": ENDED}  # a request that has moved is known to both
        moved = requests.get(f"{url}/one/timeline", timeout=20).json()["choices"]
        assert [each["engine"] for each in moved] == [0, 1]
        first.is_silent = True
        assert requests.get(f"{url}/one/timeline", timeout=20).status_code == 200


def test_an_engine_that_computes_too_many_timelines_refuses(engine: ScriptedEngine) -> None:
    engine.timelines_error = Overloaded("64 are waiting already", retry_after_s=1).info()
    with GatewayProcess(engine=engine.address) as gateway:
        url = f"{gateway.await_ready().url}/v1/requests/x/timeline"
        reply = requests.get(url, timeout=20)
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "1")
    assert reply.json()["error"]["message"] == "64 are waiting already"


def test_a_server_without_its_engine_says_so(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address) as gateway:
        gateway.await_ready()
        engine.is_silent = True
        gateway.await_status("/readyz", 503)
        reply = requests.get(f"{gateway.url}/v1/requests/x/timeline", timeout=20)
        assert reply.status_code == 503
        assert "Retry-After" in reply.headers
