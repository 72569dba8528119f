"""Compiles a chat template, finds the form of messages that it needs, and renders it.

A template's source does not show reliably in which form the template needs messages. So when a
template is loaded, a few tiny conversations are rendered, and its `TemplateTraits` are derived from
the output. Only `TemplateTraits.developer` is read from the source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

import jinja2
import msgspec

from gateway.prompt.environment import ChatEnvironment, Now
from gateway.prompt.thinking import ThinkingProfile, thinking_profile
from gateway.prompt.written import WrittenTurns, find_written
from protocol.errors import InvalidRequest

Message = Mapping[str, Any]

RAISED_BY_TEMPLATES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a template may raise for messages that it does not support."""


class TemplateTraits(msgspec.Struct, frozen=True):
    """The form of messages that a template needs."""

    #: Content may be a list of parts; otherwise it must be one string.
    parts: bool = False
    #: Content may be a string; otherwise it must be a list of parts.
    strings: bool = True
    #: An assistant message that only has tool calls has the content None; otherwise "".
    null_content: bool = False
    #: The arguments of a tool call are JSON text; otherwise they are an object.
    string_arguments: bool = False
    #: The role `developer` is supported; otherwise it is replaced by `system`.
    developer: bool = False
    #: The template renders tools.
    tools: bool = False


class ParsedTemplate(ABC):
    """A chat template that is ready to use, in this process or in another one."""

    @property
    @abstractmethod
    def traits(self) -> TemplateTraits:
        """The form of messages that the template needs."""

    @property
    @abstractmethod
    def profile(self) -> ThinkingProfile:
        """The thinking options that the template supports."""

    @property
    @abstractmethod
    def written(self) -> WrittenTurns:
        """What the template writes for earlier calls and reasoning."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> str:
        """Return the prompt.

        messages  in the form that `traits` requires
        kwargs    further variables of the template
        param     path of the messages in the request, for errors

        Raises InvalidRequest if the template cannot render the messages.
        """
        variables = {
            **(kwargs or {}),
            "messages": messages,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._render(variables, param)

    @abstractmethod
    def _render(self, variables: Mapping[str, Any], param: str) -> str:
        """Return the template's output. `variables` are all except the special tokens.

        Raises InvalidRequest, naming `param`.
        """


class TemplateLoader(Protocol):
    """Loads templates from source. Both methods raise ValueError if the source is unusable."""

    def load(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        """Load a template that the model or the operator provides."""

    def load_foreign(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        """Load a template that a request contains. Raises Overloaded if too many calls wait."""


class ChatTemplate(ParsedTemplate):
    """A template that is rendered in this process, without limits on time and memory.

    special_tokens  name of a variable (bos_token, eos_token, ...) -> text of the special token

    The constructor raises ValueError if `source` does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Now = datetime.now,
    ) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = ChatEnvironment(now).from_string(source)
        except (jinja2.TemplateSyntaxError, RecursionError, SyntaxError, ValueError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    @cached_property
    def traits(self) -> TemplateTraits:
        return _find_traits(self, self._source)

    @cached_property
    def profile(self) -> ThinkingProfile:
        return thinking_profile(self._source)

    @cached_property
    def written(self) -> WrittenTurns:
        return find_written(self._rendered_or_empty, self.profile)

    def _rendered_or_empty(self, variables: Mapping[str, Any]) -> str:
        try:
            return self.render_variables(variables)
        except RAISED_BY_TEMPLATES:
            return ""

    def _render(self, variables: Mapping[str, Any], param: str) -> str:
        try:
            return self.render_variables(variables)
        except RAISED_BY_TEMPLATES as error:
            raise InvalidRequest(cannot_render(str(error)), param=param) from error

    def render_variables(self, variables: Mapping[str, Any]) -> str:
        """Return the template's output. Errors in it usually raise one of RAISED_BY_TEMPLATES."""
        context = self._template.new_context({**self._special_tokens, **variables})
        return "".join(self._template.root_render_func(context))


def cannot_render(why: str) -> str:
    """Return the message of the error for messages that a template cannot render."""
    return f"the model's chat template cannot render these messages: {why}"


_NEEDLE = "n33dle"
"""A text that occurs in no template. If it is in the output, the template has rendered it."""


def _find_traits(template: ChatTemplate, source: str) -> TemplateTraits:
    """Derive the traits of a template from its output for tiny conversations."""
    parts = _accepts_parts(template)
    null_content, string_arguments = _call_form(template)
    plain = [{"role": "user", "content": _NEEDLE}]
    return TemplateTraits(
        parts=parts,
        strings=not parts or _NEEDLE in _output(template, plain),
        null_content=null_content,
        string_arguments=string_arguments,
        developer="'developer'" in source or '"developer"' in source,
        tools=_renders_tools(template),
    )


def _renders_tools(template: ChatTemplate) -> bool:
    """Return whether the template renders tools, with or without a system message."""
    tool = {"type": "function", "function": {"name": _NEEDLE, "parameters": {"type": "object"}}}
    user = [{"role": "user", "content": "?"}]
    return any(
        _NEEDLE in _output(template, [*system, *user], [tool])
        for system in ([], [{"role": "system", "content": "!"}])
    )


def _output(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> str:
    """Return the template's output, or "" if the template cannot render the messages."""
    try:
        return template.render(messages, tools=tools)
    except InvalidRequest:
        return ""


def _accepts_parts(template: ChatTemplate) -> bool:
    """Return whether the template writes the text of a part.

    A template that does not support parts writes the whole list as Python or JSON, if anything.
    """
    part = {"type": "text", "text": _NEEDLE}
    text = _output(template, [{"role": "user", "content": [part]}])
    return _NEEDLE in text and "'type'" not in text and '"type"' not in text


def _call_form(template: ChatTemplate) -> tuple[bool, bool]:
    """Return the first (null_content, string_arguments) for which the template renders the
    arguments of a tool call.

    If none works, the result is (False, False).
    """
    for string_arguments in (False, True):
        for null_content in (False, True):
            text = _output(template, _conversation_with_call(null_content, string_arguments))
            if _NEEDLE in text and f"'{_NEEDLE}'" not in text:
                return null_content, string_arguments
    return False, False


def _conversation_with_call(null_content: bool, string_arguments: bool) -> list[Message]:
    """Return a conversation with a tool call of this form. The name of its argument is _NEEDLE."""
    arguments: Any = f'{{"{_NEEDLE}": 1}}' if string_arguments else {_NEEDLE: 1}
    function = {"name": "find", "arguments": arguments}
    return [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": None if null_content else "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call00000", "name": "find", "content": "!"},
    ]
