"""Which of its two processes runs a call: small calls never wait for large ones."""

from __future__ import annotations

from collections.abc import Iterator

import gevent
import pytest
from gevent.event import Event

from gateway.sandbox.messages import HEAD_BYTES, LoadTemplate, Reply, TemplateRendered, decode_call
from gateway.sandbox.process import SMALL_BYTES, LimitExceeded, SandboxPool

LARGE = "x" * (SMALL_BYTES + 1)


class FakeProcess:
    """Runs one call at a time, in their order, when the test releases it."""

    def __init__(self) -> None:
        self.is_started = self.is_closed = False
        #: Sources of the calls that were sent, oldest first.
        self.sent: list[str] = []
        self._ends: list[Event] = []
        self.fails = False

    def start(self) -> None:
        self.is_started = True

    def close(self) -> None:
        self.is_closed = True

    def call_frame(self, frame: bytes) -> Reply:
        call = decode_call(frame[HEAD_BYTES:])
        assert isinstance(call, LoadTemplate)
        self.sent.append(call.source)
        self._ends.append(Event())
        self._ends[-1].wait()
        if self.fails:
            raise LimitExceeded("it takes too much time")
        return TemplateRendered(call.source)

    def finish(self, index: int = 0) -> None:
        self._ends[index].set()


@pytest.fixture
def first() -> FakeProcess:
    return FakeProcess()


@pytest.fixture
def second() -> FakeProcess:
    return FakeProcess()


@pytest.fixture
def pool(first: FakeProcess, second: FakeProcess) -> Iterator[SandboxPool]:
    pool = SandboxPool(first, second)
    pool.start()
    yield pool
    pool.close()
    assert first.is_closed
    assert second.is_closed


def send(pool: SandboxPool, *sources: str) -> list[gevent.Greenlet]:
    """Send calls, each from a greenlet of its own that then waits for its reply."""
    asked = [gevent.spawn(pool.call, LoadTemplate(source, {})) for source in sources]
    gevent.sleep(0)
    return asked


def test_small_calls_use_one_process(
    pool: SandboxPool, first: FakeProcess, second: FakeProcess
) -> None:
    asked = send(pool, "a", "b", "c")
    assert (first.sent, second.sent) == (["a", "b", "c"], [])
    assert first.is_started
    assert not second.is_started
    for index in range(3):
        first.finish(index)
    assert [each.get() for each in asked] == [*map(TemplateRendered, "abc")]


def test_a_small_call_does_not_wait_for_large_ones(
    pool: SandboxPool, first: FakeProcess, second: FakeProcess
) -> None:
    large = send(pool, *[LARGE] * 4)
    assert second.is_started
    (small,) = send(pool, "small")
    assert (first.sent, second.sent) == ([LARGE] * 4, ["small"])
    second.finish()
    assert small.get() == TemplateRendered("small")
    assert not any(each.ready() for each in large)
    for index in range(4):
        first.finish(index)
    gevent.joinall(large, raise_error=True)


def test_small_calls_return_to_the_first_process_after_a_large_one_has_ended(
    pool: SandboxPool, first: FakeProcess, second: FakeProcess
) -> None:
    first.fails = True
    (large,) = send(pool, LARGE)
    first.finish()
    with pytest.raises(LimitExceeded):
        large.get()
    send(pool, "small")
    assert (first.sent, second.sent) == ([LARGE, "small"], [])


def test_a_killed_greenlet_with_a_large_call_is_forgotten(
    pool: SandboxPool, first: FakeProcess, second: FakeProcess
) -> None:
    (large,) = send(pool, LARGE)
    large.kill()
    send(pool, "small")
    assert (first.sent, second.sent) == ([LARGE, "small"], [])


def test_a_call_that_cannot_be_sent_is_refused(pool: SandboxPool) -> None:
    with pytest.raises(LimitExceeded):
        pool.call(LoadTemplate("\ud800", {}))
