"""Chat templates of real models are chosen and rendered as in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.prompt.fit import template_messages
from gateway.prompt.render import PromptConversation
from gateway.prompt.template import ChatTemplate
from protocol.wire.errors import InvalidRequest
from tests.support.scripted_engine import byte_tokenizer
from tests.support.served import served
from tests.support.tokenizers import FAMILIES, chat_template
from worker.startup.card import text_card

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


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_prompt_is_rendered_exactly_as_in_transformers(
    name: str,
    conversation: str,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    tools: list[Any] | None,
) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = chat_template(name)
    ours = ChatTemplate(source, {"bos_token": "<bos>", "eos_token": "<eos>"})
    messages = template_messages(CONVERSATIONS[conversation], ours.traits)
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
        messages, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs
    )
    assert text == theirs


NAMED = {
    "default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "tool_use": "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{% endfor %}",
}
"""Name -> template of a model with two templates."""


def _in_config(folder: Path, names: Sequence[str]) -> None:
    several = [{"name": name, "template": NAMED[name]} for name in names]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))


def _in_files(folder: Path, names: Sequence[str]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "not used"}))
    (folder / "additional_chat_templates").mkdir()
    for name in names:
        own = "chat_template.jinja" if name == "default" else None
        (folder / (own or f"additional_chat_templates/{name}.jinja")).write_text(NAMED[name])


@pytest.mark.parametrize("write", [_in_config, _in_files])
@pytest.mark.parametrize("names", [("default",), ("tool_use",), ("default", "tool_use")])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_template_is_chosen_as_in_transformers(
    tmp_path: Path,
    write: Callable[[Path, Sequence[str]], None],
    names: Sequence[str],
    tools: list[Any] | None,
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    write(tmp_path, names)
    messages = CONVERSATIONS["plain"]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    try:
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    except ValueError:
        expected = None
    renderer = served(text_card(tmp_path)).renderer
    try:
        text = renderer.text(
            PromptConversation(messages=messages, tools=tools, add_generation_prompt=False)
        )
    except InvalidRequest:
        text = None
    assert text == expected
