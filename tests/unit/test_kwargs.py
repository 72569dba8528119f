"""The kwargs of a chat template, from the fields and kwargs of a request and the server's defaults.
Reserved names, such as "messages", are refused in the kwargs of a request."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.prompt.kwargs import (
    REASONING_EFFORTS,
    RESERVED,
    ThinkingFields,
    effective_kwargs,
    thinking_budget,
    thinks,
)
from gateway.prompt.thinking import ThinkingProfile, thinking_profile
from protocol.wire.errors import InvalidRequest
from tests.support import templates

SWITCH = thinking_profile(templates.SWITCH)
THINKS_HARD = thinking_profile(templates.SWITCH_AND_EFFORT)
BY_EFFORT = thinking_profile(templates.EFFORT)
BY_MODE = thinking_profile(templates.MODE)
FREE = thinking_profile(templates.FREE_EFFORT)

Spelling = tuple[dict[str, Any], dict[str, Any]]
"""(fields of the request, its chat_template_kwargs)"""
SWITCHES: dict[str, tuple[Spelling, Spelling]] = {
    "enable_thinking": (({"enable_thinking": True}, {}), ({"enable_thinking": False}, {})),
    "kwargs.enable_thinking": (({}, {"enable_thinking": True}), ({}, {"enable_thinking": False})),
    "kwargs.thinking": (({}, {"thinking": True}), ({}, {"thinking": False})),
    "kwargs.thinking_mode": (
        ({}, {"thinking_mode": "enabled"}),
        ({}, {"thinking_mode": "disabled"}),
    ),
    "thinking": (({"thinking": {"type": "enabled"}}, {}), ({"thinking": {"type": "disabled"}}, {})),
    "reasoning_effort": (({"reasoning_effort": "medium"}, {}), ({"reasoning_effort": "none"}, {})),
    "kwargs.reasoning_effort": (
        ({}, {"reasoning_effort": "medium"}),
        ({}, {"reasoning_effort": "none"}),
    ),
    "reasoning.effort": (
        ({"reasoning": {"effort": "medium"}}, {}),
        ({"reasoning": {"effort": "none"}}, {}),
    ),
    "reasoning.enabled": (
        ({"reasoning": {"enabled": True}}, {}),
        ({"reasoning": {"enabled": False}}, {}),
    ),
}
"""Name of a spelling -> (how it turns thinking on, how it turns thinking off)."""


def kwargs_of(
    fields: dict[str, Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    profile: ThinkingProfile = SWITCH,
) -> dict[str, Any]:
    return effective_kwargs(ThinkingFields(**(fields or {})), kwargs, defaults, profile)


def test_a_request_without_thinking_fields_gives_no_kwargs() -> None:
    assert effective_kwargs() == {}
    for source in templates.THINKING_TEMPLATES.values():
        assert kwargs_of(profile=thinking_profile(source)) == {}


def test_other_kwargs_pass_and_those_of_the_request_win() -> None:
    assert kwargs_of(None, {"a": 1}, {"a": 0, "b": 2}) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("name", "profile"),
    {
        "switch": ThinkingProfile(switches=("enable_thinking",)),
        "opening switch": ThinkingProfile(switches=("thinking",)),
        "mode": ThinkingProfile(mode=("enabled", "disabled"), mode_words=("enabled", "disabled")),
        "effort": ThinkingProfile(reads_effort=True, efforts=("high", "low", "no_think")),
        "free effort": ThinkingProfile(reads_effort=True),
        "switch and effort": ThinkingProfile(
            switches=("thinking",), reads_effort=True, efforts=("max",)
        ),
    }.items(),
)
def test_the_thinking_profile_is_read_from_the_templates_source(
    name: str, profile: ThinkingProfile
) -> None:
    assert thinking_profile(templates.THINKING_TEMPLATES[name]) == profile


@pytest.mark.parametrize(
    "source",
    [
        None,
        "{% if %}",
        "{{ messages[0].thinking }}",
        "{% set thinking = messages[0].content %}{{ thinking }}",
        "{# enable_thinking #}reasoning_effort",
    ],
)
def test_a_template_that_only_mentions_thinking_has_no_profile(source: str | None) -> None:
    assert thinking_profile(source) == ThinkingProfile()


@pytest.mark.parametrize("name", templates.THINKING_TEMPLATES)
@pytest.mark.parametrize("spelling", SWITCHES)
def test_every_spelling_of_on_and_off_works_with_every_template(name: str, spelling: str) -> None:
    profile = thinking_profile(templates.THINKING_TEMPLATES[name])
    on, off = (kwargs_of(*arguments, profile=profile) for arguments in SWITCHES[spelling])
    assert thinks(off, profile) is False
    if name == "free effort" and "effort" not in spelling:
        assert on == {}  # it thinks by itself, and has a word for how hard, not for whether
    else:
        assert thinks(on, profile) is True


@pytest.mark.parametrize(
    ("profile", "on", "off"),
    [
        (SWITCH, {"enable_thinking": True}, {"enable_thinking": False}),
        (THINKS_HARD, {"thinking": True}, {"thinking": False}),
        (BY_MODE, {"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
        (BY_EFFORT, {"reasoning_effort": "high"}, {"reasoning_effort": "no_think"}),
        (FREE, {}, {"reasoning_effort": "none"}),
        (ThinkingProfile(), {}, {}),
    ],
)
def test_a_switch_becomes_the_templates_own_kwargs(
    profile: ThinkingProfile, on: dict[str, Any], off: dict[str, Any]
) -> None:
    assert kwargs_of({"enable_thinking": True}, profile=profile) == on
    assert kwargs_of({"enable_thinking": False}, profile=profile) == off


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (BY_EFFORT, ["no_think", "low", "low", "high", "high", "high", "high"]),
        (FREE, list(REASONING_EFFORTS)),
        (THINKS_HARD, [None, *REASONING_EFFORTS[1:]]),
        (SWITCH, [None] * 7),
    ],
)
def test_an_effort_becomes_the_nearest_one_that_the_template_accepts(
    profile: ThinkingProfile, words: list[str | None]
) -> None:
    efforts = [
        kwargs_of({"reasoning_effort": effort}, profile=profile).get("reasoning_effort")
        for effort in REASONING_EFFORTS
    ]
    assert efforts == words


def test_a_templates_own_words_pass() -> None:
    assert kwargs_of(None, {"reasoning_effort": "no_think"}, profile=BY_EFFORT) == {
        "reasoning_effort": "no_think"
    }
    three = thinking_profile("{{ thinking_mode == 'adaptive' or thinking_mode == 'disabled' }}")
    assert kwargs_of(None, {"thinking_mode": "adaptive"}, profile=three) == {
        "thinking_mode": "adaptive"
    }
    assert kwargs_of(None, {"thinking_mode": False}, profile=three) == {"thinking_mode": "disabled"}


def test_an_explicit_switch_overrides_the_effort() -> None:
    assert kwargs_of({"reasoning_effort": "none"}, {"enable_thinking": True}) == {
        "enable_thinking": True
    }
    assert kwargs_of({"reasoning_effort": "high"}, {"thinking": False}, profile=THINKS_HARD) == {
        "thinking": False
    }


def test_the_requests_own_effort_is_stronger_than_the_one_among_its_kwargs() -> None:
    kwargs = kwargs_of({"reasoning_effort": "none"}, {"reasoning_effort": "low"}, profile=FREE)
    assert kwargs == {"reasoning_effort": "none"}


def test_thinking_fields_of_the_request_override_the_servers_defaults() -> None:
    for spelling, (on, off) in SWITCHES.items():
        assert kwargs_of(*on, defaults={"thinking": False}) == {"enable_thinking": True}, spelling
        assert kwargs_of(*off, defaults={"reasoning_effort": "high"}) == {"enable_thinking": False}
    assert kwargs_of(defaults={"thinking": False}) == {"enable_thinking": False}
    assert kwargs_of(defaults={"reasoning_effort": "low"}, profile=FREE) == {
        "reasoning_effort": "low"
    }
    assert kwargs_of({"enable_thinking": True}, None, {"reasoning_effort": "low"}, FREE) == {
        "reasoning_effort": "low"
    }


@pytest.mark.parametrize(
    ("fields", "kwargs", "param"),
    [
        ({"enable_thinking": True}, {"thinking": False}, "chat_template_kwargs.thinking"),
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, {}, "thinking"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {}, "reasoning.effort"),
    ],
)
def test_spellings_that_contradict_each_other_are_an_error(
    fields: dict[str, Any], kwargs: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest, match="contradict") as caught:
        kwargs_of(fields, kwargs)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "kwargs", "param"),
    [
        ({"enable_thinking": "no"}, {}, "enable_thinking"),
        ({"thinking": {"type": "maybe"}}, {}, "thinking.type"),
        ({"thinking": {"type": []}}, {}, "thinking.type"),
        ({"reasoning": "high"}, {}, "reasoning"),
        ({"reasoning": {"enabled": 1}}, {}, "reasoning.enabled"),
        ({}, {"enable_thinking": "false"}, "chat_template_kwargs.enable_thinking"),
        ({}, {"thinking_mode": "banana"}, "chat_template_kwargs.thinking_mode"),
        ({}, {"thinking_mode": ["on"]}, "chat_template_kwargs.thinking_mode"),
    ],
)
def test_a_value_without_meaning_is_an_error_at_its_place(
    fields: dict[str, Any], kwargs: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kwargs_of(fields, kwargs)
    assert caught.value.param == param


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_reserved_name_is_refused_by_its_place(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kwargs_of(None, {name: True})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("effort", ["banana", "", "HIGH", 3, ["low"]])
def test_an_unknown_effort_is_answered_with_the_known_ones(effort: Any) -> None:
    known = '"none", "minimal", "low", "medium", "high", "xhigh", "max"'
    for fields, kwargs, param in (
        ({"reasoning_effort": effort}, {}, "reasoning_effort"),
        ({"reasoning": {"effort": effort}}, {}, "reasoning.effort"),
        ({}, {"reasoning_effort": effort}, "chat_template_kwargs.reasoning_effort"),
    ):
        with pytest.raises(InvalidRequest, match=known) as caught:
            kwargs_of(fields, kwargs)
        assert caught.value.param == param


def test_the_arguments_are_not_changed() -> None:
    given, defaults = {"a": 1, "thinking": True}, {"b": 2}
    kwargs_of({"reasoning_effort": "low"}, given, defaults)
    assert (given, defaults) == ({"a": 1, "thinking": True}, {"b": 2})


# ---- the budget
@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": 5}, ("thinking_token_budget", 5)),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, ("thinking.budget_tokens", 5)),
        ({"reasoning": {"max_tokens": 5}}, ("reasoning.max_tokens", 5)),
        ({"reasoning": {"max_tokens": 0}, "thinking": True}, ("reasoning.max_tokens", 0)),
    ],
)
def test_every_spelling_of_a_budget_is_one_budget(
    fields: dict[str, Any], budget: tuple[str, int] | None
) -> None:
    assert thinking_budget(ThinkingFields(**fields)) == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"thinking_token_budget": 1 << 40}, "thinking_token_budget"),
        ({"thinking": {"budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"thinking_token_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning.max_tokens"),
    ],
)
def test_an_invalid_thinking_budget_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        thinking_budget(ThinkingFields(**fields))
    assert caught.value.param == param


def test_only_a_thinking_budget_of_zero_switches_thinking_off() -> None:
    assert kwargs_of({"thinking_token_budget": 0}) == {"enable_thinking": False}
    assert kwargs_of({"thinking_token_budget": 0, "enable_thinking": False}) == {
        "enable_thinking": False
    }
    assert kwargs_of({"thinking_token_budget": 9}) == kwargs_of({"thinking_token_budget": -1}) == {}
    with pytest.raises(InvalidRequest, match="contradict"):
        kwargs_of({"thinking_token_budget": 0, "enable_thinking": True})
