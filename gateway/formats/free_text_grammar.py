"""The grammar of free text in which everything that opens a call continues as a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.formats.grammar_forms import ANY_TEXT, either, pattern_not_starting_with, sequence
from gateway.formats.parser import Lexicon
from protocol.grammar import Form, Pattern, Repeat, Until


class FreeText:
    """Free text with calls and markers in it.

    calls  opener -> form of what must follow; empty if there are no calls
    marks  markers without a meaning of their own, which may stand anywhere. Spelt-out markers are
           ordinary text and need no entry
    many   further calls may follow the first; otherwise the first call ends the answer
    """

    def __init__(
        self, calls: Mapping[str, Form], marks: Iterable[str], lexicon: Lexicon, *, many: bool
    ) -> None:
        self.calls = _grouped(calls, lexicon)
        self.marks = sorted(mark for mark in set(marks) - {*calls} if _has_token(mark, lexicon))
        self.many = many

    def anything(self) -> Form:
        steps = [self._mark()] if self.marks else []
        if self.many:
            steps += [self._call()] if self.calls else []
            return sequence(Repeat(either(steps)), ANY_TEXT) if steps else ANY_TEXT
        last = either((self._call(), ANY_TEXT)) if self.calls else ANY_TEXT
        return sequence(*map(Repeat, steps), last)

    def not_starting_with(self, beginnings: Iterable[str]) -> Form:
        """Return the form of free text that starts with none of `beginnings`."""
        guard = pattern_not_starting_with(beginnings)
        steps = [sequence(self._mark(guard), self.anything())] if self.marks else []
        if self.calls:
            steps.append(sequence(self._call(guard), self.anything() if self.many else ""))
        return either([*steps, Pattern(guard)])

    def _call(self, before: str = ANY_TEXT.pattern) -> Form:
        return either(sequence(Until(opener, before), rest) for opener, rest in self.calls.items())

    def _mark(self, before: str = ANY_TEXT.pattern) -> Form:
        return either(Until(mark, before) for mark in self.marks)


def _grouped(calls: Mapping[str, Form], lexicon: Lexicon) -> dict[str, Form]:
    """Return a form of what must follow each opener, grouped by the text before the first special
    token.

    A spelt-out opener ends a text where the opener is complete, or where its first special token
    begins. So if two openers are equal up to that point, the shorter beginning opens both.
    """
    found: dict[str, dict[str, Form]] = {}
    for opener in sorted(calls, key=lambda opener: (_spelt(opener, lexicon), opener)):
        spelt = _spelt(opener, lexicon)
        known = next((begun for begun in found if spelt and spelt.startswith(begun)), None)
        if known is None:
            known = spelt or opener
        found.setdefault(known, {})[opener.removeprefix(known)] = calls[opener]
    return {
        begun: either(sequence(rest, form) for rest, form in ways.items())
        for begun, ways in found.items()
    }


def _spelt(opener: str, lexicon: Lexicon) -> str:
    """Return the part of an opener that is spelt out before its first special token."""
    places = (opener.find(piece) for piece in _pieces(lexicon))
    return opener[: min((place for place in places if place >= 0), default=len(opener))]


def _has_token(marker: str, lexicon: Lexicon) -> bool:
    return any(piece in marker for piece in _pieces(lexicon))


def _pieces(lexicon: Lexicon) -> Iterable[str]:
    return (*lexicon.parts.values(), *lexicon.tokens.values())
