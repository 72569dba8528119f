"""Grammars of answers that must, or may, contain tool calls.

Three grammars describe the answer after its reasoning:

- `required`: calls and nothing else;
- `required_or_other`: the same, for an answer that may be of another form instead, such as JSON of
  a response format;
- `strict`: free text in which everything that opens a call continues as a valid call.

In free text an opener is never plain text. If a format's calls begin like prose ("functools["), or
like JSON at the start of an answer, no prose can begin so while strict tools are declared. Other
markers without a meaning of their own, such as those around the answer proper, may stand anywhere.

All three raise NotWritable for a tool whose calls the format cannot write.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import FreeText, GrammarBuilder, either, optional, sequence
from gateway.formats.lexicon import Lexicon
from gateway.formats.parser import AnswerFrame, AnswerSyntax, CallSyntax
from gateway.formats.reasoning import NO_REASONING, ReasoningFormat
from gateway.formats.registry import BoundFormat, ToolSyntax
from protocol.grammar import Form, LiteralForm, Pattern, Rules

BETWEEN = Pattern(r"[ \n]{1,4}")
"""Blanks between two groups of calls. Bounded, because an undecided model could write blanks
forever.
"""


def required(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Return the grammar of calls of these tools and nothing else: one call, or any number if
    `many`.
    """
    grammar, syntax = GrammarBuilder(bound.lexicon, tools, many=many), _syntax(bound)
    if isinstance(syntax, AnswerSyntax):
        return grammar.body(syntax.write_required(grammar))
    opener = preferred_opener(syntax, bound.lexicon)
    one = grammar.rule("stretch", sequence(opener, syntax.write_calls(opener, grammar)))
    if opener in syntax.start_openers():
        return grammar.body(one)
    header = (bound.format.reasoning or NO_REASONING).header
    between = LiteralForm(header[0]) if header else optional(BETWEEN)
    return grammar.body(grammar.several(one, between))


def required_or_other(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Return `required` for an answer that may also be text of another form.

    The start of the answer shows which of the two it is. If calls start like any JSON, the content
    of the JSON decides.
    """
    grammar, syntax = GrammarBuilder(bound.lexicon, tools, many=many), _syntax(bound)
    values = syntax.write_values(grammar) if isinstance(syntax, CallSyntax) else None
    return required(bound, tools, many=many) if values is None else grammar.body(values)


def _syntax(bound: BoundFormat) -> ToolSyntax:
    assert bound.format.tools is not None, "without a format there are no calls"
    return bound.format.tools


def preferred_opener(syntax: CallSyntax, lexicon: Lexicon) -> str:
    """Return the opener that the model writes: the first that its vocabulary has, else the first
    one.
    """
    if syntax.start_openers():
        return syntax.start_openers()[0]
    openers = syntax.openers()
    known = (
        opener
        for opener in openers
        if lexicon.is_token(opener) or lexicon.is_token(syntax.bound_marker(opener))
    )
    return next(known, openers[0])


def strict(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Return the grammar of free text with calls of these tools in it.

    A tool whose arguments may be anything has no parameters here. Without `many` the answer ends
    with its first call.
    """
    grammar, syntax = GrammarBuilder(bound.lexicon, tools, many=many), _syntax(bound)
    if isinstance(syntax, AnswerSyntax):
        return grammar.body(syntax.write_strict(grammar))

    def stretch(opener: str) -> Form:
        return grammar.rule("stretch", syntax.write_calls(opener, grammar))

    openers = [opener + syntax.bound_marker(opener) for opener in syntax.openers()]
    calls = {opener: stretch(opener) for opener in openers}
    text = FreeText(calls, _silent(bound.format.reasoning or NO_REASONING), grammar)
    at_start = [sequence(opener, stretch(opener)) for opener in syntax.start_openers()]
    if not at_start:
        return grammar.body(text.anything())
    first = sequence(optional(BETWEEN), either(at_start), text.anything() if many else "")
    return grammar.body(either((first, text.not_starting_with(syntax.start_openers()))))


def _silent(reasoning: ReasoningFormat) -> tuple[str, ...]:
    """Return the markers outside the reasoning that have no meaning of their own."""
    around = (*reasoning.wrap_open, *reasoning.wrap_close)
    return (*reasoning.header, *around, *reasoning.ignored)


def frame_of(bound: BoundFormat) -> AnswerFrame:
    """Return the markup around the parts of answers in this format.

    Markers around the answer proper are included only if the vocabulary shows that the model was
    trained on them.
    """
    syntax, reasoning = bound.format.tools, bound.format.reasoning
    if isinstance(syntax, AnswerSyntax):
        return syntax.frame()
    if reasoning is None:
        return AnswerFrame()
    opens = reasoning.open[0] if reasoning.open else ""
    closes = reasoning.close[0] + "".join(reasoning.header[:1]) if reasoning.close else ""
    for before, after in zip(reasoning.wrap_open, reasoning.wrap_close, strict=True):
        if bound.lexicon.is_token(before):
            blank = reasoning.wrap_blank
            return AnswerFrame(opens, closes, before + blank, blank + after)
    return AnswerFrame(opens, closes)
