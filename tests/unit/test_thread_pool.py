"""Functions in threads: an exception is raised in the greenlet that waits, and printed nowhere."""

from __future__ import annotations

import pytest
from gevent.threadpool import ThreadPool

from gateway.thread_pool import result_of


class ThreadCalls(Exception):
    pass


def test_an_exception_in_a_thread_is_raised_in_its_caller_and_printed_nowhere(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise ThreadCalls("words of a request")

    pool = ThreadPool(1)
    assert result_of(pool, lambda: 7) == 7
    with pytest.raises(ThreadCalls, match="words of a request"):
        result_of(pool, fail)
    pool.kill()
    assert capfd.readouterr() == ("", "")
