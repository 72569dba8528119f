"""What becomes of one transfer, at the end that reads: states, events, and how it ends.

Legend: P the peer, which has the content.
"""

from __future__ import annotations

from enum import Enum, auto


class FetchJobState(Enum):
    OPENING = auto()  # P was asked; nothing is written yet
    MOVING = auto()  # bytes come; the mover writes into the blocks
    CONFIRMING = auto()  # all is in its place; P was asked whether it was right
    STOPPING = auto()  # it has failed; something may still write into the blocks
    FETCHED = auto()  # over: the blocks hold what was asked for
    FAILED = auto()  # over: nothing writes into the blocks


class FetchJobEvent(Enum):
    OPENED = auto()  # P: these are the blocks
    CHUNK = auto()  # P: this is one of the chunks
    LIVE = auto()  # P: what was read is right
    EXPIRED = auto()  # P: the lease is over
    UNLIKE = auto()  # P, or we: it cannot be
    PLACED = auto()  # the mover: all is in its place
    DAMAGED = auto()  # what came is not what was sent, or no answer to what was asked
    LOST = auto()  # P went away, or never was there
    LATE = auto()  # the time is over
    CANCEL = auto()  # the engine does not want it any more
    QUIET = auto()  # the mover: nothing writes any more


FAILURES = {
    FetchJobEvent.UNLIKE: "refused",
    FetchJobEvent.EXPIRED: "expired",
    FetchJobEvent.DAMAGED: "damaged",
    FetchJobEvent.LOST: "unreachable",
    FetchJobEvent.LATE: "timeout",
    FetchJobEvent.CANCEL: "cancelled",
}
"""Events that end a transfer -> KVFailure.kind."""

NEXT_STATE: dict[tuple[FetchJobState, FetchJobEvent], FetchJobState] = {
    (FetchJobState.OPENING, FetchJobEvent.OPENED): FetchJobState.MOVING,
    (FetchJobState.MOVING, FetchJobEvent.CHUNK): FetchJobState.MOVING,
    (FetchJobState.MOVING, FetchJobEvent.PLACED): FetchJobState.CONFIRMING,
    (FetchJobState.CONFIRMING, FetchJobEvent.LIVE): FetchJobState.FETCHED,
    (FetchJobState.STOPPING, FetchJobEvent.QUIET): FetchJobState.FAILED,
    # The first reason counts; until nothing writes any more, all else is in vain.
    **{
        (FetchJobState.STOPPING, event): FetchJobState.STOPPING
        for event in FetchJobEvent
        if event is not FetchJobEvent.QUIET
    },
    **{
        (state, event): FetchJobState.STOPPING
        for state in (FetchJobState.OPENING, FetchJobState.MOVING, FetchJobState.CONFIRMING)
        for event in FAILURES
    },
}

SAID_BY_PEER = {FetchJobEvent.OPENED, FetchJobEvent.CHUNK, FetchJobEvent.LIVE}
"""P is another process: what it says out of turn is damage, not a mistake of ours."""


class FetchJob:
    """`failure` and `reason`: KVFailure's kind and message, once it has failed."""

    def __init__(self) -> None:
        self.state = FetchJobState.OPENING
        self.failure = ""
        self.reason = ""

    @property
    def is_over(self) -> bool:
        return self.state in (FetchJobState.FETCHED, FetchJobState.FAILED)

    def on(self, event: FetchJobEvent, reason: str = "") -> FetchJobState:
        """The state that follows. Raises ValueError where an event of our own cannot be."""
        state = NEXT_STATE.get((self.state, event))
        if state is None and event in SAID_BY_PEER and not self.is_over:
            reason = f"the peer said {event.name} while we were {self.state.name}"
            event, state = FetchJobEvent.DAMAGED, FetchJobState.STOPPING
        if state is None:
            raise ValueError(f"{event.name} while {self.state.name}")
        if state is FetchJobState.STOPPING and self.state is not FetchJobState.STOPPING:
            self.failure, self.reason = FAILURES[event], reason
        self.state = state
        return state
