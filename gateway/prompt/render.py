"""Conversation -> prompt, for every route: chat, render and tokenize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.prompt.content import template_messages
from gateway.prompt.template import ParsedTemplate, TemplateLoader, TemplateTraits
from gateway.prompt.tool_prompt import taught
from gateway.text.tokenizer import Offload, Tokenizer
from protocol.errors import InvalidRequest
from protocol.model_card import ModelCard

_END = "\ue000end of the final message\ue000"
"""Marks the end of the final message. Templates do not change private-use characters."""


NO_TEMPLATE = "this model has no chat template"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConversation:
    """The input of a rendering."""

    #: Decoded JSON, unchecked.
    messages: Sequence[Any]
    #: Path of the messages in the request, for errors.
    param: str = "messages"
    #: Replaces the model's own template.
    template: ParsedTemplate | None = None
    #: If the template does not render tools, describe them in the system message.
    adds_tool_prompt: bool = False
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    #: The result of `kwargs.effective_kwargs`.
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatRenderer:
    """The model's template and tokenizer. Immutable.

    A model without a usable template can still complete text prompts. `text` and `tokens` then
    raise InvalidRequest with the reason.
    """

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, templates: TemplateLoader) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._special_tokens = card.special_tokens
        self._default = self._loaded(card.chat_template)
        self._tool_use = self._default
        if card.tool_use_template is not None:
            self._tool_use = self._loaded(card.tool_use_template)

    def _loaded(self, source: str | None) -> ParsedTemplate | str:
        """Return the template, or the reason why there is none."""
        if source is None:
            return NO_TEMPLATE
        try:
            return self._templates.load(source, self._special_tokens)
        except ValueError as error:
            return str(error)

    def template_for(self, tools: Sequence[Any] | None) -> ParsedTemplate:
        """Return the template of conversations with these tools. Raises InvalidRequest if there is
        none."""
        found = self._tool_use if tools else self._default
        if isinstance(found, str):
            raise InvalidRequest(
                f"{found}; use the completions API with a text prompt", param="messages"
            )
        return found

    @property
    def why_unusable(self) -> str | None:
        """Return the error in the model's template; None if there is none."""
        for found in (self._default, self._tool_use):
            if isinstance(found, str) and found != NO_TEMPLATE:
                return found
        return None

    @property
    def omits_tools(self) -> bool:
        """Whether there is a template that does not render tools."""
        return not isinstance(self._tool_use, str) and not self._tool_use.traits.tools

    def text(self, conversation: PromptConversation) -> str:
        """Return the prompt as text. Raises InvalidRequest."""
        template = conversation.template or self.template_for(conversation.tools)
        messages = template_messages(conversation.messages, template.traits, conversation.param)
        if conversation.adds_tool_prompt and conversation.tools and not template.traits.tools:
            messages = _with_tool_prompt(messages, conversation.tools, template)
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
            param=conversation.param,
        )
        return _up_to_mark(text) if continues else text

    def tokens(
        self, conversation: PromptConversation, *, offload: Offload | None = None
    ) -> list[int]:
        """Return the prompt as token ids."""
        return self.encode(self.text(conversation), offload=offload, param=conversation.param)

    def encode(
        self, text: str, *, offload: Offload | None = None, param: str = "messages"
    ) -> list[int]:
        """Tokenize a prompt. The template writes the special tokens, so none are added."""
        return self._tokenizer.encode(text, False, offload=offload, param=param)

    def compiled(self, source: str) -> ParsedTemplate:
        """Return a request's own template, with this model's special tokens.

        Raises InvalidRequest, and Overloaded if too many others wait.
        """
        try:
            return self._templates.load_foreign(source, self._special_tokens)
        except ValueError as error:
            raise InvalidRequest(str(error), param="chat_template") from None


def _with_tool_prompt(
    messages: Sequence[Any], tools: Sequence[Any], template: ParsedTemplate
) -> list[dict[str, Any]]:
    """Describe `tools` in the messages, as plain text, and return them in the template's form."""
    plain = TemplateTraits(strings=True, parts=False)
    texts = template_messages(messages, plain)
    return template_messages(taught(texts, tools), template.traits)


def _check_continues(conversation: PromptConversation) -> None:
    if conversation.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true",
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
            "the model's chat template omits the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return before
