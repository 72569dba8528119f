"""Conversation -> prompt: the one road for chat, render and tokenize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.chat.content import template_messages
from gateway.chat.template import ChatTemplate
from gateway.text.tokenizer import Offload, Tokenizer
from protocol.errors import InvalidRequest
from protocol.model_card import ModelCard

_END = "\ue000end of the final message\ue000"
"""Marks where the answer goes on; private-use characters, which no template touches."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What is rendered.

    messages  as JSON gave them, unchecked
    kwargs    the result of `kwargs.effective_kwargs`
    """

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatRenderer:
    """The model's template and tokenizer, together. Made once and never changed.

    A model without a template, or with one that cannot be compiled, still completes text: `text`
    and `tokens` then raise InvalidRequest, saying so.
    """

    def __init__(self, card: ModelCard, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._missing = "this model has no chat template"
        if card.chat_template is not None:
            try:
                self._template = ChatTemplate(card.chat_template, card.special_tokens)
            except ValueError as error:
                self._missing = str(error)

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequest(
                f"{self._missing}; use the completions API with a prompt", param="messages"
            )
        return self._template

    def text(self, conversation: Conversation) -> str:
        """The prompt as text. Raises InvalidRequest."""
        template = self.template
        messages = template_messages(conversation.messages, template.habits)
        continues = conversation.continue_final_message
        if continues:
            _check_continues(conversation)
            messages[-1] = _marked(messages[-1])
        text = template.render(
            messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            kwargs=conversation.kwargs,
        )
        return _up_to_mark(text) if continues else text

    def tokens(self, conversation: Conversation, *, offload: Offload | None = None) -> list[int]:
        """The prompt as ids. The template writes the special tokens, so none are added."""
        return self._tokenizer.encode(
            self.text(conversation), False, offload=offload, param="messages"
        )


def _check_continues(conversation: Conversation) -> None:
    if conversation.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true: "
            "an answer either goes on or begins",
            param="continue_final_message",
        )


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        if not content:
            content = [{"type": "text", "text": ""}]
        last = {**content[-1], "text": content[-1]["text"] + _END}
        return {**message, "content": [*content[:-1], last]}
    return {**message, "content": (content or "") + _END}


def _up_to_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END)
    if not mark:
        raise InvalidRequest(
            "the model's chat template leaves the final message out, so it cannot be continued",
            param="continue_final_message",
        )
    return before
