"""Sends changed JSON bodies to every POST route of a real gateway with a scripted engine.

Each body must be answered with 200 or a 4xx in time. The gateway process must stay alive, may not
grow, and may not log a traceback.
"""

from __future__ import annotations

import http.client
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import chain, cycle, islice, repeat
from random import Random
from typing import Any

import requests

from protocol.engine.encoding import EncodingCard
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, infill_card, text_reply
from tests.torture.fuzz.outcome import Outcome, watched
from tests.torture.fuzz.values import changed, damaged

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"
FILES, BATCHES = "/v1/files", "/v1/batches"
PATIENCE_S = 60.0
NUM_CLIENTS = 4
UNREADY, STARVED = 503, b"engine_lost"
"""A 503 with this code means that the scripted engine, a thread of this program, had no CPU for
seconds. The request is sent again, once."""
ANSWER = (
    '<think>\nhm\n</think>\nHi\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
)

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
FUNCTION = {"name": "look", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 2}'}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a sea"},
    {"role": "user", "content": "and?"},
]
DRAWN = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["zz", "q"]},
    **{"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1},
    **{"min_tokens": 1, "max_tokens": 9, "logit_bias": {"5": 1.5}, "stop_token_ids": [7]},
    **{"ignore_eos": True, "skip_special_tokens": False, "bad_words": ["no"]},
}
CHAT_BODY = {
    **{"model": "scripted", "messages": CONVERSATION, "tools": [TOOL], **DRAWN},
    "tool_choice": "auto",
    **{"n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}},
    **{"stream": True, "user": "me", "priority": 1, "cache_salt": "s", "return_token_ids": True},
    **{"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
    **{"parallel_tool_calls": True, "metadata": {"a": "b"}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
PLAIN_CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5}
COMPLETION = {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "n": 1, **DRAWN}
MESSAGE = {
    **{"model": "scripted", "max_tokens": 9, "system": [{"type": "text", "text": "Be brief."}]},
    **{"stream": True, "temperature": 0.5, "top_k": 3, "stop_sequences": ["zz"]},
    "metadata": {"user_id": "me"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a sea"}],
        },
    ],
}
RESPONSE = {
    **{"model": "scripted", "instructions": "Be brief.", "max_output_tokens": 9, "stream": True},
    **{"temperature": 0.5, "top_p": 0.5, "store": False, "metadata": {"a": "b"}},
    **{"reasoning": {"effort": "low", "summary": "auto"}, "tool_choice": "auto"},
    "tools": [{"type": "function", **FUNCTION}],
    "include": ["reasoning.encrypted_content"],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "a sea"},
    ],
}
FORMED = {
    "input": "hi",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
}
SAMPLING = {**DRAWN, "n": 2, "logprobs": 2, "logprobs_of": "both"}
GENERATION = {
    **{"token_ids": [104, 105], "sampling_params": SAMPLING, "stream": True, "model": "scripted"},
    **{"request_id": "r-1", "cache_salt": "s", "priority": 1, "output_mode": "text"},
}

OPTIONS = {
    **{"num_predict": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7},
    **{"stop": ["zz"], "repeat_penalty": 1.1, "num_ctx": 4096, "mirostat": 0},
}
LLAMA_CPP = {
    **{"prompt": "hi", "n_predict": 5, "temperature": 0.5, "seed": 7, "n_probs": 2, "stop": ["q"]},
    **{"typical_p": 0.9, "top_n_sigma": 1.5, "dynatemp_range": 0.2, "xtc_probability": 0.5},
    **{"dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"], "logit_bias": [["a", 1.5]]},
    **{"samplers": ["dry", "top_k", "temperature"], "post_sampling_probs": True},
    "response_fields": ["content", "timings/prompt_n"],
}
OLLAMA_CHAT = {
    **{"model": "scripted", "options": OPTIONS, "keep_alive": "5m", "think": True, "stream": True},
    "tools": [{"type": "function", "function": FUNCTION}],
    "messages": [
        {"role": "user", "content": "hi", "images": []},
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "look", "arguments": {"at": 2}}}],
        },
        {"role": "tool", "tool_name": "look", "content": "a sea"},
    ],
}
OLLAMA_TEXT = {"model": "scripted:latest", "prompt": "hi", "options": OPTIONS, "stream": False}
GAP = {
    **{"input_prefix": "def f():", "input_suffix": "f()", "prompt": "    ", "n_predict": 5},
    **{"input_extra": [{"filename": "a.py", "text": "x = 1"}], "top_k": 3, "stream": True},
    **{"response_fields": ["content", "timings/prompt_n"], "return_tokens": True, "stop": ["zz"]},
}

FORM_TYPE = "multipart/form-data; boundary=b"
LINE = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "hi"}}
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="expires_after[anchor]"\r\n\r\ncreated_at\r\n'
    b'--b\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
    + json.dumps(LINE).encode()
    + b"\r\n--b--\r\n"
)
EMBEDDINGS = {
    **{
        "model": "scripted",
        "input": ["a text", "another"],
        "encoding_format": "float",
        "user": "me",
    },
    **{"dimensions": 3, "truncate_prompt_tokens": 5, "prompt_name": "query", "priority": 1},
}
RERANK = {
    **{"query": "a sea", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
    **{"max_tokens_per_doc": 8, "instruction": None, "instruct": None},
}
SCORE = {"text_1": "a", "text_2": ["b", "c"]}

RECORDED: dict[str, list[Any]] = {
    CHAT: [
        CHAT_BODY,
        {**PLAIN_CHAT, "response_format": FORMAT, "prompt_logprobs": 1},
        {**PLAIN_CHAT, "structured_outputs": {"choice": ["a", "b"]}},
    ],
    f"{CHAT}/batch": [{"messages": [PLAIN_CHAT["messages"]] * 2, "max_tokens": 3}],
    f"{CHAT}/input_tokens": [CHAT_BODY],
    f"{CHAT}/render": [CHAT_BODY],
    COMPLETIONS: [COMPLETION, {"prompt": [104, 105], "stream": True, "suffix": "c"}],
    "/infill": [GAP],
    "/completion": [LLAMA_CPP, {**LLAMA_CPP, "stream": True}],
    "/completions": [LLAMA_CPP],
    "/apply-template": [PLAIN_CHAT],
    "/api/chat": [OLLAMA_CHAT, {"model": "scripted", "messages": [], "keep_alive": 1}],
    "/api/generate": [
        {**OLLAMA_TEXT, "system": "Be brief.", "format": SCHEMA, "context": [104, 105]},
        {**OLLAMA_TEXT, "suffix": "b", "raw": True, "logprobs": True, "top_logprobs": 1},
    ],
    "/api/embed": [{"model": "scripted", "input": ["hi", "a"], "truncate": True, "dimensions": 3}],
    "/api/embeddings": [{"model": "scripted", "prompt": "hi"}],
    "/api/show": [{"model": "scripted"}, {"name": "scripted:latest"}],
    "/api/pull": [{"model": "scripted", "stream": False}],
    "/api/copy": [{"source": "scripted", "destination": "twin"}],
    f"{COMPLETIONS}/render": [COMPLETION],
    MESSAGES: [MESSAGE, {"model": "scripted", "max_tokens": 3, "messages": PLAIN_CHAT["messages"]}],
    f"{MESSAGES}/count_tokens": [MESSAGE],
    f"{MESSAGES}/render": [MESSAGE],
    RESPONSES: [RESPONSE, FORMED, {"input": "hi", "store": True, "previous_response_id": None}],
    f"{RESPONSES}/input_tokens": [RESPONSE],
    f"{RESPONSES}/render": [RESPONSE],
    f"{RESPONSES}/resp_1/cancel": [{}],
    GENERATE: [GENERATION, {"token_ids": [1, 2], "sampling_params": {"prompt_logprobs": 1}}],
    "/inference/v1/abort_requests": [{"request_ids": ["r-1", "r-2"]}],
    "/v1/load_lora_adapter": [{"lora_name": "fr", "lora_path": "french", "model": "scripted"}],
    "/v1/unload_lora_adapter": [{"lora_name": "fr"}],
    "/v1/embeddings": [
        EMBEDDINGS,
        {"input": [[104, 105], [106]], "encoding_format": "base64"},
        {"input": "hi", "add_special_tokens": False},
    ],
    "/pooling": [{**EMBEDDINGS, "task": "embed"}, {"input": [104, 105]}],
    **{path: [RERANK] for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    "/v1/score": [SCORE, {"queries": ["a", "b"], "documents": ["c", "d"]}],
    "/score": [{"data_1": "a", "data_2": "b"}],
    "/tokenize": [
        {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True},
        {"content": "hi", "add_special": True, "with_pieces": True},
    ],
    "/detokenize": [{"tokens": [104, 105], "model": "scripted"}],
    FILES: [FORM],
    f"{BATCHES}/batch_1/cancel": [{}],
}
"""Valid bodies by path. A body of bytes is a form. Those of the derender routes and of batches are
missing: `_derenders` and `_batches` make them from answers of other routes."""


@contextmanager
def scripted_gateway() -> Iterator[GatewayProcess]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        encoding = EncodingCard(
            task="embed", max_tokens=512, size=4, normalizes=True, prompts={"query": "q: "}
        )
        card = infill_card(encoding=encoding)
        with ScriptedEngine(address, card=card, max_len=2048) as engine:
            engine.script = lambda generate: text_reply(ANSWER, size=9, marked=True)
            config: dict[str, Any] = {
                "engine": address,
                "log_requests": False,
                "max_n": 8,
                "max_prompts": 8,
            }
            stores: dict[str, Any] = {
                "response_store": f"{folder}/responses.db",
                "file_store": f"{folder}/files.db",
            }
            with GatewayProcess(**config, **stores) as process:
                yield process.await_ready()
                assert "Traceback" not in process.log, process.log[-10_000:]


def recorded(gateway: GatewayProcess) -> list[tuple[str, Any]]:
    """Return valid (path, body) pairs for every POST route of the gateway.

    Raises AssertionError if a route has no pair, or if a body is answered with another status than
    200 and 404. A 404 means that the request names something that does not exist.
    """
    pairs = [(path, body) for path, bodies in RECORDED.items() for body in bodies]
    pairs += [*_derenders(gateway), *_batches(gateway)]
    with closing(_connection(gateway)) as connection:
        for path, body in pairs:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            status, answer = _post(connection, path, data)
            assert status in (200, 403, 404), (path, answer)  # 403: the operator copies models
    assert {_rule(path) for path, _ in pairs} == _posted(gateway)
    return pairs


def _rule(path: str) -> str:
    return path.replace("resp_1", "{response_id}").replace("batch_1", "{batch_id}")


def _posted(gateway: GatewayProcess) -> set[str]:
    """Return the POST routes that the server lists in its OpenAPI document, without those that take
    neither a body nor an id in their path (/sleep, /wake_up)."""
    paths = requests.get(gateway.url + "/openapi.json", timeout=20).json()["paths"]
    posts = {path: methods["post"] for path, methods in paths.items() if "post" in methods}
    return {path for path, post in posts.items() if "requestBody" in post or "{" in path}


def _derenders(gateway: GatewayProcess) -> list[tuple[str, Any]]:
    chat = {"messages": PLAIN_CHAT["messages"], "tools": [TOOL]}
    text = {"prompt": "hi", "max_tokens": 9}
    answers = []
    for path, body in ((CHAT, chat), (COMPLETIONS, text)):
        rendered = gateway.post(f"{path}/render", body).json()
        one = rendered[0] if isinstance(rendered, list) else rendered
        answers.append(gateway.post(GENERATE, one).json())
    chunk = {"request_id": "r", "choices": [{"index": 0, "token_ids": [104]}]}
    streamed = {"stream": True, "chat_request": chat, "generate_chunk": chunk}
    return [
        (f"{CHAT}/derender", {"chat_request": chat, "generate_response": answers[0]}),
        (f"{CHAT}/derender", {**streamed, "prompt_token_ids": [104]}),
        (
            f"{COMPLETIONS}/derender",
            {"completion_request": text, "generate_responses": [answers[1]]},
        ),
    ]


def _batches(gateway: GatewayProcess) -> list[tuple[str, Any]]:
    with closing(_connection(gateway)) as connection:
        file = json.loads(_post(connection, FILES, FORM)[1])["id"]
    fields = {"endpoint": COMPLETIONS, "completion_window": "24h", "metadata": {"a": "b"}}
    expiry = {"anchor": "created_at", "seconds": 3600}
    return [(BATCHES, {"input_file_id": file, **fields, "output_expires_after": expiry})]


def bodies(count: int, seed: int) -> Outcome:
    outcome = Outcome("gateway, from clients")
    with scripted_gateway() as gateway:
        pairs = recorded(gateway)
        shares = [count // NUM_CLIENTS] * NUM_CLIENTS
        with (
            watched(outcome, lambda: _pid(gateway)) as is_warm,
            ThreadPoolExecutor(NUM_CLIENTS) as pool,
        ):
            _ask_all(pool, gateway, pairs, [share // 10 for share in shares], seed, outcome)
            is_warm()
            left = [share - share // 10 for share in shares]
            _ask_all(pool, gateway, pairs, left, seed + NUM_CLIENTS, outcome)
    return outcome


def _ask_all(
    pool: ThreadPoolExecutor,
    gateway: GatewayProcess,
    pairs: list[tuple[str, Any]],
    shares: list[int],
    seed: int,
    outcome: Outcome,
) -> None:
    seeds = range(seed, seed + len(shares))
    for statuses in pool.map(_ask, repeat(gateway), repeat(pairs), shares, seeds):
        outcome.sent += statuses.total()
        refused = sum(count for status, count in statuses.items() if status >= 400)
        outcome.malformed += refused
        outcome.counted += refused
        for status, count in statuses.items():
            outcome.notes[f"answers of {status}"] += count


def _ask(
    gateway: GatewayProcess, pairs: list[tuple[str, Any]], count: int, seed: int
) -> Counter[int]:
    """Send `count` changed bodies over one connection. Return the number of answers by status."""
    chance, statuses = Random(seed), Counter[int]()
    order = chain.from_iterable(chance.sample(pairs, len(pairs)) for _ in cycle([0]))
    with closing(_connection(gateway)) as connection:
        for path, body in islice(order, count):
            data = _mutilated(body, chance)
            status, answer = _post(connection, path, data)
            if status == UNREADY and STARVED in answer:
                gateway.await_ready()
                status, answer = _post(connection, path, data)
            assert status == 200 or 400 <= status < 500, (path, data, status, answer)
            statuses[status] += 1
    return statuses


def _connection(gateway: GatewayProcess) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)


def _mutilated(body: Any, chance: Random) -> bytes:
    if isinstance(body, bytes):
        return damaged(body, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        body = changed(body, chance)
    data = json.dumps(body).encode()
    return damaged(data, chance) if chance.random() < 0.1 else data


def _post(connection: http.client.HTTPConnection, path: str, data: bytes) -> tuple[int, bytes]:
    """Send a request. Return (status, body). Connect again, once, if the server has closed the
    connection."""
    for is_first in (True, False):
        try:
            kind = FORM_TYPE if path == FILES else "application/json"
            connection.request("POST", path, data, {"Content-Type": kind})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            connection.close()
            if not is_first:
                raise
    raise AssertionError


def _pid(gateway: GatewayProcess) -> int:
    return int(requests.get(gateway.url + "/readyz", timeout=20).json()["gateway"]["pid"])
