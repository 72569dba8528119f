"""Sampling defaults of every API: the request wins, then the server's option, then the model, then
the catalogue."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from protocol.engine.model_card import SamplingDefaults
from protocol.engine.sampling import SamplingParams
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, scripted_card, text_reply

HI = [{"role": "user", "content": "Hi"}]
SERVERS = (
    '{"temperature": 0.2, "top_p": 0.9, "min_tokens": 2, '
    '"logit_bias": {"5": -1}, "bad_words_ids": [[90, 91]]}'
)
"""The server's defaults. Those of the model are temperature 0.7 and top_k 40."""
CATALOGUES = SamplingDefaults(top_p=0.5, frequency_penalty=0.25, presence_penalty=0.5)
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 8, "model": "scripted"}),
    ("/v1/responses", {"input": "Hi", "model": "scripted"}),
]


ENGINE = {
    "script": lambda generate: text_reply("Hello!"),
    "card": scripted_card(recommended=CATALOGUES),
}


GATEWAY = {"default_sampling": SERVERS, "response_store": "responses.db"}


def sampled(
    engine: ScriptedEngine, gateway: GatewayProcess, path: str, body: dict[str, Any]
) -> SamplingParams:
    """Send a request, and return the sampling parameters that reach the engine."""
    response = gateway.post(path, body)
    assert response.status_code == 200, response.text
    return engine.generates[-1].params


@pytest.mark.parametrize(("path", "body"), CHATS, ids=[path for path, _ in CHATS])
def test_every_api_has_the_same_defaults_and_the_request_wins(
    engine: ScriptedEngine, gateway: GatewayProcess, path: str, body: dict[str, Any]
) -> None:
    params = sampled(engine, gateway, path, body)
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.9, 40)
    assert (params.presence_penalty, params.min_tokens) == (0.5, 2)
    assert params.frequency_penalty == 0.25
    assert (params.logit_bias, params.bad_words) == ({5: -1.0}, [[90, 91]])
    own = sampled(engine, gateway, path, body | {"temperature": 1, "top_p": 1})
    assert (own.temperature, own.top_p, own.top_k) == (1, 1, 40)


@pytest.mark.parametrize(("path", "body"), CHATS, ids=[path for path, _ in CHATS])
def test_a_greedy_request_gets_no_penalty_of_the_catalogue(
    engine: ScriptedEngine, gateway: GatewayProcess, path: str, body: dict[str, Any]
) -> None:
    params = sampled(engine, gateway, path, body | {"temperature": 0})
    assert (params.frequency_penalty, params.presence_penalty) == (0.0, 0.0)
    assert (params.top_p, params.logit_bias) == (0.9, {5: -1.0})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_with_a_grammar_gets_no_penalty_of_the_catalogue(
    engine: ScriptedEngine, gateway: GatewayProcess, path: str
) -> None:
    body = dict(CHATS)[path] | {"structured_outputs": {"choice": ["Hello!", "Bye!"]}}
    params = sampled(engine, gateway, path, body)
    assert (params.frequency_penalty, params.presence_penalty) == (0.0, 0.0)
    own = sampled(engine, gateway, path, body | {"frequency_penalty": 0.75})
    assert own.frequency_penalty == 0.75


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_a_request_with_a_penalty_gets_none_of_the_catalogue(
    engine: ScriptedEngine, gateway: GatewayProcess, path: str, penalty: str
) -> None:
    none = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    params = sampled(engine, gateway, path, dict(CHATS)[path] | {penalty: 1.0})
    assert {name: getattr(params, name) for name in none} == none | {penalty: 1.0}


def test_token_requests_use_only_their_own_sampling_parameters(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    body: dict[str, Any] = {"token_ids": [72, 105], "sampling_params": {"max_tokens": 4}}
    params = sampled(engine, gateway, "/inference/v1/generate", body)
    assert params == SamplingParams(max_tokens=4, seed=params.seed)


def test_a_rendered_request_carries_the_defaults_to_the_token_endpoint(
    gateway: GatewayProcess,
) -> None:
    rendered = gateway.post("/v1/chat/completions/render", {"messages": HI}).json()
    params = rendered["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.2, 0.9, 40)


def test_the_models_list_shows_what_is_in_effect(gateway: GatewayProcess) -> None:
    (model,) = requests.get(gateway.url + "/v1/models", timeout=5).json()["data"]
    assert model["default_sampling"] == {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.0,
        "frequency_penalty": 0.25,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.0,
        "min_tokens": 2,
        "logit_bias": {"5": -1.0},
        "bad_words_ids": [[90, 91]],
    }
