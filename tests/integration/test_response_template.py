"""A checkpoint with a response template, from its files to the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests
import torch

from protocol.engine.model_card import ModelCard
from tests.support.gateway_process import GatewayProcess
from tests.support.http import events_of
from tests.support.scripted_engine import (
    THINKING_TEMPLATE,
    ScriptedEngine,
    TokenReply,
    text_reply,
    thinking_card,
)
from tests.support.tiny_checkpoint import write_tiny_llama
from worker.loading.decoder import load_model

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
DESCRIBED = {
    "fields": {
        "thinking": {"open": "[hm]", "close": "[/hm]"},
        "tool_calls": {
            "open_pattern": r"\[do (?P<name>\w+)\]",
            "close": "[/do]",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<end>"},
    },
}
"""A response template with markers of no known format."""
ANSWER = '[hm]Where?[/hm]I will look.\n[do weather]{"city": "Köln"}[/do]'


def card_of(folder: Path, template: Any) -> ModelCard:
    """Return the card that the worker loads from the files, with a scripted engine's tokenizer."""
    write_tiny_llama(folder)
    settings = {"chat_template": THINKING_TEMPLATE}
    settings |= {} if template is None else {"response_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    card = load_model(folder, dtype=torch.float32, device=torch.device("cpu")).card
    own = thinking_card()
    return msgspec.structs.replace(
        card,
        tokenizer=own.tokenizer,
        vocab_size=own.vocab_size,
        eos_token_ids=own.eos_token_ids,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def engine_with(template: Any, folder: Path) -> ScriptedEngine:
    return ScriptedEngine(
        f"ipc://{folder.parent}/engine.sock",
        script=lambda generate: spoken,
        card=card_of(folder, template),
    )


spoken: TokenReply = text_reply(ANSWER, size=3)


@pytest.fixture
def engine(folder: Path) -> Iterator[ScriptedEngine]:
    with engine_with(DESCRIBED, folder) as engine:
        yield engine


def ask(gateway: GatewayProcess, **body: Any) -> Any:
    message: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    return requests.post(gateway.url + CHAT, json=message | body, timeout=10)


def formats(gateway: GatewayProcess) -> dict[str, Any]:
    (model,) = requests.get(gateway.url + "/v1/models", timeout=5).json()["data"]
    found: dict[str, Any] = model["formats"]
    return found


def test_a_response_template_determines_how_answers_are_parsed(engine: ScriptedEngine) -> None:
    with GatewayProcess(engine=engine.address) as gateway:
        gateway.await_ready()
        assert formats(gateway) == {
            "tools": "hf",
            "reasoning": "hf",
            "why": "tool calls and reasoning: hf, as the checkpoint has a response_template",
        }
        (choice,) = ask(gateway).json()["choices"]
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == ("Where?", "I will look.")
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
        assert choice["finish_reason"] == "tool_calls"
        deltas = [
            event["choices"][0]["delta"]
            for event in events_of(ask(gateway, stream=True).content)
            if event["choices"]
        ]
        fragments = [call for delta in deltas for call in delta.get("tool_calls") or []]
        arguments = "".join(call["function"].get("arguments", "") for call in fragments)
        assert arguments == '{"city": "Köln"}'
        assert "".join(delta.get("content") or "" for delta in deltas) == "I will look."
    assert "formats: tool calls and reasoning: hf" in gateway.log


def test_the_operator_may_choose_another_format_or_the_checkpoints_own(
    engine: ScriptedEngine,
) -> None:
    with GatewayProcess(engine=engine.address, tool_format="hermes") as gateway:
        result = formats(gateway.await_ready())
        assert result["tools"] == "hermes"
        assert "response_template is not used, as the options say" in result["why"]
        assert ask(gateway).json()["choices"][0]["message"]["content"] == ANSWER
    with GatewayProcess(engine=engine.address, tool_format="hf") as gateway:
        assert formats(gateway.await_ready())["reasoning"] == "hf"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "--tool-format hf: the model's checkpoint has no response_template"),
        ({"fields": {"poem": {}}}, "--tool-format hf: response_template, field 'poem': only"),
        ("text", "--tool-format hf: response_template: must be an object"),
    ],
)
def test_a_gateway_without_its_configured_response_template_does_not_start(
    template: Any, said: str, folder: Path
) -> None:
    with (
        engine_with(template, folder) as engine,
        GatewayProcess(engine=engine.address, tool_format="hf") as gateway,
    ):
        assert gateway.wait() != 0
        assert f"the gateway cannot start: {said}" in gateway.log
        assert "Traceback" not in gateway.log


def test_an_invalid_response_template_is_logged_and_the_formats_are_detected(folder: Path) -> None:
    with (
        engine_with({"fields": {"poem": {}}}, folder) as engine,
        GatewayProcess(engine=engine.address) as gateway,
    ):
        result = formats(gateway.await_ready())
        assert (result["tools"], result["reasoning"]) == ("hermes", "qwen3")
        assert "own description cannot be used: response_template, field 'poem'" in result["why"]


def test_the_two_format_options_may_not_contradict_each_other(engine: ScriptedEngine) -> None:
    options: dict[str, Any] = {"tool_format": "hf", "reasoning_format": "qwen3"}
    with GatewayProcess(engine=engine.address, **options) as gateway:
        assert gateway.wait() != 0
    assert "the gateway cannot start: --tool-format hf covers calls and reasoning" in gateway.log
