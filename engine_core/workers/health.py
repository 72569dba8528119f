"""Worker health: whether the worker makes progress. Time and process state are arguments.

The expected time of a step follows from the measured throughput, so a large step is not a sign of
trouble. The worker is unhealthy in two cases:

- It was stopped by a signal. After `patience_s` it counts as lost. The engine then stops, and its
  clients receive an EngineStopped instead of waiting.
- Its step takes many times the expected time. The step may still finish; `step_limit_s` bounds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.engine.stats import WorkerStatus

LATE_FACTOR, LATE_S = 10.0, 10.0
"""A step is late after LATE_FACTOR times its expected time, but never before LATE_S."""


def step_limit_s(timeout_s: float, expected_s: float) -> float:
    """Return the seconds after which a worker that has not answered a step counts as lost. One long
    input that is encoded is one step, which may rightly take longer than `timeout_s`, the
    configured limit (`EngineConfig.step_timeout_s`).

    expected_s  time that the step should take at recent speed; 0: not known
    """
    return max(timeout_s, LATE_FACTOR * expected_s)


@dataclass(slots=True)
class Health:
    """The health of one worker: it makes progress, is late, or was stopped by a signal
    (SIGSTOP)."""

    #: A worker stopped for this long counts as lost.
    patience_s: float
    #: Why the worker is unhealthy; "" if it is healthy.
    trouble: str = ""
    #: Time of the first update that found the worker stopped; None while it is not stopped.
    stopped_at: float | None = None

    def update(self, view: WorkerStatus, is_stopped: bool, now: float) -> bool:
        """Update `trouble`, and return whether the worker has become healthy or unhealthy. Call
        this method a few times a second."""
        before, self.trouble = bool(self.trouble), self._trouble(view, is_stopped, now)
        return bool(self.trouble) != before

    def is_lost(self, now: float) -> bool:
        return self.stopped_at is not None and now - self.stopped_at >= self.patience_s

    def _trouble(self, view: WorkerStatus, is_stopped: bool, now: float) -> str:
        if not is_stopped:
            self.stopped_at = None
            return _lateness(view)
        if self.stopped_at is None:
            self.stopped_at = now
        stopped_s = now - self.stopped_at
        return f"the worker (pid {view.pid}) has been stopped by a signal for {stopped_s:.1f} s"


def _lateness(view: WorkerStatus) -> str:
    if not view.expected_s or view.step_s < max(LATE_S, LATE_FACTOR * view.expected_s):
        return ""
    return (
        f"the worker (pid {view.pid}) has been computing step {view.step} for {view.step_s:.1f} s; "
        f"{view.expected_s:.1f} s were expected"
    )
