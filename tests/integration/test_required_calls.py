"""A required call is made in a hundred of a hundred answers, by a model with the tokenizer of the
default model and random weights. Such a model never calls a tool by itself.

tests/e2e/test_real_model.py has a few calls of the default model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.support.http import json_of
from tests.support.server import Server
from tests.support.tiny_checkpoint import write_babbling_llama

ANSWERS = 100
AT_ONCE = 50

WEATHER = {
    "city": {"type": "string", "maxLength": 12},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "units": {"enum": ["metric", "imperial"]},
}
ALARM = {"hour": {"type": "integer", "minimum": 0, "maximum": 23}, "weekly": {"type": "boolean"}}


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", WEATHER), tool("alarm", ALARM)]


def is_weather(said: dict[str, Any]) -> bool:
    return (
        said.keys() == WEATHER.keys()
        and type(said["city"]) is str
        and len(said["city"]) <= 12
        and type(said["days"]) is int
        and 1 <= said["days"] <= 14
        and said["units"] in ("metric", "imperial")
    )


def is_alarm(said: dict[str, Any]) -> bool:
    return (
        said.keys() == ALARM.keys()
        and type(said["hour"]) is int
        and 0 <= said["hour"] <= 23
        and type(said["weekly"]) is bool
    )


SATISFIES = {"weather": is_weather, "alarm": is_alarm}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = str(write_babbling_llama(tmp_path_factory.mktemp("babbling")))
    with Server("--max-slots", str(AT_ONCE), "--threads", "1", model=model) as server:
        yield server


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        ("required", {"weather", "alarm"}),
        ({"type": "function", "function": {"name": "alarm"}}, {"alarm"}),
    ],
    ids=["required", "named"],
)
def test_a_hundred_demanded_calls_of_a_hundred_are_made_and_satisfy_their_schema(
    server: Server, tool_choice: Any, names: set[str]
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Is it going to rain? Wake me up in time."}],
        "tools": TOOLS,
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "max_tokens": 150,
        "n": AT_ONCE,
    }
    calls = []
    for seed in range(0, ANSWERS, AT_ONCE):
        url = server.url + "/v1/chat/completions"
        answer = requests.post(url, json={**body, "seed": seed}, timeout=120)
        assert "warnings" not in json_of(answer)
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "tool_calls", choice
            (call,) = choice["message"]["tool_calls"]
            calls.append((call["function"]["name"], call["function"]["arguments"]))
    assert len(calls) == ANSWERS
    assert {name for name, _ in calls} == names
    assert [call for call in calls if not SATISFIES[call[0]](json.loads(call[1]))] == []
    assert len(set(calls)) > 10, "a grammar must not make answers alike"
