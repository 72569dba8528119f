"""Executes the batches in the file store, with all gateway processes that share it.

Each process polls the store. It claims open batches that no process executes, and renews the leases
of those that it executes. If a process dies, its leases end, and another process continues.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from gateway.api.batches.job import Answer, BatchJob, JobContext, LineSlots
from gateway.http.body_memory import BodyMemory
from gateway.service import Service
from gateway.store.batch_database import BatchDatabase, LineResult, StoreFacts
from gateway.store.batch_states import BatchStatus
from gateway.store.sqlite_file import Store

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Interval at which the store is polled and leases are renewed."""
MAX_JOBS = 8
"""Maximum number of batches that a process executes at the same time."""
UNKNOWN_SLOTS = 8
"""Number of lines that are computed at the same time if no engine has reported its slots."""


class BatchRunner:
    """The batches that this process executes."""

    def __init__(self, service: Service, store: Store[BatchDatabase], answer: Answer) -> None:
        self._service = service
        self._store = store
        self._context = JobContext(
            store,
            answer,
            service.keys.caller_named,
            LineSlots(self._num_slots),
            BodyMemory(service.config.body_memory_bytes),
            BoundedSemaphore(),
            self._count_lines,
            service.config.batch_max_lines,
            service.config.max_body_mib << 20,
        )
        self._jobs: dict[str, tuple[BatchJob, gevent.Greenlet[..., None]]] = {}
        self._wake = Event()
        #: Why the store cannot be used now, as logged; "" if it can.
        self._trouble = ""
        self._loop: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        if self._loop is None:
            self._service.metrics.file_store_limit.set(self._service.config.file_store_mib << 20)
            self._loop = gevent.spawn(self._run)

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        """Abort the open lines, store the results so far, and leave the batches to others."""
        if self._loop is not None:
            self._loop.kill()
        for job, greenlet in list(self._jobs.values()):
            job.close()
            greenlet.join()

    def _num_slots(self) -> int:
        limits = [host.engine.limits for host in self._service.hosts]
        slots = max((each.max_slots for each in limits if each is not None), default=0)
        return self._service.config.batch_concurrency or slots or UNKNOWN_SLOTS

    def _run(self) -> None:
        while True:
            try:
                self._poll()
                self._on_trouble("")
            except sqlite3.Error as error:
                self._on_trouble(str(error))
            self._wake.wait(POLL_S)
            self._wake.clear()

    def _poll(self) -> None:
        if not Path(self._service.config.file_store).exists():
            return  # nothing was ever stored
        self._report(self._store.call(BatchDatabase.facts))
        if self._jobs:
            now = time.time()
            self._check_jobs(self._store.call(lambda database: database.renew(now)))
        while len(self._jobs) < MAX_JOBS and not self._service.is_draining() and self._claim():
            pass

    def _report(self, facts: StoreFacts) -> None:
        """Set the metrics of the store, and of this process's batches."""
        metrics = self._service.metrics
        for status, count in facts.open_batches.items():
            metrics.open_batches.labels(status).set(count)
        metrics.file_store_bytes.set(facts.num_bytes)
        metrics.paused_batches.set(sum(job.is_paused for job, _ in self._jobs.values()))

    def _count_lines(self, results: Sequence[LineResult]) -> None:
        num_failed = sum(result.has_failed for result in results)
        lines = self._service.metrics.batch_lines
        lines.labels("completed").inc(len(results) - num_failed)
        lines.labels("failed").inc(num_failed)

    def _check_jobs(self, statuses: dict[str, BatchStatus]) -> None:
        """Stop the jobs whose batches were cancelled or lost, and all if this process drains."""
        for name in statuses.keys() - self._jobs.keys():  # a job could not release its batch
            self._release(name)
        for name, (job, _) in list(self._jobs.items()):
            status = statuses.get(name)
            if status is None:
                job.close()
            elif status is BatchStatus.CANCELLING:
                job.stop(aborts=True)
            elif self._service.is_draining():
                job.stop(aborts=False)

    def _claim(self) -> bool:
        """Start a job for an open batch. Return False if there is none."""
        now = time.time()
        batch = self._store.call(lambda database: database.claim(now))
        if batch is None or batch.id in self._jobs:  # the lease of our own job may have ended
            return False
        job = BatchJob(self._context, batch)
        self._jobs[batch.id] = job, gevent.spawn(self._execute, job)
        return True

    def _execute(self, job: BatchJob) -> None:
        name = job.batch.id
        try:
            job.run()
            self.wake()
        # A later poll claims the batch again.
        except sqlite3.OperationalError as error:  # such as a full disk
            log.warning("the batch %s was interrupted: %s", name, error)
        except Exception:
            log.exception("the batch %s was interrupted", name)
        finally:
            del self._jobs[name]
            self._release(name)

    def _release(self, name: str) -> None:
        try:
            self._store.call(lambda database: database.release(name))
        except sqlite3.Error as error:
            self._on_trouble(str(error))

    def _on_trouble(self, trouble: str) -> None:
        """Log that the store cannot be used, and why, or that it can be used again. Each fact is
        logged once, because the store is polled every POLL_S seconds."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble:
            log.error("cannot use the file store: %s", trouble)
        else:
            log.info("the file store can be used again")
