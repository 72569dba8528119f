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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats import (
    arg_pairs,
    gemma,
    harmony,
    json_tags,
    mistral,
    named_json,
    nested_elements,
    pythonic,
    response_template,
    xml_parameters,
    xtml,
)
from gateway.formats.arg_pairs import ArgPairs
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.free_text_grammar import FreeText
from gateway.formats.gemma import Gemma
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.grammar_forms import AnswerFrame, either, optional, sequence, several
from gateway.formats.harmony import Harmony
from gateway.formats.json_tags import JsonTags
from gateway.formats.mistral import Mistral
from gateway.formats.named_json import NamedJson
from gateway.formats.nested_elements import NestedElements
from gateway.formats.parser import AnswerSyntax, CallSyntax, Lexicon
from gateway.formats.pythonic import Pythonic
from gateway.formats.reasoning import NO_REASONING, ReasoningFormat
from gateway.formats.registry import BoundFormat
from gateway.formats.response_template import ResponseTemplate
from gateway.formats.xml_parameters import XmlParameters
from gateway.formats.xtml import Xtml
from protocol.grammar import Form, LiteralForm, Pattern, Rules

BETWEEN = Pattern(r"[ \n]{1,4}")
"""Blanks between two groups of calls. Bounded, because an undecided model could write blanks
forever.
"""


def required(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Return the grammar of calls of these tools and nothing else: one call, or any number if
    `many`.
    """
    grammar, syntax = GrammarBuilder(bound.lexicon), bound.format.tools
    assert syntax is not None, "without a format there are no calls"
    if isinstance(syntax, AnswerSyntax):
        return grammar.body(ANSWER_WRITERS[type(syntax)].required(syntax, tools, many, grammar))
    opener = preferred_opener(syntax, bound.lexicon)
    stretch = CALL_WRITERS[type(syntax)](syntax, opener, tools, many, grammar)
    one = grammar.rule("stretch", sequence(opener, stretch))
    if opener in syntax.start_openers():
        return grammar.body(one)
    header = (bound.format.reasoning or NO_REASONING).header
    between = LiteralForm(header[0]) if header else optional(BETWEEN)
    return grammar.body(several(one, between, many=many))


def required_or_other(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Return `required` for an answer that may also be text of another form.

    The start of the answer shows which of the two it is. If calls start like any JSON, the content
    of the JSON decides.
    """
    syntax = bound.format.tools
    if not isinstance(syntax, JsonTags) or not syntax.start_openers():
        return required(bound, tools, many=many)
    grammar = GrammarBuilder(bound.lexicon)
    return grammar.body(json_tags.write_json_values(syntax, tools, many, grammar))


def preferred_opener(syntax: CallSyntax, lexicon: Lexicon) -> str:
    """Return the opener that the model writes: the first that its vocabulary has, else the first
    one.
    """
    if syntax.start_openers():
        return syntax.start_openers()[0]
    openers = syntax.openers()
    return next((opener for opener in openers if _is_known(syntax, opener, lexicon)), openers[0])


def _is_known(syntax: CallSyntax, opener: str, lexicon: Lexicon) -> bool:
    return lexicon.is_token(opener) or lexicon.is_token(_bound(syntax, opener))


def _bound(syntax: CallSyntax, opener: str) -> str:
    """Return the marker that must follow the opener, or ""."""
    return dict(syntax.bound).get(opener, "") if isinstance(syntax, JsonTags) else ""


# ---- free text with calls in it


def strict(bound: BoundFormat, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
    """Return the grammar of free text with calls of these tools in it.

    A tool whose arguments may be anything has no parameters here. Without `many` the answer ends
    with its first call.
    """
    grammar, syntax = GrammarBuilder(bound.lexicon), bound.format.tools
    assert syntax is not None, "without a format there are no calls"
    if isinstance(syntax, AnswerSyntax):
        return grammar.body(ANSWER_WRITERS[type(syntax)].strict(syntax, tools, many, grammar))
    write = CALL_WRITERS[type(syntax)]

    def stretch(opener: str) -> Form:
        return grammar.rule("stretch", write(syntax, opener, tools, many, grammar))

    openers = [opener + _bound(syntax, opener) for opener in syntax.openers()]
    calls = {opener: stretch(opener) for opener in openers}
    marks = _silent(bound.format.reasoning or NO_REASONING)
    text = FreeText(calls, marks, bound.lexicon, many=many)
    at_start = [sequence(opener, stretch(opener)) for opener in syntax.start_openers()]
    if not at_start:
        return grammar.body(text.anything())
    first = sequence(optional(BETWEEN), either(at_start), text.anything() if many else "")
    return grammar.body(either((first, text.not_starting_with(syntax.start_openers()))))


def _silent(reasoning: ReasoningFormat) -> tuple[str, ...]:
    """Return the markers outside the reasoning that have no meaning of their own."""
    around = (*reasoning.wrap_open, *reasoning.wrap_close)
    return (*reasoning.header, *around, *reasoning.ignored)


# ---- the tables


WriteAnswer = Callable[[Any, Sequence[DeclaredTool], bool, GrammarBuilder], Form]


class AnswerWriter(msgspec.Struct, frozen=True):
    """The grammar writer of a syntax that covers the whole answer.

    The grammar starts where the prompt or the reasoning ends. `required` writes calls and nothing
    else; `strict` writes messages of any kind in which every call is one of the tools'. Both raise
    NotWritable for a tool that the syntax cannot write.
    """

    frame: Callable[[Any], AnswerFrame]
    required: WriteAnswer
    strict: WriteAnswer


ANSWER_WRITERS: Mapping[type[AnswerSyntax], AnswerWriter] = {
    Harmony: AnswerWriter(harmony.answer_frame, harmony.write_required, harmony.write_strict),
    ResponseTemplate: AnswerWriter(
        response_template.answer_frame,
        response_template.write_required,
        response_template.write_strict,
    ),
    Xtml: AnswerWriter(xtml.answer_frame, xtml.write_required, xtml.write_strict),
}


def frame_of(bound: BoundFormat) -> AnswerFrame:
    """Return the markup around the parts of answers in this format.

    Markers around the answer proper are included only if the vocabulary shows that the model was
    trained on them.
    """
    syntax, reasoning = bound.format.tools, bound.format.reasoning
    if isinstance(syntax, AnswerSyntax):
        return ANSWER_WRITERS[type(syntax)].frame(syntax)
    if reasoning is None:
        return AnswerFrame()
    opens = reasoning.open[0] if reasoning.open else ""
    closes = reasoning.close[0] + "".join(reasoning.header[:1]) if reasoning.close else ""
    for before, after in zip(reasoning.wrap_open, reasoning.wrap_close, strict=True):
        if bound.lexicon.is_token(before):
            blank = reasoning.wrap_blank
            return AnswerFrame(opens, closes, before + blank, blank + after)
    return AnswerFrame(opens, closes)


# ---- the tables


CallWriter = Callable[[Any, str, Sequence[DeclaredTool], bool, GrammarBuilder], Form]
"""(syntax, opener, tools, many, grammar) -> the form of everything after the opener, including the
marker that closes the calls.

With `many` it admits as many calls as the syntax writes in one group, otherwise exactly one. The
syntax's parser reads all that the form admits without a warning. Raises NotWritable for a tool that
the syntax cannot write.
"""

CALL_WRITERS: Mapping[type[CallSyntax], CallWriter] = {
    JsonTags: json_tags.write_calls,
    NamedJson: named_json.write_calls,
    Mistral: mistral.write_calls,
    XmlParameters: xml_parameters.write_calls,
    ArgPairs: arg_pairs.write_calls,
    NestedElements: nested_elements.write_calls,
    Pythonic: pythonic.write_calls,
    Gemma: gemma.write_calls,
}
