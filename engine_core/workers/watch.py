"""`WorkerWatch`: how long the worker's step takes, and whether the worker still makes progress."""

from __future__ import annotations

import logging
import os

from msgspec.structs import replace

from engine_core.engine import Engine
from engine_core.workers.health import Health, step_limit_s
from engine_core.workers.link import WorkerLink
from engine_core.workers.process import WorkerLost
from protocol.config.engine import EngineConfig
from protocol.engine.stats import WorkerStatus

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.25
"""Seconds between two checks of the worker's health."""


class WorkerWatch:
    """Times the steps in flight, and checks whether the worker is late. Times are in seconds of a
    steady clock."""

    def __init__(self, config: EngineConfig, worker: WorkerLink) -> None:
        self._config = config
        self._worker = worker
        self._health = Health(config.stopped_timeout_s)
        self._next_check_at = 0.0
        #: When the worker started the oldest step in flight; None if there is none.
        self._step_started_at: float | None = None

    def step_s(self, now: float) -> float:
        """Return the seconds since the oldest step in flight was started, or 0."""
        return 0.0 if self._step_started_at is None else now - self._step_started_at

    def on_sent(self, now: float) -> None:
        """Note that a plan was sent. The worker starts it at once unless it computes another."""
        if self._step_started_at is None:
            self._step_started_at = now

    def on_result(self, now: float) -> float:
        """Return the seconds that the step of a result took. The next step in flight starts now;
        if there is none, `on_idle` must be called."""
        elapsed_s = self.step_s(now)
        self._step_started_at = now
        return elapsed_s

    def on_idle(self) -> None:
        """Note that no plan is in flight."""
        self._step_started_at = None

    def check_limits(self, engine: Engine, now: float) -> None:
        """Raise WorkerLost if the step in flight or a K/V fetch takes too long."""
        timeout_s, step_s = self._config.step_timeout_s, self.step_s(now)
        if step_s > timeout_s and step_s > step_limit_s(timeout_s, engine.worker_view().expected_s):
            raise WorkerLost(f"the worker has not answered for {step_s:.0f} s")
        # A busy worker may report on a fetch only after its step, so the step timeout is added.
        if (
            report_age_s := engine.kv_transfers.fetches.oldest_s(now)
        ) > self._config.kv_timeout_s + timeout_s:
            raise WorkerLost(f"the worker has not reported on a fetch for {report_age_s:.0f} s")

    def check_health(self, engine: Engine | None, now: float) -> bool:
        """Check the worker's health if CHECK_EVERY_S have passed since the last check. If it has
        changed, log that and return True.

        Raises WorkerLost if the worker was stopped for too long, or if one of another machine has
        disconnected.
        """
        if now < self._next_check_at:
            return False
        self._next_check_at = now + CHECK_EVERY_S
        self._worker.check_connections()
        status, stopped = self.status(engine, now), self._worker.stopped_pid
        if stopped is not None:
            status = replace(status, pid=stopped)
        has_changed = self._health.update(status, stopped is not None, now)
        if self._health.is_lost(now):
            raise WorkerLost(self._health.trouble)
        if has_changed:
            log.warning("%s", self._health.trouble or "the worker is making progress again")
        return has_changed

    def status(self, engine: Engine | None, now: float) -> WorkerStatus:
        """Return what the worker does. `engine` is None until the model is loaded."""
        status = WorkerStatus() if engine is None else engine.worker_view()
        pids = {"engine_pid": os.getpid(), "pid": self._worker.pid}
        return replace(status, **pids, step_s=self.step_s(now), trouble=self._health.trouble)
