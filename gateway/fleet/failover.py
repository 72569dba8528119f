"""State machine of one request that is served by replicas of one model.

A request is sent to one replica. If that replica cannot take it, or is lost, the request is sent to
another one; the client sees one request. This module has no side effects: `Failover.on(event)`
changes the state as `FAILOVER_MACHINE` says, and returns an action, which `engine_fleet.py`
performs. The table ensures these invariants:

- a request is open at no more than one replica;
- its client gets one reply, either Accepted or Refused, and then its outputs up to one end;
- a request that was accepted is never refused afterwards, even if no replica is ready for a while;
- after the end there are no actions, so late events change nothing.
"""

from __future__ import annotations

from enum import Enum, auto

from msgspec.structs import replace

from protocol.engine.messages import Usage
from protocol.machine import ActingMachine


class FailoverState(Enum):
    SENT = auto()  # a replica has the request; none has accepted it
    OPEN = auto()  # a replica has accepted the request
    MOVED = auto()  # another replica has the request after a loss, and has not accepted it yet
    STRANDED = auto()  # accepted once; no replica has the request; it waits for a usable one
    ENDED = auto()  # final; no replica has the request


class FailoverEvent(Enum):
    ACCEPTED = auto()  # the replica accepted the request
    BUSY = auto()  # the replica refused the request, and another one may accept it
    LOST = auto()  # the replica was lost
    TOKENS = auto()  # the replica sent tokens, but not the end
    FINISHED = auto()  # the replica sent the end, or refused what every replica would refuse
    UNPLACED = auto()  # the action PLACE found no usable replica
    RETRY = auto()  # a replica may have become usable
    GIVEN_UP = auto()  # the request was stranded for too long, or lost too many replicas
    ABORT = auto()  # the client aborted the request


class FailoverAction(Enum):
    NONE = auto()
    PLACE = auto()  # send the request to a replica that was not tried yet; if none, on(UNPLACED)
    EMIT = auto()  # forward the report to the subscriber
    ABORT = auto()  # abort the request at its replica
    FREE = auto()  # report to the client that the request's resources are free


_S, _E, _A = FailoverState, FailoverEvent, FailoverAction

FAILOVER_MACHINE = ActingMachine(
    "failover",
    starts=(_S.SENT,),
    rows={
        (_S.SENT, _E.ACCEPTED): (_S.OPEN, _A.EMIT),
        (_S.SENT, _E.BUSY): (_S.SENT, _A.PLACE),
        (_S.SENT, _E.LOST): (_S.SENT, _A.PLACE),
        (_S.SENT, _E.UNPLACED): (_S.ENDED, _A.EMIT),  # the refusal of the last replica
        (_S.SENT, _E.FINISHED): (_S.ENDED, _A.EMIT),
        (_S.SENT, _E.GIVEN_UP): (_S.ENDED, _A.EMIT),
        (_S.SENT, _E.ABORT): (_S.ENDED, _A.ABORT),
        (_S.OPEN, _E.TOKENS): (_S.OPEN, _A.EMIT),
        (_S.OPEN, _E.FINISHED): (_S.ENDED, _A.EMIT),
        (_S.OPEN, _E.LOST): (_S.MOVED, _A.PLACE),
        (_S.OPEN, _E.GIVEN_UP): (_S.ENDED, _A.EMIT),
        (_S.OPEN, _E.ABORT): (_S.ENDED, _A.ABORT),
        (_S.MOVED, _E.ACCEPTED): (_S.OPEN, _A.NONE),  # the client has its Accepted already
        (_S.MOVED, _E.BUSY): (_S.MOVED, _A.PLACE),
        (_S.MOVED, _E.LOST): (_S.MOVED, _A.PLACE),
        (_S.MOVED, _E.UNPLACED): (_S.STRANDED, _A.NONE),
        (_S.MOVED, _E.FINISHED): (_S.ENDED, _A.EMIT),
        (_S.MOVED, _E.GIVEN_UP): (_S.ENDED, _A.EMIT),
        (_S.MOVED, _E.ABORT): (_S.ENDED, _A.ABORT),
        (_S.STRANDED, _E.RETRY): (_S.MOVED, _A.PLACE),
        (_S.STRANDED, _E.GIVEN_UP): (_S.ENDED, _A.EMIT),
        (_S.STRANDED, _E.ABORT): (_S.ENDED, _A.FREE),
    },
    ignores={_S.ENDED: FailoverEvent},
    idle=_A.NONE,
)


class Failover:
    """The state of one request, which was just sent to its first replica."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = FailoverState.SENT

    def on(self, event: FailoverEvent) -> FailoverAction:
        """Change the state and return the action. Raises IllegalMove and changes nothing if the
        state does not admit `event`."""
        self.state, action = FAILOVER_MACHINE.act(self.state, event)
        return action


def usage_after_moves(usage: Usage, first: Usage | None, elapsed_s: float) -> Usage:
    """Return the usage of a request that was moved, as its client should see it.

    usage      from the replica that has the request now, which counts all tokens of the answer
    first      the usage that came with the first token; None if there was no token before the move
    elapsed_s  seconds since the request arrived

    The times add up to `elapsed_s`: what the lost replicas spent, and the wait for another one,
    counts as time in the queue, or as time of decoding if the client had its first token.
    """
    times, cached = usage.times, usage.cached_tokens
    fetched = usage.fetched_tokens
    if first is not None:
        times, cached, fetched = first.times, first.cached_tokens, first.fetched_tokens
    if times is not None:
        spent_s = sum(getattr(times, name) for name in times.__struct_fields__)
        rest = "queued_s" if first is None else "decode_s"
        times = replace(times, **{rest: getattr(times, rest) + max(elapsed_s - spent_s, 0.0)})
    return replace(usage, cached_tokens=cached, fetched_tokens=fetched, times=times)
