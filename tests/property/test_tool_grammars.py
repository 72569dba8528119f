"""For every tool format, the grammar of required calls admits what models write, and the parser
reads it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest

from engine_core.grammar.markers import is_marker
from gateway.formats.answer_parser import AnswerSyntax
from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.harmony import Harmony
from gateway.formats.registry import TOOLS, Format, ToolSyntax
from gateway.formats.response_template import ResponseTemplate
from gateway.formats.response_template_loader import load
from gateway.formats.xml_parameters import XmlParameters
from tests.property.tool_samples import ANSWERS, FROM_TEMPLATES
from tests.support.examples import examples
from tests.support.format_tools import TYPED_TOOLS, tool
from tests.support.formats import Fixture, Sample, fixtures
from tests.support.response_templates import TEMPLATES
from tests.support.tokenizers import REAL_NAMES, family_card
from tests.support.tool_grammars import TOOLS as DECLARED
from tests.support.tool_grammars import Model, Walk, calls_of, fault

SEEDS = range(examples(2, 4))
BY_NAME = {declared.name: declared for declared in DECLARED}


def test_every_syntax_has_a_writer() -> None:
    for syntax in TOOLS.values():
        if isinstance(syntax, AnswerSyntax):
            assert type(syntax).write_required is not AnswerSyntax.write_required
            assert type(syntax).write_strict is not AnswerSyntax.write_strict
            assert type(syntax).frame is not AnswerSyntax.frame
        else:
            assert type(syntax).write_calls is not CallSyntax.write_calls


SYNTAXES: Mapping[str, ToolSyntax] = {
    **TOOLS,
    **{f"{name} (template)": load(template) for name, template in TEMPLATES.items()},
}
EVERY = pytest.mark.parametrize("name", SYNTAXES)
BOTH = pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "spelt"])


@cache
def model(name: str, tokens: bool) -> Model:
    format = Format(SYNTAXES[name])
    return Model(format, tuple(filter(is_marker, format.markers())) if tokens else ())


def thought(name: str) -> str:
    """Return the marker that ends the thinking if every answer starts inside it, else ""."""
    syntax = SYNTAXES[name]
    reasoning = syntax.reasoning if isinstance(syntax, ResponseTemplate) else None
    return reasoning.close[0] if reasoning and reasoning.default_inside else ""


@EVERY
@BOTH
@pytest.mark.parametrize("seed", SEEDS)
def test_a_demanded_answer_is_read_as_calls_that_fit(name: str, tokens: bool, seed: int) -> None:
    spoken = model(name, tokens)
    said = Walk(spoken, random.Random(seed))(spoken.bound.required_calls(DECLARED, many=True))
    calls = calls_of(spoken.read([*spoken.ids(thought(name)), *said], DECLARED))
    assert calls
    for call in calls:
        assert fault(call.arguments, BY_NAME[call.name].parameters or {}) is None


@EVERY
@BOTH
def test_one_call_is_one_and_of_the_tool_that_was_named(name: str, tokens: bool) -> None:
    spoken = model(name, tokens)
    for place, named in enumerate(DECLARED):
        body = spoken.bound.required_calls([named], many=False)
        said = Walk(spoken, random.Random(place))(body)
        (call,) = calls_of(spoken.read([*spoken.ids(thought(name)), *said], DECLARED))
        assert call.name == named.name


# ---- what the templates write is admitted
def behind_the_prompt(cases: Sequence[Fixture]) -> list[Fixture]:
    """Return a template's cases, without the part of the first message that the prompt has
    written.
    """
    opened = ("</think>", "<|start|>assistant")
    return [
        replace(case, text=case.text.removeprefix(opened[0]).removeprefix(opened[1]))
        for case in cases
    ]


SAMPLES: list[tuple[Sample, Sequence[Fixture]]] = [
    # The grammar admits a text before calls without a marker; the parser then finds no calls.
    *(
        (sample, fixtures(sample) if sample.name == "pythonic" else cases)
        for sample, cases in ANSWERS
    ),
    *(
        (replace(sample, name=f"{sample.name} (template)"), behind_the_prompt(cases))
        for sample, cases in FROM_TEMPLATES
    ),
]
ODD = ("hermes (opening tag)", "internlm", "gpt_oss (template)", "cohere (template)")
"""Samples of answers that parsers read although no grammar admits them.

Either no chat template writes them, or the checkpoint's response template describes how to read
them but not how to write some parts: `<|constrain|>`, or keys of a call that have no meaning.
"""
OTHERS = (
    *("granite (tags)", "hammer (fence)", "xlam (fence)", "xlam (tags)", "xlam (marker)"),
    *("llama3_json (marker)", "gigachat3 (role)", "llama4_pythonic"),
)
"""Samples whose opener is not the one that models with the sample's vocabulary prefer."""
LACKING = {"mistral": ("[ARGS]", "[CALL_ID]")}
"""Sample -> markers that only newer vocabularies have."""
CALLS = (
    *("one call", "three calls", "no arguments", "nested and unicode", "newlines around a string"),
    "closing tag in a string",
)


def calls_in(sample: Sample) -> tuple[str, ...]:
    """Return the names of the cases whose calls the grammar admits. If tags end values, no value
    may contain a tag, because the grammar cannot look at the text after it.
    """
    syntax = sample.format.tools
    inner = syntax.calls if isinstance(syntax, Harmony) else syntax
    return CALLS[:-1] if isinstance(inner, XmlParameters) else CALLS


def each(without: Sequence[str]) -> pytest.MarkDecorator:
    found = [(sample, cases) for sample, cases in SAMPLES if sample.name not in without]
    return pytest.mark.parametrize(
        ("sample", "cases"), found, ids=[sample.name for sample, _ in found]
    )


@cache
def speaker(name: str) -> Model:
    """Return a model whose vocabulary is that of the sample's family."""
    sample = next(sample for sample, _ in SAMPLES if sample.name == name)
    markers = sample.format.markers() if sample.markers is None else sample.markers
    known = set(filter(is_marker, markers)) - set(LACKING.get(name, ()))
    known = {marker for marker in known if not any(part in marker for part in sample.parts)}
    return Model(sample.format, (*sorted(known), *sample.parts))


@each(without=ODD + OTHERS)
def test_calls_as_templates_write_them_can_be_demanded(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    spoken = speaker(sample.name)
    body = spoken.bound.required_calls(TYPED_TOOLS, many=True)
    texts = [case.text.strip("\n") for case in cases if case.name in calls_in(sample)]
    assert len(texts) >= 3
    assert [spoken.refused(body, text) for text in texts] == [None] * len(texts)


@each(without=ODD)
def test_strict_tools_leave_text_free_and_calls_possible(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    spoken = speaker(sample.name)
    body = spoken.bound.strict_calls(TYPED_TOOLS, many=True)
    for case in cases:
        if case.name in (*calls_in(sample), "text alone", "text before a call"):
            assert (case.name, spoken.refused(body, case.text)) == (case.name, None)


@each(without=ODD)
def test_free_text_may_contain_the_beginning_of_any_marker(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    spoken, by_name = speaker(sample.name), {case.name: case.text for case in cases}
    said = f"Is it {', '.join(sorted(beginnings(sample)))} or so?"
    texts = [by_name["text alone"].replace("Hello", said)]
    if "text before a call" in by_name:
        texts.append(by_name["text before a call"].strip("\n").replace("One moment", said))
    for many in (True, False):
        body = spoken.bound.strict_calls(TYPED_TOOLS, many=many)
        assert [spoken.refused(body, text) for text in texts] == [None] * len(texts)


def beginnings(sample: Sample) -> set[str]:
    """Return all texts that begin a marker of the sample's format and contain no marker."""
    lexicon, markers = speaker(sample.name).bound.lexicon, set(sample.format.markers()) - {""}
    begun = {marker[:end] for marker in markers for end in range(1, len(marker))}
    return {
        text
        for text in begun
        if not lexicon.has_special(text) and not any(marker in text for marker in markers)
    }


STRICT = (tool("get_weather", city={"type": "string"}, days={"enum": [1, 2]}), *TYPED_TOOLS[1:])
LOOSE = (DeclaredTool("get_weather"), *TYPED_TOOLS[1:])


@each(without=ODD)
def test_a_call_of_a_strict_tool_has_no_other_arguments(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    spoken = speaker(sample.name)
    text = next(case.text for case in cases if case.name == "one call")
    for many in (True, False):
        assert spoken.refused(spoken.bound.strict_calls(LOOSE, many=many), text.strip("\n")) is None
        assert (
            spoken.refused(spoken.bound.strict_calls(TYPED_TOOLS, many=many), text.strip("\n"))
            is None
        )
        assert spoken.refused(spoken.bound.strict_calls(STRICT, many=many), text) is not None
        assert (
            spoken.refused(spoken.bound.strict_calls(TYPED_TOOLS[1:], many=many), text) is not None
        )


@each(without=ODD)
def test_without_parallel_calls_an_answer_ends_with_its_first(
    sample: Sample, cases: Sequence[Fixture]
) -> None:
    spoken = speaker(sample.name)
    text = next((case.text for case in cases if case.name == "three calls"), None)
    if text is not None:
        for write in (spoken.bound.strict_calls, spoken.bound.required_calls):
            body = write(TYPED_TOOLS, many=False)
            assert spoken.refused(body, text.strip("\n")) is not None


# ---- with vocabularies of families
FORMATS_OF_FAMILIES = [
    ("qwen3", "hermes"),
    ("qwen3", "qwen3_coder"),
    ("llama3_1", "llama3_json"),
    ("deepseek_v3", "deepseek_v3"),
    ("deepseek_v3", "deepseek_v31"),
]
FORMATS_OF_FAMILIES += [
    (f"real {family}", name)
    for family, name in FORMATS_OF_FAMILIES
    if f"real {family}" in REAL_NAMES
]


@pytest.mark.parametrize(("family", "name"), FORMATS_OF_FAMILIES)
def test_tokens_are_admitted_as_the_family_cuts_its_calls(family: str, name: str) -> None:
    card = family_card(family)
    (end,) = card.eos_token_ids
    spoken = Model(Format(TOOLS[name]), card=card)
    matcher = spoken.start(spoken.bound.required_calls(TYPED_TOOLS, many=True))
    cases = next(cases for sample, cases in SAMPLES if sample.name == name)
    text = next(case.text for case in cases if case.name == "three calls")
    ids = spoken.tokenizer.encode(text, False)
    for token in ids:
        assert spoken.admits(matcher, token)
        matcher.consume(token)
    assert matcher.is_complete or spoken.admits(matcher, end)
    assert [call.name for call in calls_of(spoken.read(ids, TYPED_TOOLS))] == [
        "get_weather",
        "now",
        "get_weather",
    ]
