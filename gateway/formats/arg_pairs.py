"""Calls as a name and pairs of tags, one for each key and one for each value.

    <tool_call>name                                 call_open name
    <arg_key>a</arg_key>                            key_open key key_close
    <arg_value>1</arg_value>                        value_open value value_close
    </tool_call>                                    call_close

    opened   after the marker of a group of calls, if the format has one
    name     in a call, up to its first key: blanks and the name, or it is not a call
    json     in a call that is a JSON object instead
    call     in a call, between its pairs
    key      in a key
    pair     after a key: its type, if the format has one, or its value
    type     in a type
    value    in a value
    doubt    after a marker that may have ended a value
    between  after a call, in a group
    broken   not a call; up to the closing marker it is content

Values are typed by the tool's schema (`typed_value`), or by the type that the model has written if
the schema leaves it open. `</arg_value>` ends a value only if, blanks aside, another key or the
call's end follows; otherwise it is text of the value. A name contains no blanks.

Some checkpoints have a suffix in their markers (`<tool_call:6124c78e>`); see `parser.with_suffix`.

In the grammar, a type between key and value is optional, and the value has the type that is
written. Some models write each tag on its own line, others all on one; both are admitted.

Sources: the chat templates of GLM-4.5 to 4.7; for the others, vLLM's published parsers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import msgspec

from gateway.formats.argument_types import ORDER, ArgumentsWriter, kinds_of, schema_of
from gateway.formats.arguments_grammar import arguments_form
from gateway.formats.event_builder import BLANKS, PARSE_FAILED, DeclaredTool, EventBuilder
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.grammar_forms import either, optional, quoted, sequence, several
from gateway.formats.json_scanner import CallKeys, CallScan
from gateway.formats.parser import (
    CallParser,
    CallSyntax,
    FormatParserState,
    ParserContext,
    marker_suffix,
    with_suffix,
)
from gateway.formats.plain_values import PlainValues, ValueEnd
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, json_notation
from protocol.grammar import Form, LiteralForm, Pattern

MAX_NAME_CHARS = 256
NAME = re.compile(r"[^\s<>{}\[\]()\"'`,;]{1,256}")
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object",
         "list": "array", "none": "null"}  # fmt: skip


class ArgPairs(CallSyntax, frozen=True, kw_only=True):
    """Markers and options of this syntax.

    open, close       markers around a group of calls; if empty, each call stands alone
    call_open         starts a call
    call_close        ends it
    name_close        may follow the name
    key, type, value  (opening, closing) markers of a pair's parts; `type` may be missing
    json_bodies       a call may be a JSON object instead
    bare_json         a parameter without a schema is JSON if it is valid JSON
    suffixed          the markers may have a suffix that is found in the vocabulary
    """

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    name_close: tuple[str, ...] = ()
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    type: tuple[str, ...] = ()
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    json_bodies: bool = False
    bare_json: bool = True
    suffixed: bool = False

    def markers(self) -> tuple[str, ...]:
        return (
            *self.openers(),
            *self.close,
            self.call_open,
            self.call_close,
            *self.name_close,
            *self.key,
            *self.type,
            *self.value,
        )

    def openers(self) -> tuple[str, ...]:
        return self.open or (self.call_open,)

    def fitted(self, vocabulary: Collection[str]) -> Self:
        if not self.suffixed or not marker_suffix(vocabulary):
            return self

        def fit(marker: Any) -> Any:
            return (
                tuple(map(fit, marker))
                if isinstance(marker, tuple)
                else with_suffix(marker, vocabulary)
            )

        names = ("open", "close", "call_open", "call_close", "name_close", "key", "type", "value")
        found = {name: fit(getattr(self, name)) for name in names}
        return msgspec.structs.replace(self, suffixed=False, **found)

    def call_parser(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        return ArgPairsParser(self, context, builder, state)


class ArgPairsState(FormatParserState):
    """State of an `ArgPairsParser`.

    name       name of the current call
    text       the part read so far of the current name, key or type
    key        key of the current pair
    type       type that the model has written for it
    arguments  arguments of the open call
    json       a call that is a JSON object
    doubtful   text that is markup if the value has ended, and part of the value otherwise
    raw        text of the group until a call is emitted: it may have to become content
    """

    at: str = "opened"
    name: str = ""
    text: list[str] = []
    key: str = ""
    type: str = ""
    arguments: ArgumentsWriter = msgspec.field(default_factory=ArgumentsWriter)
    json: CallScan = msgspec.field(default_factory=CallScan)
    doubtful: list[str] = []
    raw: list[str] = []


class ArgPairsParser(CallParser):
    syntax: ArgPairs

    State = ArgPairsState
    BETWEEN = frozenset({"between"})
    UNSCANNED = frozenset({"json"})

    def table(self) -> Mapping[str, tuple[str, ...]]:
        x = self.syntax
        ends = (x.call_close, *x.close)
        calls = (*x.openers(), x.call_open, *ends)
        return {
            "opened": calls,
            "between": calls,
            "name": (*x.name_close, x.key[0], *calls),
            "call": (x.key[0], *calls),
            "key": (x.key[1], *ends),
            "pair": (*x.type[:1], x.value[0], x.key[0], *ends),
            "type": (x.type[1], *ends) if x.type else (),
            "value": (x.value[1], *(end for end in ends if self.context.lexicon.is_token(end))),
            "doubt": (x.value[1], x.key[0], *ends),
            "json": ends,
            "broken": calls,
        }

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]
        if not self.syntax.open:
            self._begin("name")

    def _begin(self, at: str) -> None:
        self.s.at, self.s.text, self.s.doubtful = at, [], []

    # ---- text

    def on_text(self, text: str) -> str:
        s = self.s
        match s.at:
            case "name":
                return self._in_name(text)
            case "json":
                return self._in_json(text)
            case "key" | "type":
                s.text.append(text)
            case "value":
                s.arguments.text(text, self.builder)
            case "doubt":
                return self._in_doubt(text)
            case "broken":
                self.builder.content(text)
            case "opened" | "between":
                return self._outside_calls(text)
        return ""

    def _outside_calls(self, text: str) -> str:
        s = self.s
        rest = text.lstrip(BLANKS)
        if s.raw:
            s.raw.append(text[: len(text) - len(rest)])
        if rest and s.raw:
            self._reject("a marker of tool calls with no call behind it")
            s.done = True
        elif rest:
            self.builder.warn(PARSE_FAILED, "text between tool calls")
            self._begin("broken")
        return rest

    def _in_name(self, text: str) -> str:
        """Read a name, which may have blanks around it but none inside."""
        s = self.s
        if not s.text:
            rest = text.lstrip(BLANKS)
            s.raw.append(text[: len(text) - len(rest)])
            if rest.startswith("{") and self.syntax.json_bodies:
                s.at, s.json = "json", CallScan()
                return rest
            text = rest
        if not text:
            return ""
        so_far = "".join(s.text) + text
        word = so_far.rstrip(BLANKS)
        s.text = [so_far]
        if len(so_far) - len(word) > MAX_NAME_CHARS or not NAME.fullmatch(word):
            s.text = []
            s.raw.append(so_far)
            self._no_call()
        return ""

    def _no_call(self) -> None:
        s = self.s
        self._reject("a tool call without a name")
        if self.syntax.open and self.builder.num_calls:
            self._begin("broken")
        else:
            s.done = True

    def _in_json(self, text: str) -> str:
        s = self.s
        position, status = s.json.scan(text, CallKeys(), self.builder)
        if s.json.name is None:
            s.raw.append(text[:position])
        if status == "broken":
            self._begin("broken" if s.json.name is None else "call")
            if s.raw:
                self._reject("a tool call that is not JSON")
        elif status == "end":
            self._begin("between")
            if s.json.name is None:
                self._reject("a tool call without a name")
            s.raw = []
        return text[position:]

    def _in_doubt(self, text: str) -> str:
        s = self.s
        rest = text.lstrip(BLANKS)
        s.doubtful.append(text[: len(text) - len(rest)])
        if rest:
            self._was_text()
        return rest

    def _was_text(self) -> None:
        self.s.arguments.text("".join(self.s.doubtful), self.builder)
        self._begin("value")

    # ---- markers

    def on_marker(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if s.at == "json" and s.json.quoted:
            self._in_json(marker)
        elif s.at in ("value", "doubt"):
            self._at_value(marker)
        elif s.at == "name" and (marker in x.name_close or marker == x.key[0]):
            self._named()
            if marker == x.key[0] and s.at == "call":
                self._begin("key")
        elif marker == x.key[0]:
            self._begin("key")
        elif marker == x.key[1]:
            s.key, s.type = "".join(s.text).strip(BLANKS), ""
            self._begin("pair")
        elif marker in x.type:
            self._at_type(marker)
        elif marker == x.value[0]:
            self._begin_value()
        else:
            self._end_or_open(marker)

    def _at_type(self, marker: str) -> None:
        s = self.s
        if marker == self.syntax.type[0]:
            self._begin("type")
        else:
            s.type = "".join(s.text).split("[")[0].strip(BLANKS).lower()
            self._begin("pair")

    def _at_value(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if marker == x.value[1]:
            if s.at == "doubt":
                self._was_text()
            s.at, s.doubtful = "doubt", [marker]
            return
        s.arguments.end(self.builder, bare_json=x.bare_json)
        self._begin("call")
        self.on_marker(marker)

    def _named(self) -> None:
        """Start the call whose name is complete."""
        s = self.s
        name = "".join(s.text).strip(BLANKS)
        if not name:
            self._no_call()
            return
        s.name, s.raw, s.arguments = name, [], ArgumentsWriter()
        self.builder.start_call(name)
        self._begin("call")

    def _begin_value(self) -> None:
        s = self.s
        parameters = self.builder.parameters(s.name)
        kinds = kinds_of(schema_of(parameters, s.key), parameters)
        written = TYPES.get(s.type, s.type)
        if written in ORDER and (not kinds or (written in kinds and len(kinds) > 1)):
            kinds = (written,)
        s.arguments.begin(s.key, kinds, self.builder, bare_json=self.syntax.bare_json)
        self._begin("value")

    def _end_or_open(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if s.at == "name" and s.text:
            self._named()
        if self.builder.is_open:
            if s.at != "json":
                s.arguments.close(self.builder)
            self.builder.end_call()
        elif s.raw and not (marker == x.call_open and s.at == "opened"):
            if marker == x.call_close or marker in x.close:
                s.raw += [*s.text, marker]
            self._reject("a marker of tool calls with no call behind it")
        self._go_on(marker)

    def _go_on(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if marker == x.call_open:
            s.raw.append(marker)
            self._begin("name")
        elif marker in x.open:
            s.raw = [marker]
            self._begin("opened")
        elif marker in x.close or not x.open:
            s.done = True
        else:
            self._begin("between")

    def on_stray(self, marker: str) -> None:
        s = self.s
        if s.at == "json" and s.json.quoted:
            self._in_json(marker)
        elif s.at in ("value", "doubt"):
            if s.at == "doubt":
                self._was_text()
            s.arguments.text(marker, self.builder)
        elif s.at == "name":
            s.raw += [*s.text, marker]
            s.text = []
            self._no_call()

    # ---- the end

    def on_end(self, complete: bool) -> None:
        s = self.s
        if not complete:
            self.builder.abandon_call()
        elif self.builder.is_open:
            self.builder.warn(PARSE_FAILED, "the last tool call is not finished")
            self.builder.abandon_call()
        elif s.raw:
            s.raw += s.text
            self._reject("a tool call that is not finished")


GLM = ArgPairs()

K2_HORIZON = ArgPairs(
    open=("<ifm|tool_calls>",),
    close=("</ifm|tool_calls>",),
    call_open="<ifm|tool_call>",
    call_close="</ifm|tool_call>",
    key=("<ifm|arg_key>", "</ifm|arg_key>"),
    type=("<ifm|arg_type>", "</ifm|arg_type>"),
    value=("<ifm|arg_value>", "</ifm|arg_value>"),
    json_bodies=True,
)


# ---- grammar writer

ANY_KEY = Pattern(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")

LINE_BREAK = optional(LiteralForm("\n"))


def write_calls(
    syntax: ArgPairs,
    opener: str,
    tools: Sequence[DeclaredTool],
    many: bool,
    grammar: GrammarBuilder,
) -> Form:
    x = syntax
    behind = either(_write_call(x, tool, grammar) for tool in tools)
    if not x.open:
        return behind
    calls = several(grammar.rule("call", sequence(x.call_open, behind)), LINE_BREAK, many=many)
    return sequence(LINE_BREAK, calls, LINE_BREAK, x.close[0])


def _write_call(x: ArgPairs, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
    if not NAME.fullmatch(tool.name) or len(tool.name) > MAX_NAME_CHARS:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    values = Values(json_notation((x.value[1],)), Schemas(tool), grammar)
    plain = PlainValues(values, ValueEnd(close=x.value[1], bare=x.bare_json))

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        if key is not None and (key != key.strip() or not key or x.key[1] in key):
            return None
        name = ANY_KEY if key is None else key
        pair = sequence(x.key[0], name, x.key[1], LINE_BREAK)
        return sequence(pair, _write_value(x, plain, key, schema, path), LINE_BREAK)

    inside = sequence(
        tool.name + "".join(x.name_close), LINE_BREAK, arguments_form(values, write), x.call_close
    )
    if not x.json_bodies:
        return inside
    head = '{"name": ' + quoted(tool.name) + ', "arguments": '
    body = sequence(LINE_BREAK, head, grammar.arguments(tool), "}", LINE_BREAK, x.call_close)
    return either((inside, body))


def _write_value(x: ArgPairs, plain: PlainValues, key: str | None, schema: Any, path: str) -> Form:
    value = sequence(x.value[0], plain.argument(key, schema, path))
    if not x.type:
        return value
    kinds: dict[str, list[SchemaCase]] = {}
    cases = plain.schemas.cases(schema, path)
    for case in [*cases, SchemaCase("integer")] if anything(cases) else cases:
        kinds.setdefault(case.kind, []).append(case)
    typed = (
        sequence(
            x.type[0] + kind + x.type[1], LINE_BREAK, x.value[0], plain.of(cases, (kind,), path)
        )
        for kind, cases in kinds.items()
    )
    return either((value, *typed))


FORMATS = {
    "glm45": GLM,
    "glm47": GLM,
    "ling3": GLM,
    "poolside_v1": GLM,
    "hy_v3": ArgPairs(
        open=("<tool_calls>",), close=("</tool_calls>",), name_close=("<tool_sep>",), suffixed=True
    ),
    "hy_v4": ArgPairs(open=("<tool_calls>",), close=("</tool_calls>",), suffixed=True),
    "k2_horizon": K2_HORIZON,
}
