"""Throughput of the engine: recent token rates and the total busy time."""

from __future__ import annotations

from dataclasses import dataclass, field

AVERAGED_S = 10.0
"""Rates are averaged over about this many busy seconds."""
LONG_STEP_S = 0.05
"""While a prefill step of at least this length is in flight, the next step is not planned.

If the next step is planned only after the long one has committed, a request that arrives meanwhile
waits for one step instead of two. The gap between the two steps costs less than 1% of their time.
"""


@dataclass(slots=True)
class Rate:
    """A running mean of tokens per second, over about the last AVERAGED_S of measured time."""

    per_s: float = 0.0
    seconds: float = 0.0

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        if elapsed_s > 0:
            self.seconds += elapsed_s
            weight = elapsed_s / min(self.seconds, max(AVERAGED_S, elapsed_s))
            self.per_s += weight * (num_tokens / elapsed_s - self.per_s)


@dataclass(slots=True)
class Throughput:
    """Token rates of one engine."""

    #: Total seconds spent on steps.
    busy_s: float = 0.0
    #: Tokens computed in all steps.
    computed: Rate = field(default_factory=Rate)
    #: Tokens computed in the steps for which `InflightStep.has_prompts` is true.
    prompts: Rate = field(default_factory=Rate)
    #: Known tokens, cached or not, of requests that left the queue while others waited.
    admitted: Rate = field(default_factory=Rate)
    #: Tokens computed in steps that encode.
    encoded: Rate = field(default_factory=Rate)

    @property
    def tokens_per_s(self) -> float:
        """The recent rate of computed tokens; 0 before the first step."""
        return self.computed.per_s

    @property
    def queue_per_s(self) -> float:
        """Tokens that leave the queue per second; 0 if unknown. Until this rate is measured, the
        rate of computed tokens is used."""
        return self.admitted.per_s or self.computed.per_s

    def is_long_step(self, num_tokens: int) -> bool:
        """Return whether a step of `num_tokens` tokens with prefills is expected to take longer
        than LONG_STEP_S seconds."""
        return num_tokens > LONG_STEP_S * self.prompts.per_s > 0

    def observe_encoding(self, num_tokens: int, elapsed_s: float) -> None:
        """Record that a step has encoded `num_tokens` in `elapsed_s` seconds."""
        self.busy_s += elapsed_s
        self.encoded.observe(num_tokens, elapsed_s)

    def observe(self, num_tokens: int, elapsed_s: float, *, has_prompts: bool) -> None:
        """Record that a step computed `num_tokens` in `elapsed_s` seconds. `has_prompts` is that of
        the InflightStep."""
        self.busy_s += elapsed_s
        self.computed.observe(num_tokens, elapsed_s)
        if has_prompts:
            self.prompts.observe(num_tokens, elapsed_s)
