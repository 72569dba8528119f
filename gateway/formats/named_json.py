"""Calls whose name is between markers, followed by JSON arguments.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>
    {"a": 1}<|tool_call_end|><|tool_calls_section_end|>

The states are:

    between    in the group, outside of calls
    kind       in the call's kind, which has no meaning (`function`)
    name       in its name
    id         in its id
    opened     before the arguments' JSON
    arguments  in the arguments
    closing    after the arguments; the rest of the call is markup
    broken     in arguments that are not JSON, which are emitted unchanged up to the next marker
    spilt      in unexpected text, which is content up to the next marker

A call ends with its JSON. If its closing marker follows the name instead, the arguments are `{}`. A
call without a name is not a call: its text and markers are content.

PLaMo 3 uses this syntax with markers of its own. In its vocabulary each of these markers is several
tokens, and some of the tokens are special (`:plamo|>`). Without the line breaks, a call is:

    <|plamo:begin_tool_requests:plamo|>
    <|plamo:begin_tool_request:plamo|>
    <|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>
    <|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"a": 1}
    <|plamo:end_tool_arguments:plamo|>
    <|plamo:end_tool_request:plamo|>
    <|plamo:end_tool_requests:plamo|>

Functionary 3.1 writes `<function=f>{"a": 1}</function>`. In Solar Open's calls, the id stands in
the place of the kind: `<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{"a": 1}`.

Sources for PLaMo 3 and Solar Open: vLLM's published parsers and their tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from gateway.formats.call_parser import NO_CALL, CallParser, CallParserState, CallSyntax
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.events import Event
from gateway.formats.grammar_builder import GrammarBuilder, optional, sequence
from gateway.formats.json_call import JsonExtent
from gateway.formats.json_spelling import PLAIN, SPACE
from gateway.formats.parser import Moves
from gateway.text.markers import match_end
from protocol.engine.grammar import Form, LiteralForm, Pattern

OPEN_ENDS = ("\n", "{", ">")
"""Ordinary text that may end a name. The brace is also the start of the arguments."""

ID_CHARS = 9
"""Number of letters and digits in an id, as Mistral's templates require."""
MAX_NAME_CHARS = 512
"""Most characters of a name that are held back. A longer text is not a name."""

WORD = re.compile(r"\s*+[^\s<>{}\[\]()\"'`,;]*+\s*+")


class NamedJsonState(CallParserState):
    """State of a `NamedJsonParser`.

    name   the name so far
    id     the id so far
    value  scan of the arguments
    whole  whether a marker has opened a group, so that several calls may follow
    """

    at: str = "between"
    name: str = ""
    id: str = ""
    value: JsonExtent = msgspec.field(default_factory=JsonExtent)
    whole: bool = False


class NamedJsonParser(CallParser):
    State = NamedJsonState
    syntax: NamedJson
    BETWEEN = frozenset({"between", "closing"})
    UNSCANNED = frozenset({"arguments"})

    def moves(self) -> Moves:
        x = self.syntax
        ends = (x.call_close + x.section_close + x.call_open, self._call_ended)
        fence, named = (x.fence, self.skip), (x.name_end, self._name_ended)
        return {
            "between": (ends,),
            "kind": ((x.kind_end, self._kind_ended), ends),
            "name": ((x.id_begin, self._id_begins), named, ends),
            "id": (named, ends),
            "opened": (fence, ends),
            "arguments": ((ends[0], self._marker_in_arguments),),
            "closing": (fence, ends),
            "broken": (ends,),
            "spilt": (ends,),
        }

    def on_open(self, marker: str) -> None:
        self.s.whole = marker in self.syntax.section_open
        if self.s.whole:
            self.s.raw = [marker]
        else:
            self._start_head(marker)

    def _start_head(self, marker: str) -> None:
        s = self.s
        s.at = "kind" if self.syntax.kind_end else "name"
        s.name = s.id = ""
        s.raw.append(marker)

    # ---- text

    def fast_event(self, text: str) -> Event | None:
        s = self.s
        in_string = s.at == "arguments" and s.value.quoted and not s.value.escaped
        return self.builder.fast_arguments(text) if in_string and PLAIN.fullmatch(text) else None

    def _in_head(self, text: str) -> str:
        """Read a kind, a name or an id. If the text is not a word, this is not a call."""
        s = self.s
        so_far = s.id if s.at == "id" else s.name
        word = WORD.match((so_far + text)[:MAX_NAME_CHARS])
        assert word is not None
        read = word.end() - len(so_far)
        s.raw.append(text[:read])
        if s.at == "id":
            s.id = word[0]
        else:
            s.name = word[0]
        if read < len(text):
            self.reject("the marker of a tool call without a name after it")
            s.done = True
        return text[read:]

    def _before_arguments(self, text: str) -> str:
        """Skip blanks before the arguments or another call. Return the text after the blanks."""
        s = self.s
        text = text[match_end(SPACE, text) :]
        if not text:
            return ""
        if s.at == "opened":
            s.at, s.value = ("arguments", JsonExtent()) if text[0] == "{" else ("broken", s.value)
        elif s.at == "between" and s.raw:
            self.reject(NO_CALL)
            s.done = True
        else:
            self.builder.parse_failed("text between tool calls")
            s.at = "spilt"
        return text

    def _in_arguments(self, text: str) -> str:
        position, status = self.s.value.scan(text)
        self.builder.arguments_delta(text[:position])
        if status == "end":
            self.builder.end_call()
            self._leave("closing" if self.syntax.call_close else "between")
        elif status == "broken":
            self.s.at = "broken"
        return text[position:]

    def _leave(self, then: str) -> None:
        self.s.at = then
        self.s.done = then == "between" and not self.s.whole

    TEXT = {
        **dict.fromkeys(("kind", "name", "id"), _in_head),
        **dict.fromkeys(("between", "opened", "closing"), _before_arguments),
        "arguments": _in_arguments,
        "broken": CallParser.as_arguments,
        "spilt": CallParser.as_content,
    }

    # ---- markers

    def _marker_in_arguments(self, marker: str) -> None:
        if self.s.value.quoted:
            self._in_arguments(marker)
        else:
            self._call_ended(marker)

    def _kind_ended(self, marker: str) -> None:
        s = self.s
        s.raw.append(marker)
        s.id = s.name if self.syntax.kind_is_id else ""
        s.at, s.name = "name", ""

    def _id_begins(self, marker: str) -> None:
        self.s.raw.append(marker)
        self.s.at = "id"

    def _name_ended(self, marker: str) -> None:
        s = self.s
        if not s.name.strip(BLANKS):
            s.raw.append(marker)
            if marker not in BLANKS:
                self.reject("a tool call without a name")
                s.done = True
            return
        self._start_call()
        s.at = "opened"
        if marker == "{":
            s.at, s.value = "arguments", JsonExtent()
            self._in_arguments(marker)

    def _start_call(self) -> None:
        s = self.s
        name, call_id = s.name.strip(BLANKS), s.id.strip(BLANKS)
        if self.syntax.name_is_id:
            call_id, (name, _, index) = name, name.rpartition(":")
            if not (name and index.isdecimal()):
                name, call_id = call_id, ""
            name = name.removeprefix("functions.")
        s.raw.clear()
        self.builder.start_call(name, call_id or None)

    def _call_ended(self, marker: str) -> None:
        """Handle a marker that ends the call, in any state of the call."""
        s = self.s
        if s.at in ("name", "id") and s.name.strip(BLANKS):
            self._start_call()
        if self.builder.is_open:
            self.builder.end_call()
        elif s.at in ("kind", "name", "id"):
            s.raw += [marker] * (marker not in self.syntax.call_open)
            self.reject("a tool call without a name")
        elif s.raw and marker not in self.syntax.call_open:
            s.raw.append(marker)
            self.reject(NO_CALL)
        if marker in self.syntax.call_open:
            self._start_head(marker)
        elif marker in self.syntax.section_close:
            s.done = True
        else:
            self._leave("between")

    def on_stray(self, marker: str) -> None:
        if self.s.at == "arguments" and self.s.value.quoted:
            self._in_arguments(marker)


class NamedJson(CallSyntax, frozen=True, kw_only=True):
    """One model family's spelling of calls as a name and JSON: its markers and options."""

    PARSER = NamedJsonParser

    #: Markers that start a group of calls; a call may also stand alone.
    section_open: tuple[str, ...] = ()
    #: Markers that end the group.
    section_close: tuple[str, ...] = ()
    #: Markers that start a call.
    call_open: tuple[str, ...]
    #: Markers between the call's kind and its name. If empty, there is no kind.
    kind_end: tuple[str, ...] = ()
    #: Markers between the name and the call's id.
    id_begin: tuple[str, ...] = ()
    #: Markers between the name (or id) and the arguments. If two match at one place, the first in
    #: this list wins.
    name_end: tuple[str, ...]
    #: Markers that end a call.
    call_close: tuple[str, ...] = ()
    #: Text that may stand before and after the arguments, and has no meaning.
    fence: tuple[str, ...] = ()
    #: Whether the call's id stands in the place of its kind.
    kind_is_id: bool = False
    #: Whether the name is written as `functions.NAME:INDEX`, which is also the call's id.
    name_is_id: bool = False
    #: The kind that models write. Only the grammar uses it.
    kind: str = ""
    #: Text between a fence and the arguments. Only the grammar uses it.
    fenced: str = ""
    #: Text between two calls of a group. Only the grammar uses it.
    between: str = ""

    def markers(self) -> tuple[str, ...]:
        return (
            self.section_open
            + self.section_close
            + self.call_open
            + self.kind_end
            + self.id_begin
            + tuple(marker for marker in self.name_end if marker not in OPEN_ENDS)
            + self.call_close
        )

    def openers(self) -> tuple[str, ...]:
        return self.section_open + self.call_open

    # ---- the grammar

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        call = grammar.call_rule(lambda tool: self._write_call(tool, grammar))
        if opener not in self.section_open:
            return call
        first, closer = self.call_open[0], self.section_close
        end = closer[self.section_open.index(opener)] if closer else ""
        return sequence(grammar.several(sequence(first, call), self.between), end)

    def _write_call(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        """Return the grammar of a call after the marker that starts it."""
        call_id: Form | str = ""
        kind = KIND_ID_FORM if self.kind_is_id else LiteralForm(self.kind)
        if self.id_begin and grammar.lexicon.is_token(self.id_begin[0]):
            call_id = optional(sequence(self.id_begin[0], CALL_ID_FORM))
        return sequence(
            kind,
            _first(self.kind_end),
            *([f"functions.{tool.name}:", CALL_INDEX] if self.name_is_id else [tool.name]),
            call_id,
            _first(self.name_end),
            self.write_arguments(tool, grammar),
        )

    def write_arguments(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        """Return the grammar of a call after its name, up to the end of the call."""
        before, after = self.fence or ("", "")
        end = self.fenced + after + _first(self.call_close)
        return sequence(before + self.fenced, grammar.arguments(tool), end)


def _first(markers: Sequence[str]) -> str:
    return markers[0] if markers else ""


CALL_ID_FORM = Pattern(f"[a-zA-Z0-9]{{{ID_CHARS}}}")
KIND_ID_FORM = Pattern("[a-z0-9]{10}")
CALL_INDEX = Pattern("0|[1-9][0-9]{0,3}")
"""Index of a call in its conversation. The model continues the count of earlier answers."""


def plamo_begin(region: str) -> str:
    return f"<|plamo:begin_{region}:plamo|>"


def plamo_end(region: str) -> str:
    return f"<|plamo:end_{region}:plamo|>"


def _bars(words: str) -> str:
    """Return a DeepSeek marker with these words. Its bars are full-width characters."""
    return f"<\uff5c{words}\uff5c>"


FORMATS = {
    "deepseek_v3": NamedJson(
        section_open=(_bars("tool▁calls▁begin"),),
        section_close=(_bars("tool▁calls▁end"),),
        call_open=(_bars("tool▁call▁begin"),),
        kind_end=(_bars("tool▁sep"),),
        name_end=("\n",),
        fence=("```json", "```"),
        call_close=(_bars("tool▁call▁end"),),
        kind="function",
        fenced="\n",
        between="\n",
    ),
    "deepseek_v31": NamedJson(
        section_open=(_bars("tool▁calls▁begin"),),
        section_close=(_bars("tool▁calls▁end"),),
        call_open=(_bars("tool▁call▁begin"),),
        name_end=(_bars("tool▁sep"),),
        call_close=(_bars("tool▁call▁end"),),
    ),
    "functionary_v31": NamedJson(
        call_open=("<function=",), name_end=(">",), call_close=("</function>",)
    ),
    "solar_open": NamedJson(
        section_open=("<|tool_calls|>",),
        section_close=("<|calls|>",),
        call_open=("<|tool_call:begin|>",),
        kind_end=("<|tool_call:name|>",),
        name_end=("<|tool_call:args|>",),
        call_close=("<|tool_call:end|>",),
        kind_is_id=True,
    ),
    "kimi_k2": NamedJson(
        section_open=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        section_close=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        call_open=("<|tool_call_begin|>",),
        name_end=("<|tool_call_argument_begin|>",),
        call_close=("<|tool_call_end|>",),
        name_is_id=True,
    ),
    "plamo3": NamedJson(
        section_open=(plamo_begin("tool_requests"),),
        section_close=(plamo_end("tool_requests"),),
        call_open=(plamo_begin("tool_request"),),
        kind_end=(plamo_begin("tool_name"),),
        name_end=(plamo_end("tool_name"),),
        fence=(
            plamo_begin("tool_arguments") + "<|plamo:constrain|>json<|plamo:msg|>",
            plamo_end("tool_arguments"),
        ),
        call_close=(plamo_end("tool_request"),),
    ),
}
