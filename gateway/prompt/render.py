"""Renders a conversation to a prompt, for all routes: chat, render and tokenize."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gateway.images.marks import MarkedImages, marked_images
from gateway.images.model_images import NO_IMAGES, ModelImages, PromptImages
from gateway.images.reader import ImageTimes
from gateway.prompt.content import REASONING_MEMBERS, TEXT_PARTS, checked_turns
from gateway.prompt.fit import (
    describes_tools,
    fitted_list,
    fitted_messages,
    fitted_tools,
    template_messages,
)
from gateway.prompt.kwargs import ThinkingFields, effective_kwargs
from gateway.prompt.omissions import marked
from gateway.prompt.template import ParsedTemplate, TemplateLoader
from gateway.prompt.traits import TemplateTraits
from gateway.prompt.written import WrittenTurns
from gateway.text.tokenizer import Offload, Tokenizer
from protocol.engine.model_card import ModelCard
from protocol.wire.errors import InvalidRequest

_END = "\ue000end of the final message\ue000"
"""A text that marks the end of the final message in the template's output. It contains private-use
characters, which templates do not change."""
_NO_CONTENT: tuple[Any, ...] = ("", None, [], [{"type": "text", "text": ""}])


NO_TEMPLATE = "this model has no chat template"
NOT_FOR_CHATS = (
    "this model's chat template does not render user messages, so it cannot be used for chats"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConversation:
    """A conversation, and the options by which it is rendered to a prompt."""

    #: The messages as decoded JSON, unchecked.
    messages: Sequence[Any]
    #: Path of the messages in the request, for errors.
    param: str = "messages"
    #: The request's own template; None: the model's template is used.
    template: ParsedTemplate | None = None
    #: The name of the tool format by which answers are parsed for calls; None: they are not parsed.
    tool_format: str | None = None
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    #: The template's other variables: the result of `kwargs.effective_kwargs`.
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the prompt ends with the start of the assistant's next message.
    add_generation_prompt: bool = True
    #: Whether the prompt ends with the final message, so that the model continues it.
    continue_final_message: bool = False
    #: The text that stands for an image in the messages; "": the conversation has none.
    image_mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """A request's template options and the operator's defaults, as passed to `effective_kwargs`."""

    thinking: ThinkingFields
    kwargs: Mapping[str, Any] | None
    defaults: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered and tokenized conversation."""

    text: str
    ids: list[int]
    #: The arguments that the chat template received.
    kwargs: dict[str, Any]
    #: Seconds that the template took; the rest of the time went to the tokenizer.
    template_s: float = 0.0
    images: PromptImages = NO_IMAGES


class ChatRenderer:
    """Renders conversations with the model's templates and tokenizes the prompts.

    A model without a usable template can still complete text prompts. For such a model, `text` and
    `tokens` raise InvalidRequest with the reason.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        templates: TemplateLoader,
        images: ModelImages | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._images = ModelImages(card, tokenizer, None) if images is None else images
        self._templates = templates
        self._special_tokens = card.special_tokens
        self._default = self._loaded(card.chat_template)
        self._tool_use = self._default
        if card.tool_use_template is not None:
            self._tool_use = self._loaded(card.tool_use_template)

    @property
    def image_refusal(self) -> str:
        """Why images are refused; "": the model reads them."""
        return self._images.refusal

    def _loaded(self, source: str | None) -> ParsedTemplate | str:
        """Return the template, or the reason why it cannot be used."""
        if source is None:
            return NO_TEMPLATE
        try:
            return self._templates.load(source, self._special_tokens)
        except ValueError as error:
            return str(error)

    def template_for(self, tools: Sequence[Any] | None) -> ParsedTemplate:
        """Return the model's template for conversations with or without tools. Raises
        InvalidRequest if the model has no usable template."""
        found = self._tool_use if tools else self._default
        if isinstance(found, str):
            raise InvalidRequest.at(
                "messages", f"{found}; use the completions API with a text prompt"
            )
        return found

    @property
    def why_unusable(self) -> str | None:
        """The error in the model's template; None if it has no template or a usable one."""
        for found in (self._default, self._tool_use):
            if isinstance(found, str) and found != NO_TEMPLATE:
                return found
        return None

    @property
    def written(self) -> WrittenTurns:
        """The turns that the model's templates write for calls and reasoning. If there is a
        template for conversations with tools, it decides for calls."""
        default, tool_use = (
            WrittenTurns() if isinstance(found, str) else found.written
            for found in (self._default, self._tool_use)
        )
        reasoning = default.reasoning or tool_use.reasoning
        return msgspec.structs.replace(tool_use, reasoning=reasoning)

    @property
    def omits_tools(self) -> bool:
        """Whether the model has a usable template and this template does not render tools."""
        return not isinstance(self._tool_use, str) and not self._tool_use.traits.tools

    def prompt(
        self,
        conversation: PromptConversation,
        options: TemplateOptions,
        *,
        offload: Offload | None = None,
    ) -> RenderedPrompt:
        """Render a conversation with the effective kwargs of `options`, and tokenize the prompt.

        offload  runs the tokenizer in a thread

        Raises InvalidRequest if an option is invalid, or if the conversation cannot be rendered or
        encoded, and ContextTooLong if the text is too long.
        """
        kwargs = self.kwargs(options, conversation.template, conversation.tools)
        conversation = replace(conversation, kwargs=kwargs)
        marks = None
        if _may_have_images(conversation.messages):
            marks = marked_images(
                conversation.messages, conversation.param, reads_parts=self._images.has_encoder
            )
        found = NO_IMAGES
        if marks is not None:
            self._images.check(marks.sources)
            if not self._images.refusal:
                return self._with_images(conversation, marks, offload)
            conversation = replace(conversation, messages=marks.without_images())
            found = PromptImages(left_out=[source.kind_at for source in marks.sources])
        started_at = time.monotonic()
        text = self.text(conversation)
        template_s = time.monotonic() - started_at
        ids = self._encode(text, conversation.param, offload)
        return RenderedPrompt(text, ids, kwargs, template_s, found)

    def _with_images(
        self, conversation: PromptConversation, marks: MarkedImages, offload: Offload | None
    ) -> RenderedPrompt:
        """Render and tokenize a conversation that has images, as `prompt` does."""
        images, times = self._images, ImageTimes()
        # What the template refuses is refused before the images are processed.
        marker = images.prompter.marker
        guarded = replace(
            conversation,
            messages=marks.guarded(marks.messages, marker),
            tools=marks.guarded(conversation.tools, marker),
            documents=marks.guarded(conversation.documents, marker),
            kwargs=marks.guarded(conversation.kwargs, marker),
            image_mark=marks.mark,
        )
        started_at = time.monotonic()
        written = self.text(guarded)
        template_s = time.monotonic() - started_at
        contents = images.read(marks.sources, times)
        template = conversation.template or self.template_for(conversation.tools)
        try:
            placed = images.placed(written, contents, marks, template.traits.image_text)
            ids = self._encode(placed.text, conversation.param, offload)
            digests = [each.digest for each in contents]
            attachments = placed.attachments(ids, images.pad_id, digests)
        except ValueError as error:
            raise InvalidRequest.at(conversation.param, str(error)) from None
        found = PromptImages(attachments, contents, times)
        return RenderedPrompt(placed.text, ids, dict(conversation.kwargs), template_s, found)

    def kwargs(
        self, options: TemplateOptions, own: ParsedTemplate | None, tools: Sequence[Any] | None
    ) -> dict[str, Any]:
        """Return the effective kwargs of a conversation with `tools`.

        own  the request's own template; None: the model's template is used
        """
        profile = (own or self.template_for(tools)).profile
        return effective_kwargs(options.thinking, options.kwargs, options.defaults, profile)

    def text(self, conversation: PromptConversation) -> str:
        """Return the prompt as text. Raises InvalidRequest if it cannot be rendered."""
        template = conversation.template or self.template_for(conversation.tools)
        traits, tools = template.traits, conversation.tools
        tool_format = conversation.tool_format
        param = conversation.param
        if not traits.renders_users:
            raise InvalidRequest.at(param, NOT_FOR_CHATS)
        messages = template_messages(
            conversation.messages,
            traits,
            tools,
            tool_format=tool_format,
            image_mark=conversation.image_mark,
            param=param,
        )
        if traits.omits_texts:
            # With --tool-format none, the operator leaves out tools that are not rendered.
            shown = tools if traits.tools or describes_tools(traits, tool_format) else None
            marks = marked(checked_turns(conversation.messages, param), shown, param)
            fitted = fitted_messages(marks.turns, traits, marks.tools, tool_format=tool_format)
            marks.check(_rendered(template, fitted, marks.tools, conversation))
        continues = conversation.continue_final_message
        if continues:
            _check_continues(conversation, messages[-1])
            messages[-1] = _with_end_mark(messages[-1], traits)
        text = _rendered(template, messages, tools, conversation)
        return _up_to_end_mark(text) if continues else text

    def tokens(
        self, conversation: PromptConversation, *, offload: Offload | None = None
    ) -> list[int]:
        """Return the prompt as token ids. Raises InvalidRequest if it cannot be rendered or
        encoded, and ContextTooLong if its text is too long.

        offload  runs the tokenizer in a thread
        """
        return self._encode(self.text(conversation), conversation.param, offload)

    def _encode(self, text: str, param: str, offload: Offload | None) -> list[int]:
        """Return the token ids of a rendered prompt. The tokenizer adds no special tokens, because
        the template has written them."""
        return self._tokenizer.encode(text, False, offload=offload, param=param)

    def compiled(self, source: str) -> ParsedTemplate:
        """Return the template that a request contains, with this model's special tokens.

        Raises InvalidRequest if it does not compile. Raises Overloaded if too many other templates
        are waiting to be compiled or rendered.
        """
        try:
            return self._templates.load_foreign(source, self._special_tokens)
        except ValueError as error:
            raise InvalidRequest.at("chat_template", str(error)) from None


def _may_have_images(messages: Sequence[Any]) -> bool:
    """Return whether a message has a content part that is no text."""
    contents = [each.get("content") for each in messages if isinstance(each, Mapping)]
    return any(
        not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _rendered(
    template: ParsedTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    conversation: PromptConversation,
) -> str:
    """Return the template's output for these messages and tools, and for the options of the
    conversation."""
    traits = template.traits
    passed = None if describes_tools(traits, conversation.tool_format) else tools
    return template.render(
        messages,
        tools=fitted_tools(passed, traits),
        documents=fitted_list(conversation.documents, traits),
        add_generation_prompt=conversation.add_generation_prompt,
        kwargs=conversation.kwargs,
        param=conversation.param,
    )


def _check_continues(conversation: PromptConversation, last: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if the options contradict each other, or if the text of the last
    message, in the template's form, is not the end of the prompt."""
    if conversation.add_generation_prompt:
        raise InvalidRequest.at(
            "continue_final_message", "cannot be true if add_generation_prompt is true"
        )
    if last.get("tool_calls") or isinstance(last.get("content"), Mapping):
        raise InvalidRequest.at(
            "continue_final_message", "a message with tool calls, or a tool result, has no open end"
        )


def _with_end_mark(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    """Return a message with the end mark after its content. A message with reasoning alone was cut
    inside the reasoning, so the mark follows that, if the template writes it as a member."""
    content = message["content"]
    thoughts = {name: message[name] + _END for name in REASONING_MEMBERS if message.get(name)}
    if thoughts and traits.reasoning != "omitted" and content in _NO_CONTENT:
        return {**message, **thoughts}
    if not isinstance(content, list):
        return {**message, "content": (content or "") + _END}
    last = content[-1] if content and "text" in content[-1] else {"type": "text", "text": ""}
    before = content[:-1] if content and content[-1] is last else content
    return {**message, "content": [*before, {**last, "text": last["text"] + _END}]}


def _up_to_end_mark(text: str) -> str:
    """Return the prompt up to the end mark. Raises InvalidRequest if the mark is missing."""
    before, mark, _ = text.rpartition(_END)
    if not mark:
        raise InvalidRequest.at(
            "continue_final_message",
            "the model's chat template omits the final message, so it cannot be continued",
        )
    return before
