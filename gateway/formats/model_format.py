"""The formats of one model's answers, and how the answer to a given prompt is parsed.

The formats are chosen once per model. The operator's options name them. With "auto" they come from
the checkpoint's own `response_template`, or else from the chat template and the vocabulary
(`detect`). The log and /v1/models show the choice and its reason, so that an operator can notice a
wrong guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from gateway.formats.answer_parser import AnswerSyntax
from gateway.formats.call_parser import CallSyntax
from gateway.formats.detect import BAR, Detected, detect
from gateway.formats.grammar_builder import AnswerFrame
from gateway.formats.lexicon import suffixed_markers
from gateway.formats.reasoning import NO_REASONING, ReasoningFormat, ends_inside, reasoning_start
from gateway.formats.reasoning_tokens import ThinkingMarks, thinking_marks
from gateway.formats.registry import BoundFormat, Format, bind, format_of, format_of_template
from gateway.formats.round_trip import RoundTrip
from gateway.prompt.written import WrittenTurns
from gateway.text.tokenizer import Tokenizer
from protocol.engine.grammar import Body, Grammar, Rules, Thinking, ThinkingBudget
from protocol.engine.model_card import ModelCard
from protocol.wire.errors import InvalidRequest

AUTO, NONE = "auto", "none"
TOOLS_OPTION, REASONING_OPTION = "--tool-format", "--reasoning-format"
OWN = "hf"
"""Name of the format that the checkpoint itself describes."""
DESCRIBED = "hermes"
"""Name of the format that `prompt.tool_prompt` describes to the model."""
_WHY_DESCRIBED = f"; so prompts describe tools in words, and calls are parsed as {DESCRIBED}"
TAIL_CHARS = 1 << 16
"""Number of characters at a prompt's end that are examined. Turns are assumed to be shorter."""


class WrongOption(ValueError):
    """Raised if an option requires something that this model does not have."""


class AnswerStart(msgspec.Struct, frozen=True):
    """How the answers to one prompt are parsed. If `bound` is None, all text is content.

    inside     whether the prompt has opened the reasoning and not closed it
    closed     whether no reasoning can follow: the prompt has closed it, or the model has none
    marks      markers by which reasoning tokens are counted, or None if they cannot be counted
    opener     the marker with which the prompt opened the reasoning; "" if unknown
    answering  whether the prompt has opened the answer proper
    thought    whether the prompt ends with text of the reasoning, which the answer continues
    """

    bound: BoundFormat | None = None
    inside: bool = False
    closed: bool = True
    marks: ThinkingMarks | None = None
    opener: str = ""
    answering: bool = False
    thought: bool = False

    @property
    def thinking(self) -> Thinking | None:
        """The thinking that the grammar admits before the answer's body. None if the format has no
        thinking, or if none can follow this prompt."""
        if self.bound is None or self.closed:
            return None
        frame = self.bound.frame()
        if not frame.closes or not (frame.opens or self.inside):
            return None
        return Thinking(
            closes=frame.closes, opens=frame.opens, inside=self.inside, optional=not self.inside
        )

    def grammar(
        self, body: Body, budget: ThinkingBudget | None, calls: Rules | None = None
    ) -> Grammar:
        """Return the grammar of an answer whose content matches `body`.

        It is `body` inside the markup that the model writes around content. Markup that the prompt
        has already written is left out. If `calls` is given, the answer may be tool calls instead.
        """
        frame = self.bound.frame() if self.bound else AnswerFrame()
        return Grammar(
            body=body,
            thinking=self.thinking,
            budget=budget,
            before="" if self.answering else frame.before,
            after=frame.after,
            calls=calls,
        )

    def call_grammar(self, body: Body, budget: ThinkingBudget | None) -> Grammar:
        """Return the grammar of an answer that consists of calls; `body` describes all of them."""
        return Grammar(body=body, thinking=self.thinking, budget=budget)

    def budget(self, field: str, most: int) -> ThinkingBudget | None:
        """Return a limit of `most` tokens of reasoning, or None if the answer has no reasoning.

        `field` is the field of the request that sets the limit. Raise InvalidRequest, naming
        `field`, if no marker closes the reasoning.
        """
        format = self.bound.format if self.bound else Format()
        reasoning = format.reasoning
        if reasoning == NO_REASONING:
            return None
        if reasoning is None or not reasoning.close:
            lack = "this model's reasoning format has no closing marker"
            if reasoning is None:
                lack = "the server has no reasoning format for this model"
            raise InvalidRequest(
                f"{field}: thinking cannot be limited, because {lack}; leave the field out, or "
                "restart the server with --reasoning-format",
                param=field,
            )
        pairs = list(zip_longest(reasoning.open, reasoning.close[: len(reasoning.open)]))
        pairs.sort(key=lambda pair: pair[0] != self.opener)  # the block that is open comes first
        closes = [close or reasoning.close[0] for _, close in pairs]
        return ThinkingBudget(
            most=most,
            opens=[opener for opener, _ in pairs],
            closes=[*closes, *reasoning.close, *_calls_that_end(format)],
            inside=self.inside,
        )


class ModelOutputFormat:
    """The formats of one model's answers.

    tools, reasoning  as parameters: the name of a format from docs/use/formats.md, or "auto" to
                      detect it. As attributes: the name of the format in use; None if answers
                      are not parsed for calls, or not for reasoning
    why               attribute: why these formats were selected, as a text for the operator
    teachable         parameter: whether the chat template omits tools, so that the gateway may
                      describe them in the prompt
    written           parameter: what the chat template writes for calls and reasoning; None:
                      unknown

    Raises ValueError if a name is unknown (the error lists the known names), or if the two cannot
    be combined. Raises WrongOption if the checkpoint's own format is requested but missing or not
    supported, or if this model cannot write the markers of a requested format.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        tools: str = AUTO,
        reasoning: str = AUTO,
        *,
        teachable: bool = False,
        written: WrittenTurns | None = None,
    ) -> None:
        added = tokenizer.added_tokens.values()
        trip = RoundTrip(written, tokenizer) if written is not None else None
        found = detect(_templates_of(card), tokenizer.token_id, added, trip)
        if teachable and not found.written:
            found = msgspec.structs.replace(found, tools=DESCRIBED, why=found.why + _WHY_DESCRIBED)
        own, self.why = _own_format(card, tools, reasoning, teachable)
        if own is not None:
            format = own
            self.tools = OWN if own.has_calls else None
            self.reasoning = OWN if own.reasoning else None
        else:
            self.tools = _chosen(tools, found.tools)
            self.reasoning = _chosen(reasoning, found.reasoning)
            self.why = _why(tools, reasoning, found) + self.why
            format = format_of(self.tools, self.reasoning)
            if reasoning == AUTO and written is not None and written.has_prompt:
                format = _opened_by_markers(format)
        self._tokenizer = tokenizer
        format = format.fitted([*added, *suffixed_markers(_templates_of(card) or "")])
        if own is None:
            _check_markers(format, tools, reasoning, card, tokenizer)
        self._formats = {True: format, False: _without_calls(format)}
        self._bound: dict[Format, BoundFormat] = {}

    def answer_start(self, prompt: str, kwargs: Mapping[str, Any], *, calls: bool) -> AnswerStart:
        """Return how the answers to `prompt` are parsed.

        kwargs  the effective template kwargs with which `prompt` was rendered
        calls   whether tool calls are searched for in the answer
        """
        format = self._formats[calls]
        opener, inside, closed = "", False, not _frames_content(format)
        thought = False
        if format.reasoning is not None:
            tail = prompt[-TAIL_CHARS:]
            reasoning = reasoning_start(format.reasoning, tail, kwargs)
            inside = reasoning.inside
            opener = _opened_by(tail, format.reasoning) if inside else ""
            thought = bool(opener) and bool(tail.rpartition(opener)[2].strip())
            closed = not inside and ends_inside(tail, format.reasoning) is False
            format = msgspec.structs.replace(format, reasoning=reasoning.format)
        if not format.markers() and format.tools is None and format.reasoning is None:
            return AnswerStart()
        bound = self._bind(format)
        before = bound.frame().before.rstrip("\n")
        answering = bool(before) and prompt.rstrip("\n").endswith(before)
        closed = closed or answering
        return AnswerStart(bound, inside, closed, thinking_marks(bound), opener, answering, thought)

    def prompt_ending(self, start: AnswerStart) -> str:
        """Return a text that stands for the end of the prompt of `start`: given a prompt that ends
        with this text, `answer_start` finds the same state of the reasoning.

        It is the marker that opens the reasoning if `start` is inside it, the one that closes it if
        no reasoning can follow, else "".
        """
        reasoning = self._formats[True].reasoning
        if reasoning is None:
            return ""
        markers = reasoning.open if start.inside else reasoning.close if start.closed else ()
        return markers[0] if markers else ""

    def _bind(self, format: Format) -> BoundFormat:
        """Return the format bound to the vocabulary. The few formats of one model are cached."""
        if format not in self._bound:
            self._bound[format] = bind(format, self._tokenizer)
        return self._bound[format]


def _opened_by_markers(format: Format) -> Format:
    """Return the format for a model whose prompts can be rendered: reasoning begins only if the
    prompt or the answer has opened it. So an answer without markers is content."""
    if format.reasoning is None:
        return format
    reasoning = msgspec.structs.replace(format.reasoning, default_inside=False)
    return msgspec.structs.replace(format, reasoning=reasoning)


def _templates_of(card: ModelCard) -> str | None:
    """Return the text of the model's templates, or None if it has none."""
    sources = [each for each in (card.tool_use_template, card.chat_template) if each is not None]
    return "\n".join(sources) if sources else None


def _opened_by(prompt_tail: str, format: ReasoningFormat) -> str:
    """Return the marker in `prompt_tail` that opened the last block of reasoning, or ""."""
    places = [(prompt_tail.rfind(marker), marker) for marker in format.open]
    return max([place for place in places if place[0] >= 0], default=(-1, ""))[1]


def _calls_that_end(format: Format) -> tuple[str, ...]:
    """Return the openers of calls if they also end a block of reasoning, else an empty tuple."""
    ends = format.reasoning is not None and format.reasoning.calls_end_it
    return format.tools.openers() if ends and isinstance(format.tools, CallSyntax) else ()


def check_names(tools: str, reasoning: str) -> None:
    """Check the format names that the operator chose with --tool-format and --reasoning-format.

    Raise ValueError if a name is unknown (the error lists the known names), or if the two formats
    cannot be combined.
    """
    if OWN not in (tools, reasoning):
        format_of(_chosen(tools, None), _chosen(reasoning, None))
    elif not {tools, reasoning} <= {OWN, AUTO}:
        raise ValueError(
            f"{_option(tools)} {OWN} covers calls and reasoning together, as the checkpoint "
            f"describes them; the other option must be {OWN} or {AUTO}"
        )


def _option(tools: str) -> str:
    """Return the name of the option that requests the checkpoint's own format."""
    return TOOLS_OPTION if tools == OWN else REASONING_OPTION


def _own_format(
    card: ModelCard, tools: str, reasoning: str, teachable: bool
) -> tuple[Format | None, str]:
    """Return (the checkpoint's own format or None, the reason). Raise WrongOption if an option
    requests this format and it cannot be used."""
    asked = f"{_option(tools)} {OWN}" if OWN in (tools, reasoning) else ""
    remedy = _remedy(_option(tools))
    source = card.response_template
    if source is None and asked:
        raise WrongOption(f"{asked}: the model's checkpoint has no response_template; {remedy}")
    if source is None:
        return None, ""
    try:
        own = format_of_template(source)
    except ValueError as error:
        if asked:
            raise WrongOption(f"{asked}: {error}; {remedy}") from None
        return None, f"; the checkpoint's own description cannot be used: {error}"
    if asked:
        return own, "as the options say, by the checkpoint's response_template"
    if (tools, reasoning) != (AUTO, AUTO):
        return None, "; the checkpoint's response_template is not used, as the options say"
    if teachable:
        return (
            None,
            "; the checkpoint's response_template is not used, as prompts describe the tools",
        )
    return own, f"tool calls and reasoning: {OWN}, as the checkpoint has a response_template"


def _remedy(option: str) -> str:
    return f"serve with {option} {AUTO}, or name the format of this model"


def _frames_content(format: Format) -> bool:
    return isinstance(format.tools, AnswerSyntax) and format.tools.frames_content


def _chosen(asked: str, found: str | None) -> str | None:
    return found if asked == AUTO else None if asked == NONE else asked


def _why(tools: str, reasoning: str, found: Detected) -> str:
    both = (("tool calls", TOOLS_OPTION, tools), ("reasoning", REASONING_OPTION, reasoning))
    named = [f"{kind}: {name} (set by {option})" for kind, option, name in both if name != AUTO]
    if not named:
        return found.why
    guess = [f"auto detects {found.why}"] if AUTO in (tools, reasoning) else []
    return "; ".join([*named, *guess])


_CONTROL_TOKEN = re.compile(rf"<[|{BAR}].*>|\[[A-Z_]+\]")
"""Pattern of markers that models write as control tokens: as one token, or with special tokens."""
_MIN_PART_CHARS = 3
"""Shortest token whose occurrence in a marker shows that the model has the marker."""


def _check_markers(
    format: Format, tools: str, reasoning: str, card: ModelCard, tokenizer: Tokenizer
) -> None:
    """Raise WrongOption if an option names a format whose control tokens the model lacks. Other
    markers (`<tool_call>`) are not checked: a model may write them as ordinary text."""
    thinks = format.reasoning.open if format.reasoning else ()
    named = ((TOOLS_OPTION, tools, _calls_begin(format)), (REASONING_OPTION, reasoning, thinks))
    for option, name, markers in named:
        if name in (AUTO, NONE) or not all(map(_CONTROL_TOKEN.fullmatch, markers)) or not markers:
            continue
        if not any(_is_known(marker, _templates_of(card) or "", tokenizer) for marker in markers):
            listed = " or ".join(dict.fromkeys(markers))
            raise WrongOption(
                f"{option} {name}: neither the vocabulary nor the chat template of {card.name} "
                f"has {listed}; {_remedy(option)}"
            )


def _calls_begin(format: Format) -> tuple[str, ...]:
    """Return the markers that start a call; none if a call may start without a marker."""
    if isinstance(format.tools, AnswerSyntax):
        return tuple(filter(_CONTROL_TOKEN.fullmatch, format.tools.markers()))
    if format.tools is None or format.tools.start_openers():
        return ()
    return format.tools.openers()


def _is_known(marker: str, template: str, tokenizer: Tokenizer) -> bool:
    """Return whether the template has the marker, or the vocabulary has it or a part of it."""
    if marker in template or tokenizer.token_id(marker) is not None:
        return True
    added = tokenizer.added_tokens.values()
    return any(len(part) >= _MIN_PART_CHARS and part in marker for part in added)


def _without_calls(format: Format) -> Format:
    """Return the format for answers that are not searched for calls. A syntax that covers the whole
    answer stays, because it also separates content from reasoning."""
    if isinstance(format.tools, AnswerSyntax):
        return format
    return Format(None, format.reasoning)
