"""Whether the worker gets on. Reads no clock and looks at no process: both are told.

A step that is out and takes no longer than steps of its size have taken of late is progress,
however long that is; so a long prompt, which is computed in chunks, is healthy. What is not:

- a worker that somebody has stopped. After a while it is lost: its clients shall have an end;
- a step that takes many times as long as it should. It may still come; `step_timeout_s` bounds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.stats import WorkerView

LATE_FACTOR, LATE_S = 10.0, 10.0
"""A step is late after so many times the time it should take, and never before LATE_S."""


@dataclass(slots=True)
class Health:
    """
    patience_s   a worker that was stopped for so long is lost
    trouble      why nothing is computed at the moment; "": all is well
    """

    patience_s: float
    trouble: str = ""
    stopped_at: float | None = None

    def look(self, view: WorkerView, is_stopped: bool, now: float) -> bool:
        """Call a few times a second. Whether there is other news of `trouble` than before."""
        before, self.trouble = bool(self.trouble), self._trouble(view, is_stopped, now)
        return bool(self.trouble) != before

    def is_lost(self, now: float) -> bool:
        return self.stopped_at is not None and now - self.stopped_at >= self.patience_s

    def _trouble(self, view: WorkerView, is_stopped: bool, now: float) -> str:
        if not is_stopped:
            self.stopped_at = None
            return _lateness(view)
        if self.stopped_at is None:
            self.stopped_at = now
        stopped_s = now - self.stopped_at
        return f"the worker (pid {view.pid}) has been stopped by a signal for {stopped_s:.1f} s"


def _lateness(view: WorkerView) -> str:
    if not view.expected_s or view.step_s < max(LATE_S, LATE_FACTOR * view.expected_s):
        return ""
    return (
        f"the worker (pid {view.pid}) has been computing step {view.step} for {view.step_s:.1f} s; "
        f"{view.expected_s:.1f} s were expected"
    )
