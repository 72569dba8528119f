"""A checkpoint's own description of its answers, `response_template`, read as a format.

A template says which regions an answer has, between which markers, and what their bodies are:

    {"fields": {"thinking": {"open": "<think>", "close": "</think>"},
                "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json",
                               "repeats": true, "transform": {"function": "{content}"}},
                "content": {"close": "<|im_end|>"}}}

The field without an opening is what stands outside all others; without such a field that is
dropped. Bodies of thinking and content are text. Those of tool calls are

    json         objects with a name and arguments, one or an array of them: JsonTags
    json         the arguments alone, the name standing in the opening: NamedJson
    json         the same with keys without quotes and strings between markers of their own: Gemma
    xml-inline   a tag for each argument, the name standing in the opening: XmlParameters

so each template is a format of syntaxes that exist. `template_loading.load` makes one of a
checkpoint's data.

Regions are told as they come, so a field that stands several times is told each time. Arguments
have the types the tool's schema asks for where the body is text, and else those they have.

    outside  between regions
    text     the same, after text that is the whole answer (`Context.calls_or_text`)
    head     behind the literal that a region's opening begins with
    region   in a region of text
    calls    in a region of tool calls: its syntax reads

Source: transformers' documentation of response parsing, version 1 of the templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.formats.event_builder import BLANKS, EventBuilder
from gateway.formats.gemma import Gemma
from gateway.formats.named_json import NamedJson
from gateway.formats.parser import (
    AnswerSyntax,
    CallParser,
    Context,
    FormatParser,
    Lexicon,
    MachineState,
    Part,
    SectionSyntax,
)
from gateway.formats.reasoning import ReasoningFormat
from gateway.formats.template_pattern import MAX_HEAD_CHARS, Opening
from gateway.formats.xml_parameters import XmlParameters

NAMED, NAME_TOKEN = "<name>", -1
"""A marker that no model writes: it tells the body's syntax which name the opening had."""


class Region(msgspec.Struct, frozen=True):
    """One field of a template.

    kind   "thinking", "content" or "tool_calls"
    open   ways to open it; none: it is what stands outside all others
    close  literals that close it; none: it lasts to the end
    calls  reads the body, if it is tool calls
    name   the capture that holds the tool's name; "" if the body has it
    """

    kind: str
    open: tuple[Opening, ...] = ()
    close: tuple[str, ...] = ()
    calls: SectionSyntax | None = None
    name: str = ""


class ResponseTemplate(AnswerSyntax, frozen=True, kw_only=True):
    """regions  in the template's order
    anchor   what the prompt ends with where an answer begins
    """

    regions: tuple[Region, ...]
    anchor: str = ""

    def markers(self) -> tuple[str, ...]:
        found: list[str] = []
        for region in self.regions:
            found += [opening.literal for opening in region.open if opening.literal]
            found += region.close
            found += region.calls.markers() if region.calls else ()
        return tuple(dict.fromkeys(marker for marker in found if marker != NAMED))

    @property
    def frames_content(self) -> bool:
        return all(region.open for region in self.regions if region.kind == "content")

    @property
    def has_calls(self) -> bool:
        return any(region.calls is not None for region in self.regions)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """How a prompt opens and closes the thinking; None where there is none."""
        thinking = next((r for r in self.regions if r.kind == "thinking"), None)
        if thinking is None:
            return None
        opens = tuple(o.literal for o in thinking.open if o.literal and not o.pattern)
        at_start = any(opening.at_start for opening in thinking.open)
        return ReasoningFormat(open=opens, close=thinking.close, default_inside=at_start)

    def machine(
        self,
        context: Context,
        teller: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> FormatParser:
        return TemplateMachine(self, context, teller, state, starts_inside=starts_inside)


class TemplateState(MachineState):
    """region  the index of the open one; -1 outside
    head    the text behind the literal of an opening
    literal that literal
    """

    at: str = "outside"
    region: int = -1
    head: str = ""
    literal: str = ""


class TemplateMachine(FormatParser):
    State = TemplateState
    UNSCANNED = frozenset({"head", "calls"})

    def __init__(
        self,
        syntax: ResponseTemplate,
        context: Context,
        teller: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> None:
        self.syntax = syntax
        self._openings = {
            opening.literal: (index, opening)
            for index, region in enumerate(syntax.regions)
            for opening in region.open
        }
        self._outside = next((r for r in syntax.regions if not r.open), None)
        calls = next((r.calls for r in syntax.regions if r.calls), None)
        own = dict(state or {})
        inner = own.pop("section", None)
        self.section: CallParser | None = None
        if calls is not None:
            self.section = calls.section(_with_name_token(context), teller, inner)
        super().__init__(context, teller, own or None)
        if state is None:
            self._begin(starts_inside)

    def _begin(self, starts_inside: bool) -> None:
        at_start = self._openings.get("")
        thinking = next((n for n, r in enumerate(self.syntax.regions) if r.kind == "thinking"), -1)
        if starts_inside and thinking >= 0 and self.syntax.regions[thinking].open:
            self._enter_region(thinking)
        elif at_start is not None:
            self._enter_region(at_start[0])
        else:
            self._leave_region()
        self._follow()

    def state(self) -> dict[str, Any]:
        return super().state() | {"section": self.section.state() if self.section else None}

    def table(self) -> Mapping[str, tuple[str, ...]]:
        opens = sorted((literal for literal in self._openings if literal), key=len, reverse=True)
        outside = self._outside.close if self._outside else ()
        inside = {f"region{n}": region.close for n, region in enumerate(self.syntax.regions)}
        return {"outside": (*opens, *outside), "text": outside, **inside}

    # ---- text

    def on_text(self, text: str) -> str:
        s = self.s
        if s.at == "head":
            return self._in_head(text)
        if s.at == "calls":
            return self._in_calls(text)
        region = self.syntax.regions[s.region] if s.region >= 0 else self._outside
        if region is not None:
            self._tell(region.kind, text)
            says = region.kind == "content" and text.strip(BLANKS)
            if s.at == "outside" and says and self.context.calls_or_text:
                s.at = "text"
        return ""

    def _tell(self, kind: str, text: str) -> None:
        if kind == "thinking":
            self.teller.reasoning(text)
        else:
            self.teller.content(text)

    def _in_head(self, text: str) -> str:
        """Behind an opening's literal, up to where its match ends, or cannot."""
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
            self._no_opening()
            return rest
        rest = text[(end or 0) - before :]
        self._enter_region(index, captures)
        return rest

    def _no_opening(self) -> None:
        """It began like an opening and is none: what stands outside."""
        s = self.s
        text, s.head, s.literal, s.at = s.literal + s.head, "", "", "outside"
        if self._outside is not None:
            self._tell(self._outside.kind, text)

    # ---- regions

    def on_marker(self, marker: str) -> None:
        s = self.s
        if s.at != "outside" or marker not in self._openings:
            self._leave_region()
            return
        index, opening = self._openings[marker]
        if opening.pattern:
            s.at, s.literal, s.head = "head", marker, ""
        else:
            s.literal = marker
            self._enter_region(index)

    def _enter_region(self, index: int, captures: Mapping[str, str] | None = None) -> None:
        s = self.s
        region = self.syntax.regions[index]
        self._end_text()
        s.region, s.head = index, ""
        s.at = "calls" if region.calls else f"region{index}"
        if region.calls:
            self._open_calls(region, (captures or {}).get(region.name, ""))
        elif region.kind == "thinking":
            self.teller.begin_reasoning()
        else:
            self.teller.mark()

    def _leave_region(self) -> None:
        self._end_text()
        self.s.region, self.s.at = -1, "outside"
        if self._outside is not None and self._outside.kind == "thinking":
            self.teller.begin_reasoning()

    def _end_text(self) -> None:
        """Blanks on both sides of a region's text are markup."""
        s = self.s
        region = self._outside if s.region < 0 else self.syntax.regions[s.region]
        if region is not None and region.kind == "thinking":
            self.teller.end_reasoning()
        elif region is not None and region.kind == "content":
            self.teller.mark()

    def _open_calls(self, region: Region, name: str) -> None:
        assert self.section is not None
        section = self.section
        section.open(self.s.literal)
        match region.calls:
            case NamedJson():
                section.read(name)
                section.read_token(NAMED)
            case XmlParameters():
                section.read_token(NAMED)
                section.read(name + ">")
            case Gemma():
                section.read(name)
        self._leave_if_done()

    def on_part(self, part: Part) -> str:
        if self.s.at == "head":
            return self._in_head(part.text)
        return self._in_calls(part) if self.s.at == "calls" else ""

    def _in_calls(self, piece: str | Part) -> str:
        assert self.section is not None
        rest = self.section.read(piece)
        self._leave_if_done()
        return rest

    def _leave_if_done(self) -> None:
        assert self.section is not None
        if self.section.s.done:
            self._leave_region()

    def on_stray(self, marker: str) -> None:
        if self.s.at == "calls":
            assert self.section is not None
            self.section.read_token(marker)
            self._leave_if_done()
        elif self.s.at == "head":
            self.read(marker)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        if self.s.at == "calls" and self.section is not None:
            self.section.end(complete)
        elif self.s.at == "head" and complete:
            self._no_opening()
        elif self.s.region >= 0 and self.syntax.regions[self.s.region].kind == "thinking":
            self.teller.end_reasoning()
        self.teller.s.blanks = []  # a template's text has no blanks around it


def _with_name_token(context: Context) -> Context:
    """For the section alone: no text is ever the mark that we put behind a name."""
    lexicon = Lexicon({**context.lexicon.tokens, NAME_TOKEN: NAMED})
    return msgspec.structs.replace(context, lexicon=lexicon)
