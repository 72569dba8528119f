"""Requests with absurd numbers, sizes, depths or headers are refused at once and leave nothing
behind."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, exchange, read_head
from tests.support.scripted_engine import ScriptedEngine

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES, RESPONSES, TOKENIZE = "/v1/messages", "/v1/responses", "/tokenize"
HI = [{"role": "user", "content": "hi"}]
TRIES = 5
"""Maximum number of measurements. The best one counts, as other programs use the machine too."""
MOST_TIMES = 10
"""The refusal of an absurd body must take less than this many times as long as the refusal of a
harmless body of the same length."""
FLAT_KIB = 48 << 10
"""Most memory, in KiB, that the gateway process may gain by the attacks of a test. It gains some,
because the process is new and its memory pools keep pages."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    address = f"ipc://{tmp_path_factory.mktemp('engine') / 'engine.sock'}"
    with (
        ScriptedEngine(address, max_len=1 << 20) as engine,
        GatewayProcess(engine=engine.address) as gateway,
    ):
        yield gateway.await_ready()
        assert not engine.generates, "one of them was asked of the engine"


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": HI, **fields}


def text(**fields: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"prompt": "x", **fields}


def nested(levels: int, field: str, around: str = "{}") -> tuple[str, bytes]:
    """Return the path and the body of a chat request whose `field` is nested 2 * `levels` deep.

    The body is put together as text, because json.dumps cannot write very deep nesting.

    around   the JSON of the field, in which the nested object replaces "{}"
    """
    deep = '{"properties":{"x":' * levels + "{}" + "}}" * levels
    messages = '{"messages":[{"role":"user","content":"hi"}],'
    return CHAT, f'{messages}"{field}":{around.replace("{}", deep)}}}'.encode()


HARMLESS = b'{"messages": [{"role": "user", "content": "hi"}], "n": -1}'
HUGE = {str(i): 1 for i in range(1_000_000)}
ATTACKS: dict[str, tuple[str, Any]] = {
    "a billion choices": chat(n=10**9),
    "a billion best": text(best_of=10**9),
    "negative choices": chat(n=-1),
    "a million logprobs": chat(logprobs=True, top_logprobs=10**6),
    "all logprobs": text(logprobs=-1),
    "many logprobs": text(logprobs=10**6),
    "all logprobs of the prompt": text(prompt_logprobs=-1),
    "many logprobs of the prompt": chat(prompt_logprobs=10**6),
    "an answer of -1": chat(max_tokens=-1),
    "an answer without end": chat(max_tokens=10**18),
    "a number beyond all": chat(max_tokens=10**4000),
    "hot": chat(temperature=1e308),
    "not a number": (CHAT, b'{"messages": [], "temperature": NaN}'),
    "infinite": (CHAT, b'{"temperature": 1e999, "messages": []}'),
    "penalty": chat(repetition_penalty=1e308),
    "a million biases": chat(logit_bias=HUGE),
    "an infinite bias": (CHAT, b'{"logit_bias": {"1": 1e999}, "messages": []}'),
    "500 stop strings": chat(stop=["x" * 8] * 500),
    "a million stop strings": chat(stop=["x"] * 1_000_000),
    "a long stop string": chat(stop="x" * 1_000_000),
    "many stop tokens": chat(stop_token_ids=list(range(100_000))),
    "many bad words": chat(bad_words=["x"] * 10_000),
    "10,000 messages": (CHAT, {"messages": HI * 10_000}),
    "a million parts": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 400_000}]},
    ),
    "many tools": chat(tools=[{"type": "function", "function": {"name": "f"}}] * 200_000),
    "many prompts": (COMPLETIONS, {"prompt": ["x"] * 100_000}),
    "a priority beyond all": chat(priority=10**30),
    "deep": (CHAT, b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    "deep and unknown": (CHAT, b'{"messages":[],"x":' + b"[" * 1_000_000),
    "deep objects": (CHAT, b'{"tools":' + b'{"a":' * 10_000),
    "a deep schema": nested(
        5000,
        "response_format",
        '{"type":"json_schema","json_schema":{"name":"x","schema":{}}}',
    ),
    "a deep tool": nested(
        200, "tools", '[{"type":"function","function":{"name":"f","parameters":{}}}]'
    ),
    "deep template arguments": nested(500, "chat_template_kwargs"),
    "a long name": chat(model="x" * 1_000_000),
    "reserved template arguments": chat(chat_template_kwargs={"tokenize": True}),
    "a template": chat(chat_template="{% for x in range(10**9) %}{% endfor %}"),
    "a long salt": chat(cache_salt="x" * 1_000_000),
    "no JSON": (CHAT, b"\x00" * 1_000_000),
    "a body beyond the limit": (CHAT, b" " * (17 << 20)),
    "generate: a billion choices": (
        GENERATE,
        {"token_ids": [1], "sampling_params": {"n": 10**9}},
    ),
    "generate: ids beyond all": (GENERATE, {"token_ids": [10**30], "sampling_params": {}}),
    "generate: negative ids": (GENERATE, {"token_ids": [-1], "sampling_params": {}}),
    "messages: an answer of -1": (MESSAGES, {"model": "x", "messages": HI, "max_tokens": -1}),
    "responses: many items": (RESPONSES, {"input": HI * 100_000}),
    "responses: a long id": (RESPONSES, {"input": "x", "previous_response_id": "x" * 1_000_000}),
    "tokenize: deep": (TOKENIZE, b'{"messages":' + b"[" * 10_000),
}


def as_bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_absurd_request_is_refused_at_once(gateway: GatewayProcess, attack: str):
    path, body = ATTACKS[attack]
    data = as_bytes(body)
    harmless = HARMLESS.ljust(len(data))
    ratio = math.inf
    for _ in range(TRIES):
        absurd_s = seconds_to_refuse(gateway, path, data)
        ratio = min(ratio, absurd_s / seconds_to_refuse(gateway, CHAT, harmless))
        if ratio < MOST_TIMES:
            return
    raise AssertionError(f"{ratio:.1f} times a harmless body of {len(data):,} bytes")


def seconds_to_refuse(gateway: GatewayProcess, path: str, data: bytes) -> float:
    began = time.perf_counter()
    status, _, result = exchange(gateway.port, path, data)
    assert 400 <= status < 500, result
    assert "error" in json.loads(result)
    return time.perf_counter() - began


def rss_kib(gateway: GatewayProcess) -> int:
    pid = requests.get(gateway.url + "/readyz", timeout=5).json()["gateway"]["pid"]
    (line,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line
    ]
    return int(line.split()[1])


def test_absurd_requests_leave_no_memory_behind(gateway: GatewayProcess):
    bodies = [(path, as_bytes(body)) for path, body in ATTACKS.values()]
    for path, data in bodies:  # pools are filled once
        exchange(gateway.port, path, data)
    before = rss_kib(gateway)
    for _ in range(3):
        for path, data in bodies:
            exchange(gateway.port, path, data)
    assert rss_kib(gateway) - before < FLAT_KIB


@pytest.mark.parametrize(
    ("head", "statuses"),
    [
        (b"GET /" + b"x" * (64 << 20) + b" HTTP/1.1\r\n", {400, 414}),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (64 << 20), {400, 431}),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200_000, {400, 431}),
        (b"GET / HTTP/1.1\r\n" + b"X" * (1 << 20) + b": y\r\n\r\n", {400, 431}),
    ],
    ids=["line", "header", "headers", "name"],
)
def test_heads_without_end_are_cut_off(gateway: GatewayProcess, head: bytes, statuses: set[int]):
    """The gateway reads only the beginning of each head."""
    before = rss_kib(gateway)
    with connect(gateway.port) as client, client.makefile("rb") as file:
        try:
            client.sendall(head)
            assert read_head(file)[0] in statuses
        except ConnectionError:
            pass  # it was not read to its end
    assert rss_kib(gateway) - before < FLAT_KIB
    assert requests.get(gateway.url + "/livez", timeout=5).status_code == 200


def test_a_body_larger_than_it_may_be_is_refused_before_it_is_sent(gateway: GatewayProcess):
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 67108864\r\n\r\n"
        )
        status, headers = read_head(file)
    assert (status, headers["connection"]) == (413, "close")
