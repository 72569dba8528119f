# ruff: noqa: RUF001  (markers are spelt as the vocabularies have them)
"""Calls as tags, one tag for each argument; values are plain text.

    <tool_call>                                     open
    <function=f>                                    call_open f call_close_tag
    <parameter=a>                                   parameter_open a
    text                                            the value
    </parameter>                                    parameter_close
    </function>                                     call_close
    </tool_call>                                    close

The states are:

    opened      after the opening marker: if no call follows, the marker is content
    between     after a call, still in its group
    call_tag    in a call's tag, up to its `>`
    call        in a call, outside its arguments
    key_tag     in an argument's tag, up to its `>`
    value       in an argument's value
    doubt       after a tag that may have ended a value
    broken      in text that is not a call, which is content up to the closing marker

Values are typed by the tool's schema (`argument_types`). The text after a closing tag in a value
decides whether the tag ends the value. `</parameter>` ends it only if an argument's tag, the call's
end or the group's end follows, possibly after blanks. Otherwise the tag is part of the value.
`</function>` ends a value without a closing tag only if the group's end or another call follows. So
a value may contain closing tags, but not two of them in the order in which they end a call. Text
between arguments is dropped.

Text after a group is content again. If the syntax has no `open` marker, or if `bare` is set, a
call's own tag may start a group. It does so only if it names a tool of the request.

Sources: the chat templates of Qwen3-Coder, MiMo, Seed-OSS, MiniMax-M2 and DeepSeek-V3.2; for the
others (dots, MiniCPM5, Muse, DeepSeek-V4 and V4.1, Step3) vLLM's published parsers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.argument_types import Trim, TypedCallParser, TypedCallState
from gateway.formats.call_parser import NO_CALL, CallParser, CallSyntax
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import ANY_KEY, GrammarBuilder, NotWritable, either, sequence
from gateway.formats.parser import Moves
from gateway.formats.plain_values import PlainValues, ValueEnd
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, arguments_form, json_notation
from gateway.formats.xml_tag import MAX_TAG_CHARS, attributes_in, plain_name, written_name
from protocol.grammar import Form, LiteralForm


class XmlParametersState(TypedCallState):
    """State of an `XmlParametersParser`.

    tag     text of the current tag so far
    quote   the quote that is open in the tag, or ""
    string  value of the attribute `string_key` of the current argument
    bare    whether the group has started with a call's own tag
    """

    at: str = "opened"
    tag: str = ""
    quote: str = ""
    string: str = ""
    bare: bool = False


class XmlParametersParser(TypedCallParser):
    State = XmlParametersState
    syntax: XmlParameters
    BETWEEN = frozenset({"between"})

    @property
    def trim(self) -> Trim:
        return self.syntax.trim

    def moves(self) -> Moves:
        x = self.syntax
        groups = x.close + x.open
        calls = (x.call_open, *groups, *x.skip)
        inside = (x.parameter_open, x.call_close)
        closing = (x.parameter_close, *((x.call_close,) if x.close and x.doubts else ()))
        tokens = tuple(marker for marker in groups if self.context.lexicon.is_token(marker))
        return {
            "opened": ((calls, self._structure),),
            "between": ((calls, self._structure),),
            "call": ((inside + calls, self._structure),),
            "value": ((closing, self._doubt), (tokens, self._group_ended)),
            "doubt": ((closing + inside + calls, self._after_doubt),),
            "broken": (((*groups, x.call_open), self._structure),),
        }

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]
        if marker == self.syntax.call_open:
            self.s.bare = True
            self._begin_tag("call_tag")

    def outside_calls(self, text: str) -> str:
        if not self.s.bare or self.s.raw:
            return super().outside_calls(text)
        rest = text.lstrip(" \t\r\n")
        self.s.done = bool(rest)
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

    TEXT = {
        **dict.fromkeys(("opened", "between"), outside_calls),
        **dict.fromkeys(("call_tag", "key_tag"), _in_tag),
        "value": TypedCallParser.value_text,
        "doubt": TypedCallParser.in_doubt,
        "broken": CallParser.as_content,
    }

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
        """Return the name in the complete tag, or None if the tag is malformed. Store the attribute
        `string_key`."""
        s, tag = self.s, self.s.tag.strip()
        if not self.syntax.quoted:
            return plain_name(tag)
        attributes = attributes_in("name=" + tag)
        if attributes is None:
            return None
        s.string = attributes.get(self.syntax.string_key, "")
        return attributes.get("name")

    def _no_tag(self) -> None:
        """Handle text that looked like a tag but is not one. After the start of a call's tag it is
        content; after the start of an argument's tag it is dropped."""
        s = self.s
        if s.at == "key_tag":
            self._enter("call")
        elif s.raw:
            s.raw.append(s.tag)
            self.reject("a tool call that has no name")
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
        self.start_call(name)

    def _begin_value(self, key: str) -> None:
        s = self.s
        kinds = self.kinds_of(key)
        if s.string:
            kinds = ("string",) if s.string == "true" else ()
        s.arguments.start(key, kinds, self.builder, bare_json=self._bare_json)
        self._enter("value")

    @property
    def _bare_json(self) -> bool:
        return self.s.string == "false" or (self.syntax.bare_json and not self.s.string)

    def _enter(self, at: str) -> None:
        self.s.at, self.s.doubtful = at, []

    # ---- the end of a value

    def _value_ended(self) -> None:
        self.s.arguments.end(self.builder, bare_json=self._bare_json)
        self._enter("call")

    # ---- markers

    def _doubt(self, marker: str) -> None:
        """Handle a closing tag in a value. If `doubts` is set, the text after the tag decides
        whether the tag ends the value."""
        if self.syntax.doubts:
            self.s.at, self.s.doubtful = "doubt", [marker]
        else:
            self._value_ended()

    def _group_ended(self, marker: str) -> None:
        self._value_ended()
        self._structure(marker)

    def _after_doubt(self, marker: str) -> None:
        if self._ends_value(marker):
            self._structure(marker)
            return
        self.was_text()
        is_closing = marker in (self.syntax.parameter_close, self.syntax.call_close)
        (self._doubt if is_closing else self._group_ended)(marker)

    def _ends_value(self, marker: str) -> bool:
        """Return whether `marker` shows that the closing tag in doubt ends the value. If so, end
        the value."""
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
        self.end_call("between")
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
            self.end_call("between")
            if marker == x.call_close:
                return
        if marker == x.call_open:
            if s.raw:
                s.raw.append(marker)
            self._begin_tag("call_tag")
        else:
            self._group_marker(marker)

    def _group_marker(self, marker: str) -> None:
        """Handle an opening or closing marker between calls."""
        s = self.s
        if s.raw:
            if marker in self.syntax.close:
                s.raw.append(marker)
            self.reject(NO_CALL)
        if marker in self.syntax.close:
            s.done = True
        else:
            s.at, s.bare, s.raw = "opened", False, [marker]

    def on_end(self, complete: bool) -> None:
        s = self.s
        if complete and s.at == "doubt" and s.doubtful[0] == self.syntax.call_close:
            self._value_ended()
            self.end_call("between")
        if complete and s.at == "call_tag" and not self.builder.is_open:
            self._no_tag()
        super().on_end(complete)


# ---- the syntax


class XmlParameters(CallSyntax, frozen=True, kw_only=True):
    """One model family's spelling of calls as tags with plain-text values."""

    PARSER = XmlParametersParser

    #: Markers that start a group. If empty, a call's tag starts it.
    open: tuple[str, ...] = ("<tool_call>",)
    #: Markers that end a group.
    close: tuple[str, ...] = ("</tool_call>",)
    #: A call's tag up to its name.
    call_open: str = "<function="
    #: Marker that ends a call.
    call_close: str = "</function>"
    #: An argument's tag up to its name.
    parameter_open: str = "<parameter="
    #: Marker that ends a value.
    parameter_close: str = "</parameter>"
    #: Whether names are in quotes, and other attributes may follow.
    quoted: bool = False
    #: Name of an attribute that marks a value as a string ("true") or as JSON ("false").
    string_key: str = ""
    #: Markers without a meaning outside of values.
    skip: tuple[str, ...] = ()
    #: Whether a call's tag may also start a group, if it names a tool of the request.
    bare: bool = False
    #: Characters that are stripped from both ends of a value.
    trim: Trim = "newline"
    #: Whether a parameter without a schema is JSON if its text is valid JSON.
    bare_json: bool = False
    #: Whether `f.f` means the tool `f`.
    doubled_names: bool = False
    #: Whether the text after a closing tag decides if it ends the value. Otherwise the first
    #: closing tag does.
    doubts: bool = True
    #: Text between tags. Only the grammar uses it.
    line: str = "\n"
    #: Text on both sides of a value. Only the grammar uses it.
    around: str = ""
    #: Whether a group holds several calls. Only the grammar uses it.
    many: bool = True
    #: Text before a call. Only the grammar uses it.
    call_before: str = ""
    #: Text after a call. Only the grammar uses it.
    call_after: str = ""

    def markers(self) -> tuple[str, ...]:
        return self.open + self.close + self.skip + self.tags()

    def tags(self) -> tuple[str, ...]:
        return (self.call_open, self.call_close, self.parameter_open, self.parameter_close)

    def openers(self) -> tuple[str, ...]:
        return self.open + ((self.call_open,) if self.bare or not self.open else ())

    # ---- the grammar

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        after = grammar.each_tool(lambda tool: self._write_call(tool, grammar))
        line = LiteralForm(self.line)
        if opener == self.call_open:  # nothing closes such a group
            return grammar.several(after, sequence(line, self.call_open))
        before = self.call_before + self.call_open
        call = grammar.rule("call", sequence(before, after, self.call_after, line))
        return sequence(line, grammar.several(call) if self.many else call, self.close[0])

    def _write_call(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        """Return the grammar of one call, from its name on."""
        name = written_name(tool.name, quoted=self.quoted)
        if name is None:
            raise NotWritable(tool.name, "name", "this format cannot write it")
        inside = self.write_arguments(tool, grammar)
        return sequence(f"{name}>{self.line}", inside, self.call_close)

    def write_arguments(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        """Return the grammar of a call's arguments: their tags and values, without the markup of
        the call around them."""
        ending = ValueEnd(
            close=self.parameter_close,
            others=(self.call_close,) if self.close and self.doubts else (),
            around=self.around,
            trim=self.trim,
            bare=self.bare_json,
        )
        values = Values(json_notation(ending.words), Schemas(tool), grammar)
        plain = PlainValues(values, ending)

        def write(key: str | None, schema: Any, path: str) -> Form | None:
            name = ANY_KEY if key is None else written_name(key, quoted=self.quoted)
            if name is None:
                return None
            quote = '"' if key is None and self.quoted else ""
            tag = sequence(self.parameter_open + quote, name, quote)
            if self.string_key:
                value = self._write_typed_value(plain, values.schemas.cases(schema, path), path)
            else:
                value = sequence(">", plain.argument(key, schema, path))
            return sequence(tag, value, self.line)

        return arguments_form(values, write)

    def _write_typed_value(
        self, plain: PlainValues, cases: Sequence[SchemaCase], path: str
    ) -> Form:
        """Return the grammar of a value whose tag marks whether it is a string."""
        strings = [case for case in cases if case.kind == "string"]
        others = [case for case in cases if case.kind != "string"]
        ways = []
        if strings:
            text = plain.text() if anything(cases) else plain.of_cases(strings, ("string",), path)
            ways.append(sequence(f' {self.string_key}="true">', text))
        if others:
            value = either(plain.values.case(case, path) for case in others)
            ways.append(sequence(f' {self.string_key}="false">', value, self.parameter_close))
        return either(ways)


# ---- the formats


def _invoke(prefix: str = "", **options: Any) -> XmlParameters:
    """Return the syntax `<invoke name="f"><parameter name="k">v</parameter></invoke>`. Each tag
    starts with `prefix`."""
    return XmlParameters(
        call_open=f"<{prefix}invoke name=",
        call_close=f"</{prefix}invoke>",
        parameter_open=f"<{prefix}parameter name=",
        parameter_close=f"</{prefix}parameter>",
        quoted=True,
        **options,
    )


def _dsml(space: str, group: str) -> XmlParameters:
    """Return the syntax of a DeepSeek model. `group` is the element around the calls."""
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
