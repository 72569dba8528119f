"""The table of writers for syntaxes that rule the whole answer.

Theirs is the answer from where the prompt ends, or where the thinking does: `required` writes calls
and nothing else, `strict` messages of any kind in which every call is one of the tools'. Both raise
NotWritable for a tool that the syntax cannot write. `frame` is what stands around the thinking and
around the answer proper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.output.grammar import messages
from gateway.output.grammar.book import Book
from gateway.output.grammar.frame import Frame
from gateway.output.machine import AnswerSyntax
from gateway.output.teller import DeclaredTool
from gateway.output.tools.messages import Messages
from protocol.grammar import Form

Write = Callable[[Any, Sequence[DeclaredTool], bool, Book], Form]


class AnswerWriter(msgspec.Struct, frozen=True):
    frame: Callable[[Any], Frame]
    required: Write
    strict: Write


ANSWERS: Mapping[type[AnswerSyntax], AnswerWriter] = {
    Messages: AnswerWriter(messages.frame, messages.required, messages.strict),
}
