"""Where start-up time goes: named phases, in order; the engine logs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

log = logging.getLogger(__name__)


class StartupTiming:
    """`with phases("load weights"): ...` adds (name, seconds) to `told`."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = perf_counter()
        yield
        seconds = perf_counter() - started
        self.told.append((name, round(seconds, 3)))
        log.debug("%s: %.2f s", name, seconds)
