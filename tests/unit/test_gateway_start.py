"""The start of the gateway processes of a port: when it is over, and what replaces a process."""

from __future__ import annotations

from gateway.gateway_start import FREE, READY, GatewayStart


def test_the_start_is_over_once_each_process_has_been_ready() -> None:
    start = GatewayStart(3)
    places = [start.take_place() for _ in range(3)]
    for num_ready, place in enumerate(places):
        assert start.trouble() == f"{num_ready} of 3 gateway processes are ready"
        assert not start.is_over
        place.set_state(READY)
        place.set_state(READY)  # it says so repeatedly
    assert start.trouble() is None


def test_a_process_that_ends_before_the_others_are_ready_is_awaited_again() -> None:
    start = GatewayStart(2)
    first, second = start.take_place(), start.take_place()
    first.set_state(READY)
    first.set_state(FREE)
    second.set_state(READY)
    assert start.trouble() == "1 of 2 gateway processes are ready"
    start.take_place().set_state(READY)
    assert start.is_over


def test_a_process_that_is_replaced_later_changes_nothing() -> None:
    start = GatewayStart(2)
    first, second = start.take_place(), start.take_place()
    for place in (first, second):
        place.set_state(READY)
    assert start.is_over
    first.set_state(FREE)
    start.take_place()
    assert start.is_over


def test_a_process_that_was_added_by_hand_is_not_awaited() -> None:
    start = GatewayStart(1)
    first, added = start.take_place(), start.take_place()
    added.set_state(READY)
    assert not start.is_over
    first.set_state(READY)
    added.set_state(FREE)
    assert start.is_over
