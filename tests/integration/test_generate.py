"""The token endpoint over HTTP, aborts of any API's requests by their ids through any gateway, and
the token count of a chat."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.wire.errors import ErrorInfo
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, events_of, exchange, read_body, read_head, send_post
from tests.support.scripted_engine import EOS, ScriptedEngine, TokenReply, ids_of, text_reply

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
HI = [{"role": "user", "content": "hi"}]
SAID = [*ids_of("Hello, world!"), EOS]
GATEWAY = {"keep_alive_s": 0.1}
FAILED = ErrorInfo(code="step_failed", message="the model's output was not a number")
ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "n": 2}, "chatcmpl"),
    "completions": ("/v1/completions", {"prompt": "x"}, "cmpl"),
    "generate": (GENERATE, {"token_ids": [1], "sampling_params": {"n": 2}}, "generate-tokens"),
}


@pytest.fixture(scope="module")
def another(engine: ScriptedEngine) -> Iterator[GatewayProcess]:
    with GatewayProcess(engine=engine.address) as gateway:
        yield gateway.await_ready()


def body(sampling: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"token_ids": [72, 105], "sampling_params": sampling or {}, **fields}


def stream(gateway: GatewayProcess, said: dict[str, Any], **options: Any) -> list[Any]:
    status, headers, data = exchange(gateway.port, GENERATE, {**said, "stream": True}, **options)
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream")
    return events_of(data)


def tokens_of(events: list[Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    return found


def test_tokens_in_tokens_out(engine: ScriptedEngine, gateway: GatewayProcess) -> None:
    whole = gateway.post(GENERATE, body()).json()
    assert [choice["token_ids"] for choice in whole["choices"]] == [SAID]
    assert tokens_of(stream(gateway, body())) == {0: SAID}
    (generate, _) = engine.generates
    assert generate.prompt.tolist() == [72, 105]
    assert generate.params.max_tokens is None


def test_the_id_is_the_headers_or_the_bodys_or_a_new_one(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    said = body(request_id="mine")
    assert gateway.post(GENERATE, said).json()["request_id"] == "generate-tokens-mine"
    response = gateway.post(GENERATE, said, headers={"X-Request-Id": "theirs"})
    assert response.json()["request_id"] == "generate-tokens-theirs"
    assert response.headers["x-request-id"] == "theirs"
    fresh = gateway.post(GENERATE, body()).json()["request_id"]
    assert len(fresh) == len("generate-tokens-") + 32
    labels = [generate.labels for generate in engine.generates]
    assert labels[:2] == [["generate-tokens-mine", "mine"], ["generate-tokens-theirs", "theirs"]]


def test_choices_of_one_request_have_their_own_seeds(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply(f"answer {generate.params.seed}")
    events = stream(gateway, body({"n": 3, "seed": 5}))
    assert all(len(event["choices"]) == 1 for event in events)
    assert tokens_of(events) == {i: [*ids_of(f"answer {5 + i}"), EOS] for i in range(3)}


@pytest.mark.parametrize("before", [b"", b"some"], ids=["at once", "in the middle"])
def test_an_error_on_an_empty_delta_is_an_event_and_the_end(
    before: bytes, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    steps = [[token] for token in before] + [[]]
    engine.is_paused = True
    engine.script = lambda generate: TokenReply(steps, "error", None, FAILED)
    events = stream(gateway, body(), on_head=engine.resume)
    assert tokens_of([event for event in events if "choices" in event]) == (
        {0: list(before)} if before else {}
    )
    assert events[-1]["error"]["code"] == "step_failed"


def test_an_error_before_the_first_byte_is_a_status(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: TokenReply([[]], "error", None, FAILED)
    response = gateway.post(GENERATE, body())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "step_failed")


def test_an_engine_refusal_has_its_status_and_the_requests_field_names(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    said = {
        "overloaded": (429, "overloaded", None),
        "prompt": (400, "invalid_request", "token_ids"),
        "stop_token_ids": (400, "invalid_request", "sampling_params.stop_token_ids"),
    }
    for param, (status, code, result) in said.items():
        error = ErrorInfo(code=code, message="no", param=None if result is None else param)
        engine.script = lambda generate, error=error: error  # type: ignore[misc]
        for streams in (False, True):
            response = gateway.post(GENERATE, body(stream=streams))
            assert (response.status_code, response.json()["error"]["param"]) == (status, result)


def test_biases_of_too_many_tokens_are_refused_before_the_engine(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    biases = [*([token_id, 1] for token_id in range(300, 1_323)), ["ab", 1]]
    response = gateway.post(GENERATE, body(sampling_params={"logit_bias": biases}))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "sampling_params.logit_bias"
    assert not engine.generates


def test_fields_without_effect_are_named_in_header_and_body(gateway: GatewayProcess) -> None:
    response = gateway.post(GENERATE, body(mood=1))
    assert response.headers["x-ignored-fields"] == "mood"
    assert response.json()["ignored_params"] == ["mood"]


# ---- abort by id


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("prefixed", [True, False], ids=["as returned", "without prefix"])
def test_a_request_is_aborted_by_its_id_through_any_gateway(
    route: str,
    prefixed: bool,
    engine: ScriptedEngine,
    gateway: GatewayProcess,
    another: GatewayProcess,
) -> None:
    path, said, prefix = ROUTES[route]
    engine.script = lambda generate: TokenReply([[65]] + [[]] * 100_000)
    count = said.get("n") or said.get("sampling_params", {}).get("n", 1)
    with connect(gateway.port) as client, client.makefile("rb") as file:
        send_post(client, path, {**said, "stream": True}, headers={"X-Request-Id": "job-7"})
        engine.await_generates(count)
        name = f"{prefix}-job-7" if prefixed else "job-7"
        result = another.post(ABORT, {"request_ids": [name, "nobody", name]}).json()
        _, headers = read_head(file)
        events = events_of(read_body(file, headers))
    assert result == {"aborted": [name], "unknown": ["nobody"]}
    ends = [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]
    assert ends == ["abort"] * count
    assert another.post(ABORT, {"request_ids": [name]}).json()["unknown"] == [name]


def test_an_aborted_whole_answer_has_its_text_so_far(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: TokenReply([[65], [66]] + [[]] * 100_000)
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(gateway.post(GENERATE, body(request_id="w")).json())
    )
    asking.start()
    engine.await_generates(1)
    engine.await_steps(3)  # both tokens have been said
    assert gateway.post(ABORT, {"request_ids": ["w"]}).json()["aborted"] == ["w"]
    asking.join(10)
    (choice,) = answers[0]["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [65, 66])


def test_without_an_engine_nothing_can_be_aborted(tmp_path: Any) -> None:
    with GatewayProcess(engine=f"ipc://{tmp_path}/none.sock") as lonely:
        lonely.await_status("/livez", 200)
        assert lonely.post(ABORT, {"request_ids": ["a"]}).status_code == 503


# ---- the count of a chat's tokens


def test_a_chats_tokens_are_counted_as_a_chat_would_send_them(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    chat = {"messages": HI, "add_generation_prompt": True, "temperature": 0.5}
    result = gateway.post("/v1/chat/completions/input_tokens", chat).json()
    used = gateway.post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"]
    assert result == {"object": "chat.completion.input_tokens", "input_tokens": used}
    refused = gateway.post("/v1/chat/completions/input_tokens", {"messages": "hi"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
