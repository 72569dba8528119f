"""Transfers of K/V: the readers of a lease, the end of a lease, and the states of a fetch."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from protocol.machine import IllegalMove
from worker.kv.transfer.exports import EndedLease, Exports
from worker.kv.transfer.fetch_job import (
    FAILURES,
    FETCH_JOB_MACHINE,
    PEER_EVENTS,
    FetchJob,
    FetchJobEvent,
    FetchJobState,
)

LEASE, ONE, TWO = b"lease", b"one", b"two"
RIGHT, WRONG = EndedLease(is_live=True, is_taken=False), EndedLease(is_live=False, is_taken=False)
LAST = EndedLease(is_live=True, is_taken=True)


def exported(num_readers: int = 1) -> Exports:
    exports = Exports()
    exports.add(LEASE, np.array([7, 3, 9, 4]), num_readers)
    return exports


def test_a_reader_gets_the_requested_blocks_in_order():
    exports = exported()
    blocks, opened = exports.open(LEASE, ONE, 1, 2), exports.opened(LEASE, ONE)
    assert blocks.tolist() == opened.tolist() == [3, 9]
    assert exports.opened(LEASE, TWO) is None


@pytest.mark.parametrize(("first", "count"), [(0, 5), (4, 1), (-1, 2), (0, 0), (2, -1)])
def test_blocks_outside_a_lease_are_refused_and_nothing_is_opened(first, count):
    exports = exported()
    with pytest.raises(ValueError, match="a lease with 4"):
        exports.open(LEASE, ONE, first, count)
    assert exports.opened(LEASE, ONE) is None


def test_a_reader_of_the_last_block_gets_the_state_after_it():
    exports = Exports()
    exports.add(LEASE, np.array([7, 3, 9, 4]), 2, 5)
    assert exports.open_state(LEASE, ONE) is None, "it has not opened the lease"
    exports.open(LEASE, ONE, 2, 2)
    assert exports.open_state(LEASE, ONE) == 5
    exports.open(LEASE, TWO, 0, 3)
    with pytest.raises(ValueError, match="after block 3 of a lease with 4"):
        exports.open_state(LEASE, TWO)
    exports.withdraw(LEASE)
    assert exports.open_state(LEASE, ONE) is None


def test_a_lease_without_a_state_has_none_to_read():
    exports = exported()
    exports.open(LEASE, ONE, 0, 4)
    with pytest.raises(ValueError, match="with no state"):
        exports.open_state(LEASE, ONE)


def test_a_lease_is_taken_when_its_last_reader_is_done():
    exports = exported(num_readers=2)
    exports.open(LEASE, ONE, 0, 4)
    exports.open(LEASE, TWO, 2, 1)
    assert exports.on_reader_done(LEASE, ONE) == RIGHT
    assert exports.on_reader_done(LEASE, TWO) == LAST


def test_a_reader_that_is_done_twice_counts_once():
    exports = exported(num_readers=2)
    exports.open(LEASE, ONE, 0, 4)
    assert [exports.on_reader_done(LEASE, ONE) for _ in range(3)] == [RIGHT, RIGHT, RIGHT]
    exports.open(LEASE, TWO, 0, 4)
    assert [exports.on_reader_done(LEASE, TWO) for _ in range(3)] == [LAST, RIGHT, RIGHT]


def test_a_reader_that_never_opened_the_lease_is_done_but_not_live():
    assert exported().on_reader_done(LEASE, ONE) == EndedLease(is_live=False, is_taken=True)


def test_an_unknown_lease_is_over():
    exports = Exports()
    assert exports.open(LEASE, ONE, 0, 1) is None
    assert exports.opened(LEASE, ONE) is None
    assert exports.on_reader_done(LEASE, ONE) == WRONG
    exports.withdraw(LEASE)


def test_a_lease_withdrawn_before_it_is_opened_is_over():
    exports = exported()
    exports.withdraw(LEASE)
    assert exports.open(LEASE, ONE, 0, 1) is None


def test_data_read_from_a_withdrawn_lease_is_not_live():
    exports = exported()
    exports.open(LEASE, ONE, 0, 4)
    exports.withdraw(LEASE)
    assert exports.opened(LEASE, ONE) is None
    assert exports.on_reader_done(LEASE, ONE) == WRONG


def test_a_taken_lease_can_be_read_until_it_is_withdrawn():
    exports = exported()
    exports.open(LEASE, ONE, 0, 4)
    assert exports.on_reader_done(LEASE, ONE) == LAST
    exports.open(LEASE, TWO, 0, 4)
    assert exports.on_reader_done(LEASE, TWO) == RIGHT


def test_a_lease_name_is_exported_once():
    exports = exported()
    with pytest.raises(ValueError, match="already exported"):
        exports.add(LEASE, np.array([1]), 1)


def test_an_export_is_being_read_until_its_last_reader_is_done():
    exports = exported(num_readers=2)
    assert not exports.is_being_read
    exports.open(LEASE, ONE, 0, 1)
    assert exports.is_being_read
    exports.on_reader_done(LEASE, ONE)
    assert not exports.is_being_read
    exports.open(LEASE, TWO, 0, 1)
    exports.withdraw(LEASE)
    assert not exports.is_being_read


# ---- the states of a fetch
OVER = (FetchJobState.FETCHED, FetchJobState.FAILED)
EVENTS_TO = {
    FetchJobState.OPENING: [],
    FetchJobState.MOVING: [FetchJobEvent.OPENED],
    FetchJobState.CONFIRMING: [FetchJobEvent.OPENED, FetchJobEvent.CHUNK, FetchJobEvent.PLACED],
    FetchJobState.STOPPING: [FetchJobEvent.OPENED, FetchJobEvent.LATE],
    FetchJobState.FETCHED: [FetchJobEvent.OPENED, FetchJobEvent.PLACED, FetchJobEvent.LIVE],
    FetchJobState.FAILED: [FetchJobEvent.CANCEL, FetchJobEvent.QUIET],
}


def job_in(state: FetchJobState) -> FetchJob:
    job = FetchJob()
    for event in EVENTS_TO[state]:
        job.on(event, "at first")
    assert job.state is state
    return job


@pytest.mark.parametrize(("state", "event"), list(product(FetchJobState, FetchJobEvent)))
def test_every_event_has_a_next_state_or_is_damage_or_raises(state, event):
    job = job_in(state)
    if FETCH_JOB_MACHINE.admits(state, event):
        assert job.on(event, "now") is FETCH_JOB_MACHINE.move(state, event) is job.state
    elif event in PEER_EVENTS and state not in OVER:
        assert job.on(event) is FetchJobState.STOPPING
        assert job.failure == "damaged"
        assert job.reason == f"the peer sent {event.name} in state {state.name}"
    else:
        with pytest.raises(IllegalMove, match=f"{event.name} is illegal in {state.name}"):
            job.on(event)
        assert job.state is state


@pytest.mark.parametrize("event", FAILURES)
@pytest.mark.parametrize(
    "state", [FetchJobState.OPENING, FetchJobState.MOVING, FetchJobState.CONFIRMING]
)
def test_a_failure_is_reported_after_the_last_write(state, event):
    job = job_in(state)
    job.on(event, "why")
    assert not job.is_over
    job.on(FetchJobEvent.QUIET)
    assert (job.is_over, job.failure, job.reason) == (True, FAILURES[event], "why")


@pytest.mark.parametrize(
    "later", [event for event in FetchJobEvent if event is not FetchJobEvent.QUIET]
)
def test_the_first_failure_reason_is_kept(later):
    job = job_in(FetchJobState.STOPPING)
    assert job.on(later, "later") is FetchJobState.STOPPING
    assert (job.failure, job.reason) == ("timeout", "at first")


def test_only_a_live_lease_makes_a_transfer_valid():
    rows = FETCH_JOB_MACHINE.rows.items()
    into = {pair for pair, state in rows if state is FetchJobState.FETCHED}
    assert into == {(FetchJobState.CONFIRMING, FetchJobEvent.LIVE)}


def test_an_ended_fetch_has_no_next_state():
    assert FETCH_JOB_MACHINE.final == set(OVER)
