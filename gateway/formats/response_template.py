"""The format that a checkpoint describes itself, in its `response_template`.

A template lists the regions of an answer, the markers around them, and the kinds of their bodies:

    {"fields": {"thinking": {"open": "<think>", "close": "</think>"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                               "repeats": true, "transform": {"function": "{content}"}},
                "content": {"close": "<|im_end|>"}}}

The field without an opening is all text outside the other fields. If there is no such field, that
text is dropped. Bodies of thinking and content are text. Bodies of tool calls are one of:

    json         objects with a name and arguments, one or an array of them: JsonTags
    json         the arguments alone, with the name in the opening: NamedJson
    json         the same, with keys without quotes and strings between special markers: Gemma
    xml-inline   a tag for each argument, with the name in the opening: XmlParameters

So each template is a format that combines existing syntaxes. `response_template_loader.load` makes
it from a checkpoint's data.

Regions are emitted as they arrive, so a field that occurs several times is emitted each time. If
the body is text, arguments get the types of the tool's schema. Otherwise they have the types that
the model wrote. The states are:

    outside  between regions
    text     between regions, after text that is the whole answer (`ParserContext.calls_or_text`)
    head     after the literal that a region's opening starts with
    regionN  in region N, which is text
    calls    in a region of tool calls, which a call parser reads

A template describes how to parse. If it allows several spellings, the grammar uses the plainest: a
line break for blanks, at most a word for other characters. A marker that ends both thinking and
content ends a message. The text that the prompt has written before the first message then comes
before every later message.

Source: transformers' documentation of response parsing, version 1 of the templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

import msgspec

from gateway.formats.answer_parser import AnswerParser, AnswerSyntax
from gateway.formats.call_parser import MARKUP, CallSyntax
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.gemma import Gemma
from gateway.formats.grammar_builder import (
    AnswerFrame,
    FreeText,
    GrammarBuilder,
    NotWritable,
    either,
    optional,
    sequence,
    without_prefix,
)
from gateway.formats.json_tags import JsonTags
from gateway.formats.lexicon import MarkerPart
from gateway.formats.named_json import NamedJson
from gateway.formats.parser import FormatParserState, Moves, ParserContext
from gateway.formats.reasoning import ReasoningFormat
from gateway.formats.response_template_regions import RegionOpening, TemplateRegion
from gateway.formats.xml_parameters import XmlParameters
from protocol.engine.grammar import Form, LiteralForm, Pattern

NAMED, NAME_TOKEN = "<name>", -1
"""A marker that no model writes. It passes the name in the opening to the body's parser."""

MAX_HEAD_CHARS = 256
"""Most characters of a match after its first literal."""


class ResponseTemplateState(FormatParserState):
    """State of a `ResponseTemplateParser`.

    region   index of the open region; -1 outside
    literal  the literal of the current opening
    head     the text after this literal
    """

    at: str = "outside"
    region: int = -1
    head: str = ""
    literal: str = ""


class ResponseTemplateParser(AnswerParser):
    State = ResponseTemplateState
    UNSCANNED = frozenset({"head", "calls"})
    syntax: ResponseTemplate

    def call_syntax(self) -> CallSyntax | None:
        return next((r.calls for r in self.syntax.regions if r.calls), None)

    def call_context(self, context: ParserContext) -> ParserContext:
        """Return the context for the call parser. In it, NAMED is a marker token, which no text can
        spell."""
        lexicon = context.lexicon.with_token(NAME_TOKEN, NAMED)
        return msgspec.structs.replace(context, lexicon=lexicon)

    @cached_property
    def _openings(self) -> Mapping[str, tuple[int, RegionOpening]]:
        """Literal -> (index of the region that it opens, the opening)."""
        return {o.literal: (n, o) for n, r in enumerate(self.syntax.regions) for o in r.open}

    @cached_property
    def _outside(self) -> TemplateRegion | None:
        """The region that contains all text outside the regions with openings; None if there is no
        such region."""
        return next((r for r in self.syntax.regions if not r.open), None)

    def start(self, starts_inside: bool) -> None:
        at_start = self._openings.get("")
        thinking = next((n for n, r in enumerate(self.syntax.regions) if r.kind == "thinking"), -1)
        if starts_inside and thinking >= 0 and self.syntax.regions[thinking].open:
            self._enter_region(thinking)
        elif at_start is not None:
            self._enter_region(at_start[0])
        else:
            self._leave_region()

    def moves(self) -> Moves:
        opens = sorted((literal for literal in self._openings if literal), key=len, reverse=True)
        outside = (self._outside.close if self._outside else (), self._close_region)
        signs = (self.syntax.signs(), self._sign_in_text)
        inside = {
            f"region{n}": (
                (region.close, self._close_region),
                *([signs] * (region.kind == "content")),
            )
            for n, region in enumerate(self.syntax.regions)
        }
        outside_text = ((opens, self._open_region), outside, signs)
        return {"outside": outside_text, "text": (outside,), **inside}

    # ---- text

    def on_text(self, text: str) -> str:
        s = self.s
        if s.at == "head":
            return self._in_head(text)
        if s.at == "calls":
            return self.read_calls(text)
        region = self.syntax.regions[s.region] if s.region >= 0 else self._outside
        if region is not None:
            self._emit(region.kind, text)
            is_answer = region.kind == "content" and text.strip(BLANKS)
            if s.at == "outside" and is_answer and self.context.calls_or_text:
                s.at = "text"
        return ""

    def _emit(self, kind: str, text: str) -> None:
        if kind == "thinking":
            self.builder.reasoning(text)
        else:
            self.builder.content(text)

    def _in_head(self, text: str) -> str:
        """Read text after an opening's literal, until the opening's pattern matches or fails."""
        s = self.s
        index, opening = self._openings[s.literal]
        before = len(s.head)
        s.head += text[: MAX_HEAD_CHARS + 1 - before]
        end = opening.head_end(s.head)
        if end is None and len(s.head) <= MAX_HEAD_CHARS:
            return ""
        captures = opening.captures(s.head[:end]) if end is not None else None
        if captures is None:
            rest = text[len(s.head) - before :]
            return self._no_opening() + rest
        rest = text[(end or 0) - before :]
        self._enter_region(index, captures)
        return rest

    def _no_opening(self) -> str:
        """Handle text that started like an opening but is not one: its literal is text outside of
        regions. Return the text after the literal, which may contain another opening."""
        s = self.s
        if self.syntax.regions[self._openings[s.literal][0]].calls:
            self.builder.found_markup(s.literal)
        literal: str = s.literal
        head: str = s.head
        s.head, s.literal, s.at = "", "", "outside"
        self.on_text(literal)
        return head

    # ---- regions

    def _open_region(self, marker: str) -> None:
        s = self.s
        index, opening = self._openings[marker]
        s.literal = marker
        if opening.pattern:
            s.at, s.head = "head", ""
        else:
            self._enter_region(index)

    def _sign_in_text(self, marker: str) -> None:
        """Handle a marker of calls outside of calls: a token is dropped, other text is kept."""
        if not self.context.calls_or_text:
            self.builder.found_markup(marker)
        if not self.context.lexicon.is_token(marker):
            self.on_text(marker)

    def _close_region(self, marker: str) -> None:
        self._leave_region()

    def _enter_region(self, index: int, captures: Mapping[str, str] | None = None) -> None:
        s = self.s
        region = self.syntax.regions[index]
        self._end_text()
        s.region, s.head = index, ""
        s.at = "calls" if region.calls else f"region{index}"
        if region.calls:
            self._open_calls(region, (captures or {}).get(region.name, ""))
        elif region.kind == "thinking":
            self.builder.start_reasoning()
        else:
            self.builder.markup()

    def _leave_region(self) -> None:
        self._end_text()
        self.s.region, self.s.at = -1, "outside"
        if self._outside is not None and self._outside.kind == "thinking":
            self.builder.start_reasoning()

    def _end_text(self) -> None:
        """End a region's text. The blanks on both sides of the region are markup."""
        s = self.s
        region = self._outside if s.region < 0 else self.syntax.regions[s.region]
        if region is not None and region.kind == "thinking":
            self.builder.end_reasoning()
        elif region is not None and region.kind == "content":
            self.builder.markup()

    def _open_calls(self, region: TemplateRegion, name: str) -> None:
        call_parser = self.calls
        call_parser.open(self.s.literal)
        match region.calls:
            case NamedJson():
                call_parser.read(name)
                call_parser.read_token(NAMED)
            case XmlParameters():
                call_parser.read_token(NAMED)
                call_parser.read(name + ">")
            case Gemma():
                call_parser.read(name)
        self.leave_if_done()

    def on_part(self, part: MarkerPart) -> str:
        if self.s.at == "head":
            return self._in_head(part.text)
        return super().on_part(part)

    def on_calls_done(self) -> None:
        self._leave_region()

    def on_stray(self, marker: str) -> None:
        if self.s.at == "calls":
            self.read_call_token(marker)
        elif self.s.at == "head":
            self.read(marker)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        while complete and self.s.at == "head":
            head = self._no_opening()
            self._update_scanner()
            self._read_text(head)
            self._release_held()
        if self.s.at == "calls":
            self.calls.end(complete)
        elif self.s.region >= 0 and self.syntax.regions[self.s.region].kind == "thinking":
            self.builder.end_reasoning()
        self.builder.s.blanks = []  # templates strip the blanks around text
        self.builder.finish()


class ResponseTemplate(AnswerSyntax, frozen=True, kw_only=True):
    """A format that a checkpoint's template describes.

    regions  the template's fields, in its order
    anchor   the text at the end of a prompt that an answer follows
    """

    PARSER = ResponseTemplateParser

    regions: tuple[TemplateRegion, ...]
    anchor: str = ""

    def markers(self) -> tuple[str, ...]:
        found: list[str] = []
        for region in self.regions:
            found += [opening.literal for opening in region.open if opening.literal]
            found += region.close
            found += region.calls.markers() if region.calls else ()
        return tuple(dict.fromkeys(marker for marker in found if marker != NAMED))

    def signs(self) -> tuple[str, ...]:
        """Return the markers that have a meaning in calls only."""
        found: list[str] = []
        others = {mark for r in self.regions if not r.calls for mark in r.literals()}
        for region in self.regions:
            if region.calls:
                found += [*region.literals(), *region.calls.markers()]
        return tuple(mark for mark in found if MARKUP.match(mark) and mark not in {*others, NAMED})

    @property
    def frames_content(self) -> bool:
        return all(region.open for region in self.regions if region.kind == "content")

    @property
    def has_calls(self) -> bool:
        return any(region.calls is not None for region in self.regions)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The markup of the thinking, which shows whether a prompt ends inside it. None if the
        template has no thinking."""
        thinking = next((r for r in self.regions if r.kind == "thinking"), None)
        if thinking is None:
            return None
        opens = tuple(o.literal for o in thinking.open if o.literal and not o.pattern)
        at_start = any(opening.at_start for opening in thinking.open)
        return ReasoningFormat(open=opens, close=thinking.close, default_inside=at_start)

    # ---- the grammar

    def frame(self) -> AnswerFrame:
        thinking, content = self._region("thinking"), self._region("content")
        turn, before = self._message_start(), _opener(content)
        return AnswerFrame(
            opens=_opener(thinking),
            closes=thinking.close[0] + turn if thinking and thinking.close else "",
            before=before,
            after=content.close[0] if content and content.close and before and not turn else "",
        )

    def write_required(self, grammar: GrammarBuilder) -> Form:
        region = self._calls_region()
        regions = self._write_regions(region, region.open[0], grammar)
        one, turn = grammar.rule("region", either(regions)), self._message_start()
        between = either((LiteralForm(turn), BLANKS_FORM)) if turn else BLANKS_FORM
        return grammar.several(one, optional(between))

    def write_strict(self, grammar: GrammarBuilder) -> Form:
        region = self._calls_region()
        calls: dict[str, Form] = {}
        for opening in region.open:
            found = self._write_regions(region, opening, grammar)
            rests = (without_prefix(opening.literal, form) for form in found)
            calls[opening.literal] = grammar.rule("behind", either(rests))
        marks = [self._message_start(), _opener(self._region("thinking"))]
        for other in self.regions:
            if other is not region:
                marks += [*other.close, *(o.literal for o in other.open if not o.pattern)]
        return FreeText(calls, filter(None, marks), grammar).anything()

    def _region(self, kind: str) -> TemplateRegion | None:
        return next((region for region in self.regions if region.kind == kind), None)

    def _calls_region(self) -> TemplateRegion:
        found = self._region("tool_calls")
        assert found is not None, "without a region there are no calls"
        return found

    def _message_start(self) -> str:
        """Return the text before each message but the first; "" if regions are not messages."""
        thinking, content = self._region("thinking"), self._region("content")
        shared = thinking and content and content.open and set(thinking.close) & set(content.close)
        return self.anchor if shared else ""

    def _write_regions(
        self, region: TemplateRegion, opening: RegionOpening, grammar: GrammarBuilder
    ) -> list[Form]:
        """Return the forms of a region of calls: one for each tool, or one for all tools."""
        if isinstance(region.calls, JsonTags):
            return [sequence(opening.literal, region.calls.write_calls(opening.literal, grammar))]
        return [_write_named_call(region, opening, tool, grammar) for tool in grammar.tools]


OPTIONAL_WORD = optional(Pattern(" [a-z]{1,16}"))
BLANKS_FORM = Pattern(r"[ \n]{1,4}")
NAME_TAG = re.compile(r"<([\w:.-]+)[^<]*\(\?P<")
"""The tag in an opening that contains the name."""


def _opener(region: TemplateRegion | None) -> str:
    """Return a literal that is a whole opening of the region, or ""."""
    openings = region.open if region else ()
    return next((opening.literal for opening in openings if not opening.pattern), "")


def _write_named_call(
    region: TemplateRegion, opening: RegionOpening, tool: DeclaredTool, grammar: GrammarBuilder
) -> Form:
    """Return the grammar of a call whose opening contains the name."""
    try:
        parts = opening.written(tool.name)
    except ValueError as error:
        why = f"the model's format cannot write it: {error}"
        raise NotWritable(tool.name, "name", why) from None
    head = [OPTIONAL_WORD if part is None else LiteralForm(part) for part in parts]
    close, syntax = region.close[0] if region.close else "", region.calls
    assert isinstance(syntax, NamedJson | XmlParameters | Gemma)
    arguments = syntax.write_arguments(tool, grammar)
    if isinstance(syntax, NamedJson):
        return sequence(*head, arguments)
    if isinstance(syntax, Gemma):
        return sequence(*head, arguments, close)
    return sequence(*head, "\n", arguments, _closing_tag(opening, close) + close)


def _closing_tag(opening: RegionOpening, close: str) -> str:
    """Return the closing tag of the tag that contains the name. Return "" if no tag contains the
    name, or if `close` is already its closing tag."""
    found = NAME_TAG.search(opening.pattern)
    tag = f"</{found[1]}>" if found else ""
    return f"{tag}\n" if tag and tag != close else ""
