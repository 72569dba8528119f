"""The waiting queue: the requests that wait for a slot, in the order in which they get one.

Between accounts, the one served least goes first (fair_share.py). Within an account, requests go in
order of arrival. A priority counts as an earlier or later arrival by a bounded number of seconds,
so later requests can overtake a request only for a bounded time. A preempted request returns to its
old position within its account.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, KeysView
from typing import NamedTuple

from engine_core.policy.fair_share import FairShare
from engine_core.requests.request import AccountUsage, Request

Rank = tuple[float, int]


class QueueLoad(NamedTuple):
    """A number of waiting requests and of their tokens: those in a queue, or the limits on both."""

    requests: int
    tokens: int


class _AccountQueue:
    """The waiting requests of one account."""

    __slots__ = ("entry", "heap", "num", "tokens")

    def __init__(self) -> None:
        #: Heap by rank. A removed request stays in it until it reaches the front.
        self.heap: list[tuple[Rank, Request]] = []
        #: Number of waiting requests, and of their tokens.
        self.num = 0
        self.tokens = 0
        #: The account's valid entry in the heap of accounts. Its other entries there are stale.
        self.entry: _QueueEntry | None = None


_QueueEntry = tuple[float, Rank, int, _AccountQueue]
"""(virtual time of the account's first request, its rank, serial number, the account's queue).

The serial number makes entries unique, so that comparing them never compares queues.
"""


class WaitingQueue:
    """The waiting requests of all accounts: a heap of account queues.

    Pushing and removing are O(log n). An account's virtual time grows while its requests wait, so
    its entry may reach the front of the heap too early. `first` then replaces it by an entry with
    the current value.
    """

    def __init__(self, fair_share: FairShare) -> None:
        self.tokens = 0
        self._fair_share = fair_share
        self._queues: dict[AccountUsage, _AccountQueue] = {}
        self._entries: list[_QueueEntry] = []
        self._num_entries = 0
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    @property
    def num_accounts(self) -> int:
        """The number of accounts with waiting requests."""
        return len(self._queues)

    @property
    def accounts(self) -> KeysView[AccountUsage]:
        """The accounts with waiting requests."""
        return self._queues.keys()

    def account_load(self, usage: AccountUsage) -> QueueLoad:
        queue = self._queues.get(usage)
        return QueueLoad(0, 0) if queue is None else QueueLoad(queue.num, queue.tokens)

    def max_tokens_before(self, request: Request) -> float:
        """Return an upper bound of `tokens_before`, in O(waiting accounts). It counts all waiting
        tokens of the request's account."""
        own = self.account_load(request.account_usage).tokens
        return own + self._tokens_of_others(request, own)

    def tokens_before(self, request: Request) -> float:
        """Estimate the tokens that are computed before `request` if no other request arrives.

        `request` need not be in the queue. The estimate is the sum of:

        - the waiting tokens ahead of it in its own account;
        - for each other account, the tokens that it is served until then. Fair sharing raises all
          waiting accounts to the level that the request's account reaches at its turn. An account
          gets its distance to that level, but at most its waiting tokens.

        Tokens of answers are not predicted. O(requests of the account + waiting accounts).
        """
        queue = self._queues.get(request.account_usage)
        ahead = {other for rank, other in queue.heap if rank < request.rank} if queue else set()
        own = sum(len(other.tokens) for other in ahead & self._waiting)
        return own + self._tokens_of_others(request, own)

    def _tokens_of_others(self, request: Request, own: int) -> float:
        own_usage, before = request.account_usage, 0.0
        served = (
            own_usage.served
            if own_usage in self._queues
            else self._fair_share.clamped_service(own_usage)
        )
        level = served + own + request.priority_credit
        for other, queue in self._queues.items():
            if other is not own_usage:
                gap = level - max(other.served, self._head(queue).virtual_time)
                before += min(max(gap, 0.0), queue.tokens)
        return before

    def requests(self) -> Iterator[Request]:
        """Yield the waiting requests, account by account, those of an account in their order in the
        queue."""
        for queue in self._queues.values():
            entries = dict.fromkeys(sorted(queue.heap))  # a stale entry may equal a new one
            yield from (request for _, request in entries if request in self._waiting)

    def restore(self, requests: Iterable[Request]) -> None:
        """Add the requests of another queue (`requests()`). The accounts' service is not adjusted,
        because they already waited in the other queue."""
        for request in requests:
            self._insert(request)

    def push(self, request: Request) -> None:
        if request.account_usage not in self._queues:
            self._fair_share.on_wait_started(request.account_usage)
        self._insert(request)

    def _insert(self, request: Request) -> None:
        queue = self._queues.setdefault(request.account_usage, _AccountQueue())
        heapq.heappush(queue.heap, (request.rank, request))
        queue.num += 1
        queue.tokens += len(request.tokens)
        self._waiting.add(request)
        self.tokens += len(request.tokens)
        self._push_entry(queue)

    def first(self) -> Request | None:
        """Return the request that goes next, without removing it; None if the queue is empty."""
        while self._entries:
            entry = self._entries[0]
            queue = entry[-1]
            if queue.entry is not entry:
                heapq.heappop(self._entries)
                continue
            head = self._head(queue)
            if entry[:2] == (head.virtual_time, head.rank):
                return head
            heapq.heapreplace(self._entries, self._new_entry(queue, head))
        return None

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not waiting."""
        self._waiting.remove(request)
        queue = self._queues[request.account_usage]
        queue.num -= 1
        queue.tokens -= len(request.tokens)
        self.tokens -= len(request.tokens)
        if queue.num:
            self._push_entry(queue)
        else:
            del self._queues[request.account_usage]
            queue.entry = None
        if not self._waiting:
            self._entries.clear()

    def _head(self, queue: _AccountQueue) -> Request:
        """Return the first request of a queue that is not empty."""
        while queue.heap[0][1] not in self._waiting:
            heapq.heappop(queue.heap)
        return queue.heap[0][1]

    def _push_entry(self, queue: _AccountQueue) -> None:
        """Push a new entry for the account if it goes earlier than its present entry."""
        head = self._head(queue)
        if queue.entry is None or (head.virtual_time, head.rank) < queue.entry[:2]:
            heapq.heappush(self._entries, self._new_entry(queue, head))

    def _new_entry(self, queue: _AccountQueue, head: Request) -> _QueueEntry:
        self._num_entries += 1
        queue.entry = (head.virtual_time, head.rank, self._num_entries, queue)
        return queue.entry
