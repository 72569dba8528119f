"""A transfer's states: the whole table, and what is said at the end."""

from __future__ import annotations

from itertools import product

import pytest

from worker.kv.transfer.fetch_job import (
    FAILURES,
    NEXT_STATE,
    PEER_EVENTS,
    FetchJob,
    FetchJobEvent,
    FetchJobState,
)

OVER = (FetchJobState.FETCHED, FetchJobState.FAILED)
WAYS = {
    FetchJobState.OPENING: [],
    FetchJobState.MOVING: [FetchJobEvent.OPENED],
    FetchJobState.CONFIRMING: [FetchJobEvent.OPENED, FetchJobEvent.CHUNK, FetchJobEvent.PLACED],
    FetchJobState.STOPPING: [FetchJobEvent.OPENED, FetchJobEvent.LATE],
    FetchJobState.FETCHED: [FetchJobEvent.OPENED, FetchJobEvent.PLACED, FetchJobEvent.LIVE],
    FetchJobState.FAILED: [FetchJobEvent.CANCEL, FetchJobEvent.QUIET],
}


def job_in(state: FetchJobState) -> FetchJob:
    job = FetchJob()
    for event in WAYS[state]:
        job.on(event, "at first")
    assert job.state is state
    return job


@pytest.mark.parametrize(("state", "event"), list(product(FetchJobState, FetchJobEvent)))
def test_every_event_in_every_state_leads_on_is_damage_or_cannot_be(state, event):
    job = job_in(state)
    if (state, event) in NEXT_STATE:
        assert job.on(event, "now") is NEXT_STATE[state, event] is job.state
    elif event in PEER_EVENTS and state not in OVER:
        assert job.on(event) is FetchJobState.STOPPING
        assert job.failure == "damaged"
        assert job.reason == f"the peer sent {event.name} in state {state.name}"
    else:
        with pytest.raises(ValueError, match=f"{event.name} in state {state.name}"):
            job.on(event)
        assert job.state is state


@pytest.mark.parametrize("event", FAILURES)
@pytest.mark.parametrize(
    "state", [FetchJobState.OPENING, FetchJobState.MOVING, FetchJobState.CONFIRMING]
)
def test_whatever_fails_is_told_when_nothing_writes_any_more(state, event):
    job = job_in(state)
    job.on(event, "why")
    assert not job.is_over
    job.on(FetchJobEvent.QUIET)
    assert (job.is_over, job.failure, job.reason) == (True, FAILURES[event], "why")


@pytest.mark.parametrize(
    "later", [event for event in FetchJobEvent if event is not FetchJobEvent.QUIET]
)
def test_the_first_reason_counts(later):
    job = job_in(FetchJobState.STOPPING)
    assert job.on(later, "later") is FetchJobState.STOPPING
    assert (job.failure, job.reason) == ("timeout", "at first")


def test_only_a_live_lease_makes_a_transfer_good():
    into = {pair for pair, state in NEXT_STATE.items() if state is FetchJobState.FETCHED}
    assert into == {(FetchJobState.CONFIRMING, FetchJobEvent.LIVE)}


def test_from_what_is_over_nothing_leads_on():
    assert not [pair for pair in NEXT_STATE if pair[0] in OVER]
