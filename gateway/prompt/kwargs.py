"""Computes the effective chat-template kwargs (`effective_kwargs`).

Rendering, parsers, grammars and all APIs use these kwargs, so they agree on whether the model
thinks before it answers.

Clients have many fields for requesting thinking, and templates have many variables for it. So the
fields of a request become one `ThinkingOptions` (whether to think, and with which effort). These
options become the variables and words that the model's template reads, which its `ThinkingProfile`
lists. Kwargs about thinking that the template does not read are dropped. Other kwargs are passed on
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gateway.prompt.thinking import EFFORT, MODE, OFF_WORDS, ON_WORDS, SWITCHES, ThinkingProfile
from protocol.engine.sampling import MAX_TOKENS
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_words import one_of

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The efforts of OpenAI's API and of clients, from least to most."""

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
"""Names that are not allowed in `chat_template_kwargs`. Requests set them in other fields, or they
are parameters of transformers' rendering function and not variables of a template."""

KWARGS = "chat_template_kwargs"
_ABOUT_THINKING = frozenset({*SWITCHES, MODE, EFFORT})
_TYPES = {"enabled": True, "adaptive": True, "disabled": False}
"""The value of "type" in Anthropic's field `thinking` -> whether it turns thinking on."""
_DEFAULT_EFFORT = "medium"
UNLIMITED = -1
"""The value of a thinking budget that means no limit."""


class ThinkingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The request fields that control thinking, besides `chat_template_kwargs`. Their values are
    JSON that has not been validated."""

    #: OpenAI's field: one of REASONING_EFFORTS.
    reasoning_effort: Any = None
    #: {"effort": ..., "enabled": ..., "max_tokens": ...}
    reasoning: Any = None
    #: A bool, or {"type": "enabled" | "adaptive" | "disabled", "budget_tokens": ...} (Anthropic's).
    thinking: Any = None
    #: A bool.
    enable_thinking: Any = None
    #: Maximum number of reasoning tokens, or UNLIMITED.
    thinking_token_budget: Any = None


class ThinkingOptions(msgspec.Struct, frozen=True):
    """Options that control thinking. A field is None if it is not specified."""

    #: Whether the model thinks before it answers.
    thinks: bool | None = None
    #: The word in the request's `thinking_mode`, if the template compares with that word.
    mode: str | None = None
    #: The reasoning effort.
    effort: str | None = None

    def with_fallback(self, other: ThinkingOptions) -> ThinkingOptions:
        """Return a copy in which unspecified options are taken from `other`. `thinks` and `mode`
        are always taken from the same object."""
        switch = other if self.thinks is None else self
        effort = other.effort if self.effort is None else self.effort
        return ThinkingOptions(switch.thinks, switch.mode, effort)

    def with_derived_switch(self) -> ThinkingOptions:
        """Return these options. If only the effort is specified, derive `thinks` from it."""
        if self.thinks is None and self.effort is not None:
            return ThinkingOptions(self.effort != "none", None, self.effort)
        return self


def effective_kwargs(
    fields: ThinkingFields | None = None,
    request_kwargs: Mapping[str, Any] | None = None,
    server_defaults: Mapping[str, Any] | None = None,
    profile: ThinkingProfile | None = None,
) -> dict[str, Any]:
    """Return the template's variables, except messages, tools and documents.

    fields           the request's fields about thinking
    request_kwargs   the request's `chat_template_kwargs`
    server_defaults  the operator's default kwargs
    profile          the thinking options that the template reads

    The first of these that is specified decides whether the model thinks:

    1. the request's switches, in its kwargs or in fields of their own;
    2. the request's effort: "none" turns thinking off, any other effort turns it on;
    3. the operator's defaults.

    An effort in a field of the request overrides one in its kwargs. The values in the result are
    shared with the arguments and must not be modified.

    Raises InvalidRequest, naming the field, for a reserved name, an invalid value, or two fields
    that contradict each other.
    """
    requested, defaults = dict(request_kwargs or {}), dict(server_defaults or {})
    profile = profile or ThinkingProfile()
    options = _options(fields or ThinkingFields(), requested, profile)
    options = options.with_fallback(_options(ThinkingFields(), defaults, profile))
    rest = {
        name: value for name, value in (defaults | requested).items() if name not in _ABOUT_THINKING
    }
    return rest | _template_kwargs(options, profile)


def thinking_budget(fields: ThinkingFields) -> tuple[str, int] | None:
    """Return (name of the request's field, limit on reasoning tokens); None if there is no limit.
    Raises InvalidRequest, naming the field, if a value is invalid or two fields differ."""
    budgets = list(_budgets(fields))
    budget = _common_value(budgets)
    return None if budget in (None, UNLIMITED) else (budgets[0][0], budget)


def thinks(kwargs: Mapping[str, Any], profile: ThinkingProfile) -> bool | None:
    """Return whether the effective kwargs turn thinking on or off; None if they leave it to the
    template's default."""
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
    """Return the thinking options in the fields and kwargs of a request. Raises InvalidRequest."""
    _check_names(kwargs)
    thinks = _common_value(_switches(fields, kwargs, profile))
    mode = kwargs.get(MODE)
    effort = _common_value(_efforts(fields))
    if effort is None and kwargs.get(EFFORT) is not None:
        effort = _effort(kwargs[EFFORT], f"{KWARGS}.{EFFORT}", profile)
    mode_word = mode if mode in profile.mode_words else None
    return ThinkingOptions(thinks, mode_word, effort).with_derived_switch()


def _check_names(kwargs: Iterable[str]) -> None:
    for name in kwargs:
        if name in RESERVED:
            raise InvalidRequest.at(f"{KWARGS}.{name}", "the server sets this argument itself")


def _common_value(pairs: Iterable[tuple[str, Any]]) -> Any:
    """Return the value that all (field, value) pairs have; None if there are no pairs. Raises
    InvalidRequest if two fields have different values."""
    first: tuple[str, Any] | None = None
    for field, value in pairs:
        if first is None:
            first = (field, value)
        elif value != first[1]:
            raise InvalidRequest.at(field, f"contradicts {first[0]}; set only one of them")
    return first[1] if first else None


def _switches(
    fields: ThinkingFields, kwargs: Mapping[str, Any], profile: ThinkingProfile
) -> Iterator[tuple[str, bool]]:
    """Yield (field, whether it turns thinking on) for every field and kwarg that turns thinking on
    or off."""
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
    """Yield (field, effort) for every field that sets an effort."""
    for field, effort in (
        ("reasoning_effort", fields.reasoning_effort),
        ("reasoning.effort", _member(fields.reasoning, "effort")),
    ):
        if effort is not None:
            yield field, _effort(effort, field)


def _budgets(fields: ThinkingFields) -> Iterator[tuple[str, int]]:
    """Yield (field, limit on reasoning tokens) for every field that sets a limit."""
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
        words = f"a whole number from 0 to {MAX_TOKENS:,}, or {UNLIMITED} for no limit"
        raise InvalidRequest.wrong(field, words, value)
    return value


def _member(reasoning: Any, name: str) -> Any:
    if reasoning is None:
        return None
    if not isinstance(reasoning, Mapping):
        raise InvalidRequest.wrong("reasoning", "an object or null", reasoning)
    return reasoning.get(name)


def _flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest.wrong(field, "true or false", value)
    return value


def _typed(value: Any, field: str) -> bool:
    if not isinstance(value, Mapping):
        return _flag(value, field)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InvalidRequest.wrong(f"{field}.type", one_of(_TYPES), kind)
    return _TYPES[kind]


def _mode(value: Any, profile: ThinkingProfile) -> bool:
    if isinstance(value, bool):
        return value
    known = dict.fromkeys((*profile.mode_words, *ON_WORDS, *OFF_WORDS))
    if not isinstance(value, str) or value not in known:
        raise InvalidRequest.wrong(f"{KWARGS}.{MODE}", one_of(known), value)
    return value not in OFF_WORDS


def _effort(value: Any, field: str, profile: ThinkingProfile | None = None) -> str:
    """Return an effort after checking it; "none" for every word that means no thinking.

    profile  None: only REASONING_EFFORTS are allowed; otherwise also the template's own words
    """
    own = profile.efforts if profile else ()
    if not isinstance(value, str) or value not in (*REASONING_EFFORTS, *own):
        words = dict.fromkeys((*REASONING_EFFORTS, *own))
        raise InvalidRequest.wrong(field, one_of(words), value)
    return "none" if value in OFF_WORDS else value


# ---- the template


def _template_kwargs(options: ThinkingOptions, profile: ThinkingProfile) -> dict[str, Any]:
    """Return the options as the variables and words that the template reads."""
    kwargs: dict[str, Any] = {}
    if options.thinks is not None:
        kwargs |= dict.fromkeys(profile.switches, options.thinks)
        if profile.mode is not None:
            kwargs[MODE] = options.mode or profile.mode[0 if options.thinks else 1]
    effort = _template_effort(options, profile) if profile.reads_effort else None
    return kwargs if effort is None else kwargs | {EFFORT: effort}


def _template_effort(options: ThinkingOptions, profile: ThinkingProfile) -> str | None:
    """Return the template's word for the effort, or None if the template's default applies. If the
    template has no switch for thinking, the word also turns thinking on or off."""
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
    """Return the word nearest to an effort. If two words are equally near, the greater one wins.

    The effort is returned unchanged if it is one of the words. It is also returned unchanged if the
    template distinguishes fewer than two words, because it then accepts any word.
    """
    if len(words) < 2 or effort in words:
        return effort
    ranks = {word: REASONING_EFFORTS.index(word) for word in words if word in REASONING_EFFORTS[1:]}
    rank = REASONING_EFFORTS.index(effort)
    return min(ranks, key=lambda word: (abs(ranks[word] - rank), -ranks[word]), default=effort)
