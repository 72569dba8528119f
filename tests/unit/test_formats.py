"""Formats chosen by name, and detected from the template and the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken

from gateway.formats import detect as detection
from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.detect import ANY, REASONING_RULES, TOOL_RULES, Detected, DetectionRule, detect
from gateway.formats.events import (
    Content,
    Event,
    Finished,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolCallEnd,
    merged,
)
from gateway.formats.model_format import ModelOutputFormat
from gateway.formats.reasoning import REASONING
from gateway.formats.registry import REASONING_OF_ANSWER_SYNTAX, TOOLS, bind, format_of
from gateway.text.tokenizer import Tokenizer
from protocol.engine.grammar import Thinking
from protocol.engine.messages import Output
from tests.support.scripted_engine import byte_tokenizer
from tests.support.tokenizers import card_of, chat_template, tokenizer_of

PEER_REASONING = """
    deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 holo2 poolside_v1 cohere_command3
    cohere_command4 ernie45 gemma4 glm45 glm47 ling3 kimi_k2 mimo minicpmv qwen3 step3p5
    nemotron_v3 granite_thinking_parser granite hunyuan_a13b hy_v3 hy_v4 kimi_k3 k2_horizon
    minimax_m2 minimax_m2_append_think minimax_m3 mistral olmo3 step3 openai_gptoss plamo3
    muse_glimmer muse seed_oss inkling apriel solar_open
"""
JSON_TOOLS = """
    hermes qwen3_json longcat ernie45 granite4 granite-20b-fc granite internlm hunyuan_a13b jamba
    xlam phi4_mini_json mistral llama3_json llama4_json deepseek_v3 deepseek_v31 kimi_k2
    gigachat3 apertus cohere_command3 cohere_command4 inkling
"""


def nothing(token: str) -> None:
    """Return the id of a token in an empty vocabulary, which is always None."""


def test_common_names_of_formats_are_accepted() -> None:
    assert set(PEER_REASONING.split()) <= REASONING.keys() | REASONING_OF_ANSWER_SYNTAX.keys()
    assert set(JSON_TOOLS.split()) <= TOOLS.keys()


def test_a_name_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"no tool format 'herms'.*hermes.*mistral"):
        format_of("herms", None)
    with pytest.raises(ValueError, match=r"no reasoning format 'qwen'.*deepseek_r1.*qwen3"):
        format_of("hermes", "qwen")


def test_without_a_format_markers_are_plain_text() -> None:
    machine = bind(format_of(None, None), tokenizer_of("smollm2")).parser()
    text = "<think>a</think><tool_call>{}</tool_call>"
    assert [event.text for event in machine.push(text)] == [text]  # type: ignore[union-attr]


def test_every_format_lists_its_markers_and_makes_a_parser() -> None:
    for tools in [None, *TOOLS]:
        for reasoning in (None, "qwen3"):
            format = format_of(tools, reasoning)
            assert all(marker and marker.strip() for marker in format.markers())
            words = format.lexicon(nothing)
            assert format.parser(words).finish() == []


def test_a_rule_names_a_format_that_exists() -> None:
    assert {rule.name for rule in TOOL_RULES} <= TOOLS.keys()
    assert {
        rule.name for rule in REASONING_RULES
    } <= REASONING.keys() | REASONING_OF_ANSWER_SYNTAX.keys()


def test_reasoning_that_is_part_of_a_whole_answer_brings_its_syntax() -> None:
    assert format_of(None, "openai_gptoss") == format_of("openai", None)
    assert format_of("muse", "muse_glimmer") == format_of("muse_glimmer", None)
    assert format_of("kimi_k3", "kimi_k3").tools is TOOLS["kimi_k3"]
    with pytest.raises(ValueError, match="cannot be read together with 'hermes'"):
        format_of("hermes", "openai_gptoss")


def found_by_signs(rule: DetectionRule) -> Detected:
    """Return what is detected for a template that has the signs of `rule` and no others."""
    texts = [text.replace(ANY, ":77") for text in rule.texts]
    suffixed = ["<tool_calls:77>"] if texts != [*rule.texts] else []
    return detect("{{ x }} " + " ".join(texts), nothing, suffixed)


@pytest.mark.parametrize("rule", [*TOOL_RULES, *REASONING_RULES], ids=lambda rule: rule.name)
def test_every_rule_finds_its_format_and_explains_it(rule: DetectionRule) -> None:
    found = found_by_signs(rule)
    chosen = found.tools if rule in TOOL_RULES else found.reasoning
    assert chosen == rule.name, "another rule shadows it"
    assert all(text.replace(ANY, ":77") in found.why for text in rule.texts)
    assert found.written is (found.tools is not None)


@pytest.mark.parametrize("table", ["TOOL_RULES", "REASONING_RULES"])
def test_every_rule_is_needed(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a rule, a template with its signs alone has another format, or another reason."""
    rules = getattr(detection, table)
    for rule in rules:
        found = found_by_signs(rule)
        with monkeypatch.context() as changed:
            changed.setattr(detection, table, tuple(each for each in rules if each != rule))
            assert found_by_signs(rule).why != found.why, rule


def vocabulary(*tokens: str) -> Callable[[str], int | None]:
    return {token: i for i, token in enumerate(tokens)}.get


@pytest.mark.parametrize(
    ("template", "tokens", "tools", "why"),
    [
        ("x", ("[TOOL_CALLS]",), "mistral", "as the vocabulary has [TOOL_CALLS]"),
        (
            "x <|action_start|>",
            ("<|plugin|>",),
            "internlm",
            "as the chat template writes <|action_start|> and the vocabulary has <|plugin|>",
        ),
        (
            "<tool_call>",
            ("<tool_call>",),
            "hermes",
            "as the chat template writes <tool_call> (<tool_call> in the vocabulary, too)",
        ),
        (
            "<tool_call>",
            ("[TOOL_CALLS]",),
            "hermes",
            "writes <tool_call> (though the vocabulary has [TOOL_CALLS], as mistral would)",
        ),
        (
            "x",
            ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
            "llama3_json",
            "as the vocabulary has <|start_header_id|> and <|end_header_id|> and <|eot_id|>",
        ),
        ("x", ("<|eot_id|>",), None, "as neither the chat template nor the vocabulary"),
        (None, (), None, "as there is no chat template and no marker in the vocabulary"),
    ],
)
def test_the_explanation_names_template_and_vocabulary(
    template: str | None, tokens: tuple[str, ...], tools: str | None, why: str
) -> None:
    found = detect(template, vocabulary(*tokens), tokens)
    assert found.tools == tools
    assert why in found.why


HY_NAMES = ("tool_calls{}", "tool_call{}", "think{}", "arg_key", "arg_value{}")
HY_TOKENS = [bracket + name + ">" for name in HY_NAMES for bracket in ("<", "</")]


@pytest.mark.parametrize("name", ["hy_v3", "hy_v4"])
def test_markers_with_the_suffix_of_a_vocabulary_are_found_and_parsed(name: str) -> None:
    tokens = [token.format(":6124c78e") for token in HY_TOKENS]
    tokens += ["<tool_sep:6124c78e>"] if name == "hy_v3" else []
    inner = byte_tokenizer()
    inner.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer = Tokenizer(card_of(inner.to_str().encode()))
    template = "{% for t in tools %}{{ '<tool_calls' + suffix + '>' }}{% endfor %}"
    reading = ModelOutputFormat(card_of(b"", chat_template=template), tokenizer)
    assert (reading.tools, reading.reasoning) == (name, name)
    assert "the vocabulary has <tool_calls:6124c78e>" in reading.why

    kwargs = {"reasoning_effort": "high"}
    begun = reading.answer_start("<|hy_Assistant|><think:6124c78e>", kwargs, calls=True)
    assert begun.inside
    assert begun.thinking == Thinking(
        opens="<think:6124c78e>", closes="</think:6124c78e>", inside=True
    )
    assert begun.bound is not None
    assert set(tokens) == set(begun.bound.lexicon.tokens.values())
    readers = ParserFactory(
        tokenizer, None, AnswerOptions(format=begun.bound, starts_inside=True, new_id=lambda: "id")
    )
    separator = "<tool_sep:6124c78e>" if name == "hy_v3" else ""
    text = (
        f"Hm.</think:6124c78e>Yes<tool_calls:6124c78e><tool_call:6124c78e>f{separator}"
        "<arg_key>a</arg_key><arg_value:6124c78e>é</arg_value:6124c78e>"
        "</tool_call:6124c78e></tool_calls:6124c78e>"
    )
    ids = tokenizer.encode(text, False)
    for size in (1, 3, len(ids)):
        reader, events = readers.new(), []
        for at in range(0, len(ids), size):
            events += reader.push(Output(request=1, tokens=ids[at : at + size])).events
        events += reader.push(Output(request=1, finish="stop")).events
        assert merged(events) == [
            Reasoning("Hm."),
            Content("Yes"),
            ToolCall(0, "id", "f"),
            ToolArguments(0, '{"a": "é"}'),
            ToolCallEnd(0),
            Finished("tool_calls"),
        ]


NOW = [ToolCall(0, "id", "now"), ToolArguments(0, '{"tz": "UTC"}'), ToolCallEnd(0)]
WHOLE_ANSWERS = [
    (
        "solar_open",
        "solar_open",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>One moment.<|end|><|begin|>assistant"
        "<|tool_calls|><|tool_call:begin|>id<|tool_call:name|>now<|tool_call:args|>"
        '{"tz": "UTC"}<|tool_call:end|><|calls|>',
        [Reasoning("Hm."), Content("One moment."), *NOW],
    ),
    (
        "jamba",
        "apriel",
        "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nOne moment.\n"
        '<tool_calls>[{"name": "now", "arguments": {"tz": "UTC"}, "id": "0"}]</tool_calls>'
        "[END FINAL RESPONSE]",
        [Reasoning("Hm."), Content("One moment."), *NOW],
    ),
    (
        "minicpm3",
        "minicpm3",
        '<|thought_start|>\nHm.\n<|thought_end|>\n<|tool_call_start|>\n```python\nnow(tz="UTC")'
        "\n```\n<|tool_call_end|>\nOne moment.",
        [Reasoning("Hm."), *NOW, Content("One moment.")],
    ),
    (
        "nemotron_json",
        "qwen3",
        "<think>\nHm.\n</think>\n\nOne moment.\n"
        '<TOOLCALL>[{"name": "now", "arguments": {"tz": "UTC"}}]</TOOLCALL>',
        [Reasoning("Hm."), Content("One moment."), *NOW],
    ),
]


@pytest.mark.parametrize(("tools", "reasoning", "text", "events"), WHOLE_ANSWERS)
def test_a_whole_answer_is_parsed_by_a_pair_of_formats(
    tools: str, reasoning: str, text: str, events: list[Event]
) -> None:
    format = format_of(tools, reasoning)
    words = format.lexicon(nothing)
    for size in range(1, len(text) + 1):
        machine = format.parser(words, new_id=lambda: "id")
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [event for piece in pieces for event in machine.push(piece)]
        assert merged(found + machine.finish()) == events


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call>\\n{{ tool_call }} </think> enable_thinking", "hermes", "qwen3"),
        ("<tool_call>\\n<function= <parameter= </think> enable_thinking", "qwen3_coder", "qwen3"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<tool_call> <arg_key> </think>", "glm47", "glm45"),
        ("<minimax:tool_call> </think>", "minimax_m2", "minimax_m2"),
        ("<|tool_call_start|> ```python <|thought_start|>", "minicpm3", "minicpm3"),
        ("<|tool_call_start|>[", "lfm2", None),
        ("<beginning_of_sentence> <tool_calls>", "minimax_m1", None),
        ("<TOOLCALL>[ <think> </think>", "nemotron_json", "qwen3"),
        ("<|think|> <|tool_calls|> <|tool_call:begin|>", "solar_open", "solar_open"),
        ("<|from|> <|recipient|>", "functionary_v22", None),
        ("<function=example_function_name> <|python_tag|>", "functionary_v31", None),
        (">>>${recipient}", "functionary_v32", None),
        ("[BEGIN OF AVAILABLE_TOOLS]", "hammer", None),
        ("[BEGIN FINAL RESPONSE] <tool_calls>[", "jamba", "apriel"),
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
        ("llama3_1", "llama3_json", None),
    ],
)
def test_real_models_are_recognised(name: str, tools: str, reasoning: str | None) -> None:
    template = chat_template(name)
    tokenizer = tokenizer_of(name)
    found = detect(template, tokenizer.token_id, tokenizer.added_tokens.values())
    assert (found.tools, found.reasoning) == (tools, reasoning), found.why
    assert found.why.count("as ") >= 2
