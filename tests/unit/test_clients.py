"""Which clients an engine has, and when it drops one."""

from __future__ import annotations

from engine_core.clients import IGNORED_S, MAX_IGNORED, MAX_UNREAD_BYTES, Clients

ONE, TWO = b"one", b"two"


def greeted(*clients: bytes, lease_s: float = 60.0) -> Clients:
    found = Clients(lease_s)
    for client in clients:
        found.greet(client, 0.0, client.decode())
    return found


def test_a_silent_client_is_probed_once_a_second() -> None:
    clients = greeted(ONE, TWO)
    clients.hear(TWO, 5.0)
    assert clients.to_probe(1.0) == []
    assert clients.to_probe(5.0) == [ONE]
    assert clients.to_probe(5.5) == []
    assert clients.to_probe(6.0) == [ONE]
    clients.hear(ONE, 6.0)
    assert clients.to_probe(7.5) == [TWO]


def test_a_client_is_dropped_when_its_lease_is_over() -> None:
    clients = greeted(ONE, TWO)
    clients.hear(TWO, 30.0)
    assert clients.expire(60.0) == []
    assert clients.expire(61.0) == [ONE]
    assert clients.all() == [TWO]


def test_what_a_client_has_read_does_not_count_as_unread() -> None:
    clients = greeted(ONE)
    for _ in range(10):
        clients.on_sent(ONE, MAX_UNREAD_BYTES)
        assert not clients.reads_too_little(ONE)
        clients.on_read(ONE, clients.sent_bytes(ONE))
    clients.on_sent(ONE, MAX_UNREAD_BYTES + 1)
    assert clients.reads_too_little(ONE)


def test_a_client_cannot_have_read_what_was_not_sent() -> None:
    clients = greeted(ONE)
    clients.on_read(ONE, 1 << 60)
    clients.on_sent(ONE, MAX_UNREAD_BYTES + 1)
    assert clients.reads_too_little(ONE)


def test_what_is_unread_still_counts_after_a_second_hello() -> None:
    clients = greeted(ONE)
    clients.on_sent(ONE, MAX_UNREAD_BYTES + 1)
    clients.greet(ONE, 1.0, "again")
    assert clients.reads_too_little(ONE)
    assert clients.name_of(ONE) == "again"


def test_a_client_that_does_not_read_is_ignored_for_a_while() -> None:
    clients = greeted(ONE)
    clients.ignore(ONE, 1.0)
    assert ONE not in clients
    assert clients.is_ignored(ONE, IGNORED_S)
    assert not clients.is_ignored(ONE, 1.0 + IGNORED_S)
    assert not clients.is_ignored(ONE, 1.0)


def test_only_so_many_are_ignored_at_once() -> None:
    clients = greeted()
    for number in range(MAX_IGNORED + 1):
        clients.ignore(str(number).encode(), 0.0)
    assert not clients.is_ignored(b"0", 1.0)
    assert clients.is_ignored(b"1", 1.0)


def test_nothing_is_remembered_of_a_stranger() -> None:
    clients = greeted()
    clients.hear(ONE, 1.0)
    clients.on_sent(ONE, MAX_UNREAD_BYTES + 1)
    clients.on_read(ONE, 5)
    assert not clients.reads_too_little(ONE)
    assert (len(clients), clients.sent_bytes(ONE), clients.name_of(ONE)) == (0, 0, "")
