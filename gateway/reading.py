"""How a model's answers are read: the formats chosen for it and why, and where each answer starts.

Chosen once per model, from the operator's names or, with "auto", from the chat template and the
vocabulary. A guess is said in the log and in /v1/models, so a wrong one is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.metering import ThinkingMarks, thinking_marks
from gateway.output.detect import Detected, detect
from gateway.output.formats import TOOLS, BoundFormat, Format, bind, format_of
from gateway.output.machine import AnswerSyntax
from gateway.output.reasoning import start
from gateway.text.tokenizer import Tokenizer
from protocol.model_card import ModelCard

AUTO, NONE = "auto", "none"
TAIL_CHARS = 1 << 16
"""How much of a prompt's end is looked at: more than any turn that an answer goes on with."""


class Beginning(msgspec.Struct, frozen=True):
    """How the answers to one prompt are read. `bound` None: all text is content.

    inside  the prompt has already opened the reasoning
    marks   by which the tokens of reasoning are counted, where they can be
    """

    bound: BoundFormat | None = None
    inside: bool = False
    marks: ThinkingMarks | None = None


class Reading:
    """tools, reasoning  names of docs/formats.md; None: no such thing in this model's answers
    why              in words for the operator

    Raises ValueError, with the names there are, for a name that is none.
    """

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, tools: str = AUTO, reasoning: str = AUTO
    ) -> None:
        found = detect(card.chat_template, tokenizer.token_id)
        self.tools = _chosen(tools, found.tools)
        self.reasoning = _chosen(reasoning, found.reasoning)
        self.why = _why(tools, reasoning, found)
        self._tokenizer = tokenizer
        self._formats = {
            True: format_of(self.tools, self.reasoning),
            False: format_of(_unless_whole(self.tools), self.reasoning),
        }
        self._bound: dict[Format, BoundFormat] = {}

    def begin(self, prompt: str, kwargs: Mapping[str, Any], *, calls: bool) -> Beginning:
        """kwargs  the effective ones, with which `prompt` was rendered
        calls   the answer is searched for tool calls
        """
        format = self._formats[calls]
        inside = False
        if format.reasoning is not None:
            begun = start(format.reasoning, prompt[-TAIL_CHARS:], kwargs)
            inside = begun.inside
            format = msgspec.structs.replace(format, reasoning=begun.format)
        if not format.markers() and format.tools is None and format.reasoning is None:
            return Beginning()
        bound = self._bind(format)
        return Beginning(bound, inside, thinking_marks(bound))

    def _bind(self, format: Format) -> BoundFormat:
        """Cached; there are only a few ways to read one model."""
        if format not in self._bound:
            self._bound[format] = bind(format, self._tokenizer)
        return self._bound[format]


def check_names(tools: str, reasoning: str) -> None:
    """The operator's names. Raises ValueError, with the names there are."""
    format_of(_chosen(tools, None), _chosen(reasoning, None))


def _chosen(asked: str, found: str | None) -> str | None:
    return found if asked == AUTO else None if asked == NONE else asked


def _why(tools: str, reasoning: str, found: Detected) -> str:
    if AUTO not in (tools, reasoning):
        return "as the options say"
    told = [f"{kind}: as the options say" for kind, name in _named(tools, reasoning)]
    return "; ".join([*told, found.why])


def _named(tools: str, reasoning: str) -> list[tuple[str, str]]:
    both = (("tool calls", tools), ("reasoning", reasoning))
    return [(kind, name) for kind, name in both if name != AUTO]


def _unless_whole(tools: str | None) -> str | None:
    """A syntax that rules the whole answer is needed to read an answer without calls, too."""
    return tools if tools is not None and isinstance(TOOLS.get(tools), AnswerSyntax) else None
