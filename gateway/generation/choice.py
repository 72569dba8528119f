"""The state and the counters of one choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.formats.events import Finished, OutputDelta, ToolCall, ToolCallEnd
from gateway.generation.reasoning_tokens import ReasoningCounter
from gateway.generation.request import OutputParser, PromptRequest, ToolChoiceCheck
from protocol.messages import Output, TokenLogprobs, Usage
from protocol.sampling import SamplingParams


@dataclass(slots=True)
class Choice:
    """One of the choices of a request."""

    #: Counts over all prompts.
    index: int
    #: Index of its `PromptRequest`.
    prompt_index: int
    prompt_request: PromptRequest
    params: SamplingParams
    parser: OutputParser
    reasoning_counter: ReasoningCounter | None = None
    #: Name of the tool call that started last.
    last_call: str = ""
    #: Names of the complete tool calls, for a ToolChoiceCheck.
    called: list[str] = field(default_factory=list)
    request: int = 0
    is_accepted: bool = False
    is_ended: bool = False
    #: Why it ended by itself; "" if it did not.
    finish: str = ""
    #: As last reported by the engine, with the first tokens and at the end.
    usage: Usage | None = None
    #: When `usage` was reported, since the start of the request; None if with the last output.
    usage_s: float | None = None
    #: When it ended by itself, since the start of the request.
    ended_s: float | None = None
    num_generated: int = 0
    num_cached: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    kv_handle: str = ""

    def count(self, output: Output, num_after_end: int) -> None:
        """Count an output. Its last `num_after_end` tokens came after the end of the answer."""
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
        """Insert a warning before the end if the answer does not follow `tool_choice`."""
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
