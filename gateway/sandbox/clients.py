"""Runs chat templates and tokenizers in sandbox processes.

Templates that requests contain have a process of their own, with a short queue, so they cannot
delay the model's own template. That template has a pool of two, so that large conversations do not
delay small ones. A model's tokenizer is tried before it is used, so that a damaged,
slow or huge tokenizer makes the start fail instead of later requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from gateway.prompt.template import ParsedTemplate, cannot_render
from gateway.prompt.thinking import ThinkingProfile
from gateway.prompt.traits import TemplateTraits
from gateway.prompt.written import WrittenTurns
from gateway.sandbox.messages import (
    CallFailed,
    LoadTemplate,
    ProbeTemplate,
    RenderTemplate,
    TemplateLoaded,
    TemplateProbed,
    TemplateRendered,
    TryTokenizer,
)
from gateway.sandbox.process import LimitExceeded, SandboxPool, SandboxProcess
from protocol.wire.errors import InvalidRequest

FOREIGN_CPU_S = 1.0
"""CPU time limit of one call for a request's own template. Only one such call runs at a time."""
MAX_WAITING = 16
"""Maximum number of open calls for requests' own templates. Further requests are refused."""
NICE = 5
"""Added to the niceness of the process for requests' own templates, so the server has precedence.
"""
TRIAL_CPU_S = 60.0
"""CPU time limit of a tokenizer's trial. Reading a vocabulary of 256,000 tokens takes a second."""
TRIAL_MEMORY_BYTES = 4 << 30
REMEDY = "fetch the model's files again, or use another model"


class TemplateProcesses:
    """The `TemplateLoader` of a gateway process, with up to three sandbox processes."""

    def __init__(self) -> None:
        self._own = SandboxPool()
        self._foreign = SandboxProcess(cpu_s=FOREIGN_CPU_S, max_waiting=MAX_WAITING, nice=NICE)

    def start(self) -> None:
        """Start a process for the model's template. The others start when they are needed."""
        self._own.start()

    def close(self) -> None:
        self._own.close()
        self._foreign.close()

    def load(self, source: str, special_tokens: Mapping[str, str]) -> SandboxedTemplate:
        return SandboxedTemplate(self._own, source, special_tokens)

    def load_foreign(self, source: str, special_tokens: Mapping[str, str]) -> SandboxedTemplate:
        return SandboxedTemplate(self._foreign, source, special_tokens, param="chat_template")


class SandboxedTemplate(ParsedTemplate):
    """A template in a sandbox process.

    param  the field to name in the error if a rendering exceeds its limits; None: the messages

    The constructor raises ValueError if the template cannot be loaded.
    """

    def __init__(
        self,
        process: SandboxProcess | SandboxPool,
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
        self._loaded = reply

    @property
    def traits(self) -> TemplateTraits:
        return self._loaded.traits

    @property
    def profile(self) -> ThinkingProfile:
        return self._loaded.profile

    @cached_property
    def written(self) -> WrittenTurns:
        """The turns that the template writes; none if it exceeds the limits of one call."""
        try:
            reply = self._process.call(ProbeTemplate(self._source, self._special_tokens))
        except LimitExceeded:
            return WrittenTurns()
        return reply.written if isinstance(reply, TemplateProbed) else WrittenTurns()

    def _render(self, variables: Mapping[str, Any], param: str) -> str:
        call = RenderTemplate(self._source, self._special_tokens, dict(variables))
        try:
            reply = self._process.call(call)
        except LimitExceeded as error:
            raise InvalidRequest.at(self._param or param, cannot_render(str(error))) from None
        if isinstance(reply, CallFailed):
            raise InvalidRequest.at(param, cannot_render(reply.message))
        assert isinstance(reply, TemplateRendered)
        return reply.text


def trial_process() -> SandboxProcess:
    """Return a process for the trial of one tokenizer. It may be started in advance."""
    return SandboxProcess(
        cpu_s=TRIAL_CPU_S, memory_bytes=TRIAL_MEMORY_BYTES, wall_s=4 * TRIAL_CPU_S
    )


def try_tokenizer(tokenizer: bytes, process: SandboxProcess) -> None:
    """Try a tokenizer in `process`, then close the process.

    tokenizer  the bytes of a tokenizer.json

    Raises ValueError, with a remedy, if the tokenizer cannot be used.
    """
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
