"""An inference request that is ready for the engine: its model, its prompts and its options.

Each API turns its requests into a `Job`. `JobRunner` (run.py) sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.context import RequestContext
from gateway.engine.base import RoutedOptions
from gateway.generation.request import PromptRequest, lowered_max_tokens
from gateway.generation.time_limits import TimeLimits
from gateway.model_use import ModelUse
from protocol.engine.grammar import check_grammar
from protocol.wire.errors import InvalidRequest

SESSION_HEADER = "X-Session-ID"
"""Requests with the same value are sent to the same replica. Routers use this name, too."""
MAX_SESSION_CHARS = 256
BACKGROUND_PRIORITY = 100
"""Priority of the requests of batches. Requests that set no priority have 0 and come first."""


def session_of(context: RequestContext) -> str:
    """Return the name of the request's session; "": it has none. Raises InvalidRequest if the name
    is too long."""
    session = context.headers.get(SESSION_HEADER, "")
    if len(session) > MAX_SESSION_CHARS:
        raise InvalidRequest.wrong(
            SESSION_HEADER, f"a text of at most {MAX_SESSION_CHARS} characters", session
        )
    return session


class OptionFields(Protocol):
    """The fields of every API's request body that `RequestOptions.from_body` reads."""

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def timeout_s(self) -> float | None: ...
    @property
    def queue_timeout_s(self) -> float | None: ...
    @property
    def timings(self) -> bool | None: ...
    @property
    def strict_params(self) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request that do not depend on its prompts."""

    #: Requests of one caller share cached prompts only if they have the same salt.
    salt: str = ""
    #: Requests with lower values are served first.
    priority: int = 0
    #: The id in the response, by which the request can be aborted; "" if there is none.
    label: str = ""
    #: Whether the response has `timings`, for which parsing must be measured.
    timings: bool = False
    #: Seconds until the answer must have ended; None if the request does not set it.
    timeout_s: float | None = None
    #: Seconds until the answer must have started; None if the request does not set it.
    queue_timeout_s: float | None = None
    #: Whether `max_tokens` is an error if the context has no room for it.
    is_strict: bool = False

    @classmethod
    def from_body(cls, body: OptionFields, label: str, salt: str | None = None) -> RequestOptions:
        """Return the options in `body`. If `salt` is not None, it replaces the body's salt."""
        return cls(
            salt=body.cache_salt or "" if salt is None else salt,
            priority=body.priority or 0,
            label=label,
            timeout_s=body.timeout_s,
            queue_timeout_s=body.queue_timeout_s,
            timings=bool(body.timings),
            is_strict=bool(body.strict_params),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """An inference request: which model computes which prompts, for which HTTP request, and how."""

    use: ModelUse
    context: RequestContext
    prompts: Sequence[PromptRequest]
    options: RequestOptions

    @property
    def num_choices(self) -> int:
        return sum(len(prompt.choices) for prompt in self.prompts)

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.context.caller.context_limit(self.use.model.limits.max_len)

    @property
    def labels(self) -> list[str]:
        """The names by which the request can be aborted, and by which its timeline is found."""
        names = [name for name in (self.options.label, self.context.request_id) if name]
        return [label for name in names for label in self.context.caller.labels(name)]

    def check(self) -> None:
        """Raise InvalidRequest if the caller's key does not allow the options, if a grammar is too
        large, or if `max_tokens` is too large and the request is strict."""
        num_choices = max(len(prompt.choices) for prompt in self.prompts)
        self.context.caller.check_limits(num_choices, self.options.priority)
        for prompt in self.prompts:
            if prompt.grammar is not None:  # the engine checks it, too, but after a copy
                check_grammar(prompt.grammar)
            if self.options.is_strict:
                self._check_room(prompt)

    def _check_room(self, prompt: PromptRequest) -> None:
        for params in prompt.choices:
            lowered = lowered_max_tokens(prompt, params, self.max_len)
            if lowered is not None:
                raise InvalidRequest.at("max_tokens", f"{lowered.message}; strict_params is true")

    def with_current_adapter(self) -> Job:
        """Return this job with the adapter that has the same name now. Raises UnknownModel if no
        adapter has it any more."""
        return replace(self, use=self.use.with_current_adapter())

    def routed_options(self, limits: TimeLimits) -> RoutedOptions:
        """Return the options with which all choices are sent to the engine."""
        context, options = self.context, self.options
        priority = options.priority
        return {
            "namespace": context.caller.namespace(options.salt),
            "priority": max(priority, BACKGROUND_PRIORITY) if context.is_background else priority,
            "labels": self.labels,
            "account": context.caller.account,
            "session": session_of(context),
            "timeout_s": limits.timeout_s,
            "queue_timeout_s": limits.queue_timeout_s,
            **self.use.adapter_options,
        }
