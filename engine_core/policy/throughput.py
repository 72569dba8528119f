"""How fast this replica computes, of late and in all."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY_S = 10.0
"""The rate looks back about so many busy seconds."""
LONG_S = 0.05
"""A step that takes so long is worth waiting for, with the next one, until it is over: not to have
that ready costs less than one part in a hundred, and who comes meanwhile waits for one step, not
for two."""


@dataclass(slots=True)
class Rate:
    """Tokens per second: of all the time that was measured, or about the last MEMORY_S of it."""

    per_s: float = 0.0
    seconds: float = 0.0

    def measure(self, num_tokens: int, elapsed_s: float) -> None:
        if elapsed_s > 0:
            self.seconds += elapsed_s
            weight = elapsed_s / min(self.seconds, max(MEMORY_S, elapsed_s))
            self.per_s += weight * (num_tokens / elapsed_s - self.per_s)


@dataclass(slots=True)
class Throughput:
    """busy_s     seconds that were spent on steps
    computed   tokens
    prompts    tokens of steps that computed prompts
    admitted   known tokens of requests that left the queue, found in a cache or not, while others
               waited
    """

    busy_s: float = 0.0
    computed: Rate = field(default_factory=Rate)
    prompts: Rate = field(default_factory=Rate)
    admitted: Rate = field(default_factory=Rate)

    @property
    def tokens_per_s(self) -> float:
        """0 until the first step."""
        return self.computed.per_s

    @property
    def queue_per_s(self) -> float:
        """How fast a queue gets shorter: as was measured, or else as fast as tokens are computed;
        0 if unknown."""
        return self.admitted.per_s or self.computed.per_s

    def is_long(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens, prompts among them, takes long, as far as is known."""
        return num_tokens > LONG_S * self.prompts.per_s > 0

    def measure(self, num_tokens: int, elapsed_s: float, *, has_prompts: bool) -> None:
        """A step has computed so many tokens in so many seconds."""
        self.busy_s += elapsed_s
        self.computed.measure(num_tokens, elapsed_s)
        if has_prompts:
            self.prompts.measure(num_tokens, elapsed_s)
