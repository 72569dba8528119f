"""Cost of a step by its number of tokens, as measured by the worker or as configured.

Only ratios of costs matter. Costs between two measured points are interpolated linearly. Costs
beyond the last point are extrapolated from the last two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

UNMEASURED_WIDTH = 32
"""Number of tokens that double the cost of a step, if it is neither measured nor configured."""


class StepCosts(dict[int, float]):
    """Maps a number of tokens to the relative cost of a step. Costs are computed on demand and
    cached."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """Create from at least one point (tokens, cost > 0). The tokens must increase from point to
        point, and the costs must not decrease."""
        super().__init__()
        self._tokens = [tokens for tokens, _ in points]
        self._costs = [cost for _, cost in points]

    @classmethod
    def from_measurements(cls, width: int, measured: Sequence[tuple[int, float]]) -> StepCosts:
        """Return the costs of steps as the worker measured them, or as configured.

        - width: configured number of tokens that double the cost of an empty step; 0: not
          configured
        - measured: (tokens, seconds) of steps; used if `width` is 0. If it is empty too,
          UNMEASURED_WIDTH is the width
        """
        if not width and measured:
            return cls(measured)
        return cls([(0, 1.0), (width or UNMEASURED_WIDTH, 2.0)])

    def __missing__(self, tokens: int) -> float:
        cost = self[tokens] = self._interpolate(tokens)
        return cost

    def _interpolate(self, tokens: int) -> float:
        if tokens <= self._tokens[0] or len(self._tokens) == 1:
            return self._costs[0]
        right = min(bisect_left(self._tokens, tokens), len(self._tokens) - 1)
        left = right - 1
        step = self._tokens[right] - self._tokens[left]
        slope = (self._costs[right] - self._costs[left]) / step
        return self._costs[left] + slope * (tokens - self._tokens[left])
