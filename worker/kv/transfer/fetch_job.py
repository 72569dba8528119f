"""State machine of one transfer at the reading end.

Legend: P the peer, which has the content.
"""

from __future__ import annotations

from enum import Enum, auto


class FetchJobState(Enum):
    OPENING = auto()  # KVOpen was sent to P; nothing is written yet
    MOVING = auto()  # the mover writes into the blocks
    CONFIRMING = auto()  # everything is in place; P was asked whether it is valid
    STOPPING = auto()  # failed; something may still write into the blocks
    FETCHED = auto()  # ended: the blocks have the requested content
    FAILED = auto()  # ended: nothing writes into the blocks


class FetchJobEvent(Enum):
    OPENED = auto()  # P: the blocks
    CHUNK = auto()  # P: a chunk
    LIVE = auto()  # P: the data is valid
    EXPIRED = auto()  # P: the lease has ended
    UNLIKE = auto()  # P or this worker: the caches or movers do not match
    PLACED = auto()  # the mover: everything is in place
    DAMAGED = auto()  # data or an answer is not what was sent or requested
    LOST = auto()  # P cannot be reached
    LATE = auto()  # the deadline has passed
    CANCEL = auto()  # the engine cancelled the job
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
    # The first reason counts; while writes may still happen, other events change nothing.
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

PEER_EVENTS = {FetchJobEvent.OPENED, FetchJobEvent.CHUNK, FetchJobEvent.LIVE}
"""Events sent by P, another process. Out of order they count as damage, not as a bug here."""


class FetchJob:
    """`failure` and `reason` are KVFailure's kind and message, after a failure."""

    def __init__(self) -> None:
        self.state = FetchJobState.OPENING
        self.failure = ""
        self.reason = ""

    @property
    def is_over(self) -> bool:
        return self.state in (FetchJobState.FETCHED, FetchJobState.FAILED)

    def on(self, event: FetchJobEvent, reason: str = "") -> FetchJobState:
        """Return the next state. Raises ValueError if our own event is impossible in this state."""
        state = NEXT_STATE.get((self.state, event))
        if state is None and event in PEER_EVENTS and not self.is_over:
            reason = f"the peer sent {event.name} in state {self.state.name}"
            event, state = FetchJobEvent.DAMAGED, FetchJobState.STOPPING
        if state is None:
            raise ValueError(f"event {event.name} in state {self.state.name}")
        if state is FetchJobState.STOPPING and self.state is not FetchJobState.STOPPING:
            self.failure, self.reason = FAILURES[event], reason
        self.state = state
        return state
