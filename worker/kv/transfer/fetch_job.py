"""State machine of one transfer, in the worker that receives the blocks.

Legend: P the peer, which has the content.
"""

from __future__ import annotations

from enum import Enum, auto

from protocol.machine import Machine


class FetchJobState(Enum):
    OPENING = auto()  # KVOpen was sent to P; nothing is written yet
    MOVING = auto()  # the mover writes into the blocks
    CONFIRMING = auto()  # all blocks are in place; P's answer whether they are valid is awaited
    STOPPING = auto()  # failed; the mover may still write into the blocks
    FETCHED = auto()  # final: the blocks have the requested content
    FAILED = auto()  # final: nothing writes into the blocks any more


class FetchJobEvent(Enum):
    OPENED = auto()  # P sent the ids of its blocks
    CHUNK = auto()  # P sent a chunk
    LIVE = auto()  # P confirmed that the data is valid
    EXPIRED = auto()  # P reported that the lease has ended
    UNLIKE = auto()  # the caches or the movers of both workers do not match
    PLACED = auto()  # the mover has put all blocks in place
    DAMAGED = auto()  # data is not as sent, or an answer is not as requested
    LOST = auto()  # P cannot be reached
    LATE = auto()  # the deadline has passed
    CANCEL = auto()  # the engine cancelled the job
    QUIET = auto()  # the mover has stopped writing


FAILURES = {
    FetchJobEvent.UNLIKE: "refused",
    FetchJobEvent.EXPIRED: "expired",
    FetchJobEvent.DAMAGED: "damaged",
    FetchJobEvent.LOST: "unreachable",
    FetchJobEvent.LATE: "timeout",
    FetchJobEvent.CANCEL: "cancelled",
}
"""Events that make a transfer fail -> KVFailure.kind."""

FETCH_JOB_MACHINE = Machine(
    "fetch job",
    starts=(FetchJobState.OPENING,),
    rows={
        (FetchJobState.OPENING, FetchJobEvent.OPENED): FetchJobState.MOVING,
        (FetchJobState.MOVING, FetchJobEvent.CHUNK): FetchJobState.MOVING,
        (FetchJobState.MOVING, FetchJobEvent.PLACED): FetchJobState.CONFIRMING,
        (FetchJobState.CONFIRMING, FetchJobEvent.LIVE): FetchJobState.FETCHED,
        (FetchJobState.STOPPING, FetchJobEvent.QUIET): FetchJobState.FAILED,
        **{
            (state, event): FetchJobState.STOPPING
            for state in (FetchJobState.OPENING, FetchJobState.MOVING, FetchJobState.CONFIRMING)
            for event in FAILURES
        },
    },
    # The first failure is the one reported, so later events change nothing until writing stops.
    ignores={FetchJobState.STOPPING: FetchJobEvent},
)

PEER_EVENTS = {FetchJobEvent.OPENED, FetchJobEvent.CHUNK, FetchJobEvent.LIVE}
"""Events that P causes by a message. P is another process, so if one is impossible in a state, this
counts as damage and not as a bug of this worker."""


class FetchJob:
    """State of one transfer. After a failure, `failure` and `reason` are the kind and the message
    of KVFailure."""

    def __init__(self) -> None:
        self.state = FetchJobState.OPENING
        self.failure = ""
        self.reason = ""

    @property
    def is_over(self) -> bool:
        return self.state in (FetchJobState.FETCHED, FetchJobState.FAILED)

    def on(self, event: FetchJobEvent, reason: str = "") -> FetchJobState:
        """Apply an event, and return the new state. If P causes an event that is impossible in this
        state, the transfer fails as damaged. Raises IllegalMove and changes nothing for any other
        impossible event."""
        is_possible = FETCH_JOB_MACHINE.admits(self.state, event)
        if not is_possible and event in PEER_EVENTS and not self.is_over:
            reason = f"the peer sent {event.name} in state {self.state.name}"
            event = FetchJobEvent.DAMAGED
        state = FETCH_JOB_MACHINE.move(self.state, event)
        if state is FetchJobState.STOPPING and self.state is not FetchJobState.STOPPING:
            self.failure, self.reason = FAILURES[event], reason
        self.state = state
        return state
