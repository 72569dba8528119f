# ruff: noqa: RUF001  (markers are spelt as the vocabularies have them)
"""Calls as tags, one tag for each argument; values are plain text.

    <tool_call>                                     open
    <function=f>                                    call_open f call_close_tag
    <parameter=a>                                   parameter_open a
    text                                            the value
    </parameter>                                    parameter_close
    </function>                                     call_close
    </tool_call>                                    close

`xml_parameters_parser` reads such calls. In the grammar, no text value contains a tag that the
parser may read as the value's end, or as the start of a call inside the value.

Sources: the chat templates of Qwen3-Coder, MiMo, Seed-OSS, MiniMax-M2, MiniCPM5 and DeepSeek-V3.2;
for the others (dots, Muse, DeepSeek-V4 and V4.1, Step3) vLLM's published parsers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.argument_types import Trim
from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import ANY_KEY, GrammarBuilder, NotWritable, either, sequence
from gateway.formats.plain_values import PlainValues, ValueEnd
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, arguments_form, json_notation
from gateway.formats.xml_parameters_parser import XmlParametersParser
from gateway.formats.xml_tag import written_name
from protocol.engine.grammar import Form, LiteralForm


class XmlParameters(CallSyntax, frozen=True, kw_only=True):
    """One model family's spelling of calls as tags with plain-text values."""

    PARSER = XmlParametersParser

    #: Markers that start a group. If empty, a call's tag starts it.
    open: tuple[str, ...] = ("<tool_call>",)
    #: Markers that end a group.
    close: tuple[str, ...] = ("</tool_call>",)
    #: Those of `close` that also end the message around the group, so no value contains them.
    final: tuple[str, ...] = ()
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
    #: Whether a value may be wrapped in `<![CDATA[` and `]]>`, which are then not part of it.
    cdata: bool = False
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

    def closers(self) -> tuple[str, ...]:
        """Return the markers that end a call or a group, if a value without its closing tag may end
        at them."""
        return (self.call_close, *self.close) if self.close and self.doubts else ()

    def openers(self) -> tuple[str, ...]:
        return self.open + ((self.call_open,) if self.bare or not self.open else ())

    def mistaken_openers(self) -> tuple[str, ...]:
        return self.openers()[1:]

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
            others=(*self.closers()[:1], self.call_open) if self.doubts else (),
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


def _dsml(space: str, *groups: str) -> XmlParameters:
    """Return the syntax of a DeepSeek model. The first of `groups` is the element around the calls;
    the model confuses it with the others, or leaves it out."""
    mark = "｜DSML｜" + space
    return _invoke(
        mark,
        open=tuple(f"<{mark}{group}>" for group in groups),
        close=tuple(f"</{mark}{group}>" for group in groups),
        bare=True,
        string_key="string",
        trim="nothing",
    )


QWEN3_XML = XmlParameters(bare=True, many=False, around="\n")

MUSE_CALLS = _invoke(
    "atem:",
    open=("<atem:function_calls>",),
    close=("</atem:function_calls>", "<|eom|>", "<|eot|>"),
    final=("<|eom|>", "<|eot|>"),
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
        cdata=True,
        line="",
    ),
    "deepseek_v32": _dsml("", "function_calls", "tool_calls", "calls"),
    "deepseek_v4": _dsml("", "tool_calls", "function_calls", "calls"),
    "deepseek_v41": _dsml(" ", "calls", "tool_calls", "function_calls"),
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
