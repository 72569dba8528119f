"""For every tool format: an answer with markup of calls but without a call has a warning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.formats.answer_parser import AnswerSyntax
from gateway.formats.call_parser import MARKUP, CallSyntax
from gateway.formats.event_builder import PARSE_FAILED
from gateway.formats.events import OutputWarning, ToolCallEnd
from gateway.formats.lexicon import Lexicon
from gateway.formats.registry import TOOLS, ToolSyntax
from gateway.formats.response_template import ResponseTemplate
from tests.property.tool_samples import BY_NAME, SAMPLES
from tests.support.formats import Call, Fixture, Sample, lexicon, read, units, warnings

BOTH = pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "spelt"])
UNDECLARED = Call("elsewhere", {"city": "Oslo"})


def markup(syntax: ToolSyntax | None) -> tuple[str, ...]:
    """Return the markers of calls in a syntax."""
    if isinstance(syntax, CallSyntax):
        return tuple(filter(MARKUP.match, {*syntax.openers(), *syntax.signs()}))
    if isinstance(syntax, ResponseTemplate):
        return syntax.signs()
    assert isinstance(syntax, AnswerSyntax)
    return {
        "openai": ("to=functions.", "<|constrain|>"),
        "muse_glimmer": ("<atem:function_calls>", "<atem:invoke name=", "</atem:invoke>"),
        "functionary_v22": ("<|from|>assistant\n<|recipient|>",),
        "functionary_v32": (">>>",),
        "kimi_k3": ("<|open|>tools", "<|open|>call", "<|open|>argument"),
    }[next(name for name, each in TOOLS.items() if each == syntax)]


def damaged(text: str) -> Iterator[str]:
    """Yield the text of calls without its start, without its end, and without a part inside."""
    for at in range(1, len(text)):
        yield text[at:]
        yield text[:at]
        yield text[: at // 2] + text[at:]


def silent(sample: Sample, text: str, words: Lexicon) -> bool:
    """Return whether the answer has neither a complete call nor a warning."""
    tools = sample.format.tools
    thinking = tools.reasoning if isinstance(tools, ResponseTemplate) else None
    if thinking and thinking.default_inside:
        text = thinking.close[0] + text
    case = Fixture("damaged", text, [])
    found = read(sample, [units(text, words)], words, case)
    ended = any(isinstance(event, ToolCallEnd) for event in found)
    return not ended and PARSE_FAILED not in warnings(found)


@BY_NAME
@BOTH
def test_markup_of_calls_without_a_call_has_a_warning(name: str, tokens: bool) -> None:
    sample = SAMPLES[name]
    if not tokens and not sample.spelt_ok:
        pytest.skip("the format's markers are always tokens")
    words, signs = lexicon(sample, tokens=tokens), markup(sample.format.tools)
    for call in (Call("get_weather", {"city": "Oslo", "days": 3}), UNDECLARED):
        for text in damaged(sample.write([call], 0)):
            if any(sign in text for sign in signs):
                assert not silent(sample, text, words), text


@BY_NAME
def test_a_plain_answer_has_no_warning(name: str) -> None:
    sample = SAMPLES[name]
    text = 'Use <b>f(x)</b>, [a] and {"city": "Oslo"}; a < b. ```json\n{}\n``` is JSON.'
    for tokens in (True, False):
        words = lexicon(sample, tokens=tokens)
        found = read(sample, [units(text, words)], words, Fixture("plain", text, []))
        assert not any(isinstance(event, OutputWarning) for event in found)
