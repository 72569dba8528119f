"""Answers as a checkpoint's own template describes them, written.

A template says how to read, so of what it leaves open the plainest is written: a line break for
blanks, at most a word for other characters. A marker that ends thinking and content alike ends a
message; what the prompt has written before the first then stands before every other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.gemma import Gemma
from gateway.formats.grammar import gemma, named_json, xml_parameters
from gateway.formats.grammar.forms import behind, either, optional, sequence, several
from gateway.formats.grammar.frame import Frame
from gateway.formats.grammar.free_text import FreeText
from gateway.formats.grammar.writers import WRITERS
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.json_tags import JsonTags
from gateway.formats.named_json import NamedJson
from gateway.formats.response_template import Region, ResponseTemplate
from gateway.formats.template_pattern import Opening
from gateway.formats.xml_parameters import XmlParameters
from protocol.grammar import Form, LiteralForm, Pattern

WORD = optional(Pattern(" [a-z]{1,16}"))
BLANKS = Pattern(r"[ \n]{1,4}")
TAG = re.compile(r"<([\w:.-]+)[^<]*\(\?P<")
"""The tag in which an opening has its name."""


def frame(syntax: ResponseTemplate) -> Frame:
    thinking, content = (_region(syntax, kind) for kind in ("thinking", "content"))
    turn = _turn(syntax)
    before = _opener(content)
    return Frame(
        opens=_opener(thinking),
        closes=thinking.close[0] + turn if thinking and thinking.close else "",
        before=before,
        after=content.close[0] if content and content.close and before and not turn else "",
    )


def required(
    syntax: ResponseTemplate, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    region = _calls(syntax)
    one = book.rule("region", either(_regions(region, region.open[0], tools, many, book)))
    turn = _turn(syntax)
    between = either((LiteralForm(turn), BLANKS)) if turn else BLANKS
    return several(one, optional(between), many=many)


def strict(
    syntax: ResponseTemplate, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    region = _calls(syntax)
    calls: dict[str, Form] = {}
    for opening in region.open:
        found = _regions(region, opening, tools, many, book)
        rests = (behind(opening.literal, form) for form in found)
        calls[opening.literal] = book.rule("behind", either(rests))
    marks = [_turn(syntax), _opener(_region(syntax, "thinking"))]
    for other in syntax.regions:
        if other is not region:
            marks += [*other.close, *(o.literal for o in other.open if not o.pattern)]
    return FreeText(calls, filter(None, marks), book.lexicon, many=many).anything()


def _region(syntax: ResponseTemplate, kind: str) -> Region | None:
    return next((region for region in syntax.regions if region.kind == kind), None)


def _calls(syntax: ResponseTemplate) -> Region:
    found = _region(syntax, "tool_calls")
    assert found is not None, "without a region there are no calls"
    return found


def _opener(region: Region | None) -> str:
    """A literal that is all of an opening; "" for none."""
    openings = region.open if region else ()
    return next((opening.literal for opening in openings if not opening.pattern), "")


def _turn(syntax: ResponseTemplate) -> str:
    """What stands before every message but the first; "" where parts are no messages."""
    thinking, content = (_region(syntax, kind) for kind in ("thinking", "content"))
    shared = thinking and content and content.open and set(thinking.close) & set(content.close)
    return syntax.anchor if shared else ""


# ---- calls


def _regions(
    region: Region,
    opening: Opening,
    tools: Sequence[DeclaredTool],
    many: bool,
    book: GrammarBuilder,
) -> list[Form]:
    """The region of each tool, or that of all of them."""
    if isinstance(region.calls, JsonTags):
        stretch = WRITERS[JsonTags](region.calls, opening.literal, tools, many, book)
        return [sequence(opening.literal, stretch)]
    return [_named(region, opening, tool, book) for tool in tools]


def _named(region: Region, opening: Opening, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    """A call whose name stands in the opening."""
    try:
        head = [WORD if part is None else LiteralForm(part) for part in opening.written(tool.name)]
    except ValueError as error:
        raise NotWritable(
            tool.name, "name", f"the model's format cannot write it: {error}"
        ) from None
    close = region.close[0] if region.close else ""
    match region.calls:
        case NamedJson() as syntax:
            return sequence(*head, named_json.arguments(syntax, tool, book))
        case XmlParameters() as syntax:
            end = _closing_tag(opening, close) + close
            return sequence(*head, "\n", xml_parameters.inside(syntax, tool, book), end)
        case Gemma() as syntax:
            return sequence(*head, gemma.inside(syntax, tool, book), close)
        case _:
            raise AssertionError(f"no template has calls of {region.calls!r}")


def _closing_tag(opening: Opening, close: str) -> str:
    """Of the tag that has the name, where a template leaves it to what is not looked at."""
    found = TAG.search(opening.pattern)
    tag = f"</{found[1]}>" if found else ""
    return f"{tag}\n" if tag and tag != close else ""
