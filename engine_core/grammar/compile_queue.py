"""The order in which grammars are compiled, and which of them take too long.

Accounts take turns, and no account may use every compiler thread. So the grammars of one account
delay those of another by one compilation at most, however many it sends.

A job that is not started in time is dropped and never compiled: the delay is the server's fault. A
job that itself runs for too long is refused as a bad request. It cannot be interrupted, so its late
result is kept for later requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine_core.grammar.jobs import RETRY_S, CompiledGrammar, CompileJob
from protocol.wire.errors import InvalidRequest, Overloaded


@dataclass(slots=True)
class _RunningJob:
    account: str
    started_at: float
    #: Whether requests wait for the outcome. False after the job was refused.
    is_awaited: bool = True


class CompileQueue:
    """The jobs that wait for a thread, and those that run.

    timeout_s       how long a job may wait, and how long it may then run
    max_per_account most jobs of one account that run at the same time
    """

    def __init__(self, timeout_s: float, max_per_account: int) -> None:
        self._timeout_s = timeout_s
        self._max_per_account = max_per_account
        #: Account -> its jobs by digest, oldest first. The account whose turn is next comes first.
        self._waiting: OrderedDict[str, OrderedDict[bytes, CompileJob]] = OrderedDict()
        #: Digest of a waiting job -> when it was first added.
        self._added_at: dict[bytes, float] = {}
        self._running: dict[bytes, _RunningJob] = {}

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for a job."""
        return bool(self._added_at) or any(job.is_awaited for job in self._running.values())

    def add(self, job: CompileJob, now: float) -> None:
        """Add a job. If another account has added the same grammar, the job waits for the earlier
        of both turns. If the grammar is being compiled, its outcome is awaited."""
        if (running := self._running.get(job.digest)) is not None:
            running.is_awaited = True
            return
        self._waiting.setdefault(job.account, OrderedDict())[job.digest] = job
        self._added_at.setdefault(job.digest, now)

    def start(self, now: float) -> CompileJob | None:
        """Return the job to compile next; None if none may start. The caller passes its digest to
        `finish` when it is compiled."""
        running = [job.account for job in self._running.values()]
        for account, jobs in self._waiting.items():
            if running.count(account) < self._max_per_account:
                job = next(iter(jobs.values()))
                self._waiting.move_to_end(account)
                self._remove(job.digest)
                self._running[job.digest] = _RunningJob(account, now)
                return job
        return None

    def finish(self, digest: bytes) -> None:
        """Note that a job is compiled."""
        del self._running[digest]

    def drop_overdue(self, now: float) -> list[CompiledGrammar]:
        """Return the refusals of the jobs that have waited or run for too long."""
        latest_start = now - self._timeout_s
        late = [digest for digest, at in self._added_at.items() if at < latest_start]
        for digest in late:
            self._remove(digest)
        slow = [
            digest
            for digest, job in self._running.items()
            if job.is_awaited and job.started_at < latest_start
        ]
        for digest in slow:
            self._running[digest].is_awaited = False
        return [CompiledGrammar(digest, self._busy()) for digest in late] + [
            CompiledGrammar(digest, self._too_slow()) for digest in slow
        ]

    def _remove(self, digest: bytes) -> None:
        del self._added_at[digest]
        for account, jobs in list(self._waiting.items()):
            jobs.pop(digest, None)
            if not jobs:
                del self._waiting[account]

    def _busy(self) -> Overloaded:
        return Overloaded(
            f"the grammar waited for {self._timeout_s:g} s behind others that are being compiled; "
            "try again later",
            retry_after_s=RETRY_S,
        )

    def _too_slow(self) -> InvalidRequest:
        return InvalidRequest(
            f"the grammar: it could not be compiled within {self._timeout_s:g} s", param="grammar"
        )
