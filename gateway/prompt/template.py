"""A chat template: compiled once, probed once, rendered for each request.

Only its output shows reliably how a template treats a message. So `TemplateTraits` come from
rendering a few tiny conversations when the template is loaded, not from its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

import jinja2
import msgspec

from gateway.prompt.environment import ChatEnvironment, Now
from gateway.prompt.thinking import ThinkingProfile, thinking_profile
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
"""Exceptions that a template raises for a message that it does not support."""


class TemplateTraits(msgspec.Struct, frozen=True):
    """The form of messages that a template needs.

    parts             content may be a list of parts; otherwise it must be one string
    strings           content may be a string; otherwise it must be a list
    null_content      an assistant message with calls only has the content None; otherwise ""
    string_arguments  a call's arguments are JSON text; otherwise an object
    developer         the role is supported; otherwise it is replaced by `system`
    tools             tools are rendered
    """

    parts: bool = False
    strings: bool = True
    null_content: bool = False
    string_arguments: bool = False
    developer: bool = False
    tools: bool = False


class ParsedTemplate(Protocol):
    """A chat template that is ready to use, in this process or in another one."""

    @property
    def habits(self) -> TemplateTraits: ...

    @property
    def profile(self) -> ThinkingProfile: ...

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
        """Return the prompt. `messages` have the form of `habits`. Raises InvalidRequest, naming
        `param`."""


class TemplateLoader(Protocol):
    """Loads templates from source. Both methods raise ValueError if the source is unusable."""

    def load(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        """Load a template of the model or the operator."""

    def load_foreign(self, source: str, special_tokens: Mapping[str, str]) -> ParsedTemplate:
        """Load a template of a request. Raises Overloaded if too many wait."""


class ChatTemplate:
    """A template in this process, without limits of time and memory. Raises ValueError if `source`
    does not compile.

    special_tokens  the names templates use -> text: bos_token, eos_token, ...
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
    def habits(self) -> TemplateTraits:
        """The form of messages that the template needs."""
        return _habits(self, self._source)

    @cached_property
    def profile(self) -> ThinkingProfile:
        """The thinking options that the template supports."""
        return thinking_profile(self._source)

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
        variables = template_variables(
            messages, tools, documents, add_generation_prompt, kwargs or {}
        )
        try:
            return self.render_variables(variables)
        except RAISED_BY_TEMPLATES as error:
            raise InvalidRequest(cannot_render(str(error)), param=param) from error

    def render_variables(self, variables: Mapping[str, Any]) -> str:
        """Return what the template writes. Raises one of RAISED_BY_TEMPLATES, as a rule."""
        context = self._template.new_context({**self._special_tokens, **variables})
        return "".join(self._template.root_render_func(context))


def template_variables(
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    documents: Sequence[Any] | None,
    add_generation_prompt: bool,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the variables of one rendering, except for the special tokens."""
    return {
        **kwargs,
        "messages": messages,
        "tools": tools or None,
        "documents": documents or None,
        "add_generation_prompt": add_generation_prompt,
    }


def cannot_render(why: str) -> str:
    return f"the model's chat template cannot render these messages: {why}"


_NEEDLE = "n33dle"


def _habits(template: ChatTemplate, source: str) -> TemplateTraits:
    parts = _takes_parts(template)
    null_content, string_arguments = _call_style(template)
    return TemplateTraits(
        parts=parts,
        strings=not parts or _NEEDLE in _tried(template, [{"role": "user", "content": _NEEDLE}]),
        null_content=null_content,
        string_arguments=string_arguments,
        developer="'developer'" in source or '"developer"' in source,
        tools=_writes_tools(template),
    )


def _writes_tools(template: ChatTemplate) -> bool:
    tool = {"type": "function", "function": {"name": _NEEDLE, "parameters": {"type": "object"}}}
    user = [{"role": "user", "content": "?"}]
    return any(
        _NEEDLE in _tried(template, [*system, *user], [tool])
        for system in ([], [{"role": "system", "content": "!"}])
    )


def _tried(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> str:
    """Return the template's output, or an empty string if it raises."""
    try:
        return template.render(messages, tools=tools)
    except InvalidRequest:
        return ""


def _takes_parts(template: ChatTemplate) -> bool:
    """Return whether the template writes a part's text, not the whole list as Python or JSON."""
    part = {"type": "text", "text": _NEEDLE}
    text = _tried(template, [{"role": "user", "content": [part]}])
    return _NEEDLE in text and "'type'" not in text and '"type"' not in text


def _call_style(template: ChatTemplate) -> tuple[bool, bool]:
    """Return the first (null_content, string_arguments) with which arguments are rendered."""
    for string_arguments in (False, True):
        for null_content in (False, True):
            text = _tried(template, _conversation_with_call(null_content, string_arguments))
            if _NEEDLE in text and f"'{_NEEDLE}'" not in text:
                return null_content, string_arguments
    return False, False


def _conversation_with_call(null_content: bool, string_arguments: bool) -> list[Message]:
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
