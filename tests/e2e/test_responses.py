"""The Responses API with the real model and the official client: a chain with a tool, a resumed
stream, and responses whose gateway or server ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from openai import APIConnectionError, InternalServerError, OpenAI

from tests.support.processes import descendants_of
from tests.support.server import SERVED_NAME, Server
from tests.support.waiting import eventually

KEY = "k1"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
OVER = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a float32 server, whose answers do not depend on the batch."""
    store = tmp_path_factory.mktemp("store") / "responses.db"
    options = ("--served-name", SERVED_NAME, "--dtype", "float32", "--drain-s", "2")
    with Server(*options, "--gateways", "2", "--response-store", str(store)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def ended(client: OpenAI, name: str) -> Any:
    """Wait until a response has ended, and return it. The gateway may be restarting."""

    def found() -> Any:
        with contextlib.suppress(APIConnectionError, InternalServerError):
            response = client.responses.retrieve(name)
            return response if response.status in OVER else None
        return None

    response = eventually(found)
    assert response is not None, f"{name} is never over"
    return response


def test_three_turns_with_a_tool_through_previous_response_ids(client: OpenAI) -> None:
    shared: Any = {"model": SERVED_NAME, "temperature": 0, "tools": [WEATHER]}
    shared["instructions"] = "You tell people about the weather."
    first = client.responses.create(
        input="What is the weather in Oslo?", tool_choice="required", **shared
    )
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": each, "output": "clear"} for each in calls
    ]
    second = client.responses.create(
        input=results, previous_response_id=first.id, max_output_tokens=24, **shared
    )
    third = client.responses.create(
        input="Thanks!", previous_response_id=second.id, max_output_tokens=24, **shared
    )
    explicit: list[Any] = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        *results,
        *(item.model_dump(exclude_none=True) for item in second.output),
        {"role": "user", "content": "Thanks!"},
    ]
    again = client.responses.create(input=explicit, max_output_tokens=24, store=False, **shared)
    assert third.usage is not None
    assert again.usage is not None
    assert again.usage.input_tokens == third.usage.input_tokens
    assert again.output_text == third.output_text


def test_a_background_response_is_followed_from_the_middle(server: Server, client: OpenAI) -> None:
    stream = client.responses.create(
        model=SERVED_NAME,
        input="Count from one to one hundred.",
        background=True,
        stream=True,
        max_output_tokens=80,
        temperature=0,
    )
    received = [next(stream) for _ in range(12)]
    stream.close()
    name = received[0].response.id  # type: ignore[union-attr]
    after = received[-1].sequence_number
    rest = list(client.responses.retrieve(name, stream=True, starting_after=after))
    assert rest[0].sequence_number == after + 1
    text = "".join(e.delta for e in [*received, *rest] if e.type == "response.output_text.delta")
    assert rest[-1].response.output_text == text  # type: ignore[union-attr]
    assert ended(client, name).output_text == text


def test_a_response_whose_gateway_was_killed_is_never_lost(server: Server, client: OpenAI) -> None:
    made = [
        client.responses.create(
            model=SERVED_NAME,
            input="Tell me a very long story.",
            background=True,
            max_output_tokens=2000,
            extra_body={"ignore_eos": True},
        )
        for _ in range(4)
    ]
    assert eventually(lambda: all(client.responses.retrieve(r.id).status != "queued" for r in made))
    workers = [
        pid
        for pid, words in descendants_of(server.process.pid)
        if "gunicorn" in words and not any("gunicorn" in w for _, w in descendants_of(pid))
    ]
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, SIGKILL)
    for response in made:
        over = ended(client, response.id)
        assert over.status == "failed"
        assert over.error.code == "server_error"
        events = list(client.responses.retrieve(response.id, stream=True))
        assert events[-1].type == "response.failed"
    assert client.responses.create(model=SERVED_NAME, input="Hi", max_output_tokens=4).status


def test_responses_are_there_after_a_restart(babbling_model: str, tmp_path: Path) -> None:
    store = str(tmp_path / "responses.db")
    name = ""
    for _ in range(2):
        with (
            Server("--response-store", store, model=babbling_model) as server,
            OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client,
        ):
            if not name:
                name = client.responses.create(
                    model=Path(babbling_model).name,
                    input="Hi",
                    max_output_tokens=8,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                ).id
            assert client.responses.retrieve(name).output_text
