"""The table of writers: how each syntax writes a stretch of calls, as a form.

A writer is given the syntax, the opener that stands before the stretch, the tools that may be
called (one without parameters takes any object), whether there may be several calls, and the book
that rules and schemas go into. Its form is what stands behind the opener, up to the end of the
stretch, whatever closes it included: with `many` as many calls as the syntax writes in one stretch,
otherwise just one. All that it admits the syntax's machine reads without a warning, in the spelling
that the models were trained on. Raises NotWritable for a tool that the syntax cannot write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.output.grammar import (
    arg_pairs,
    gemma,
    json_tags,
    named_json,
    nested_elements,
    pythonic,
    xml_parameters,
)
from gateway.output.grammar.book import Book
from gateway.output.machine import SectionSyntax
from gateway.output.teller import DeclaredTool
from gateway.output.tools.arg_pairs import ArgPairs
from gateway.output.tools.gemma import Gemma
from gateway.output.tools.json_tags import JsonTags
from gateway.output.tools.mistral import Mistral
from gateway.output.tools.named_json import NamedJson
from gateway.output.tools.nested_elements import NestedElements
from gateway.output.tools.pythonic import Pythonic
from gateway.output.tools.xml_parameters import XmlParameters
from protocol.grammar import Form

Stretch = Callable[[Any, str, Sequence[DeclaredTool], bool, Book], Form]

WRITERS: Mapping[type[SectionSyntax], Stretch] = {
    JsonTags: json_tags.stretch,
    NamedJson: named_json.stretch,
    Mistral: json_tags.mistral,
    XmlParameters: xml_parameters.stretch,
    ArgPairs: arg_pairs.stretch,
    NestedElements: nested_elements.stretch,
    Pythonic: pythonic.stretch,
    Gemma: gemma.stretch,
}
