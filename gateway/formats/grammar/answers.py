"""The table of writers for syntaxes that rule the whole answer.

Theirs is the answer from where the prompt ends, or where the thinking does: `required` writes calls
and nothing else, `strict` messages of any kind in which every call is one of the tools'. Both raise
NotWritable for a tool that the syntax cannot write. `frame` is what stands around the thinking and
around the answer proper; `frame_of` has it for every format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar import channels, harmony, template
from gateway.formats.grammar.frame import Frame
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.harmony import Messages
from gateway.formats.parser import AnswerSyntax
from gateway.formats.registry import BoundFormat
from gateway.formats.response_template import ResponseTemplate
from gateway.formats.xtml import Xtml
from protocol.grammar import Form

Write = Callable[[Any, Sequence[DeclaredTool], bool, GrammarBuilder], Form]


class AnswerWriter(msgspec.Struct, frozen=True):
    frame: Callable[[Any], Frame]
    required: Write
    strict: Write


ANSWERS: Mapping[type[AnswerSyntax], AnswerWriter] = {
    Messages: AnswerWriter(harmony.frame, harmony.required, harmony.strict),
    ResponseTemplate: AnswerWriter(template.frame, template.required, template.strict),
    Xtml: AnswerWriter(channels.frame, channels.required, channels.strict),
}


def frame_of(bound: BoundFormat) -> Frame:
    """What answers of this format have around their parts; markers around the answer proper only
    where the vocabulary shows that the model was taught them."""
    syntax, reasoning = bound.format.tools, bound.format.reasoning
    if isinstance(syntax, AnswerSyntax):
        return ANSWERS[type(syntax)].frame(syntax)
    if reasoning is None:
        return Frame()
    opens = reasoning.open[0] if reasoning.open else ""
    closes = reasoning.close[0] + "".join(reasoning.header[:1]) if reasoning.close else ""
    for before, after in zip(reasoning.wrap_open, reasoning.wrap_close, strict=True):
        if bound.lexicon.is_token(before):
            blank = reasoning.wrap_blank
            return Frame(opens, closes, before + blank, blank + after)
    return Frame(opens, closes)
