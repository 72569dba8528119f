"""Times the phases of start-up, in their order. The engine logs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

log = logging.getLogger(__name__)


class StartupTiming:
    """Times phases: `with timing("load weights"): ...` appends ("load weights", seconds) to
    `phases`."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = perf_counter()
        yield
        seconds = perf_counter() - started
        self.phases.append((name, round(seconds, 3)))
        log.debug("%s: %.2f s", name, seconds)
