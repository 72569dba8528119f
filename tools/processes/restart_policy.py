"""Whether a process that has died is started again, and when. Reads no clock.

At once the first time, so that an accident costs its start-up and no more; then after a wait that
doubles each time. Accidents that lie WINDOW_S back are forgotten. More than `limit` of them within
that time are none: there is a cause that a restart does not mend.
"""

from __future__ import annotations

from collections import deque

from protocol.exit_codes import ExitCode

WINDOW_S = 300.0
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
SAME_AGAIN = frozenset({ExitCode.USAGE, ExitCode.BAD_MODEL, ExitCode.IN_USE})
"""What is wrong will be wrong the next time, too."""


class RestartPolicy:
    """limit   so many within WINDOW_S; 0: none. `why_not` says, after a None, why."""

    def __init__(self, limit: int) -> None:
        self.is_on = limit > 0
        self.why_not = ""
        self._limit = limit
        self._at: deque[float] = deque()

    @property
    def told(self) -> str:
        """Which one this is, in words."""
        return f"restart {len(self._at)} of at most {self._limit} in {WINDOW_S / 60:g} minutes"

    def after(self, stands_for: int, code: int, now: float) -> float | None:
        """How many seconds to wait before a start that mends this death; None: do not."""
        if not self.is_on or (code > 0 and stands_for in SAME_AGAIN):
            return None
        while self._at and now - self._at[0] > WINDOW_S:
            self._at.popleft()
        if len(self._at) >= self._limit:
            self.why_not = f"; it was started again {self._limit} times, which did not help"
            return None
        num_before = len(self._at)
        self._at.append(now)
        return min(FIRST_WAIT_S * 2 ** (num_before - 1), LONGEST_WAIT_S) if num_before else 0.0
