"""The prompts of one HTTP request, and the state of each choice.

Every route that generates tokens creates `PromptRequest`s. `ChoiceGroup` sends them to the engine
and keeps one `Choice` for each answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from gateway.formats.events import Finished, OutputDelta, OutputWarning, ToolCall, ToolCallEnd
from gateway.formats.reasoning_tokens import ReasoningCounter
from gateway.images.model_images import NO_IMAGES, PromptImages
from protocol.engine.encoding import EncodeInputs
from protocol.engine.grammar import Grammar
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output, Usage
from protocol.engine.sampling import SamplingParams

LOWERED = "max_tokens_lowered"
"""Code of the warning that the context has no room for `max_tokens` tokens of answer."""
NOT_CALLED = "tool_choice_not_followed"
"""Code of the warning that an answer does not follow the request's `tool_choice`."""


class OutputParser(Protocol):
    """Parses the output of one choice."""

    @property
    def may_stop(self) -> bool:
        """Whether any token may end the choice: the request has stop strings, or it allows only one
        tool call."""

    def push(self, output: Output) -> OutputDelta:
        """Return the events and the tokens of `output`; none after the choice's end."""


class OutputParserFactory(Protocol):
    """Creates the output parsers of a prompt's choices."""

    def new(self) -> OutputParser:
        """Return the parser of one choice."""


class MeasuredParser:
    """Wraps a parser and measures the time that it takes. It reads the clock twice for each output,
    so it is used only for requests with `timings`."""

    __slots__ = ("_inner", "spent_s")

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        #: Time spent in the parser so far.
        self.spent_s = 0.0

    @property
    def may_stop(self) -> bool:
        return self._inner.may_stop

    def push(self, output: Output) -> OutputDelta:
        started_at = time.perf_counter()
        try:
            return self._inner.push(output)
        finally:
            self.spent_s += time.perf_counter() - started_at


class ToolChoiceCheck(msgspec.Struct, frozen=True):
    """Checks that an answer calls a tool, as the request's `tool_choice` requires."""

    #: The tool that the answer must call; None: any tool.
    name: str | None = None

    def unmet(self, called: Sequence[str]) -> OutputWarning | None:
        """Return a warning if an answer that called the tools `called` does not follow
        `tool_choice`, otherwise None."""
        if self.name is None and not called:
            return OutputWarning(NOT_CALLED, "a tool call was required, and the model made none")
        if self.name is not None and set(called) != {self.name}:
            return OutputWarning(NOT_CALLED, f"the model did not call only {self.name!r}")
        return None


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt, and the parameters of each of its choices."""

    prompt_ids: list[int]
    #: The sampling parameters of each choice.
    choices: list[SamplingParams]
    parser_factory: OutputParserFactory
    #: Creates a choice's counter of reasoning tokens; None if they cannot be counted.
    new_reasoning_counter: Callable[[], ReasoningCounter] | None = None
    #: Checks the answer's tool calls. If they do not follow `tool_choice`, a warning is added.
    tool_choice_check: ToolChoiceCheck | None = None
    #: The grammar that the engine enforces; None: the answer may be any text.
    grammar: Grammar | None = None
    #: If not 0, the engine only computes the prompt and keeps its K/V for this many requests. The
    #: answer has a handle and no tokens.
    kv_readers: int = 0
    #: The handle of kept K/V from which the engine continues; "": the engine computes the prompt.
    kv_handle: str = ""
    #: The inputs of a request that encodes; their tokens are `prompt_ids`. None: it generates.
    encode: EncodeInputs | None = None
    images: PromptImages = NO_IMAGES


def lowered_max_tokens(
    prompt_request: PromptRequest, params: SamplingParams, max_len: int
) -> OutputWarning | None:
    """Return a warning if the context has no room for `max_tokens` tokens of answer. Return None
    otherwise, and for a prompt that leaves no room for any answer, which the engine refuses.

    Many clients send the same `max_tokens` to every model, so a large number is no error.

    max_len  most tokens of prompt and answer together
    """
    room = max_len - len(prompt_request.prompt_ids)
    has_answer = prompt_request.encode is None and not prompt_request.kv_readers
    if params.max_tokens is None or not has_answer or not 0 < room < params.max_tokens:
        return None
    return OutputWarning(
        LOWERED,
        f"the answer can have at most {room:,} tokens, not the {params.max_tokens:,} of the "
        f"request: the prompt has {len(prompt_request.prompt_ids):,} tokens, and the context "
        f"{max_len:,}",
    )


@dataclass(slots=True)
class Choice:
    """The state and the counters of one choice."""

    #: Number of the choice in the HTTP request, from 0 over all prompts.
    index: int
    #: Index of the choice's `PromptRequest`.
    prompt_index: int
    prompt_request: PromptRequest
    params: SamplingParams
    parser: OutputParser
    reasoning_counter: ReasoningCounter | None = None
    #: Sent with the end of the answer; None: there is nothing to warn of.
    warning: OutputWarning | None = None
    #: Name of the tool call that started last. Only set if there is a ToolChoiceCheck.
    last_call: str = ""
    #: Names of the tools in complete calls. Only filled if there is a ToolChoiceCheck.
    called: list[str] = field(default_factory=list)
    #: Number of the choice's request in the engine; 0 before it was sent.
    request: int = 0
    is_accepted: bool = False
    is_ended: bool = False
    #: The finish reason; "" until the choice ends, and also after the gateway has aborted it.
    finish: str = ""
    #: The usage that the engine reported last: with the first tokens, and again at the end.
    usage: Usage | None = None
    #: Seconds from the start of the HTTP request to the report of `usage`; None if there was no
    #: report, or if it came with the last output.
    usage_s: float | None = None
    #: Seconds from the start of the HTTP request until the choice finished; None if it has not, or
    #: if it failed.
    ended_s: float | None = None
    num_generated: int = 0
    #: Prompt tokens found in the prefix cache.
    num_cached: int = 0
    num_drafts: int = 0
    #: Draft tokens that the engine accepted.
    num_accepted: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    #: The handle of the prompt's K/V, if the engine keeps it; otherwise "".
    kv_handle: str = ""

    def count(self, output: Output, num_after_end: int) -> None:
        """Add `output` to the counters, except its last `num_after_end` tokens. The engine
        generated those tokens after the end of the answer, before it received the abort."""
        if output.tokens:
            tokens = output.tokens[: len(output.tokens) - num_after_end]
            self.num_generated += len(tokens)
            if self.reasoning_counter is not None:
                self.reasoning_counter.push(tokens)
        if output.usage is not None:
            self.usage = output.usage
            # Tokens that a prefill engine computed for this request were not cached.
            self.num_cached = output.usage.cached_tokens - output.usage.fetched_tokens
            self.num_drafts = output.usage.draft_tokens
            self.num_accepted = output.usage.accepted_tokens
        self.kv_handle = output.kv_handle
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs

    def warn_if_unmet(self, check: ToolChoiceCheck, delta: OutputDelta) -> None:
        """Record the tool calls in `delta`. If `delta` ends the choice and `check` fails, insert a
        warning before the last event of `delta`. A choice that was cut off or aborted gets no
        warning."""
        for event in delta.events:
            if isinstance(event, ToolCall):
                self.last_call = event.name
            elif isinstance(event, ToolCallEnd):
                self.called.append(self.last_call)
        last = delta.events[-1]
        if isinstance(last, Finished) and last.reason in ("stop", "tool_calls"):
            warning = check.unmet(self.called)
            if warning is not None:
                delta.events.insert(-1, warning)
