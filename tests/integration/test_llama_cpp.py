"""llama.cpp's routes: /completion, /apply-template, /props, /slots, and its form of /tokenize."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import requests

from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import (
    EOS,
    ScriptedEngine,
    byte_tokenizer,
    scripted_card,
    text_reply,
)

CARD = scripted_card(
    tokenizer=byte_tokenizer(()).to_str().encode(),
    context_tokens=400,
)
ENGINE = {"card": CARD, "max_len": 400}
PATHS = ("/completion", "/completions")
HI = [{"role": "user", "content": "hi"}]


def params_of(engine: ScriptedEngine) -> Any:
    return engine.generates[-1].params


def events(gateway: GatewayProcess, body: dict[str, Any]) -> list[Any]:
    answer = gateway.post("/completion", {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    frames = answer.text.split("\n\n")
    return [
        json.loads(frame.removeprefix("data: ")) for frame in frames if frame.startswith("data: ")
    ]


@pytest.mark.parametrize("path", PATHS)
def test_a_completion_has_the_members_of_llama_cpp(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str
) -> None:
    engine.script = lambda generate: text_reply("one\ntwo")
    body = {"prompt": "hi", "n_predict": 20, "stop": ["x"], "return_tokens": True, "seed": 5}
    answer = gateway.post(path, body).json()
    assert answer.pop("timings")["predicted_n"] == 8
    settings = answer.pop("generation_settings")
    assert answer == {
        "index": 0,
        "id_slot": -1,
        "content": "one\ntwo",
        "tokens": [*b"one\ntwo", EOS],
        "stop": True,
        "model": "scripted",
        "prompt": "hi",
        "tokens_predicted": 8,
        "tokens_evaluated": 2,
        "tokens_cached": answer["tokens_cached"],
        "has_new_line": True,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
    }
    assert (settings["n_ctx"], settings["n_predict"], settings["seed"]) == (400, 20, 5)
    assert settings["samplers"][0] == "penalties"
    assert settings["stop"] == ["x"]


def test_a_stream_has_the_same_text_and_end(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    engine.script = lambda generate: text_reply("a\nb; c", size=2)
    body = {"prompt": [104, 105], "stop": [";"]}
    whole = gateway.post("/completion", body).json()
    *chunks, last = events(gateway, body)
    assert "".join(chunk["content"] for chunk in chunks) == whole["content"] == "a\nb"
    assert {chunk["stop"] for chunk in chunks} == {False}
    for name in whole.keys() - {"content", "timings"}:
        assert last[name] == whole[name], name
    assert (last["prompt"], last["stop_type"], last["stopping_word"]) == ("hi", "word", ";")


def test_the_parameters_of_llama_cpp_are_sent_to_the_engine(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    body = {
        "prompt": "hi",
        "n_predict": -1,
        "repeat_penalty": 1.25,
        "dynatemp_range": 0.5,
        "typical_p": 0.75,
        "xtc_probability": 0.5,
        "dry_multiplier": 0.5,
        "dry_sequence_breakers": ["q"],
        "logit_bias": [["a", 1.5], [98, False]],
        "samplers": ["dry", "typical_p", "temp", "tfs_z"],
        "mirostat": 2,
        "mirostat_tau": 4.5,
        "cache_prompt": True,
        "seed": -1,
    }
    assert gateway.post("/completion", body).status_code == 200
    params = params_of(engine)
    assert (params.max_tokens, params.repetition_penalty, params.seed) == (None, 1.25, None)
    assert (params.dynatemp_range, params.typical_p, params.xtc_probability) == (0.5, 0.75, 0.5)
    assert (params.dry_multiplier, params.mirostat, params.mirostat_tau) == (0.5, 2, 4.5)
    assert [breaker.heads for breaker in params.dry_breakers] == [[*b"q"]]
    assert (params.logit_bias, params.bad_words) == ({97: 1.5}, [[98]])
    assert params.samplers == ["dry", "typ_p", "temperature"]


@pytest.mark.parametrize(
    ("samplers", "expected"),
    [
        ("kt", ["top_k", "temperature"]),
        (["top-k", "nucleus"], ["top_k", "top_p"]),
        (
            None,
            [
                *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
                "temperature",
            ],
        ),
    ],
)
def test_samplers_have_llama_cpps_names_and_order(
    gateway: GatewayProcess, engine: ScriptedEngine, samplers: Any, expected: list[str]
) -> None:
    assert gateway.post("/completion", {"prompt": "hi", "samplers": samplers}).status_code == 200
    assert params_of(engine).samplers == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"samplers": ["top_k", "best"]}, "samplers[1]"),
        ({"samplers": "kz"}, "samplers[1]"),
        ({"samplers": ["top_k", "dry"]}, "samplers"),
        ({"samplers": ["infill"]}, "samplers[0]"),
        ({"mirostat": 3}, "mirostat"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_probs": 2, "post_sampling_probs": True, "temperature": 0}, "post_sampling_probs"),
        ({"xtc_threshold": 1.5}, "xtc_threshold"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"),
        ({"logit_bias": [["a", True]]}, "logit_bias[0][1]"),
        ({"n_predict": -2}, "n_predict"),
        ({"grammar": 5}, "grammar"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_a_refusal_names_the_field(
    gateway: GatewayProcess, fields: dict[str, Any], param: str
) -> None:
    answer = gateway.post("/completion", {"prompt": "hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize("is_drawn", [False, True])
def test_probabilities_are_in_the_answer_or_in_the_stream(
    gateway: GatewayProcess, engine: ScriptedEngine, is_drawn: bool
) -> None:
    engine.script = lambda generate: text_reply("abc")
    body = {"prompt": "hi", "n_probs": 2, "post_sampling_probs": is_drawn}
    found = gateway.post("/completion", body).json()["completion_probabilities"]
    assert params_of(engine).logprobs_of == ("sampling" if is_drawn else "model")
    assert [each["id"] for each in found] == [*b"abc", EOS]
    assert [each["token"] for each in found[:3]] == ["a", "b", "c"]
    assert found[0]["bytes"] == [97]
    top, value = ("top_probs", "prob") if is_drawn else ("top_logprobs", "logprob")
    assert all(len(each[top]) == 2 for each in found)
    if is_drawn:
        assert all(0 < each[value] <= 1 for each in found)
    else:
        assert all(math.exp(each[value]) <= 1 for each in found)
    *chunks, last = events(gateway, body)
    streamed = [each for chunk in chunks for each in chunk["completion_probabilities"]]
    assert streamed == found
    assert "completion_probabilities" not in last


@pytest.mark.parametrize("text", ["abc", "ab<end>c", "<end>"])
def test_a_stream_has_the_tokens_and_probabilities_of_the_whole_answer(
    gateway: GatewayProcess, engine: ScriptedEngine, text: str
) -> None:
    engine.script = lambda generate: text_reply(text, size=1)
    body = {"prompt": "hi", "stop": ["<end>"], "n_probs": 1, "return_tokens": True}
    whole = gateway.post("/completion", body).json()
    assert whole["tokens"]
    *chunks, last = events(gateway, body)
    for name in ("content", "tokens", "completion_probabilities"):
        parts = [each for chunk in chunks for each in chunk[name]]
        assert parts == [*whole[name]], name
    assert chunks[-1]["tokens_predicted"] == last["tokens_predicted"]


def test_response_fields_select_members(gateway: GatewayProcess) -> None:
    body = {"prompt": "hi", "response_fields": ["content", "generation_settings/n_ctx"]}
    answer = gateway.post("/completion", body).json()
    assert answer.keys() == {"content", "generation_settings/n_ctx"}


def test_a_template_is_applied_without_an_answer(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    answer = gateway.post("/apply-template", {"messages": HI}).json()
    tokens = gateway.post("/tokenize", {"messages": HI}).json()["tokens"]
    assert gateway.post("/detokenize", {"tokens": tokens}).json()["prompt"] == answer["prompt"]
    assert not engine.generates


def test_a_content_is_tokenized_in_llama_cpps_form(gateway: GatewayProcess) -> None:
    plain = gateway.post("/tokenize", {"content": "hé"}).json()
    assert plain == {"tokens": [*"hé".encode()]}
    pieces = gateway.post("/tokenize", {"content": "hé", "with_pieces": True}).json()["tokens"]
    assert pieces == [
        {"id": 104, "piece": "h"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]
    text = gateway.post("/detokenize", plain).json()
    assert text == {"prompt": "hé", "content": "hé"}


def test_props_and_slots_describe_the_server(gateway: GatewayProcess) -> None:
    props = requests.get(gateway.url + "/props", timeout=30).json()
    assert props["default_generation_settings"]["n_ctx"] == 400
    assert props["default_generation_settings"]["params"]["mirostat"] == 0
    assert props["model_alias"] == "scripted"
    assert props["total_slots"] > 0
    slots = requests.get(gateway.url + "/slots", timeout=30).json()
    assert [slot["id"] for slot in slots] == [*range(props["total_slots"])]
    busy = [slot["is_processing"] for slot in slots]
    assert busy == sorted(busy, reverse=True)
    assert {slot["n_ctx"] for slot in slots} == {400}
