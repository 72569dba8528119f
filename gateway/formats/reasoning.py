"""Reasoning formats as data: their markers, and whether an answer starts inside reasoning.

The end of the rendered prompt shows whether an answer starts inside a block of reasoning
(`ends_inside`). A template may open a block, open and close it, or leave both to the model. The
prompt shows this more reliably than any option. Only if the prompt has no block do the format's
default and the request's template kwargs decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from gateway.formats.lexicon import marker_suffix, with_suffix

OFF = (False, 0, "none", "no_think", "disabled", "off", "false")
"""Values of a template kwarg that switch reasoning off."""


class Switch(msgspec.Struct, frozen=True):
    """The template kwargs that switch reasoning on or off.

    keys     names of the kwargs; the first one that is given decides
    default  whether reasoning is on if none of them is given
    """

    keys: tuple[str, ...]
    default: bool = True

    def is_on(self, kwargs: Mapping[str, Any]) -> bool:
        for key in self.keys:
            if (value := kwargs.get(key)) is not None:
                return value not in OFF
        return self.default


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The markup of one model family's reasoning."""

    #: Markers that start a block of reasoning.
    open: tuple[str, ...] = ()
    #: Markers that end a block.
    close: tuple[str, ...] = ()
    #: Text that may follow the opening marker and is not part of the reasoning.
    label: tuple[str, ...] = ()
    #: Whether a block may start only before any content.
    only_at_start: bool = False
    #: Whether the opener of a tool call always ends the block. In other formats, a call inside the
    #: block counts only if it names a tool of the request.
    calls_end_it: bool = False
    #: Whether calls in the block are only drafts, which are emitted as text. Set for answers that a
    #: grammar prevents from ending inside the block.
    drafts_calls: bool = False
    #: Markers that some models write before the answer proper; they are not content.
    wrap_open: tuple[str, ...] = ()
    #: Markers that end the answer proper.
    wrap_close: tuple[str, ...] = ()
    #: Blanks that models write between these markers and the answer.
    wrap_blank: str = ""
    #: Markers that start a message. The text up to the next marker names the message's recipient.
    header: tuple[str, ...] = ()
    #: Markers that have no meaning in content.
    ignored: tuple[str, ...] = ()
    #: Text emitted as content before everything else.
    prefix: str = ""
    #: The template kwargs that switch reasoning off, if there are any.
    switch: Switch | None = None
    #: Whether markers are ordinary text while reasoning is switched off.
    identity: bool = False
    #: Whether an answer starts inside a block if the prompt has no block.
    default_inside: bool = False
    #: Whether a request may set `force_nonempty_content`: if the answer has no content, the
    #: reasoning is repeated as content.
    may_force: bool = False
    #: Whether the request sets it.
    force_content: bool = False
    #: Whether the markers may have a suffix, which is then found in the vocabulary.
    suffixed: bool = False

    def fitted(self, vocabulary: Collection[str]) -> ReasoningFormat:
        """Return this format for a checkpoint whose added tokens are `vocabulary`. If its markers
        have a suffix, those with the suffix come first."""
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

    def silent_markers(self) -> tuple[str, ...]:
        """Return the markers that may occur outside the reasoning and have no meaning of their
        own."""
        return (*self.header, *self.wrap_open, *self.wrap_close, *self.ignored)


class ReasoningStart(msgspec.Struct, frozen=True):
    """A reasoning format, and whether one answer starts inside a block of reasoning."""

    format: ReasoningFormat
    inside: bool


NO_REASONING = ReasoningFormat()

BOUNDARY = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|\[/?INST\]|</?s>"
    r"|<(?:start|end)_of_turn>|<\|?turn\|?>|<eos>|<assistant>"
)
"""Separators of turns in prompts. Only reasoning markers after the last separator belong to the
answer: a user may have written the earlier ones.
"""


def reasoning_start(
    format: ReasoningFormat, prompt_tail: str, kwargs: Mapping[str, Any] | None = None
) -> ReasoningStart:
    """Return how to parse the reasoning of an answer.

    prompt_tail  the end of the rendered prompt, with special tokens spelt out
    kwargs       the effective template kwargs with which the prompt was rendered
    """
    given = kwargs or {}
    is_on = format.switch is None or format.switch.is_on(given)
    found = ends_inside(prompt_tail, format)
    inside = found if found is not None else format.default_inside and is_on
    if format.identity and not is_on and not inside:
        return ReasoningStart(NO_REASONING, False)
    if format.may_force and given.get("force_nonempty_content"):
        format = msgspec.structs.replace(format, force_content=True)
    return ReasoningStart(format, inside)


def ends_inside(prompt_tail: str, format: ReasoningFormat) -> bool | None:
    """Return whether the last turn of the prompt leaves a block of reasoning open. Return None if
    the turn has no block."""
    turn = prompt_tail[_last_boundary(prompt_tail, format) :]
    opened = max((turn.rfind(marker) for marker in format.open), default=-1)
    closed = max((turn.rfind(marker) for marker in format.close), default=-1)
    return None if opened == closed == -1 else opened > closed


def _last_boundary(text: str, format: ReasoningFormat) -> int:
    """Return the position after the last separator of turns. The format's own markers are not
    separators, even if they look like a separator or contain one."""
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
    "apriel": ReasoningFormat(
        open=("Here are my reasoning steps:",),
        close=("[BEGIN FINAL RESPONSE]",),
        ignored=("[END FINAL RESPONSE]",),
        only_at_start=True,
    ),
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
    "granite33": _like_think(
        wrap_open=("<response>",), wrap_close=("</response>",), switch=_EITHER_OFF
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
    "minicpm3": ReasoningFormat(open=("<|thought_start|>",), close=("<|thought_end|>",)),
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
    "solar_open": ReasoningFormat(
        open=("<|think|>",),
        close=("<|end|>",),
        wrap_open=("<|content|>",),
        wrap_close=("<|end|>", "<|flush|>"),
        header=("<|begin|>",),
        ignored=("<|calls|>",),
    ),
    "step3": _INSIDE,
    "step3p5": _QWEN,
}

_MUSE = ReasoningFormat(open=(" to=self<|message|>",), close=("<|eom|>",))

WHOLE: Mapping[str, ReasoningFormat] = {
    "openai": ReasoningFormat(open=("<|channel|>analysis<|message|>",), close=("<|end|>",)),
    "kimi_k3": ReasoningFormat(
        open=("<|open|>think<|sep|>",), close=("<|close|>think<|sep|>",), switch=_EITHER
    ),
    "muse_glimmer": _MUSE,
    "muse": _MUSE,
}
"""The reasoning markers in prompts, for each tool format that covers the whole answer."""
