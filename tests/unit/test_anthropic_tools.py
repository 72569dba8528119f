"""The tools of a Messages request: those that are left out, loaded, added and removed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.api.anthropic.requests import MessagesBody
from gateway.api.anthropic.signature import BlockSignature
from gateway.api.anthropic.tools import TOOL_LEFT_OUT
from gateway.api.anthropic.translate import MessagesTranslation, translate
from gateway.api.openai.tools import tool_plan
from gateway.http.body import decode
from protocol.wire.errors import InvalidRequest

HI = [{"role": "user", "content": "hi"}]
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
MCP = {"type": "mcp_toolset", "mcp_server_name": "files"}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **more}


FIND = tool("find")
WEATHER = tool("weather", description="Tells the weather.", defer_loading=True)
SHOWN = '{"name":"weather","parameters":{"type":"object"},"description":"Tells the weather."}'


def translated(**fields: Any) -> MessagesTranslation:
    data = msgspec.json.encode({"max_tokens": 9, "messages": HI, **fields})
    return translate(decode(data, MessagesBody))


def planned(**fields: Any) -> None:
    """Translate a request, and check the names and schemas of its tools."""
    result = translated(**fields)
    with result.translate_errors():
        tool_plan(result.chat)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        planned(**fields)
    return raised.value


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools or ()]


def texts(translation: MessagesTranslation) -> list[str]:
    contents = [message.get("content") for message in translation.chat.messages]
    return [part["text"] for content in contents for part in content]


def found(*tool_names: str) -> list[Any]:
    """Return messages in which the tool `find` has found others."""
    references = [{"type": "tool_reference", "tool_name": name} for name in tool_names]
    return [
        *HI,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "find", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": references}],
        },
    ]


def change(kind: str, **reference: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": reference}]}


# ---- tools of others


@pytest.mark.parametrize("left_out", [SEARCH, MCP, {"type": "bash_20250124", "name": "bash"}])
def test_a_tool_that_this_server_does_not_run_is_left_out_with_a_warning(left_out: Any) -> None:
    result = translated(tools=[left_out, FIND])
    assert names(result.chat.tools) == names(result.shown_tools) == ["find"]
    assert result.ignored == ["tools[0]"]
    (warning,) = result.warnings
    assert warning.code == TOOL_LEFT_OUT
    assert warning.message.startswith("tools[0]: left out, because ")
    assert left_out["type"] in warning.message


@pytest.mark.parametrize(
    ("field", "value"), [("container", {"id": "c"}), ("mcp_servers", [{"type": "url"}])]
)
def test_a_service_that_this_server_does_not_have_is_left_out(field: str, value: Any) -> None:
    result = translated(**{field: value})
    assert result.ignored == [field]
    assert [warning.code for warning in result.warnings] == [TOOL_LEFT_OUT]
    assert translated(**{field: None}).ignored == []


def test_errors_name_the_clients_tool_although_others_are_left_out() -> None:
    assert refused(tools=[SEARCH, tool("x y")]).param == "tools[1].name"
    assert refused(tools=[SEARCH, FIND, FIND]).param == "tools[2].name"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "tool", "name": "web_search"}, "tool_choice.name"),
        ({"type": "any"}, "tool_choice"),
    ],
)
def test_a_choice_that_forces_a_tool_that_is_left_out_is_refused(choice: Any, param: str) -> None:
    error = refused(tools=[SEARCH], tool_choice=choice)
    assert error.param == param
    assert "web_search_20250305" in error.message
    assert translated(tools=[SEARCH, FIND], tool_choice={"type": "any"}).chat.tools
    for kind in ("auto", "none"):
        assert translated(tools=[SEARCH], tool_choice={"type": kind}).chat.tools == []


# ---- deferred tools


def test_a_deferred_tool_is_defined_where_it_is_loaded_so_that_the_start_stays_the_same() -> None:
    before = translated(tools=[FIND, WEATHER])
    after = translated(tools=[FIND, WEATHER], messages=found("weather"))
    assert names(before.chat.tools) == ["find"]
    assert names(after.chat.tools) == ["find", "weather"]
    assert before.shown_tools == after.shown_tools == translated(tools=[FIND]).shown_tools
    assert texts(after)[-1] == f"The tool weather is available now:\n{SHOWN}"
    assert after.warnings == []


def test_a_tool_is_defined_once_and_one_that_is_not_deferred_only_named() -> None:
    result = translated(tools=[FIND, WEATHER], messages=found("weather", "weather", "find", "x"))
    assert texts(result)[1:] == [
        f"The tool weather is available now:\n{SHOWN}",
        "The tool weather is available now.",
        "The tool find is available now.",
        "The tool x is available now.",
    ]


def test_a_deferred_tool_that_was_called_or_must_be_called_is_defined_at_the_start() -> None:
    forced = translated(tools=[FIND, WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert names(forced.shown_tools) == ["find", "weather"]
    called = found("find")
    called[1]["content"][0]["name"] = "weather"
    assert names(translated(tools=[FIND, WEATHER], messages=called).chat.tools) == [
        "find",
        "weather",
    ]


def test_deferred_tools_are_not_deferred_if_only_anthropic_could_load_them() -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    result = translated(tools=[search, FIND, WEATHER])
    assert names(result.shown_tools) == ["find", "weather"]


def test_a_template_never_lacks_all_tools_if_some_can_be_called() -> None:
    result = translated(tools=[WEATHER], messages=found("weather"))
    assert names(result.shown_tools) == ["weather"]
    assert translated(tools=[WEATHER]).shown_tools == []


# ---- tools that are added and removed


def test_the_template_receives_a_removed_tool_and_the_answer_may_not_call_it() -> None:
    """So the start of the prompt stays the same."""
    block = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "find"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "system", "content": [block]}]
    result = translated(tools=[FIND, {**WEATHER, "defer_loading": False}], messages=messages)
    plan = tool_plan(result.chat, result.shown_tools)
    assert [tool["function"]["name"] for tool in plan.shown] == ["find", "weather"]
    assert [tool.name for tool in plan.declared] == ["weather"]


def test_an_added_tool_is_defined_in_its_message_and_a_removed_one_is_not_offered() -> None:
    added = change("tool_addition", type="tool_definition", definition=tool("new"))
    removed = change("tool_removal", type="tool_reference", name="find")
    result = translated(tools=[FIND], messages=[*HI, added, removed])
    assert names(result.chat.tools) == ["new"]
    assert names(result.shown_tools) == ["find"]
    assert texts(result)[1:] == [
        'The tool new is available now:\n{"name":"new","parameters":{"type":"object"}}',
        "The tool find is no longer available.",
    ]
    again = change("tool_addition", type="tool_reference", name="find")
    result = translated(tools=[FIND], messages=[*HI, added, removed, again])
    assert names(result.chat.tools) == ["find", "new"]
    assert texts(result)[-1] == "The tool find is available now."


def test_a_tool_that_is_defined_again_replaces_the_first_one() -> None:
    strict = tool("find", strict=True)
    added = change("tool_addition", type="tool_definition", definition=strict)
    result = translated(tools=[FIND], messages=[*HI, added])
    assert names(result.chat.tools) == ["find"]
    assert (result.chat.tools or [])[0]["function"]["strict"] is True
    bad = change("tool_addition", type="tool_definition", definition=tool("x y"))
    error = refused(tools=[FIND], messages=[*HI, bad])
    assert error.param == "messages[1].content[0].tool.definition.name"


@pytest.mark.parametrize("kind", ["tool_addition", "tool_removal"])
def test_tools_of_mcp_servers_are_left_out_with_a_warning(kind: str) -> None:
    changed = change(kind, type="mcp_toolset_reference", server_name="files")
    result = translated(tools=[FIND], messages=[*HI, changed])
    assert [warning.code for warning in result.warnings] == [TOOL_LEFT_OUT]
    assert texts(result) == ["hi"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (change("tool_addition", type="x"), "messages[1].content[0].tool.type"),
        (
            change("tool_removal", type="tool_definition", definition=FIND),
            "messages[1].content[0].tool.type",
        ),
        (change("tool_removal", type="tool_reference"), "messages[1].content[0].tool.name"),
        ({"role": "system", "content": [{"type": "tool_addition"}]}, "messages[1].content[0].tool"),
    ],
)
def test_an_invalid_change_names_its_path(message: Any, param: str) -> None:
    assert refused(tools=[FIND], messages=[*HI, message]).param == param


def test_defer_loading_must_be_true_or_false() -> None:
    assert refused(tools=[tool("x", defer_loading=1)]).param == "tools[0].defer_loading"


# ---- thinking that comes back


def thinking(text: str, signature: Any) -> list[Any]:
    block = {"type": "thinking", "thinking": text, "signature": signature}
    said = {"type": "text", "text": "yes"}
    return [*HI, {"role": "assistant", "content": [block, said]}, *HI]


def reasoning_of(translation: MessagesTranslation) -> Any:
    return translation.chat.messages[1].get("reasoning")


def signature_of(text: str, *, seals: bool) -> str:
    signature = BlockSignature(seals=seals)
    signature.push(text)
    return signature.finish()


def test_thinking_without_text_is_read_from_its_signature() -> None:
    sealed = signature_of("Först: tänk.", seals=True)
    assert reasoning_of(translated(messages=thinking("", sealed))) == "Först: tänk."
    assert reasoning_of(translated(messages=thinking("own", sealed))) == "own"


@pytest.mark.parametrize("signature", [signature_of("old", seals=False), "EqQBCgIYAhIM", "", None])
def test_other_signatures_are_accepted_and_hold_nothing(signature: str | None) -> None:
    assert reasoning_of(translated(messages=thinking("", signature))) is None
    assert reasoning_of(translated(messages=thinking("own", signature))) == "own"


def test_a_damaged_signature_is_named() -> None:
    damaged = signature_of("thought", seals=True) + "!"
    error = refused(messages=thinking("", damaged))
    assert error.param == "messages[1].content[0].signature"
