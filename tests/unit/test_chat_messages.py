"""A message has only the members that its role can have; others are refused, not lost."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.prompt.content import REASONING_MEMBERS, ROLE_OF_MEMBER, ROLES, checked_turns
from protocol.wire.errors import InvalidRequest

CALL = {"name": "f", "arguments": "{}"}
VALUES: dict[str, Any] = {
    "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    "function_call": CALL,
    "tool_call_id": "call_1",
    **dict.fromkeys(REASONING_MEMBERS, "a thought"),
}
EMPTY: dict[str, tuple[Any, ...]] = {
    "tool_calls": (None, []),
    "function_call": (None,),
    "tool_call_id": (None, ""),
    **dict.fromkeys(REASONING_MEMBERS, (None, "")),
}
IS_RESULT = {"tool", "function"}


def turn(role: str, **members: Any) -> Any:
    """Return the turn of a message that follows a call with the id call_1."""
    before = {"role": "assistant", "tool_calls": VALUES["tool_calls"]}
    return checked_turns([before, {"role": role, "content": "x", **members}])[1]


@pytest.mark.parametrize("role", [role for role in ROLES if role != "function"])
@pytest.mark.parametrize("member", ROLE_OF_MEMBER)
def test_a_member_is_read_in_messages_of_its_role_and_refused_in_others(
    member: str, role: str
) -> None:
    if role == ROLE_OF_MEMBER[member]:
        assert turn(role, **{member: VALUES[member]}) != turn(role)
        return
    with pytest.raises(InvalidRequest) as refused:
        turn(role, **{member: VALUES[member]})
    assert refused.value.param == f"messages[1].{member}"


@pytest.mark.parametrize(
    ("role", "member", "value"),
    [
        (role, member, value)
        for role in ROLES
        for member in EMPTY
        for value in EMPTY[member]
        if not (role in IS_RESULT and (member, value) == ("tool_call_id", ""))  # no call's id
    ],
)
def test_empty_members_are_accepted_in_messages_of_every_role(
    role: str, member: str, value: Any
) -> None:
    assert turn(role, **{member: value}) == turn(role)
