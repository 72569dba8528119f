"""The formats chosen for a model's answers, and where each answer starts.

They are chosen once per model: by the operator's options or, with "auto", from the checkpoint's own
`response_template`, or else from the chat template and the vocabulary. A guess is shown in the log
and in /v1/models, so that a wrong one is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from gateway.formats.calls_grammar import frame_of
from gateway.formats.detect import BAR, Detected, detect
from gateway.formats.lexicon import suffixed_markers
from gateway.formats.parser import AnswerFrame, AnswerSyntax, CallSyntax
from gateway.formats.reasoning import NO_REASONING, ReasoningFormat, says_inside, start
from gateway.formats.registry import BoundFormat, Format, bind, format_of, format_of_template
from gateway.generation.reasoning_tokens import ThinkingMarks, thinking_marks
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest
from protocol.grammar import Body, Grammar, Rules, Thinking, ThinkingBudget
from protocol.model_card import ModelCard

AUTO, NONE = "auto", "none"
TOOLS_OPTION, REASONING_OPTION = "--tool-format", "--reasoning-format"
OWN = "hf"
"""The format that the checkpoint itself describes."""
TAUGHT = "hermes"
"""The format that `prompt.tool_prompt` describes to the model."""
_TEACHES = f"; so tools are described to the model in words, and calls read as {TAUGHT}"
TAIL_CHARS = 1 << 16
"""How much of a prompt's end is examined: more than any turn that an answer continues."""


class WrongOption(ValueError):
    """The operator's option needs something that this model does not have."""


class AnswerStart(msgspec.Struct, frozen=True):
    """How the answers to one prompt are parsed. If `bound` is None, all text is content.

    inside     the prompt has already opened the reasoning
    closed     the prompt has closed it again, or there is none: the answer proper starts at once
    marks      markers by which reasoning tokens are counted, if they can be
    opener     the marker with which the prompt opened the reasoning; "" if unknown
    answering  the prompt has opened the answer proper
    """

    bound: BoundFormat | None = None
    inside: bool = False
    closed: bool = True
    marks: ThinkingMarks | None = None
    opener: str = ""
    answering: bool = False

    @property
    def thinking(self) -> Thinking | None:
        """The reasoning that may come before an answer that a grammar describes."""
        if self.bound is None or self.closed:
            return None
        frame = frame_of(self.bound)
        if not frame.closes or not (frame.opens or self.inside):
            return None
        return Thinking(
            closes=frame.closes, opens=frame.opens, inside=self.inside, optional=not self.inside
        )

    def grammar(
        self, body: Body, budget: ThinkingBudget | None, calls: Rules | None = None
    ) -> Grammar:
        """Return the grammar of an answer that calls no tools.

        It is `body` with the markup that the model writes around content, unless the prompt has
        already written that. With `calls` the answer may be those instead.
        """
        frame = frame_of(self.bound) if self.bound else AnswerFrame()
        return Grammar(
            body=body,
            thinking=self.thinking,
            budget=budget,
            before="" if self.answering else frame.before,
            after=frame.after,
            calls=calls,
        )

    def call_grammar(self, body: Body, budget: ThinkingBudget | None) -> Grammar:
        """Return the grammar of an answer with calls, all of which `body` describes."""
        return Grammar(body=body, thinking=self.thinking, budget=budget)

    def budget(self, field: str, most: int) -> ThinkingBudget | None:
        """Return the limit of `most` tokens of reasoning that `field` of a request sets; None if
        the answer has no reasoning. Raise InvalidRequest if no marker closes the reasoning."""
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

    tools, reasoning  names in docs/formats.md; None: this model's answers have none
    why               the reason, in words for the operator
    teachable         the model's chat template has no place for tools, so a prompt can describe
                      them

    Raises ValueError, listing the known names, if a name is unknown. Raises WrongOption if the
    checkpoint's own format is requested and there is none that can be used, or if a format is
    requested whose markers this model cannot write.
    """

    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        tools: str = AUTO,
        reasoning: str = AUTO,
        *,
        teachable: bool = False,
    ) -> None:
        added = tokenizer.added_tokens.values()
        found = detect(_templates_of(card), tokenizer.token_id, added)
        if teachable and not found.written:
            found = msgspec.structs.replace(found, tools=TAUGHT, why=found.why + _TEACHES)
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
        self._tokenizer = tokenizer
        format = format.fitted([*added, *suffixed_markers(_templates_of(card) or "")])
        if own is None:
            _check_markers(format, tools, reasoning, card, tokenizer)
        self._formats = {True: format, False: _without_calls(format)}
        self._bound: dict[Format, BoundFormat] = {}

    def begin(self, prompt: str, kwargs: Mapping[str, Any], *, calls: bool) -> AnswerStart:
        """Return how the answers to `prompt` are parsed.

        kwargs  the effective template kwargs with which `prompt` was rendered
        calls   the answer is searched for tool calls
        """
        format = self._formats[calls]
        opener, inside, closed = "", False, not _frames_content(format)
        if format.reasoning is not None:
            tail = prompt[-TAIL_CHARS:]
            begun = start(format.reasoning, tail, kwargs)
            inside = begun.inside
            opener = _opened_by(tail, format.reasoning) if inside else ""
            closed = not inside and says_inside(tail, format.reasoning) is False
            format = msgspec.structs.replace(format, reasoning=begun.format)
        if not format.markers() and format.tools is None and format.reasoning is None:
            return AnswerStart()
        bound = self._bind(format)
        before = frame_of(bound).before.rstrip("\n")
        answering = bool(before) and prompt.rstrip("\n").endswith(before)
        closed = closed or answering
        return AnswerStart(bound, inside, closed, thinking_marks(bound), opener, answering)

    def ending(self, begun: AnswerStart) -> str:
        """Return a short end of a prompt for which `begin` returns the same as `begun`."""
        reasoning = self._formats[True].reasoning
        if reasoning is None:
            return ""
        markers = reasoning.open if begun.inside else reasoning.close if begun.closed else ()
        return markers[0] if markers else ""

    def _bind(self, format: Format) -> BoundFormat:
        """Bind the format to the vocabulary, cached: one model is parsed in only a few ways."""
        if format not in self._bound:
            self._bound[format] = bind(format, self._tokenizer)
        return self._bound[format]


def _templates_of(card: ModelCard) -> str | None:
    """Return the text of the model's templates, or None if it has none."""
    sources = [each for each in (card.tool_use_template, card.chat_template) if each is not None]
    return "\n".join(sources) if sources else None


def _opened_by(prompt_tail: str, format: ReasoningFormat) -> str:
    """Return the last marker of the prompt that opens a block, or ""."""
    places = [(prompt_tail.rfind(marker), marker) for marker in format.open]
    return max([place for place in places if place[0] >= 0], default=(-1, ""))[1]


def _calls_that_end(format: Format) -> tuple[str, ...]:
    """Return the markers of calls that also end a block of reasoning."""
    ends = format.reasoning is not None and format.reasoning.calls_end_it
    return format.tools.openers() if ends and isinstance(format.tools, CallSyntax) else ()


def check_names(tools: str, reasoning: str) -> None:
    """Raise ValueError, listing the known names, if the operator's names are unknown."""
    if OWN not in (tools, reasoning):
        format_of(_chosen(tools, None), _chosen(reasoning, None))
    elif not {tools, reasoning} <= {OWN, AUTO}:
        raise ValueError(
            f"{_option(tools)} {OWN} reads calls and reasoning together, as the checkpoint "
            f"describes them; the other option must be {OWN} or {AUTO}"
        )


def _option(tools: str) -> str:
    """Return the option that requests the checkpoint's own format."""
    return TOOLS_OPTION if tools == OWN else REASONING_OPTION


def _own_format(
    card: ModelCard, tools: str, reasoning: str, teachable: bool
) -> tuple[Format | None, str]:
    """Return the checkpoint's own format, if it is used, and the reason.

    Raise WrongOption if it is requested and cannot be used.
    """
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
        return None, "; the checkpoint's response_template is not used, as the model is taught"
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
"""A marker of this shape is one token in every model that writes it, or made of such tokens."""
_MIN_PART_CHARS = 3
"""A shorter token is not evidence for a marker that contains it."""


def _check_markers(
    format: Format, tools: str, reasoning: str, card: ModelCard, tokenizer: Tokenizer
) -> None:
    """Raise WrongOption if an option names a format that can begin only with a control token, and
    the model has no such token.

    Other markers (`<tool_call>`) are not checked: a model may write them as ordinary text.
    """
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
    """Return the markers of which one begins a call; none if a call may begin without a marker."""
    if isinstance(format.tools, AnswerSyntax):
        return tuple(filter(_CONTROL_TOKEN.fullmatch, format.tools.markers()))
    if format.tools is None or format.tools.start_openers():
        return ()
    return format.tools.openers()


def _is_known(marker: str, template: str, tokenizer: Tokenizer) -> bool:
    """Whether the model has the marker as a token, or made of tokens, or in its template."""
    if marker in template or tokenizer.token_id(marker) is not None:
        return True
    added = tokenizer.added_tokens.values()
    return any(len(part) >= _MIN_PART_CHARS and part in marker for part in added)


def _without_calls(format: Format) -> Format:
    """Return the format for an answer in which nothing is a call.

    A syntax that covers the whole answer is still needed.
    """
    if isinstance(format.tools, AnswerSyntax):
        return format
    return Format(None, format.reasoning)
