"""The end that reads: one thread in which all transfers of a worker go on beside each other.

Every order ends in exactly one entry of the news, and not before nothing writes into its blocks any
more. The thread starts with the first order.
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
from worker.kv.transfer.transfer import Here, Transfer

MAX_TRANSFERS = 64
"""At the same time: each has sockets. More wait their turn, on their own time."""
SOON_MS = 1
IDLE_MS = 60_000


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """fence: the steps after which its blocks may be written (Blocks.fence)."""

    fetch: KVFetch
    fence: object
    deadline: float


class Fetcher:
    """Said to by the loop's thread alone."""

    def __init__(self, here: Here, news: ReportQueue) -> None:
        self._here = here
        self._news = news
        self._said: SimpleQueue[FetchOrder | KVCancel] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread: Thread | None = None
        # The thread's own:
        self._waiting: deque[FetchOrder] = deque()
        self._transfers: dict[int, Transfer] = {}
        self._poller = zmq.Poller()

    def fetch(self, fetch: KVFetch) -> None:
        order = FetchOrder(fetch, self._here.blocks.fence(), monotonic() + fetch.timeout_s)
        if self._thread is None:
            self._poller.register(self._wake, zmq.POLLIN)
            work = self._news.guard(self._run)
            self._thread = Thread(target=work, name="kv fetcher", daemon=True)
            self._thread.start()
        self._say(order)

    def cancel(self, cancel: KVCancel) -> None:
        self._say(cancel)

    def close(self) -> None:
        """What is on its way is given up."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake)

    def _say(self, word: FetchOrder | KVCancel) -> None:
        self._said.put(word)
        os.eventfd_write(self._wake, 1)

    # ---- the thread

    def _run(self) -> None:
        while not self._is_closed or self._transfers:
            if self._wake in dict(self._poller.poll(self._patience_ms())):
                os.eventfd_read(self._wake)
            self._hear()
            self._begin()
            for job, transfer in list(self._transfers.items()):
                if (end := transfer.turn()) is not None:
                    self._forget(job)
                    self._news.add_end(end)

    def _hear(self) -> None:
        try:
            while True:
                match self._said.get_nowait():
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

    def _begin(self) -> None:
        """As many of those who wait as may run. Who has waited too long does not."""
        still: deque[FetchOrder] = deque()
        for order in self._waiting:
            job = order.fetch.job
            if order.deadline <= monotonic():
                told = f"it did not begin in {order.fetch.timeout_s:g} s"
                self._news.add_end(KVFailure(job, "timeout", told))
            elif len(self._transfers) < MAX_TRANSFERS:
                self._start(order)
            else:
                still.append(order)
        self._waiting = still

    def _start(self, order: FetchOrder) -> None:
        job = order.fetch.job
        source = order.fetch.source
        if not isinstance(source, PeerSource):
            self._news.add_end(KVFailure(job, "lost", "this worker has no tiers"))
            return
        try:
            transfer = Transfer(self._here, order.fetch, source, order.fence, order.deadline)
        except (ValueError, zmq.ZMQError) as error:
            self._news.add_end(KVFailure(job, "unreachable", str(error)))
            return
        self._transfers[job] = transfer
        for socket in (transfer.socket, transfer.watcher):
            self._poller.register(socket, zmq.POLLIN)

    def _cancel(self, job: int) -> None:
        """One that is over is over."""
        if job in self._transfers:
            self._transfers[job].cancel()
        kept = deque(order for order in self._waiting if order.fetch.job != job)
        if len(kept) < len(self._waiting):
            self._waiting = kept
            self._news.add_end(KVFailure(job, "cancelled", "before it began"))

    def _forget(self, job: int) -> None:
        transfer = self._transfers.pop(job)
        for socket in (transfer.socket, transfer.watcher):
            self._poller.unregister(socket)

    def _patience_ms(self) -> int:
        """How long nothing can happen that no socket tells."""
        if self._waiting and len(self._transfers) < MAX_TRANSFERS:
            return 0  # some have just ended: it is others' turn
        paces = {transfer.pace for transfer in self._transfers.values()}
        if PollHint.NOW in paces:
            return 0
        if PollHint.SOON in paces:
            return SOON_MS
        deadlines = [transfer.deadline for transfer in self._transfers.values()]
        deadlines += [order.deadline for order in self._waiting]
        left_s = min(deadlines, default=monotonic() + IDLE_MS) - monotonic()
        return max(0, min(IDLE_MS, int(left_s * 1000) + 1))
