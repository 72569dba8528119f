"""Chat templates and tokenizers, run in sandbox processes.

Templates of requests have a process of their own, with a short queue, so they cannot delay the
model's own template. A model's tokenizer is tried before it is used: one that is damaged, slow or
large ends the start instead of requests later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.prompt.template import Message, TemplateTraits, cannot_render, template_variables
from gateway.prompt.thinking import ThinkingProfile
from gateway.sandbox.messages import (
    CallFailed,
    LoadTemplate,
    RenderTemplate,
    TemplateLoaded,
    TemplateRendered,
    TryTokenizer,
)
from gateway.sandbox.process import LimitExceeded, SandboxProcess
from protocol.errors import InvalidRequest

FOREIGN_CPU_S = 1.0
"""CPU time of one call for a template of a request. Other such calls wait meanwhile."""
MAX_WAITING = 16
"""Most calls for templates of requests, open or waiting."""
NICE = 5
"""Templates of requests run at a lower priority than the server."""
TRIAL_CPU_S = 60.0
"""A vocabulary of 256,000 tokens is read in a second."""
TRIAL_MEMORY_BYTES = 4 << 30
REMEDY = "fetch the model's files again, or use another model"


class TemplateProcesses:
    """The two sandbox processes of a gateway process. It is a `TemplateLoader`."""

    def __init__(self) -> None:
        self._own = SandboxProcess()
        self._foreign = SandboxProcess(cpu_s=FOREIGN_CPU_S, max_waiting=MAX_WAITING, nice=NICE)

    def start(self) -> None:
        """Start the process of the model's template. The other one starts on its first call."""
        self._own.start()

    def close(self) -> None:
        self._own.close()
        self._foreign.close()

    def load(self, source: str, special_tokens: Mapping[str, str]) -> SandboxedTemplate:
        return SandboxedTemplate(self._own, source, special_tokens)

    def load_foreign(self, source: str, special_tokens: Mapping[str, str]) -> SandboxedTemplate:
        return SandboxedTemplate(self._foreign, source, special_tokens, param="chat_template")


class SandboxedTemplate:
    """A template in a sandbox process. Raises ValueError if it cannot be loaded.

    param  the field at fault if a rendering exceeds its limits; None: the messages
    """

    def __init__(
        self,
        process: SandboxProcess,
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


def trial_process() -> SandboxProcess:
    """Return a process for one trial. It may be started before the tokenizer is known."""
    return SandboxProcess(
        cpu_s=TRIAL_CPU_S, memory_bytes=TRIAL_MEMORY_BYTES, wall_s=4 * TRIAL_CPU_S
    )


def try_tokenizer(tokenizer: bytes, process: SandboxProcess) -> None:
    """Try the bytes of a tokenizer.json, then close the process. Raise ValueError, with a remedy,
    if the tokenizer cannot be used."""
    try:
        reply = process.call(TryTokenizer(tokenizer.decode()))
    except (UnicodeDecodeError, LimitExceeded) as error:
        raise ValueError(_unusable(str(error))) from None
    finally:
        process.close()
    if isinstance(reply, CallFailed):
        raise ValueError(_unusable(reply.message))


def _unusable(why: str) -> str:
    return f"the model's tokenizer cannot be used: {why}; {REMEDY}"
