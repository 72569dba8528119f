"""How long the device waits between steps: from the end of one to the start of the next.

Of the latest steps only; while there is nothing to do, waiting is no loss, so the median and the
best tell more than the sum.
"""

from __future__ import annotations

from collections import deque

LATEST = 1 << 14


class DeviceIdle:
    def __init__(self) -> None:
        self.num_steps = 0
        self._gaps_s: deque[float] = deque(maxlen=LATEST)
        self._ended: float | None = None

    def record(self, started: float, ended: float) -> None:
        """A step's launch and its end, by one clock. What was launched before the end of the step
        before has not waited."""
        if self._ended is not None:
            self._gaps_s.append(max(0.0, started - self._ended))
        self._ended = ended
        self.num_steps += 1

    def percentile_s(self, percent: int) -> float:
        """Of the gaps; 0 where there are none."""
        ordered = sorted(self._gaps_s)
        return ordered[(len(ordered) - 1) * percent // 100] if ordered else 0.0

    def told(self) -> str:
        """In one line."""
        gaps = ", ".join(f"p{p} {self.percentile_s(p) * 1e3:.3f} ms" for p in (10, 50, 90))
        return f"{self.num_steps} steps, gaps between them: {gaps}"
