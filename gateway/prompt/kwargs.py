"""The effective chat-template kwargs, from one pure function.

Rendering, parsers, grammars and every API use its result, so they agree on whether the model
thinks.

Clients request thinking in many spellings, and templates read it in others. The request becomes one
`ThinkingOptions` (whether to think, and how hard). These become the names and words that the
model's template reads (`ThinkingProfile`). Spellings that the template does not read are dropped.
Kwargs that are not about thinking pass through unchanged.
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
"""Names that a request sets in other fields, or that would change how rendering works."""

KWARGS = "chat_template_kwargs"
_ABOUT_THINKING = frozenset({*SWITCHES, MODE, EFFORT})
_TYPES = {"enabled": True, "adaptive": True, "disabled": False}
"""Anthropic's and others' `thinking: {"type": ...}`."""
_DEFAULT_EFFORT = "medium"
UNLIMITED = -1
"""A thinking budget without a limit."""


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
    """Options that control thinking. A field is None if it is not specified.

    thinks  whether the model thinks before it answers
    mode    the template's own word for the kind of thinking, if the request used one
    effort  the reasoning effort
    """

    thinks: bool | None = None
    mode: str | None = None
    effort: str | None = None

    def over(self, weaker: ThinkingOptions) -> ThinkingOptions:
        """Return these options, with those of `weaker` for what is not specified."""
        switch = weaker if self.thinks is None else self
        effort = weaker.effort if self.effort is None else self.effort
        return ThinkingOptions(switch.thinks, switch.mode, effort)

    @property
    def settled(self) -> ThinkingOptions:
        """The options with `thinks` derived from the effort, if it is not specified."""
        if self.thinks is None and self.effort is not None:
            return ThinkingOptions(self.effort != "none", None, self.effort)
        return self


def effective_kwargs(
    fields: ThinkingFields | None = None,
    request_kwargs: Mapping[str, Any] | None = None,
    server_defaults: Mapping[str, Any] | None = None,
    profile: ThinkingProfile | None = None,
) -> dict[str, Any]:
    """Return the template's variables besides messages, tools and documents.

    In order of increasing priority:

    1. the server's defaults;
    2. the request's effort, which also turns thinking on, or off if it is "none";
    3. the request's switches, in `chat_template_kwargs` or as fields of their own.

    An effort in the request's own field overrides one in its kwargs. The values are shared with the
    arguments and must not be modified. Raises InvalidRequest, naming the field, for a reserved
    name, an invalid value, or two spellings that contradict each other.
    """
    asked, defaults = dict(request_kwargs or {}), dict(server_defaults or {})
    profile = profile or ThinkingProfile()
    options = _options(fields or ThinkingFields(), asked, profile)
    options = options.over(_options(ThinkingFields(), defaults, profile))
    rest = {
        name: value for name, value in (defaults | asked).items() if name not in _ABOUT_THINKING
    }
    return rest | _template_kwargs(options, profile)


def thinking_budget(fields: ThinkingFields) -> tuple[str, int] | None:
    """Return the limit of reasoning tokens, as (field, number), or None if there is none.

    Raises InvalidRequest, naming the field.
    """
    said = list(_budgets(fields))
    budget = _agreed(said)
    return None if budget in (None, UNLIMITED) else (said[0][0], budget)


def thinks(kwargs: Mapping[str, Any], profile: ThinkingProfile) -> bool | None:
    """Return whether effective kwargs turn thinking on or off; None: the template's default."""
    for name in profile.switches:
        if name in kwargs:
            return bool(kwargs[name])
    if profile.mode is not None and MODE in kwargs:
        return bool(kwargs[MODE] != profile.mode[1])
    if profile.reads_effort and EFFORT in kwargs:
        return kwargs[EFFORT] not in OFF_WORDS
    return None


# ---- the request


def _options(
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
    """Return the common value of all (field, value); None if there is none."""
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
    """Yield every spelling of on or off that the request has, as (field, value)."""
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
    """Check an effort. With a `profile`, the template's own words are allowed too."""
    own = profile.efforts if profile else ()
    if not isinstance(value, str) or value not in (*REASONING_EFFORTS, *own):
        words = ", ".join(dict.fromkeys((*REASONING_EFFORTS, *own)))
        raise InvalidRequest(f"{field} must be one of {words}; it is {value!r}", param=field)
    return "none" if value in OFF_WORDS else value


# ---- the template


def _template_kwargs(options: ThinkingOptions, profile: ThinkingProfile) -> dict[str, Any]:
    """Return the options in the template's own names and words."""
    kwargs: dict[str, Any] = {}
    if options.thinks is not None:
        kwargs |= dict.fromkeys(profile.switches, options.thinks)
        if profile.mode is not None:
            kwargs[MODE] = options.mode or profile.mode[0 if options.thinks else 1]
    effort = _template_effort(options, profile) if profile.reads_effort else None
    return kwargs if effort is None else kwargs | {EFFORT: effort}


def _template_effort(options: ThinkingOptions, profile: ThinkingProfile) -> str | None:
    """Return the template's effort; None: its default. It also serves as a missing switch."""
    off = next((word for word in profile.efforts if word in OFF_WORDS), None)
    if options.thinks is False:
        if off is None and not profile.efforts and not profile.has_switch:
            return "none"
        return off
    if options.effort is None or options.effort == "none":
        needs_word = options.thinks and off is not None and not profile.has_switch
        return _nearest(_DEFAULT_EFFORT, profile.efforts) if needs_word else None
    return _nearest(options.effort, profile.efforts)


def _nearest(effort: str, words: tuple[str, ...]) -> str:
    """Return the template's word nearest to an effort; of two equally near words, the greater.

    A template that compares with a single word treats all others alike, so any word will do.
    """
    if len(words) < 2 or effort in words:
        return effort
    ranks = {word: REASONING_EFFORTS.index(word) for word in words if word in REASONING_EFFORTS[1:]}
    rank = REASONING_EFFORTS.index(effort)
    return min(ranks, key=lambda word: (abs(ranks[word] - rank), -ranks[word]), default=effort)
