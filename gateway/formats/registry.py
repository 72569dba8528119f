"""Formats by name, and their parsers and grammars.

A `Format` joins a tool syntax and a reasoning format. A `BoundFormat` is a format together with one
model's vocabulary. It makes the parsers of answers and the grammars of answers with calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.formats import (
    arg_pairs,
    functionary,
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
from gateway.formats.answer_parser import AnswerSyntax
from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import DeclaredTool, new_call_id
from gateway.formats.grammar_builder import (
    AnswerFrame,
    FreeText,
    GrammarBuilder,
    either,
    optional,
    sequence,
)
from gateway.formats.lexicon import Lexicon
from gateway.formats.parser import FormatParser, ParserContext
from gateway.formats.reasoning import NO_REASONING, REASONING, WHOLE, ReasoningFormat
from gateway.formats.response_template import ResponseTemplate
from gateway.formats.standard import StandardParser
from gateway.text.tokenizer import Tokenizer
from protocol.engine.grammar import Form, LiteralForm, Pattern, Rules

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
    **functionary.FORMATS,
    **xtml.FORMATS,
}

REASONING_OF_ANSWER_SYNTAX: Mapping[str, str] = {
    "openai_gptoss": "openai",
    "kimi_k3": "kimi_k3",
    "muse": "muse_glimmer",
    "muse_glimmer": "muse_glimmer",
}
"""Reasoning format -> the tool format that parses this reasoning, as a part of the answer."""


class Format(msgspec.Struct, frozen=True):
    """How an answer is parsed: a tool syntax, a reasoning format, both or neither.

    If `tools` is an AnswerSyntax, it also parses the reasoning. `reasoning` is then used only to
    determine whether an answer starts inside the reasoning.
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
        """Return the format's markers in one vocabulary. This is slow: call it once per format and
        vocabulary.

        token_id  returns a marker's id, or None if the marker is not a single token
        specials  id of each special token -> its string, which is used only as part of a marker;
                  elsewhere special tokens give no text
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
        """Return all strings that the format searches for, including those in its patterns."""
        tools = self.tools
        openers = tools.openers() if isinstance(tools, CallSyntax) else ()
        if isinstance(tools, ResponseTemplate):  # its anchor is part of prompts
            tools = msgspec.structs.replace(tools, anchor="")
        return {*_strings(tools), *_strings(self.reasoning), *openers}

    def fitted(self, vocabulary: Collection[str]) -> Format:
        """Return this format with the markers that a checkpoint with these added tokens uses."""
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
        continues_reasoning: bool = False,
        calls_or_text: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> FormatParser:
        """Return a new parser for one choice, or one that continues from `state`.

        `lexicon` is the format's markers in the model's vocabulary. The other parameters are those
        of `AnswerOptions`.
        """
        context = ParserContext(lexicon, tools, self._id_maker(new_id), calls_or_text)
        own = dict(state or {})
        builder = context.event_builder(own.pop("teller", None))
        parser: FormatParser
        if isinstance(self.tools, AnswerSyntax):
            parser = self.tools.parser(context, builder, own or None, starts_inside=starts_inside)
        else:
            parser = StandardParser(
                context,
                builder,
                own or None,
                reasoning=self.reasoning,
                tools=self.tools,
                starts_inside=starts_inside,
            )
        if continues_reasoning and state is None:
            builder.continue_reasoning()
        return parser

    def _id_maker(self, new_id: Callable[[], str]) -> Callable[[], str]:
        if not isinstance(self.tools, CallSyntax):
            return new_id
        form = self.tools.call_id
        return lambda: form(new_id())


def format_of(tools: str | None, reasoning: str | None) -> Format:
    """Return the format that joins a tool format and a reasoning format, each given by name. None:
    answers are not parsed for calls, or not for reasoning.

    Raise ValueError if a name is unknown (the error lists the known names), or if the two cannot be
    combined.
    """
    if reasoning is not None and reasoning in REASONING_OF_ANSWER_SYNTAX:
        whole = REASONING_OF_ANSWER_SYNTAX[reasoning]
        if tools is not None and TOOLS.get(tools) != TOOLS[whole]:
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
    """Yield every string in `value`, a syntax or a part of it, with regex escapes resolved."""
    if isinstance(value, str):
        yield re.sub(r"\\(\W)", r"\1", value)
    elif isinstance(value, tuple):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, msgspec.Struct):
        yield from _strings(msgspec.structs.astuple(value))


def format_of_template(source: str) -> Format:
    """Return the format that `source`, a checkpoint's own `response_template` as JSON, describes.
    Raise ValueError, naming the part, if a part is not supported."""
    syntax = response_template_loader.parse(source)
    return Format(syntax, syntax.reasoning)


_Entry = TypeVar("_Entry")


def _named(table: Mapping[str, _Entry], name: str, kind: str) -> _Entry:
    if name not in table:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(sorted(table))}")
    return table[name]


class BoundFormat(msgspec.Struct, frozen=True):
    """A format and its markers in one vocabulary. All requests to a model share it."""

    format: Format
    lexicon: Lexicon

    def with_drafts(self) -> BoundFormat:
        """Return the format for answers that a grammar keeps from ending inside their reasoning.
        A call that is written inside the reasoning is then not a real call, and is emitted as text.
        """
        if self.format.reasoning is None:
            return self
        reasoning = msgspec.structs.replace(self.format.reasoning, drafts_calls=True)
        format = msgspec.structs.replace(self.format, reasoning=reasoning)
        return msgspec.structs.replace(self, format=format)

    def parser(self, **options: Any) -> FormatParser:
        """Return a parser for one choice. `options` are the keyword arguments of
        `Format.parser`."""
        return self.format.parser(self.lexicon, **options)

    # ---- grammars of answers with calls

    def required_calls(self, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
        """Return the grammar of an answer that consists of calls of `tools` only.

        It admits any number of calls if `many`, otherwise one call. Raise NotWritable for a tool
        whose calls the format cannot write.
        """
        grammar, syntax = GrammarBuilder(self.lexicon, tools, many=many), self._syntax
        if isinstance(syntax, AnswerSyntax):
            return grammar.body(syntax.write_required(grammar))
        opener = preferred_opener(syntax, self.lexicon)
        one = grammar.rule("stretch", sequence(opener, syntax.write_calls(opener, grammar)))
        if opener in syntax.start_openers():
            return grammar.body(one)
        header = (self.format.reasoning or NO_REASONING).header
        between = LiteralForm(header[0]) if header else optional(BLANKS_BETWEEN)
        return grammar.body(grammar.several(one, between))

    def required_calls_or_other(self, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
        """Return the grammar of the calls, like `required_calls`, for an answer that may have
        another form instead, such as the JSON of a response format.

        The start of the answer decides between the two. If calls start like any JSON, the content
        of the JSON decides.
        """
        grammar, syntax = GrammarBuilder(self.lexicon, tools, many=many), self._syntax
        values = syntax.write_values(grammar) if isinstance(syntax, CallSyntax) else None
        return self.required_calls(tools, many=many) if values is None else grammar.body(values)

    def strict_calls(self, tools: Sequence[DeclaredTool], *, many: bool) -> Rules:
        """Return the grammar of free text in which everything that opens a call continues as a
        valid call of one of `tools`. Raise NotWritable like `required_calls`.

        Pass a tool with `parameters=None` if its arguments may be anything. Without `many` the
        answer ends with its first call.

        An opener is never plain text. A format's calls may start like prose ("functools["), or like
        JSON at the start of an answer. The model then cannot write text that starts like a call but
        is none. Other markers without a meaning of their own, such as those around the answer
        proper, may occur anywhere.
        """
        grammar, syntax = GrammarBuilder(self.lexicon, tools, many=many), self._syntax
        if isinstance(syntax, AnswerSyntax):
            return grammar.body(syntax.write_strict(grammar))

        def group(opener: str) -> Form:
            return grammar.rule("stretch", syntax.write_calls(opener, grammar))

        openers = [
            opener + syntax.bound_marker(opener)
            for opener in syntax.openers()
            if not (opener in syntax.mistaken_openers() and self.lexicon.has_special(opener))
        ]
        calls = {opener: group(opener) for opener in openers}
        text = FreeText(calls, (self.format.reasoning or NO_REASONING).silent_markers(), grammar)
        at_start = [sequence(opener, group(opener)) for opener in syntax.start_openers()]
        if not at_start:
            return grammar.body(text.anything())
        first = sequence(
            optional(BLANKS_BETWEEN), either(at_start), text.anything() if many else ""
        )
        return grammar.body(either((first, text.not_starting_with(syntax.start_openers()))))

    @property
    def _syntax(self) -> ToolSyntax:
        assert self.format.tools is not None, "without a tool format there are no calls"
        return self.format.tools

    def frame(self) -> AnswerFrame:
        """Return the markup around the parts of answers in this format.

        Markers around the answer proper are included only if they are tokens of the vocabulary.
        Otherwise the model was not trained to write them.
        """
        syntax, reasoning = self.format.tools, self.format.reasoning
        if isinstance(syntax, AnswerSyntax):
            return syntax.frame()
        if reasoning is None:
            return AnswerFrame()
        opens = reasoning.open[0] if reasoning.open else ""
        closes = reasoning.close[0] + "".join(reasoning.header[:1]) if reasoning.close else ""
        for before, after in zip(reasoning.wrap_open, reasoning.wrap_close, strict=True):
            if self.lexicon.is_token(before):
                blank = reasoning.wrap_blank
                return AnswerFrame(opens, closes, before + blank, blank + after)
        return AnswerFrame(opens, closes)


BLANKS_BETWEEN = Pattern(r"[ \n]{1,4}")
"""Blanks between two groups of calls. Without a limit, a model could write blanks forever."""


def preferred_opener(syntax: CallSyntax, lexicon: Lexicon) -> str:
    """Return the opener that a grammar uses for calls. If the syntax has openers for the start of
    an answer, it is the first of these. Otherwise it is the first opener that is a token or has a
    bound marker that is one, or else the first opener."""
    if syntax.start_openers():
        return syntax.start_openers()[0]
    openers = syntax.openers()
    known = (
        opener
        for opener in openers
        if lexicon.is_token(opener) or lexicon.is_token(syntax.bound_marker(opener))
    )
    return next(known, openers[0])


def bind(format: Format, tokenizer: Tokenizer) -> BoundFormat:
    """Return the format for a model with this tokenizer. It is fitted to the added tokens, and has
    the ids of all markers that are single tokens."""
    added = tokenizer.added_tokens
    fitted = format.fitted(frozenset(added.values()))
    specials = {token: added[token] for token in tokenizer.special_ids}
    return BoundFormat(
        fitted, fitted.lexicon(lambda marker: marker_id(tokenizer, marker), specials)
    )


def marker_id(tokenizer: Tokenizer, marker: str) -> int | None:
    """Return the id of `marker` if it is always one token; None if it may be spelt by several
    tokens.

    Only added tokens are always written as one. The letters of an ordinary token may be merged with
    their neighbours, so a marker that is an ordinary token is searched for in the text.
    """
    token_id = tokenizer.token_id(marker)
    return token_id if token_id in tokenizer.added_tokens else None


def parser_state(parser: FormatParser) -> dict[str, Any]:
    """Return the parser's state as plain data, which `Format.parser` accepts as `state`."""
    return parser.state() | {"teller": parser.builder.state()}
