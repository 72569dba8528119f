"""What one client has still to be told, whose socket takes nothing.

What comes waits as tokens, and is read when it is told: in one go, and so in few events. But where
an answer may end by what it says, and at its end, it is read as it comes (`Answer.take`), and waits
as a delta. Either way it is one piece for each choice: news joined (`backlog`), deltas joined here.
A sink that is told the same deltas joined says the same, in fewer events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.engine.coalesce import merge_outputs
from gateway.formats.events import OutputDelta, merged
from gateway.generation.choice import Choice
from gateway.generation.sinks import Sink, extend
from protocol.errors import ServingError
from protocol.messages import Output, TokenLogprobs

MUCH = 1 << 14
"""Tokens that wait for one client, and alternatives whose logprobs are told: together two megabytes
of memory or so."""
MANY = 256
"""Pieces of news; so many are read rather than kept."""


class PendingOutput:
    """A sink, beside what waits unread."""

    def __init__(self) -> None:
        self._unread: dict[int, tuple[Choice, list[Output]]] = {}
        self._said: dict[int, tuple[Choice, OutputDelta]] = {}
        self._size = 0
        self._last_word: Callable[[Sink], None] | None = None

    @property
    def is_much(self) -> bool:
        """No more should wait here."""
        return self._size >= MUCH

    def keep(self, choice: Choice, output: Output) -> None:
        """News that does not end the choice, whatever it says."""
        _, outputs = self._unread.setdefault(choice.index, (choice, []))
        outputs.append(output)
        self._size += _size(output.tokens, output.logprobs)
        if len(outputs) >= MANY:
            self.read(choice)

    def read(self, choice: Choice) -> None:
        """What was kept of it."""
        _, outputs = self._unread.pop(choice.index, (choice, []))
        if not outputs:
            return
        output = merge_outputs(outputs)
        self._size -= _size(output.tokens, output.logprobs)
        delta = choice.reader.push(output)
        if not delta:
            return
        if choice.ask.demand is not None:
            choice.judge(choice.ask.demand, delta)
        self.delta(choice, delta)

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        _, whole = self._said.setdefault(choice.index, (choice, OutputDelta([], [], [])))
        extend(whole, delta)
        self._size += _size(delta.token_ids, delta.logprobs)

    def end(self) -> None:
        self._last_word = lambda sink: sink.end()

    def fail(self, error: ServingError) -> None:
        self._last_word = lambda sink: sink.fail(error)

    def tell(self, sink: Sink) -> bool:
        """The next of it: a choice's piece, in the order in which they were first heard of; behind
        the last the end. False where nothing waits."""
        for choice, _ in list(self._unread.values()):
            self.read(choice)
        if self._said:
            choice, whole = self._said.pop(next(iter(self._said)))
            self._size -= _size(whole.token_ids, whole.logprobs)
            sink.delta(choice, OutputDelta(merged(whole.events), whole.token_ids, whole.logprobs))
            return True
        if self._last_word is not None:
            say, self._last_word = self._last_word, None
            say(sink)
            return True
        return False


def _size(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> int:
    return len(tokens) + sum(map(_num_alternatives, logprobs))


def _num_alternatives(entry: TokenLogprobs) -> int:
    return len(entry.top_ids) + len(entry.asked_logprobs)
