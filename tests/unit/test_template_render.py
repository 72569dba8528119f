"""Conversations become prompts, with a real tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from gateway.prompt.render import ChatRenderer, PromptConversation
from gateway.text.tokenizer import Tokenizer
from protocol.wire.errors import ContextTooLong, InvalidRequest
from tests.support.templates import UnlimitedTemplates
from tests.support.tokenizers import (
    FAMILIES,
    card_of,
    chat_template,
    smollm2_tokenizer_json,
    tokenizer_of,
)

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


@cache
def renderer(template: str | None = CHATML) -> ChatRenderer:
    card = card_of(
        smollm2_tokenizer_json(),
        chat_template=template,
        special_tokens={"bos_token": "<|endoftext|>"},
    )
    return ChatRenderer(card, tokenizer_of("smollm2"), UnlimitedTemplates())


def text(messages: Any = HELLO, template: str | None = CHATML, **options: Any) -> str:
    return renderer(template).text(PromptConversation(messages=messages, **options))


def test_a_conversation_with_tools_has_the_template_for_them() -> None:
    card = card_of(
        smollm2_tokenizer_json(),
        chat_template="{% if enable_thinking %}{% endif %}plain",
        tool_use_template="{% for tool in tools %}{{ tool.function.name }}{% endfor %}",
    )
    both = ChatRenderer(card, tokenizer_of("smollm2"), UnlimitedTemplates())
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert both.text(PromptConversation(messages=HELLO)) == "plain"
    assert both.text(PromptConversation(messages=HELLO, tools=[])) == "plain"
    assert both.text(PromptConversation(messages=HELLO, tools=tools)) == "now"
    assert not both.omits_tools
    assert both.template_for(None).profile.has_switch
    assert not both.template_for(tools).profile.has_switch


def test_a_model_may_have_a_template_for_tools_alone() -> None:
    card = card_of(b"", tool_use_template="{{ tools | length }}")
    only = ChatRenderer(card, tokenizer_of("smollm2"), UnlimitedTemplates())
    assert only.text(PromptConversation(messages=HELLO, tools=[{}])) == "1"
    with pytest.raises(InvalidRequest, match="no chat template"):
        only.text(PromptConversation(messages=HELLO))


def test_a_conversation_becomes_ids_with_special_tokens_written_by_the_template_only() -> None:
    ids = renderer().tokens(PromptConversation(messages=HELLO))
    assert ids[:2] == [0, 1]
    assert (ids.count(0), ids.count(1), ids.count(2)) == (1, 2, 1)
    assert text() == "<|endoftext|><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_bos_is_not_doubled_where_the_tokenizer_would_add_one() -> None:
    bos = FAMILIES["llama3_1"].bos or ""
    card = card_of(b"", chat_template=chat_template("llama3_1"), special_tokens={"bos_token": bos})
    tokenizer = tokenizer_of("llama3_1")
    ids = ChatRenderer(card, tokenizer, UnlimitedTemplates()).tokens(
        PromptConversation(messages=HELLO)
    )
    assert ids.count(tokenizer.token_id(bos) or 0) == 1


def test_an_answer_can_go_on_where_the_final_message_ends_blanks_and_all() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hello there, "}]
    going_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected = "<|im_start|>assistant\nHello there, "
    assert text(messages, **going_on).endswith(expected)
    parts = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hello there, "}]}]
    assert text(parts, **going_on).endswith(expected)
    assert text([*HELLO, {"role": "assistant", "content": None}], **going_on).endswith("nt\n")


def test_an_answer_either_goes_on_or_begins() -> None:
    with pytest.raises(InvalidRequest) as caught:
        text(continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_template_that_omits_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="omits the final message"):
        text(template="x", add_generation_prompt=False, continue_final_message=True)


def test_kwargs_tools_and_documents_reach_the_template() -> None:
    template = "{{ enable_thinking }} {{ tools[0].function.name }} {{ documents[0].title }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = {"kwargs": {"enable_thinking": False}, "tools": tools, "documents": [{"title": "d"}]}
    assert text(template=template, **options) == "False f d"


@pytest.mark.parametrize(
    ("template", "said"), [(None, "has no chat template"), ("{% if %}", "does not compile")]
)
def test_a_model_without_a_usable_template_raises_an_error(template: str | None, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{said}.*use the completions API") as caught:
        text(template=template)
    assert caught.value.param == "messages"


def test_a_prompt_that_is_too_long_names_the_messages() -> None:
    card = card_of(smollm2_tokenizer_json(), chat_template=CHATML, context_tokens=8)
    renderer = ChatRenderer(card, Tokenizer(card), UnlimitedTemplates())
    with pytest.raises(ContextTooLong, match=r"messages is [\d,]+ bytes long") as caught:
        renderer.tokens(PromptConversation(messages=[{"role": "user", "content": "x" * 1000}]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
    ],
)
def test_a_message_with_calls_cannot_be_continued(last: dict[str, Any]) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest) as caught:
        text([*HELLO, last], template=template, **options)
    assert caught.value.param == "continue_final_message"
