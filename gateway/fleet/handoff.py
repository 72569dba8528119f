"""State machine of one request that is served by a prefill engine P and a decode engine D.

P computes the prompt and D continues from P's K/V; the client sees one request. If there are
several engines of a role, a request that was moved from one P or D to another (`failover.py`) is
the same request here. This module has no side effects: `Handoff.on(event)` changes the state as
`HANDOFF_MACHINE` says, and returns actions, which `disaggregated.py` performs in order. The table
ensures these invariants:

- D gets at most two requests: one with P's handle and, if D cannot use the handle, one without;
- if a request uses P, RELEASE is performed exactly once, however the request ends;
- after the end there are no actions, so late events change nothing.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from protocol.engine.messages import Times, Usage
from protocol.machine import ActingMachine


class HandoffState(Enum):
    COMPUTING = auto()  # P computes the prompt, or soon will; D has no request
    REQUESTED = auto()  # P keeps the prompt's K/V; D has a request with the handle
    ACCEPTED = auto()  # D has accepted that request; P still keeps the K/V
    DECODING = auto()  # D has a request and does not need P
    ENDED = auto()  # final; owns nothing


class HandoffEvent(Enum):
    COMPUTED = auto()  # P sent the handle
    MISSED = auto()  # P cannot compute the prompt, and D may compute it instead
    STOPPED = auto()  # P's last report ends the request: aborted by label, or D may not compute
    ACCEPTED = auto()  # D accepted the request
    UNUSABLE = auto()  # D refused the handle, and may compute the prompt instead
    TOKENS = auto()  # D sent tokens, but not the end
    FINISHED = auto()  # D sent the end, or refused the request
    ABORT = auto()  # the client aborted the request


class HandoffAction(Enum):
    CONTINUE = auto()  # send D a request with the handle
    COMPUTE_ALL = auto()  # send D a request for the whole prompt
    EMIT = auto()  # forward the report to the subscriber
    RELEASE = auto()  # give up P's computation, or its K/V, for this request
    ABORT = auto()  # abort the request at D


_S, _E, _A = HandoffState, HandoffEvent, HandoffAction

HANDOFF_MACHINE: ActingMachine[HandoffState, HandoffEvent, tuple[HandoffAction, ...]]
HANDOFF_MACHINE = ActingMachine(
    "handoff",
    starts=(_S.COMPUTING, _S.DECODING),
    rows={
        (_S.COMPUTING, _E.COMPUTED): (_S.REQUESTED, (_A.CONTINUE,)),
        (_S.COMPUTING, _E.MISSED): (_S.DECODING, (_A.RELEASE, _A.COMPUTE_ALL)),
        (_S.COMPUTING, _E.STOPPED): (_S.ENDED, (_A.RELEASE, _A.EMIT)),
        (_S.COMPUTING, _E.ABORT): (_S.ENDED, (_A.RELEASE,)),
        (_S.REQUESTED, _E.ACCEPTED): (_S.ACCEPTED, (_A.EMIT,)),
        (_S.REQUESTED, _E.UNUSABLE): (_S.DECODING, (_A.RELEASE, _A.COMPUTE_ALL)),
        (_S.REQUESTED, _E.FINISHED): (_S.ENDED, (_A.RELEASE, _A.EMIT)),
        (_S.REQUESTED, _E.ABORT): (_S.ENDED, (_A.ABORT, _A.RELEASE)),
        (_S.ACCEPTED, _E.UNUSABLE): (_S.DECODING, (_A.RELEASE, _A.COMPUTE_ALL)),
        (_S.ACCEPTED, _E.TOKENS): (_S.DECODING, (_A.RELEASE, _A.EMIT)),
        (_S.ACCEPTED, _E.FINISHED): (_S.ENDED, (_A.RELEASE, _A.EMIT)),
        (_S.ACCEPTED, _E.ABORT): (_S.ENDED, (_A.ABORT, _A.RELEASE)),
        (_S.DECODING, _E.ACCEPTED): (_S.DECODING, (_A.EMIT,)),
        (_S.DECODING, _E.TOKENS): (_S.DECODING, (_A.EMIT,)),
        (_S.DECODING, _E.FINISHED): (_S.ENDED, (_A.EMIT,)),
        (_S.DECODING, _E.ABORT): (_S.ENDED, (_A.ABORT,)),
    },
    ignores={_S.ENDED: HandoffEvent},
    idle=(),
)


class Handoff:
    """The state of one request. It starts as COMPUTING, or as DECODING if P is not used."""

    __slots__ = ("state",)

    def __init__(self, start: HandoffState) -> None:
        self.state = start

    def on(self, event: HandoffEvent) -> tuple[HandoffAction, ...]:
        """Change the state and return the actions, in order. Raises IllegalMove and changes nothing
        if the state does not admit `event`."""
        self.state, actions = HANDOFF_MACHINE.act(self.state, event)
        return actions


def merge_usage(decoded: Usage, computed: Usage | None) -> Usage:
    """Return the usage of the whole request, from the usages that D and P reported.

    decoded   D's usage; its `cached_tokens` are all prompt tokens that D did not compute
    computed  P's usage; None if P computed nothing

    The result's `fetched_tokens` are the tokens that P computed for this request: those that D did
    not compute, less those that P found in its own cache. The times are sums over both engines.
    """
    found = min(decoded.cached_tokens, computed.cached_tokens if computed else 0)
    times = _sum_of_times(computed.times if computed else None, decoded.times)
    fetched = decoded.cached_tokens - found
    return msgspec.structs.replace(decoded, fetched_tokens=fetched, times=times)


def _sum_of_times(first: Times | None, second: Times | None) -> Times | None:
    if first is None or second is None:
        return first or second
    names = Times.__struct_fields__
    return Times(**{name: getattr(first, name) + getattr(second, name) for name in names})


def was_recomputed(decoded: Usage, block_tokens: int) -> bool:
    """Return whether D computed a prompt although it had a handle for the prompt's K/V.

    D always computes the block that holds the prompt's last token. If it computed more blocks, it
    could not fetch their K/V.
    """
    whole_blocks = (decoded.prompt_tokens - 1) // block_tokens * block_tokens
    return decoded.cached_tokens < whole_blocks
