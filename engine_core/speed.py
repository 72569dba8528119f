"""How fast this replica computes, of late and in all."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY_S = 10.0
"""The rate looks back about so many busy seconds."""


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
class Speed:
    """busy_s     seconds that were spent on steps
    computed   tokens
    admitted   known tokens of requests that left the queue, found in a cache or not, while others
               waited
    """

    busy_s: float = 0.0
    computed: Rate = field(default_factory=Rate)
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

    def measure(self, num_tokens: int, elapsed_s: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        self.busy_s += elapsed_s
        self.computed.measure(num_tokens, elapsed_s)
