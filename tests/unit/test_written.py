"""What a template writes for calls and reasoning is found by rendering tiny conversations."""

from __future__ import annotations

import pytest

from gateway.prompt.template import ChatTemplate
from gateway.prompt.written import ANSWER, CALLS, MAX_TURN_CHARS, THOUGHT, WrittenTurns

(NAME, ARGUMENTS), (OTHER, OTHER_ARGUMENTS) = CALLS
VALUE = ARGUMENTS["str33t"]
TURNS = """
{%- for m in messages -%}
    <|{{ m.role }}|>
    {%- if m.content is string -%}{{ m.content }}{%- endif -%}
    {%- for call in m.tool_calls or [] -%}
        {%- set f = call.function -%}
        CALL
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
JSON_CALL = "<call>{{ f.name }}{{ f.arguments | tojson }}</call>"


def written(source: str) -> WrittenTurns:
    return ChatTemplate(source).written


def turns(call: str) -> str:
    """Return a template that writes each call as `call` does."""
    return TURNS.replace("CALL", call)


def test_an_answer_is_separated_from_the_prompt_and_the_result() -> None:
    found = written(turns(JSON_CALL))
    assert found.call is not None
    assert found.calls is not None
    assert found.call.opening == "<|assistant|>"
    first = f'<call>{NAME}{{"str33t": "{VALUE}"}}</call>'
    assert found.call.answer == first + "<|tool|>"
    second = f'<call>{OTHER}{{"str33t": "{OTHER_ARGUMENTS["str33t"]}"}}</call>'
    assert found.calls.answer == first + second + "<|tool|>"
    assert found.reasoning is None
    assert found.has_prompt


def test_a_marker_that_the_prompt_begins_otherwise_is_not_split() -> None:
    source = turns(JSON_CALL).replace("-%}<|assistant|>", "-%}<|assistant|><cite>")
    found = written(source).call
    assert found is not None
    assert (found.opening, found.answer[:6]) == ("<|assistant|>", "<call>")


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson if tools }}" + turns("{% if tools %}" + JSON_CALL + "{% endif %}"),
        turns("<call>{{ f.name }}" + "{{ '' + f.arguments }}"),
        turns(JSON_CALL)
        .replace("is string", "is not none")
        .replace("m.content }}", "m.content[0].text }}"),
        turns(JSON_CALL).replace("f = call", "f = {'a': call}[call.id | length == 9 and 'a']"),
        turns("<call>{{ call.id }}{{ f.arguments | tojson }}"),
        turns(JSON_CALL).replace("m.content is string", "m.content[0] is string or m.content"),
    ],
    ids=["needs tools", "JSON text", "parts", "short ids", "ids for names", "needs content"],
)
def test_a_call_is_found_in_each_form_that_templates_need(source: str) -> None:
    found = written(source)
    assert found.call is not None
    assert found.calls is not None
    assert NAME in found.call.answer
    assert VALUE in found.call.answer
    assert OTHER in found.calls.answer


@pytest.mark.parametrize(
    "call",
    [
        "",
        "<call>{{ f.name }}",
        "{{ call }}",
        "{{ call | tojson }}",
        "{{ f.name }}{{ f.arguments if f.arguments is mapping else raise_exception('') }}",
        "<call>{{ f.name }}{{ f.arguments | tojson }}" + "x" * MAX_TURN_CHARS,
        "{{ raise_exception('no') }}",
    ],
    ids=["nothing", "name only", "as Python", "as passed", "arguments as Python", "long", "error"],
)
def test_what_is_not_written_in_a_format_does_not_count(call: str) -> None:
    found = written(turns(call))
    assert (found.call, found.calls) == (None, None)
    assert found.has_prompt


def test_a_template_may_write_one_call_only() -> None:
    one = "{{ raise_exception('one') if m.tool_calls | length > 1 }}"
    found = written(turns(one + JSON_CALL))
    assert found.call is not None
    assert found.calls is None


@pytest.mark.parametrize(
    "shown",
    [
        "{{ m.reasoning_content }}",
        "{{ m.reasoning }}",
        "{{ m.thinking }}",
        "{{ m.thinking if not m.content }}",
        "{{ m.thinking if m.tool_calls }}",
        "{{ m.content[0].thinking if m.content is not string }}",
        "{{ m.reasoning if enable_thinking }}",
        "{{ m.reasoning if thinking_mode == 'on' }}",
    ],
    ids=["reasoning_content", "reasoning", "thinking", "or", "calls", "part", "switch", "mode"],
)
def test_reasoning_is_found_wherever_a_template_reads_it(shown: str) -> None:
    think = "{%- if m.role == 'assistant' -%}<think>" + shown + "</think>{%- endif -%}"
    source = turns(JSON_CALL).replace("{%- if m.content is", think + "{%- if m.content is")
    found = written(source).reasoning
    assert found is not None
    assert found.answer.startswith(f"<think>{THOUGHT}</think>")


def test_an_answer_with_reasoning_has_its_content_if_the_template_allows_both() -> None:
    think = "{{ '<think>' ~ m.reasoning ~ '</think>' if m.reasoning }}"
    found = written(turns("").replace("{%- if m.content is", think + "{%- if m.content is"))
    assert found.reasoning is not None
    assert found.reasoning.answer.strip() == f"<think>{THOUGHT}</think>{ANSWER}"


def test_a_part_that_is_printed_as_it_was_passed_is_no_reasoning() -> None:
    source = turns("").replace("m.content is string", "true")
    assert written(source).reasoning is None


def test_a_template_that_renders_nothing_has_no_prompt() -> None:
    assert written("{{ raise_exception('always') }}") == WrittenTurns()
    assert not written("no messages").has_prompt
