"""Sinks receive the events of an answer: buffered, discarded or collected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.formats.events import OutputDelta
from gateway.generation.choice import Choice
from protocol.errors import ServingError


class Sink(Protocol):
    """Receives an answer. Called from the hub, so it must not block.

    It gets each choice's deltas in order, and then one of `end` and `fail` once, or nothing more.
    """

    def delta(self, choice: Choice, delta: OutputDelta) -> None: ...
    def end(self) -> None: ...
    def fail(self, error: ServingError) -> None: ...


class BufferSink:
    """Buffers events, in order, until the answer's sink is attached."""

    def __init__(self) -> None:
        self._events: list[Callable[[Sink], None]] = []

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        self._events.append(lambda sink: sink.delta(choice, delta))

    def end(self) -> None:
        self._events.append(lambda sink: sink.end())

    def fail(self, error: ServingError) -> None:
        self._events.append(lambda sink: sink.fail(error))

    def drain(self, sink: Sink) -> None:
        """Emit all buffered events to `sink`."""
        events, self._events = self._events, []
        for emit in events:
            emit(sink)


class NullSink:
    """Discards events, as those of an answer whose client has disconnected."""

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        pass

    def end(self) -> None:
        pass

    def fail(self, error: ServingError) -> None:
        pass


class CollectSink(NullSink):
    """Collects a whole answer: the deltas of each choice, joined into one."""

    def __init__(self, num_choices: int) -> None:
        self.whole = [OutputDelta([], [], []) for _ in range(num_choices)]

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        extend(self.whole[choice.index], delta)


def extend(whole: OutputDelta, delta: OutputDelta) -> None:
    """Append `delta` to `whole`, which must own its lists."""
    whole.events.extend(delta.events)
    whole.token_ids.extend(delta.token_ids)
    whole.logprobs.extend(delta.logprobs)
