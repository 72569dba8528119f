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

from gateway.formats.arg_pairs import ArgPairs
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.gemma import Gemma
from gateway.formats.grammar import (
    arg_pairs,
    gemma,
    json_tags,
    named_json,
    nested_elements,
    pythonic,
    xml_parameters,
)
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.json_tags import JsonTags
from gateway.formats.mistral import Mistral
from gateway.formats.named_json import NamedJson
from gateway.formats.nested_elements import NestedElements
from gateway.formats.parser import SectionSyntax
from gateway.formats.pythonic import Pythonic
from gateway.formats.xml_parameters import XmlParameters
from protocol.grammar import Form

Stretch = Callable[[Any, str, Sequence[DeclaredTool], bool, GrammarBuilder], Form]

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
