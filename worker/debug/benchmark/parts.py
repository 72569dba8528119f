"""Where the time of a step goes, told without changing what computes: each part is called through
a `TimedPart` that keeps a clock.

A part's time is its own: what it calls that is watched too is not in it. A device that works by
itself is waited for at every change of part, so that its work is counted where it was asked for;
that makes the step slower, which is told (`StepTiming.watched_s`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any


class PartsClock:
    """Seconds by part. `now` tells the time; on a device that works by itself, when it has done
    all that was asked for."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._inside: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside counts for `name`, but for the parts within it."""
        self._turn()
        self._inside.append(name)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def become(self, name: str) -> None:
        """From here on, the part that we are in is another."""
        self._turn()
        self._inside[-1] = name

    def _turn(self) -> None:
        now = self._now()
        if self._inside:
            part = self._inside[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


class TimedPart:
    """Another object, with the time of its calls counted for `part`, whichever method it is.

    then   what the time behind such a call counts for, in the part that it was called from
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
            self._clock.become(self._then)
        return result


class WatchedModel(TimedPart):
    """A model of worker/models: its forward pass is `other layers`, its logits are the `head`, and
    what comes behind those is `sampling`."""

    def __init__(self, model: Any, clock: PartsClock) -> None:
        super().__init__(model, clock, "other layers", then="sampling")
        self.logits = TimedPart(model.logits, clock, "head", then="sampling")


@contextmanager
def watched_linears(model: Any, clock: PartsClock) -> Iterator[None]:
    """While inside, all that can be called in the layers' weights counts as `linears`, and layers
    are computed one after the other, since nothing can be watched within a single call."""
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
