"""The tasks of a browser's trace, as tests/benchmarks/page_frames.py lists them."""

from __future__ import annotations

import json
from typing import Any

from tests.benchmarks.page_frames import SOURCE, TASK, main_thread_tasks

MAIN, OTHER = (1, 10), (1, 11)


def event(name: str, start_us: int, cpu_us: int, **more: Any) -> dict[str, Any]:
    """Return a complete event, which takes twice its CPU time."""
    pid, tid = more.pop("thread", MAIN)
    times = {"ts": start_us, "tdur": cpu_us, "dur": 2 * cpu_us}
    return {"name": name, "pid": pid, "tid": tid, "args": more, **times}


def thread_name(thread: tuple[int, int], name: str) -> dict[str, Any]:
    pid, tid = thread
    return {"name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def test_the_time_of_a_part_does_not_contain_that_of_the_parts_inside_it() -> None:
    events = [
        event("Layout", 1_003_000, 4_000),
        event(TASK, 1_000_000, 20_000),
        event(SOURCE, 1_000_000, 19_000, src_func="Send", src_file="cc/proxy.cc"),
        event("FunctionCall", 1_001_000, 10_000, data={"functionName": "update"}),
        event("Layout", 1_025_000, 2_000),
        event(TASK, 2_000_000, 1_000),
        event("between two tasks", 3_000_000, 500),
        event(TASK, 1_000_000, 90_000, thread=OTHER),
        thread_name(MAIN, "CrRendererMain"),
        thread_name(OTHER, "Compositor"),
    ]
    first, second = main_thread_tasks(json.dumps({"traceEvents": events}).encode())
    assert (first.at_s, first.cpu_ms, second.at_s, second.cpu_ms) == (0.0, 20.0, 1.0, 1.0)
    assert first.parts_ms == {
        TASK: 1.0,
        "(posted by Send of cc/proxy.cc)": 7.0,
        "script, update": 6.0,
        "Layout": 6.0,
    }
    assert second.parts_ms == {TASK: 1.0}
