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

from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import ScriptedEngine, text_reply, thinking_card
from tests.torture.fuzz.outcome import Outcome, watched
from tests.torture.fuzz.values import changed, damaged

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"
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

RECORDED: dict[str, list[Any]] = {
    CHAT: [
        CHAT_BODY,
        {**PLAIN_CHAT, "response_format": FORMAT, "prompt_logprobs": 1},
        {**PLAIN_CHAT, "structured_outputs": {"choice": ["a", "b"]}},
    ],
    f"{CHAT}/batch": [{"messages": [PLAIN_CHAT["messages"]] * 2, "max_tokens": 3}],
    f"{CHAT}/input_tokens": [CHAT_BODY],
    f"{CHAT}/render": [CHAT_BODY],
    COMPLETIONS: [COMPLETION, {"prompt": [104, 105], "stream": True, "suffix": None}],
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
    "/tokenize": [{"prompt": "hi", "add_special_tokens": True, "return_token_strs": True}],
    "/detokenize": [{"tokens": [104, 105], "model": "scripted"}],
}
"""Valid bodies by path. Those of the derender routes are missing: `_derenders` makes them from
answers of other routes."""


@contextmanager
def scripted_gateway() -> Iterator[GatewayProcess]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine.sock"
        with ScriptedEngine(address, card=thinking_card(), max_len=2048) as engine:
            engine.script = lambda generate: text_reply(ANSWER, size=9, marked=True)
            config: dict[str, Any] = {
                "engine": address,
                "log_requests": False,
                "max_n": 8,
                "max_prompts": 8,
            }
            with GatewayProcess(**config, response_store=f"{folder}/responses.db") as process:
                yield process.await_ready()
                assert "Traceback" not in process.log, process.log[-10_000:]


def recorded(gateway: GatewayProcess) -> list[tuple[str, Any]]:
    """Return valid (path, body) pairs for every POST route of the gateway.

    Raises AssertionError if a route has no pair, or if a body is answered with another status than
    200 and 404. A 404 means that the request names something that does not exist.
    """
    pairs = [(path, body) for path, bodies in RECORDED.items() for body in bodies]
    pairs += _derenders(gateway)
    for path, body in pairs:
        answer = gateway.post(path, body)
        assert answer.status_code in (200, 404), (path, answer.text)
    assert {_rule(path) for path, _ in pairs} == _posted(gateway)
    return pairs


def _rule(path: str) -> str:
    return path.replace("resp_1", "{response_id}")


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
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_S)
    with closing(connection):
        for path, body in islice(order, count):
            data = _mutilated(body, chance)
            status, answer = _post(connection, path, data)
            if status == UNREADY and STARVED in answer:
                gateway.await_ready()
                status, answer = _post(connection, path, data)
            assert status == 200 or 400 <= status < 500, (path, data, status, answer)
            statuses[status] += 1
    return statuses


def _mutilated(body: Any, chance: Random) -> bytes:
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        body = changed(body, chance)
    data = json.dumps(body).encode()
    return damaged(data, chance) if chance.random() < 0.1 else data


def _post(connection: http.client.HTTPConnection, path: str, data: bytes) -> tuple[int, bytes]:
    """Send a request. Return (status, body). Connect again, once, if the server has closed the
    connection."""
    for is_first in (True, False):
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            connection.close()
            if not is_first:
                raise
    raise AssertionError


def _pid(gateway: GatewayProcess) -> int:
    return int(requests.get(gateway.url + "/readyz", timeout=20).json()["gateway"]["pid"])
