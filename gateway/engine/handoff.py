"""One request that a pair of engines answers: where it stands, and what has to be done about it.

P computes the prompt, D goes on from it; the client sees one request. This file decides and does
nothing: `Handoff.on(event)` moves the request along `NEXT` and names the deeds, which
`disaggregated.py` does in their order. Laws, which the table shows:

- D is asked at most twice: from the handle and, where that cannot be used, for all of it;
- whoever had P compute something leaves it exactly once, by whichever way it goes on or ends;
- after the end there is no deed: what comes late changes nothing.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from protocol.messages import Times, Usage


class HandoffState(Enum):
    COMPUTING = auto()  # P computes the prompt, or is about to be asked; D knows of nothing
    ASKED = auto()  # P keeps the prompt's K/V; D was asked to go on from it
    TAKEN = auto()  # D has accepted that: it waits or fetches; P still keeps the K/V
    GOING = auto()  # D needs nobody (any more)
    ENDED = auto()  # final; nobody owes it anything


class HandoffEvent(Enum):
    COMPUTED = auto()  # P says: here is the handle
    MISSED = auto()  # P cannot or does not compute it, and D may do without
    STOPPED = auto()  # P's end is the request's end: aborted by name, or as the policy has it
    ACCEPTED = auto()  # D
    UNUSABLE = auto()  # D refuses the handle, and may do without
    SPOKE = auto()  # D tells tokens, and it is not the end
    FINISHED = auto()  # D tells the end, or refuses
    ABORT = auto()  # the client wants no more


class HandoffAction(Enum):
    ASK = auto()  # D, from the handle
    ASK_ALL = auto()  # D, for all of it
    TELL = auto()  # the client, what was just said
    LEAVE = auto()  # what P computed, or computes, is not needed by this request any more
    ABORT = auto()  # at D


NEXT: dict[tuple[HandoffState, HandoffEvent], tuple[HandoffState, tuple[HandoffAction, ...]]] = {
    (HandoffState.COMPUTING, HandoffEvent.COMPUTED): (HandoffState.ASKED, (HandoffAction.ASK,)),
    (HandoffState.COMPUTING, HandoffEvent.MISSED): (
        HandoffState.GOING,
        (HandoffAction.LEAVE, HandoffAction.ASK_ALL),
    ),
    (HandoffState.COMPUTING, HandoffEvent.STOPPED): (
        HandoffState.ENDED,
        (HandoffAction.LEAVE, HandoffAction.TELL),
    ),
    (HandoffState.COMPUTING, HandoffEvent.ABORT): (HandoffState.ENDED, (HandoffAction.LEAVE,)),
    (HandoffState.ASKED, HandoffEvent.ACCEPTED): (HandoffState.TAKEN, (HandoffAction.TELL,)),
    (HandoffState.ASKED, HandoffEvent.UNUSABLE): (
        HandoffState.GOING,
        (HandoffAction.LEAVE, HandoffAction.ASK_ALL),
    ),
    (HandoffState.ASKED, HandoffEvent.FINISHED): (
        HandoffState.ENDED,
        (HandoffAction.LEAVE, HandoffAction.TELL),
    ),
    (HandoffState.ASKED, HandoffEvent.ABORT): (
        HandoffState.ENDED,
        (HandoffAction.ABORT, HandoffAction.LEAVE),
    ),
    (HandoffState.TAKEN, HandoffEvent.SPOKE): (
        HandoffState.GOING,
        (HandoffAction.LEAVE, HandoffAction.TELL),
    ),
    (HandoffState.TAKEN, HandoffEvent.FINISHED): (
        HandoffState.ENDED,
        (HandoffAction.LEAVE, HandoffAction.TELL),
    ),
    (HandoffState.TAKEN, HandoffEvent.ABORT): (
        HandoffState.ENDED,
        (HandoffAction.ABORT, HandoffAction.LEAVE),
    ),
    (HandoffState.GOING, HandoffEvent.ACCEPTED): (HandoffState.GOING, (HandoffAction.TELL,)),
    (HandoffState.GOING, HandoffEvent.SPOKE): (HandoffState.GOING, (HandoffAction.TELL,)),
    (HandoffState.GOING, HandoffEvent.FINISHED): (HandoffState.ENDED, (HandoffAction.TELL,)),
    (HandoffState.GOING, HandoffEvent.ABORT): (HandoffState.ENDED, (HandoffAction.ABORT,)),
}
"""(where it stands, what happened) -> (where it stands now, what to do). Others cannot happen."""


class Handoff:
    """Where one request stands. `begin` in COMPUTING, or in GOING where P is not asked at all."""

    __slots__ = ("state",)

    def __init__(self, begin: HandoffState) -> None:
        self.state = begin

    def on(self, event: HandoffEvent) -> tuple[HandoffAction, ...]:
        """What to do, in this order. Raises ValueError where `event` cannot happen, and is then
        where it was."""
        if self.state is HandoffState.ENDED:
            return ()
        try:
            self.state, deeds = NEXT[self.state, event]
        except KeyError:
            raise ValueError(f"{event.name} in state {self.state.name}") from None
        return deeds


def as_one(decoded: Usage, computed: Usage | None) -> Usage:
    """What the request cost as a whole: cached is what nobody computed for it. `computed` is what
    P's part cost: of the prompt it had found so much, and the rest of what D did not compute was
    computed for D. The two took their time one after the other."""
    found = min(decoded.cached_tokens, computed.cached_tokens if computed else 0)
    times = _added(computed.times if computed else None, decoded.times)
    fetched = decoded.cached_tokens - found
    return msgspec.structs.replace(decoded, fetched_tokens=fetched, times=times)


def _added(first: Times | None, then: Times | None) -> Times | None:
    if first is None or then is None:
        return first or then
    names = Times.__struct_fields__
    return Times(**{name: getattr(first, name) + getattr(then, name) for name in names})


def was_computed_again(decoded: Usage, block_tokens: int) -> bool:
    """Whether D, which had a handle, computed the prompt all the same: more of it than its last
    token and what stands with that in one block."""
    whole_blocks = (decoded.prompt_tokens - 1) // block_tokens * block_tokens
    return decoded.cached_tokens < whole_blocks
