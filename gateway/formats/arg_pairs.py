"""Calls as a name and pairs of tags, one for each key and one for each value.

    <tool_call>name                                 call_open name
    <arg_key>a</arg_key>                            key_open key key_close
    <arg_value>1</arg_value>                        value_open value value_close
    </tool_call>                                    call_close

The states are:

    opened   after the marker of a group of calls, if the format has such a marker
    name     in a call, before its first key: only the name and blanks may be here
    json     in a call that is a JSON object instead of pairs
    call     in a call, between its pairs
    key      in a key
    pair     after a key; the value follows, or first its type if the format has types
    type     in a type
    value    in a value
    doubt    after a marker that may have ended a value
    between  after a call, in a group
    broken   in text that is not a call, which is content up to the closing marker

Values are typed by the tool's schema (`argument_types`). If the schema allows several types, and
the model has written one of these before the value, that type is used. `</arg_value>` ends a value
only if another key or the call's end follows, possibly after blanks. Otherwise the tag is part of
the value. A name contains no blanks.

Some checkpoints have a suffix in their markers (`<tool_call:6124c78e>`); see `lexicon.with_suffix`.

In the grammar, a type between key and value is optional. If it is written, the value must have that
type. Some models write each tag on its own line, others all tags on one line. The grammar admits
both.

Sources: the chat templates of GLM-4.5 to 4.7; for the others, vLLM's published parsers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Self

import msgspec

from gateway.formats.argument_types import ORDER, TypedCallParser, TypedCallState
from gateway.formats.call_parser import NO_CALL, CallParser, CallSyntax
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.grammar_builder import (
    ANY_KEY,
    LINE_BREAK,
    GrammarBuilder,
    NotWritable,
    either,
    quoted,
    sequence,
)
from gateway.formats.json_call import CallKeys, CallScan
from gateway.formats.lexicon import marker_suffix, with_suffix
from gateway.formats.parser import Moves
from gateway.formats.plain_values import PlainValues, ValueEnd
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, arguments_form, json_notation
from gateway.text.markers import match_end
from protocol.engine.grammar import Form

MAX_NAME_CHARS = 256
NAME = re.compile(r"[^\s<>{}\[\]()\"'`,;]{1,256}")
NAME_TEXT = re.compile(r"[^\s<>{}\[\]()\"'`,;]{0,256}+[ \t\r\n]{0,256}+")
"""A name, possibly incomplete, and the blanks after it."""
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object",
         "list": "array", "none": "null"}  # fmt: skip


class ArgPairsState(TypedCallState):
    """State of an `ArgPairsParser`.

    text  pieces of the name, key or type that is being read
    key   key of the current pair
    type  type that the model has written for the current pair; "" if none
    json  scan of a call that is a JSON object
    """

    at: str = "opened"
    text: list[str] = []
    key: str = ""
    type: str = ""
    json: CallScan = msgspec.field(default_factory=CallScan)


class ArgPairsParser(TypedCallParser):
    State = ArgPairsState
    syntax: ArgPairs
    BETWEEN = frozenset({"between"})
    UNSCANNED = frozenset({"json"})

    def moves(self) -> Moves:
        x = self.syntax
        end_markers = (x.call_close, *x.close)
        call_markers = (*x.openers(), x.call_open, *end_markers)
        tokens = tuple(end for end in end_markers if self.context.lexicon.is_token(end))
        ends, calls = (end_markers, self._end_or_open), (call_markers, self._end_or_open)
        key, value = ((x.key[0],), self._key_begins), ((x.value[0],), self._value_begins)
        in_doubt = ((x.value[1],), self._doubt)
        return {
            "opened": (calls,),
            "between": (calls,),
            "name": ((x.name_close, self._name_ended), (key[0], self._first_key), calls),
            "call": (key, calls),
            "key": (((x.key[1],), self._key_ended), ends),
            "pair": ((x.type[:1], self._type_begins), value, key, ends),
            "type": ((x.type[1:], self._type_ended), ends) if x.type else (),
            "value": (in_doubt, (tokens, self._after_value)),
            "doubt": (in_doubt, (key[0] + end_markers, self._after_value)),
            "json": ((end_markers, self._marker_in_json),),
            "broken": (calls,),
        }

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]
        if not self.syntax.open:
            self._enter("name")

    def _enter(self, at: str) -> None:
        self.s.at, self.s.text, self.s.doubtful = at, [], []

    # ---- text

    def _in_part(self, text: str) -> None:
        self.s.text.append(text)

    def _in_name(self, text: str) -> str:
        """Read a name. It may have blanks around it, but none inside."""
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
        so_far = "".join(s.text)
        end = match_end(NAME_TEXT, (so_far + text)[: 2 * MAX_NAME_CHARS + 1]) - len(so_far)
        s.text = [so_far + text[:end]]
        if end < len(text):
            s.raw += s.text
            s.text = []
            self._no_call()
        return text[end:]

    def _no_call(self) -> None:
        s = self.s
        self.reject("a tool call without a name")
        if self.syntax.open and self.builder.num_calls:
            self._enter("broken")
        else:
            s.done = True

    def _in_json(self, text: str) -> str:
        s = self.s
        position, status = s.json.scan(text, CallKeys(), self.builder)
        if s.json.started:
            s.raw.clear()
        else:
            s.raw.append(text[:position])
        if status == "broken":
            self._enter("call" if s.json.started else "broken")
            if s.raw:
                self.reject("a tool call that is not JSON")
        elif status == "end":
            self._enter("between")
            if s.raw:
                self.reject("a tool call without a name")
        return text[position:]

    TEXT = {
        **dict.fromkeys(("opened", "between"), CallParser.outside_calls),
        **dict.fromkeys(("key", "type"), _in_part),
        "name": _in_name,
        "json": _in_json,
        "value": TypedCallParser.value_text,
        "doubt": TypedCallParser.in_doubt,
        "broken": CallParser.as_content,
    }

    # ---- markers

    def _marker_in_json(self, marker: str) -> None:
        if self.s.json.quoted:
            self._in_json(marker)
        else:
            self._end_or_open(marker)

    def _key_begins(self, marker: str) -> None:
        self._enter("key")

    def _key_ended(self, marker: str) -> None:
        self.s.key, self.s.type = "".join(self.s.text).strip(BLANKS), ""
        self._enter("pair")

    def _type_begins(self, marker: str) -> None:
        self._enter("type")

    def _type_ended(self, marker: str) -> None:
        self.s.type = "".join(self.s.text).split("[")[0].strip(BLANKS).lower()
        self._enter("pair")

    def _doubt(self, marker: str) -> None:
        """Handle a marker that ends the value if another key or the call's end follows."""
        if self.s.at == "doubt":
            self.was_text()
        self.s.at, self.s.doubtful = "doubt", [marker]

    def _after_value(self, marker: str) -> None:
        self.s.arguments.end(self.builder, bare_json=self.syntax.bare_json)
        self._enter("call")
        self.on_marker(marker)

    def _first_key(self, marker: str) -> None:
        self._name_ended(marker)
        if self.s.at == "call":
            self._enter("key")

    def _name_ended(self, marker: str = "") -> None:
        """Start the call, whose name is now complete."""
        s = self.s
        name = "".join(s.text).strip(BLANKS)
        if not name:
            self._no_call()
            return
        self.start_call(name)
        self._enter("call")

    def _value_begins(self, marker: str) -> None:
        s = self.s
        kinds, written = self.kinds_of(s.key), TYPES.get(s.type, s.type)
        if written in ORDER and (not kinds or (written in kinds and len(kinds) > 1)):
            kinds = (written,)
        s.arguments.start(s.key, kinds, self.builder, bare_json=self.syntax.bare_json)
        self._enter("value")

    def _end_or_open(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if s.at == "name" and s.text:
            self._name_ended()
        if self.builder.is_open:
            if s.at != "json":
                s.arguments.close(self.builder)
            self.builder.end_call()
        elif s.raw and not (marker == x.call_open and s.at == "opened"):
            if marker == x.call_close or marker in x.close:
                s.raw += [*s.text, marker]
            self.reject(NO_CALL)
        self._after_call(marker)

    def _after_call(self, marker: str) -> None:
        s, x = self.s, self.syntax
        if marker == x.call_open:
            s.raw.append(marker)
            self._enter("name")
        elif marker in x.open:
            s.raw = [marker]
            self._enter("opened")
        elif marker in x.close or not x.open:
            s.done = True
        else:
            self._enter("between")

    def on_stray(self, marker: str) -> None:
        s = self.s
        if s.at == "json" and s.json.quoted:
            self._in_json(marker)
        elif s.at == "name":
            s.raw += [*s.text, marker]
            s.text = []
            self._no_call()
        else:
            super().on_stray(marker)

    def unread(self) -> list[str]:
        return list(self.s.text)


class ArgPairs(CallSyntax, frozen=True, kw_only=True):
    """One model family's spelling of calls as key and value tags: its markers and options.

    open, close       markers around a group of calls; if empty, each call stands alone
    call_open         marker that starts a call
    call_close        marker that ends a call
    name_close        markers that may follow the name
    key, type, value  opening and closing markers of the parts of a pair; `type` may be empty
    json_bodies       whether a call may be a JSON object instead of pairs
    bare_json         whether a parameter without a schema is JSON if its text is valid JSON
    suffixed          whether the markers may have a suffix, which is then found in the vocabulary
    """

    PARSER = ArgPairsParser

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

        def fit(found: Any) -> Any:
            if isinstance(found, tuple):
                return tuple(map(fit, found))
            return with_suffix(found, vocabulary)

        names = ("open", "close", "call_open", "call_close", "name_close", "key", "type", "value")
        found = {name: fit(getattr(self, name)) for name in names}
        return msgspec.structs.replace(self, suffixed=False, **found)

    # ---- the grammar

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        after = grammar.each_tool(lambda tool: self._write_call(tool, grammar))
        if not self.open:
            return after
        call = grammar.rule("call", sequence(self.call_open, after))
        calls = grammar.several(call, LINE_BREAK)
        return sequence(LINE_BREAK, calls, LINE_BREAK, self.close[0])

    def _write_call(self, tool: DeclaredTool, grammar: GrammarBuilder) -> Form:
        if not NAME.fullmatch(tool.name) or len(tool.name) > MAX_NAME_CHARS:
            raise NotWritable(tool.name, "name", "this format cannot write it")
        values = Values(json_notation((self.value[1],)), Schemas(tool), grammar)
        plain = PlainValues(values, ValueEnd(close=self.value[1], bare=self.bare_json))

        def write(key: str | None, schema: Any, path: str) -> Form | None:
            if key is not None and (key != key.strip() or not key or self.key[1] in key):
                return None
            name = ANY_KEY if key is None else key
            pair = sequence(self.key[0], name, self.key[1], LINE_BREAK)
            return sequence(pair, self._write_value(plain, key, schema, path), LINE_BREAK)

        name = tool.name + "".join(self.name_close)
        inside = sequence(name, LINE_BREAK, arguments_form(values, write), self.call_close)
        if not self.json_bodies:
            return inside
        head = '{"name": ' + quoted(tool.name) + ', "arguments": '
        body = sequence(head, grammar.arguments(tool), "}", LINE_BREAK, self.call_close)
        return either((inside, sequence(LINE_BREAK, body)))

    def _write_value(self, plain: PlainValues, key: str | None, schema: Any, path: str) -> Form:
        value = sequence(self.value[0], plain.argument(key, schema, path))
        if not self.type:
            return value
        kinds: dict[str, list[SchemaCase]] = {}
        cases = plain.schemas.cases(schema, path)
        for case in [*cases, SchemaCase("integer")] if anything(cases) else cases:
            kinds.setdefault(case.kind, []).append(case)
        ways = [value]
        for kind, found in kinds.items():
            typed = sequence(self.type[0] + kind + self.type[1], LINE_BREAK, self.value[0])
            ways.append(sequence(typed, plain.of_cases(found, (kind,), path)))
        return either(ways)


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
