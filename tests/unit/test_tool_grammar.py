"""The grammar of required calls in the model's own spelling, and tools that it cannot express."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from gateway.api.openai.prepare import Preparation
from gateway.api.openai.requests import ChatBody
from gateway.api.openai.tools import ToolPlan, tool_grammar
from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import pattern_not_starting_with, sequence
from gateway.formats.lexicon import Lexicon
from gateway.formats.registry import TOOLS, BoundFormat, Format, preferred_opener
from protocol.engine.grammar import (
    Either,
    Grammar,
    GrammarRule,
    Json,
    LiteralForm,
    Pattern,
    Repeat,
    Rules,
    Sequence,
    check_grammar,
)
from protocol.wire.errors import InvalidRequest
from tests.support.scripted_engine import scripted_card
from tests.support.served import served

NOW = DeclaredTool("now", {"type": "object", "properties": {}})


def bound(name: str, *tokens: str) -> BoundFormat:
    return BoundFormat(Format(TOOLS[name]), Lexicon(dict(enumerate(tokens))))


def written(name: str, *tokens: str) -> str:
    """Return the grammar of one call of one tool as text. Schemas are @. Patterns stand between
    slashes, optional parts in brackets, and alternatives in parentheses."""
    rules = bound(name, *tokens).required_calls([NOW], many=False)
    check_grammar(Grammar(body=rules))

    def text(form: Any) -> str:
        match form:
            case LiteralForm(literal):
                return literal
            case Json():
                return "@"
            case Pattern(pattern):
                return f"/{pattern}/"
            case GrammarRule(rule):
                return text(rules.rules[rule])
            case Sequence(items):
                return "".join(map(text, items))
            case Either(options):
                return f"({'|'.join(map(text, options))})"
            case Repeat(item, 0, 1):
                return f"[{text(item)}]"
        raise AssertionError(form)

    return text(rules.start)


CALL = '{"name": "now", "arguments": @}'
BLANKS = r"/[ \n]{0,8}/"
BARS = "<\uff5ctool▁{}\uff5c>"
V3 = "{}{}function{}now\n```json\n@\n```{}{}".format(
    *(BARS.format(word) for word in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
)


@pytest.mark.parametrize(
    ("name", "tokens", "text"),
    [
        ("hermes", (), f"<tool_call>\n{CALL}\n</tool_call>"),
        ("granite", ("<|tool_call|>",), f"<|tool_call|>[{BLANKS}{CALL}{BLANKS}]"),
        ("granite", ("<tool_call>",), f"<tool_call>[{BLANKS}{CALL}{BLANKS}]"),
        ("granite-20b-fc", (), f"<function_call> {CALL}"),
        (
            "internlm",
            (),
            '<|action_start|><|plugin|>\n{"name": "now", "parameters": @}<|action_end|>',
        ),
        ("llama3_json", ("<|python_tag|>",), '{"name": "now", "parameters": @}'),
        ("phi4_mini_json", (), f"functools[{BLANKS}{CALL}{BLANKS}]"),
        ("xlam", (), f"[{BLANKS}{CALL}{BLANKS}]"),
        ("gigachat3", ("<|role_sep|>",), f"function call<|role_sep|>\n{CALL}"),
        ("gigachat3", ("<|function_call|>", "<|role_sep|>"), f"<|function_call|>{CALL}"),
        ("apertus", (), f'<|tools_prefix|>[{BLANKS}{{"now": @}}{BLANKS}]<|tools_suffix|>'),
        (
            "cohere_command3",
            (),
            f'<|START_ACTION|>[{BLANKS}{{"tool_call_id": "/[0-9]{{1,3}}/", "tool_name": "now", '
            f'"parameters": @}}{BLANKS}]<|END_ACTION|>',
        ),
        ("inkling", (), '<|content_invoke_tool_json|>{"name": "now", "args": @}<|end_message|>'),
        ("deepseek_v3", (), V3),
        (
            "kimi_k2",
            (),
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:/0|[1-9][0-9]{0,3}/"
            "<|tool_call_argument_begin|>@<|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            "mistral",
            ("[TOOL_CALLS]",),
            f'[TOOL_CALLS][{BLANKS}{{"name": "now", "arguments": @'
            f'[, "id": "/[a-zA-Z0-9]{{9}}/"]}}{BLANKS}]',
        ),
        ("mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]now[ARGS]@"),
        ("mistral", ("[ARGS]", "[CALL_ID]"), "[TOOL_CALLS]now[[CALL_ID]/[a-zA-Z0-9]{9}/][ARGS]@"),
        (
            "openai",
            (),
            "(<|channel|>commentary to=functions.now| to=functions.now<|channel|>commentary) "
            "[<|constrain|>]json<|message|>@[<|call|>]",
        ),
    ],
)
def test_a_call_is_written_in_the_models_format(
    name: str, tokens: tuple[str, ...], text: str
) -> None:
    assert written(name, *tokens) == text


def test_arguments_are_an_object_even_if_the_schema_lacks_a_type() -> None:
    tool = DeclaredTool("f", {"properties": {"a": {}}})
    rules = bound("hermes").required_calls([tool, DeclaredTool("g")], many=True)
    assert rules.schemas == {
        "schema-0": '{"properties":{"a":{}},"type":"object"}',
        "schema-1": '{"type":"object"}',
    }


def test_the_opener_in_the_vocabulary_is_preferred() -> None:
    syntax = TOOLS["kimi_k2"]
    assert isinstance(syntax, CallSyntax)
    older = "<|tool_call_section_begin|>"
    assert preferred_opener(syntax, Lexicon({1: older})) == older
    assert preferred_opener(syntax, Lexicon()) == syntax.openers()[0]


@pytest.mark.parametrize("text", ["", " \n", "a", "b{", "ac", " a}", "語\n{"])
@pytest.mark.parametrize("unlikes", [["{"], ["{", "abc"], ["```json", "["]])
def test_the_pattern_admits_only_texts_that_do_not_start_with_a_given_text(
    text: str, unlikes: list[str]
) -> None:
    pattern = re.compile(re.sub(r"\\x\{(\w\w)\}", r"\\x\1", pattern_not_starting_with(unlikes)))
    assert pattern.fullmatch(text)
    for other in unlikes:
        assert pattern.fullmatch(other[:-1])
        assert not pattern.fullmatch(other)
        assert not pattern.fullmatch(f"\n {other}{text}")


def test_adjacent_literals_of_a_sequence_are_joined() -> None:
    assert sequence("a", sequence("b", Json("s")), "", sequence("c", "d")) == Sequence(
        [LiteralForm("ab"), Json("s"), LiteralForm("cd")]
    )


@pytest.mark.parametrize("mode", ["required", "named"])
def test_calls_that_no_format_can_write_cannot_be_required(mode: Any) -> None:
    plan = ToolPlan(declared=[NOW], mode=mode, name="now" if mode == "named" else None)
    for format in (None, BoundFormat(Format(), Lexicon())):
        with pytest.raises(InvalidRequest, match="--tool-format") as caught:
            tool_grammar(format, plan)
        assert caught.value.param == "tool_choice"


def test_a_required_call_without_a_tool_format_is_refused_with_advice() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    messages = [{"role": "user", "content": "Hi"}]
    fields = {"messages": messages, "tools": tools, "tool_choice": "required"}
    body = msgspec.convert(fields, ChatBody)
    with pytest.raises(InvalidRequest) as caught:
        Preparation(body, served(scripted_card(), tool_format="none"))
    assert caught.value.param == "tool_choice"
    assert str(caught.value) == (
        "tool_choice: tool calls cannot be required, because this model's tool format is unknown; "
        "set tool_choice to 'auto', or restart the server with --tool-format"
    )


PATHS = ["tools[0].function", "tools[1].function"]


def test_a_tool_that_a_format_cannot_write_is_refused_with_its_path() -> None:
    odd = DeclaredTool("a:b/c", {"type": "object"})
    plan = ToolPlan(declared=[NOW, odd], paths=PATHS, mode="required")
    with pytest.raises(InvalidRequest) as caught:
        tool_grammar(bound("pythonic"), plan)
    assert caught.value.param == "tools[1].function.name"


def test_a_tool_that_is_not_strict_accepts_any_arguments() -> None:
    tools = [NOW, DeclaredTool("f", {"type": "object", "maxProperties": 2})]
    plan = ToolPlan(declared=tools, paths=PATHS, mode="auto", strict=frozenset({"now"}))
    body = tool_grammar(bound("hermes"), plan)
    assert isinstance(body, Rules)
    assert sorted(body.schemas.values()) == [
        '{"type":"object","properties":{}}',
        '{"type":"object"}',
    ]
    assert tool_grammar(bound("hermes"), ToolPlan(declared=tools, mode="auto")) is None
