"""A prompt that is too long, as clients recognise it.

Clients summarise or shorten a conversation if they recognise this error, and end otherwise. Each of
them searches for words or a code, which docs/use/errors.md lists. A client that is installed is
asked itself; of the others, the patterns are written down here as in their sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from engine_core.admission.check_generate import check_request
from protocol.engine.messages import Generate, Limits
from protocol.wire.errors import ErrorInfo, ServingError
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import Reply, ScriptedEngine, scripted_card, text_reply

MAX_LEN = 512
CARD = scripted_card(context_tokens=MAX_LEN)
ENGINE = {"card": CARD, "max_len": MAX_LEN}
WORDS = "word " * 150  # 750 tokens
BYTES = "word " * 5_000  # more than the gateway tokenizes

MESSAGES, CHAT, COMPLETIONS = "/v1/messages", "/v1/chat/completions", "/v1/completions"
RESPONSES, TOKENS = "/v1/responses", "/inference/v1/generate"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"


@pytest.fixture(autouse=True)
def _checks(engine: ScriptedEngine) -> None:
    """Let the scripted engine refuse what a real one refuses."""

    def script(generate: Generate) -> Reply:
        try:
            check_request(generate.prompt.tolist(), generate, CARD, limits(engine))
        except ServingError as error:
            return error.info()
        return text_reply("ok")

    engine.script = script


def limits(engine: ScriptedEngine) -> Limits:
    return Limits(
        max_len=engine.max_len,
        max_slots=8,
        block_tokens=16,
        token_budget=256,
        num_blocks=64,
        prefix_cache=True,
    )


BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    MESSAGES: lambda text: {"max_tokens": 9, "messages": [{"role": "user", "content": text}]},
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}]},
    COMPLETIONS: lambda text: {"prompt": text},
    RESPONSES: lambda text: {"input": text},
    OLLAMA_CHAT: lambda text: {
        "model": "scripted",
        "messages": [{"role": "user", "content": text}],
    },
    OLLAMA_GENERATE: lambda text: {"model": "scripted", "prompt": text},
    TOKENS: lambda text: {"token_ids": list(text.encode()), "sampling_params": {}},
}
OPENAI_PATHS = [path for path in BODIES if path != MESSAGES]


def error_of(gateway: GatewayProcess, path: str, text: str) -> dict[str, Any]:
    answer = gateway.post(path, BODIES[path](text))
    assert answer.status_code == 400
    error = answer.json()["error"]
    return {"message": error} if isinstance(error, str) else error


# ---- words and numbers


@pytest.mark.parametrize("path", OPENAI_PATHS)
def test_most_apis_use_the_words_of_openai(path: str, gateway: GatewayProcess) -> None:
    error = error_of(gateway, path, WORDS)
    found = re.match(
        r"This model's maximum context length is (\d+) tokens\. However, your prompt is too long: "
        r"(\d+) tokens > 512 maximum",
        error["message"],
    )
    assert found is not None
    assert int(found[1]) == MAX_LEN
    assert int(found[2]) >= 750
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


def test_the_messages_api_uses_the_words_of_anthropic(gateway: GatewayProcess) -> None:
    error = error_of(gateway, MESSAGES, WORDS)
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > 512 maximum", error["message"])
    assert found is not None
    assert int(found[1]) >= 750
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    assert error["details"] == {"error_code": "context_length_exceeded"}


@pytest.mark.parametrize("path", [path for path in BODIES if path != TOKENS])
def test_a_text_that_is_not_even_tokenized_has_the_same_words(
    path: str, gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    words = error_of(gateway, path, BYTES)["message"]
    assert engine.generates == []
    found = re.search(r"prompt is too long: about (\d+) tokens > 512 maximum", words)
    assert found is not None, words
    assert int(found[1]) == pytest.approx(len(BYTES) / 4, rel=0.01)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_too_long(gateway: GatewayProcess) -> None:
    overhead = len("<user>\n<assistant>") + 1  # and BOS
    exactly = "w" * (MAX_LEN - overhead)
    words = error_of(gateway, CHAT, exactly)["message"]
    assert words.endswith(
        "length is 512 tokens. However, your prompt is too long: 512 tokens > 511 maximum"
    )
    words = error_of(gateway, MESSAGES, exactly)["message"]
    assert words == "prompt is too long: 512 tokens > 511 maximum"
    assert gateway.post(CHAT, BODIES[CHAT](exactly[1:])).status_code == 200


# ---- clients that are installed


def test_anthropics_client_has_the_words_in_its_message(gateway: GatewayProcess) -> None:
    with (
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as raised,
    ):
        client.messages.create(model="scripted", **BODIES[MESSAGES](WORDS))
    assert raised.value.type == "invalid_request_error"


def test_openais_client_has_the_code(gateway: GatewayProcess) -> None:
    with (
        openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="maximum context length is") as raised,
    ):
        client.chat.completions.create(model="scripted", **BODIES[CHAT](WORDS))
    assert raised.value.code == "context_length_exceeded"


def test_ollamas_client_has_the_words_in_its_error(gateway: GatewayProcess) -> None:
    words = "maximum context length is 512 tokens"
    with ollama.Client(gateway.url) as client, pytest.raises(ollama.ResponseError, match=words):
        client.chat(**BODIES[OLLAMA_CHAT](WORDS))


def test_langchains_openai_model_raises_a_context_overflow(gateway: GatewayProcess) -> None:
    with httpx.Client() as http:
        model = ChatOpenAI(
            model="scripted",
            base_url=gateway.url + "/v1",
            api_key=SecretStr("none"),
            max_retries=0,
            http_client=http,
        )
        with pytest.raises(ContextOverflowError):
            model.invoke(WORDS)


# ---- clients that are not: what their sources search for

ANTHROPIC_PATTERNS = {
    "Claude Code": r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    "langchain-anthropic": r"prompt is too long",
    "pydantic-ai": r"(?i)prompt is too long",
    "DSPy": r"(?i)prompt is too long|too many tokens|context window|context length",
    "litellm": r"(?i)this model's maximum context length is|prompt is too long",
    "opencode": r"(?i)prompt is too long",
}
OPENAI_PATTERNS = {
    "langchain-openai": r"prompt is too long|Input tokens exceed the configured limit",
    "litellm": r"(?i)this model's maximum context length is",
    "opencode": r"(?i)maximum context length is \d+ tokens",
}
OPENAI_CODES = ("Codex", "pydantic-ai", "DSPy", "opencode")
"""Clients that read the code."""


@pytest.mark.parametrize("text", [WORDS, BYTES], ids=["tokens", "bytes"])
@pytest.mark.parametrize("client", ANTHROPIC_PATTERNS)
def test_clients_of_the_messages_api_recognise_it(
    client: str, text: str, gateway: GatewayProcess
) -> None:
    error = error_of(gateway, MESSAGES, text)
    assert error["type"] == "invalid_request_error"
    found = re.search(ANTHROPIC_PATTERNS[client], error["message"])
    assert found is not None
    assert not found.groups() or int(found[1]) > int(found[2])


@pytest.mark.parametrize("text", [WORDS, BYTES], ids=["tokens", "bytes"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_clients_of_openais_apis_recognise_it(
    path: str, text: str, gateway: GatewayProcess
) -> None:
    error = error_of(gateway, path, text)
    for client, pattern in OPENAI_PATTERNS.items():
        assert re.search(pattern, error["message"]), client
    assert error["code"] == "context_length_exceeded", OPENAI_CODES


def test_an_older_engines_error_is_sent_as_it_is(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """An engine that sends no numbers."""
    refusal = ErrorInfo(code="context_length_exceeded", message="too long", param="prompt")
    engine.script = lambda generate: refusal
    assert error_of(gateway, MESSAGES, "hi")["message"] == "too long"
