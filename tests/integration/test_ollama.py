"""Ollama's API over HTTP: requests, streams, names, errors."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import requests

from gateway.api.ollama.models import details_of
from gateway.api.ollama.responses import API_VERSION
from protocol.engine.messages import Generate
from protocol.engine.sampling import SamplingParams
from tests.support.gateway_process import GatewayProcess
from tests.support.http import json_of
from tests.support.scripted_engine import (
    BOS,
    EOS,
    TIMES,
    ScriptedEngine,
    TokenReply,
    infill_card,
    prompt_of,
    scripted_card,
    text_of,
    text_reply,
)

CARD = infill_card(
    num_parameters=1_500_000_000,
    weights_bytes=3_000_000_000,
    architecture="LlamaForCausalLM",
    license="mit",
)
ENGINE = {"card": CARD, "max_len": 4000}
GATEWAY = {"served_name": ["scripted", "other:7b"], "keep_alive_s": 0.1}
CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def says(engine: ScriptedEngine, text: str, size: int = 3) -> None:
    engine.script = lambda generate: text_reply(text, size=size, marked=True)


def ask(gateway: GatewayProcess, path: str, **body: Any) -> Any:
    """Return the record of a whole answer."""
    answer = gateway.post(path, {"model": "scripted", "stream": False, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "application/json"
    return answer.json()


def stream(gateway: GatewayProcess, path: str, **body: Any) -> list[Any]:
    """Return the records of a streamed answer."""
    answer = gateway.post(path, {"model": "scripted", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def refusal(gateway: GatewayProcess, path: str, status: int = 400, **body: Any) -> str:
    (member,) = json_of(gateway.post(path, {"model": "scripted", **body}), status).items()
    assert member[0] == "error"
    return member[1]


def params_of(engine: ScriptedEngine) -> SamplingParams:
    return engine.generates[-1].params


def folded(records: list[Any], *path: str) -> str:
    """Return the text at a path of each record, joined."""
    found = []
    for record in records:
        for name in path:
            record = record.get(name) or ""
        found.append(record)
    return "".join(found)


# ---- answers


def test_a_stream_is_the_whole_answer_in_pieces(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    says(engine, f"{THOUGHT}Hello there.")
    whole = ask(gateway, CHAT, messages=HI)
    *records, last = stream(gateway, CHAT, messages=HI)
    assert whole["message"] == {"role": "assistant", "content": "Hello there.", "thinking": "hm"}
    assert folded(records, "message", "content") == "Hello there."
    assert folded(records, "message", "thinking") == "hm"
    assert {record["done"] for record in records} == {False}
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last.keys() == whole.keys()
    assert {record["model"] for record in records} == {"scripted"}


def test_the_last_record_has_counts_and_nanoseconds(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    says(engine, "Hello", size=1)
    last = stream(gateway, CHAT, messages=HI)[-1]
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["prompt_eval_count"] == len(engine.generates[-1].prompt)
    assert last["eval_count"] == 6
    assert last["prompt_eval_duration"] == TIMES.prefill_s * 1e9
    assert last["eval_duration"] == TIMES.decode_s * 1e9
    assert last["load_duration"] == 0
    assert last["total_duration"] > 0


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_is_one_object(
    gateway: GatewayProcess, engine: ScriptedEngine, streams: bool
) -> None:
    says(engine, f"Well.\n{CALL}\n{CALL}")
    body = {"messages": HI, "tools": [TOOL], "stream": streams}
    if streams:
        *records, last = stream(gateway, CHAT, **body)
        assert folded(records, "message", "content") == "Well."
        calls = [c for r in records for c in r["message"].get("tool_calls", ())]
    else:
        last = ask(gateway, CHAT, **body)
        assert last["message"]["content"] == "Well."
        calls = last["message"]["tool_calls"]
    functions = [{"index": i, "name": "look", "arguments": {"at": 1}} for i in range(2)]
    assert [call["function"] for call in calls] == functions
    assert len({call["id"] for call in calls}) == 2
    assert last["done_reason"] == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_cut_off_is_still_an_object(
    gateway: GatewayProcess, engine: ScriptedEngine, streams: bool
) -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {"at": [1, "tw'
    engine.script = lambda generate: text_reply(text, size=2, finish="length", marked=True)
    records = stream(gateway, CHAT, messages=HI, tools=[TOOL])
    whole = ask(gateway, CHAT, messages=HI, tools=[TOOL])
    last = records[-1] if streams else whole
    (call,) = [
        c for r in (records if streams else [whole]) for c in r["message"].get("tool_calls", ())
    ]
    assert call["function"]["arguments"] == {"at": [1, "tw"]}
    assert last["done_reason"] == "length"


def test_logprobs_have_one_item_per_token(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    says(engine, "Hi", size=1)
    body: Any = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    whole = ask(gateway, CHAT, **body)["logprobs"]
    streamed = [p for r in stream(gateway, CHAT, **body) for p in r.get("logprobs", ())]
    assert streamed == whole
    assert [item["token"] for item in whole] == ["H", "i", "<eos>"]
    assert len(whole[0]["top_logprobs"]) == 2
    assert "logprobs" not in ask(gateway, GENERATE, prompt="x")
    assert len(ask(gateway, GENERATE, prompt="x", raw=True, logprobs=True)["logprobs"]) == 3


def test_a_silent_stream_is_kept_alive_without_empty_lines(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    says(engine, "Hi")
    engine.is_paused = True
    body: Any = {"model": "scripted", "messages": HI}
    with requests.post(gateway.url + CHAT, json=body, stream=True, timeout=20) as answer:
        data = b""
        for piece in answer.iter_content(chunk_size=1):
            data += piece
            if data == b"  ":
                engine.is_paused = False
    lines = data.splitlines()
    assert all(lines)
    assert folded([json.loads(line) for line in lines], "message", "content") == "Hi"


# ---- requests


def test_options_have_the_names_of_ollama(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    options = {
        **{"num_predict": 9, "temperature": 0.25, "top_k": 3, "top_p": 0.5, "min_p": 0.125},
        **{"seed": 7, "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    }
    expected = SamplingParams(
        max_tokens=9,
        temperature=0.25,
        top_k=3,
        top_p=0.5,
        min_p=0.125,
        seed=7,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    for path, body in ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "a"})):
        ask(gateway, path, options=options, **body)
        assert params_of(engine) == expected
    ask(gateway, GENERATE, options=options, prompt="a", raw=True)
    assert params_of(engine) == expected


@pytest.mark.parametrize("limit", [None, 0, -1, -2])
def test_an_answer_without_num_predict_ends_with_the_context(
    gateway: GatewayProcess, engine: ScriptedEngine, limit: int | None
) -> None:
    for raw in (False, True):
        ask(gateway, GENERATE, prompt="a", raw=raw, options={"num_predict": limit})
        assert params_of(engine).max_tokens is None


def test_a_stop_string_ends_the_answer(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    says(engine, "one; two")
    for stop in (";", [";"]):
        answer = ask(gateway, GENERATE, prompt="a", options={"stop": stop})
        assert (answer["response"], answer["done_reason"]) == ("one", "stop")


def test_fields_without_effect_are_listed(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    body = {
        "model": "scripted",
        "messages": HI,
        "options": {"num_ctx": 8192, "use_mmap": True, "temperature": 0},
        "keep_alive": "5m",
        "metadata": {},
    }
    answer = gateway.post(CHAT, body)
    ignored = "metadata, options.num_ctx, options.use_mmap, keep_alive"
    assert answer.headers["x-ignored-fields"] == ignored


def test_a_system_message_and_a_prompt_are_a_conversation(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    ask(gateway, GENERATE, prompt="hi", system="Be brief.")
    assert prompt_of(engine) == "<system>Be brief.<user>hi<assistant>"


def test_a_raw_prompt_is_used_as_it_is(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    answer = ask(gateway, GENERATE, prompt="hi <think>", raw=True)
    assert prompt_of(engine) == "hi <think>"
    assert "context" not in answer


def test_an_answer_continues_an_earlier_one(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    says(engine, "Hello")
    first = ask(gateway, GENERATE, prompt="hi")
    ids = [BOS, *b"<user>hi<assistant>", *b"Hello", EOS]
    assert first["context"] == ids
    assert stream(gateway, GENERATE, prompt="hi")[-1]["context"] == ids
    ask(gateway, GENERATE, prompt="more", context=ids)
    assert engine.generates[-1].prompt.tolist() == [*ids, *b"<user>more<assistant>"]


def test_a_suffix_fills_in_the_middle(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    says(engine, "b")
    for raw in (None, True):
        answer = ask(gateway, GENERATE, prompt="a", suffix="c", raw=raw)
        assert answer["response"] == "b"
        assert engine.generates[-1].prompt.tolist() == [263, 97, 264, 99, 265]


@pytest.mark.parametrize(
    ("think", "end"),
    [(None, "<assistant>"), (True, "<think>\n"), (False, "</think>\n\n"), ("high", "<think>\n")],
)
def test_thinking_is_turned_on_and_off(
    gateway: GatewayProcess, engine: ScriptedEngine, think: bool | str | None, end: str
) -> None:
    ask(gateway, CHAT, messages=HI, think=think)
    assert prompt_of(engine).endswith(end)


def test_results_are_matched_to_calls_by_id_or_by_name(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    def call(name: str, **members: Any) -> Any:
        return {"function": {"name": name, "arguments": {"at": 1}}, **members}

    calls = {"role": "assistant", "tool_calls": [call("look"), call("see", id="x")]}
    results = [
        {"role": "tool", "tool_call_id": "x", "content": "a sea"},
        {"role": "tool", "tool_name": "look", "content": "a hill"},
    ]
    ask(gateway, CHAT, messages=[*HI, calls, *results], tools=[TOOL])
    assert prompt_of(engine).endswith(
        '<assistant><tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
        '<tool_call>{"name": "see", "arguments": {"at": 1}}</tool_call>'
        "<tool>a sea<tool>a hill<assistant>"
    )


@pytest.mark.parametrize(
    ("form", "kind"),
    [("json", "json_object"), ({"type": "object"}, "json_schema"), ("", None), (None, None)],
)
def test_a_format_is_a_grammar(
    gateway: GatewayProcess, engine: ScriptedEngine, form: Any, kind: str | None
) -> None:
    for path, body in ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "a"})):
        ask(gateway, path, format=form, **body)
        grammar = engine.generates[-1].grammar
        found = grammar.body.__struct_config__.tag if grammar is not None else None
        assert found == kind


def test_the_content_type_does_not_matter(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    says(engine, "Hi")
    data = json.dumps({"model": "scripted", "messages": HI, "stream": False})
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        answer = requests.post(gateway.url + CHAT, data, headers={"Content-Type": kind}, timeout=20)
        assert answer.json()["message"]["content"] == "Hi"


def test_a_page_of_another_site_is_refused_whatever_the_content_type(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """A browser sends such a body without asking the server first, and always names the page."""
    data = json.dumps({"model": "scripted", "messages": HI})
    headers = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
    answer = requests.post(gateway.url + CHAT, data, headers=headers, timeout=20)
    assert (answer.status_code, answer.json().keys()) == (403, {"error"})
    assert not engine.generates


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "[0].images:"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role:"),
        (CHAT, {"messages": ["x"]}, "messages[0]: must be an object"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (CHAT, {"messages": HI, "options": {"temperature": 9}}, "options.temperature:"),
        (CHAT, {"messages": HI, "options": {"stop": [""]}}, "options.stop[0]"),
        (CHAT, {"messages": HI, "think": "much"}, "think: must be true, false or one of"),
        (CHAT, {"messages": HI, "keep_alive": "soon"}, "keep_alive:"),
        (CHAT, {"messages": HI, "format": "xml"}, "format: must be"),
        (
            CHAT,
            {"messages": HI, "format": {"type": "array", "uniqueItems": True}},
            "format.uniqueItems",
        ),
        (CHAT, {"messages": HI, "tools": [{"function": {}}]}, "tools[0].function.name"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images: this model reads text only"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template: not supported"),
        (GENERATE, {"prompt": "x", "raw": True, "system": "s"}, "system: not available with raw"),
        (GENERATE, {"suffix": "x", "context": [1]}, "context: not available with suffix"),
        (GENERATE, {"prompt": "x", "context": [999]}, "context[0]: token id 999"),
        (GENERATE, {"prompt": "x" * 200_000}, "prompt"),
    ],
)
def test_an_error_has_only_a_message(
    gateway: GatewayProcess, engine: ScriptedEngine, path: str, body: Any, message: str
) -> None:
    assert message in refusal(gateway, path, **body)
    assert not engine.generates


def test_errors_of_http_have_the_same_shape(gateway: GatewayProcess) -> None:
    assert "no route" in requests.get(f"{gateway.url}/api/nothing", timeout=20).json()["error"]
    assert "not allowed" in requests.get(gateway.url + CHAT, timeout=20).json()["error"]
    broken = requests.post(gateway.url + CHAT, data="{", timeout=20)
    assert (broken.status_code, broken.json().keys()) == (400, {"error"})


# ---- models


@pytest.mark.parametrize("name", ["scripted", "scripted:latest", "other:7b"])
def test_a_model_has_its_names_with_and_without_a_tag(
    gateway: GatewayProcess, engine: ScriptedEngine, name: str
) -> None:
    assert ask(gateway, CHAT, messages=HI, model=name)["model"] == name
    assert requests.post(f"{gateway.url}/api/show", json={"model": name}, timeout=20).ok
    assert requests.post(f"{gateway.url}/api/show", json={"name": name}, timeout=20).ok


@pytest.mark.parametrize("name", ["other", "scripted:7b", "x:latest"])
def test_another_tag_is_another_model(gateway: GatewayProcess, name: str) -> None:
    for path, body in ((CHAT, {"messages": HI}), (GENERATE, {}), ("/api/show", {})):
        message = refusal(gateway, path, 404, **{**body, "model": name})
        assert "does not exist; this server serves scripted, other:7b" in message


@pytest.mark.parametrize(
    ("facts", "details"),
    [
        ({"file_format": "gguf", "quantization": "Q4_1", "dtype": "bfloat16"}, ("gguf", "Q4_1")),
        ({"file_format": "gguf", "dtype": "float32"}, ("gguf", "float32")),
        ({"file_format": "safetensors", "dtype": "bfloat16"}, ("safetensors", "bfloat16")),
    ],
)
def test_the_quantisation_is_that_of_the_file(
    facts: dict[str, Any], details: tuple[str, str]
) -> None:
    found = details_of(scripted_card(num_parameters=1, **facts))
    assert (found.format, found.quantization_level) == details
    assert details_of(scripted_card(num_parameters=0, **facts)).quantization_level == ""


def test_models_are_listed_with_a_tag(gateway: GatewayProcess) -> None:
    listed = requests.get(f"{gateway.url}/api/tags", timeout=20).json()["models"]
    assert [model["name"] for model in listed] == ["scripted:latest", "other:7b"]
    assert listed[0]["size"] == 3_000_000_000
    assert listed[0]["details"] == {
        **{"parent_model": "", "format": "", "family": "llama", "families": ["llama"]},
        **{"parameter_size": "1.5B", "quantization_level": "float32"},
    }
    (loaded,) = requests.get(f"{gateway.url}/api/ps", timeout=20).json()["models"]
    assert (loaded["name"], loaded["context_length"]) == ("scripted:latest", 4000)


def test_a_model_shows_what_it_can_do(gateway: GatewayProcess) -> None:
    shown = requests.post(f"{gateway.url}/api/show", json={"model": "scripted"}, timeout=20).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "insert"]
    assert shown["model_info"]["llama.context_length"] == 4000
    assert ".Suffix" in shown["template"]
    assert shown["license"] == "mit"
    parameters = dict(line.split() for line in shown["parameters"].splitlines())
    assert (parameters["num_ctx"], parameters["temperature"]) == ("4000", "0.7")


def test_the_version_is_a_number(gateway: GatewayProcess) -> None:
    shown = requests.get(f"{gateway.url}/api/version", timeout=20).json()
    assert shown["version"] == API_VERSION
    assert [int(part) for part in shown["version"].split(".")] > [0, 5]


def test_an_empty_request_loads_the_model(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    for path, body in (
        (CHAT, {"messages": []}),
        (CHAT, {}),
        (GENERATE, {}),
        (GENERATE, {"prompt": ""}),
    ):
        answer = gateway.post(path, {"model": "scripted", "keep_alive": "10m", **body})
        assert (answer.status_code, answer.json()["done_reason"]) == (200, "load")
        assert answer.headers["x-ignored-fields"] == "keep_alive"
    assert not engine.generates


def test_clients_cannot_change_the_models(gateway: GatewayProcess) -> None:
    for path in ("/api/push", "/api/create", "/api/copy"):
        assert "tidegate pull" in refusal(gateway, path, 403)
    deleted = requests.delete(f"{gateway.url}/api/delete", json={"model": "scripted"}, timeout=20)
    assert (deleted.status_code, "tidegate pull" in deleted.text) == (403, True)
    assert "tidegate pull" in refusal(gateway, "/api/pull", 403, model="llama3")


def test_a_pull_of_a_served_model_succeeds(gateway: GatewayProcess) -> None:
    assert stream(gateway, "/api/pull", model="scripted:latest") == [{"status": "success"}]
    assert ask(gateway, "/api/pull", model="other:7b") == {"status": "success"}
    assert "model: this field is required" in refusal(gateway, "/api/pull", model="")


def test_parallel_streams_do_not_mix(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    def echo(generate: Generate) -> TokenReply:
        text = text_of(generate.prompt.tolist())
        return text_reply(text.partition("<user>")[2].partition("<")[0] * 9, size=2)

    engine.script = echo
    answers: dict[str, str] = {}

    def run(name: str) -> None:
        messages = [{"role": "user", "content": name}]
        answers[name] = folded(stream(gateway, CHAT, messages=messages), "message", "content")

    threads = [threading.Thread(target=run, args=(name,)) for name in ("ab", "cd", "ef")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {name: name * 9 for name in ("ab", "cd", "ef")}
