"""SSE frames, and the outlets that write them to a socket whose free space the test sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import gevent
import pytest

from gateway.http import sse
from gateway.http.client_socket import MAX_BUFFERED_BYTES, IteratorOutlet, SocketOutlet


class Wire:
    """The sending half of a socket. It accepts `room` bytes, and then would block. If `is_gone`, it
    raises BrokenPipeError."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent = b""
        self.is_gone = False
        self._sock = self  # gevent's sockets have the plain one inside

    def send(self, data: bytes) -> int:
        if self.is_gone:
            raise BrokenPipeError
        taken = bytes(data[: self.room])
        if not taken:
            raise BlockingIOError
        self.sent += taken
        self.room -= len(taken)
        return len(taken)

    @contextmanager
    def always_writable(self) -> Iterator[None]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.fileno = ours.fileno
            yield


def an_iterator_outlet(overflows: list[str], keep_alive_s: float = 60) -> IteratorOutlet:
    return IteratorOutlet(
        lambda: overflows.append("cut"),
        keep_alive=sse.KEEP_ALIVE,
        keep_alive_s=keep_alive_s,
        send_timeout_s=60,
    )


def a_socket_outlet(wire: Wire, overflows: list[str]) -> SocketOutlet:
    return SocketOutlet(
        wire,
        b"HEAD",
        on_overflow=lambda: overflows.append("cut"),
        keep_alive=sse.KEEP_ALIVE,
        keep_alive_s=60,
        send_timeout_s=60,
    )


def test_a_frame_is_one_data_line_and_an_empty_line() -> None:
    assert sse.frame(b'{"a":1}') == b'data: {"a":1}\n\n'


def test_an_iterator_yields_the_written_bytes_and_ends() -> None:
    outlet = an_iterator_outlet([])
    outlet.write(b"one")
    outlet.write(b"two")
    body = outlet.run()
    assert next(body) == b"onetwo"
    outlet.write(b"three")
    outlet.finish()
    assert list(body) == [b"three"]


def test_a_silent_iterator_yields_keep_alives() -> None:
    outlet = an_iterator_outlet([], keep_alive_s=0.001)
    assert next(outlet.run()) == sse.KEEP_ALIVE


def test_unread_output_is_bounded_and_the_client_is_cut_off_once() -> None:
    overflows: list[str] = []
    outlet = an_iterator_outlet(overflows)
    outlet.write(b"x" * MAX_BUFFERED_BYTES)
    assert not overflows
    outlet.write(b"y")
    outlet.write(b"z")
    assert overflows == ["cut"]
    assert list(outlet.run()) == []


def test_a_socket_gets_http_chunks_at_once() -> None:
    wire = Wire(room=1000)
    outlet = a_socket_outlet(wire, [])
    outlet.write(b"0123456789abcdef!")
    outlet.finish()
    outlet.finish()
    assert wire.sent == b"HEAD" + b"11\r\n0123456789abcdef!\r\n" + b"0\r\n\r\n"
    outlet.run()  # nothing is left to do


@pytest.mark.parametrize("room", range(0, 24))
def test_a_short_write_keeps_the_rest_in_order(room: int) -> None:
    wire = Wire(room)
    outlet = a_socket_outlet(wire, [])
    outlet.write(b"first")
    outlet.write(b"second")
    whole = b"HEAD5\r\nfirst\r\n6\r\nsecond\r\n"
    assert wire.sent == whole[:room]
    wire.room = 1000
    outlet.finish()
    with wire.always_writable():
        outlet.run()
    assert wire.sent == whole + b"0\r\n\r\n"


def test_a_socket_that_is_gone_ends_the_stream_without_a_sound() -> None:
    wire = Wire(room=1000)
    overflows: list[str] = []
    outlet = a_socket_outlet(wire, overflows)
    wire.is_gone = True
    outlet.write(b"lost")
    assert outlet.is_cut
    outlet.write(b"lost, too")
    outlet.finish()
    with gevent.Timeout(1):
        outlet.run()
    assert wire.sent == b"HEAD"
    assert overflows == []


def test_a_full_socket_overflows_at_the_bound() -> None:
    wire = Wire(room=4)
    overflows: list[str] = []
    outlet = a_socket_outlet(wire, overflows)
    for _ in range(20):
        outlet.write(b"x" * (MAX_BUFFERED_BYTES // 10))
    assert overflows == ["cut"]
    assert outlet.is_cut


@pytest.fixture
def writable() -> Iterator[int]:
    """Return a file descriptor that gevent's hub always finds writable."""
    ends = os.pipe()
    yield ends[1]
    for end in ends:
        os.close(end)


def test_a_socket_reports_when_its_buffer_fills_and_when_it_is_empty(writable: int) -> None:
    events: list[str] = []
    wire = Wire(room=len("HEAD") + len("6\r\n123456\r\n"))
    wire.fileno = lambda: writable  # type: ignore[attr-defined]
    outlet = a_socket_outlet(wire, events)

    def go_on() -> None:
        events.append("room")
        outlet.write(b"the rest")
        outlet.finish()

    assert outlet.watch_buffer(lambda: events.append("full"), go_on)
    outlet.write(b"123456")
    assert not events
    outlet.write(b"more")
    outlet.write(b"still more")
    assert events == ["full"]
    wire.room = 1000
    with gevent.Timeout(10):
        outlet.run()
    assert events == ["full", "room"]
    assert wire.sent.endswith(b"a\r\nstill more\r\n8\r\nthe rest\r\n0\r\n\r\n")


def test_the_end_of_a_write_that_was_let_through_does_not_cut_it_off(writable: int) -> None:
    """A single write to an empty buffer may be longer than the buffer's limit."""
    overflows: list[str] = []
    wire = Wire(room=len("HEAD"))
    wire.fileno = lambda: writable  # type: ignore[attr-defined]
    outlet = a_socket_outlet(wire, overflows)
    outlet.write(b"x" * (MAX_BUFFERED_BYTES + 1))
    outlet.finish()
    outlet.finish()
    wire.room = 2 * MAX_BUFFERED_BYTES
    with gevent.Timeout(10):
        outlet.run()
    assert not overflows
    assert wire.sent.endswith(b"xx\r\n0\r\n\r\n")
    assert wire.sent.count(b"0\r\n\r\n") == 1


def test_a_socket_that_has_not_taken_the_head_is_full_already() -> None:
    outlet = a_socket_outlet(Wire(room=2), [])
    assert not outlet.watch_buffer(lambda: None, lambda: None)


def test_the_buffer_is_full_until_the_server_reads_the_rest() -> None:
    events: list[str] = []
    outlet = an_iterator_outlet(events)
    assert outlet.watch_buffer(lambda: events.append("full"), lambda: events.append("room"))
    outlet.write(b"one")
    outlet.write(b"two")
    assert not events, "the server has not been given anything yet"
    body = outlet.run()
    assert next(body) == b"onetwo"
    outlet.write(b"three")
    assert events == ["full"]
    assert next(body) == b"three"
    assert events == ["full"], "the last of it is not taken yet"
    outlet.finish()
    assert list(body) == []
    assert events == ["full", "room"]
