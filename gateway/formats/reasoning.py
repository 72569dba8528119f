"""Reasoning formats as data: their markers, and where an answer starts.

The end of the rendered prompt shows whether an answer starts inside a block of reasoning
(`says_inside`). Templates open a block, close it at once, or leave it to the model, and the
prompt shows which better than any flag. The format's default and the request's switch count only if
the prompt shows nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gateway.formats.lexicon import marker_suffix, with_suffix

OFF = (False, 0, "none", "no_think", "disabled", "off", "false")
"""Values of a template's switch that mean no reasoning."""


class Switch(msgspec.Struct, frozen=True):
    """A template's own switch for reasoning.

    keys     template kwargs; the first that is given decides
    default  the value if none is given
    """

    keys: tuple[str, ...]
    default: bool = True

    def is_on(self, kwargs: Mapping[str, Any]) -> bool:
        for key in self.keys:
            if (value := kwargs.get(key)) is not None:
                return value not in OFF
        return self.default


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The markup of one model family's reasoning."""

    #: Markers that start a block of reasoning.
    open: tuple[str, ...] = ()
    #: Markers that end it.
    close: tuple[str, ...] = ()
    #: Text that may follow the opening marker and is not part of the reasoning.
    label: tuple[str, ...] = ()
    #: A block may start only before any content.
    only_at_start: bool = False
    #: The first marker of a tool call ends the block, whatever follows it. In other formats a call
    #: in the block is one if it names a tool of the request.
    calls_end_it: bool = False
    #: Calls in the block are drafts, and text: the answer cannot end in it.
    drafts_calls: bool = False
    #: Markers that some models write before the answer proper, at its start; not content.
    wrap_open: tuple[str, ...] = ()
    #: Markers after the answer proper.
    wrap_close: tuple[str, ...] = ()
    #: Blanks that models write between these markers and the answer.
    wrap_blank: str = ""
    #: Markers that start a message; the text up to the next marker names its recipient.
    header: tuple[str, ...] = ()
    #: Markers without a meaning in content.
    ignored: tuple[str, ...] = ()
    #: Emitted as content before everything else.
    prefix: str = ""
    #: How the template is asked to leave reasoning out.
    switch: Switch | None = None
    #: With the switch off, markers are ordinary text.
    identity: bool = False
    #: An answer starts inside a block unless the prompt shows otherwise.
    default_inside: bool = False
    #: The request may ask for the reasoning as content if the answer has no content.
    may_force: bool = False
    #: The request does ask for it.
    force_content: bool = False
    #: The markers may have a suffix that is found in the vocabulary.
    suffixed: bool = False

    def fitted(self, vocabulary: Collection[str]) -> ReasoningFormat:
        """Return the same format as a checkpoint with these added tokens writes it."""
        if not self.suffixed or not marker_suffix(vocabulary):
            return self
        open_ = (with_suffix(self.open[0], vocabulary), *self.open)
        close = (with_suffix(self.close[0], vocabulary), *self.close)
        return msgspec.structs.replace(
            self,
            suffixed=False,
            open=tuple(dict.fromkeys(open_)),
            close=tuple(dict.fromkeys(close)),
        )

    def markers(self) -> tuple[str, ...]:
        """Return every marker that a vocabulary may have as one token."""
        answer = self.wrap_open + self.wrap_close
        return self.open + self.close + answer + self.header + self.ignored


class ReasoningStart(msgspec.Struct, frozen=True):
    """How one answer is parsed from its first token on."""

    format: ReasoningFormat
    inside: bool


NO_REASONING = ReasoningFormat()

BOUNDARY = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|\[/?INST\]|</?s>"
    r"|<(?:start|end)_of_turn>|<\|?turn\|?>|<eos>|<assistant>"
)
"""Separators of turns in prompts. A marker of the format before the last separator has no
meaning for the answer: a user may have written it.
"""


def start(
    format: ReasoningFormat, prompt_tail: str, kwargs: Mapping[str, Any] | None = None
) -> ReasoningStart:
    """Return how to parse an answer to a prompt that ends with `prompt_tail`, special tokens spelt
    out.

    kwargs  the effective template kwargs with which the prompt was rendered
    """
    given = kwargs or {}
    is_on = format.switch is None or format.switch.is_on(given)
    said = says_inside(prompt_tail, format)
    inside = said if said is not None else format.default_inside and is_on
    if format.identity and not is_on and not inside:
        return ReasoningStart(NO_REASONING, False)
    if format.may_force and given.get("force_nonempty_content"):
        format = msgspec.structs.replace(format, force_content=True)
    return ReasoningStart(format, inside)


def says_inside(prompt_tail: str, format: ReasoningFormat) -> bool | None:
    """Return whether the last turn of the prompt leaves a block of reasoning open; None if it
    has none.
    """
    turn = prompt_tail[_last_boundary(prompt_tail, format) :]
    opened = max((turn.rfind(marker) for marker in format.open), default=-1)
    closed = max((turn.rfind(marker) for marker in format.close), default=-1)
    return None if opened == closed == -1 else opened > closed


def _last_boundary(text: str, format: ReasoningFormat) -> int:
    """Return the position after the last separator of turns.

    The format's own markers are not separators, though they may look alike or contain one.
    """
    own = sorted({*format.open, *format.close, *format.wrap_open}, key=len, reverse=True)
    either = re.compile("|".join([*map(re.escape, own), BOUNDARY.pattern]))
    last = 0
    for found in either.finditer(text):
        if found[0] not in own:
            last = found.end()
    return last


THINK = ReasoningFormat(open=("<think>",), close=("</think>",))
"""The markers of most models."""

_ENABLE = Switch(("enable_thinking",))
_EITHER = Switch(("thinking", "enable_thinking"))
_EITHER_OFF = Switch(("thinking", "enable_thinking"), default=False)


def _like_think(**options: Any) -> ReasoningFormat:
    return msgspec.structs.replace(THINK, **options)


_COMMAND = ReasoningFormat(
    open=("<|START_THINKING|>",),
    close=("<|END_THINKING|>",),
    wrap_open=("<|START_RESPONSE|>", "<|START_TEXT|>"),
    wrap_close=("<|END_RESPONSE|>", "<|END_TEXT|>"),
)
_DEEPSEEK_V4 = _like_think(switch=_EITHER_OFF, identity=True)
_QWEN = _like_think(switch=_ENABLE)
_GLM = _like_think(switch=_EITHER)
_FORCING = _like_think(switch=_ENABLE, may_force=True)
_INSIDE = _like_think(default_inside=True)
_HY_OPEN, _HY_CLOSE = ("<think>", "<think:opensource>"), ("</think>", "</think:opensource>")

REASONING: Mapping[str, ReasoningFormat] = {
    "apertus": ReasoningFormat(open=("<|inner_prefix|>",), close=("<|inner_suffix|>",)),
    "cohere_command3": _COMMAND,
    "cohere_command4": _COMMAND,
    "deepseek_r1": _INSIDE,
    "deepseek_v3": _like_think(switch=_EITHER_OFF, identity=True, default_inside=True),
    "deepseek_v4": _DEEPSEEK_V4,
    "deepseek_v41": _DEEPSEEK_V4,
    "ernie45": _like_think(
        wrap_open=("<response>",), wrap_close=("</response>",), wrap_blank="\n", default_inside=True
    ),
    "gemma4": ReasoningFormat(
        open=("<|channel>",),
        close=("<channel|>",),
        label=("thought\n",),
        switch=Switch(("enable_thinking",), default=False),
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": ReasoningFormat(
        open=("Here is my thought process:", "Here's my thought process:"),
        close=("Here is my response:", "Here's my response:"),
        only_at_start=True,
    ),
    "granite_thinking_parser": _FORCING,
    "holo2": _like_think(switch=_EITHER, identity=True, default_inside=True),
    "hunyuan_a13b": _like_think(
        wrap_open=("<answer>",), wrap_close=("</answer>",), wrap_blank="\n"
    ),
    "hy_v3": ReasoningFormat(
        open=_HY_OPEN,
        close=_HY_CLOSE,
        switch=Switch(("reasoning_effort",), default=False),
        identity=True,
        suffixed=True,
    ),
    "hy_v4": ReasoningFormat(
        open=_HY_OPEN,
        close=_HY_CLOSE,
        switch=Switch(("reasoning_effort",)),
        identity=True,
        suffixed=True,
    ),
    "inkling": ReasoningFormat(
        open=("<|content_thinking|>",),
        close=("<|end_message|>",),
        wrap_open=("<|content_text|>",),
        wrap_close=("<|end_message|>",),
        header=("<|message_model|>",),
        ignored=("<|content_model_end_sampling|>",),
    ),
    "k2_horizon": ReasoningFormat(
        open=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        close=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        switch=_ENABLE,
    ),
    "kimi_k2": _like_think(switch=_EITHER, calls_end_it=True),
    "ling3": _GLM,
    "mimo": _QWEN,
    "minicpmv": _QWEN,
    "minimax_m2": _INSIDE,
    "minimax_m2_append_think": ReasoningFormat(prefix="<think>"),
    "minimax_m3": ReasoningFormat(
        open=("<mm:think>",), close=("</mm:think>",), switch=Switch(("thinking_mode",))
    ),
    "mistral": ReasoningFormat(open=("[THINK]", "<think>"), close=("[/THINK]", "</think>")),
    "nemotron_v3": _FORCING,
    "olmo3": _INSIDE,
    "plamo3": ReasoningFormat(
        open=("<|plamo:begin_think:plamo|>",), close=("<|plamo:end_think:plamo|>",), switch=_ENABLE
    ),
    "poolside_v1": _QWEN,
    "qwen3": _QWEN,
    "seed_oss": ReasoningFormat(open=("<seed:think>",), close=("</seed:think>",)),
    "step3": _INSIDE,
    "step3p5": _QWEN,
}

WHOLE: Mapping[str, ReasoningFormat] = {
    "openai": ReasoningFormat(open=("<|channel|>analysis<|message|>",), close=("<|end|>",)),
    "kimi_k3": ReasoningFormat(
        open=("<|open|>think<|sep|>",), close=("<|close|>think<|sep|>",), switch=_EITHER
    ),
    "muse_glimmer": ReasoningFormat(open=(" to=self<|message|>",), close=("<|eom|>",)),
}
"""Markers that open and close reasoning in prompts, for tool formats that cover the whole
answer.
"""
