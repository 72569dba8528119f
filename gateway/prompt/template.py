"""Compiles a chat template and renders it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

import jinja2

from gateway.prompt.environment import ChatEnvironment, Now
from gateway.prompt.probe import RAISED_BY_TEMPLATES, find_traits
from gateway.prompt.thinking import ThinkingProfile, thinking_profile
from gateway.prompt.traits import TemplateTraits
from gateway.prompt.written import WrittenTurns, find_written
from protocol.wire.errors import InvalidRequest

Message = Mapping[str, Any]


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
        """The turns with calls and with reasoning, as the template writes them."""

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
            "tools": tools,
            "documents": documents,
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
        return find_traits(self.render_variables, self._source, self.profile)

    @cached_property
    def profile(self) -> ThinkingProfile:
        return thinking_profile(self._source)

    @cached_property
    def written(self) -> WrittenTurns:
        return find_written(self._rendered_or_empty, self.traits, self.profile)

    def _rendered_or_empty(self, variables: Mapping[str, Any]) -> str:
        try:
            return self.render_variables(variables)
        except RAISED_BY_TEMPLATES:
            return ""

    def _render(self, variables: Mapping[str, Any], param: str) -> str:
        try:
            return self.render_variables(variables)
        except RAISED_BY_TEMPLATES as error:
            raise InvalidRequest.at(param, cannot_render(str(error))) from error

    def render_variables(self, variables: Mapping[str, Any]) -> str:
        """Return the template's output. Errors in it usually raise one of RAISED_BY_TEMPLATES."""
        context = self._template.new_context({**self._special_tokens, **variables})
        return "".join(self._template.root_render_func(context))


def cannot_render(why: str) -> str:
    """Return the message of the error for messages that a template cannot render."""
    return f"the model's chat template cannot render these messages: {why}"
