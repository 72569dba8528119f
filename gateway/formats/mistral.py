"""Mistral's calls, of every version: an array of objects, or names followed by JSON arguments.

    [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]k3Xz0aB9c[ARGS]{}

The states are:

    choosing  after the marker: the next character decides between the two variants
    array     in the first variant, which a parser of `json_tags` reads
    named     in the second variant, which a parser of `named_json` reads

Call ids are nine letters and digits, because Mistral's templates accept no others. The grammar uses
the second variant if the vocabulary has its marker as a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.formats.call_parser import CallParser, CallSyntax
from gateway.formats.event_builder import EventBuilder
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.json_call import CallKeys
from gateway.formats.json_spelling import SPACE
from gateway.formats.json_tags import JsonTags
from gateway.formats.lexicon import MarkerPart
from gateway.formats.named_json import ID_CHARS, NamedJson
from gateway.formats.parser import FormatParserState, Moves, ParserContext
from gateway.text.markers import match_end
from protocol.engine.grammar import Form


class MistralState(FormatParserState):
    """State of a `MistralParser`: the opening marker, and the blanks read after it."""

    at: str = "choosing"
    opener: str = ""
    blanks: list[str] = []


class MistralParser(CallParser):
    State = MistralState
    UNSCANNED = frozenset({"array", "named"})

    def __init__(
        self,
        syntax: Mistral,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        own = dict(state or {})
        self.variants: Mapping[str, CallParser] = {
            "array": syntax.array.call_parser(context, builder, own.pop("array", None)),
            "named": syntax.named.call_parser(context, builder, own.pop("named", None)),
        }
        super().__init__(syntax, context, builder, own or None)

    def moves(self) -> Moves:
        return {}

    def state(self) -> dict[str, Any]:
        return super().state() | {
            name: call_parser.state() for name, call_parser in self.variants.items()
        }

    @property
    def is_between(self) -> bool:
        return self.s.at in self.variants and self.variants[self.s.at].is_between

    def on_open(self, marker: str) -> None:
        self.s.opener = marker

    def _choose(self, variant: str) -> None:
        self.s.at = variant
        self.variants[variant].open(self.s.opener)
        self.variants[variant].read("".join(self.s.blanks))

    def on_part(self, part: MarkerPart) -> str:
        return "" if self.s.at == "choosing" else self._read_on(part)

    def _read_on(self, piece: str | MarkerPart) -> str:
        call_parser = self.variants[self.s.at]
        rest = call_parser.read(piece)
        self.s.done = call_parser.s.done
        return rest

    def on_text(self, text: str) -> str:
        if self.s.at != "choosing":
            return self._read_on(text)
        start = match_end(SPACE, text)
        self.s.blanks.append(text[:start])
        if start < len(text):
            self._choose("array" if text[start] in "[{" else "named")
        return text[start:]

    def on_stray(self, marker: str) -> None:
        if self.s.at == "choosing":
            self._choose("named")
        call_parser = self.variants[self.s.at]
        call_parser.read_token(marker)
        self.s.done = call_parser.s.done

    def on_end(self, complete: bool) -> None:
        if self.s.at == "choosing":
            self._choose("named")
        call_parser = self.variants[self.s.at]
        call_parser.end(complete)


class Mistral(CallSyntax, frozen=True, kw_only=True):
    """The two variants, `array` and `named`. Both start with the same markers."""

    PARSER = MistralParser

    array: JsonTags
    named: NamedJson

    def markers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.array.markers() + self.named.markers()))

    def openers(self) -> tuple[str, ...]:
        return self.named.openers()

    def call_id(self, ours: str) -> str:
        letters = "".join(char for char in ours if char.isalnum())
        return letters[-ID_CHARS:].rjust(ID_CHARS, "0")

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        is_named = grammar.lexicon.is_token(self.named.name_end[0])
        return (self.named if is_named else self.array).write_calls(opener, grammar)


FORMATS = {
    "mistral": Mistral(
        array=JsonTags(
            open=("[TOOL_CALLS]",),
            unclosed=("[TOOL_CALLS]",),
            keys=CallKeys(id=("id",)),
            array=True,
        ),
        named=NamedJson(
            call_open=("[TOOL_CALLS]",), id_begin=("[CALL_ID]",), name_end=("[ARGS]", "{")
        ),
    )
}
