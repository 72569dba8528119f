"""What a step costs by the number of tokens in it: as the worker has measured, or as it is told.

Only ratios count. Between measured numbers, and beyond the last two, costs lie on straight lines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

UNMEASURED_WIDTH = 32
"""Where nobody has measured: a step of so many tokens takes about twice as long as one of one."""


class StepCosts(dict[int, float]):
    """Tokens -> cost. Computed when first asked for: there are as many as steps have sizes."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """points: (tokens, cost > 0), at least one, tokens growing, costs never falling."""
        super().__init__()
        self._tokens = [tokens for tokens, _ in points]
        self._costs = [cost for _, cost in points]

    @classmethod
    def of(cls, width: int, measured: Sequence[tuple[int, float]]) -> StepCosts:
        """width: tokens with which a step takes twice as long as with none; 0: as measured."""
        if not width and measured:
            return cls(measured)
        return cls([(0, 1.0), (width or UNMEASURED_WIDTH, 2.0)])

    def __missing__(self, tokens: int) -> float:
        cost = self[tokens] = self._on_the_lines(tokens)
        return cost

    def _on_the_lines(self, tokens: int) -> float:
        if tokens <= self._tokens[0] or len(self._tokens) == 1:
            return self._costs[0]
        right = min(bisect_left(self._tokens, tokens), len(self._tokens) - 1)
        left = right - 1
        step = self._tokens[right] - self._tokens[left]
        slope = (self._costs[right] - self._costs[left]) / step
        return self._costs[left] + slope * (tokens - self._tokens[left])
