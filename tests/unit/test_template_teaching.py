"""If a model's template does not render tools, the system message describes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.formats.model_format import ModelOutputFormat
from gateway.prompt.render import ChatRenderer, PromptConversation
from gateway.text.tokenizer import Tokenizer
from protocol.engine.model_card import ModelCard
from protocol.wire.errors import InvalidRequest
from tests.support.scripted_engine import scripted_card, thinking_card
from tests.support.templates import UnlimitedTemplates

PLAIN = scripted_card()
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Time?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "12:00"},
]


def rendered(messages: Any, card: ModelCard = PLAIN, **options: Any) -> str:
    renderer = ChatRenderer(card, Tokenizer(card), UnlimitedTemplates())
    return renderer.text(PromptConversation(messages=messages, **options))


def test_tools_are_described_in_the_system_message() -> None:
    text = rendered(HISTORY, tools=TOOLS, tool_format="hermes")
    system = text[text.index("<system>") : text.index("<user>")]
    assert system.startswith("<system>Be brief.\n\n# Tools")
    described = system[system.index("<tools>\n") + 8 : system.index("\n</tools>")]
    assert json.loads(described) == TOOLS[0]
    text = rendered(HISTORY[1:2], tools=TOOLS, tool_format="hermes")
    assert "<system># Tools" in text


def test_calls_and_results_in_the_history_become_text() -> None:
    text = rendered(HISTORY, tools=TOOLS, tool_format="hermes")
    call = '<tool_call>\n{"name": "now", "arguments": {"zone":"é"}}\n</tool_call>'
    assert f"<assistant>{call}\n" in text
    assert "<user><tool_response>\n12:00\n</tool_response>" in text


def test_no_tool_prompt_without_tools_or_if_the_template_shows_them() -> None:
    assert "# Tools" not in rendered(HISTORY[:2], tools=None, tool_format="hermes")
    assert "# Tools" not in rendered(HISTORY[:2], tools=TOOLS, tool_format=None)
    card = thinking_card()
    assert "# Tools" not in rendered(HISTORY[:2], card, tools=TOOLS, tool_format="hermes")
    assert "<tool>" in rendered(HISTORY[:2], card, tools=TOOLS, tool_format="hermes")


def test_errors_name_the_clients_own_message() -> None:
    broken = [*HISTORY[:3], {"role": "tool", "tool_call_id": "2", "content": "x"}]
    with pytest.raises(InvalidRequest) as caught:
        rendered(broken, tools=TOOLS, tool_format="hermes")
    assert caught.value.param == "messages[3].tool_call_id"


def test_a_model_without_a_format_of_its_own_is_read_as_it_was_taught() -> None:
    for card, tools in ((PLAIN, "hermes"), (scripted_card(chat_template=None), None)):
        tokenizer = Tokenizer(card)
        teachable = ChatRenderer(card, tokenizer, UnlimitedTemplates()).omits_tools
        reading = ModelOutputFormat(card, tokenizer, teachable=teachable)
        assert reading.tools == tools
        assert ("in words" in reading.why) is teachable
