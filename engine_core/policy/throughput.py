"""Throughput of this replica: recent rates and totals."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY_S = 10.0
"""Rates are averaged over about this many busy seconds."""
LONG_S = 0.05
"""After a step of at least this length, the next one is planned only when it has committed.

Not having the next step ready costs less than 1%, and a request that arrives meanwhile waits for
one step instead of two.
"""


@dataclass(slots=True)
class Rate:
    """Tokens per second: the mean of all measured time, or of about the last MEMORY_S."""

    per_s: float = 0.0
    seconds: float = 0.0

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        if elapsed_s > 0:
            self.seconds += elapsed_s
            weight = elapsed_s / min(self.seconds, max(MEMORY_S, elapsed_s))
            self.per_s += weight * (num_tokens / elapsed_s - self.per_s)


@dataclass(slots=True)
class Throughput:
    """Token rates of one engine."""

    #: Seconds spent on steps.
    busy_s: float = 0.0
    #: Tokens computed.
    computed: Rate = field(default_factory=Rate)
    #: Tokens of the steps that computed prompts.
    prompts: Rate = field(default_factory=Rate)
    #: Known tokens, cached or not, of requests that left the queue while others waited.
    admitted: Rate = field(default_factory=Rate)

    @property
    def tokens_per_s(self) -> float:
        """The recent rate; 0 before the first step."""
        return self.computed.per_s

    @property
    def queue_per_s(self) -> float:
        """Tokens that leave the queue per second: as measured, or else the computing rate. 0 if
        unknown."""
        return self.admitted.per_s or self.computed.per_s

    def is_long_step(self, num_tokens: int) -> bool:
        """Return whether a step of `num_tokens` with prefills is expected to take over LONG_S."""
        return num_tokens > LONG_S * self.prompts.per_s > 0

    def observe(self, num_tokens: int, elapsed_s: float, *, has_prompts: bool) -> None:
        """Add a step's measurement."""
        self.busy_s += elapsed_s
        self.computed.observe(num_tokens, elapsed_s)
        if has_prompts:
            self.prompts.observe(num_tokens, elapsed_s)
