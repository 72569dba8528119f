"""A `max_tokens` for which the context has no room, in every API.

Many clients send the same number to every model. So the answer may be shorter, and says so.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.generation.request import LOWERED
from tests.support.gateway_process import GatewayProcess
from tests.support.http import json_of
from tests.support.scripted_engine import ScriptedEngine, infill_card, text_reply

MAX_LEN = 512
ENGINE = {"card": infill_card(context_tokens=MAX_LEN), "max_len": MAX_LEN}
HI = [{"role": "user", "content": "hi"}]
TOO_MANY = 32_768
CHAT = "/v1/chat/completions"
BATCH = CHAT + "/batch"
TOKENS = "/inference/v1/generate"

APIS: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: ({"messages": HI}, "max_tokens"),
    CHAT + "#": ({"messages": HI}, "max_completion_tokens"),
    "/v1/completions": ({"prompt": "hi"}, "max_tokens"),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens"),
    "/v1/messages": ({"messages": HI}, "max_tokens"),
    "/api/chat": ({"model": "scripted", "messages": HI}, "options.num_predict"),
    "/api/generate": ({"model": "scripted", "prompt": "hi"}, "options.num_predict"),
    TOKENS: ({"token_ids": [104, 105]}, "sampling_params.max_tokens"),
    "/completion": ({"prompt": "hi"}, "n_predict"),
    "/infill": ({"input_prefix": "hi", "input_suffix": "!"}, "n_predict"),
}
"""Path -> (a body, the field that limits the answer). A fragment tells two bodies of one path."""
STRICT = [path for path in APIS if not path.startswith("/api/")]
"""Ollama's API has no `strict_params`."""


def body_of(api: str, limit: int, **more: Any) -> dict[str, Any]:
    body, field = APIS[api]
    outer, _, inner = field.rpartition(".")
    return {**body, **({outer: {inner: limit}} if outer else {inner: limit}), **more}


def post(gateway: GatewayProcess, api: str, body: dict[str, Any]) -> Any:
    """Return the members of a whole answer, or of all records of a stream, in a list."""
    answer = gateway.post(api.rstrip("#"), body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def warnings_in(records: list[Any]) -> list[Any]:
    """Return the warnings of an answer. A response is a member of the event that ends it."""
    inner = [record.get("response") for record in records]
    places = [*records, *(place for place in inner if isinstance(place, dict))]
    return [warning for place in places for warning in place.get("warnings") or ()]


@pytest.fixture(autouse=True)
def _reply(engine: ScriptedEngine) -> None:
    engine.script = lambda generate: text_reply("ok", size=3)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_an_answer_for_which_the_context_is_too_short_has_a_warning(
    api: str, is_stream: bool, gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    records = post(gateway, api, body_of(api, TOO_MANY, stream=is_stream))
    num_prompt = len(engine.generates[-1].prompt.tolist())
    room = MAX_LEN - num_prompt
    (warning,) = warnings_in(records)
    assert warning["code"] == LOWERED
    assert warning["message"] == (
        f"the answer can have at most {room} tokens, not the 32,768 of the request: the prompt has "
        f"{num_prompt} tokens, and the context {MAX_LEN}"
    )
    assert warnings_in(post(gateway, api, body_of(api, room, stream=is_stream))) == []
    assert len(warnings_in(post(gateway, api, body_of(api, room + 1, stream=is_stream)))) == 1


@pytest.mark.parametrize("api", STRICT)
def test_with_strict_params_it_is_refused_with_the_clients_field(
    api: str, gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    answer = gateway.post(api.rstrip("#"), body_of(api, TOO_MANY, strict_params=True))
    assert answer.status_code == 400
    error = answer.json()["error"]
    _, field = APIS[api]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: the answer can have at most ")
    assert engine.generates == []


def test_each_choice_has_its_warning(gateway: GatewayProcess) -> None:
    (answer,) = post(gateway, CHAT, body_of(CHAT, TOO_MANY, n=3))
    assert [warning["choice"] for warning in warnings_in([answer])] == [0, 1, 2]


def test_the_conversations_of_a_batch_have_the_rest_of_their_own_prompts(
    gateway: GatewayProcess,
) -> None:
    longer = [{"role": "user", "content": "hello there"}]
    body = {"messages": [HI, longer], "max_tokens": TOO_MANY}
    answer = json_of(gateway.post(BATCH, body))
    rooms = [warning["message"].split()[6] for warning in warnings_in([answer])]
    assert int(rooms[0]) - int(rooms[1]) == len("hello there") - len("hi")


def test_a_prompt_without_a_limit_has_no_warning(gateway: GatewayProcess) -> None:
    assert warnings_in([json_of(gateway.post(CHAT, {"messages": HI}))]) == []


def test_a_derendered_answer_keeps_the_warning(gateway: GatewayProcess) -> None:
    body = body_of(CHAT, TOO_MANY)
    rendered = json_of(gateway.post(CHAT + "/render", body))
    assert rendered["sampling_params"]["max_tokens"] == TOO_MANY
    generated = json_of(gateway.post(TOKENS, rendered))
    asked = {"generate_response": generated, "chat_request": body}
    derendered = json_of(gateway.post(CHAT + "/derender", asked))
    assert [warning["code"] for warning in derendered["warnings"]] == [LOWERED]


def test_files_beside_a_gap_leave_a_share_of_the_context_for_the_answer(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    files = [{"filename": "a.py", "text": "x = 1\n" * 10}]
    body = body_of("/infill", TOO_MANY, input_extra=files)
    (answer,) = post(gateway, "/infill", body)
    assert answer["truncated"] is False
    assert len(engine.generates[-1].prompt.tolist()) > len(files[0]["text"])
