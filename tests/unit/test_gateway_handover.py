"""One request over a prefill and a decode engine: all sequences of events of its state table."""

from __future__ import annotations

import itertools

import pytest

from gateway.engine.handoff import (
    NEXT,
    Handoff,
    HandoffAction,
    HandoffEvent,
    HandoffState,
    merge_usage,
    was_recomputed,
)
from protocol.messages import Times, Usage

LIVE = [state for state in HandoffState if state is not HandoffState.ENDED]
ENDS = {HandoffEvent.STOPPED, HandoffEvent.FINISHED, HandoffEvent.ABORT}


def walks(most: int) -> list[tuple[HandoffState, list[HandoffEvent], list[HandoffAction]]]:
    """Return all sequences of at most `most` events from both first states: (last state, events,
    actions)."""
    ways: list[tuple[HandoffState, list[HandoffEvent], list[HandoffAction]]] = []
    found = [*ways, (HandoffState.COMPUTING, [], []), (HandoffState.DECODING, [], [])]
    for _ in range(most):
        found = [
            (after, [*events, event], [*deeds, *more])
            for state, events, deeds in found
            for (before, event), (after, more) in NEXT.items()
            if before is state
        ]
        ways += found
    return ways


def test_every_live_state_can_be_aborted_and_ended() -> None:
    for state in LIVE:
        assert NEXT[state, HandoffEvent.ABORT][0] is HandoffState.ENDED
        assert any(NEXT.get((state, event), (None,))[0] is HandoffState.ENDED for event in ENDS)


def test_after_the_end_nothing_is_done() -> None:
    for event in HandoffEvent:
        handover = Handoff(HandoffState.ENDED)
        assert handover.on(event) == ()
        assert handover.state is HandoffState.ENDED


def test_what_cannot_happen_is_refused_and_changes_nothing() -> None:
    for state, event in itertools.product(LIVE, HandoffEvent):
        if (state, event) not in NEXT:
            handover = Handoff(state)
            with pytest.raises(ValueError, match=event.name):
                handover.on(event)
            assert handover.state is state


def test_p_is_left_exactly_once_however_a_request_goes() -> None:
    for state, events, deeds in walks(6):
        asked_p = not {HandoffEvent.COMPUTED, HandoffEvent.MISSED, HandoffEvent.STOPPED}.isdisjoint(
            events
        )
        if asked_p and state in (HandoffState.DECODING, HandoffState.ENDED):
            assert deeds.count(HandoffAction.RELEASE) == 1, events
        assert deeds.count(HandoffAction.RELEASE) <= 1, events


def test_a_client_hears_all_that_d_tells_and_d_alone_accepts() -> None:
    told = {HandoffEvent.ACCEPTED, HandoffEvent.TOKENS, HandoffEvent.FINISHED, HandoffEvent.STOPPED}
    for (_, event), (_, deeds) in NEXT.items():
        assert (HandoffAction.EMIT in deeds) == (event in told)


def test_d_hears_of_an_abort_wherever_it_was_asked() -> None:
    for state in LIVE:
        asked = state is not HandoffState.COMPUTING
        assert (HandoffAction.ABORT in NEXT[state, HandoffEvent.ABORT][1]) == asked


def test_cached_is_what_nobody_computed_for_the_request() -> None:
    def cached(by_d: int, found_by_p: int) -> int:
        usage = Usage(prompt_tokens=100, generated_tokens=1, cached_tokens=by_d, fetched_tokens=64)
        by_p = Usage(prompt_tokens=100, generated_tokens=0, cached_tokens=found_by_p)
        one = merge_usage(usage, by_p)
        return one.cached_tokens - one.fetched_tokens

    assert cached(99, 0) == 0  # fetched, or D's own: P computed it all the same
    assert cached(99, 48) == 48
    assert cached(16, 48) == 16  # D computed again what it could not fetch


def test_what_both_took_is_told_as_one_engine_would() -> None:
    by_p = Usage(prompt_tokens=9, generated_tokens=0, times=Times(queued_s=1, prefill_s=2))
    by_d = Usage(prompt_tokens=9, generated_tokens=1, times=Times(queued_s=4, decode_s=8))
    assert merge_usage(by_d, by_p).times == Times(queued_s=5, prefill_s=2, decode_s=8)
    assert merge_usage(by_d, None).times == by_d.times


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "again"),
    [(100, 99, False), (100, 96, False), (100, 80, True), (97, 96, False), (16, 0, False)],
)
def test_d_has_computed_again_what_is_more_than_a_block(
    num_prompt: int, num_cached: int, again: bool
) -> None:
    usage = Usage(prompt_tokens=num_prompt, generated_tokens=1, cached_tokens=num_cached)
    assert was_recomputed(usage, 16) is again
