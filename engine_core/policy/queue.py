"""Who waits, in which order, and how much work that is.

Between accounts who was served least goes first (fair_share.py). Among the requests of one account
it is who came first; a priority is worth some seconds of having come earlier or later, so whoever
waits is overtaken by more important ones only for so long. Neither changes while a request waits,
nor when it is preempted: it comes back before everything of its account that stood behind it.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from engine_core.policy.fair_share import AccountUsage, FairShare
from engine_core.request import Request

Rank = tuple[float, int]


class QueueLoad(NamedTuple):
    requests: int
    tokens: int


class _AccountQueue:
    """Of one account: a heap with lazy removal. `offer`: its entry in the heap of lines."""

    __slots__ = ("heap", "num", "offer", "tokens")

    def __init__(self) -> None:
        self.heap: list[tuple[Rank, Request]] = []
        self.num = 0
        self.tokens = 0
        self.offer: _Offer | None = None


_Offer = tuple[float, Rank, int, _AccountQueue]
"""When it is due, as its first request; the number of the offer, so that no two are equal."""


class WaitingQueue:
    """A heap of lines, one per account that waits: push and remove are O(log n). What an account
    was served grows while its line waits, so a line may come up too early; then it is put back.

    `tokens`: known tokens waiting.
    """

    def __init__(self, shares: FairShare) -> None:
        self.tokens = 0
        self._shares = shares
        self._lines: dict[AccountUsage, _AccountQueue] = {}
        self._turns: list[_Offer] = []
        self._num_offers = 0
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    @property
    def num_shares(self) -> int:
        """Accounts that wait."""
        return len(self._lines)

    def load_of(self, share: AccountUsage) -> QueueLoad:
        line = self._lines.get(share)
        return QueueLoad(0, 0) if line is None else QueueLoad(line.num, line.tokens)

    def most_before(self, request: Request) -> float:
        """As `tokens_before` at most: all of its own account. O(accounts that wait)."""
        own = self.load_of(request.share).tokens
        return own + self._of_others(request, own)

    def tokens_before(self, request: Request) -> float:
        """What goes before it, were it to wait here, and nobody else to come: what stands before
        it in its own line, and of other accounts what is due while that is computed. O(its own
        line, and accounts that wait).

        Due is who was served less. When its line has come to it, its account will have been served
        what stands before it; by then each other line has been taken from as far as that, or to
        its end. What answers add to what anybody was served is not foreseen.
        """
        line = self._lines.get(request.share)
        ahead = {other for rank, other in line.heap if rank < request.rank} if line else set()
        own = sum(len(other.tokens) for other in ahead & self._waiting)
        return own + self._of_others(request, own)

    def _of_others(self, request: Request, own: int) -> float:
        share, before = request.share, 0.0
        served = share.served if share in self._lines else self._shares.brought_near(share)
        due = served + own + request.lead
        for other, line in self._lines.items():
            if other is not share:
                gap = due - max(other.served, self._head(line).due)
                before += min(max(gap, 0.0), line.tokens)
        return before

    def push(self, request: Request) -> None:
        line = self._lines.get(request.share)
        if line is None:
            self._shares.begin(request.share)
            line = self._lines[request.share] = _AccountQueue()
        heapq.heappush(line.heap, (request.rank, request))
        line.num += 1
        line.tokens += len(request.tokens)
        self._waiting.add(request)
        self.tokens += len(request.tokens)
        self._offer(line)

    def first(self) -> Request | None:
        while self._turns:
            offer = self._turns[0]
            line = offer[-1]
            if line.offer is not offer:
                heapq.heappop(self._turns)
                continue
            head = self._head(line)
            if offer[:2] == (head.due, head.rank):
                return head
            heapq.heapreplace(self._turns, self._new_offer(line, head))
        return None

    def remove(self, request: Request) -> None:
        """Raises KeyError if it does not wait here."""
        self._waiting.remove(request)
        line = self._lines[request.share]
        line.num -= 1
        line.tokens -= len(request.tokens)
        self.tokens -= len(request.tokens)
        if line.num:
            self._offer(line)
        else:
            del self._lines[request.share]
            line.offer = None
        if not self._waiting:
            self._turns.clear()

    def _head(self, line: _AccountQueue) -> Request:
        """Of a line that is not empty."""
        while line.heap[0][1] not in self._waiting:
            heapq.heappop(line.heap)
        return line.heap[0][1]

    def _offer(self, line: _AccountQueue) -> None:
        """Where it is due earlier than it was."""
        head = self._head(line)
        if line.offer is None or (head.due, head.rank) < line.offer[:2]:
            heapq.heappush(self._turns, self._new_offer(line, head))

    def _new_offer(self, line: _AccountQueue, head: Request) -> _Offer:
        self._num_offers += 1
        line.offer = (head.due, head.rank, self._num_offers, line)
        return line.offer
