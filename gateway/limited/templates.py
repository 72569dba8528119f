"""Chat templates, compiled and rendered in limited processes.

The templates of requests have a process of their own, with a short queue: whatever they do, the
model's own template is rendered meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.limited.calls import (
    CallFailed,
    LoadTemplate,
    RenderTemplate,
    TemplateLoaded,
    TemplateRendered,
)
from gateway.limited.process import LimitedProcess, LimitExceeded
from gateway.prompt.template import Message, TemplateTraits, cannot_render, template_variables
from gateway.prompt.thinking import ThinkingProfile
from protocol.errors import InvalidRequest

FOREIGN_CPU_S = 1.0
"""CPU time of one call for a template of a request. Other such calls wait meanwhile."""
MAX_WAITING = 16
"""The most calls for templates of requests that are open or wait."""
NICE = 5
"""Templates of requests run at a lower priority than the server."""


class TemplateProcesses:
    """The two processes of a gateway process; see `gateway.prompt.template.TemplateLoader`."""

    def __init__(self) -> None:
        self._own = LimitedProcess()
        self._foreign = LimitedProcess(cpu_s=FOREIGN_CPU_S, max_waiting=MAX_WAITING, nice=NICE)

    def start(self) -> None:
        """Start the process of the model's template. The other starts when it is needed."""
        self._own.start()

    def close(self) -> None:
        self._own.close()
        self._foreign.close()

    def load(self, source: str, special_tokens: Mapping[str, str]) -> LimitedTemplate:
        return LimitedTemplate(self._own, source, special_tokens)

    def load_foreign(self, source: str, special_tokens: Mapping[str, str]) -> LimitedTemplate:
        return LimitedTemplate(self._foreign, source, special_tokens, param="chat_template")


class LimitedTemplate:
    """A template in another process. Raises ValueError if it cannot be used.

    param  the field at fault if a rendering exceeds its limits; None: the messages
    """

    def __init__(
        self,
        process: LimitedProcess,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        param: str | None = None,
    ) -> None:
        self._process = process
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._param = param
        try:
            reply = process.call(LoadTemplate(source, self._special_tokens))
        except LimitExceeded as error:
            raise ValueError(f"the chat template cannot be loaded: {error}") from None
        if isinstance(reply, CallFailed):
            raise ValueError(reply.message)
        assert isinstance(reply, TemplateLoaded)
        self.habits: TemplateTraits = reply.habits
        self.profile: ThinkingProfile = reply.profile

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
        call = RenderTemplate(self._source, self._special_tokens, variables)
        try:
            reply = self._process.call(call)
        except LimitExceeded as error:
            raise InvalidRequest(cannot_render(str(error)), param=self._param or param) from None
        if isinstance(reply, CallFailed):
            raise InvalidRequest(cannot_render(reply.message), param=param)
        assert isinstance(reply, TemplateRendered)
        return reply.text
