"""Worker health: whether it makes progress. Pure; time and process state are arguments.

A step that takes no longer than recent steps of its size is progress, however long it is. A long
prompt, which is computed in chunks, is therefore healthy. Two conditions are not:

- the worker was stopped by a signal. After `patience_s` it counts as lost, so that its clients get
  an end;
- a step takes many times its expected time. It may still finish; `step_timeout_s` bounds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.stats import WorkerView

LATE_FACTOR, LATE_S = 10.0, 10.0
"""A step is late after LATE_FACTOR times its expected time, but never before LATE_S."""


@dataclass(slots=True)
class Health:
    """Tracks whether one worker makes progress, is late or was stopped by a signal."""

    #: A worker stopped for this long counts as lost.
    patience_s: float
    #: Why nothing is being computed; "" if the worker is healthy.
    trouble: str = ""
    #: When the worker was first seen stopped, until it continues.
    stopped_at: float | None = None

    def update(self, view: WorkerView, is_stopped: bool, now: float) -> bool:
        """Update `trouble`, and return whether the worker became healthy or unhealthy.

        Call a few times a second.
        """
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
