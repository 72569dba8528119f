"""The registry of an engine's clients, and the reasons to drop a client."""

from __future__ import annotations

import pytest

from engine_core.connections.clients import (
    IGNORED_S,
    MAX_IGNORED,
    MAX_TOTAL_UNREAD_BYTES,
    MAX_TOTAL_UNREAD_WITH_RESULTS,
    MAX_UNREAD_BYTES,
    MAX_UNREAD_WITH_RESULTS,
    STALLED_S,
    Clients,
)
from protocol.engine.encoding import MAX_RESULT_NUMBERS

ONE, TWO = b"one", b"two"


def connected(*clients: bytes, lease_s: float = 60.0) -> Clients:
    found = Clients(lease_s)
    for client in clients:
        found.add(client, 0.0, client.decode())
    return found


def test_a_silent_client_is_probed_once_a_second() -> None:
    clients = connected(ONE, TWO)
    clients.on_message(TWO, 5.0)
    assert clients.due_probes(1.0) == []
    assert clients.due_probes(5.0) == [ONE]
    assert clients.due_probes(5.5) == []
    assert clients.due_probes(6.0) == [ONE]
    clients.on_message(ONE, 6.0)
    assert clients.due_probes(7.5) == [TWO]


def test_a_client_is_dropped_when_its_lease_is_over() -> None:
    clients = connected(ONE, TWO)
    clients.on_message(TWO, 30.0)
    assert clients.expire(60.0) == []
    assert clients.expire(61.0) == [ONE]
    assert clients.all() == [TWO]


def test_messages_that_a_client_has_read_do_not_count_as_unread() -> None:
    clients = connected(ONE)
    for _ in range(10):
        clients.on_sent(ONE, MAX_UNREAD_BYTES)
        assert clients.find_unread(ONE, 1.0) is None
        clients.on_read(ONE, clients.sent_bytes(ONE), 1.0)
    clients.on_sent(ONE, MAX_UNREAD_BYTES + 1)
    assert clients.find_unread(ONE, 1.0) == ONE


def test_a_client_cannot_report_more_bytes_read_than_sent() -> None:
    clients = connected(ONE)
    clients.on_read(ONE, 1 << 60, 1.0)
    clients.on_sent(ONE, MAX_UNREAD_BYTES + 1)
    assert clients.find_unread(ONE, 1.0) == ONE


def test_unread_messages_still_count_after_a_second_hello() -> None:
    clients = connected(ONE)
    clients.on_sent(ONE, MAX_UNREAD_BYTES + 1)
    clients.add(ONE, 1.0, "again")
    assert clients.find_unread(ONE, 1.0) == ONE
    assert clients.get_name(ONE) == "again"


@pytest.mark.parametrize(
    ("hellos", "answered"),
    [
        ([0], [True]),
        ([0, 0, 0], [True, False, False]),  # it has not read the Welcome yet
        ([0, 0, 1, 1], [True, False, True, False]),  # it has, and has lost its session
        ([3], [True]),  # it comes from an earlier engine
        ([None, None], [True, True]),  # it does not count
    ],
)
def test_a_client_gets_one_welcome_for_each_that_it_has_read(
    hellos: list[int | None], answered: list[bool]
) -> None:
    clients, found = Clients(lease_s=30.0), []
    for num_welcomes in hellos:
        clients.add(ONE, 0.0, num_welcomes=num_welcomes)
        found.append(not clients.has_unread_welcome(ONE))
        if found[-1]:
            clients.on_welcomed(ONE)
    assert found == answered


def test_a_client_that_was_dropped_with_an_unread_welcome_gets_another() -> None:
    clients = Clients(lease_s=30.0)
    clients.add(ONE, 0.0, num_welcomes=0)
    clients.on_welcomed(ONE)
    clients.ignore(ONE, 0.0)
    clients.add(ONE, 20.0, num_welcomes=0)
    assert not clients.has_unread_welcome(ONE)


MANY = [str(number).encode() for number in range(16)]
SHARE = MAX_TOTAL_UNREAD_BYTES // len(MANY)


def clients_at_the_limit(extra: int = 0) -> Clients:
    """Return 16 clients that together have MAX_TOTAL_UNREAD_BYTES plus `extra` bytes unread.

    The sixth has the most unread bytes.
    """
    clients = connected(*MANY)
    for client in MANY:
        clients.on_sent(client, SHARE)
    clients.on_read(MANY[0], 100, 0.0)
    clients.on_sent(MANY[5], 100 + extra)
    return clients


def test_the_client_with_the_most_unread_bytes_is_dropped_when_all_have_too_many() -> None:
    clients = clients_at_the_limit()
    assert clients.unread_bytes == MAX_TOTAL_UNREAD_BYTES
    assert clients.find_unread(ONE, 1.0) is None
    clients.on_sent(MANY[3], 1)
    assert clients.find_unread(ONE, 1.0) == MANY[5]
    clients.ignore(MANY[5], 1.0)
    assert clients.find_unread(ONE, 1.0) is None


def test_a_stalled_client_is_dropped_before_one_that_reads_and_has_more_unread() -> None:
    clients = clients_at_the_limit(SHARE)
    now = 1.0 + STALLED_S
    clients.on_read(MANY[5], 1, now)
    for client in MANY[1:4]:
        clients.on_sent(client, 1)
    clients.on_sent(MANY[2], 1)
    assert clients.find_unread(ONE, now) == MANY[2]
    assert clients.find_unread(ONE, now + STALLED_S + 1.0) == MANY[5]


def test_the_sum_of_unread_bytes_follows_clients_that_read_and_leave() -> None:
    clients = connected(ONE, TWO)
    clients.on_sent(ONE, 5)
    clients.on_sent(TWO, 7)
    clients.on_sent(b"unknown", 100)
    assert clients.unread_bytes == 12
    clients.on_read(ONE, 4, 1.0)
    clients.on_read(ONE, 3, 1.0)  # an old report
    clients.on_read(b"unknown", 100, 1.0)
    assert clients.unread_bytes == 8
    clients.add(ONE, 1.0, "again")
    assert clients.unread_bytes == 8
    clients.ignore(TWO, 1.0)
    clients.remove(TWO)
    assert clients.unread_bytes == 1
    assert clients.expire(1e9) == [ONE]
    assert clients.unread_bytes == 0


LARGEST = 4 * MAX_RESULT_NUMBERS
"""Bytes of the largest result."""


def test_results_leave_room_for_messages_that_cannot_wait() -> None:
    clients = connected(ONE)
    clients.on_sent(ONE, clients.result_room(ONE))
    assert clients.find_unread(ONE, 1.0) is None
    clients.on_sent(ONE, MAX_UNREAD_BYTES // 4)
    assert clients.find_unread(ONE, 1.0) is None


def test_the_largest_result_fits_if_its_client_has_read_nearly_everything() -> None:
    clients = connected(ONE)
    clients.on_sent(ONE, MAX_UNREAD_BYTES // 4)
    assert clients.result_room(ONE) >= LARGEST


def test_results_wait_until_their_client_has_read() -> None:
    clients = connected(ONE, TWO)
    clients.on_sent(ONE, MAX_UNREAD_WITH_RESULTS)
    assert clients.result_room(ONE) == 0
    assert clients.result_room(TWO) == MAX_UNREAD_WITH_RESULTS
    clients.on_read(ONE, 100, 1.0)
    assert clients.result_room(ONE) == 100
    assert clients.result_room(b"unknown") == 0


def test_results_wait_if_all_clients_together_have_much_unread() -> None:
    clients = connected(ONE, *MANY)
    for client in MANY:
        clients.on_sent(client, (MAX_TOTAL_UNREAD_WITH_RESULTS - LARGEST) // len(MANY))
    assert not clients.must_large_results_wait
    clients.on_sent(MANY[3], 100)
    assert clients.must_large_results_wait
    assert clients.result_room(ONE) == LARGEST - 100


def test_a_client_is_stalled_if_it_reads_none_of_its_unread_bytes() -> None:
    clients = connected(ONE)
    assert not clients.is_stalled(ONE, 2.0, 9.0)
    clients.on_sent(ONE, 10)
    assert clients.is_stalled(ONE, 2.0, 9.0)
    clients.on_read(ONE, 1, 9.0)
    assert not clients.is_stalled(ONE, 2.0, 11.0)
    assert clients.is_stalled(ONE, 2.0, 11.5)
    assert not clients.is_stalled(b"unknown", 2.0, 9.0)


def test_a_client_that_does_not_read_is_ignored_for_a_while() -> None:
    clients = connected(ONE)
    clients.ignore(ONE, 1.0)
    assert ONE not in clients
    assert clients.is_ignored(ONE, IGNORED_S)
    assert not clients.is_ignored(ONE, 1.0 + IGNORED_S)
    assert not clients.is_ignored(ONE, 1.0)


def test_the_number_of_ignored_clients_is_bounded() -> None:
    clients = connected()
    for number in range(MAX_IGNORED + 1):
        clients.ignore(str(number).encode(), 0.0)
    assert not clients.is_ignored(b"0", 1.0)
    assert clients.is_ignored(b"1", 1.0)


def test_nothing_is_stored_for_an_unknown_client() -> None:
    clients = connected()
    clients.on_message(ONE, 1.0)
    clients.on_sent(ONE, MAX_UNREAD_BYTES + 1)
    clients.on_read(ONE, 5, 1.0)
    assert clients.find_unread(ONE, 1.0) is None
    assert (len(clients), clients.sent_bytes(ONE), clients.get_name(ONE)) == (0, 0, "")
