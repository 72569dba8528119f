"""Access control, tested over raw sockets, because client libraries tidy up what they send."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from gateway.app import operations
from protocol.shared.api_keys import KeyEntry, digest_of
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, read_body, read_head, send_post
from tests.support.scripted_engine import ScriptedEngine, text_reply
from tests.support.waiting import eventually
from tools.commands.keys import with_key, write

USER, OTHER, BOSS, WATCH = ("tg-" + letter * 43 for letter in "abcd")
KEYS = {
    "user": KeyEntry(digest=digest_of(USER), max_n=2, requests_per_minute=1000),
    "other": KeyEntry(digest=digest_of(OTHER)),
    "boss": KeyEntry(digest=digest_of(BOSS), scopes=["inference", "admin"]),
    "watch": KeyEntry(digest=digest_of(WATCH), scopes=["metrics"]),
}
PUBLIC = {
    "/livez",
    "/startupz",
    "/readyz",
    "/health",
    "/",
    "/reference",
    "/docs",
    "/docs/",
    "/docs/some-id",
    "/web/some-id",
}
CANARY = "canary-in-a-coal-mine"


def write_keys(path: Path, keys: dict[str, KeyEntry]) -> None:
    text = ""
    for name, entry in keys.items():
        text = with_key(text, name, entry)
    write(path, text)


ENGINE = {"script": lambda generate: text_reply("Hello!")}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_keys(path, KEYS)
    return path


@pytest.fixture(scope="module")
def gateway(engine: ScriptedEngine, keys: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(engine=engine.address, api_keys=str(keys), max_body_mib=1) as gateway:
        yield gateway.await_ready()


Told = tuple[int, dict[str, str], Any]
"""Status, headers and body. The body is parsed if it is JSON, otherwise it is bytes."""


def sent(gateway: GatewayProcess, *lines: str, body: bytes = b"") -> Told:
    """Send a request with these header lines, unchanged, and `body`. Return the answer."""
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        status, headers = read_head(file)
        result = read_body(file, headers)
    is_json = headers.get("content-type", "").startswith("application/json")
    return status, headers, json.loads(result) if is_json and result else result


def ask(gateway: GatewayProcess, method: str, target: str, key: str = "", **headers: str) -> Told:
    lines = {"Host": "localhost", "Connection": "close", **headers}
    if key:
        lines["Authorization"] = f"Bearer {key}"
    if method == "POST":
        lines |= {"Content-Type": "application/json", "Content-Length": "2"}
    result = [f"{name.replace('_', '-')}: {value}" for name, value in lines.items()]
    body = b"{}" if method == "POST" else b""
    return sent(gateway, f"{method} {target} HTTP/1.1", *result, body=body)


ROUTES = [
    (row.method.upper(), re.sub(r"<[^>]+>", "some-id", row.rule), row.scope) for row in operations()
]


def odd_spellings(path: str) -> list[str]:
    """Return other spellings of `path` that some proxy or framework accepts as `path`."""
    first, _, rest = path[1:].partition("/")
    segments = f"/{first}/{rest}" if rest else f"/{first}"
    spellings = [
        f"/{path}",
        path.upper(),
        f"/./{path[1:]}",
        f"/x/..{path}",
        f"/%2e%2e{path}",
        *(() if f"{path}/" in PUBLIC else (f"{path}/",)),
        f"{path}/.",
        f"{path}%00",
        f"{path};x=1",
        f"{path}#x",
        f"http://localhost{path}",
        f"http://evil.example{path}",
        segments.replace("/", "%2f"),
        segments.replace("/", "\\"),
    ]
    if path == "/":  # the only path without a letter
        return [spelling for spelling in spellings if spelling != path]
    spellings.append(f"/%{ord(path[1]):02x}{path[2:]}")
    if rest:
        spellings += [f"/{first}//{rest}", f"/{first}%2f{rest}", f"/{first}/x/../{rest}"]
    return spellings


REFUSED = {400, 401, 403, 404, 405}


def is_refusal(status: int, result: Any) -> bool:
    """Return whether an answer is an error, either in the shape of an API or gunicorn's own."""
    return status in REFUSED and (not isinstance(result, dict) or "error" in result)


@pytest.mark.parametrize(("method", "path", "scope"), ROUTES, ids=lambda value: str(value))
def test_no_route_is_served_to_a_caller_without_its_scope(
    gateway: GatewayProcess, engine: ScriptedEngine, method: str, path: str, scope: str
):
    engine.generates.clear()
    wrong = {"inference": WATCH, "metrics": USER, "admin": USER, "public": ""}[scope]
    if scope != "public":
        for key in ("", "tg-wrong", USER[:-1], USER + "x"):
            status, headers, result = ask(gateway, method, path, key)
            assert status == 401, result
            assert headers["www-authenticate"].startswith("Bearer")
            assert "error" in result
        status, _, result = ask(gateway, method, path, wrong)
        assert (status, "error" in result) == (403, True)
    for host in ("evil.example", "localhost.evil.example", "a b", "localhost@evil.example", ""):
        status, _, result = ask(gateway, method, path, BOSS, Host=host)
        assert is_refusal(status, result), host
    for spelling in odd_spellings(path):
        for key in ("", BOSS):
            status, _, result = ask(gateway, method, spelling, key)
            assert is_refusal(status, result), (spelling, key, status)
    assert not engine.generates


def test_only_the_listed_routes_need_no_key(gateway: GatewayProcess):
    assert {path for _, path, scope in ROUTES if scope == "public"} == PUBLIC
    guide = {"/docs", "/docs/", "/docs/some-id"}  # tests/integration/page/test_guide.py
    opened = PUBLIC - guide - {"/web/some-id"} | {"/web/app.js"}
    assert all(ask(gateway, "GET", path)[0] == 200 for path in opened)


def test_each_scope_opens_its_own_routes(gateway: GatewayProcess):
    assert ask(gateway, "GET", "/v1/models", USER)[0] == 200
    assert ask(gateway, "GET", "/metrics", WATCH)[0] == 200
    assert ask(gateway, "GET", "/v1/models", x_api_key=USER)[0] == 200
    assert ask(gateway, "GET", "/nowhere", USER)[0] == 404
    assert ask(gateway, "GET", "/nowhere")[0] == 401
    assert ask(gateway, "DELETE", "/v1/models", USER)[0] == 405
    assert ask(gateway, "OPTIONS", "/v1/models")[0] == 401


def test_a_models_name_may_have_an_encoded_slash(gateway: GatewayProcess):
    status, _, result = ask(gateway, "GET", "/v1/models/org%2Fname", USER)
    assert (status, result["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "lines",
    [
        ["Host: localhost", "Host: localhost"],
        ["Host: localhost", f"Authorization: Bearer {USER}", "Authorization: Bearer x"],
        ["Host: localhost", "Authorization : Bearer x"],
        ["Host: localhost", f"Authorization: Bearer\t{USER[:-1]}"],
        ["Host: localhost", f"X_Api_Key: {USER}"],
        ["Host: localhost", "Script_Name: /v1", f"Authorization: Bearer {USER[:-2]}"],
        [f"Authorization: Bearer {USER}"],
        ["Host: localhost", "Content-Length: 2", "Transfer-Encoding: chunked"],
    ],
)
def test_headers_that_can_be_read_in_two_ways_open_nothing(
    gateway: GatewayProcess, lines: list[str]
):
    status, _, result = sent(gateway, "GET /v1/models HTTP/1.1", *lines, "Connection: close")
    assert is_refusal(status, result)


def test_an_errors_shape_is_that_of_the_api_that_was_asked(gateway: GatewayProcess):
    _, _, openai = ask(gateway, "POST", "/v1/chat/completions")
    assert openai["error"]["code"] == "invalid_api_key"
    assert openai["error"]["type"] == "invalid_request_error"
    _, _, anthropic = ask(gateway, "POST", "/v1/messages", x_api_key="wrong")
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
    _, _, anthropic = ask(gateway, "POST", "/v1/messages", x_api_key=WATCH)
    assert anthropic["error"]["type"] == "permission_error"
    _, _, ollama = ask(gateway, "POST", "/api/chat")
    assert ollama.keys() == {"error"}
    assert "an API key is required" in ollama["error"]


def test_only_admins_unload_a_model_through_ollamas_api(gateway: GatewayProcess):
    def unload(key: str) -> Told:
        body = b'{"model": "scripted", "keep_alive": 0}'
        head = ("POST /api/generate HTTP/1.1", "Host: localhost", "Connection: close")
        return sent(
            gateway,
            *head,
            f"Authorization: Bearer {key}",
            f"Content-Length: {len(body)}",
            body=body,
        )

    status, _, result = unload(USER)
    assert (status, "scope 'admin'" in result["error"]) == (403, True)
    status, _, result = unload(BOSS)
    assert (status, "keeps its only model loaded" in result["error"]) == (400, True)


def test_a_request_without_a_key_is_refused_before_its_body_is_read(gateway: GatewayProcess):
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        status, headers = read_head(file)
        assert (status, headers["connection"]) == (401, "close")


def test_other_peoples_requests_can_be_ended_by_admins_alone(
    gateway: GatewayProcess, engine: ScriptedEngine
):
    engine.is_paused = True
    try:
        with connect(gateway.port) as client:
            send_post(
                client,
                "/v1/completions",
                {"prompt": "x"},
                headers={"Authorization": f"Bearer {USER}", "X-Request-Id": "mine"},
            )
            engine.await_generates(1)

            def abort(key: str) -> Any:
                return requests.post(
                    gateway.url + "/inference/v1/abort_requests",
                    json={"request_ids": ["mine"]},
                    headers={"Authorization": f"Bearer {key}"},
                    timeout=10,
                ).json()

            assert abort(OTHER) == {"aborted": [], "unknown": ["mine"]}
            assert abort(USER) == {"aborted": ["mine"], "unknown": []}
            assert abort(BOSS) == {"aborted": [], "unknown": ["mine"]}, "it has ended"
    finally:
        engine.is_paused = False
        engine.await_idle()


def post(gateway: GatewayProcess, key: str, **body: Any) -> requests.Response:
    return requests.post(
        gateway.url + "/v1/completions",
        json={"prompt": "x", **body},
        headers={"Authorization": f"Bearer {key}"},
        timeout=20,
    )


def test_the_engine_receives_the_account_and_limits_of_a_request(
    gateway: GatewayProcess, engine: ScriptedEngine
):
    for key in (USER, OTHER):
        engine.generates.clear()
        assert post(gateway, key, n=2, cache_salt="s").status_code == 200
        first, second = engine.generates
        assert first.account is not None
        assert (first.is_first, second.is_first) == (True, False)
        assert first.account.name == ("user" if key == USER else "other")
        assert first.account.requests_per_minute == (1000 if key == USER else 0)
        assert first.namespace == f"key:{first.account.name}/s"
    refused = post(gateway, USER, n=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    refused = post(gateway, USER, priority=-1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_new_keys_are_good_and_revoked_ones_are_not_soon_after(gateway: GatewayProcess, keys: Path):
    late = "tg-" + "l" * 43
    assert post(gateway, late).status_code == 401
    write_keys(keys, {**KEYS, "late": KeyEntry(digest=digest_of(late))})
    assert eventually(lambda: post(gateway, late).status_code == 200)
    write_keys(keys, KEYS)
    assert eventually(lambda: post(gateway, late).status_code == 401)
    keys.write_text("[keys.")
    assert eventually(lambda: "cannot reload the API keys" in gateway.log)
    assert post(gateway, USER).status_code == 200
    write_keys(keys, KEYS)


def test_the_log_has_the_keys_name_but_not_the_key_or_the_request(
    gateway: GatewayProcess, engine: ScriptedEngine
):
    content = [
        {"type": "text", "text": CANARY},
        {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:9/{CANARY}"}},
    ]
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": CANARY}]},
        {"messages": [{"role": "user", "content": content}]},
        {"messages": [{"role": "user", "content": CANARY}], "n": CANARY},
        {"messages": [{"role": CANARY, "content": CANARY}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": CANARY}]},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": CANARY}},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ " + CANARY},
    ]
    for body in bodies:
        for key in (USER, CANARY):
            requests.post(
                f"{gateway.url}/v1/chat/completions?x={CANARY}",
                json=body,
                headers={"Authorization": f"Bearer {key}"},
                timeout=20,
            )
    asked = 2 * len(bodies)
    assert eventually(lambda: gateway.log.count("/v1/chat/completions ") >= asked)
    assert "key=user" in gateway.log
    for secret in (USER, BOSS, CANARY):
        assert secret not in gateway.log


def test_a_path_cannot_write_lines_into_the_log(gateway: GatewayProcess):
    ask(gateway, "GET", "/v1/x%0a12:00:00%20forged", USER)
    assert eventually(lambda: "forged" in gateway.log)
    assert not [line for line in gateway.log.splitlines() if line.startswith("12:00:00 forged")]


def test_nothing_that_a_request_names_is_fetched(gateway: GatewayProcess):
    """A listener shows whether anything is fetched."""
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(0.3)
        port = bait.getsockname()[1]
        spellings = (f"127.0.0.1:{port}", f"localhost:{port}", f"0x7f000001:{port}")
        for url in [f"http://{host}/x.png" for host in spellings]:
            for path, body in fetching(url):
                answer = requests.post(
                    gateway.url + path,
                    json=body,
                    headers={"Authorization": f"Bearer {OTHER}"},
                    timeout=20,
                )
                assert answer.status_code < 500, answer.text
                assert "127.0.0.1" not in answer.text.replace(url, "")
        with pytest.raises(TimeoutError):
            bait.accept()


def fetching(url: str) -> list[tuple[str, dict[str, Any]]]:
    def chat(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 8}

    picture = {"type": "image", "source": {"type": "url", "url": url}}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    file = {"role": "user", "content": [{"type": "input_file", "file_url": url}]}
    return [
        ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": url}})),
        ("/v1/chat/completions", chat({"type": "video_url", "video_url": {"url": url}})),
        ("/v1/chat/completions", chat({"type": "file", "file": {"file_id": url}})),
        ("/v1/chat/completions", chat({"type": "text", "text": f"![x]({url})"})),
        ("/v1/chat/completions", {**chat(), "chat_template": url}),
        ("/v1/messages", {**chat(picture), "model": "scripted"}),
        ("/v1/responses", {"input": [item], "max_output_tokens": 8}),
        ("/v1/responses", {"input": [file], "max_output_tokens": 8}),
        ("/v1/completions", {"prompt": "x", "kv_transfer_params": {"remote_host": url}}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"$ref": url}}}),
    ]


def test_forwarding_headers_change_neither_path_nor_scheme(gateway: GatewayProcess):
    status, _, _ = ask(gateway, "GET", "/livez", X_Forwarded_Proto="https")
    assert status == 200
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nPATH_INFO: /metrics\r\n\r\n")
        status, headers = read_head(file)
        answer = json.loads(read_body(file, headers))
        assert (status, answer["live"]) == (200, True)
