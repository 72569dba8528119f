"""The engine's slots: each allocation has its own generation and is released once."""

from __future__ import annotations

from array import array

import pytest

from engine_core.requests.request import Request
from engine_core.schedule.slot_pool import SlotPool
from protocol.engine.sampling import SamplingParams
from protocol.worker.steps import SlotRelease


def a_request(number: int = 1) -> Request:
    return Request(
        client=b"c",
        number=number,
        order=number,
        namespace="",
        tokens=array("i", [5]),
        prompt_tokens=1,
        params=SamplingParams(),
        seed=0,
        max_total_tokens=2,
        stop_ids=frozenset(),
    )


def test_each_allocation_of_a_slot_has_a_newer_generation() -> None:
    pool, request = SlotPool(1), a_request()
    found = []
    for _ in range(3):
        pool.allocate(request)
        found.append((request.slot, request.slot_generation))
        pool.release(request, is_bound=True)
    assert found == [(0, 1), (0, 2), (0, 3)]
    assert pool.drain_releases() == [SlotRelease(slot=0, generation=n) for n in (1, 2, 3)]
    assert pool.drain_releases() == []


def test_the_worker_releases_only_slots_that_were_bound() -> None:
    pool, request = SlotPool(2), a_request()
    pool.allocate(request)
    pool.release(request, is_bound=False)
    assert pool.drain_releases() == []
    assert sorted(pool.free) == [0, 1]


def test_a_slot_is_released_once() -> None:
    pool, request = SlotPool(1), a_request()
    pool.allocate(request)
    pool.release(request, is_bound=True)
    with pytest.raises(AssertionError, match="request 1 owns no slot"):
        pool.release(request, is_bound=True)


def test_a_stale_owner_cannot_release_the_next_owners_slot() -> None:
    pool, old, new = SlotPool(1), a_request(1), a_request(2)
    pool.allocate(old)
    slot = old.slot
    pool.release(old, is_bound=True)
    pool.allocate(new)
    old.slot = slot
    with pytest.raises(AssertionError, match="request 1 does not own slot 0 any more"):
        pool.release(old, is_bound=True)
    assert pool.free == []
