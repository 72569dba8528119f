"""The format that is found is the one that parses what the template itself renders."""

from __future__ import annotations

import msgspec
import pytest

from gateway.formats.model_format import ModelOutputFormat
from gateway.prompt.template import ChatTemplate
from gateway.served_model import ModelOptions, ModelText
from gateway.text.tokenizer import Tokenizer
from protocol.config.gateway import ModelConfig
from protocol.engine.grammar import Thinking
from tests.support.published_templates import card_of_template
from tests.support.templates import UnlimitedTemplates

TURNS = """
{%- for m in messages -%}
    {{ '<|start|>' ~ m.role ~ '\n' ~ THINK ~ (m.content or '') }}
    {%- for call in m.tool_calls or [] -%}
        {%- set f = call.function -%}
        {{- BEFORE if loop.first -}}
        CALL
        {{- AFTER if loop.last -}}
    {%- endfor -%}
    {{ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant\n' ~ OPENED }}{%- endif -%}
"""
JSON_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
THINK = "('<think>\n' ~ m.reasoning ~ '\n</think>\n\n' if m.reasoning)"


def template(
    call: str = "",
    *,
    before: str = "",
    after: str = "",
    think: str = "''",
    opened: str = "",
    mentions: str = "",
) -> str:
    """Return a template that writes calls and reasoning in the given way. It mentions `mentions`
    in a branch that is never rendered."""
    source = TURNS.replace("THINK", think).replace("CALL", call).replace("OPENED", repr(opened))
    source = source.replace("BEFORE", repr(before)).replace("AFTER", repr(after))
    return source + "{% if false %}" + mentions + "{% endif %}"


def output_format(source: str) -> ModelOutputFormat:
    """Return the formats of a model that has this template."""
    card = card_of_template(source)
    written = ChatTemplate(source, card.special_tokens).written
    return ModelOutputFormat(card, Tokenizer(card), written=written)


FUNCTION_TAGS = (
    '<function name="{{ f.name }}">{% for k, v in f.arguments.items() %}'
    '<param name="{{ k }}">{{ v }}</param>{% endfor %}</function>'
)
QWEN_TAGS = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
MINIMAX_TAGS = (
    '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>'
)
HERMES = "<tool_call>\n" + JSON_OBJECT + "\n</tool_call>"
PARAMETERS = JSON_OBJECT.replace('"arguments"', '"parameters"')
ASKS_FOR_JSON = '{"name": function name, "parameters": dictionary}'
PYTHON_CALL = "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})"


@pytest.mark.parametrize(
    ("source", "tools"),
    [
        (template(FUNCTION_TAGS, mentions="<tool_sep> <arg_key>"), "minicpm5"),
        (template(HERMES, mentions="<arg_key> <tools> [TOOL_CALLS]"), "hermes"),
        (template(QWEN_TAGS, mentions="<minimax:tool_call> <|tool_call_start|>"), "qwen3_coder"),
        (
            template("<|role_sep|>\n" + JSON_OBJECT, before="<|message_sep|>\n\nfunction call"),
            "gigachat3",
        ),
        (
            template(
                PARAMETERS,
                before="<|header_start|><|python_start|><|python_end|>",
                mentions=ASKS_FOR_JSON,
            ),
            "llama4_json",
        ),
        (template(PARAMETERS, mentions=ASKS_FOR_JSON), "llama3_json"),
        (template(PARAMETERS), "llama3_json"),
        (template(PYTHON_CALL, before="[", after="]", mentions="[func_name1("), "pythonic"),
        (template(PYTHON_CALL, before="[", after="]"), "pythonic"),
        (
            template(PYTHON_CALL, before="<|tool_call_start|>[", after="]<|tool_call_end|>"),
            "lfm2",
        ),
        (template(JSON_OBJECT, before="<tool_calls>[", after="]</tool_calls>"), "jamba"),
        (template(JSON_OBJECT, before="[", after="]"), "xlam"),
        (template("<|tool_call|>[" + JSON_OBJECT + "]"), "granite"),
    ],
)
def test_the_format_of_rendered_calls_is_found_whatever_else_is_mentioned(
    source: str, tools: str
) -> None:
    found = output_format(source)
    assert found.tools == tools, found.why
    assert f"tool calls: {tools}, as the chat template writes " in found.why
    assert " in rendered calls" in found.why


@pytest.mark.parametrize(
    "source",
    [
        template("<|tool_call_start|>\n%run " + PYTHON_CALL + "\n<|tool_call_end|>"),
        template("<CALL>[" + JSON_OBJECT + "]</CALL>", mentions="<tool_calls>[ <|python_tag|>"),
        template("%run {{ f.name }} {{ f.arguments | tojson }}", mentions="<|action_start|>"),
    ],
    ids=["a known marker", "mentioned signs", "a token of the vocabulary"],
)
def test_calls_that_no_format_parses_have_no_format(source: str) -> None:
    found = output_format(source)
    assert found.tools is None
    assert "none, as no format parses the calls that the template renders" in found.why


def test_a_format_that_parses_the_first_call_only_is_found_and_named_as_such() -> None:
    without_opener = template(JSON_OBJECT + "\n</tool_call>\n", before="<tool_call>\n")
    found = output_format(without_opener)
    assert found.tools == "hermes"
    assert "of which the format parses only one at a time" in found.why


def test_a_template_that_cannot_be_rendered_is_searched_for_signs() -> None:
    fails = "{{ raise_exception('always') }}"
    found = output_format(fails + "{{ '<tool_call> </think>' if enable_thinking }}")
    assert (found.tools, found.reasoning) == ("hermes", "qwen3")
    assert "as the chat template writes <tool_call>" in found.why
    found = output_format(fails + "<function name= <param name= <tool_sep>")
    assert found.tools == "minicpm5"


def test_what_a_template_only_describes_is_found_in_its_source() -> None:
    described = "{{ 'Write <tool_call>{...}</tool_call>.' if tools }}"
    found = output_format(template() + described)
    assert found.tools == "hermes"
    assert "as the chat template writes <tool_call>" in found.why


RESPONSE = THINK.replace("if m.reasoning", "~ '<response>\n' if m.reasoning")


@pytest.mark.parametrize(
    ("source", "reasoning"),
    [
        (template(think=THINK, mentions="<response>{{ m.content }}</response>"), "qwen3"),
        (template(think=RESPONSE, mentions="</response>"), "ernie45"),
        (template(MINIMAX_TAGS, think=THINK, mentions="<response>"), "minimax_m2"),
        (template(HERMES, think=THINK, mentions="<arg_key> enable_thinking"), "qwen3"),
        (template(mentions="Use <think></think> and <response></response>."), "granite33"),
        (template(think="('[THINK]' ~ m.thinking ~ '[/THINK]' if m.thinking)"), "mistral"),
    ],
)
def test_the_format_of_rendered_reasoning_is_found(source: str, reasoning: str) -> None:
    found = output_format(source)
    assert found.reasoning == reasoning, found.why


@pytest.mark.parametrize(
    "mentions",
    [
        "Use <think></think> and <response></response>.",
        "{{ m.content.split('</think>')[-1] }} <\uff5cAssistant\uff5c>",
        "</think> <minimax:tool_call>",
    ],
    ids=["granite33", "deepseek_r1", "minimax_m2"],
)
def test_an_answer_is_reasoning_only_if_the_prompt_or_the_answer_opens_it(mentions: str) -> None:
    found = output_format(template(mentions=mentions))
    assert found.reasoning is not None
    start = found.answer_start("<|start|>user\nHi<|end|><|start|>assistant\n", {}, calls=True)
    assert not start.inside
    assert start.thinking == Thinking(
        closes="</think>", opens="<think>", inside=False, optional=True
    )
    opened = "<|start|>user\nHi<|end|><|start|>assistant\n<think>\n"
    assert found.answer_start(opened, {}, calls=True).inside


@pytest.mark.parametrize("field", ["chat_template", "tool_use_template"])
def test_a_served_model_has_the_format_that_its_templates_render(field: str) -> None:
    writes = template(FUNCTION_TAGS, mentions="<tool_sep> <arg_key>")
    thinks = template(think=THINK, mentions="enable_thinking")
    templates = {"chat_template": thinks, field: writes}
    card = msgspec.structs.replace(card_of_template(writes), **templates)
    options = ModelOptions.from_config(ModelConfig(), UnlimitedTemplates())
    found = ModelText.from_card(card, options, UnlimitedTemplates()).output_format
    assert found.tools == "minicpm5", found.why
    if field == "tool_use_template":
        assert "reasoning: qwen3, as the chat template writes </think> in rendered" in found.why


def test_a_format_that_the_operator_names_keeps_its_default() -> None:
    source = template()
    card = card_of_template(source)
    written = ChatTemplate(source).written
    found = ModelOutputFormat(card, Tokenizer(card), reasoning="deepseek_r1", written=written)
    assert found.answer_start("<|start|>assistant\n", {}, calls=True).inside
