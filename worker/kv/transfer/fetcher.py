"""The reading end: one thread that runs all transfers of a worker concurrently.

Every order ends in exactly one report, after nothing writes into its blocks any more. The thread
starts with the first order.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic

import zmq

from protocol.kv import KVCancel, KVFailure, KVFetch, PeerSource
from worker.kv.movers.base import PollHint
from worker.kv.report_queue import ReportQueue
from worker.kv.transfer.transfer import Transfer, TransferContext

MAX_TRANSFERS = 64
"""Transfers at the same time, because each needs sockets. More orders wait; their timeouts run."""
SOON_MS = 1
IDLE_MS = 60_000


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """A fetch; its blocks may be written after `fence` (CacheBlocks.fence)."""

    fetch: KVFetch
    fence: object
    deadline: float


class Fetcher:
    """Called by the loop's thread only."""

    def __init__(self, shared: TransferContext, reports: ReportQueue) -> None:
        self._shared = shared
        self._reports = reports
        self._commands: SimpleQueue[FetchOrder | KVCancel] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread: Thread | None = None
        # Used by the thread only:
        self._waiting: deque[FetchOrder] = deque()
        self._transfers: dict[int, Transfer] = {}
        self._poller = zmq.Poller()

    def fetch(self, fetch: KVFetch) -> None:
        order = FetchOrder(fetch, self._shared.blocks.fence(), monotonic() + fetch.timeout_s)
        if self._thread is None:
            self._poller.register(self._wake, zmq.POLLIN)
            work = self._reports.guard(self._run)
            self._thread = Thread(target=work, name="kv fetcher", daemon=True)
            self._thread.start()
        self._send(order)

    def cancel(self, cancel: KVCancel) -> None:
        self._send(cancel)

    def close(self) -> None:
        """Cancel all transfers and stop the thread."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake)

    def _send(self, command: FetchOrder | KVCancel) -> None:
        self._commands.put(command)
        os.eventfd_write(self._wake, 1)

    # ---- the thread

    def _run(self) -> None:
        while not self._is_closed or self._transfers:
            if self._wake in dict(self._poller.poll(self._poll_timeout_ms())):
                os.eventfd_read(self._wake)
            self._read_commands()
            self._start_waiting()
            for job, transfer in list(self._transfers.items()):
                if (end := transfer.poll()) is not None:
                    self._forget(job)
                    self._reports.add_end(end)

    def _read_commands(self) -> None:
        try:
            while True:
                match self._commands.get_nowait():
                    case FetchOrder() as order:
                        self._waiting.append(order)
                    case KVCancel(job=job):
                        self._cancel(job)
        except Empty:
            pass
        if self._is_closed:
            self._waiting.clear()
            for transfer in self._transfers.values():
                transfer.cancel()

    def _start_waiting(self) -> None:
        """Start waiting orders, up to MAX_TRANSFERS. Orders past their deadline fail."""
        waiting: deque[FetchOrder] = deque()
        for order in self._waiting:
            job = order.fetch.job
            if order.deadline <= monotonic():
                reason = f"not started within {order.fetch.timeout_s:g} s"
                self._reports.add_end(KVFailure(job, "timeout", reason))
            elif len(self._transfers) < MAX_TRANSFERS:
                self._start(order)
            else:
                waiting.append(order)
        self._waiting = waiting

    def _start(self, order: FetchOrder) -> None:
        job = order.fetch.job
        source = order.fetch.source
        if not isinstance(source, PeerSource):
            self._reports.add_end(KVFailure(job, "lost", "this worker has no tiers"))
            return
        try:
            transfer = Transfer(self._shared, order.fetch, source, order.fence, order.deadline)
        except (ValueError, zmq.ZMQError) as error:
            self._reports.add_end(KVFailure(job, "unreachable", str(error)))
            return
        self._transfers[job] = transfer
        for socket in (transfer.socket, transfer.watcher):
            self._poller.register(socket, zmq.POLLIN)

    def _cancel(self, job: int) -> None:
        """Cancel a job, if it has not ended."""
        if job in self._transfers:
            self._transfers[job].cancel()
        remaining = deque(order for order in self._waiting if order.fetch.job != job)
        if len(remaining) < len(self._waiting):
            self._waiting = remaining
            self._reports.add_end(KVFailure(job, "cancelled", "before it started"))

    def _forget(self, job: int) -> None:
        transfer = self._transfers.pop(job)
        for socket in (transfer.socket, transfer.watcher):
            self._poller.unregister(socket)

    def _poll_timeout_ms(self) -> int:
        """Return how long the thread may sleep unless a socket becomes readable."""
        if self._waiting and len(self._transfers) < MAX_TRANSFERS:
            return 0  # some transfers have just ended, so others can start
        hints = {transfer.poll_hint for transfer in self._transfers.values()}
        if PollHint.NOW in hints:
            return 0
        if PollHint.SOON in hints:
            return SOON_MS
        deadlines = [transfer.deadline for transfer in self._transfers.values()]
        deadlines += [order.deadline for order in self._waiting]
        left_s = min(deadlines, default=monotonic() + IDLE_MS) - monotonic()
        return max(0, min(IDLE_MS, int(left_s * 1000) + 1))
