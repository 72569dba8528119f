"""How fast this replica computes, of late and in all."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_S = 10.0
"""The rate looks back about so many busy seconds."""


@dataclass(slots=True)
class Speed:
    """busy_s   seconds that were spent on steps;   tokens_per_s   0 until the first step"""

    busy_s: float = 0.0
    tokens_per_s: float = 0.0

    def measure(self, num_tokens: int, elapsed_s: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        self.busy_s += elapsed_s
        if elapsed_s > 0:
            weight = min(1.0, elapsed_s / MEMORY_S) if self.tokens_per_s else 1.0
            self.tokens_per_s += weight * (num_tokens / elapsed_s - self.tokens_per_s)
