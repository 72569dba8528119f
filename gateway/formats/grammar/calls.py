"""Where calls may stand in an answer that is told to make some.

`required`: the answer is calls and nothing else. `instead`: the same, for an answer that may be
something else altogether, of a form that the request wants. `strict`: it is free text, in which
whatever opens a call must go on as one. All describe the answer behind its thinking.

In free text an opener is never just text: where a format's calls begin like prose ("functools["),
or like JSON at the start of an answer, no prose can begin so while strict tools are declared. Of
the format's other markers those that say nothing (around the answer proper, say) may stand
anywhere.

All raise NotWritable for a tool that the format cannot write.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar import json_tags
from gateway.formats.grammar.answers import ANSWERS
from gateway.formats.grammar.forms import either, optional, sequence, several
from gateway.formats.grammar.free_text import FreeText
from gateway.formats.grammar.writers import WRITERS
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.json_tags import JsonTags
from gateway.formats.parser import AnswerSyntax, Lexicon, SectionSyntax
from gateway.formats.reasoning import NO_REASONING, ReasoningFormat
from gateway.formats.registry import BoundFormat
from protocol.grammar import Form, LiteralForm, Pattern, Rules

BETWEEN = Pattern(r"[ \n]{1,4}")
"""Between two stretches: bounded, as a model that cannot decide would write blanks for ever."""


def required(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Nothing but calls of these tools: one, or with `many` as many as the model likes."""
    book, syntax = GrammarBuilder(bound.lexicon), bound.format.tools
    assert syntax is not None, "without a format there are no calls"
    if isinstance(syntax, AnswerSyntax):
        return book.body(ANSWERS[type(syntax)].required(syntax, tools, many, book))
    opener = preferred(syntax, bound.lexicon)
    stretch = WRITERS[type(syntax)](syntax, opener, tools, many, book)
    one = book.rule("stretch", sequence(opener, stretch))
    if opener in syntax.start_openers():
        return book.body(one)
    header = (bound.format.reasoning or NO_REASONING).header
    between = LiteralForm(header[0]) if header else optional(BETWEEN)
    return book.body(several(one, between, many=many))


def instead(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Return `required`, for an answer that may also be text of a form. Its beginning shows which
    of the two it is; if calls begin like any JSON, its content does."""
    syntax = bound.format.tools
    if not isinstance(syntax, JsonTags) or not syntax.start_openers():
        return required(bound, tools, many=many)
    book = GrammarBuilder(bound.lexicon)
    return book.body(json_tags.json_values(syntax, tools, many, book))


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
    book, syntax = GrammarBuilder(bound.lexicon), bound.format.tools
    assert syntax is not None, "without a format there are no calls"
    if isinstance(syntax, AnswerSyntax):
        return book.body(ANSWERS[type(syntax)].strict(syntax, tools, many, book))
    write = WRITERS[type(syntax)]

    def stretch(opener: str) -> Form:
        return book.rule("stretch", write(syntax, opener, tools, many, book))

    openers = [opener + _bound(syntax, opener) for opener in syntax.openers()]
    calls = {opener: stretch(opener) for opener in openers}
    marks = _silent(bound.format.reasoning or NO_REASONING)
    text = FreeText(calls, marks, bound.lexicon, many=many)
    at_start = [sequence(opener, stretch(opener)) for opener in syntax.start_openers()]
    if not at_start:
        return book.body(text.anything())
    first = sequence(optional(BETWEEN), either(at_start), text.anything() if many else "")
    return book.body(either((first, text.unlike(syntax.start_openers()))))


def _silent(reasoning: ReasoningFormat) -> tuple[str, ...]:
    """Markers outside the reasoning that say nothing."""
    around = (*reasoning.wrap_open, *reasoning.wrap_close)
    return (*reasoning.header, *around, *reasoning.ignored)
