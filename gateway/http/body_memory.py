"""Limits the memory for large request bodies, while they arrive and while their requests run.

A body reserves the bytes that have arrived, not those that it announces, so a client that sends
slowly holds little. Bodies that are incomplete could then wait for each other. So memory is given
to a body only if all bodies can still be completed, one after the other: with the free memory, the
one that needs least; with what that one gives back, the next one; and so on (the banker's
algorithm, Dijkstra, EWD 623). Each owner's bodies must be able to do that within the owner's share.

This module does not know what a body contains. Nothing in it depends on the clock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from itertools import chain

from gevent.event import Event

from protocol.wire.errors import Overloaded

NUM_SHARES = 2
"""An owner's share is the memory divided by this number."""


class BodyMemory:
    """The memory for the large bodies of this process. Bodies wait in the order of their arrival.

    num_bytes  largest total size. NUM_SHARES bodies of the largest allowed size must fit
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        #: Owner -> the owner's bodies that hold memory.
        self._holders: dict[str, set[BodyReservation]] = {}
        self._waiting: deque[_Growth] = deque()

    @property
    def num_held(self) -> int:
        """Number of reserved bytes."""
        return sum(body.num_held for body in chain(*self._holders.values()))

    def reservation(self, owner: str, size: int) -> BodyReservation:
        """Return a reservation, which is empty, for a body of at most `size` bytes."""
        return BodyReservation(self, owner, size)

    def acquire(self, growth: _Growth, timeout_s: float) -> None:
        """Wait until a reservation may grow. Raises Overloaded after `timeout_s` seconds."""
        self._waiting.append(growth)
        self._admit()
        with contextlib.ExitStack() as on_failure:  # the greenlet may be killed while it waits
            on_failure.callback(self._cancel, growth)
            if not growth.turn.wait(timeout_s):
                raise Overloaded(
                    "too many requests with large bodies at the same time", retry_after_s=1
                )
            on_failure.pop_all()

    def release(self, body: BodyReservation) -> None:
        """Free all memory of a body."""
        own = self._holders.get(body.owner, set())
        own.discard(body)
        if not own:
            self._holders.pop(body.owner, None)
        self._admit()

    def _cancel(self, growth: _Growth) -> None:
        if not growth.turn.is_set():
            self._waiting.remove(growth)
            self._admit()

    def _admit(self) -> None:
        """Reserve memory for the waiting bodies, in their order, as far as the limits allow. Bodies
        that hold memory come first, because they release it when they are complete. Then come
        bodies without memory, except those of owners that have used up their share. When the
        memory is used up, all later bodies wait."""
        for growth in [growth for growth in self._waiting if growth.body.num_held]:
            self._try(growth)
        for growth in [growth for growth in self._waiting if not growth.body.num_held]:
            if self._try(growth) is _Limit.MEMORY:
                break

    def _try(self, growth: _Growth) -> _Limit | None:
        """Reserve the memory that a body waits for. Return the limit that prevents it, or None."""
        body = growth.body
        body.num_held += growth.num_bytes
        own = self._holders.get(body.owner, set()) | {body}
        others = (held for owner, held in self._holders.items() if owner != body.owner)
        limit = None
        if not _can_be_completed(own, self._num_bytes // NUM_SHARES):
            limit = _Limit.SHARE
        elif not _can_be_completed(chain(own, *others), self._num_bytes):
            limit = _Limit.MEMORY
        if limit is not None:
            body.num_held -= growth.num_bytes
            return limit
        self._holders[body.owner] = own
        self._waiting.remove(growth)
        growth.turn.set()
        return None


class _Limit(Enum):
    """The limit that prevents a body from growing."""

    SHARE = auto()
    MEMORY = auto()


class BodyReservation:
    """The memory of one body. `close` must be called when the request has ended."""

    def __init__(self, memory: BodyMemory, owner: str, size: int) -> None:
        self.owner = owner
        #: Number of reserved bytes.
        self.num_held = 0
        self._memory = memory
        self._size = size
        self._is_kept = False

    @property
    def num_missing(self) -> int:
        """Number of bytes that the body may still need."""
        return 0 if self._is_kept else self._size - self.num_held

    @property
    def num_to_return(self) -> int:
        """Number of bytes that are free when the body is complete. A body that is kept for its
        request frees nothing until the request ends, and that may take any time."""
        return 0 if self._is_kept else self.num_held

    def grow(self, num_bytes: int, timeout_s: float) -> None:
        """Wait until `num_bytes` more bytes are reserved, or all that the body may need. Raises
        Overloaded after `timeout_s` seconds."""
        self._memory.acquire(_Growth(self, min(num_bytes, self.num_missing)), timeout_s)

    def keep(self) -> None:
        """Note that the body is complete, and that its request keeps it."""
        self._is_kept = True

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._memory.release(self)
        self.num_held = 0


class _Growth:
    """A body that waits for more memory, until `turn` is set."""

    def __init__(self, body: BodyReservation, num_bytes: int) -> None:
        self.body = body
        self.num_bytes = num_bytes
        self.turn = Event()


def _can_be_completed(bodies: Iterable[BodyReservation], num_bytes: int) -> bool:
    """Return whether `num_bytes` of memory suffice to complete all bodies, one after the other."""
    bodies = sorted(bodies, key=lambda body: body.num_missing)
    num_free = num_bytes - sum(body.num_held for body in bodies)
    for body in bodies:
        if body.num_missing > num_free:
            return False
        num_free += body.num_to_return
    return num_free >= 0
