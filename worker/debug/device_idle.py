"""Idle time of the device between steps: from the end of one to the start of the next.

Only the latest steps count. Waiting without work is not a loss, so the median and the minimum tell
more than the sum.
"""

from __future__ import annotations

from collections import deque

LATEST = 1 << 14


class DeviceIdle:
    """Gaps between steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._gaps_s: deque[float] = deque(maxlen=LATEST)
        self._ended: float | None = None

    def record(self, started: float, ended: float) -> None:
        """Add a step by its launch and end, on one clock. A step that was launched before the
        previous one ended has a gap of 0."""
        if self._ended is not None:
            self._gaps_s.append(max(0.0, started - self._ended))
        self._ended = ended
        self.num_steps += 1

    def percentile_s(self, percent: int) -> float:
        """Return a percentile of the gaps; 0 without gaps."""
        ordered = sorted(self._gaps_s)
        return ordered[(len(ordered) - 1) * percent // 100] if ordered else 0.0

    def summary(self) -> str:
        """Return one line for the log."""
        gaps = ", ".join(f"p{p} {self.percentile_s(p) * 1e3:.3f} ms" for p in (10, 50, 90))
        return f"{self.num_steps} steps, gaps between them: {gaps}"
