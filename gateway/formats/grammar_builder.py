"""Builds the grammar of one answer: its forms, rules and schemas, and free text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.lexicon import Lexicon
from protocol.engine.grammar import (
    Either,
    Form,
    GrammarRule,
    Json,
    LiteralForm,
    Pattern,
    Repeat,
    Rules,
    Until,
)
from protocol.engine.grammar import Sequence as SequenceForm

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of the arguments of a tool that declares no parameters."""


class NotWritable(ValueError):
    """Raised if a format cannot write every call that a tool's schema allows, or if a grammar
    cannot enforce the schema.

    tool   name of the tool
    field  path of the cause in the tool's `function`: "name" or "parameters.properties.x"
    """

    def __init__(self, tool: str, field: str, why: str) -> None:
        super().__init__(why)
        self.tool = tool
        self.field = field


class AnswerFrame(msgspec.Struct, frozen=True):
    """Markup around the reasoning and around the answer proper, which is the text for the user.

    opens   markup before a block of reasoning; "" if there is none, or if only the prompt has it
    closes  all markup between the block and the next part of the answer
    before  markup before content
    after   markup after content, without the marker that ends the whole answer
    """

    opens: str = ""
    closes: str = ""
    before: str = ""
    after: str = ""


class GrammarBuilder:
    """Collects the rules and schemas of one grammar. Equal schemas are stored once, and so are
    equal rules.

    lexicon  markers of the format that are single tokens; some formats have variants that depend on
             them
    tools    tools that may be called
    many     whether any number of calls is admitted; otherwise one
    """

    def __init__(
        self,
        lexicon: Lexicon | None = None,
        tools: Sequence[DeclaredTool] = (),
        *,
        many: bool = True,
    ) -> None:
        self.lexicon = lexicon or Lexicon()
        self.tools = tools
        self.many = many
        self._rules: dict[str, Form] = {}
        self._schemas: dict[str, str] = {}

    def each_tool(self, write: Callable[[DeclaredTool], Form]) -> Form:
        """Return a form that admits a call of any tool. `write` returns the form for one tool."""
        return either(write(tool) for tool in self.tools)

    def call_rule(self, write: Callable[[DeclaredTool], Form]) -> Form:
        """Return a rule that admits a call of any tool. `write` returns the form for one tool."""
        return self.rule("call", self.each_tool(write))

    def several(self, item: Form, between: Form | str = "") -> Form:
        """Return a form for one `item`. If `self.many`, any number of further ones may follow, each
        after `between`."""
        return sequence(item, self.repeated(sequence(between, item)))

    def repeated(self, item: Form) -> Form:
        """Return a form for any number of `item`, including none. Unless `self.many`, return the
        empty form."""
        return Repeat(item) if self.many else LiteralForm("")

    def json(self, schema: Mapping[str, Any] | None) -> Json:
        """Return a form for JSON that `schema` admits. None or an empty schema admits any
        object."""
        text = msgspec.json.encode(schema or ANY_OBJECT).decode()
        for name, known in self._schemas.items():
            if known == text:
                return Json(name)
        name = f"schema-{len(self._schemas)}"
        self._schemas[name] = text
        return Json(name)

    def arguments(self, tool: DeclaredTool) -> Json:
        """Return a form for the arguments of `tool` as one JSON object."""
        return self.json({**(tool.parameters or {}), **ANY_OBJECT})

    def rule(self, hint: str, form: Form) -> GrammarRule:
        """Return a rule for `form`: an equal rule, or a new one whose name starts with `hint`."""
        for name, known in self._rules.items():
            if known == form:
                return GrammarRule(name)
        name = f"{hint}-{len(self._rules)}"
        self._rules[name] = form
        return GrammarRule(name)

    def define(self, name: str, form: Form) -> GrammarRule:
        """Add a rule with exactly this name. Forms may refer to the rule before it is defined."""
        assert self._rules.get(name, form) == form, f"two rules {name!r}"
        self._rules[name] = form
        return GrammarRule(name)

    def body(self, start: Form) -> Rules:
        """Return the grammar that starts with the form `start`, with all rules and schemas
        collected so far."""
        return Rules(start=start, rules=dict(self._rules), schemas=dict(self._schemas))


# ---- forms

ANY_KEY = Pattern(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
"""The name of an argument that the schema does not declare."""
LINE_BREAK = Repeat(LiteralForm("\n"), 0, 1)
"""One line break, or none."""
ANY_TEXT = Pattern("(?s:.*)")
"""Any text."""


def sequence(*parts: Form | str) -> Form:
    """Return a form for the parts one after another. Neighbouring literals are joined, because
    together they may spell a marker."""
    items: list[Form] = []
    for part in parts:
        form = LiteralForm(part) if isinstance(part, str) else part
        for item in form.items if isinstance(form, SequenceForm) else (form,):
            if isinstance(item, LiteralForm) and items and isinstance(items[-1], LiteralForm):
                items[-1] = LiteralForm(items[-1].text + item.text)
            elif item != LiteralForm(""):
                items.append(item)
    return items[0] if len(items) == 1 else SequenceForm(items) if items else LiteralForm("")


def without_prefix(beginning: str, form: Form) -> Form:
    """Return `form`, which starts with the literal text `beginning`, without that text."""
    first, *rest = form.items if isinstance(form, SequenceForm) else [form]
    assert isinstance(first, LiteralForm)
    assert first.text.startswith(beginning)
    return sequence(first.text.removeprefix(beginning), *rest)


def either(options: Iterable[Form]) -> Form:
    """Return a form for one of `options`. There must be at least one."""
    found = list(options)
    return found[0] if len(found) == 1 else Either(found)


def optional(item: Form) -> Form:
    return Repeat(item, 0, 1)


def quoted(text: str) -> str:
    """Return `text` as a JSON string."""
    return msgspec.json.encode(text).decode()


def pattern_not_starting_with(beginnings: Iterable[str]) -> str:
    """Return a regular expression for all texts that, after leading blanks, start with none of
    `beginnings`."""
    return rf"(?s:[ \t\r\n]*{_not_starting_with(set(beginnings), blanks=True)})"


def _not_starting_with(beginnings: set[str], *, blanks: bool = False) -> str:
    """Return a pattern of the texts that start with none of `beginnings`.

    Such a text is empty, starts with a character that starts no beginning, or has the first
    character of a beginning and then differs from it. With `blanks` it does not start with a blank.
    """
    firsts = sorted({text[0] for text in beginnings})
    others = "".join(map(_char_pattern, firsts)) + (r" \t\r\n" if blanks else "")
    ways = [f"[^{others}].*"]
    for first in firsts:
        rests = {text[1:] for text in beginnings if text[0] == first}
        if "" not in rests:
            ways.append(_char_pattern(first) + _not_starting_with(rests))
    return f"(?:{'|'.join(ways)})?"


def _char_pattern(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


# ---- free text


class FreeText:
    """Writes the grammar of free text that contains calls and markers.

    calls  opener -> form of what must follow it; empty if there are no calls
    marks  markers that have no meaning of their own and may occur anywhere. Markers without any
           special token are ignored, because the grammar admits them as ordinary text

    If only one call is admitted, it ends the answer.
    """

    def __init__(
        self, calls: Mapping[str, Form], marks: Iterable[str], grammar: GrammarBuilder
    ) -> None:
        lexicon = grammar.lexicon
        pieces = (*lexicon.parts.values(), *lexicon.tokens.values())
        known = {mark for mark in marks if any(piece in mark for piece in pieces)}
        self.calls = _grouped(calls, pieces)
        self.marks = sorted(known - {*calls})
        self.many = grammar.many

    def anything(self) -> Form:
        """Return the form of free text with calls and markers in it."""
        steps = [self._mark()] if self.marks else []
        if self.many:
            steps += [self._call()] if self.calls else []
            return sequence(Repeat(either(steps)), ANY_TEXT) if steps else ANY_TEXT
        last = either((self._call(), ANY_TEXT)) if self.calls else ANY_TEXT
        return sequence(*map(Repeat, steps), last)

    def not_starting_with(self, beginnings: Iterable[str]) -> Form:
        """Return the form of free text with calls and markers that starts with none of
        `beginnings`.
        """
        guard = pattern_not_starting_with(beginnings)
        steps = [sequence(self._mark(guard), self.anything())] if self.marks else []
        if self.calls:
            steps.append(sequence(self._call(guard), self.anything() if self.many else ""))
        return either([*steps, Pattern(guard)])

    def _call(self, before: str = ANY_TEXT.pattern) -> Form:
        return either(sequence(Until(opener, before), rest) for opener, rest in self.calls.items())

    def _mark(self, before: str = ANY_TEXT.pattern) -> Form:
        return either(Until(mark, before) for mark in self.marks)


def _grouped(calls: Mapping[str, Form], pieces: Iterable[str]) -> dict[str, Form]:
    """Return `calls` with each opener that starts with another one, spelt out, moved to the form of
    the shorter opener. `pieces` are the texts of the special tokens.

    In the grammar, free text ends where an opener that is spelt out is complete.
    """
    found: dict[str, dict[str, Form]] = {}
    for opener in sorted(calls, key=lambda opener: (_spelt(opener, pieces), opener)):
        spelt = _spelt(opener, pieces)
        known = next((begun for begun in found if spelt.startswith(begun)), opener)
        found.setdefault(known, {})[opener.removeprefix(known)] = calls[opener]
    return {
        begun: either(sequence(rest, form) for rest, form in ways.items())
        for begun, ways in found.items()
    }


def _spelt(opener: str, pieces: Iterable[str]) -> str:
    """Return the part of an opener before its first special token. `pieces` are the texts of the
    special tokens."""
    places = (opener.find(piece) for piece in pieces)
    return opener[: min((place for place in places if place >= 0), default=len(opener))]
