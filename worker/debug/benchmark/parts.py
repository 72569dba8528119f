"""Times the parts of a step without changing the code that computes: each part is called through a
`TimedPart`, which runs a clock.

A part's time excludes the timed parts that it calls. A device with its own queue is synchronised at
every change of part, so that its work counts for the part that queued it. That makes the step
slower; `StepTiming.watched_s` reports the slower time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any


class PartsClock:
    """Seconds by part. `now` returns the time, after waiting for the device's queue if it has
    one."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._inside: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to part `name`, without that of nested parts."""
        self._turn()
        self._inside.append(name)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def rename_current(self, name: str) -> None:
        """Add the rest of the current part to part `name` instead."""
        self._turn()
        self._inside[-1] = name

    def _turn(self) -> None:
        now = self._now()
        if self._inside:
            part = self._inside[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


class TimedPart:
    """A wrapper that counts the time of its object's calls for `part`.

    then   the part that the caller's time counts for after such a call
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
    """A model of worker/models. Its forward pass is `other layers`, its logits are the `head`, and
    the time after them is `sampling`."""

    def __init__(self, model: Any, clock: PartsClock) -> None:
        super().__init__(model, clock, "other layers", then="sampling")
        self.logits = TimedPart(model.logits, clock, "head", then="sampling")


@contextmanager
def watched_linears(model: Any, clock: PartsClock) -> Iterator[None]:
    """Count calls of the layers' weights as `linears`. Layers are computed one after the other
    inside, because nothing can be timed within a single compiled call."""
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
