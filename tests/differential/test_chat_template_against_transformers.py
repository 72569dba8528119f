"""Our rendering of real chat templates, against Hugging Face's own."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.chat.content import template_messages
from gateway.chat.template import ChatTemplate
from tests.support.tokenizers import FAMILY_NAMES, family

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <Ort> & 'Zeit'",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Hi <b>\n"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "語 👍"},
    ],
    "thought": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
        {"role": "user", "content": "2+2?"},
    ],
    "called": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
    ],
}


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompts_are_the_same_to_the_letter(
    name: str,
    conversation: str,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    tools: list[Any] | None,
) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = family(name)[1]["chat_template"]
    ours = ChatTemplate(source, {"bos_token": "<bos>", "eos_token": "<eos>"})
    messages = template_messages(CONVERSATIONS[conversation], ours.habits)
    (theirs,), _ = chat_template_utils.render_jinja_template(
        conversations=[messages],
        chat_template=source,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        bos_token="<bos>",
        eos_token="<eos>",
        **kwargs,
    )
    text = ours.render(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        kwargs=kwargs,
    )
    assert text == theirs
