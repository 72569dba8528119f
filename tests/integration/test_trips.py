"""The files that a request visits on its way from the HTTP body to token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient

from gateway.app import EXTENSION, create_app
from protocol.config.gateway import GatewayConfig
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trips import FileEntry, TripTrace, files_of, returns
from tests.support.waiting import eventually

HI = [{"role": "user", "content": "Hi"}]
READ = ["http/body.py", "http/json_size.py"]
PREPARE = "api/openai/prepare.py"
RENDER = [
    *("prompt/render.py", "prompt/kwargs.py", "prompt/fit.py", "prompt/content.py"),
    "prompt/template.py",
    *("sandbox/clients.py", "sandbox/process.py", "sandbox/messages.py"),
]
ENCODE = "text/tokenizer.py"
CHAT = [
    *("api/openai/routes.py", *READ),
    *("api/openai/checks.py", PREPARE, *RENDER, ENCODE),
]
WITH_TOOLS = [
    *CHAT[: CHAT.index(PREPARE) + 1],
    *("api/openai/tools.py", "api/openai/structured.py"),
    *CHAT[CHAT.index(PREPARE) + 1 :],
]
MESSAGES = [
    *("api/anthropic/routes.py", *READ),
    *("api/anthropic/translate.py", "api/anthropic/tools.py", "api/anthropic/conversation.py"),
    *("api/openai/checks.py", PREPARE, *RENDER, ENCODE),
]
COMPLETION = [
    *("api/openai/routes.py", *READ, "api/openai/checks.py", "api/openai/prepare.py"),
    *("api/openai/requests.py", "api/openai/structured.py", "served_model.py"),
    *("api/openai/parameters.py", ENCODE),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    address = f"ipc://{tmp_path_factory.mktemp('trips') / 'engine.sock'}"
    with ScriptedEngine(address):
        app = create_app(GatewayConfig(engine=address, response_store="none"))
        client = app.test_client()

        def is_ready() -> bool:
            gevent.sleep(0)  # lets the engine's client read its socket
            return client.get("/readyz").status_code == 200

        assert eventually(is_ready)
        yield client
        app.extensions[EXTENSION].close()


def traced(client: FlaskClient, path: str, body: dict[str, Any], view: str) -> list[FileEntry]:
    """Return the trip of the second of two equal requests. The first one fills caches."""
    assert client.post(path, json=body).status_code == 200
    trace = TripTrace()
    with trace():
        assert client.post(path, json=body).status_code == 200
    return trace.trip(view)


def test_a_chat_visits_its_view_and_thirteen_files_once_each(client: FlaskClient) -> None:
    trip = traced(client, "/v1/chat/completions", {"messages": HI}, CHAT[0])
    assert files_of(trip) == CHAT
    assert len(CHAT) == 1 + 13
    assert returns(trip) == []


def test_a_chat_with_tools_and_a_form_visits_two_more(client: FlaskClient) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    form = {"type": "json_object"}
    body = {"messages": HI, "tools": [tool], "tool_choice": "none", "response_format": form}
    trip = traced(client, "/v1/chat/completions", body, CHAT[0])
    assert files_of(trip) == WITH_TOOLS
    assert returns(trip) == []


def test_a_completion_visits_each_file_once(client: FlaskClient) -> None:
    trip = traced(client, "/v1/completions", {"prompt": "Hi"}, COMPLETION[0])
    assert files_of(trip) == COMPLETION
    assert returns(trip) == []


def test_a_message_visits_its_view_and_sixteen_files_once_each(client: FlaskClient) -> None:
    body = {"messages": HI, "max_tokens": 5}
    trip = traced(client, "/v1/messages", body, MESSAGES[0])
    assert files_of(trip) == MESSAGES
    assert len(MESSAGES) == 1 + 16
    assert returns(trip) == []


def test_a_return_is_found() -> None:
    first, inner, again = (
        FileEntry("a", "b", "f"),
        FileEntry("b", "c", "g"),
        FileEntry("a", "b", "h"),
    )
    assert returns([first, inner, again]) == []
    beside, back, other = (
        FileEntry("b", "d", "f"),
        FileEntry("b", "c", "f"),
        FileEntry("x", "c", "f"),
    )
    assert returns([first, inner, beside, back]) == [back]
    assert returns([first, inner, other]) == [other]
