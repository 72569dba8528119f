"""A client that does not read delays no other. If it reads late, it receives fewer and longer
deltas. If it reads nothing, it is disconnected after the send timeout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from protocol.engine.messages import Generate
from tests.support.anthropic import anthropic_events, message_of
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, events_of, exchange, read_body, read_head, send_post
from tests.support.responses import typed_events
from tests.support.scripted_engine import (
    ScriptedEngine,
    TokenReply,
    ids_of,
    scripted_logprob,
    text_reply,
)
from tests.support.scripted_engine import text_of as words_of

COMPLETIONS = "/v1/completions"
LONG = [1] * 800_000
"""Tokens of a text that exceeds the kernel's buffers. Each is a control character, which is six
bytes of JSON."""
LONG_IDS = [200] * 1_500_000
"""Tokens that exceed the buffers as ids, which are four bytes of JSON each."""
LONG_CHANCES = [1] * 12_000
"""Fewer tokens, which exceed the buffers with twenty logprobs each."""
LATER = "Told word by word — to whoever reads. " * 15
WORDS = "Others are told every word of it. " * 20


def answer(generate: Generate) -> TokenReply:
    """Reply to "endless" with a long text and then nothing, and to "much" with a long text and then
    tokens one by one."""
    asked = words_of(generate.prompt.tolist())
    if "endless" in asked:
        return TokenReply([LONG, *[[]] * 100_000], "length", None)
    if "much" in asked:
        return TokenReply(
            [_long(generate, asked), *[[token] for token in ids_of(LATER)]], "length", None
        )
    return text_reply(WORDS)


def _long(generate: Generate, asked: str) -> list[int]:
    if generate.params.logprobs is not None:
        return LONG_CHANCES
    return LONG_IDS if "ids" in asked else LONG


# ---- slow readers


@dataclass(frozen=True)
class ReceivedStream:
    """The parts of a stream that the tests check.

    bits    text or token ids of each delta, in order
    tokens  number of tokens according to the stream's usage
    """

    bits: list[Any]
    tokens: int


def _choices_of(events: list[Any]) -> list[Any]:
    assert [event for event in events if "error" in event] == []
    return [choice for event in events for choice in event["choices"]]


def _heard_chat(data: bytes) -> ReceivedStream:
    events = events_of(data)
    deltas = [choice["delta"] for choice in _choices_of(events)]
    bits = [delta["content"] for delta in deltas if delta.get("content")]
    return ReceivedStream(bits, events[-1]["usage"]["completion_tokens"])


def _heard_completion(data: bytes) -> ReceivedStream:
    events = events_of(data)
    choices = _choices_of(events)
    bits = [choice["text"] for choice in choices if choice["text"]]
    result = [choice["logprobs"]["token_logprobs"] for choice in choices if choice["logprobs"]]
    assert [chance for chances in result for chance in chances] == [
        scripted_logprob(token, 1).logprob for token in ids_of("".join(bits))
    ]
    return ReceivedStream(bits, events[-1]["usage"]["completion_tokens"])


def _heard_message(data: bytes) -> ReceivedStream:
    events = anthropic_events(data)
    bits = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    message = message_of(events)
    assert [block["text"] for block in message["content"]] == ["".join(bits)]
    return ReceivedStream(bits, message["usage"]["output_tokens"])


def _heard_response(data: bytes) -> ReceivedStream:
    events = typed_events(data)
    bits = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    response = events[-1]["response"]
    (message,) = response["output"]
    assert [part["text"] for part in message["content"]] == ["".join(bits)]
    return ReceivedStream(bits, response["usage"]["output_tokens"])


def _heard_ids(data: bytes) -> ReceivedStream:
    events = events_of(data)
    choices = _choices_of(events)
    bits = [choice["token_ids"] for choice in choices if choice["token_ids"]]
    return ReceivedStream(bits, events[-1]["usage"]["completion_tokens"])


MUCH = [{"role": "user", "content": "much"}]
MOST = 1 << 22
GATEWAY = {"send_timeout_s": 600.0}
"""A late reader may be much later on a busy machine."""
ENGINE = {"script": lambda generate: answer(generate), "max_len": MOST + 100}
USAGE = {"include_usage": True}
STREAMS: dict[str, tuple[str, dict[str, Any], Callable[[bytes], ReceivedStream]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MUCH, "max_tokens": MOST, "stream_options": USAGE},
        _heard_chat,
    ),
    "completion with logprobs": (
        COMPLETIONS,
        {"prompt": "much", "max_tokens": MOST, "stream_options": USAGE, "logprobs": 20},
        _heard_completion,
    ),
    "message": ("/v1/messages", {"messages": MUCH, "max_tokens": MOST}, _heard_message),
    "response": ("/v1/responses", {"input": "much", "max_output_tokens": MOST}, _heard_response),
    "ids": (
        "/inference/v1/generate",
        {
            "token_ids": ids_of("much ids"),
            "sampling_params": {"max_tokens": MOST},
            "stream_options": USAGE,
        },
        _heard_ids,
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_late_reader_gets_all_that_came_meanwhile_in_one_delta(
    name: str, engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    """Once a later request has been answered, the gateway has received the whole first answer."""
    path, body, heard_in = STREAMS[name]
    with connect(gateway.port, rcvbuf=4096) as client, client.makefile("rb") as file:
        before = len(engine.generates)
        send_post(client, path, {"model": "scripted", "stream": True, **body})
        engine.await_generates(before + 1)
        engine.await_idle()
        assert _short(gateway) == WORDS
        status, headers = read_head(file)
        assert status == 200
        received = heard_in(read_body(file, headers))
    long = {"ids": LONG_IDS, "completion with logprobs": LONG_CHANCES}.get(name, LONG)
    assert received.tokens == len(long) + len(ids_of(LATER))
    if name == "ids":
        assert received.bits == [long, ids_of(LATER)]
    else:
        assert received.bits == ["\x01" * len(long), LATER]


def _short(gateway: GatewayProcess) -> str:
    body = {"prompt": "short", "stream": True, "max_tokens": 4000}
    status, _, data = exchange(gateway.port, COMPLETIONS, body)
    assert status == 200
    return "".join(event["choices"][0]["text"] for event in events_of(data))


# ---- who never reads


def test_a_client_that_reads_nothing_is_cut_off_and_delays_no_other(engine: ScriptedEngine) -> None:
    """Only one delta waits for this client, so it is disconnected by the timeout, not because too
    many bytes wait."""
    with (
        GatewayProcess(engine=engine.address, send_timeout_s=1.0) as gateway,
        connect(gateway.await_ready().port, rcvbuf=4096) as client,
    ):
        before = len(engine.generates)
        send_post(client, COMPLETIONS, {"prompt": "endless", "stream": True, "max_tokens": 1 << 24})
        engine.await_generates(before + 1, timeout_s=20)
        assert _short(gateway) == WORDS
        engine.await_abort(engine.generates[before].request, timeout_s=30)
        with client.makefile("rb") as file:
            assert read_head(file)[0] == 200
            rest = b""
            with contextlib.suppress(ConnectionResetError):
                rest = file.read()
        assert not rest.endswith(b"0\r\n\r\n")
