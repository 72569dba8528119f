"""Tools that are not functions: each kind of call is written as its item, streamed and whole, and
the items can be sent back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.support.custom_tools import PATCH
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of, exchange, json_of
from tests.support.responses import RESPONSES, items_of, kinds, typed_events, without_ids
from tests.support.scenarios import call
from tests.support.scripted_engine import ScriptedEngine, prompt_of, text_reply

Json = dict[str, Any]
ENGINE = {"max_len": 1 << 14}
ECHO = {"type": "function", "name": "echo", "parameters": {"type": "object", "properties": {}}}
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__tiny",
    "description": "Tiny things.",
    "tools": [{**ECHO, "description": "Echo."}, {"type": "custom", "name": "note"}],
}
FORMAT = {"type": "grammar", "syntax": "lark", "definition": PATCH}
APPLY = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": FORMAT}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
PATCH_TEXT = '*** Begin Patch\n*** Add File: a.txt\n+"é" < 1\n*** End Patch\n'
LIMITS = {"timeout_ms": None, "max_output_length": None}
CASES: dict[str, tuple[Json, str, Json, Json, list[str]]] = {
    "namespace": (
        NAMESPACE,
        call("mcp__tiny__echo", {"a": 1}),
        {
            **{"type": "function_call", "name": "echo", "namespace": "mcp__tiny"},
            "arguments": '{"a": 1}',
        },
        {"type": "function_call_output", "output": "SAID"},
        ["mcp__tiny__echo", '"a"', "SAID"],
    ),
    "custom in a namespace": (
        NAMESPACE,
        call("mcp__tiny__note", {"input": "a\nb"}),
        {"type": "custom_tool_call", "name": "note", "namespace": "mcp__tiny", "input": "a\nb"},
        {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "SAID"}]},
        ["mcp__tiny__note", "a\\nb", "SAID"],
    ),
    "custom with a grammar": (
        APPLY,
        call("apply_patch", {"input": PATCH_TEXT}),
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH_TEXT},
        {"type": "custom_tool_call_output", "output": "SAID"},
        ["apply_patch", "Add File: a.txt", "SAID"],
    ),
    "local_shell": (
        {"type": "local_shell"},
        call("local_shell", {"command": ["ls", "-l"]}),
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}},
        },
        {"type": "local_shell_call_output", "output": "SAID"},
        ["local_shell", '"ls"', "SAID"],
    ),
    "shell": (
        {"type": "shell", "environment": {"type": "local"}},
        call("shell", {"commands": ["ls"]}),
        {
            "type": "shell_call",
            "action": {"commands": ["ls"], **LIMITS},
            "environment": {"type": "local"},
        },
        {
            "type": "shell_call_output",
            "output": [
                {"stdout": "SAID\n", "stderr": "OOPS", "outcome": {"type": "exit", "exit_code": 3}},
                {"stdout": "MORE", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        },
        ["shell", '"ls"', "SAID\nOOPS\nexit code 3\nMORE\ntime limit exceeded"],
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        call("apply_patch", {"type": "create_file", "path": "p.txt", "diff": "+x"}),
        {
            "type": "apply_patch_call",
            "operation": {"type": "create_file", "path": "p.txt", "diff": "+x"},
        },
        {"type": "apply_patch_call_output", "status": "failed", "output": "SAID"},
        ["apply_patch", "p.txt", "+x", "SAID"],
    ),
    "tool_search": (
        SEARCH,
        call("tool_search", {"query": "mail"}),
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "mail"}},
        {"type": "tool_search_output", "tools": [{**ECHO, "name": "send_mail"}]},
        ["tool_search", "mail", "send_mail"],
    ),
}


def ask(gateway: GatewayProcess, **body: Any) -> Json:
    answer: Json = json_of(gateway.post(RESPONSES, {"input": "hi", **body}))
    return answer


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_written_as_its_item_and_read_again(
    engine: ScriptedEngine, gateway: GatewayProcess, name: str
) -> None:
    tool, text, item, output, words = CASES[name]
    engine.script = lambda generate: text_reply(text, marked=True, size=5)
    body = {"input": "hi", "tools": [tool]}
    _, _, data = exchange(gateway.port, RESPONSES, {**body, "stream": True})
    events = typed_events(data)
    answer = ask(gateway, tools=[tool])
    assert without_ids(answer["output"]) == without_ids(items_of(events))
    (called,) = answer["output"]
    ids = {"id": called["id"], "call_id": called["call_id"], "status": "completed"}
    assert called == {**item, **ids}
    assert answer["tools"][0]["type"] == tool["type"]
    link = {"id" if name == "local_shell" else "call_id": called["call_id"]}
    question = {"role": "user", "content": "and?"}
    engine.script = lambda generate: text_reply("Done.")
    again = [{"role": "user", "content": "hi"}, called, {**output, **link}, question]
    assert ask(gateway, input=again, tools=[tool])["status"] == "completed"
    prompt = prompt_of(engine)
    assert not [word for word in words if word not in prompt], prompt
    stored = {"previous_response_id": answer["id"], "input": [{**output, **link}, question]}
    assert ask(gateway, tools=[tool], **stored)["status"] == "completed"
    assert prompt_of(engine) == prompt


def test_the_text_of_a_custom_tool_is_streamed(engine: ScriptedEngine, client: OpenAI) -> None:
    text = call("apply_patch", {"input": PATCH_TEXT})
    engine.script = lambda generate: text_reply(text, marked=True, size=3)
    deltas: list[str] = []
    with client.responses.stream(model="scripted", input="hi", tools=[APPLY]) as stream:  # type: ignore[list-item]
        for event in stream:
            if event.type == "response.custom_tool_call_input.delta":
                deltas.append(event.delta)
            elif event.type == "response.custom_tool_call_input.done":
                assert event.input == PATCH_TEXT
        final = stream.get_final_response()
    assert "".join(deltas) == PATCH_TEXT
    assert len(deltas) > 5
    (item,) = final.output
    assert item.type == "custom_tool_call"
    assert item.input == PATCH_TEXT


def test_a_grammar_is_sent_to_the_engine_and_shown_to_the_model(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("no call")
    ask(gateway, tools=[APPLY])
    (generate,) = engine.generates
    assert generate.grammar is not None
    assert "Begin Patch" in str(generate.grammar)
    assert 'begin: \\"*** Begin Patch\\" LF' in prompt_of(engine)
    ask(gateway, tools=[{"type": "custom", "name": "free"}])
    assert engine.generates[-1].grammar is None


def test_a_call_that_is_cut_off_is_incomplete(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    text = call("apply_patch", {"input": PATCH_TEXT})
    cut = text[: text.index("Add File")]
    engine.script = lambda generate: text_reply(cut, finish="length", marked=True)
    answer = ask(gateway, tools=[APPLY])
    assert answer["status"] == "incomplete"
    (item,) = answer["output"]
    assert item["status"] == "incomplete"
    assert item["input"] == "*** Begin Patch\n*** "


def test_tools_of_the_service_are_left_out_with_a_warning(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("ok")
    tools = [
        {"type": "web_search", "external_web_access": False},
        {**ECHO, "output_schema": {}},
        {"type": "mcp", "server_label": "far", "server_url": "https://far.example"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "tool_search"},
    ]
    answer = ask(gateway, tools=tools, include=["web_search_call.action.sources"])
    left_out = ["tools[0]", "tools[2]", "tools[3]", "tools[4]"]
    ignored = ["include[0]", "tools[0]", "tools[1].output_schema", *left_out[1:]]
    assert answer["ignored_params"] == ignored
    assert [warning["message"].partition(":")[0] for warning in answer["warnings"]] == left_out
    assert len(answer["tools"]) == len(tools)
    prompt = prompt_of(engine)
    assert "echo" in prompt
    assert "far.example" not in prompt
    error = error_of(
        gateway.post(RESPONSES, {"input": "hi", "tools": tools, "strict_params": True})
    )
    assert "tools[0]" in error["message"]


@pytest.mark.parametrize(
    ("tool", "choice"),
    [
        (NAMESPACE, {"type": "function", "name": "echo", "namespace": "mcp__tiny"}),
        (APPLY, {"type": "custom", "name": "apply_patch"}),
        ({"type": "shell"}, {"type": "shell"}),
        ({"type": "apply_patch"}, {"type": "apply_patch"}),
        (
            APPLY,
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
            },
        ),
    ],
)
def test_a_tool_of_any_kind_can_be_required(
    engine: ScriptedEngine, gateway: GatewayProcess, tool: Json, choice: Json
) -> None:
    engine.script = lambda generate: text_reply("ok")
    ask(gateway, tools=[ECHO, {"type": "web_search"}, tool], tool_choice=choice)
    grammar = str(engine.generates[-1].grammar)
    assert "tool_call" in grammar
    assert '"echo\\"' not in grammar


def test_a_deferred_tool_is_shown_when_it_has_been_loaded(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("ok")
    deferred = {**NAMESPACE, "tools": [{**ECHO, "defer_loading": True, "description": "DEFERRED"}]}
    tools = [SEARCH, deferred]
    ask(gateway, tools=tools)
    before = prompt_of(engine)
    assert "DEFERRED" not in before
    items = [
        {"role": "user", "content": "hi"},
        {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "s", "tools": [deferred]},
    ]
    engine.script = lambda generate: text_reply(call("mcp__tiny__echo", {}), marked=True)
    answer = ask(gateway, tools=tools, input=items)
    prompt = prompt_of(engine)
    start = before[: before.index("<user>hi") + len("<user>hi")]
    assert prompt.startswith(start), "the cached start of the prompt stays the same"
    assert "DEFERRED" in prompt[len(start) :]
    assert [(item["name"], item["namespace"]) for item in answer["output"]] == [
        ("echo", "mcp__tiny")
    ]
    assert "warnings" not in answer, "the tool is known"
    ask(gateway, tools=[deferred])
    assert "DEFERRED" in prompt_of(engine), "there is no search that could load it"


def test_an_image_in_an_output_is_replaced_with_a_note(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("ok")
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [
                {"type": "input_text", "text": "BEFORE"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            ],
        },
        {"role": "user", "content": "and?"},
    ]
    answer = ask(gateway, input=items)
    prompt = prompt_of(engine)
    assert "BEFORE" in prompt
    assert "[image left out: this model reads text only]" in prompt
    (warning,) = answer["warnings"]
    assert warning["code"] == "content_left_out"
    assert warning["message"].startswith("input[2].output[1]: ")


SERVICE_ITEMS: list[tuple[Json, list[str]]] = [
    (
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "tides"}},
        ["web_search", "tides"],
    ),
    (
        {"type": "file_search_call", "id": "f", "queries": ["q1"], "results": [{"text": "R1"}]},
        ["file_search", "q1", "R1"],
    ),
    (
        {
            **{"type": "code_interpreter_call", "id": "i", "code": "print(7)"},
            "outputs": [{"type": "logs", "logs": "LOG7"}],
        },
        ["print(7)", "LOG7"],
    ),
    ({"type": "image_generation_call", "id": "g", "result": "AAAA"}, ["image_generation"]),
    (
        {"type": "mcp_call", "id": "m", "name": "far", "arguments": '{"x": 1}', "output": "OUT"},
        ["far", '"x"', "OUT"],
    ),
    (
        {"type": "mcp_call", "id": "m", "name": "far", "arguments": "{}", "error": {"code": 5}},
        ["far", "Error", '"code"'],
    ),
    (
        {"type": "mcp_list_tools", "id": "l", "server_label": "srv", "tools": [{"name": "t1"}]},
        ["srv", "t1"],
    ),
    (
        {
            **{"type": "mcp_approval_request", "id": "r", "server_label": "srv"},
            **{"name": "t1", "arguments": "{}"},
        },
        ["srv", "t1"],
    ),
    (
        {"type": "mcp_approval_response", "approval_request_id": "r", "approve": False},
        ["No"],
    ),
    ({"type": "additional_tools", "role": "developer", "tools": [ECHO]}, ["echo"]),
]


@pytest.mark.parametrize(("item", "words"), SERVICE_ITEMS)
def test_items_of_the_service_are_read_as_text(
    engine: ScriptedEngine, gateway: GatewayProcess, item: Json, words: list[str]
) -> None:
    engine.script = lambda generate: text_reply("ok")
    first = {"role": "user", "content": "hi"}
    ask(gateway, input=[first, item, {"role": "user", "content": "and?"}])
    prompt = prompt_of(engine)
    assert not [word for word in words if word not in prompt], prompt


def test_a_summary_has_the_reasoning_in_place_of_the_content(
    engine: ScriptedEngine, gateway: GatewayProcess
) -> None:
    engine.script = lambda generate: text_reply("<think>\nhm\n</think>\n\nHi!", marked=True)
    body = {"input": "hi", "reasoning": {"summary": "auto"}}
    _, _, data = exchange(gateway.port, RESPONSES, {**body, "stream": True})
    events = typed_events(data)
    assert kinds(events)[2:9] == [
        *("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        "output_item.added",
    ]
    assert all(event["summary_index"] == 0 for event in events[3:7])
    final = events[-1]["response"]
    thought = final["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert thought["content"] == []
    assert final["reasoning"]["summary"] == "auto"
    items = [{"role": "user", "content": "hi"}, *final["output"], {"role": "user", "content": "?"}]
    ask(gateway, input=items)
    assert "hm" in json.dumps(prompt_of(engine))
    assert ask(gateway, reasoning={"summary": "none"})["output"][0]["summary"] == []
