"""The link between a script and its text process, when signal handlers interrupt the script."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from protocol.sdk import offline_link
from protocol.sdk.offline_link import FrameLink
from protocol.sdk.offline_messages import (
    FrameReader,
    FromText,
    OfflineAbort,
    OfflineAnswer,
    OfflineRequest,
    ToText,
    to_frame,
)
from tests.support.waiting import HANG_S


class InterruptedHalfway(Exception):
    """Raised by a signal handler, like KeyboardInterrupt."""


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    own, peer = socket.socketpair()
    with own, peer:
        yield own, peer


@pytest.fixture
def link(sockets: tuple[socket.socket, socket.socket]) -> Iterator[FrameLink]:
    link = FrameLink(sockets[0], FromText)
    yield link
    link.close()


@pytest.fixture
def peer(sockets: tuple[socket.socket, socket.socket]) -> Iterator[socket.socket]:
    """The socket of the text process. It is shut down if a test hangs."""
    peer = sockets[1]
    watchdog = threading.Timer(HANG_S, lambda: peer.shutdown(socket.SHUT_RDWR))
    watchdog.start()
    yield peer
    watchdog.cancel()


@pytest.fixture
def dice() -> Iterator[random.Random]:
    """Random numbers, for the times of SIGALRM. Its handler raises InterruptedHalfwayHalfway."""

    def interrupt(*_: object) -> None:
        raise InterruptedHalfway

    before = signal.signal(signal.SIGALRM, interrupt)
    yield random.Random(0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def answer(number: int) -> OfflineAnswer:
    return OfflineAnswer(request=number, status=200, body=b"x" * 1000)


def test_a_wait_is_interrupted_whenever_the_signal_arrives(
    link: FrameLink,
    peer: socket.socket,
    dice: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """About one of a hundred of these signals arrives just before the wait."""
    monkeypatch.setattr(offline_link, "WAKE_S", 0.01)

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, 2e-5))
        assert link.receive() is not None, "the watchdog has ended the wait"

    for _ in range(4000):
        with pytest.raises(InterruptedHalfway):
            wait()
    peer.sendall(to_frame(answer(7)))
    assert link.receive() == answer(7)


def test_frames_are_whole_whatever_is_interrupted(
    link: FrameLink, peer: socket.socket, dice: random.Random
) -> None:
    """The peer answers each request. After all interruptions the link still has the answers."""

    def serve() -> None:
        reader = FrameReader(peer, ToText)
        while (message := reader.read()) is not None:
            if isinstance(message, OfflineRequest):
                peer.sendall(to_frame(answer(message.request)))

    thread = threading.Thread(target=serve)
    thread.start()
    num_interrupted = 0
    for number in range(1500):
        try:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 3e-4))
            request = OfflineRequest(request=number, path="/", body=b"y" * 300_000)
            link.send(request)
            link.receive()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except InterruptedHalfway:
            num_interrupted += 1
            link.send(OfflineAbort(requests=[number]))
    assert num_interrupted > 100
    link.send(OfflineRequest(request=-1, path="/", body=b""))
    while (last := link.receive()) != answer(-1):
        assert last == answer(last.request)
    link.close()
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_forked_process_closes_only_its_copy_of_the_socket(
    link: FrameLink, sockets: tuple[socket.socket, socket.socket], peer: socket.socket
) -> None:
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        link.close()
        os._exit(7 if sockets[0].fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    peer.sendall(to_frame(answer(7)))
    assert link.receive() == answer(7)
    link.send(OfflineAbort(requests=[7]))
    assert FrameReader(peer, ToText).read() == OfflineAbort(requests=[7])


def test_the_end_of_the_other_side_is_reported_each_time(
    link: FrameLink, peer: socket.socket
) -> None:
    peer.sendall(to_frame(answer(1)))
    peer.shutdown(socket.SHUT_RDWR)
    assert link.receive() == answer(1)
    assert link.receive() is None
    assert link.receive() is None
    link.send(OfflineAbort(requests=[1]))
    link.close()
    link.close()
