"""Each demand of a template is found by trial, and conversations are brought into its form.

The templates are short. Each has one demand that published templates have, too.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from gateway.prompt.fit import describes_tools, fitted_list, fitted_tools, template_messages
from gateway.prompt.template import ChatTemplate
from gateway.prompt.traits import TemplateTraits
from protocol.wire.errors import InvalidRequest

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "U"}
ANSWER = {"role": "assistant", "content": "A"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
)
TURN = "<{{ m.role }}>{{ m.content }}" + CALLS
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
PLAIN = TOOLS + "{% for m in messages %}" + TURN + "{% endfor %}"
"""A template that takes every conversation whose content is a string."""
ALTERNATES = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] or"
    " (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}"
)


def called(*names: str, content: str | None = None, **members: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **members}


def result(name: str, content: Any = None) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": content or f"R{name}"}


def prompt(
    source: str,
    messages: list[Any],
    tools: list[Any] | None = None,
    tool_format: str | None = None,
) -> str:
    template = ChatTemplate(source)
    traits = template.traits
    fitted = template_messages(messages, traits, tools, tool_format=tool_format)
    passed = None if describes_tools(traits, tool_format) else tools
    return template.render(
        fitted,
        tools=fitted_tools(passed, traits),
        documents=fitted_list(None, traits),
    )


def test_a_plain_template_has_the_plain_traits() -> None:
    traits = ChatTemplate(PLAIN).traits
    assert traits == TemplateTraits(tools=True, reasoning="omitted")


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
USER_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ p.text }}|{% endfor %}{% else %}{{ m.content }}{% endif %}"
    + CALLS
    + "{% endfor %}"
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}" + CALLS + "{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PLAIN, "<system>a\nb<user>a\nb<assistant>a\nb<assistant>(f {})<tool>a\nb"),
        (USER_PARTS, "<system>a\nb<user>a|b|<assistant>a\nb<assistant>(f {})<tool>a\nb"),
        (FIRST_PART, "<system>a\nb<user>a\nb<assistant>a\nb<assistant>(f {})<tool>a\nb"),
    ],
)
def test_parts_reach_each_role_in_the_form_that_the_template_renders(
    source: str, text: str
) -> None:
    roles = ("system", "user", "assistant")
    messages = [{"role": role, "content": PARTS} for role in roles]
    assert prompt(source, [*messages, called("f"), result("f", PARTS)], [TOOL]).endswith(text)


ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('only single tool-calls') }}{% endif %}" + TURN + "{% endfor %}"
)
FIRST_CALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}({{ m.tool_calls[0].function.name }} "
    "{{ m.tool_calls[0].function.arguments | tojson }}){% endif %}{% endfor %}"
)
NO_TEXT_WITH_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}" + CALLS + "{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [ONE_CALL, FIRST_CALL])
def test_calls_of_one_turn_become_turns_with_their_results(source: str) -> None:
    messages = [USER, called("f", "g", content="T"), result("g"), result("f"), USER]
    assert prompt(source, messages) == (
        "<user>U<assistant>T(f {})<tool>Rf<assistant>(g {})<tool>Rg<user>U"
    )


@pytest.mark.parametrize("between", [SYSTEM, {"role": "user", "content": "S"}])
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PLAIN, "(f {})(g {})<tool>Rg<tool>Rf<ROLE>S<user>U"),
        (ONE_CALL, "(f {})<tool>Rf<assistant>(g {})<tool>Rg<ROLE>S<user>U"),
        (ALTERNATES, "</tool_call><user>RESULTS\n\nS\n\nU"),
    ],
)
@pytest.mark.parametrize("place", [2, 3])
def test_results_follow_their_calls_and_other_messages_come_after_them(
    place: int, source: str, text: str, between: dict[str, Any]
) -> None:
    messages = [USER, called("f", "g"), result("g"), result("f"), USER]
    messages.insert(place, between)
    results = "\n\n".join(
        f'<tool_response call="{number}" name="{name}">\nR{name}\n</tool_response>'
        for number, name in ((2, "g"), (1, "f"))
    )
    text = text.replace("RESULTS", results).replace("ROLE", between["role"])
    assert prompt(source, messages).endswith(text)


def test_text_beside_calls_becomes_a_turn_if_the_template_drops_it() -> None:
    messages = [USER, called("f", content="T"), result("f")]
    assert prompt(NO_TEXT_WITH_CALLS, messages) == "<user>U<assistant>T<assistant>(f {})<tool>Rf"


def test_calls_are_written_as_text_if_the_template_renders_none() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text = f"<user>U<assistant>{call}<user><tool_response>\nRf\n</tool_response>"
    assert prompt(source, [USER, called("f"), result("f")]) == text
    alternating = prompt(ALTERNATES, [USER, called("f", "g"), result("f"), result("g"), USER])
    assert alternating.count("<user>") == 2
    assert alternating.endswith("Rg\n</tool_response>\n\nU")


NO_CALLS = TOOLS + (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}={{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("lfm2", "<|tool_call_start|>[f(), g()]<|tool_call_end|>"),
        (
            "granite",
            '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        ),
    ],
)
def test_calls_written_as_text_have_the_models_own_format(tool_format: str, text: str) -> None:
    messages = [USER, called("f", "g"), result("f"), result("g")]
    written = prompt(NO_CALLS, messages, [TOOL], tool_format)
    assert written == f"[f]<user>U<assistant>{text}<tool>=Rf<tool>=Rg"


ONLY_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<c>{{ c.function.name }}\n{{ c.function.arguments | tojson }}</c>{% endfor %}</end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_are_described_with_a_call_as_the_template_writes_it() -> None:
    """DeepSeek's templates render calls, but no tools."""
    assert ChatTemplate(ONLY_CALLS).traits.call_example == '<c>function-name\n{"name": "value"}</c>'
    text = prompt(ONLY_CALLS, [SYSTEM, USER], [TOOL], "deepseek_v3")
    system = text.partition("<user>")[0]
    assert '{"name":"f","parameters":{"type":"object"}}' in system
    assert '<c>function-name\n{"name": "value"}</c>' in system
    assert prompt(ONLY_CALLS, [USER], [TOOL]) == "<user>U</end><assistant>"


LATE_SYSTEM = [SYSTEM, USER, {"role": "system", "content": "L"}, ANSWER, USER]
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SYSTEM_IN_USER = (
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}<user>{{ m.content }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
LAST_SYSTEM_WINS = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PLAIN, "<system>S<user>U<system>L<assistant>A<user>U"),
        (SYSTEM_FIRST, "<system>S<user>U<user>L<assistant>A<user>U"),
        (SYSTEM_IN_USER, "<user>S<user>U<user>L<assistant>A<user>U"),
        (LAST_SYSTEM_WINS, "S<user>U<user>L<assistant>A<user>U"),
        (ALTERNATES, "<user>S\n\nU\n\nL<assistant>A<user>U"),
    ],
)
def test_a_system_message_further_on_stays_at_its_place(source: str, text: str) -> None:
    assert prompt(source, LATE_SYSTEM) == text


@pytest.mark.parametrize("source", [PLAIN, SYSTEM_FIRST, LAST_SYSTEM_WINS, ALTERNATES])
def test_the_prompt_before_a_new_turn_is_the_prompt_of_the_request_before(source: str) -> None:
    turns = [*LATE_SYSTEM, ANSWER, {"role": "system", "content": "M"}, USER]
    prompts = [prompt(source, turns[:end]) for end in (4, 6, 8)]
    for earlier, later in pairwise(prompts):
        assert later.startswith(earlier)


def test_system_messages_at_the_start_are_joined_if_the_template_takes_one() -> None:
    messages = [SYSTEM, {"role": "developer", "content": "D"}, USER]
    assert prompt(SYSTEM_FIRST, messages) == "<system>S\n\nD<user>U"
    assert prompt(LAST_SYSTEM_WINS, messages) == "S\n\nD<user>U"
    assert prompt(PLAIN, messages) == "<system>S<system>D<user>U"


SYSTEM_WITH_LAST_USER = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "({{ messages[0].content }}){% endif %}" + TURN + "{% endfor %}"
)


def test_a_system_message_is_not_lost_in_a_loop_of_calls() -> None:
    """Mistral's templates write it with the last user message, if that is the last message."""
    assert prompt(SYSTEM_WITH_LAST_USER, [SYSTEM, USER, ANSWER, USER]) == (
        "<user>U<assistant>A(S)<user>U"
    )
    messages = [SYSTEM, USER, called("f"), result("f")]
    assert prompt(SYSTEM_WITH_LAST_USER, messages) == "<user>S\n\nU<assistant>(f {})<tool>Rf"


NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids must have 9 characters') }}{% endif %}"
    "{{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }}{% endfor %}"
    "{% if m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    "{{ m.content }} {{ m.tool_call_id }}{% elif not m.tool_calls %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
NAMED = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.id }} {{ c.function.arguments | tojson }}{% endfor %} {{ m.tool_call_id }}{% endfor %}"
)


def test_ids_are_shortened_if_the_template_demands_nine_characters() -> None:
    own = {"id": "abcDEF123", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    kept = [USER, {"role": "assistant", "content": None, "tool_calls": [own]}]
    answer = {"role": "tool", "tool_call_id": "abcDEF123", "content": "R"}
    assert prompt(NINE, [*kept, answer]) == "Uf {} abcDEF123R abcDEF123"
    foreign = prompt(NINE, [USER, called("f"), result("f")])
    (call_id,) = {word[:9] for word in foreign.split("{} ")[1].split("Rf ")}
    assert call_id.isalnum()
    assert prompt(NINE, [USER, called("f"), result("f"), ANSWER]).startswith(foreign)


def test_calls_and_results_without_ids_get_them_if_the_template_needs_them() -> None:
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g")]
    messages = [
        USER,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "Rf"},
        {"role": "tool", "content": "Rg"},
    ]
    text = prompt(NINE, messages)
    for name in ("f", "g"):
        call_id = text.split(f"{name} {{}} ")[1][:9]
        assert f"R{name} {call_id}" in text


LOOKS_UP = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.role == 'tool' %}{% for n in messages %}{% for c in n.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{{ c.function.name }}={{ m.content }}{% endif %}{% endfor %}"
    "{% endfor %}{% elif not m.tool_calls %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("has_call_ids", [True, False])
@pytest.mark.parametrize("has_result_ids", [True, False])
def test_results_are_paired_with_calls_if_ids_are_missing(
    has_call_ids: bool, has_result_ids: bool
) -> None:
    turn, results = called("f", "g"), [result("f"), result("g")]
    if not has_call_ids:
        turn["tool_calls"] = [{"function": call["function"]} for call in turn["tool_calls"]]
    if not has_result_ids:
        results = [{"role": "tool", "content": each["content"]} for each in results]
    text = prompt(LOOKS_UP, [USER, turn, *results])
    assert text == "<user>U<assistant>(f {})(g {})<tool>f=Rf<tool>g=Rg"


def test_results_of_repeated_ids_have_the_names_of_their_own_calls() -> None:
    turn = called("f", "g")
    for call in turn["tool_calls"]:
        call["id"] = "same"
    results = [{"role": "tool", "tool_call_id": "same", "content": text} for text in ("R1", "R2")]
    source = PLAIN.replace("{{ m.content }}", "{{ m.name }}{{ m.content }}")
    assert prompt(source, [USER, turn, *results]).endswith("<tool>fR1<tool>gR2")


@pytest.mark.parametrize("header", ["", "{{ m.name }}"])
def test_ids_have_the_name_of_the_tool_if_calls_are_written_without_it(header: str) -> None:
    source = NAMED.replace("{{ m.content", header + "{{ m.content")
    text = prompt(source, [USER, called("f", "g"), result("f"), result("g")])
    for place, name in enumerate(("f", "g")):
        assert f"functions.{name}:{place} {{}}" in text
        assert f"R{name} functions.{name}:{place}" in text


THINKING = PLAIN.replace("{{ m.content }}", "{{ m.thinking }}{{ m.content }}")
THINKING_ONLY = THINKING.replace(
    "<{{ m.role }}>",
    "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('both') }}{% endif %}"
    "<{{ m.role }}>",
)
THINKING_PART = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.thinking if p.type == 'thinking' else p.text }}{% endfor %}"
    "{% endif %}" + CALLS + "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PLAIN.replace("{{ m.content", "{{ m.reasoning_content }}{{ m.content"), "WT(f {})"),
        (THINKING, "WT(f {})"),
        (THINKING_ONLY, "W\n\nT(f {})"),
        (THINKING_PART, "WT(f {})"),
    ],
)
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_reaches_the_template_in_the_form_that_it_renders(
    source: str, text: str, name: str
) -> None:
    messages = [USER, called("f", content="T", **{name: "W"}), result("f")]
    assert prompt(source, messages) == f"<user>U<assistant>{text}<tool>Rf"


STRICT_TOOLS = PLAIN.replace(
    "[{{ t.function.name }}]",
    "{% if t.function.description is undefined %}{{ raise_exception('description') }}{% endif %}"
    "[{{ t.function.name }}]",
)


def test_tools_get_a_description_if_the_template_needs_one() -> None:
    assert prompt(STRICT_TOOLS, [USER], [TOOL]) == "[f]<user>U"
    traits = ChatTemplate(STRICT_TOOLS).traits
    own = {"type": "function", "function": {"name": "f", "description": "D"}}
    assert fitted_tools([own], traits) == [own]


def test_a_template_that_loops_over_missing_tools_gets_an_empty_list() -> None:
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + PLAIN
    assert prompt(source, [USER]) == "<user>U"


def test_a_system_message_is_added_if_tools_are_rendered_only_with_it() -> None:
    source = (
        "{% if messages[0].role == 'system' %}" + TOOLS + "{% endif %}"
        "{% for m in messages %}" + TURN + "{% endfor %}"
    )
    assert prompt(source, [USER], [TOOL]) == "[f]<system><user>U"
    assert prompt(source, [USER]) == "<user>U"


def test_a_call_without_text_is_written_without_an_empty_message() -> None:
    source = (
        "{% for m in messages %}{% if m.content is not none %}<{{ m.role }}>{{ m.content }}"
        "{% endif %}" + CALLS + "{% endfor %}"
    )
    assert prompt(source, [USER, called("f"), result("f")]) == "<user>U(f {})<tool>Rf"


def test_a_call_without_text_has_an_empty_text_if_only_blanks_differ() -> None:
    blank_and_text = "{{ ' ' if m.content is string }}{{ m.content or '' }}"
    source = PLAIN.replace("{{ m.content }}", blank_and_text)
    assert prompt(source, [USER, called("f")]).endswith("<assistant> (f {})")


@pytest.mark.parametrize("role", ["m.role", "m.role | title", "m.role | upper"])
def test_results_are_text_if_the_template_writes_the_name_of_any_role(role: str) -> None:
    source = "{% for m in messages %}<{{ " + role + " }}>{{ m.content }}{% endfor %}"
    text = prompt(source, [USER, called("f"), result("f")])
    assert text.lower().endswith("<user><tool_response>\nrf\n</tool_response>")


def test_a_template_may_look_up_the_tool_of_a_call() -> None:
    source = TOOLS + (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set t = (tools | selectattr('function.name', 'equalto', c.function.name) | first) %}"
        "({{ t.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    )
    text = prompt(source, [USER, called("f"), result("f")], [TOOL])
    assert text == "[f]<user>U<assistant>(f {})<tool>Rf"


def test_the_place_of_a_tools_description_is_kept() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "D", "parameters": {}}}
    (fitted,) = fitted_tools([tool], TemplateTraits(tool_descriptions=True)) or ()
    assert list(fitted["function"]) == ["name", "description", "parameters"]


def test_empty_tool_calls_are_left_out() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls is defined %}{{ m.tool_calls[0].function.name }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    assert prompt(source, [USER, {**ANSWER, "tool_calls": []}, USER]) == "UAU"


@pytest.mark.parametrize("text", ['{"a": ', "[1]", "3", '"x"', '{"a": 1e400}', "{" * 5000])
def test_arguments_that_a_model_wrote_wrongly_are_accepted(text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    as_object = prompt(PLAIN, messages)
    assert as_object == f"<user>U<assistant>(f {json.dumps({'INVALID_JSON': text})})"
    source = PLAIN.replace("c.function.arguments | tojson", "c.function.arguments + ''")
    assert prompt(source, messages) == f"<user>U<assistant>(f {text})"


def test_results_written_as_text_say_which_of_several_calls_they_answer() -> None:
    one, two = [USER, called("f"), result("f")], [called("g", "g"), result("g"), result("g")]
    for call, answer, own_id in zip(two[0]["tool_calls"], two[1:], ("b", "a"), strict=True):
        call["id"] = answer["tool_call_id"] = own_id
    text = prompt(ALTERNATES, [*one, two[0], two[2], two[1]])
    assert "<tool_response>\nRf\n</tool_response>" in text
    assert text.index('<tool_response call="2" name="g">') < text.index(
        '<tool_response call="1" name="g">'
    )
    assert text.startswith(prompt(ALTERNATES, one))


def test_a_template_that_omits_what_the_user_writes_is_known() -> None:
    source = "{% for m in messages if m.role == 'query' %}{{ m.content }}{% endfor %}"
    assert not ChatTemplate(source).traits.renders_users
    assert ChatTemplate(PLAIN).traits.renders_users


def test_a_call_with_arguments_of_a_wrong_type_is_refused() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": 7}}
    with pytest.raises(InvalidRequest) as caught:
        prompt(PLAIN, [USER, {"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
