"""Buffers output for a client that is not reading.

Output waits as tokens and is parsed when it is emitted, all at once and so in few events. But if a
stop string may end the answer, and at its end, it is parsed on arrival (`ChoiceGroup.on_report`)
and waits as a delta. Either way it is merged for each choice: outputs by `coalesce`, deltas here. A
sink writes the same text for merged deltas, in fewer events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.engine.coalesce import merge_outputs
from gateway.formats.events import OutputDelta, merged
from gateway.generation.choice import Choice
from gateway.generation.sinks import Sink, extend
from protocol.errors import ServingError
from protocol.messages import Output, TokenLogprobs

MAX_PENDING = 1 << 14
"""Most tokens and alternatives with logprobs that wait for one client: about 2 MB of memory."""
MAX_UNPARSED = 256
"""Most outputs of a choice that wait unparsed."""


class PendingOutput:
    """A sink for parsed deltas, and a buffer for unparsed outputs."""

    def __init__(self) -> None:
        self._unparsed: dict[int, tuple[Choice, list[Output]]] = {}
        self._deltas: dict[int, tuple[Choice, OutputDelta]] = {}
        self._size = 0
        self._last_event: Callable[[Sink], None] | None = None

    @property
    def is_full(self) -> bool:
        return self._size >= MAX_PENDING

    def hold(self, choice: Choice, output: Output) -> None:
        """Keep an output that cannot end the choice."""
        _, outputs = self._unparsed.setdefault(choice.index, (choice, []))
        outputs.append(output)
        self._size += _size(output.tokens, output.logprobs)
        if len(outputs) >= MAX_UNPARSED:
            self.parse(choice)

    def parse(self, choice: Choice) -> None:
        """Parse the outputs that were kept for `choice`."""
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
        """Emit the next choice's delta, or the end after the last one; False if nothing waits."""
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
    return len(tokens) + sum(map(_num_alternatives, logprobs))


def _num_alternatives(entry: TokenLogprobs) -> int:
    return len(entry.top_ids) + len(entry.asked_logprobs)
