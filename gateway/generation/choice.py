"""One of the answers to a request: how far it is, and what has been counted of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.formats.events import Finished, OutputDelta, ToolCall, ToolCallEnd
from gateway.generation.reasoning_tokens import ThinkingMeter
from gateway.generation.request import OutputParser, PromptRequest, ToolChoiceCheck
from protocol.messages import Output, TokenLogprobs, Usage
from protocol.sampling import SamplingParams


@dataclass(slots=True)
class Choice:
    """One of the answers. `index` counts over all prompts, `prompt_index` is its ask's place.

    finish   why it ended by itself; "" if it did not
    usage    as last told
    told_s   when that was, in seconds of the journal; None: with the engine's last word
    ended_s  when it ended by itself
    """

    index: int
    prompt_index: int
    ask: PromptRequest
    params: SamplingParams
    reader: OutputParser
    meter: ThinkingMeter | None = None
    begun: str = ""  # the name of the last call
    called: list[str] = field(default_factory=list)  # names of complete calls; kept for a demand
    request: int = 0
    is_accepted: bool = False
    is_ended: bool = False
    finish: str = ""
    usage: Usage | None = None
    told_s: float | None = None
    ended_s: float | None = None
    num_generated: int = 0
    num_cached: int = 0
    num_drafts: int = 0  # as far as the engine has told: with the first tokens, and at the end
    num_accepted: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    kv_handle: str = ""

    def count(self, output: Output, num_behind: int) -> None:
        """What the engine has told; the last `num_behind` of its tokens came behind the end."""
        if output.tokens:
            tokens = output.tokens[: len(output.tokens) - num_behind]
            self.num_generated += len(tokens)
            if self.meter is not None:
                self.meter.push(tokens)
        if output.usage is not None:
            self.usage = output.usage
            # What another engine computed for this very request was not cached.
            self.num_cached = output.usage.cached_tokens - output.usage.fetched_tokens
            self.num_drafts = output.usage.draft_tokens
            self.num_accepted = output.usage.accepted_tokens
        self.kv_handle = output.kv_handle
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs

    def judge(self, demand: ToolChoiceCheck, delta: OutputDelta) -> None:
        """Before its end, an answer that is not what was demanded is told with a warning."""
        for event in delta.events:
            if isinstance(event, ToolCall):
                self.begun = event.name
            elif isinstance(event, ToolCallEnd):
                self.called.append(self.begun)
        last = delta.events[-1]
        if isinstance(last, Finished) and last.reason in ("stop", "tool_calls"):
            warning = demand.unmet(self.called)
            if warning is not None:
                delta.events.insert(-1, warning)
