"""Sinks receive the events of an answer. Those in this module buffer, discard or collect them.

`PendingOutput` buffers output for a client that is not reading. Most of it is kept as tokens. They
are parsed together when they are emitted, which gives few events. Output is parsed on arrival only
if it may end the choice: because it is the last output, or because any token may end the choice
(`OutputParser.may_stop`). Parsed output is kept as deltas. Both kinds are merged for each choice:
outputs by `coalesce`, deltas here. A sink writes the same text for merged deltas, in fewer events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.engine.coalesce import merge_outputs
from gateway.formats.events import OutputDelta, merged
from gateway.generation.request import Choice
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output
from protocol.wire.errors import ServingError

MAX_PENDING = 1 << 14
"""Maximum number of tokens, including alternative tokens in logprobs, that are kept for one client:
about 2 MB."""
MAX_UNPARSED = 256
"""Maximum number of unparsed outputs that are kept for one choice."""


class Sink(Protocol):
    """The interface of an answer's receiver. The methods are called in gevent's hub and must not
    block.

    The sink gets the deltas of each choice in order. Then exactly one of `end` and `fail` is called
    once, or neither if the client has disconnected.
    """

    def delta(self, choice: Choice, delta: OutputDelta) -> None: ...
    def end(self) -> None: ...
    def fail(self, error: ServingError) -> None: ...


class BufferSink:
    """Buffers events, in order, until the answer's own sink is attached."""

    def __init__(self) -> None:
        self._events: list[Callable[[Sink], None]] = []

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        self._events.append(lambda sink: sink.delta(choice, delta))

    def end(self) -> None:
        self._events.append(lambda sink: sink.end())

    def fail(self, error: ServingError) -> None:
        self._events.append(lambda sink: sink.fail(error))

    def drain(self, current: Callable[[], Sink]) -> None:
        """Emit the buffered events in order. `current` is called before each event and returns the
        sink that receives it."""
        events, self._events = self._events, []
        for emit in events:
            emit(current())


class NullSink:
    """Discards all events, because the client has disconnected."""

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        pass

    def end(self) -> None:
        pass

    def fail(self, error: ServingError) -> None:
        pass


class CollectSink(NullSink):
    """Collects a whole answer in `whole`: one delta for each choice, which joins all its deltas.

    It ignores `end` and `fail`. So the caller waits for the end with `ChoiceGroup.wait`, which
    raises the error if a choice failed.
    """

    def __init__(self, num_choices: int) -> None:
        self.whole = [OutputDelta([], [], []) for _ in range(num_choices)]

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        extend(self.whole[choice.index], delta)


def extend(whole: OutputDelta, delta: OutputDelta) -> None:
    """Append `delta` to `whole`, whose lists must not be shared with another delta."""
    whole.events.extend(delta.events)
    whole.token_ids.extend(delta.token_ids)
    whole.logprobs.extend(delta.logprobs)


class PendingOutput:
    """Buffers output while the client does not read. `hold` adds unparsed output; `delta`, as in
    any sink, adds parsed output."""

    def __init__(self) -> None:
        self._unparsed: dict[int, tuple[Choice, list[Output]]] = {}
        self._deltas: dict[int, tuple[Choice, OutputDelta]] = {}
        self._size = 0
        self._last_event: Callable[[Sink], None] | None = None

    @property
    def is_full(self) -> bool:
        return self._size >= MAX_PENDING

    def hold(self, choice: Choice, output: Output) -> None:
        """Keep an output that cannot end the choice, without parsing it."""
        _, outputs = self._unparsed.setdefault(choice.index, (choice, []))
        outputs.append(output)
        self._size += _size(output.tokens, output.logprobs)
        if len(outputs) >= MAX_UNPARSED:
            self.parse(choice)

    def parse(self, choice: Choice) -> None:
        """Parse the outputs of `choice` that wait unparsed, and keep the delta."""
        _, outputs = self._unparsed.pop(choice.index, (choice, []))
        if not outputs:
            return
        output = merge_outputs(outputs)
        self._size -= _size(output.tokens, output.logprobs)
        delta = choice.parser.push(output)
        if not delta:
            return
        if choice.prompt_request.tool_choice_check is not None:
            choice.warn_if_unmet(choice.prompt_request.tool_choice_check, delta)
        self.delta(choice, delta)

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        _, whole = self._deltas.setdefault(choice.index, (choice, OutputDelta([], [], [])))
        extend(whole, delta)
        self._size += _size(delta.token_ids, delta.logprobs)

    def end(self) -> None:
        self._last_event = lambda sink: sink.end()

    def fail(self, error: ServingError) -> None:
        self._last_event = lambda sink: sink.fail(error)

    def emit_next(self, sink: Sink) -> bool:
        """Emit the merged delta of one choice to `sink`, or the end if no delta is left. Return
        whether anything was emitted."""
        for choice, _ in list(self._unparsed.values()):
            self.parse(choice)
        if self._deltas:
            choice, whole = self._deltas.pop(next(iter(self._deltas)))
            self._size -= _size(whole.token_ids, whole.logprobs)
            sink.delta(choice, OutputDelta(merged(whole.events), whole.token_ids, whole.logprobs))
            return True
        if self._last_event is not None:
            emit, self._last_event = self._last_event, None
            emit(sink)
            return True
        return False


def _size(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> int:
    """Return the number of tokens and alternative tokens."""
    return len(tokens) + sum(map(_num_alternatives, logprobs))


def _num_alternatives(entry: TokenLogprobs) -> int:
    return len(entry.top_ids) + len(entry.asked_logprobs)
