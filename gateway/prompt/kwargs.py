"""The effective chat-template kwargs: one pure function, asked by everyone who needs to know.

Rendering, both parsers, the grammar gate and every API use its one result, so they cannot disagree
about whether the model thinks.

Clients ask for thinking in many spellings, and templates read it in others. Here they meet: what
is asked becomes one `ThinkingOptions` (think or not, how hard), and the wish becomes the names and
words that this model's template reads (`ThinkingProfile`). Spellings that the template does not
read are left out; everything that is not about thinking passes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gateway.prompt.thinking import EFFORT, MODE, OFF_WORDS, ON_WORDS, SWITCHES, ThinkingProfile
from protocol.errors import InvalidRequest
from protocol.sampling import MAX_TOKENS

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""From least to most."""

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What a request says elsewhere, or what would change the rendering and not the prompt."""

KWARGS = "chat_template_kwargs"
_ABOUT_THINKING = frozenset({*SWITCHES, MODE, EFFORT})
_TYPES = {"enabled": True, "adaptive": True, "disabled": False}
"""Anthropic's and others' `thinking: {"type": ...}`."""
_DEFAULT_EFFORT = "medium"
UNLIMITED = -1
"""As a budget."""


class ThinkingFields(msgspec.Struct, frozen=True, kw_only=True):
    """A request's own fields about thinking, as JSON gave them.

    reasoning_effort  OpenAI's
    reasoning         {"effort": ..., "enabled": ..., "max_tokens": ...}
    thinking          {"type": "enabled" | "adaptive" | "disabled", "budget_tokens": ...}, or a bool
    enable_thinking   a bool
    thinking_token_budget
    """

    reasoning_effort: Any = None
    reasoning: Any = None
    thinking: Any = None
    enable_thinking: Any = None
    thinking_token_budget: Any = None


class ThinkingOptions(msgspec.Struct, frozen=True):
    """What is wanted; None: nothing was said. `mode` is the template's own word for it, if the
    request used one."""

    thinks: bool | None = None
    mode: str | None = None
    effort: str | None = None

    def over(self, weaker: ThinkingOptions) -> ThinkingOptions:
        switch = weaker if self.thinks is None else self
        effort = weaker.effort if self.effort is None else self.effort
        return ThinkingOptions(switch.thinks, switch.mode, effort)

    @property
    def settled(self) -> ThinkingOptions:
        """An effort also says whether to think, where nothing else does."""
        if self.thinks is None and self.effort is not None:
            return ThinkingOptions(self.effort != "none", None, self.effort)
        return self


def effective_kwargs(
    fields: ThinkingFields | None = None,
    request_kwargs: Mapping[str, Any] | None = None,
    server_defaults: Mapping[str, Any] | None = None,
    profile: ThinkingProfile | None = None,
) -> dict[str, Any]:
    """What the template sees besides messages, tools and documents. From weak to strong:

    1. the server's defaults;
    2. the request's effort, which also says whether to think (all but "none" do);
    3. the request's switches, among its `chat_template_kwargs` or as fields of its own.

    An effort as the request's own field is stronger than one among its kwargs. The values are
    shared with the arguments and must not be changed. Raises InvalidRequest naming the field: a
    reserved name, a value without meaning, two spellings that disagree.
    """
    asked, defaults = dict(request_kwargs or {}), dict(server_defaults or {})
    profile = profile or ThinkingProfile()
    wish = _wish(fields or ThinkingFields(), asked, profile)
    wish = wish.over(_wish(ThinkingFields(), defaults, profile))
    rest = {
        name: value for name, value in (defaults | asked).items() if name not in _ABOUT_THINKING
    }
    return rest | _told(wish, profile)


def thinking_budget(fields: ThinkingFields) -> tuple[str, int] | None:
    """How many tokens of thinking there may be at most: (the field that says so, the number). None:
    as many as the model likes. Raises InvalidRequest naming the field."""
    said = list(_budgets(fields))
    budget = _agreed(said)
    return None if budget in (None, UNLIMITED) else (said[0][0], budget)


def thinks(kwargs: Mapping[str, Any], profile: ThinkingProfile) -> bool | None:
    """What effective kwargs tell the template: to think, not to, or nothing (its own default)."""
    for name in profile.switches:
        if name in kwargs:
            return bool(kwargs[name])
    if profile.mode is not None and MODE in kwargs:
        return bool(kwargs[MODE] != profile.mode[1])
    if profile.reads_effort and EFFORT in kwargs:
        return kwargs[EFFORT] not in OFF_WORDS
    return None


# ---- what is asked


def _wish(
    fields: ThinkingFields, kwargs: Mapping[str, Any], profile: ThinkingProfile
) -> ThinkingOptions:
    _check_names(kwargs)
    thinks = _agreed(_switches(fields, kwargs, profile))
    mode = kwargs.get(MODE)
    effort = _agreed(_efforts(fields))
    if effort is None and kwargs.get(EFFORT) is not None:
        effort = _effort(kwargs[EFFORT], f"{KWARGS}.{EFFORT}", profile)
    own_word = mode if mode in profile.mode_words else None
    return ThinkingOptions(thinks, own_word, effort).settled


def _check_names(kwargs: Iterable[str]) -> None:
    for name in kwargs:
        if name in RESERVED:
            raise InvalidRequest(f"{name} cannot be set in {KWARGS}", param=f"{KWARGS}.{name}")


def _agreed(said: Iterable[tuple[str, Any]]) -> Any:
    """The one value of all (field, value); None where there is none."""
    first: tuple[str, Any] | None = None
    for field, value in said:
        if first is None:
            first = (field, value)
        elif value != first[1]:
            raise InvalidRequest(f"{first[0]} and {field} contradict each other", param=field)
    return first[1] if first else None


def _switches(
    fields: ThinkingFields, kwargs: Mapping[str, Any], profile: ThinkingProfile
) -> Iterator[tuple[str, bool]]:
    """Every spelling of on or off that is there, as (field, value)."""
    if fields.enable_thinking is not None:
        yield "enable_thinking", _flag(fields.enable_thinking, "enable_thinking")
    if fields.thinking is not None:
        yield "thinking", _typed(fields.thinking, "thinking")
    enabled = _member(fields.reasoning, "enabled")
    if enabled is not None:
        yield "reasoning.enabled", _flag(enabled, "reasoning.enabled")
    for field, budget in _budgets(fields):
        if budget == 0:
            yield field, False
    for name in SWITCHES:
        if kwargs.get(name) is not None:
            field = f"{KWARGS}.{name}"
            yield field, _typed(kwargs[name], field)
    if kwargs.get(MODE) is not None:
        yield f"{KWARGS}.{MODE}", _mode(kwargs[MODE], profile)


def _efforts(fields: ThinkingFields) -> Iterator[tuple[str, str]]:
    for field, effort in (
        ("reasoning_effort", fields.reasoning_effort),
        ("reasoning.effort", _member(fields.reasoning, "effort")),
    ):
        if effort is not None:
            yield field, _effort(effort, field)


def _budgets(fields: ThinkingFields) -> Iterator[tuple[str, int]]:
    typed = fields.thinking if isinstance(fields.thinking, Mapping) else {}
    for field, budget in (
        ("thinking_token_budget", fields.thinking_token_budget),
        ("thinking.budget_tokens", typed.get("budget_tokens")),
        ("reasoning.max_tokens", _member(fields.reasoning, "max_tokens")),
    ):
        if budget is not None:
            yield field, _number(budget, field)


def _number(value: Any, field: str) -> int:
    if type(value) is not int or not UNLIMITED <= value <= MAX_TOKENS:
        raise InvalidRequest(
            f"{field} must be a whole number from 0 to {MAX_TOKENS:,}, or {UNLIMITED} for no "
            f"limit; it is {value!r}",
            param=field,
        )
    return value


def _member(reasoning: Any, name: str) -> Any:
    if reasoning is None:
        return None
    if not isinstance(reasoning, Mapping):
        raise InvalidRequest("reasoning must be an object", param="reasoning")
    return reasoning.get(name)


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{field} must be true or false; it is {value!r}", param=field)
    return value


def _typed(value: Any, field: str) -> bool:
    if not isinstance(value, Mapping):
        return _flag(value, field)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InvalidRequest(
            f"{field}.type must be one of {', '.join(_TYPES)}; it is {kind!r}",
            param=f"{field}.type",
        )
    return _TYPES[kind]


def _mode(value: Any, profile: ThinkingProfile) -> bool:
    if isinstance(value, bool):
        return value
    known = dict.fromkeys((*profile.mode_words, *ON_WORDS, *OFF_WORDS))
    if not isinstance(value, str) or value not in known:
        raise InvalidRequest(
            f"{KWARGS}.{MODE} must be one of {', '.join(known)}; it is {value!r}",
            param=f"{KWARGS}.{MODE}",
        )
    return value not in OFF_WORDS


def _effort(value: Any, field: str, profile: ThinkingProfile | None = None) -> str:
    """One of ours; or, where `profile` is given, a word of the template's own."""
    own = profile.efforts if profile else ()
    if not isinstance(value, str) or value not in (*REASONING_EFFORTS, *own):
        words = ", ".join(dict.fromkeys((*REASONING_EFFORTS, *own)))
        raise InvalidRequest(f"{field} must be one of {words}; it is {value!r}", param=field)
    return "none" if value in OFF_WORDS else value


# ---- what is told


def _told(wish: ThinkingOptions, profile: ThinkingProfile) -> dict[str, Any]:
    """The wish in the template's own names and words."""
    told: dict[str, Any] = {}
    if wish.thinks is not None:
        told |= dict.fromkeys(profile.switches, wish.thinks)
        if profile.mode is not None:
            told[MODE] = wish.mode or profile.mode[0 if wish.thinks else 1]
    effort = _told_effort(wish, profile) if profile.reads_effort else None
    return told if effort is None else told | {EFFORT: effort}


def _told_effort(wish: ThinkingOptions, profile: ThinkingProfile) -> str | None:
    """None: the template's own default. Where there is no switch, the effort is the switch."""
    off = next((word for word in profile.efforts if word in OFF_WORDS), None)
    if wish.thinks is False:
        if off is None and not profile.efforts and not profile.has_switch:
            return "none"
        return off
    if wish.effort is None or wish.effort == "none":
        needs_word = wish.thinks and off is not None and not profile.has_switch
        return _nearest(_DEFAULT_EFFORT, profile.efforts) if needs_word else None
    return _nearest(wish.effort, profile.efforts)


def _nearest(effort: str, words: tuple[str, ...]) -> str:
    """The template's word for an effort: the same, or the one least away; of two, the greater. One
    that knows a single word treats all others alike, so any will do."""
    if len(words) < 2 or effort in words:
        return effort
    ranks = {word: REASONING_EFFORTS.index(word) for word in words if word in REASONING_EFFORTS[1:]}
    rank = REASONING_EFFORTS.index(effort)
    return min(ranks, key=lambda word: (abs(ranks[word] - rank), -ranks[word]), default=effort)
