"""A tool call inside the thinking is only a draft if a grammar keeps the answer from ending
there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.openai.prepare import Preparation
from gateway.api.openai.requests import ChatBody
from gateway.formats.choice_parser import ParserFactory
from tests.support.scripted_engine import thinking_card
from tests.support.served import served

MODEL = served(thinking_card())
FUNCTION = {"name": "now", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("fields", "drafts"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, True),
        ({"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]}, True),
    ],
)
def test_a_call_in_the_thinking_of_an_answer_with_a_grammar_is_a_draft(
    fields: dict[str, Any], drafts: bool
) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    said = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools} | fields
    body = msgspec.convert(said, ChatBody)
    preparation = Preparation(body, MODEL)
    readers = preparation.prompt_request(preparation.prompt(body.messages)).parser_factory
    assert isinstance(readers, ParserFactory)
    answer = readers.answer
    assert answer.format.format.reasoning.drafts_calls is drafts
