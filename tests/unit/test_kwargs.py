"""One function says what the template is told; requests cannot say what is said elsewhere."""

from __future__ import annotations

import pytest

from gateway.chat.kwargs import REASONING_EFFORTS, RESERVED, effective_kwargs
from protocol.errors import InvalidRequest


def test_nothing_asked_is_nothing_told() -> None:
    assert effective_kwargs() == {}


def test_the_request_is_stronger_than_the_servers_defaults() -> None:
    assert effective_kwargs({"a": 1}, {"a": 0, "b": 2}) == {"a": 1, "b": 2}


@pytest.mark.parametrize("effort", REASONING_EFFORTS)
def test_an_effort_also_says_whether_to_think(effort: str) -> None:
    told = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    assert effective_kwargs(reasoning_effort=effort) == told
    assert effective_kwargs({"reasoning_effort": effort}) == told
    assert effective_kwargs(None, {"enable_thinking": "x"}, reasoning_effort=effort) == told


def test_thinking_said_outright_is_stronger_than_the_effort() -> None:
    told = effective_kwargs({"enable_thinking": True}, reasoning_effort="none")
    assert told == {"enable_thinking": True, "reasoning_effort": "none"}


def test_the_requests_own_effort_is_stronger_than_the_one_among_its_kwargs() -> None:
    told = effective_kwargs({"reasoning_effort": "low"}, reasoning_effort="none")
    assert told == {"enable_thinking": False, "reasoning_effort": "none"}


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_a_reserved_name_is_refused_by_its_place(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        effective_kwargs({name: True})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("effort", ["banana", "", "HIGH", 3, ["low"]])
def test_an_unknown_effort_is_answered_with_the_known_ones(effort: str) -> None:
    with pytest.raises(InvalidRequest, match="none, minimal, low, medium, high, xhigh, max") as own:
        effective_kwargs(reasoning_effort=effort)
    assert own.value.param == "reasoning_effort"
    with pytest.raises(InvalidRequest) as among:
        effective_kwargs({"reasoning_effort": effort})
    assert among.value.param == "chat_template_kwargs.reasoning_effort"


def test_the_arguments_are_not_changed() -> None:
    asked, defaults = {"a": 1}, {"b": 2}
    effective_kwargs(asked, defaults, reasoning_effort="low")
    assert (asked, defaults) == ({"a": 1}, {"b": 2})
