"""OpenAI's messages are converted to the form that a template needs. Errors name the path."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.prompt.fit import template_messages
from gateway.prompt.template import ChatTemplate
from gateway.prompt.traits import TemplateTraits
from protocol.wire.errors import InvalidRequest
from tests.support.tokenizers import chat_template

PLAIN = TemplateTraits()
TAKES_STRINGS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TAKES_PARTS = (
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
)
TAKES_BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m['content'] %}{{ part['text'] }}|{% endfor %}{% endif %}{% endfor %}"
)
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", **fields}


def one(message: Any, traits: TemplateTraits = PLAIN) -> dict[str, Any]:
    (result,) = template_messages([message], traits)
    return result


@pytest.mark.parametrize(
    ("source", "parts", "strings"),
    [
        (TAKES_STRINGS, False, True),
        (TAKES_PARTS, True, False),
        (TAKES_BOTH, True, True),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", False, True),
        ("no message at all", False, True),
    ],
)
def test_trial_renderings_show_which_forms_of_content_work(
    source: str, parts: bool, strings: bool
) -> None:
    traits = ChatTemplate(source).traits
    assert ("user" in traits.parts, "user" in traits.strings) == (parts, strings)


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (TAKES_STRINGS, "ab", "[user]ab"),
        (TAKES_STRINGS, PARTS, "[user]a\nb"),
        (TAKES_PARTS, "ab", "ab|"),
        (TAKES_PARTS, PARTS, "a|b|"),
        (TAKES_BOTH, "ab", "ab"),
        (TAKES_BOTH, PARTS, "a|b|"),
        (TAKES_STRINGS, None, "[user]"),
        (TAKES_STRINGS, ["a", {"type": "input_text", "text": "b"}], "[user]a\nb"),
    ],
)
def test_content_reaches_the_template_in_the_form_it_takes(
    source: str, content: Any, text: str
) -> None:
    template = ChatTemplate(source)
    messages = template_messages([{"role": "user", "content": content}], template.traits)
    assert template.render(messages) == text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        (
            {"role": "user", "content": [PARTS[0], {"type": "image_url"}]},
            "messages[0].content[1].type",
        ),
        ({"role": "user", "content": [3]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 3}, "messages[0].name"),
        (assistant(reasoning=[]), "messages[0].reasoning"),
        (assistant(reasoning_content=1), "messages[0].reasoning_content"),
        (assistant(tool_calls="x"), "messages[0].tool_calls"),
        (assistant(tool_calls=[call("{}"), {"id": "x"}]), "messages[0].tool_calls[1].function"),
        (
            assistant(tool_calls=[{"function": {"arguments": "{}"}}]),
            "messages[0].tool_calls[0].function.name",
        ),
        *(
            (assistant(tool_calls=[call(bad)]), "messages[0].tool_calls[0].function.arguments")
            for bad in (7, [1], [], 0, "\ud800")
        ),
    ],
)
def test_a_mistake_is_named_by_its_place(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_messages([message], PLAIN)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_conversation_has_at_least_one_message() -> None:
    with pytest.raises(InvalidRequest, match="at least 1 message"):
        template_messages([], PLAIN)


@pytest.mark.parametrize(
    ("given", "expected"),
    [('{"a": "é"}', {"a": "é"}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{}", {})],
)
def test_arguments_are_objects_for_the_template(given: Any, expected: dict[str, Any]) -> None:
    message = one(assistant(tool_calls=[call(given)]))
    assert message["tool_calls"][0]["function"]["arguments"] == expected
    assert message["tool_calls"][0]["id"] == "c"


def test_arguments_are_text_for_a_template_that_wants_text() -> None:
    traits = TemplateTraits(arguments="text")
    for given, expected in [('{"a":  1}', '{"a":  1}'), ({"a": "é"}, '{"a":"é"}'), ("", "{}")]:
        message = one(assistant(tool_calls=[call(given)]), traits)
        assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_reasoning_goes_by_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = one(assistant(**{name: "hm"}))
        assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")
    assert one(assistant(reasoning=None, reasoning_content=None)) == assistant()


def test_developer_messages_become_system_messages_if_the_template_lacks_that_role() -> None:
    message = {"role": "developer", "content": "x"}
    assert one(message)["role"] == "system"
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}!{% endif %}").traits
    assert one(message, knows)["role"] == "developer"
    assert one({"role": "function", "name": "f", "content": "x"})["role"] == "tool"


def test_null_fields_are_absent_and_the_callers_message_is_not_changed() -> None:
    given = {"role": "user", "content": "x", "name": None, "tool_calls": None, "extra": 1}
    kept = dict(given)
    assert one(given) == {"role": "user", "content": "x", "extra": 1}
    assert given == kept


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen3", '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'),
        ("deepseek_v3", 'f\n```json\n{"a": "é"}\n```'),
    ],
)
def test_a_call_without_content_gets_through_real_templates(name: str, written: str) -> None:
    template = ChatTemplate(chat_template(name))
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": "é"}')]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    text = template.render(template_messages(messages, template.traits))
    assert written in text
    assert "42" in text
    assert "None" not in text


def test_a_legacy_function_call_becomes_a_tool_call() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    result = one(old)
    assert "function_call" not in result
    assert result["tool_calls"] == [
        {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]
    assert one({"role": "function", "name": "f", "content": "12"})["role"] == "tool"
    with pytest.raises(InvalidRequest) as caught:
        one(old | {"function_call": {"name": "f", "arguments": 7}})
    assert caught.value.param == "messages[0].function_call.arguments"
