"""Requests of programs that are too large to install: Open WebUI, Continue and llama.vim.

Each body was written down from the program's source, which is named beside it. The programs read
few members of the responses; the tests check those.

- Open WebUI (github.com/open-webui/open-webui): backend/open_webui/routers/{openai,ollama,tasks}.py
  and backend/open_webui/utils/payload.py
- Continue (github.com/continuedev/continue): core/llm/llms/{Ollama,OpenAI}.ts and
  core/autocomplete/templating/AutocompleteTemplate.ts
- llama.vim (github.com/ggml-org/llama.vim): autoload/llama.vim
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import requests

from tests.support.gateway_process import GatewayProcess
from tests.support.http import events_of, json_of
from tests.support.scripted_engine import (
    MARKERS,
    ScriptedEngine,
    infill_card,
    prompt_of,
    text_reply,
)

ENGINE = {"card": infill_card(), "max_len": 4000}
GATEWAY = {"served_name": ["coder"]}
PREFIX, SUFFIX, MIDDLE = (259 + len(MARKERS) + place for place in range(3))
QUESTION = [{"role": "user", "content": "hi"}]
WEBUI_HEADERS = {
    "Authorization": "Bearer sk-none",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Id": "0d4a4f4e",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "chat-1",
}
"""`get_headers_and_cookies` in openai.py, with ENABLE_FORWARD_USER_INFO_HEADERS."""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_time",
        "description": "Get the current time.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
CALL = '<tool_call>\n{"name": "get_current_time", "arguments": {}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _reply(engine: ScriptedEngine) -> None:
    says(engine, "Hello there.")


def says(engine: ScriptedEngine, text: str) -> None:
    engine.script = lambda generate: text_reply(text, size=3, marked=True)


def post(gateway: GatewayProcess, path: str, body: Any, **headers: str) -> requests.Response:
    answer = gateway.post(path, body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def get(gateway: GatewayProcess, path: str, **headers: str) -> Any:
    return json_of(requests.get(gateway.url + path, headers=headers, timeout=20))


def events(answer: requests.Response) -> list[Any]:
    """Return the data of the events of an OpenAI stream, without [DONE]."""
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    return events_of(answer.content)


def lines(answer: requests.Response) -> list[Any]:
    return [json.loads(line) for line in answer.text.splitlines()]


# ---- Open WebUI, connected as an OpenAI API


def test_open_webui_lists_models_and_streams_a_chat_with_its_usage(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """`get_all_models_responses` and `generate_chat_completion` in openai.py."""
    (model,) = get(gateway, "/v1/models", **WEBUI_HEADERS)["data"]
    body = {
        "stream": True,
        "model": model["id"],
        "messages": [{"role": "system", "content": "Be brief."}, *QUESTION],
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 128,
        "frequency_penalty": 0.5,
        "seed": 42,
        "stop": ["\n\nUser:"],
        "logit_bias": {"65": -1},
        "stream_options": {"include_usage": True},
    }
    *chunks, last = events(post(gateway, "/v1/chat/completions", body, **WEBUI_HEADERS))
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(deltas) == "Hello there."
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 13)


@pytest.mark.parametrize("limit", [{"max_completion_tokens": 1000}, {"max_tokens": 1000}])
def test_open_webui_generates_a_title(gateway: GatewayProcess, limit: Any) -> None:
    """`generate_title` in tasks.py. Follow-ups, tags and search queries have the same shape."""
    task = (
        "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history."
    )
    body = {
        "model": "coder",
        "messages": [{"role": "user", "content": task}],
        "stream": False,
        **limit,
    }
    answer = post(gateway, "/v1/chat/completions", body, **WEBUI_HEADERS).json()
    assert answer["choices"][0]["message"]["content"] == "Hello there."


def test_open_webui_calls_a_tool_natively(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """With "Function Calling: Native" the middleware adds `tools` to the payload."""
    says(engine, CALL)
    body = {"stream": True, "model": "coder", "messages": QUESTION, "tools": [TOOL]}
    chunks = events(post(gateway, "/v1/chat/completions", body, **WEBUI_HEADERS))
    calls = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert calls[0]["function"]["name"] == "get_current_time"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "12:00"}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "index": 0,
                "id": calls[0]["id"],
                "type": "function",
                "function": {"name": "get_current_time", "arguments": "{}"},
            }
        ],
    }
    says(engine, "Noon.")
    body["messages"] = [*QUESTION, called, result]
    chunks = events(post(gateway, "/v1/chat/completions", body, **WEBUI_HEADERS))
    assert "12:00" in prompt_of(engine)


# ---- Open WebUI, connected as Ollama


def test_open_webui_probes_ollama(gateway: GatewayProcess) -> None:
    """`get_ollama_versions`, `get_all_models` and `get_ollama_loaded_models` in ollama.py."""
    version = get(gateway, "/api/version", **WEBUI_HEADERS)["version"]
    assert tuple(map(int, re.sub(r"^v|-.*", "", version).split(".")))
    (model,) = get(gateway, "/api/tags", **WEBUI_HEADERS)["models"]
    (loaded,) = get(gateway, "/api/ps", **WEBUI_HEADERS)["models"]
    assert model["name"] == model["model"] == loaded["name"] == "coder:latest"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", loaded["expires_at"])


def test_open_webui_chats_over_ollama(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """`convert_payload_openai_to_ollama` and `apply_model_params_to_body_ollama` in payload.py."""
    body = {
        "model": "coder:latest",
        "messages": QUESTION,
        "stream": True,
        "think": False,
        "keep_alive": "5m",
        "options": {
            **{"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 42},
            **{"num_ctx": 4096, "num_batch": 512, "num_keep": 24, "num_predict": 128},
            **{"repeat_last_n": 64, "repeat_penalty": 1.1, "mirostat": 0, "mirostat_eta": 0.1},
            **{"mirostat_tau": 5.0, "tfs_z": 1.0, "use_mmap": True, "use_mlock": False},
            **{"num_thread": 8, "num_gpu": 0, "stop": ["\n\nUser:"], "new_topic_penalty": 0.5},
        },
    }
    *records, last = lines(post(gateway, "/api/chat", body, **WEBUI_HEADERS))
    assert "".join(record["message"]["content"] for record in records) == "Hello there."
    counts = ("total_duration", "prompt_eval_count", "eval_count", "eval_duration")
    assert all(last[name] > 0 for name in counts)
    params = engine.generates[-1].params
    assert (params.max_tokens, params.min_p, params.repetition_penalty) == (128, 0.05, 1.1)


def test_open_webui_sends_calls_of_ollama_back(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """`convert_messages_openai_to_ollama` in payload.py."""
    call = {
        "index": 0,
        "id": "call_1",
        "function": {"name": "get_current_time", "arguments": {}},
    }
    body = {
        "model": "coder:latest",
        "messages": [
            *QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
        ],
        "stream": True,
        "tools": [TOOL],
    }
    lines(post(gateway, "/api/chat", body, **WEBUI_HEADERS))
    assert prompt_of(engine).endswith("<tool>12:00<assistant>")


def test_open_webui_cannot_unload_an_only_model(gateway: GatewayProcess) -> None:
    """`unload_model` in ollama.py."""
    body = {"model": "coder:latest", "keep_alive": 0, "prompt": ""}
    answer = gateway.post("/api/generate", body, headers=WEBUI_HEADERS)
    assert (answer.status_code, "keeps its only model" in answer.json()["error"]) == (400, True)


# ---- Continue


def test_continue_finds_out_that_the_model_fills_in(gateway: GatewayProcess) -> None:
    """The constructor of the class Ollama, in Ollama.ts."""
    shown = post(gateway, "/api/show", {"name": "coder"}).json()
    pairs = [
        re.fullmatch(r"(\S+)\s+((?:\".*\")|\S+)", line) for line in shown["parameters"].split("\n")
    ]
    assert all(pairs)
    assert ("num_ctx", "4000") in {pair.groups() for pair in pairs if pair}
    assert ".Suffix" in shown["template"]
    (model,) = get(gateway, "/api/tags")["models"]
    assert model["name"] == "coder:latest"


def test_continue_completes_code_over_ollama(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """`_streamFim` and `_getGenerateOptions` in Ollama.ts. JSON leaves undefined members out."""
    body = {
        "model": "coder",
        "prompt": "def f():\n    ",
        "suffix": "\n\nf()",
        "options": {
            **{"temperature": 0.01, "num_predict": 4096, "num_ctx": 4000},
            "stop": ["\n\n", "/src/", "#- coding: utf-8", "```"],
        },
        "keep_alive": 1800,
        "stream": True,
    }
    says(engine, "return 1")
    records = lines(post(gateway, "/api/generate", body))
    assert "".join(record["response"] for record in records) == "return 1"
    prompt = [PREFIX, *b"def f():\n    ", SUFFIX, *b"\n\nf()", MIDDLE]
    assert engine.generates[-1].prompt.tolist() == prompt


def test_continue_completes_code_with_a_raw_prompt(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """`_streamComplete` in Ollama.ts, and `_legacystreamComplete` in OpenAI.ts, both with
    `qwenCoderFimTemplate` of AutocompleteTemplate.ts."""
    prompt = "<|fim_prefix|>def f():\n    <|fim_suffix|>\n\nf()<|fim_middle|>"
    stop = [
        *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        *("<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"),
        *("/src/", "#- coding: utf-8", "```"),
    ]
    says(engine, "return 1")
    body: dict[str, Any] = {"model": "coder", "prompt": prompt, "stream": True}
    options = {"temperature": 0.01, "num_predict": 4096, "stop": stop, "num_ctx": 4000}
    ollama = {**body, "raw": True, "options": options, "keep_alive": 1800}
    records = lines(post(gateway, "/api/generate", ollama))
    assert "".join(record["response"] for record in records) == "return 1"
    first = engine.generates[-1].prompt.tolist()
    assert first == [PREFIX, *b"def f():\n    ", SUFFIX, *b"\n\nf()", MIDDLE]
    openai = {**body, "max_tokens": 2048, "temperature": 0.01, "stop": stop}
    chunks = events(post(gateway, "/v1/completions", openai, **{"api-key": "none"}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "return 1"
    assert engine.generates[-1].prompt.tolist() == first


def test_continue_chats_with_a_tool_over_ollama(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """`_streamChat` in Ollama.ts: not streamed if there are tools."""
    says(engine, CALL)
    body = {
        "model": "coder",
        "messages": [{"role": "user", "content": "What time is it?"}],
        "options": {"temperature": 0.5, "num_predict": 4096, "num_ctx": 4000},
        "keep_alive": 1800,
        "tools": [TOOL],
        "stream": False,
    }
    message = post(gateway, "/api/chat", body).json()["message"]
    assert message["role"] == "assistant"
    (call,) = message["tool_calls"]
    assert call["function"] == {"index": 0, "name": "get_current_time", "arguments": {}}


# ---- llama.vim


def test_llama_vim_completes_code(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """`llama#fim`: the request, and the members that `s:fim_render` reads."""
    timings = [
        f"timings/{kind}_{name}"
        for kind in ("prompt", "predicted")
        for name in ("n", "ms", "per_token_ms", "per_second")
    ]
    body = {
        "id_slot": 0,
        "input_prefix": "def f():\n",
        "input_suffix": "\n\nf()\n",
        "input_extra": [{"text": "x = 1", "time": [1, 2], "filename": "a.py"}],
        "prompt": "    ",
        "n_predict": 128,
        "stop": [],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.99,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", *timings, "truncated", "tokens_cached"],
    }
    says(engine, "return 1")
    answer = post(gateway, "/infill", body).json()
    assert answer.keys() == {"content", *timings, "truncated", "tokens_cached"}
    assert (answer["content"], answer["timings/predicted_n"]) == ("return 1", 9)
    framed = [PREFIX, *b"def f():\n    ", SUFFIX, *b"\n\nf()\n", MIDDLE]
    assert engine.generates[-1].prompt.tolist()[-len(framed) :] == framed


def test_llama_vim_warms_the_cache_up(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """`s:ring_update`."""
    body = {
        **{"id_slot": 0, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0},
        "input_extra": [{"text": "x = 1", "time": [1, 2], "filename": "a.py"}],
        **{"temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True},
        **{"t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""]},
    }
    assert post(gateway, "/infill", body).json() == {}
    assert engine.generates[-1].params.max_tokens == 0
    assert b"x = 1" in bytes(i for i in engine.generates[-1].prompt.tolist() if i < 256)
