"""State machine of one request that is served by a prefill engine P and a decode engine D.

P computes the prompt and D continues from it; the client sees one request. This module has no side
effects: `Handoff.on(event)` changes the state as `NEXT` says and returns the actions, which
`disaggregated.py` performs in order. Invariants, which the table shows:

- D gets at most two requests: one with the handle and, if the handle is unusable, one without;
- a request that had P compute its prompt releases that exactly once, however it continues or ends;
- after the end there are no actions: late events change nothing.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from protocol.messages import Times, Usage


class HandoffState(Enum):
    COMPUTING = auto()  # P computes the prompt, or will; D has no request
    REQUESTED = auto()  # P keeps the prompt's K/V; D has a request with the handle
    ACCEPTED = auto()  # D accepted it and waits or fetches; P still keeps the K/V
    DECODING = auto()  # D has a request and does not need P
    ENDED = auto()  # final; owns nothing


class HandoffEvent(Enum):
    COMPUTED = auto()  # P sent the handle
    MISSED = auto()  # P cannot compute the prompt, and D may compute it
    STOPPED = auto()  # P's end is the request's end: aborted by name, or the policy says so
    ACCEPTED = auto()  # D accepted the request
    UNUSABLE = auto()  # D refused the handle, and may compute the prompt
    TOKENS = auto()  # D sent tokens; not the end
    FINISHED = auto()  # D sent the end, or refused
    ABORT = auto()  # the client aborted


class HandoffAction(Enum):
    CONTINUE = auto()  # send D a request with the handle
    COMPUTE_ALL = auto()  # send D a request for the whole prompt
    EMIT = auto()  # forward the report to the subscriber
    RELEASE = auto()  # stop or release what P computes for this request
    ABORT = auto()  # abort the request at D


NEXT: dict[tuple[HandoffState, HandoffEvent], tuple[HandoffState, tuple[HandoffAction, ...]]] = {
    (HandoffState.COMPUTING, HandoffEvent.COMPUTED): (
        HandoffState.REQUESTED,
        (HandoffAction.CONTINUE,),
    ),
    (HandoffState.COMPUTING, HandoffEvent.MISSED): (
        HandoffState.DECODING,
        (HandoffAction.RELEASE, HandoffAction.COMPUTE_ALL),
    ),
    (HandoffState.COMPUTING, HandoffEvent.STOPPED): (
        HandoffState.ENDED,
        (HandoffAction.RELEASE, HandoffAction.EMIT),
    ),
    (HandoffState.COMPUTING, HandoffEvent.ABORT): (HandoffState.ENDED, (HandoffAction.RELEASE,)),
    (HandoffState.REQUESTED, HandoffEvent.ACCEPTED): (HandoffState.ACCEPTED, (HandoffAction.EMIT,)),
    (HandoffState.REQUESTED, HandoffEvent.UNUSABLE): (
        HandoffState.DECODING,
        (HandoffAction.RELEASE, HandoffAction.COMPUTE_ALL),
    ),
    (HandoffState.REQUESTED, HandoffEvent.FINISHED): (
        HandoffState.ENDED,
        (HandoffAction.RELEASE, HandoffAction.EMIT),
    ),
    (HandoffState.REQUESTED, HandoffEvent.ABORT): (
        HandoffState.ENDED,
        (HandoffAction.ABORT, HandoffAction.RELEASE),
    ),
    (HandoffState.ACCEPTED, HandoffEvent.TOKENS): (
        HandoffState.DECODING,
        (HandoffAction.RELEASE, HandoffAction.EMIT),
    ),
    (HandoffState.ACCEPTED, HandoffEvent.FINISHED): (
        HandoffState.ENDED,
        (HandoffAction.RELEASE, HandoffAction.EMIT),
    ),
    (HandoffState.ACCEPTED, HandoffEvent.ABORT): (
        HandoffState.ENDED,
        (HandoffAction.ABORT, HandoffAction.RELEASE),
    ),
    (HandoffState.DECODING, HandoffEvent.ACCEPTED): (HandoffState.DECODING, (HandoffAction.EMIT,)),
    (HandoffState.DECODING, HandoffEvent.TOKENS): (HandoffState.DECODING, (HandoffAction.EMIT,)),
    (HandoffState.DECODING, HandoffEvent.FINISHED): (HandoffState.ENDED, (HandoffAction.EMIT,)),
    (HandoffState.DECODING, HandoffEvent.ABORT): (HandoffState.ENDED, (HandoffAction.ABORT,)),
}
"""(state, event) -> (next state, actions). Any other pair is an error."""


class Handoff:
    """The state of one request: COMPUTING at first, or DECODING if P is not used."""

    __slots__ = ("state",)

    def __init__(self, start: HandoffState) -> None:
        self.state = start

    def on(self, event: HandoffEvent) -> tuple[HandoffAction, ...]:
        """Change the state and return the actions, in order.

        Raises ValueError, without a change, if `event` is not possible in this state.
        """
        if self.state is HandoffState.ENDED:
            return ()
        try:
            self.state, actions = NEXT[self.state, event]
        except KeyError:
            raise ValueError(f"{event.name} in state {self.state.name}") from None
        return actions


def merge_usage(decoded: Usage, computed: Usage | None) -> Usage:
    """Return the usage of the whole request; `decoded` is D's part and `computed` P's.

    Tokens that P found in its cache stay cached. The other tokens that D did not compute were
    fetched: P computed them for this request. The times of both parts add up.
    """
    found = min(decoded.cached_tokens, computed.cached_tokens if computed else 0)
    times = _added(computed.times if computed else None, decoded.times)
    fetched = decoded.cached_tokens - found
    return msgspec.structs.replace(decoded, fetched_tokens=fetched, times=times)


def _added(first: Times | None, second: Times | None) -> Times | None:
    if first is None or second is None:
        return first or second
    names = Times.__struct_fields__
    return Times(**{name: getattr(first, name) + getattr(second, name) for name in names})


def was_recomputed(decoded: Usage, block_tokens: int) -> bool:
    """Return whether D computed the prompt although it had a handle.

    D always computes the block of the prompt's last token; here it computed more.
    """
    whole_blocks = (decoded.prompt_tokens - 1) // block_tokens * block_tokens
    return decoded.cached_tokens < whole_blocks
