"""After an engine has refused an account's request, the gateway repeats the refusal for a while
without sending the account's requests to the engine. In every API, the repeated answer is the same
as the first one. Other accounts are not affected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from protocol.shared.api_keys import KeyEntry, digest_of
from protocol.wire.errors import ErrorInfo
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, text_reply
from tests.support.waiting import eventually
from tools.commands.keys import with_key, write

HI = [{"role": "user", "content": "hi"}]
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": HI})
ROUTES = {
    "chat": CHAT,
    "stream": ("/v1/chat/completions", {"messages": HI, "stream": True}),
    "batch": ("/v1/chat/completions/batch", {"messages": [HI]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    "generate": ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
}
LONG = ErrorInfo(code="overloaded", message="full", retry_after_s=2.5, stands_s=30)
SHORT = ErrorInfo(code="overloaded", message="full", retry_after_s=2.5, stands_s=0.05)
NONE = ErrorInfo(code="overloaded", message="full", retry_after_s=2.5)


def key_of(name: str) -> str:
    return f"tg-{name:x<43}"


ENGINE = {"script": lambda generate: text_reply("Hello!")}


NAMES = [f"{route}-{place}" for route in (*ROUTES, "else") for place in (0, 1)]


@pytest.fixture(scope="module")
def gateway(
    engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    text = ""
    for name in NAMES:  # one for each test: what was refused to it stands until the end
        text = with_key(text, name, KeyEntry(digest=digest_of(key_of(name))))
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    write(keys, text)
    with GatewayProcess(engine=engine.address, api_keys=str(keys)) as gateway:
        yield gateway.await_ready()


def ask(
    gateway: GatewayProcess, name: str, route: tuple[str, dict[str, Any]], **headers: str
) -> requests.Response:
    path, body = route
    headers = {"Authorization": f"Bearer {key_of(name)}", **headers}
    return gateway.post(path, body, headers=headers)


@pytest.mark.parametrize("name", ROUTES)
def test_a_cached_refusal_is_repeated_without_the_engine(
    name: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: LONG
    before = engine.num_early
    first, second = (ask(gateway, f"{name}-0", ROUTES[name]) for _ in range(2))
    assert len(engine.generates) == 1
    assert first.status_code == second.status_code == 429
    assert first.headers["Retry-After"] == second.headers["Retry-After"] == "3"
    differ = {"date", "x-request-id", "request-id"}
    for answer in (first, second):
        answer.headers.update(dict.fromkeys(differ & {key.lower() for key in answer.headers}, "-"))
    assert first.headers == second.headers
    result, told_again = (
        {key: value for key, value in answer.json().items() if key != "request_id"}
        for answer in (first, second)
    )
    assert result == told_again
    assert eventually(lambda: engine.num_early == before + 1)  # with a heartbeat
    engine.script = lambda generate: text_reply("Hello!")
    assert ask(gateway, f"{name}-1", ROUTES[name]).status_code == 200  # somebody else


def test_a_request_that_computes_nothing_is_not_refused(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: LONG
    assert ask(gateway, "else-0", CHAT).status_code == 429
    for route in (
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/chat/completions/render", {"messages": HI}),
    ):
        assert ask(gateway, "else-0", route).status_code == 200, route
    wrong = ("/v1/chat/completions", {"messages": HI, "max_tokens": -1})
    assert ask(gateway, "else-0", wrong).status_code == 400
    assert ask(gateway, "else-0", CHAT, **{"Last-Event-ID": "no"}).status_code == 429
    assert len(engine.generates) == 2  # who picks up a stream has the engine asked, if it has none


@pytest.mark.parametrize(("refusal", "n"), [(SHORT, 1), (NONE, 1), (LONG, 2)])
def test_a_refusal_is_cached_only_for_its_stated_time(
    refusal: ErrorInfo, n: int, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    path, body = CHAT
    engine.script = lambda generate: refusal
    assert ask(gateway, "else-1", (path, {**body, "n": n})).status_code == 429
    engine.script = lambda generate: text_reply("Hello!")
    if refusal is SHORT:
        assert eventually(lambda: ask(gateway, "else-1", CHAT).status_code == 200)
    else:
        assert ask(gateway, "else-1", CHAT).status_code == 200
