"""Times the parts of a step. The code that computes is unchanged: each part is called through a
`TimedPart`, which runs a clock. If a step is one call of the compiled kernels, the kernels measure
its parts themselves (`timed_kernels`).

A part's time excludes the timed parts that it calls. A device with its own queue is synchronised at
every change of part, so that its work counts for the part that queued it. This slows the step down;
`StepTiming.watched_s` is the time of the slower step.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from protocol.tools.bench import PARTS
from worker.kernels.native import NativeKernels

_KERNELS = "kernels"


class PartsClock:
    """Clock that adds up seconds by part. `now` returns the time, after waiting for the device's
    queue if there is one."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._inside: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to part `name`, except the time of nested parts."""
        self._turn()
        self._inside.append(name)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def rename_current(self, name: str) -> None:
        """Count the rest of the current part's time for part `name`."""
        self._turn()
        self._inside[-1] = name

    def _turn(self) -> None:
        now = self._now()
        if self._inside:
            part = self._inside[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


class TimedPart:
    """Wrapper of an object or function. The time of its calls counts for `part`.

    then   part for which the caller's time counts after a call; None: the same part as before
    """

    def __init__(self, inner: Any, clock: PartsClock, part: str, then: str | None = None) -> None:
        self._inner, self._clock, self._part, self._then = inner, clock, part, then

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._timed(self._inner, *args, **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value
        return lambda *args, **options: self._timed(value, *args, **options)

    def _timed(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self._clock.part(self._part):
            result = call(*args, **options)
        if self._then is not None:
            self._clock.rename_current(self._then)
        return result


class WatchedModel(TimedPart):
    """Wrapper of a model of worker/models. The time of its forward pass counts for `other layers`,
    that of its logits for `head`, and the caller's time after either call for `sampling`."""

    def __init__(self, model: Any, clock: PartsClock) -> None:
        super().__init__(model, clock, "other layers", then="sampling")
        self.logits = TimedPart(model.logits, clock, "head", then="sampling")


@contextmanager
def timed_kernels(kernels: NativeKernels, clock: PartsClock) -> Iterator[None]:
    """Inside the `with` block, let the compiled calls measure their parts. Afterwards, `clock` has
    the time of these parts. The caller's time after a call counts for `sampling`, and what a call
    takes beside its parts, such as starting threads, for `overhead`."""
    library = kernels.library
    times = (ctypes.c_int64 * (len(PARTS) - 1))()
    library.time_parts(ctypes.addressof(times))
    timed: Any = TimedPart(library, clock, _KERNELS, then="sampling")
    kernels.library = timed
    try:
        yield
    finally:
        kernels.library = library
        library.time_parts(None)
    seconds = clock.seconds
    measured = {part: time / 1e9 for part, time in zip(PARTS, times, strict=False)}
    beside = seconds.pop(_KERNELS, 0.0) - sum(measured.values())
    for part, time in {**measured, "overhead": beside}.items():
        seconds[part] = seconds.get(part, 0.0) + time


@contextmanager
def watched_linears(model: Any, clock: PartsClock) -> Iterator[None]:
    """Inside the `with` block, count the time of the layers' linears for the part `linears`.
    Meanwhile the compiled call for the whole model is off, because its parts cannot be timed."""
    replaced: list[tuple[Any, str, Any]] = [(model, "whole", model.whole)]
    model.whole = None
    for layer in model.weights.layers:
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            if callable(value):
                replaced.append((layer, field.name, value))
                setattr(layer, field.name, TimedPart(value, clock, "linears"))
    try:
        yield
    finally:
        for layer, name, value in replaced:
            setattr(layer, name, value)
