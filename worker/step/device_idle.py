"""Measures the device's idle time between steps: from the end of one step to the start of the next.

Only the latest steps count. Waiting without work is no loss of speed, so the median and the minimum
are more useful than the sum.
"""

from __future__ import annotations

from collections import deque

LATEST = 1 << 14


class DeviceIdle:
    """Keeps how long the device was idle between two steps, for the latest steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._gaps_s: deque[float] = deque(maxlen=LATEST)
        self._ended: float | None = None

    def record(self, started: float, ended: float) -> None:
        """Add a step that was launched at `started` and done at `ended`, both in seconds on the
        same clock. Its gap is the time from the end of the previous step to `started`, or 0 if it
        was launched before that end. The first step has no gap."""
        if self._ended is not None:
            self._gaps_s.append(max(0.0, started - self._ended))
        self._ended = ended
        self.num_steps += 1

    def percentile_s(self, percent: int) -> float:
        """Return a percentile of the gaps in seconds; 0 if there are no gaps."""
        ordered = sorted(self._gaps_s)
        return ordered[(len(ordered) - 1) * percent // 100] if ordered else 0.0

    def summary(self) -> str:
        """Return a line for the log: the number of steps, and three percentiles of the gaps between
        them, if there are any."""
        if not self._gaps_s:
            return f"{self.num_steps} step{'s' * (self.num_steps != 1)}"
        gaps = ", ".join(f"p{p} {self.percentile_s(p) * 1e3:.3f} ms" for p in (10, 50, 90))
        return f"{self.num_steps} steps, gaps between them: {gaps}"
