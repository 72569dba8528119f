"""The template, the effective kwargs and the parser's start agree, for every template in the tests
and every way to turn thinking on or off or to set its effort."""

from __future__ import annotations

from functools import cache

import pytest

from gateway.formats.model_format import ModelOutputFormat
from gateway.formats.reasoning import ends_inside
from gateway.prompt.kwargs import REASONING_EFFORTS, ThinkingFields, effective_kwargs, thinks
from gateway.prompt.template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from protocol.engine.model_card import ModelCard
from tests.support.model import smollm2_gguf
from tests.support.scripted_engine import thinking_card
from tests.support.templates import THINKING_TEMPLATES
from tests.support.tokenizers import (
    FAMILIES,
    card_of,
    chat_template,
    family_json,
    smollm2_tokenizer_json,
)
from worker.checkpoint.gguf_file import GGUFFile

SETTINGS: dict[str, ThinkingFields] = {
    "omitted": ThinkingFields(),
    "on": ThinkingFields(enable_thinking=True),
    "off": ThinkingFields(enable_thinking=False),
    **{effort: ThinkingFields(reasoning_effort=effort) for effort in REASONING_EFFORTS},
}
TEMPLATES = (*FAMILIES, "smollm2", *THINKING_TEMPLATES)
USER = [{"role": "user", "content": "What does <think> mean? And </think>?"}]
"""A message that contains markers. They must not change where the parser starts."""


@cache
def model(name: str) -> tuple[ModelCard, ChatTemplate, ModelOutputFormat]:
    card = _card(name)
    template = ChatTemplate(card.chat_template or "", card.special_tokens)
    return card, template, ModelOutputFormat(card, Tokenizer(card))


def _card(name: str) -> ModelCard:
    if name in THINKING_TEMPLATES:
        return thinking_card(chat_template=THINKING_TEMPLATES[name])
    if name == "smollm2":
        metadata = GGUFFile(smollm2_gguf()).metadata
        source = metadata["tokenizer.chat_template"]
        return card_of(smollm2_tokenizer_json(), chat_template=source)
    texts = {"bos_token": FAMILIES[name].bos, "eos_token": FAMILIES[name].eos}
    special = {role: text for role, text in texts.items() if text}
    return card_of(family_json(name), chat_template=chat_template(name), special_tokens=special)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("calls", [False, True], ids=["", "tools"])
def test_the_prompt_and_the_kwargs_determine_where_the_parser_starts(
    name: str, setting: str, calls: bool
) -> None:
    _, template, reading = model(name)
    kwargs = effective_kwargs(SETTINGS[setting], None, None, template.profile)
    prompt = template.render(USER, kwargs=kwargs)
    begun = reading.answer_start(prompt, kwargs, calls=calls)
    wanted = thinks(kwargs, template.profile)
    if begun.bound is None or begun.bound.format.reasoning is None:
        assert not begun.inside  # a model that does not think
        return
    is_open = ends_inside(prompt, begun.bound.format.reasoning)
    assert begun.inside == bool(is_open) or is_open is None
    if wanted is False:
        assert not begun.inside, "thinking is off, but the parser expects it"
    elif wanted is True:
        assert is_open is not False, "thinking is on, but the prompt has closed it"
    if setting in ("off", "none"):
        assert not begun.inside


@pytest.mark.parametrize(
    ("name", "setting", "inside"),
    [
        ("switch", "on", False),  # the model opens the block itself
        ("switch", "off", False),
        ("opening switch", "on", True),
        ("opening switch", "off", False),
        ("opening switch", "omitted", False),
        ("opening switch", "low", True),
        ("mode", "on", True),
        ("mode", "off", False),
        ("effort", "on", True),
        ("effort", "minimal", True),
        ("effort", "none", False),
        ("effort", "omitted", False),
        ("switch and effort", "max", True),
        ("switch and effort", "none", False),
    ],
)
def test_where_an_answer_starts_by_idiom(name: str, setting: str, inside: bool) -> None:
    _, template, reading = model(name)
    kwargs = effective_kwargs(SETTINGS[setting], None, None, template.profile)
    prompt = template.render(USER, kwargs=kwargs)
    assert reading.answer_start(prompt, kwargs, calls=False).inside is inside


def test_real_templates_are_understood_as_they_are_known_to_be() -> None:
    assert model("qwen3")[1].profile.switches == ("enable_thinking",)
    for name in ("llama3_1", "deepseek_v3", "smollm2"):
        profile = model(name)[1].profile
        assert (profile.has_switch, profile.reads_effort) == (False, False), name
    formats = {name: model(name)[2] for name in (*FAMILIES, "smollm2")}
    assert (formats["qwen3"].tools, formats["qwen3"].reasoning) == ("hermes", "qwen3")
    assert formats["deepseek_v3"].tools == "deepseek_v3"
    assert (formats["smollm2"].tools, formats["smollm2"].reasoning) == (None, None)
