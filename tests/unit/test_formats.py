"""Formats by name, and guessed from template and vocabulary."""

from __future__ import annotations

import json

import pytest

from gateway.output.detect import REASONING_RULES, TOOL_RULES, detect
from gateway.output.formats import READ_WHOLE, TOOLS, bind, format_of
from gateway.output.reasoning import REASONING
from tests.support.tokenizers import family, real_tokenizer

PEER_REASONING = """
    deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 holo2 poolside_v1 cohere_command3
    cohere_command4 ernie45 gemma4 glm45 glm47 ling3 kimi_k2 mimo minicpmv qwen3 step3p5
    nemotron_v3 granite_thinking_parser granite hunyuan_a13b hy_v3 hy_v4 kimi_k3 k2_horizon
    minimax_m2 minimax_m2_append_think minimax_m3 mistral olmo3 step3 openai_gptoss plamo3
    muse_glimmer seed_oss inkling
"""
JSON_TOOLS = """
    hermes qwen3_json longcat ernie45 granite4 granite-20b-fc granite internlm hunyuan_a13b jamba
    xlam phi4_mini_json mistral llama3_json llama4_json deepseek_v3 deepseek_v31 kimi_k2
    gigachat3 apertus cohere_command3 cohere_command4 inkling
"""


def nothing(token: str) -> None:
    """The id of a token in an empty vocabulary."""


def test_every_name_that_people_know_is_there() -> None:
    assert set(PEER_REASONING.split()) <= REASONING.keys() | READ_WHOLE.keys()
    assert set(JSON_TOOLS.split()) <= TOOLS.keys()


def test_a_name_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"no tool format 'herms'.*hermes.*mistral"):
        format_of("herms", None)
    with pytest.raises(ValueError, match=r"no reasoning format 'qwen'.*deepseek_r1.*qwen3"):
        format_of("hermes", "qwen")


def test_no_name_means_that_nothing_is_looked_for() -> None:
    machine = bind(format_of(None, None), real_tokenizer("smollm2")).machine()
    text = "<think>a</think><tool_call>{}</tool_call>"
    assert [event.text for event in machine.push(text)] == [text]  # type: ignore[union-attr]


def test_every_format_tells_its_markers_and_makes_a_machine() -> None:
    for tools in [None, *TOOLS]:
        for reasoning in (None, "qwen3"):
            format = format_of(tools, reasoning)
            assert all(marker and marker.strip() for marker in format.markers())
            words = format.lexicon(nothing)
            assert format.machine(words).finish() == []


def test_a_rule_names_a_format_that_exists() -> None:
    assert {rule.name for rule in TOOL_RULES} <= TOOLS.keys()
    assert {rule.name for rule in REASONING_RULES} <= REASONING.keys() | READ_WHOLE.keys()


def test_reasoning_that_is_part_of_a_whole_answer_brings_its_syntax() -> None:
    assert format_of(None, "openai_gptoss") == format_of("openai", None)
    assert format_of("kimi_k3", "kimi_k3").tools is TOOLS["kimi_k3"]
    with pytest.raises(ValueError, match="cannot be read together with 'hermes'"):
        format_of("hermes", "openai_gptoss")


@pytest.mark.parametrize("rule", [*TOOL_RULES, *REASONING_RULES], ids=lambda rule: rule.name)
def test_every_rule_finds_its_format_and_says_why(rule: object) -> None:
    assert isinstance(rule, type(TOOL_RULES[0]))
    table = TOOL_RULES if rule in TOOL_RULES else REASONING_RULES
    found = detect("{{ x }} " + " ".join(rule.texts), nothing)
    chosen = found.tools if table is TOOL_RULES else found.reasoning
    index = next(i for i, each in enumerate(table) if each.name == chosen)
    assert index <= table.index(rule)  # a rule before it may fit as well
    assert all(text in found.why for text in table[index].texts) or chosen == rule.name
    assert chosen is not None


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call>\\n{{ tool_call }} </think> enable_thinking", "hermes", "qwen3"),
        ("<tool_call>\\n<function= <parameter= </think> enable_thinking", "qwen3_coder", "qwen3"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<tool_call> <arg_key> </think>", "glm47", "glm45"),
        ("<minimax:tool_call> </think>", "minimax_m2", "minimax_m2"),
        ("hello", None, None),
        (None, None, None),
    ],
)
def test_a_template_decides_by_its_most_peculiar_markers(
    template: str | None, tools: str | None, reasoning: str | None
) -> None:
    found = detect(template, nothing)
    assert (found.tools, found.reasoning) == (tools, reasoning)


@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        ("qwen3", "hermes", "qwen3"),
        ("deepseek_v3", "deepseek_v3", None),
        ("llama3_1", None, None),
    ],
)
def test_real_models_are_recognised(name: str, tools: str, reasoning: str | None) -> None:
    template = family(name)[1].get("chat_template")
    assert template is None or json.dumps(template)
    found = detect(template, real_tokenizer(name).token_id)
    assert (found.tools, found.reasoning) == (tools, reasoning), found.why
    assert found.why.count("as ") >= 2
