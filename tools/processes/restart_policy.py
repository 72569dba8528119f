"""Decides whether and when a failed process is restarted. The current time is an argument.

The first restart is immediate, the second waits FIRST_DELAY_S, and each later one waits twice as
long, up to MAX_DELAY_S. Restarts older than WINDOW_S no longer count. After `limit` restarts within
that time there are no more, because restarts evidently do not fix the cause.
"""

from __future__ import annotations

from collections import deque

from protocol.process.exit_codes import ExitCode

WINDOW_S = 300.0
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0
PERMANENT = frozenset({ExitCode.USAGE, ExitCode.BAD_MODEL, ExitCode.IN_USE})
"""Exit codes of failures that a restart cannot fix."""


class RestartPolicy:
    """Allows at most `limit` restarts within WINDOW_S. If `limit` is 0, it allows none.

    why_not   after `delay` has returned None: text to append to the log line about the failure,
              which says why there is no restart; "" if there is nothing to say
    """

    def __init__(self, limit: int) -> None:
        self.is_enabled = limit > 0
        self.why_not = ""
        self._limit = limit
        self._restarts: deque[float] = deque()  # times of the restarts within WINDOW_S

    @property
    def description(self) -> str:
        """The number of the latest restart and the limit, as text for the log."""
        number = len(self._restarts)
        return f"restart {number} of at most {self._limit} in {WINDOW_S / 60:g} minutes"

    def delay(self, server_code: int, code: int, now: float) -> float | None:
        """Return the seconds to wait before a restart, after a failure at `now`; None: no restart.

        server_code, code   see `ProcessExit`
        """
        if not self.is_enabled or (code > 0 and server_code in PERMANENT):
            return None
        while self._restarts and now - self._restarts[0] > WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._limit:
            noun = "restart" if self._limit == 1 else "restarts"
            self.why_not = f"; {self._limit} {noun} did not help"
            return None
        num_before = len(self._restarts)
        self._restarts.append(now)
        return min(FIRST_DELAY_S * 2 ** (num_before - 1), MAX_DELAY_S) if num_before else 0.0
