"""A response format's grammar applies to the answer proper, inside any markup that the model
writes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_core.grammar.markers import is_marker
from gateway.formats.events import Content, Finished, Reasoning
from gateway.formats.model_format import AnswerStart
from gateway.formats.registry import Format, format_of
from gateway.formats.response_template_loader import load
from protocol.engine.grammar import JsonSchema
from tests.support.response_templates import TEMPLATES
from tests.support.tool_grammars import NESTED, Model, fault

BODY = JsonSchema(text=json.dumps(NESTED))
THOUGHT = "Hm.\n\nLet me see"
FORMATS = {
    "harmony": format_of("openai", "openai_gptoss"),
    "muse": format_of("muse_glimmer", "muse_glimmer"),
    "kimi_k3": format_of("kimi_k3", "kimi_k3"),
    "inkling": format_of("inkling", "inkling"),
    "cohere": format_of("cohere_command4", "cohere_command4"),
    "hunyuan": format_of("hunyuan_a13b", "hunyuan_a13b"),
    "qwen3": format_of("hermes", "qwen3"),
    "template of gpt_oss": Format(load(TEMPLATES["gpt_oss"])),
    "template of cohere": Format(load(TEMPLATES["cohere"])),
    "template of muse": Format(load(TEMPLATES["muse"])),
    "template of smollm": Format(load(TEMPLATES["smollm"])),
}
AROUND = {
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
    "muse": " to=self<|message|>{}<|eom|><|start|>assistant to=user<|message|>",
    "kimi_k3": "<|open|>think<|sep|>{}<|close|>think<|sep|><|open|>response<|sep|>",
    "inkling": "<|content_thinking|>{}<|end_message|><|message_model|><|content_text|>",
    "cohere": "<|START_THINKING|>{}<|END_THINKING|><|START_RESPONSE|>",
    "hunyuan": "<think>{}</think><answer>\n",
    "qwen3": "<think>{}</think>",
    "template of gpt_oss": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
    "template of cohere": "<|START_THINKING|>{}<|END_THINKING|><|START_RESPONSE|>",
    "template of muse": "to=self<|message|>{}<|eom|><|start|>assistantto=user<|message|>",
    "template of smollm": "<think>{}</think>",
}
EVERY = pytest.mark.parametrize("name", FORMATS)


def model(name: str) -> Model:
    """Return a model whose vocabulary has the format's shortest markers: those that contain no
    other marker.
    """
    format = FORMATS[name]
    known = tuple(filter(is_marker, format.markers()))
    whole = (one for one in known if not any(other in one for other in known if other != one))
    return Model(format, tuple(whole))


@EVERY
def test_the_markup_is_the_formats_own(name: str) -> None:
    frame = model(name).bound.frame()
    assert frame.opens + "{}" + frame.closes + frame.before == AROUND[name]


@EVERY
@pytest.mark.parametrize("thinks", [True, False])
def test_the_answer_is_the_form_and_nothing_else(name: str, thinks: bool) -> None:
    spoken = model(name)
    begun = AnswerStart(spoken.bound, closed=False)
    grammar = begun.grammar(BODY, None)
    frame = spoken.bound.frame()
    said = frame.opens + THOUGHT + frame.closes if thinks else ""
    said += frame.before + '{"where": {"n": 1}, "kind": 3}' + frame.after
    around: dict[str, Any] = {
        "thinking": grammar.thinking,
        "before": grammar.before,
        "after": grammar.after,
    }
    assert spoken.refused(BODY, said, **around) is None
    *thoughts, answer, last = spoken.read(spoken.ids(said), ())
    assert thoughts == ([Reasoning(THOUGHT)] if thinks else [])
    assert isinstance(answer, Content)
    assert fault(json.loads(answer.text), NESTED) is None
    assert isinstance(last, Finished)
    assert spoken.refused(BODY, frame.before + "Just text", **around) is not None


@EVERY
def test_a_prompt_that_has_begun_the_answer_leaves_only_the_form(name: str) -> None:
    begun = AnswerStart(model(name).bound, closed=True, answering=True)
    grammar = begun.grammar(BODY, None)
    assert (grammar.thinking, grammar.before) == (None, "")
    assert grammar.after == model(name).bound.frame().after
