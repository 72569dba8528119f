"""Where calls may stand in an answer that is told to make some.

`required`: the answer is calls and nothing else. `strict`: it is free text, in which whatever opens
a call must go on as one. Both describe the answer behind its thinking.

In free text an opener is never just text: where a format's calls begin like prose ("functools["),
or like JSON at the start of an answer, no prose can begin so while strict tools are declared. Of
the format's other markers those that say nothing (around the answer proper, say) may stand
anywhere.

Both raise NotWritable for a tool that the format cannot write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.output.formats import BoundFormat
from gateway.output.grammar.answers import ANSWERS
from gateway.output.grammar.book import Book
from gateway.output.grammar.forms import FREE, either, optional, sequence, several, unlike
from gateway.output.grammar.writers import WRITERS
from gateway.output.machine import AnswerSyntax, Lexicon, SectionSyntax
from gateway.output.reasoning import NO_REASONING, ReasoningFormat
from gateway.output.teller import DeclaredTool
from gateway.output.tools.json_tags import JsonTags
from protocol.grammar import Form, Pattern, Repeat, Rules, Text, Until

BETWEEN = Pattern(r"[ \n]{1,4}")
"""Between two stretches: bounded, as a model that cannot decide would write blanks for ever."""


def required(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Nothing but calls of these tools: one, or with `many` as many as the model likes."""
    book, syntax = Book(bound.lexicon), bound.format.tools
    assert syntax is not None, "without a format there are no calls"
    if isinstance(syntax, AnswerSyntax):
        return book.body(ANSWERS[type(syntax)].required(syntax, tools, many, book))
    opener = preferred(syntax, bound.lexicon)
    stretch = WRITERS[type(syntax)](syntax, opener, tools, many, book)
    one = book.rule("stretch", sequence(opener, stretch))
    if opener in syntax.start_openers():
        return book.body(one)
    header = (bound.format.reasoning or NO_REASONING).header
    between = Text(header[0]) if header else optional(BETWEEN)
    return book.body(several(one, between, many=many))


def preferred(syntax: SectionSyntax, lexicon: Lexicon) -> str:
    """What models open a stretch with that is all they say: of several, what the vocabulary has."""
    if syntax.start_openers():
        return syntax.start_openers()[0]
    openers = syntax.openers()
    return next((opener for opener in openers if _is_known(syntax, opener, lexicon)), openers[0])


def _is_known(syntax: SectionSyntax, opener: str, lexicon: Lexicon) -> bool:
    return lexicon.is_token(opener) or lexicon.is_token(_bound(syntax, opener))


def _bound(syntax: SectionSyntax, opener: str) -> str:
    """The marker without which the opener opens nothing."""
    return dict(syntax.bound).get(opener, "") if isinstance(syntax, JsonTags) else ""


# ---- free text with calls in it


def strict(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Free text with calls of these tools in it; one whose arguments may be anything has no
    parameters here. Without `many` the answer ends with its first call."""
    book, syntax, lexicon = Book(bound.lexicon), bound.format.tools, bound.lexicon
    assert syntax is not None, "without a format there are no calls"
    if isinstance(syntax, AnswerSyntax):
        return book.body(ANSWERS[type(syntax)].strict(syntax, tools, many, book))
    write = WRITERS[type(syntax)]

    def stretch(opener: str) -> Form:
        return book.rule("stretch", write(syntax, opener, tools, many, book))

    openers = [opener + _bound(syntax, opener) for opener in syntax.openers()]
    calls = {opener: stretch(opener) for opener in openers}
    marks = _marks(bound.format.reasoning or NO_REASONING, lexicon) - {*calls}
    text = _Text(_grouped(calls, lexicon), sorted(marks), many)
    at_start = [sequence(opener, stretch(opener)) for opener in syntax.start_openers()]
    if not at_start:
        return book.body(text.anything())
    first = sequence(optional(BETWEEN), either(at_start), text.anything() if many else "")
    return book.body(either((first, text.unlike(syntax.start_openers()))))


def _marks(reasoning: ReasoningFormat, lexicon: Lexicon) -> set[str]:
    """Tokens that say nothing; no other text has them."""
    silent = (*reasoning.header, *reasoning.wrap_open, *reasoning.wrap_close, *reasoning.ignored)
    return set(filter(lexicon.is_token, silent))


def _grouped(calls: Mapping[str, Form], lexicon: Lexicon) -> dict[str, Form]:
    """What opens a call -> what must follow.

    An opener that is spelt out ends a text where it is complete, or where its first token begins.
    So of two that begin alike up to there, the shorter beginning opens both.
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
    """What of an opener is spelt out before its first token."""
    tokens = (*lexicon.parts.values(), *lexicon.tokens.values())
    at = [place for token in tokens if (place := opener.find(token)) >= 0]
    return opener[: min(at, default=len(opener))]


class _Text:
    """Free text: `calls` (opener -> what must follow) in it, and silent `marks`."""

    def __init__(self, calls: Mapping[str, Form], marks: Iterable[str], many: bool) -> None:
        self.calls = calls
        self.marks = tuple(marks)
        self.many = many

    def anything(self) -> Form:
        steps = [self._mark()] if self.marks else []
        if self.many:
            steps += [self._call()] if self.calls else []
            return sequence(Repeat(either(steps)), FREE) if steps else FREE
        last = either((self._call(), FREE)) if self.calls else FREE
        return sequence(*map(Repeat, steps), last)

    def unlike(self, beginnings: Iterable[str]) -> Form:
        """What begins with none of these."""
        guard = unlike(beginnings)
        steps = [sequence(self._mark(guard), self.anything())] if self.marks else []
        if self.calls:
            steps.append(sequence(self._call(guard), self.anything() if self.many else ""))
        return either([*steps, Pattern(guard)])

    def _call(self, before: str = FREE.pattern) -> Form:
        return either(sequence(Until(opener, before), rest) for opener, rest in self.calls.items())

    def _mark(self, before: str = FREE.pattern) -> Form:
        return either(Until(mark, before) for mark in self.marks)
