"""Tool calls as JSON: one object, or an array of objects. The JSON follows an opening marker. In
most variants, a closing marker follows the JSON.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

The states are:

    bound    after an opener that needs a second marker (`JsonTags.bound`), until that marker
    opened   before an object or an array; if other text follows, this is not a call
    call     in a call's object
    array    in an array, between calls
    after    after a call or an array: the closing marker follows, another call, or another opener
    broken   in text that is not JSON, which is emitted unchanged up to the next marker

A call ends with its closing brace, not with the marker after it. If a call's JSON is broken or
incomplete but its name is known, the call is emitted with the text as it is. Otherwise everything
after the last complete call is content, with a warning. There is no warning if the opening marker
also occurs in ordinary text (`ambiguous`) and nothing after it looks like a call.

The grammar admits white space between the items of an array. All other text must be spelt as the
chat template spells it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.formats.call_parser import CallParser, CallParserState, CallSyntax
from gateway.formats.event_builder import BLANKS, DeclaredTool
from gateway.formats.events import Event
from gateway.formats.grammar_builder import ANY_OBJECT, GrammarBuilder, optional, quoted, sequence
from gateway.formats.json_call import CallKeys, CallScan
from gateway.formats.json_spelling import SPACE
from gateway.formats.named_json import CALL_ID_FORM
from gateway.formats.parser import Moves
from gateway.text.markers import match_end
from protocol.engine.grammar import Form, Pattern


class JsonTagsState(CallParserState):
    """State of a `JsonTagsParser`.

    opener  the marker that started this group
    call    position in the current call
    array   whether the group is an array
    calls   number of calls of the group that have been emitted
    """

    at: str = "opened"
    opener: str = ""
    call: CallScan = msgspec.field(default_factory=CallScan)
    array: bool = False
    calls: int = 0


class JsonTagsParser(CallParser):
    State = JsonTagsState
    syntax: JsonTags
    BETWEEN = frozenset({"after"})
    UNSCANNED = frozenset({"call"})

    def moves(self) -> Moves:
        ends = (self.syntax.close + self.syntax.open, self._end_or_open)
        bound = tuple(marker for _, marker in self.syntax.bound)
        return {
            "bound": ((bound, self._bound_marker),),
            "call": ((ends[0], self._marker_in_call),),
            **dict.fromkeys(("opened", "array", "after", "broken"), (ends,)),
        }

    def on_open(self, marker: str) -> None:
        s = self.s
        s.opener, s.raw, s.calls, s.array = marker, [marker], 0, False
        s.at = "bound" if any(marker == opener for opener, _ in self.syntax.bound) else "opened"
        if marker.endswith("["):
            s.at, s.array = "array", True
        elif marker.endswith("{"):
            s.raw.clear()
            s.at, s.call = "call", CallScan()
            self._in_call(marker)

    # ---- text

    def fast_event(self, text: str) -> Event | None:
        s = self.s
        if s.at == "call" and s.call.passes(text):
            return self.builder.fast_arguments(text)
        return None

    def _between(self, text: str) -> str:
        start = match_end(SPACE, text)
        self.keep(text[:start])
        return self._next(text[start:]) if start < len(text) else ""

    def _next(self, text: str) -> str:
        """Read one character, such as `{`, `[` or `,`, between the JSON objects of calls. Return
        the unread text."""
        s, char = self.s, text[0]
        expected = {"opened": "{[", "array": "{,]", "bound": ""}
        separator, is_closed = self.syntax.separator, self.syntax.is_closed(s.opener)
        after = separator.strip() + "{" if separator or is_closed else ""
        if char not in expected.get(s.at, after):
            return self._unexpected(text)
        if char == "{":
            s.at, s.call = "call", CallScan()
            return text
        if char == "]":
            return self._array_ended(text[1:])
        if char == "[":
            s.at, s.array = "array", True
        self.keep(char)
        return text[1:]

    def _in_call(self, text: str) -> str:
        s = self.s
        position, status = s.call.scan(text, self.syntax.keys, self.builder)
        if s.call.started:
            s.raw.clear()
        else:
            s.raw.append(text[:position])
        if status == "end" and s.call.started:
            s.calls += 1
            self._call_ended()
        elif status != "more":
            self._break()
        return text[position:]

    def _call_ended(self) -> None:
        s = self.s
        s.at = "array" if s.array else "after"
        if not s.array and not self.syntax.separator:
            s.done = not self.syntax.is_closed(s.opener)

    def _array_ended(self, rest: str) -> str:
        s = self.s
        if s.raw:  # an array without calls
            s.raw.append("]")
            self._break()
            return rest
        s.at = "after"
        s.done = not self.syntax.is_closed(s.opener)
        return rest

    def _unexpected(self, text: str) -> str:
        """Handle text at a place where a call should start."""
        s = self.s
        if not s.calls:
            self.reject("the marker of a tool call without a call after it")
            s.done = True
        elif s.at == "after" and not self.syntax.is_closed(s.opener):
            s.done = True
        else:
            self.builder.parse_failed("text between tool calls")
            s.raw.clear()
            self._break()
        return text

    # ---- text that is not a call

    def _break(self) -> None:
        """Emit text unchanged up to the next marker, or end the group if no marker will follow."""
        self.s.at = "broken"
        if not self.builder.is_open and not self.syntax.is_closed(self.s.opener):
            self.reject("a tool call that cannot be read")
            self.s.done = True

    TEXT = {
        **dict.fromkeys(("bound", "opened", "array", "after"), _between),
        "call": _in_call,
        "broken": CallParser.broken_text,
    }

    def reject(self, why: str) -> None:
        text, self.s.raw = "".join(self.s.raw), []
        if self._is_ordinary(text):
            self.builder.content(text)
        else:
            self.builder.reject_call(text, why)

    def _is_ordinary(self, text: str) -> bool:
        """Return whether `text`, which starts with the opener, may be no attempt to write a
        call."""
        opener, x = self.s.opener, self.syntax
        rest, bound = text.removeprefix(opener), x.bound_marker(opener)
        begun = "{" in rest or (bound and bound in rest)
        return opener in x.ambiguous and (opener in x.start or not begun)

    # ---- markers

    def _bound_marker(self, marker: str) -> None:
        self.s.raw.append(marker)
        self.s.at = "opened"

    def _marker_in_call(self, marker: str) -> None:
        if self.s.call.quoted:
            self._in_call(marker)
        else:
            self._end_or_open(marker)

    def _end_or_open(self, marker: str) -> None:
        s = self.s
        if self.builder.is_open:
            self.builder.end_call()
        elif "".join(s.raw).strip(BLANKS + ","):
            s.raw.append(marker if marker in self.syntax.close else "")
            self.reject("a tool call that cannot be read")
        if marker in self.syntax.close:
            s.done = True
        else:
            self.on_open(marker)

    def on_stray(self, marker: str) -> None:
        if self.s.at == "call" and self.s.call.quoted:
            self._in_call(marker)

    def on_end(self, complete: bool) -> None:
        if not "".join(self.s.raw).strip(BLANKS + ","):
            self.s.raw = []
        super().on_end(complete)


class JsonTags(CallSyntax, frozen=True, kw_only=True):
    """One model family's spelling of calls as JSON after a marker: its markers and keys."""

    PARSER = JsonTagsParser

    #: Markers that start a group. If two match at one place, the first in this list wins. A marker
    #: that ends with `[` or `{` includes the start of the JSON.
    open: tuple[str, ...]
    #: Markers that start a group only at the start of the answer.
    start: tuple[str, ...] = ()
    #: Markers that end a group.
    close: tuple[str, ...] = ()
    #: Openers whose group ends with its JSON. If there is no `close`, all groups do.
    unclosed: tuple[str, ...] = ()
    #: (opener, the marker that must follow the opener).
    bound: tuple[tuple[str, str], ...] = ()
    #: Openers that also occur in ordinary text.
    ambiguous: tuple[str, ...] = ()
    #: Text between calls that are not in an array. If it is set, or if a marker closes the group,
    #: several calls may follow one marker.
    separator: str = ""
    #: The keys of a call's object.
    keys: CallKeys = CallKeys()
    #: (opener, its closing marker), if that is not the first of `close`. Only the grammar uses it.
    paired: tuple[tuple[str, str], ...] = ()
    #: Whether calls are written as an array. Only the grammar uses it.
    array: bool = False
    #: Text between the opening marker and the JSON. Only the grammar uses it.
    before: str = ""
    #: Text between the JSON and the closing marker. Only the grammar uses it.
    after: str = ""
    #: Openers for which `before` and `after` are a line break instead. Only the grammar uses it.
    lines: tuple[str, ...] = ()
    #: The key of a call's number, which is written first. Only the grammar uses it.
    number: str = ""

    def markers(self) -> tuple[str, ...]:
        return self.open + self.close + tuple(marker for _, marker in self.bound)

    def openers(self) -> tuple[str, ...]:
        return self.open

    def start_openers(self) -> tuple[str, ...]:
        return self.start

    def is_closed(self, opener: str) -> bool:
        """Return whether a marker must close the group that `opener` started."""
        return bool(self.close) and opener not in self.unclosed

    def closer(self, opener: str) -> str:
        """Return the marker that closes a group that `opener` started; "" if the group ends with
        its JSON. If several markers may close it, return the one that models write."""
        if not self.is_closed(opener):
            return ""
        return dict(self.paired).get(opener, self.close[0])

    def bound_marker(self, opener: str) -> str:
        return dict(self.bound).get(opener, "")

    # ---- the grammar

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        bound = self.bound_marker(opener)
        opener = next((first for first, mark in self.bound if opener == first + mark), opener)
        line = "\n" if opener in self.lines else ""
        closer = self.closer(opener)
        before, after = bound + (line or self.before), (line or self.after) + closer
        after = after if closer else ""
        call = grammar.call_rule(lambda tool: self._write_call(tool, grammar))
        if self.array:
            bracket = "" if opener.endswith("[") else "["
            calls = grammar.several(call, sequence(",", FREE_BLANKS))
            return sequence(before + bracket, FREE_BLANKS, calls, FREE_BLANKS, "]" + after)
        first: Form = call
        if opener.endswith("{"):
            first = grammar.each_tool(lambda tool: self._write_call(tool, grammar, begun="{"))
        if self.separator:
            first = sequence(first, grammar.repeated(sequence(self.separator, call)))
        return sequence(before, first, after)

    def _write_call(self, tool: DeclaredTool, grammar: GrammarBuilder, begun: str = "") -> Form:
        """Return the grammar of one object. Its start `begun` is left out, because the opener
        contains it."""
        keys, name, arguments = self.keys, quoted(tool.name), grammar.arguments(tool)
        if keys.name_is_key:
            return sequence(f"{{{name}: ".removeprefix(begun), arguments, "}")
        number: list[Form | str] = []
        if self.number:
            number = [f'{quoted(self.number)}: "', CALL_NUMBER, '", ']
        call_id: Form | str = ""
        if keys.id:
            call_id = optional(sequence(f', {quoted(keys.id[0])}: "', CALL_ID_FORM, '"'))
        head = f"{quoted(keys.name[0])}: {name}, {quoted(keys.arguments[0])}: "
        return sequence("{".removeprefix(begun), *number, head, arguments, call_id, "}")

    def write_values(self, grammar: GrammarBuilder) -> Form | None:
        """Return the grammar of calls without a marker, as JSON Schema; None if calls have a
        marker.

        The answer may be other JSON instead, and the grammar's lexer prefers the longest match. If
        the grammar spelt calls as text, the lexer would read the `{"name": ` of any other object as
        the start of a call.
        """
        if not self.start:
            return None
        if self.array:
            places = enumerate(grammar.tools)
            calls = [self._call_schema(tool, f"#/items/anyOf/{n}") for n, tool in places]
            most = {} if grammar.many else {"maxItems": 1}
            items = {"items": {"anyOf": calls}, "minItems": 1, **most}
            return grammar.json({"type": "array", **items})
        call = grammar.call_rule(lambda tool: grammar.json(self._call_schema(tool)))
        return grammar.several(call, self.separator) if self.separator else call

    def _call_schema(self, tool: DeclaredTool, place: str = "#") -> Mapping[str, Any]:
        """Return the JSON schema of a call. `place` is its position in the whole schema."""
        name, arguments = self.keys.name[0], self.keys.arguments[0]
        parameters = {**(tool.parameters or {}), **ANY_OBJECT}
        moved = _moved(parameters, f"{place}/properties/{arguments}")
        return {
            "type": "object",
            "properties": {name: {"const": tool.name}, arguments: moved},
            "required": [name, arguments],
            "additionalProperties": False,
        }


FREE_BLANKS = Pattern(r"[ \n]{0,8}")
CALL_NUMBER = Pattern("[0-9]{1,3}")


def _moved(schema: Any, place: str) -> Any:
    """Return the schema with its references changed for its new `place` in a larger schema."""
    if isinstance(schema, Mapping):
        return {
            key: place + value.removeprefix("#")
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema


TOOL_CALL = JsonTags(open=("<tool_call>",), close=("</tool_call>",), before="\n", after="\n")
TOOL_CALLS = JsonTags(open=("<tool_calls>",), close=("</tool_calls>",), array=True)
COMMAND = JsonTags(
    open=("<|START_ACTION|>",),
    close=("<|END_ACTION|>",),
    keys=CallKeys(name=("tool_name", "name"), arguments=("parameters", "arguments")),
    array=True,
    number="tool_call_id",
)
PARAMETERS = ("parameters", "arguments")
LLAMA = JsonTags(
    open=("<|python_tag|>",),
    start=("{",),
    ambiguous=("{",),
    separator="; ",
    keys=CallKeys(arguments=PARAMETERS, strict=True),
)


FORMATS = {
    "hermes": TOOL_CALL,
    "qwen3_json": TOOL_CALL,
    "granite4": TOOL_CALL,
    "ernie45": TOOL_CALL,
    "longcat": JsonTags(
        open=("<longcat_tool_call>",), close=("</longcat_tool_call>",), before="\n", after="\n"
    ),
    "granite": JsonTags(
        open=("<|tool_call|>", "<tool_call>"),
        close=("</tool_call>",),
        unclosed=("<|tool_call|>", "<tool_call>"),
        array=True,
    ),
    "granite-20b-fc": JsonTags(open=("<function_call>",), before=" "),
    "internlm": JsonTags(
        open=("<|action_start|>",),
        close=("<|action_end|>",),
        bound=(("<|action_start|>", "<|plugin|>"),),
        keys=CallKeys(arguments=PARAMETERS),
        before="\n",
    ),
    "hunyuan_a13b": TOOL_CALLS,
    "jamba": TOOL_CALLS,
    "minimax_m1": JsonTags(
        open=("<tool_calls>",), close=("</tool_calls>",), before="\n", after="\n", separator="\n"
    ),
    "nemotron_json": JsonTags(open=("<TOOLCALL>",), close=("</TOOLCALL>",), array=True),
    "phi4_mini_json": JsonTags(open=("functools[",), ambiguous=("functools[",), array=True),
    "xlam": JsonTags(
        open=("<tool_call>", "[TOOL_CALLS]"),
        start=("[", "```json"),
        close=("</tool_call>", "```"),
        unclosed=("[", "[TOOL_CALLS]"),
        ambiguous=("```json", "["),
        keys=CallKeys(strict=True),
        paired=(("```json", "```"),),
        lines=("```json",),
        array=True,
    ),
    "hammer": JsonTags(
        open=(),
        start=("[", "```json", "```"),
        close=("```",),
        unclosed=("[",),
        ambiguous=("[", "```json", "```"),
        keys=CallKeys(strict=True),
        lines=("```json", "```"),
        array=True,
    ),
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "gigachat3": JsonTags(
        open=("<|function_call|>", "function call"),
        bound=(("function call", "<|role_sep|>"),),
        ambiguous=("function call",),
        lines=("function call",),
    ),
    "apertus": JsonTags(
        open=("<|tools_prefix|>",),
        close=("<|tools_suffix|>",),
        keys=CallKeys(name_is_key=True),
        array=True,
    ),
    "cohere_command3": COMMAND,
    "cohere_command4": COMMAND,
    "inkling": JsonTags(
        open=("<|content_invoke_tool_json|>",),
        close=("<|end_message|>",),
        keys=CallKeys(arguments=("args", "arguments")),
    ),
}
