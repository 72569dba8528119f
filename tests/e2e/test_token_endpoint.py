"""The token endpoint with the real model, as trainers and routers use it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.support.engine_view import EngineView
from tests.support.http import error_of, events_of, exchange, json_of
from tests.support.prompts import PROMPTS
from tests.support.server import Server
from tests.support.waiting import eventually

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
REPLAYS, REPLAY_TOKENS = 48, 6
SAMPLING = {
    **{"temperature": 1.0, "top_p": 0.95, "top_k": 0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
}
"""Every parameter for which the model has a default."""
SHORT = [prompt for prompt in PROMPTS if len(prompt) < 50]


@pytest.fixture(scope="module")
def server(exact_server: Server) -> Server:
    return exact_server


@pytest.fixture
def view(server: Server) -> Iterator[EngineView]:
    view = EngineView(server.address)
    yield view
    view.close()


def post(server: Server, path: str, said: dict[str, Any]) -> Any:
    return json_of(requests.post(server.url + path, json=said, timeout=60))


def generate(server: Server, ids: list[int], sampling: dict[str, Any], **fields: Any) -> Any:
    return post(server, GENERATE, {"token_ids": ids, "sampling_params": sampling, **fields})


def stream(server: Server, ids: list[int], sampling: dict[str, Any], **fields: Any) -> list[Any]:
    said = {"token_ids": ids, "sampling_params": sampling, "stream": True, **fields}
    status, _, data = exchange(server.port, GENERATE, said)
    assert status == 200, data
    return events_of(data)


def ids_of(server: Server, text: str) -> list[int]:
    ids: list[int] = post(server, "/tokenize", {"prompt": text})["tokens"]
    return ids


def texts_asked(server: Server, nth: int) -> Any:
    """Send a chat or a completion that returns ids. Return (prompt ids, answer ids)."""
    prompt = SHORT[nth % len(SHORT)]
    said: dict[str, Any] = {**SAMPLING, "seed": nth, "max_tokens": REPLAY_TOKENS}
    said["return_token_ids"] = True
    if nth % 2:
        answer = post(server, "/v1/completions", {**said, "prompt": prompt})
        return answer["choices"][0]["prompt_token_ids"], answer["choices"][0]["token_ids"]
    messages = [{"role": "user", "content": prompt}]
    answer = post(server, "/v1/chat/completions", {**said, "messages": messages})
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]


def test_token_ids_of_a_text_endpoint_give_the_same_answer(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        asked = list(pool.map(lambda nth: texts_asked(server, nth), range(REPLAYS)))

        def replay(nth: int) -> list[int]:
            sampling = {**SAMPLING, "seed": nth, "max_tokens": REPLAY_TOKENS}
            ids: list[int] = generate(server, asked[nth][0], sampling)["choices"][0]["token_ids"]
            return ids

        answers = list(pool.map(replay, range(REPLAYS)))
    assert answers == [result for _, result in asked]
    assert len({tuple(answer) for answer in answers}) > REPLAYS * 0.9


def test_an_answer_goes_on_to_its_end_or_the_contexts_and_never_to_sixteen(server: Server) -> None:
    ids = ids_of(server, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,")
    whole = generate(server, ids, {"temperature": 0, "stop": [" 20"]}, return_token_ids=True)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " 20")
    assert len(choice["token_ids"]) > 16
    assert whole["prompt_token_ids"] == ids
    assert whole["weights_digest"].startswith(whole["system_fingerprint"].split("-")[2])
    events = stream(server, ids, {"temperature": 0, "stop": [" 20"]})
    assert [i for e in events for i in e["choices"][0]["token_ids"]] == choice["token_ids"]
    assert events[-1]["choices"][0]["stop_reason"] == " 20"


def test_both_distributions_are_returned_and_each_sums_to_one(server: Server) -> None:
    sampling = {
        "temperature": 0.5,
        "top_k": 4,
        "logprobs": 20,
        "logprobs_of": "both",
        "seed": 1,
        "max_tokens": 5,
        "ignore_eos": True,
    }
    answer = generate(server, ids_of(server, "The capital of France is"), sampling)
    for item in answer["choices"][0]["logprobs"]["content"]:
        drawn = {top["token_id"]: top["sampling_logprob"] for top in item["top_logprobs"]}
        model = {top["token_id"]: top["logprob"] for top in item["top_logprobs"]}
        possible = {token: value for token, value in drawn.items() if value > -9999}
        assert len(possible) == 4
        assert sum(map(math.exp, possible.values())) == pytest.approx(1, abs=1e-5)
        assert sum(map(math.exp, model.values())) < 1
        assert item["top_logprobs"][0]["token_id"] == item["token_id"]
        first, second = sorted(possible, key=lambda token: -possible[token])[:2]
        assert possible[first] - possible[second] == pytest.approx(
            (model[first] - model[second]) / 0.5, abs=1e-3
        )


def test_the_logprobs_of_a_prompt_are_those_it_had_as_an_answer(server: Server) -> None:
    ids = ids_of(server, "The capital of France is")
    sampling = {"temperature": 0, "logprobs": 0, "max_tokens": 4, "ignore_eos": True}
    (choice,) = generate(server, ids, sampling)["choices"]
    again = generate(server, ids + choice["token_ids"], {"max_tokens": 0, "prompt_logprobs": 0})
    assert again["choices"][0]["token_ids"] == []
    result = again["prompt_logprobs"][len(ids) :]
    for item, token, entry in zip(
        choice["logprobs"]["content"], choice["token_ids"], result, strict=True
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(item["logprob"], abs=1e-3)


def test_a_grammar_is_enforced(server: Server) -> None:
    ids = ids_of(server, "A colour:")
    form = {"structured_outputs": {"choice": [" red", " blue"]}}
    text = generate(server, ids, form, output_mode="text")["choices"][0]["text"]
    assert text in (" red", " blue")
    grammar = {"body": {"kind": "regex", "pattern": " [0-9]{3}"}}
    whole = generate(server, ids, {"temperature": 1}, output_mode="text", grammar=grammar)
    assert whole["choices"][0]["text"].strip().isdigit()
    bad: dict[str, Any] = {
        "token_ids": ids,
        "sampling_params": {"structured_outputs": {"regex": "("}},
    }
    refused = requests.post(server.url + GENERATE, json=bad, timeout=60)
    assert error_of(refused, 400)["param"] == "sampling_params.structured_outputs"


def impossible(server: Server, word: str) -> dict[str, Any]:
    """Return a request without a possible token: only " the" is allowed, and `word` is banned."""
    (the,) = ids_of(server, " the")
    sampling = {"allowed_token_ids": [the], "bad_words": [word], "temperature": 0}
    return {"token_ids": [1], "sampling_params": sampling}


def test_an_engine_error_on_an_empty_delta_is_never_swallowed(server: Server) -> None:
    said = impossible(server, " the")
    response = requests.post(server.url + GENERATE, json=said, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "step_failed")
    status, _, data = exchange(server.port, GENERATE, {**said, "stream": True})
    if status == 200:
        (event,) = events_of(data)
        assert event["error"]["code"] == "step_failed"
    else:  # it came before the first byte
        assert (status, b"step_failed" in data) == (500, True)


LONG = {"max_tokens": 1900, "ignore_eos": True, "n": 2}


def test_a_request_that_is_aborted_by_its_id_ends_and_frees_what_it_held(
    server: Server, view: EngineView
) -> None:
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(generate(server, [5, 6, 7], LONG, request_id="long-one"))
    )
    asking.start()
    assert eventually(lambda: view.stats().running == 2)
    result = post(server, ABORT, {"request_ids": ["generate-tokens-long-one", "short-one"]})
    assert result == {"aborted": ["generate-tokens-long-one"], "unknown": ["short-one"]}
    asking.join(10)
    assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["abort"] * 2
    view.wait_until_free()
