"""Scenarios of the operator's options and log lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.gateway_process import GatewayProcess
from tests.support.scenarios import COLOGNE, WITH_TOOLS, answers, whole
from tests.support.scripted_engine import ScriptedEngine, prompt_of


def test_the_formats_and_the_reasons_for_them_are_logged(gateway: GatewayProcess) -> None:
    (model,) = requests.get(gateway.url + "/v1/models", timeout=5).json()["data"]
    formats = model["formats"]
    assert (formats["tools"], formats["reasoning"]) == ("hermes", "qwen3")
    assert "the chat template writes <tool_call>" in formats["why"]


def test_the_operator_chooses_template_formats_and_defaults(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{{ enable_thinking }} <think>{{ messages[0].content }}")
    options: dict[str, Any] = {
        "chat_template": str(template),
        "tool_format": "none",
        "reasoning_format": "none",
        "default_chat_template_kwargs": '{"thinking": false}',
    }
    answers(engine, "<think>text</think>" + COLOGNE)
    with GatewayProcess(engine=engine.address, **options) as own:
        own.await_ready()
        (model,) = requests.get(own.url + "/v1/models", timeout=5).json()["data"]
        why = "tool calls: none (set by --tool-format); reasoning: none (set by --reasoning-format)"
        assert model["formats"] == {"tools": None, "reasoning": None, "why": why}
        content = whole(own, WITH_TOOLS)["choices"][0]["message"]["content"]
        assert content == "<think>text</think>" + COLOGNE
        assert prompt_of(engine) == "False <think>hi"
    assert f"formats: {why}" in own.log


def test_a_format_whose_control_tokens_the_model_lacks_ends_the_start(
    engine: ScriptedEngine,
) -> None:
    with GatewayProcess(engine=engine.address, tool_format="lfm2") as wrong:
        assert wrong.wait() != 0
    assert (
        "the gateway cannot start: --tool-format lfm2: neither the vocabulary nor the chat "
        "template of scripted has <|tool_call_start|>" in wrong.log
    )


def test_a_format_whose_markers_are_ordinary_text_may_be_named_for_any_model(
    engine: ScriptedEngine,
) -> None:
    with GatewayProcess(engine=engine.address, tool_format="minimax_m2") as own:
        own.await_ready()
    assert (
        "formats: tool calls: minimax_m2 (set by --tool-format); auto detects tool calls: hermes"
        in own.log
    )


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("tool_format", "hermez", "there is no tool format 'hermez'; there are "),
        ("chat_template", "/nowhere/at.all", "--chat-template /nowhere/at.all: "),
        ("default_chat_template_kwargs", '{"tools": 1}', "--default-chat-template-kwargs: "),
    ],
)
def test_a_wrong_option_is_one_line_at_the_start(
    option: str, value: str, said: str, engine: ScriptedEngine
) -> None:
    options: dict[str, Any] = {option: value}
    with GatewayProcess(engine=engine.address, **options) as wrong:
        assert wrong.wait() != 0
    assert f"the gateway cannot start: {said}" in wrong.log
    assert "Traceback" not in wrong.log
