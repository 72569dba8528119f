"""Settings for all tests: no test uses the network by itself, and none takes all cores.

They are set before any library is imported, because libraries read them once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import settings

from tests.support.examples import examples

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Other processes run tests beside this one, and their threads would wait for one another. A
    # default would have no effect, because the process that started this one has exported its own
    # number.
    os.environ["OMP_NUM_THREADS"] = "1"
else:
    os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))

# The worker sets it too (worker/device/environment.py). Threads that spin while they wait for one
# another take the cores away from the threads that they wait for, on a machine that does other
# work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Time on a shared machine says nothing about an example. In CI the examples are always the same, so
# that only a change can cause a failure; elsewhere they are new each time.
settings.register_profile(
    "tidegate",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=examples(50, 100),
)
settings.load_profile("tidegate")


ELSEWHERE: list[tuple[Any, ...]] = []
"""Rows for the table of `pytest_terminal_summary`, from the worker processes of pytest-xdist."""


def pytest_collectstart() -> None:
    """Stop the garbage collector until `pytest_collection_finish`. The modules and tests that are
    collected stay, and to visit them took a fifth of the time of the collection."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with tests that are marked `long` first. If one of them started last, one process
    would run it while the others had nothing to do."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Let the garbage collector ignore the 700,000 objects that modules have made until now. On a
    busy machine, to visit them took seconds, in which no thread of this process could run: neither
    a test nor the fakes that a server under test was connected to."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with 1, 2 and 3 threads of torch."""
    import torch  # few tests need it

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _rows() -> list[tuple[Any, ...]]:
    kit = sys.modules.get("tests.support.formats")
    return [astuple(row) for row in kit.ROWS] if kit is not None else []


def pytest_sessionfinish(session: Any) -> None:
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["rows"] = _rows()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    ELSEWHERE.extend(getattr(node, "workeroutput", {}).get("rows", ()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many answers of each format were parsed, and in how many ways they were cut."""
    rows = sorted(_rows() + ELSEWHERE)
    if rows:
        from tests.support import formats

        terminalreporter.section("answers read, however they are cut")
        terminalreporter.write_line(formats.table([formats.FormatRow(*row) for row in rows]))
