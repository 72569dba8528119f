"""A Responses request becomes a chat request: items, fields, and field paths in errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gateway.api.responses.items import (
    PREVIOUS,
    PlacedItem,
    input_items,
    reasoning_text,
    seal,
    with_ids,
)
from gateway.api.responses.requests import ResponsesBody, check
from gateway.api.responses.routes import page_of
from gateway.api.responses.translate import (
    COPIED_FIELDS,
    ResponsesTranslation,
    chat_body,
    check_outputs,
    items_after,
    possible_cuts,
    render_fitting,
    reserved_tokens,
)
from protocol.wire.errors import ContextTooLong, InvalidRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "12"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def body(**fields: Any) -> ResponsesBody:
    return msgspec.json.decode(json.dumps({"input": "hi"} | fields), type=ResponsesBody)


def translated(
    *items: dict[str, Any], before: Sequence[Any] = (), **fields: Any
) -> ResponsesTranslation:
    request = body(**fields)
    check(request)
    earlier = [PlacedItem(item, PREVIOUS) for item in before]
    return chat_body(request, [*earlier, *input_items(list(items) or "hi")])


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return translated(*items, **fields).chat.messages


def test_a_text_input_is_a_user_message() -> None:
    part = {"type": "text", "text": "hi"}
    assert messages() == [{"role": "user", "content": [part]}]


def test_consecutive_items_of_the_assistant_are_one_message() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages(message("user", "a"), THOUGHT, message("assistant", "b"), CALL, OUTPUT) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ]


def test_calls_of_one_turn_are_in_one_message() -> None:
    other = CALL | {"call_id": "c2"}
    chat_messages = messages(message("user", "a"), CALL, other, OUTPUT, OUTPUT | {"call_id": "c2"})
    assert [m["role"] for m in chat_messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in chat_messages[1]["tool_calls"]] == ["c1", "c2"]


def test_alternating_reasoning_and_text_are_joined_in_one_message() -> None:
    chat_messages = messages(
        message("user", "a"), THOUGHT, message("assistant", "b"), THOUGHT, CALL, OUTPUT
    )
    assert chat_messages[1]["reasoning"] == "hmhm"
    assert chat_messages[1]["content"] == "b"


def test_two_assistant_messages_stay_separate() -> None:
    chat_messages = messages(message("assistant", "a"), message("assistant", "b"))
    assert [m["content"] for m in chat_messages] == ["a", "b"]


def test_instructions_and_the_system_messages_after_them_are_one_message() -> None:
    chat_messages = messages(
        message("developer", "d"), message("system", "s"), message("user", "u"), instructions="i"
    )
    assert chat_messages[0] == {"role": "system", "content": "i\n\nd\n\ns"}
    assert chat_messages[1]["role"] == "user"
    alone = messages(message("developer", "d"), message("user", "u"))
    assert alone[0] == {"role": "developer", "content": "d"}


def test_a_summary_is_used_if_reasoning_has_no_text() -> None:
    summary = [{"type": "summary_text", "text": "s1"}, {"type": "summary_text", "text": "s2"}]
    assert reasoning_text({"summary": summary}, "") == "s1\n\ns2"
    assert reasoning_text({"encrypted_content": seal("déep")}, "") == "déep"
    for broken in ("tidegate1.!", "tidegate1.gA==", "gAAAA"):
        with pytest.raises(InvalidRequest):
            reasoning_text({"encrypted_content": broken}, "input[0]")


def test_fields_become_their_counterparts_in_the_chat() -> None:
    chat = translated(
        max_output_tokens=5,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}},
        tools=[{"type": "function", "name": "f", "parameters": None, "strict": None}],
        tool_choice={"type": "function", "name": "f"},
        top_logprobs=3,
        temperature=0.5,
        seed=1,
        stop=["x"],
        chat_template_kwargs={"a": 1},
    ).chat
    assert chat.max_completion_tokens == 5
    assert chat.reasoning_effort == "low"
    schema = {"name": "n", "schema": {}, "strict": True}
    assert chat.response_format == {"type": "json_schema", "json_schema": schema}
    assert chat.tools == [{"type": "function", "function": {"name": "f"}}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert (chat.logprobs, chat.top_logprobs) == (True, 3)
    assert (chat.temperature, chat.seed, chat.stop) == (0.5, 1, ["x"])
    assert chat.chat_template_kwargs == {"a": 1}


def test_every_shared_field_is_copied_or_translated() -> None:
    assert {"temperature", "stop", "user", "priority", "structured_outputs"} <= COPIED_FIELDS
    assert not COPIED_FIELDS & {"tools", "stream", "n", "max_tokens", "reasoning", "messages"}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("messages", "input"),
        ("messages[0]", "instructions"),
        ("messages[1]", PREVIOUS),
        ("messages[1].content", PREVIOUS),
        ("messages[2].content[3].text", "input[0].content[3].text"),
        ("messages[3].reasoning", "input[1].content"),
        ("messages[3].tool_calls[0].function.arguments", "input[2].arguments"),
        ("messages[3].tool_calls[0].id", "input[2].call_id"),
        ("messages[4].tool_call_id", "input[3].call_id"),
        ("messages[4].content", "input[3].output"),
        ("tools[3].function.parameters.type", "tools[3].parameters.type"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("response_format", "text.format"),
        ("reasoning_effort", "reasoning.effort"),
        ("max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "max_output_tokens"),
        ("temperature", "temperature"),
    ],
)
def test_a_chat_path_becomes_a_path_in_the_request(name: str, own: str) -> None:
    translation = translated(
        message("user", "a"),
        THOUGHT,
        CALL,
        OUTPUT,
        before=[message("user", "earlier")],
        instructions="i",
    )
    with pytest.raises(InvalidRequest) as raised, translation.translate_errors():
        raise InvalidRequest(f"{name}: wrong", param=name)
    assert raised.value.param == own
    assert raised.value.message == f"{own}: wrong"


def test_only_items_without_an_id_get_one() -> None:
    number = "ab" * 16
    items = with_ids([message("user", "a"), {**CALL, "id": "fc_own"}], "resp_" + number)
    assert [item["id"] for item in items] == [f"msg_{number}_i0", "fc_own"]


# ---- too long
def placed(*items: dict[str, Any]) -> list[PlacedItem]:
    return [PlacedItem(item, f"input[{n}]") for n, item in enumerate(items)]


def length(items: Sequence[PlacedItem]) -> list[str]:
    return [str(p.item.get("content") or p.item.get("call_id")) for p in items]


LONG = placed(
    message("system", "s"),
    message("user", "u1"),
    CALL,
    OUTPUT,
    message("user", "u2"),
    message("assistant", "a2"),
    CALL | {"call_id": "c2"},
    OUTPUT | {"call_id": "c2"},
)


@pytest.mark.parametrize(
    ("most", "left"),
    [
        (8, ["s", "u1", "c1", "c1", "u2", "a2", "c2", "c2"]),
        (7, ["s", "u2", "a2", "c2", "c2"]),
        (5, ["s", "u2", "a2", "c2", "c2"]),
        (4, ["s", "a2", "c2", "c2"]),
        (3, ["s", "c2", "c2"]),
        (1, ["s", "c2", "c2"]),
    ],
)
def test_the_oldest_items_are_dropped_with_their_outputs(most: int, left: list[str]) -> None:
    assert render_fitting(LONG, length, lambda rendered: len(rendered) <= most) == left


def test_each_cut_leaves_fewer_items_and_no_output_without_its_call() -> None:
    cuts = possible_cuts(LONG)
    assert cuts == sorted(cuts)
    for cut in cuts:
        left = items_after(LONG, cut)
        calls = [p.item["call_id"] for p in left if p.item["type"] == "function_call"]
        outputs = [p.item["call_id"] for p in left if p.item["type"] == "function_call_output"]
        assert set(outputs) <= set(calls)


def test_items_that_cannot_be_rendered_count_as_too_long() -> None:
    def render(items: Sequence[PlacedItem]) -> int:
        if len(items) > 3:
            raise ContextTooLong("too long", param="input")
        return len(items)

    assert render_fitting(LONG, render, lambda rendered: True) == 3
    with pytest.raises(ContextTooLong):
        render_fitting(placed(*[message("system", "s")] * 4), render, lambda rendered: True)


def test_the_cut_is_found_by_bisection() -> None:
    many = placed(*[message("user", str(n)) for n in range(1000)])
    tries = []

    def render(items: Sequence[PlacedItem]) -> int:
        tries.append(len(items))
        return len(items)

    assert render_fitting(many, render, lambda rendered: rendered <= 17) == 17
    assert len(tries) < 16


def test_tokens_are_reserved_for_the_answer() -> None:
    assert reserved_tokens(100, 4096) == 100
    assert reserved_tokens(None, 4096) == 256
    assert reserved_tokens(10_000, 4096) == 2048


# ---- lists
def test_pages_cover_all_items() -> None:
    items = [{"id": str(n)} for n in range(7)]
    seen: list[str] = []
    after = None
    while True:
        page = page_of(items, 3, after)
        seen += [item["id"] for item in page.data]
        assert (page.first_id, page.last_id) == (page.data[0]["id"], seen[-1])
        if not page.has_more:
            break
        after = page.last_id
    assert seen == [str(n) for n in range(7)]
    assert page_of([], 3, None).first_id is None
    with pytest.raises(InvalidRequest):
        page_of(items, 3, "nobody")


# ---- outputs of calls
def call_of(call_id: str) -> dict[str, Any]:
    return CALL | {"call_id": call_id}


def output_of(call_id: str) -> dict[str, Any]:
    return OUTPUT | {"call_id": call_id}


@pytest.mark.parametrize(
    ("items", "missing"),
    [
        ([call_of("a"), call_of("b"), output_of("a"), output_of("b")], None),
        ([call_of("a"), output_of("a"), call_of("b")], None),
        ([call_of("a"), call_of("b"), message("user", "never mind")], None),
        ([call_of("a"), message("user", "never mind"), call_of("b"), output_of("b")], None),
        ([call_of("a"), call_of("b"), output_of("a")], "b"),
        ([call_of("a"), message("assistant", "and"), call_of("b"), output_of("b")], "a"),
        ([call_of("a"), call_of("b"), output_of("b"), message("user", "go on")], "a"),
    ],
)
def test_all_calls_of_a_turn_need_an_output_if_one_has_it(
    items: list[dict[str, Any]], missing: str | None
) -> None:
    placed = input_items([message("user", "hi"), *items])
    if missing is None:
        check_outputs(placed)
        return
    with pytest.raises(InvalidRequest, match=f"the call '{missing}'") as caught:
        check_outputs(placed)
    assert caught.value.param == "input"
