"""Events of the supervisor's loop whose descriptors change meanwhile, and what a job prints."""

from __future__ import annotations

import os
import selectors

import msgspec
import pytest

from tools.processes.model_job import JobProgress, Removed
from tools.processes.model_jobs import read_report
from tools.processes.watch import current_events


@pytest.mark.parametrize("is_reused", [False, True])
def test_an_event_of_a_closed_descriptor_is_left_out_even_if_its_number_is_reused(
    is_reused: bool,
) -> None:
    pipes = [os.pipe() for _ in range(3)]
    first, second, new = (read for read, _ in pipes)
    called: list[str] = []

    def on_event(other: int) -> None:
        """End a job with the output `other`, and start the next one."""
        called.append("old")
        selector.unregister(other)
        if is_reused:
            os.dup2(new, other)
            selector.register(other, selectors.EVENT_READ, lambda: called.append("new"))

    with selectors.DefaultSelector() as selector:
        selector.register(first, selectors.EVENT_READ, lambda: on_event(second))
        selector.register(second, selectors.EVENT_READ, lambda: on_event(first))
        for _, write in pipes:
            os.write(write, b"x")
        for call in current_events(selector, 0):
            call()
        assert called == ["old"]
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)


@pytest.mark.parametrize("report", [JobProgress(status="pulling"), Removed(freed_bytes=5)])
def test_a_report_is_read_as_it_was_written(report: JobProgress | Removed) -> None:
    assert read_report(msgspec.json.encode(report)) == report


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"warning: slow",
        b"{",
        b"[]",
        b'{"type": "gone"}',
        b'{"type":"removed"}',
        b'{"type": "\xff"}',
    ],
)
def test_other_lines_of_a_job_are_no_reports(line: bytes) -> None:
    assert read_report(line) is None
