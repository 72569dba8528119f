# ruff: noqa: RUF001  (markers are spelt as the vocabularies have them)
"""Calls as tags, one tag for each argument; values are plain text.

    <tool_call>                                     open
    <function=f>                                    call_open f call_close_tag
    <parameter=a>                                   parameter_open a
    text                                            the value
    </parameter>                                    parameter_close
    </function>                                     call_close
    </tool_call>                                    close

    opened      after the opening marker: a call, or all of it is content
    between     after a call, still in its group
    call_tag    in a call's tag, up to its `>`
    call        in a call, outside its arguments
    key_tag     in an argument's tag, up to its `>`
    value       in an argument's value
    doubt       after a tag that may have ended a value
    broken      not a call; up to the closing marker it is content

Values are typed by the tool's schema (`typed_value`). The text after a closing tag inside a value
decides whether it is one. `</parameter>` ends a value only if, blanks aside, an argument's tag, the
call's end or the group's end follows; otherwise it is text. `</function>` ends a value whose own
closing tag is missing only if the group's end or another call follows. So a value may contain
closing tags, but not two of them in their order. Text between arguments is dropped.

Text after a call, or after blanks, is read as content again. Without `open`, a group starts with a
call's own tag, which counts only if it names a tool of the request.

Sources: the chat templates of Qwen3-Coder, MiMo, Seed-OSS, MiniMax-M2 and DeepSeek-V3.2; for the
others (dots, MiniCPM5, Muse, DeepSeek-V4 and V4.1, Step3) vLLM's published parsers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.argument_types import (
    ArgumentsWriter,
    Trim,
    kinds_of,
    schema_of,
)
from gateway.formats.arguments_grammar import arguments_form
from gateway.formats.event_builder import BLANKS, PARSE_FAILED, DeclaredTool, EventBuilder
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.grammar_forms import either, sequence, several
from gateway.formats.parser import CallParser, CallSyntax, FormatParserState, ParserContext
from gateway.formats.plain_values import PlainValues, ValueEnd
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, json_notation
from protocol.grammar import Form, LiteralForm, Pattern

MAX_TAG_CHARS = 1024
"""A longer tag is not a tag."""

ATTRIBUTE = re.compile(r'\s*([\w:.-]+)\s*=\s*(?:"([^"]*)"|\'([^\']*)\'|([^\s"\'=]+))')
PLAIN_NAME = re.compile(r"[^\s<>\"'=]+(?: [^\s<>\"'=]+)*")


class XmlParameters(CallSyntax, frozen=True, kw_only=True):
    """Markup of one variant of this syntax."""

    #: Markers that start a group; if empty, a call's tag does.
    open: tuple[str, ...] = ("<tool_call>",)
    #: Markers that end a group.
    close: tuple[str, ...] = ("</tool_call>",)
    #: A call's tag up to its name.
    call_open: str = "<function="
    #: Ends a call.
    call_close: str = "</function>"
    #: An argument's tag up to its name.
    parameter_open: str = "<parameter="
    #: Ends a value.
    parameter_close: str = "</parameter>"
    #: Names stand in quotes, and other attributes may follow.
    quoted: bool = False
    #: An attribute that marks a value as a string ("true") or JSON ("false").
    string_key: str = ""
    #: Markers without a meaning outside values.
    skip: tuple[str, ...] = ()
    #: A call's tag starts a group, too, if it names a tool of the request.
    bare: bool = False
    #: Markup around a value.
    trim: Trim = "newline"
    #: A parameter without a schema is JSON if it is valid JSON.
    bare_json: bool = False
    #: `f.f` means the tool `f`.
    doubled_names: bool = False
    doubts: bool = True
    #: Text between tags. Only the writer uses it.
    line: str = "\n"
    #: Text on both sides of a value. Only the writer uses it.
    around: str = ""
    #: A group holds several calls. Only the writer uses it.
    many: bool = True
    #: Text before a call. Only the writer uses it.
    call_before: str = ""
    #: Text after a call. Only the writer uses it.
    call_after: str = ""

    def markers(self) -> tuple[str, ...]:
        return self.open + self.close + self.skip + self.tags()

    def tags(self) -> tuple[str, ...]:
        return (self.call_open, self.call_close, self.parameter_open, self.parameter_close)

    def openers(self) -> tuple[str, ...]:
        return self.open + ((self.call_open,) if self.bare or not self.open else ())

    def call_parser(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        return XmlParametersParser(self, context, builder, state)


class XmlParametersState(FormatParserState):
    """State of an `XmlParametersParser`.

    tag        the part read so far of the current tag
    quote      the quote that is open in it
    arguments  arguments of the open call
    doubtful   text that is markup if the value has ended, and part of the value otherwise
    string     value of the attribute `string_key` of the current value
    bare       the group has started with a call's own tag
    raw        text of the group until a call is emitted: it may have to become content
    """

    at: str = "opened"
    tag: str = ""
    quote: str = ""
    arguments: ArgumentsWriter = msgspec.field(default_factory=ArgumentsWriter)
    doubtful: list[str] = []
    string: str = ""
    bare: bool = False
    name: str = ""
    raw: list[str] = []


class XmlParametersParser(CallParser):
    syntax: XmlParameters

    State = XmlParametersState
    BETWEEN = frozenset({"between"})

    def table(self) -> Mapping[str, tuple[str, ...]]:
        x = self.syntax
        ends = x.close + x.open
        calls = (x.call_open, *ends, *x.skip)
        inside = (x.parameter_open, x.call_close, *calls)
        value = (x.parameter_close, *((x.call_close,) if x.close and x.doubts else ()))
        tokens = tuple(end for end in ends if self.context.lexicon.is_token(end))
        return {
            "opened": calls,
            "between": calls,
            "call": inside,
            "value": value + tokens,
            "doubt": (*value, x.parameter_open, x.call_close, x.call_open, *ends, *x.skip),
            "broken": (*ends, x.call_open),
        }

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]
        if marker == self.syntax.call_open:
            self.s.bare = True
            self._begin_tag("call_tag")

    # ---- text

    def on_text(self, text: str) -> str:
        s = self.s
        match s.at:
            case "call_tag" | "key_tag":
                return self._in_tag(text)
            case "value":
                s.arguments.text(text, self.builder, self.syntax.trim)
            case "doubt":
                return self._in_doubt(text)
            case "broken":
                self.builder.content(text)
            case "opened" | "between":
                return self._outside_calls(text)
        return ""

    def _outside_calls(self, text: str) -> str:
        """Skip blanks; other text ends the group or is unexpected."""
        s = self.s
        rest = text.lstrip(BLANKS)
        if s.at == "opened":
            s.raw.append(text[: len(text) - len(rest)])
        if not rest:
            return ""
        if s.at == "opened":
            self._reject("a marker of tool calls with no call behind it")
        elif not s.bare:
            self.builder.warn(PARSE_FAILED, "text between tool calls")
            s.at = "broken"
            return rest
        s.done = True
        return rest

    # ---- tags

    def _begin_tag(self, at: str) -> None:
        self.s.at, self.s.tag, self.s.quote = at, "", ""

    def _in_tag(self, text: str) -> str:
        s = self.s
        for position, char in enumerate(text):
            if s.quote:
                if char == s.quote:
                    s.quote = ""
            elif char in "\"'" and self.syntax.quoted:
                s.quote = char
            elif char == ">":
                s.tag += text[:position]
                self._tag_ended()
                return text[position + 1 :]
            if char in "<\r\n" or len(s.tag) + position >= MAX_TAG_CHARS:
                s.tag += text[:position]
                self._no_tag()
                return text[position:]
        s.tag += text
        return ""

    def _tag_ended(self) -> None:
        s = self.s
        name = self._name_in_tag()
        if name is None:
            s.tag += ">"
            self._no_tag()
        elif s.at == "call_tag":
            self._begin_call(name)
        else:
            self._begin_value(name)

    def _name_in_tag(self) -> str | None:
        """Return the tag's name, and store its string attribute."""
        s, tag = self.s, self.s.tag.strip()
        if not self.syntax.quoted:
            return tag if PLAIN_NAME.fullmatch(tag) else None
        attributes, end = {}, 0
        text = "name=" + tag
        while match := ATTRIBUTE.match(text, end):
            attributes[match[1]] = next(v for v in match.groups()[1:] if v is not None)
            end = match.end()
        s.string = attributes.get(self.syntax.string_key, "")
        return attributes.get("name") if not text[end:].strip("/ \t") else None

    def _no_tag(self) -> None:
        """Handle text that only looked like a tag: a call's is content, an argument's is
        dropped.
        """
        s = self.s
        if s.at == "key_tag":
            self._begin_doubtless("call")
        elif s.raw:
            s.raw.append(s.tag)
            self._reject("a tool call that has no name")
            s.done = True
        else:
            self.builder.reject_call(self.syntax.call_open + s.tag, "a tool call that has no name")
            s.at, s.done = "broken", s.bare

    def _begin_call(self, name: str) -> None:
        s = self.s
        if s.bare and s.raw and not self.builder.declares(name):
            s.tag += ">"
            self._no_tag()
            return
        head, _, tail = name.partition(".")
        if self.syntax.doubled_names and head == tail and not self.builder.declares(name):
            name = head
        s.name, s.raw, s.arguments, s.at = name, [], ArgumentsWriter(), "call"
        self.builder.start_call(name)

    def _begin_value(self, key: str) -> None:
        s = self.s
        parameters = self.builder.parameters(s.name)
        kinds = kinds_of(schema_of(parameters, key), parameters)
        if s.string:
            kinds = ("string",) if s.string == "true" else ()
        s.arguments.begin(key, kinds, self.builder, bare_json=self._bare_json)
        self._begin_doubtless("value")

    @property
    def _bare_json(self) -> bool:
        return self.s.string == "false" or (self.syntax.bare_json and not self.s.string)

    def _begin_doubtless(self, at: str) -> None:
        self.s.at, self.s.doubtful = at, []

    # ---- the end of a value

    def _in_doubt(self, text: str) -> str:
        s = self.s
        rest = text.lstrip(BLANKS)
        s.doubtful.append(text[: len(text) - len(rest)])
        if rest:
            self._was_text()
        return rest

    def _was_text(self) -> None:
        s = self.s
        s.arguments.text("".join(s.doubtful), self.builder, self.syntax.trim)
        self._begin_doubtless("value")

    def _value_ended(self) -> None:
        self.s.arguments.end(self.builder, bare_json=self._bare_json)
        self._begin_doubtless("call")

    # ---- markers

    def on_marker(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if s.at == "doubt" and not self._ends_value(marker):
            self._was_text()
        if s.at == "value":
            if marker not in (x.parameter_close, x.call_close):  # a token that ends the group
                self._value_ended()
                self._structure(marker)
            elif x.doubts:
                s.at, s.doubtful = "doubt", [marker]
            else:
                self._value_ended()
        else:
            self._structure(marker)

    def _ends_value(self, marker: str) -> bool:
        """Return whether `marker` shows that the value in doubt has ended. If so, end it."""
        s, x = self.s, self.syntax
        if marker == x.parameter_close or (marker in x.skip and s.doubtful[0] != x.call_close):
            return False
        if s.doubtful[0] == x.parameter_close:
            if marker == x.call_open:
                return False
            self._value_ended()
            return True
        if marker in (x.parameter_open, x.call_close):
            return False
        self._value_ended()
        self._call_ended()
        return True

    def _structure(self, marker: str) -> None:
        """Handle a marker outside of values."""
        s, x = self.s, self.syntax
        if marker in x.skip:
            if s.raw:
                s.raw.append(marker)
            return
        if marker == x.parameter_open:
            self._begin_tag("key_tag")
            return
        if s.at == "call":
            self._call_ended()
            if marker == x.call_close:
                return
        if marker == x.call_open:
            if s.raw:
                s.raw.append(marker)
            self._begin_tag("call_tag")
        else:
            self._stretch(marker)

    def _call_ended(self) -> None:
        self.s.arguments.close(self.builder)
        self.builder.end_call()
        self.s.at = "between"

    def _stretch(self, marker: str) -> None:
        """Handle an opening or closing marker between calls."""
        s = self.s
        if s.raw:
            if marker in self.syntax.close:
                s.raw.append(marker)
            self._reject("a marker of tool calls with no call behind it")
        if marker in self.syntax.close:
            s.done = True
        else:
            s.at, s.bare, s.raw = "opened", False, [marker]

    def on_stray(self, marker: str) -> None:
        s = self.s
        match s.at:
            case "value":
                s.arguments.text(marker, self.builder, self.syntax.trim)
            case "doubt":
                self._was_text()
                s.arguments.text(marker, self.builder, self.syntax.trim)

    # ---- the end

    def on_end(self, complete: bool) -> None:
        s, x = self.s, self.syntax
        if not complete:
            self.builder.abandon_call()
            return
        if s.at == "doubt" and s.doubtful[0] == x.call_close:
            self._value_ended()
            self._call_ended()
        if self.builder.is_open:
            self.builder.warn(PARSE_FAILED, "the last tool call is not finished")
            self.builder.abandon_call()
        elif s.at == "call_tag":
            self._no_tag()
        elif s.raw:
            self._reject("a tool call that is not finished")


# ---- grammar writer

ANY_NAME = Pattern(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
IN_QUOTES = re.compile(r'[^"<\r\n]+')


def write_calls(
    syntax: XmlParameters,
    opener: str,
    tools: Sequence[DeclaredTool],
    many: bool,
    grammar: GrammarBuilder,
) -> Form:
    x = syntax
    behind = either(_write_call(x, tool, grammar) for tool in tools)
    line = LiteralForm(x.line)
    if opener == x.call_open:  # nothing closes such a group
        return several(behind, sequence(line, x.call_open), many=many)
    call = grammar.rule("call", sequence(x.call_before + x.call_open, behind, x.call_after, line))
    return sequence(line, several(call, many=many and x.many), x.close[0])


def _write_call(x: XmlParameters, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
    """Write one call, from its name on."""
    name = _write_name(x, tool.name)
    if name is None:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    return sequence(f"{name}>{x.line}", write_arguments(x, tool, grammar), x.call_close)


def write_arguments(x: XmlParameters, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
    """Write a call's arguments, without the markup around them."""
    return arguments_form(*_argument_writer(x, tool, grammar))


def _write_name(x: XmlParameters, name: str) -> str | None:
    """Return a name as written in a tag, or None if it cannot stand there."""
    if len(name) > MAX_TAG_CHARS // 2:
        return None
    if x.quoted:
        return f'"{name}"' if IN_QUOTES.fullmatch(name) else None
    return name if PLAIN_NAME.fullmatch(name) else None


def _argument_writer(
    x: XmlParameters, tool: DeclaredTool, grammar: GrammarBuilder
) -> tuple[Values, Any]:
    ends_call = (x.call_close,) if x.close and x.doubts else ()
    ending = ValueEnd(
        close=x.parameter_close, others=ends_call, around=x.around, trim=x.trim, bare=x.bare_json
    )
    values = Values(json_notation(ending.words), Schemas(tool), grammar)
    plain = PlainValues(values, ending)

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        name = ANY_NAME if key is None else _write_name(x, key)
        if name is None:
            return None
        quote = '"' if key is None and x.quoted else ""
        tag = sequence(x.parameter_open + quote, name, quote)
        if x.string_key:
            value = _write_typed_value(x, plain, values.schemas.cases(schema, path), path)
        else:
            value = sequence(">", plain.argument(key, schema, path))
        return sequence(tag, value, x.line)

    return values, write


def _write_typed_value(
    x: XmlParameters, plain: PlainValues, cases: Sequence[SchemaCase], path: str
) -> Form:
    """Write a value whose tag marks whether it is a string."""
    strings = [case for case in cases if case.kind == "string"]
    others = [case for case in cases if case.kind != "string"]
    ways = []
    if strings:
        text = plain.text() if anything(cases) else plain.of(strings, ("string",), path)
        ways.append(sequence(f' {x.string_key}="true">', text))
    if others:
        value = either(plain.values.case(case, path) for case in others)
        ways.append(sequence(f' {x.string_key}="false">', value, x.parameter_close))
    return either(ways)


# ---- the formats


def _invoke(prefix: str = "", **options: Any) -> XmlParameters:
    """Return `<invoke name="f"><parameter name="k">v</parameter></invoke>`, with prefixed tags."""
    return XmlParameters(
        call_open=f"<{prefix}invoke name=",
        call_close=f"</{prefix}invoke>",
        parameter_open=f"<{prefix}parameter name=",
        parameter_close=f"</{prefix}parameter>",
        quoted=True,
        **options,
    )


def _dsml(space: str, group: str) -> XmlParameters:
    mark = "｜DSML｜" + space
    return _invoke(
        mark,
        open=(f"<{mark}{group}>",),
        close=(f"</{mark}{group}>",),
        string_key="string",
        trim="nothing",
    )


QWEN3_XML = XmlParameters(bare=True, many=False, around="\n")

MUSE_CALLS = _invoke(
    "atem:",
    open=("<atem:function_calls>",),
    close=("</atem:function_calls>", "<|eom|>", "<|eot|>"),
    doubled_names=True,
    trim="nothing",
    bare_json=True,
)

FORMATS = {
    "qwen3_coder": QWEN3_XML,
    "qwen3_xml": QWEN3_XML,
    "step3p5": QWEN3_XML,
    "mimo": XmlParameters(bare=True, trim="nothing", many=False),
    "seed_oss": XmlParameters(
        open=("<seed:tool_call>",), close=("</seed:tool_call>",), trim="nothing", many=False
    ),
    "minimax_m2": _invoke(
        open=("<minimax:tool_call>",), close=("</minimax:tool_call>",), trim="nothing"
    ),
    "dots": _invoke(
        open=("<dots_function_call>",), close=("</dots_function_call>",), trim="blanks"
    ),
    "minicpm5": XmlParameters(
        open=(),
        close=(),
        call_open="<function name=",
        call_close="</function>",
        parameter_open="<param name=",
        parameter_close="</param>",
        quoted=True,
        trim="blanks",
        bare_json=True,
        line="",
    ),
    "deepseek_v32": _dsml("", "function_calls"),
    "deepseek_v4": _dsml("", "tool_calls"),
    "deepseek_v41": _dsml(" ", "calls"),
    "step3": _invoke(
        "steptml:",
        open=("<｜tool_calls_begin｜>",),
        close=("<｜tool_calls_end｜>",),
        skip=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
        trim="nothing",
        call_before="<｜tool_call_begin｜>function<｜tool_sep｜>",
        call_after="<｜tool_call_end｜>",
    ),
}
