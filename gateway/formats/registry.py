"""The table of formats: all names, collected from the syntaxes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.formats import (
    arg_pairs,
    gemma,
    harmony,
    json_tags,
    mistral,
    named_json,
    nested_elements,
    pythonic,
    response_template_loader,
    xml_parameters,
    xtml,
)
from gateway.formats.event_builder import DeclaredTool, new_call_id
from gateway.formats.lexicon import Lexicon
from gateway.formats.parser import AnswerSyntax, CallSyntax, FormatParser, ParserContext
from gateway.formats.reasoning import REASONING, WHOLE, ReasoningFormat
from gateway.formats.response_template import ResponseTemplate
from gateway.formats.standard import StandardParser
from gateway.text.tokenizer import Tokenizer

ToolSyntax = CallSyntax | AnswerSyntax

TOOLS: Mapping[str, ToolSyntax] = {
    **json_tags.FORMATS,
    **named_json.FORMATS,
    **mistral.FORMATS,
    **xml_parameters.FORMATS,
    **nested_elements.FORMATS,
    **arg_pairs.FORMATS,
    **pythonic.FORMATS,
    **gemma.FORMATS,
    **harmony.FORMATS,
    **xtml.FORMATS,
}

REASONING_OF_ANSWER_SYNTAX: Mapping[str, str] = {
    "openai_gptoss": "openai",
    "kimi_k3": "kimi_k3",
    "muse_glimmer": "muse_glimmer",
}
"""Reasoning formats that are part of a syntax for the whole answer: name -> tool format."""


class Format(msgspec.Struct, frozen=True):
    """How an answer is parsed: a tool syntax, a reasoning format, both or neither.

    An AnswerSyntax covers the whole answer. `reasoning` then only describes where it starts.
    """

    tools: ToolSyntax | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the format describes tool calls."""
        if isinstance(self.tools, ResponseTemplate):
            return self.tools.has_calls
        return self.tools is not None

    def markers(self) -> tuple[str, ...]:
        """Return all markers that a vocabulary may have as one token."""
        tools = self.tools.markers() if self.tools else ()
        reasoning = self.reasoning.markers() if self.reasoning else ()
        return tuple(dict.fromkeys(tools + reasoning))

    def lexicon(
        self, token_id: Callable[[str], int | None], specials: Mapping[int, str] | None = None
    ) -> Lexicon:
        """Return the format's markers in one vocabulary. Call it once per format and vocabulary.

        token_id  returns a marker's id, or None if it is not a single token
        specials  id -> text of the tokens that otherwise have no text
        """
        found = ((token_id(marker), marker) for marker in self.markers())
        tokens = {token: marker for token, marker in found if token is not None}
        spelt = [text for text in self._texts() if text not in tokens.values()]
        parts = {
            token: text
            for token, text in (specials or {}).items()
            if token not in tokens and any(text in whole for whole in spelt)
        }
        return Lexicon(tokens, parts)

    def _texts(self) -> set[str]:
        """Return all strings that the format searches for, including its patterns."""
        tools = self.tools
        openers = tools.openers() if isinstance(tools, CallSyntax) else ()
        if isinstance(tools, ResponseTemplate):  # its anchor stands in the prompt
            tools = msgspec.structs.replace(tools, anchor="")
        return {*_strings(tools), *_strings(self.reasoning), *openers}

    def fitted(self, vocabulary: Collection[str]) -> Format:
        """Return the format as a checkpoint with these added tokens writes it."""
        tools = self.tools.fitted(vocabulary) if self.tools else None
        reasoning = self.reasoning.fitted(vocabulary) if self.reasoning else None
        return Format(tools, reasoning)

    def parser(
        self,
        lexicon: Lexicon,
        *,
        tools: Sequence[DeclaredTool] | None = None,
        new_id: Callable[[], str] = new_call_id,
        starts_inside: bool = False,
        calls_or_text: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> FormatParser:
        """Return a fresh parser for one choice, or one that continues from `state`."""
        context = ParserContext(lexicon, tools, self._id_maker(new_id), calls_or_text)
        own = dict(state or {})
        builder = context.event_builder(own.pop("teller", None))
        if isinstance(self.tools, AnswerSyntax):
            return self.tools.parser(context, builder, own or None, starts_inside=starts_inside)
        return StandardParser(
            context,
            builder,
            own or None,
            reasoning=self.reasoning,
            tools=self.tools,
            starts_inside=starts_inside,
        )

    def _id_maker(self, new_id: Callable[[], str]) -> Callable[[], str]:
        if not isinstance(self.tools, CallSyntax):
            return new_id
        form = self.tools.call_id
        return lambda: form(new_id())


def format_of(tools: str | None, reasoning: str | None) -> Format:
    """Return the format with these names. None: no tool calls, or no reasoning, are parsed.

    Raise ValueError, listing the known names, if a name is unknown.
    """
    if reasoning is not None and reasoning in REASONING_OF_ANSWER_SYNTAX:
        whole = REASONING_OF_ANSWER_SYNTAX[reasoning]
        if tools not in (None, whole):
            raise ValueError(
                f"reasoning format {reasoning!r} is part of tool format {whole!r} and cannot be "
                f"read together with {tools!r}"
            )
        tools = whole
    syntax = _named(TOOLS, tools, "tool format") if tools else None
    if isinstance(syntax, AnswerSyntax):
        return Format(syntax, WHOLE.get(tools or ""))
    return Format(syntax, _named(REASONING, reasoning, "reasoning format") if reasoning else None)


def _strings(value: Any) -> Iterator[str]:
    """Yield every string of a description. Escaped characters of a pattern are unescaped."""
    if isinstance(value, str):
        yield re.sub(r"\\(\W)", r"\1", value)
    elif isinstance(value, tuple):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, msgspec.Struct):
        yield from _strings(msgspec.structs.astuple(value))


def format_of_template(source: str) -> Format:
    """Return the format that a checkpoint's own `response_template`, as JSON, describes.

    Raise ValueError, naming the part that is not supported.
    """
    syntax = response_template_loader.parse(source)
    return Format(syntax, syntax.reasoning)


_Entry = TypeVar("_Entry")


def _named(table: Mapping[str, _Entry], name: str, kind: str) -> _Entry:
    if name not in table:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(sorted(table))}")
    return table[name]


class BoundFormat(msgspec.Struct, frozen=True):
    """A format, and which of its markers are tokens of the model's vocabulary: made once per model,
    shared by all requests."""

    format: Format
    lexicon: Lexicon

    def with_drafts(self) -> BoundFormat:
        """Return it for answers that cannot end in their reasoning: a call in it is a draft."""
        if self.format.reasoning is None:
            return self
        reasoning = msgspec.structs.replace(self.format.reasoning, drafts_calls=True)
        format = msgspec.structs.replace(self.format, reasoning=reasoning)
        return msgspec.structs.replace(self, format=format)

    def parser(self, **options: Any) -> FormatParser:
        """See `Format.parser`."""
        return self.format.parser(self.lexicon, **options)


def bind(format: Format, tokenizer: Tokenizer) -> BoundFormat:
    """Find the format's markers in a vocabulary."""
    added = tokenizer.added_tokens
    fitted = format.fitted(frozenset(added.values()))
    specials = {token: added[token] for token in tokenizer.special_ids}
    return BoundFormat(
        fitted, fitted.lexicon(lambda marker: marker_id(tokenizer, marker), specials)
    )


def marker_id(tokenizer: Tokenizer, marker: str) -> int | None:
    """Return the id of a marker that is always written as one token, or None if it is spelt out.

    Only added tokens are always written as one. An ordinary token with the same letters may be
    merged with its neighbours, so such a marker is found in the text.
    """
    token_id = tokenizer.token_id(marker)
    return token_id if token_id in tokenizer.added_tokens else None


def parser_state(parser: FormatParser) -> dict[str, Any]:
    """Return the plain data that `Format.parser` accepts as `state`."""
    return parser.state() | {"teller": parser.builder.state()}
