"""The parser chain of a formatted answer: token ids, pieces, format parser, stop strings, events.

Stop strings are matched in content only. One inside reasoning or a call's arguments ends nothing.
Content on both sides of a call or of reasoning is not one text, so a stop string does not span it.
If only one call is allowed, the answer ends with that call.

Special tokens have no text here, except those that occur in the format's markers: the parser gets
them as `MarkerPart`s, which count as text within a marker.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.formats.events import Content, Event, OutputWarning, Reasoning, ToolCallEnd
from gateway.formats.parser import FormatParser, Lexicon, MarkerToken, Piece
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop import StopMatcher


class ParserChain:
    """The chain of one choice.

    parts        special tokens are missing in the detokenizer's text, so markers need them as parts
    min_tokens   content of the first `min_tokens` tokens is not searched for stop strings
    thoughts     reasoning is emitted
    many         more than one call is allowed
    completed    number of complete calls
    full         the answer has ended with the only call that is allowed
    """

    __slots__ = (
        "_detokenizer",
        "_is_plain",
        "_many",
        "_min_tokens",
        "_pieces",
        "_read_by_id",
        "_stop",
        "_thoughts",
        "completed",
        "full",
        "num_tokens",
        "parser",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: FormatParser,
        stop: StopMatcher | None,
        *,
        parts: bool = True,
        min_tokens: int = 0,
        thoughts: bool = True,
        many: bool = True,
    ) -> None:
        lexicon: Lexicon = parser.context.lexicon
        self._detokenizer = detokenizer
        self._pieces: dict[int, Piece] = lexicon.pieces
        if not parts and lexicon.parts:
            self._pieces = {i: p for i, p in lexicon.pieces.items() if isinstance(p, MarkerToken)}
        self._read_by_id = frozenset(self._pieces)
        self._stop = stop
        self._min_tokens = min_tokens if stop is not None else 0
        self._thoughts = thoughts
        self._many = many
        self._is_plain = stop is None and thoughts and many  # all is sent, and nothing looked for
        self.parser = parser
        self.num_tokens = 0
        self.completed = 0
        self.full = False

    @property
    def ended(self) -> bool:
        """Whether a stop string or the only allowed call has ended the answer. Nothing more is
        emitted.
        """
        return self.full or (self._stop is not None and self._stop.matched is not None)

    def is_marker(self, token_id: int | None) -> bool:
        """Return whether the token is a marker or a part of one."""
        return token_id in self._pieces

    def push(self, ids: Sequence[int]) -> list[Event]:
        if self._is_plain and self._read_by_id.isdisjoint(ids):  # as nearly always
            self.num_tokens += len(ids)
            text = self._detokenizer.push(ids)
            return self._counted(self.parser.push(text)) if text else []
        unsearched = self._min_tokens - self.num_tokens
        self.num_tokens += len(ids)
        if unsearched <= 0:
            return self._filtered(self._parse(ids), search=self._stop is not None)
        events = self._filtered(self._parse(ids[:unsearched]), search=False)
        if len(ids) > unsearched and not self.ended:
            events += self._filtered(self._parse(ids[unsearched:]), search=True)
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """Return the remaining events. `complete`: the model ended by itself and was not cut
        off.
        """
        search = self._stop is not None and self.num_tokens > self._min_tokens
        rest = self._text(self._detokenizer.finish()) + self.parser.finish(complete)
        events = self._filtered(rest, search=search)
        if search and not self.ended:
            self._flush(events)
        return events

    def _parse(self, ids: Sequence[int]) -> list[Event]:
        if self._read_by_id.isdisjoint(ids):
            return self._text(self._detokenizer.push(ids))
        events: list[Event] = []
        start = 0
        for at, token_id in enumerate(ids):
            if (piece := self._pieces.get(token_id)) is not None:
                text = self._detokenizer.push(ids[start:at]) + self._detokenizer.finish()
                events += self._text(text)
                events += self.parser.push(piece)
                start = at + 1
        return events + self._text(self._detokenizer.push(ids[start:]))

    def _text(self, text: str) -> list[Event]:
        return self.parser.push(text) if text else []

    def _filtered(self, events: list[Event], *, search: bool) -> list[Event]:
        """Return the part of `events` that the client receives, up to the end of the answer."""
        if not search and self._thoughts and self._many:
            return self._counted(events)
        sent: list[Event] = []
        for event in events:
            self._filter(event, sent, search)
            if self.ended:
                break
        return sent

    def _counted(self, events: list[Event]) -> list[Event]:
        for event in events:
            if type(event) is ToolCallEnd:
                self.completed += 1
        return events

    def _filter(self, event: Event, sent: list[Event], search: bool) -> None:
        if isinstance(event, Content):
            text = self._stop.push(event.text) if search and self._stop else event.text
            if text:
                sent.append(Content(text))
            return
        if search and not isinstance(event, OutputWarning):
            self._flush(sent)
            if self.ended:
                return
        if self._thoughts or not isinstance(event, Reasoning):
            sent.append(event)
        if isinstance(event, ToolCallEnd):
            self.completed += 1
            self.full = not self._many

    def _flush(self, sent: list[Event]) -> None:
        """Emit content that was held back because it might have become a stop string."""
        assert self._stop is not None
        if text := self._stop.finish():
            sent.append(Content(text))
