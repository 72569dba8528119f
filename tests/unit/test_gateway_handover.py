"""One request over a prefill and a decode engine: all sequences of events of its state table."""

from __future__ import annotations

import pytest

from gateway.fleet.handoff import (
    HANDOFF_MACHINE,
    Handoff,
    HandoffAction,
    HandoffEvent,
    HandoffState,
    merge_usage,
    was_recomputed,
)
from gateway.fleet.paired_numerics import PairedNumerics
from protocol.engine.messages import Times, Usage
from tests.support.scripted_engine import scripted_card

LIVE = [state for state in HandoffState if state is not HandoffState.ENDED]
ENDS = {HandoffEvent.STOPPED, HandoffEvent.FINISHED, HandoffEvent.ABORT}


def walks(most: int) -> list[tuple[HandoffState, list[HandoffEvent], list[HandoffAction]]]:
    """Return all sequences of at most `most` events from both first states: (last state, events,
    actions)."""
    ways: list[tuple[HandoffState, list[HandoffEvent], list[HandoffAction]]] = []
    found = [*ways, (HandoffState.COMPUTING, [], []), (HandoffState.DECODING, [], [])]
    for _ in range(most):
        found = [
            (after, [*events, event], [*actions, *HANDOFF_MACHINE.actions[before, event]])
            for state, events, actions in found
            for (before, event), after in HANDOFF_MACHINE.rows.items()
            if before is state
        ]
        ways += found
    return ways


def test_every_live_state_can_be_aborted_and_ended() -> None:
    for state in LIVE:
        assert HANDOFF_MACHINE.rows[state, HandoffEvent.ABORT] is HandoffState.ENDED
        afters = [HANDOFF_MACHINE.rows.get((state, event)) for event in ENDS]
        assert HandoffState.ENDED in afters


def test_an_ended_handoff_ignores_all_events() -> None:
    for event in HandoffEvent:
        handover = Handoff(HandoffState.ENDED)
        assert handover.on(event) == ()
        assert handover.state is HandoffState.ENDED


def test_p_is_left_exactly_once_however_a_request_goes() -> None:
    for state, events, actions in walks(6):
        asked_p = not {HandoffEvent.COMPUTED, HandoffEvent.MISSED, HandoffEvent.STOPPED}.isdisjoint(
            events
        )
        if asked_p and state in (HandoffState.DECODING, HandoffState.ENDED):
            assert actions.count(HandoffAction.RELEASE) == 1, events
        assert actions.count(HandoffAction.RELEASE) <= 1, events


def test_only_reports_of_d_are_sent_to_the_client() -> None:
    emitted = {
        HandoffEvent.ACCEPTED,
        HandoffEvent.TOKENS,
        HandoffEvent.FINISHED,
        HandoffEvent.STOPPED,
    }
    for (_, event), actions in HANDOFF_MACHINE.actions.items():
        assert (HandoffAction.EMIT in actions) == (event in emitted)


def test_an_abort_is_sent_to_d_if_it_has_the_request() -> None:
    for state in LIVE:
        is_sent = state is not HandoffState.COMPUTING
        actions = HANDOFF_MACHINE.actions[state, HandoffEvent.ABORT]
        assert (HandoffAction.ABORT in actions) == is_sent


def test_cached_tokens_are_those_that_neither_p_nor_d_computed() -> None:
    def cached(by_d: int, found_by_p: int) -> int:
        usage = Usage(prompt_tokens=100, generated_tokens=1, cached_tokens=by_d, fetched_tokens=64)
        by_p = Usage(prompt_tokens=100, generated_tokens=0, cached_tokens=found_by_p)
        one = merge_usage(usage, by_p)
        return one.cached_tokens - one.fetched_tokens

    assert cached(99, 0) == 0  # fetched, or in D's own cache: P computed it anyway
    assert cached(99, 48) == 48
    assert cached(16, 48) == 16  # D computed again what it could not fetch


def test_the_times_of_p_and_d_are_added() -> None:
    by_p = Usage(prompt_tokens=9, generated_tokens=0, times=Times(queued_s=1, prefill_s=2))
    by_d = Usage(prompt_tokens=9, generated_tokens=1, times=Times(queued_s=4, decode_s=8))
    assert merge_usage(by_d, by_p).times == Times(queued_s=5, prefill_s=2, decode_s=8)
    assert merge_usage(by_d, None).times == by_d.times


@pytest.mark.parametrize(
    ("num_prompt", "num_cached", "again"),
    [(100, 99, False), (100, 96, False), (100, 80, True), (97, 96, False), (16, 0, False)],
)
def test_a_prompt_counts_as_recomputed_if_d_computed_more_than_a_block(
    num_prompt: int, num_cached: int, again: bool
) -> None:
    usage = Usage(prompt_tokens=num_prompt, generated_tokens=1, cached_tokens=num_cached)
    assert was_recomputed(usage, 16) is again


def test_engines_with_other_numerics_end_the_promise_of_bits_and_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    paired, card = PairedNumerics(), scripted_card(numerics="0f1e2d3c")
    paired.add("p", card)
    paired.add("d", scripted_card(numerics="0f1e2d3c"))
    assert paired.promised(card) is card
    assert not caplog.records
    for _ in range(2):
        paired.add("d", scripted_card(numerics="4b5a6978"))
    (record,) = caplog.records
    assert "p has fingerprint 0f1e2d3c, d has 4b5a6978" in record.getMessage()
    withdrawn = paired.promised(card)
    assert withdrawn.numerics == ""
    assert paired.promised(card) is withdrawn, "a new object would be prepared again"
    paired.add("d", scripted_card(numerics="0f1e2d3c"))
    assert paired.promised(card) is withdrawn, "K/V of before may still be cached"


def test_engines_with_another_model_do_not_end_the_promise() -> None:
    paired, card = PairedNumerics(), scripted_card(numerics="0f1e2d3c")
    paired.add("p", scripted_card(digest="another", numerics="4b5a6978"))
    paired.add("d", card)
    assert paired.promised(card) is card
    paired.add("p", scripted_card(numerics=""))
    assert paired.promised(card).numerics == ""
