"""Who hears an answer: somebody, nobody yet, nobody any more, or who wants the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.formats.events import OutputDelta
from gateway.generation.choice import Choice
from protocol.errors import ServingError


class Sink(Protocol):
    """Called from the hub, so it must not block. It hears each choice's deltas in their order, and
    then one of `end` and `fail`, once; or nothing more."""

    def delta(self, choice: Choice, delta: OutputDelta) -> None: ...
    def end(self) -> None: ...
    def fail(self, error: ServingError) -> None: ...


class BufferSink:
    """Nobody listens yet: what is said is kept, and told in its order to the one who comes. That is
    soon: as soon as all choices are accepted."""

    def __init__(self) -> None:
        self._said: list[Callable[[Sink], None]] = []

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        self._said.append(lambda sink: sink.delta(choice, delta))

    def end(self) -> None:
        self._said.append(lambda sink: sink.end())

    def fail(self, error: ServingError) -> None:
        self._said.append(lambda sink: sink.fail(error))

    def tell(self, sink: Sink) -> None:
        said, self._said = self._said, []
        for say in said:
            say(sink)


class NullSink:
    """The client has gone."""

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        pass

    def end(self) -> None:
        pass

    def fail(self, error: ServingError) -> None:
        pass


class CollectSink:
    """A whole answer: each choice's deltas, joined into one."""

    def __init__(self, num_choices: int) -> None:
        self.whole = [OutputDelta([], [], []) for _ in range(num_choices)]

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        extend(self.whole[choice.index], delta)

    def end(self) -> None:
        pass

    def fail(self, error: ServingError) -> None:
        pass


def extend(whole: OutputDelta, delta: OutputDelta) -> None:
    """`delta` is said behind `whole`, whose lists are its own."""
    whole.events.extend(delta.events)
    whole.token_ids.extend(delta.token_ids)
    whole.logprobs.extend(delta.logprobs)
