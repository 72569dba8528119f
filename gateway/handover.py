"""One request that a pair of engines answers: where it stands, and what has to be done about it.

P computes the prompt, D goes on from it; the client sees one request. This file decides and does
nothing: `Handover.on(event)` moves the request along `NEXT` and names the deeds, which `pairs.py`
does in their order. Laws, which the table shows:

- D is asked at most twice: from the handle and, where that cannot be used, for all of it;
- whoever had P compute something leaves it exactly once, by whichever way it goes on or ends;
- after the end there is no deed: what comes late changes nothing.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from protocol.messages import Times, Usage


class State(Enum):
    COMPUTING = auto()  # P computes the prompt, or is about to be asked; D knows of nothing
    ASKED = auto()  # P keeps the prompt's K/V; D was asked to go on from it
    TAKEN = auto()  # D has accepted that: it waits or fetches; P still keeps the K/V
    GOING = auto()  # D needs nobody (any more)
    ENDED = auto()  # final; nobody owes it anything


class Event(Enum):
    COMPUTED = auto()  # P says: here is the handle
    MISSED = auto()  # P cannot or does not compute it, and D may do without
    STOPPED = auto()  # P's end is the request's end: aborted by name, or as the policy has it
    ACCEPTED = auto()  # D
    UNUSABLE = auto()  # D refuses the handle, and may do without
    SPOKE = auto()  # D tells tokens, and it is not the end
    FINISHED = auto()  # D tells the end, or refuses
    ABORT = auto()  # the client wants no more


class Deed(Enum):
    ASK = auto()  # D, from the handle
    ASK_ALL = auto()  # D, for all of it
    TELL = auto()  # the client, what was just said
    LEAVE = auto()  # what P computed, or computes, is not needed by this request any more
    ABORT = auto()  # at D


NEXT: dict[tuple[State, Event], tuple[State, tuple[Deed, ...]]] = {
    (State.COMPUTING, Event.COMPUTED): (State.ASKED, (Deed.ASK,)),
    (State.COMPUTING, Event.MISSED): (State.GOING, (Deed.LEAVE, Deed.ASK_ALL)),
    (State.COMPUTING, Event.STOPPED): (State.ENDED, (Deed.LEAVE, Deed.TELL)),
    (State.COMPUTING, Event.ABORT): (State.ENDED, (Deed.LEAVE,)),
    (State.ASKED, Event.ACCEPTED): (State.TAKEN, (Deed.TELL,)),
    (State.ASKED, Event.UNUSABLE): (State.GOING, (Deed.LEAVE, Deed.ASK_ALL)),
    (State.ASKED, Event.FINISHED): (State.ENDED, (Deed.LEAVE, Deed.TELL)),
    (State.ASKED, Event.ABORT): (State.ENDED, (Deed.ABORT, Deed.LEAVE)),
    (State.TAKEN, Event.SPOKE): (State.GOING, (Deed.LEAVE, Deed.TELL)),
    (State.TAKEN, Event.FINISHED): (State.ENDED, (Deed.LEAVE, Deed.TELL)),
    (State.TAKEN, Event.ABORT): (State.ENDED, (Deed.ABORT, Deed.LEAVE)),
    (State.GOING, Event.ACCEPTED): (State.GOING, (Deed.TELL,)),
    (State.GOING, Event.SPOKE): (State.GOING, (Deed.TELL,)),
    (State.GOING, Event.FINISHED): (State.ENDED, (Deed.TELL,)),
    (State.GOING, Event.ABORT): (State.ENDED, (Deed.ABORT,)),
}
"""(where it stands, what happened) -> (where it stands now, what to do). Others cannot happen."""


class Handover:
    """Where one request stands. `begin` in COMPUTING, or in GOING where P is not asked at all."""

    __slots__ = ("state",)

    def __init__(self, begin: State) -> None:
        self.state = begin

    def on(self, event: Event) -> tuple[Deed, ...]:
        """What to do, in this order. Raises ValueError where `event` cannot happen, and is then
        where it was."""
        if self.state is State.ENDED:
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
