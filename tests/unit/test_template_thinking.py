"""The template, the effective kwargs and the parser's start agree, for every template in the tests
and every way to turn thinking on or off or to set its effort."""

from __future__ import annotations

from functools import cache

import pytest

from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.events import Content, Reasoning, merged
from gateway.formats.model_format import ModelOutputFormat
from gateway.formats.reasoning import ends_inside
from gateway.prompt.kwargs import REASONING_EFFORTS, ThinkingFields, effective_kwargs, thinks
from gateway.prompt.render import ChatRenderer, PromptConversation
from gateway.prompt.template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from protocol.engine.messages import Output
from protocol.engine.model_card import ModelCard
from tests.support.model import smollm2_gguf
from tests.support.scripted_engine import thinking_card
from tests.support.templates import THINKING_TEMPLATES, UnlimitedTemplates
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


def continued(name: str, message: dict[str, str | None]) -> str:
    """Return the prompt of an answer that goes on where `message` ends."""
    renderer = ChatRenderer(model(name)[0], Tokenizer(model(name)[0]), UnlimitedTemplates())
    final = {"role": "assistant", **message}
    return renderer.text(
        PromptConversation(
            messages=[*USER, final], add_generation_prompt=False, continue_final_message=True
        )
    )


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": None}])
def test_an_answer_that_was_cut_in_its_reasoning_goes_on_there(
    name: str, content: dict[str, str | None]
) -> None:
    prompt = continued("qwen3", {name: "First, I ", **content})
    assert prompt.endswith("<|im_start|>assistant\n<think>\nFirst, I ")
    begun = model("qwen3")[2].answer_start(prompt, {}, calls=True)
    assert (begun.inside, begun.thought) == (True, True)


def test_an_answer_that_was_cut_after_its_reasoning_goes_on_with_its_text() -> None:
    prompt = continued("qwen3", {"reasoning": "First.", "content": "So "})
    assert prompt.endswith("<think>\nFirst.\n</think>\n\nSo ")
    begun = model("qwen3")[2].answer_start(prompt, {}, calls=True)
    assert (begun.inside, begun.thought) == (False, False)


def test_a_template_without_reasoning_continues_the_text() -> None:
    assert continued("llama3_1", {"reasoning": "First.", "content": ""}).endswith(
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_the_newlines_at_which_reasoning_goes_on_are_kept() -> None:
    card, _, reading = model("opening switch")
    tokenizer = Tokenizer(card)
    found = {}
    for prompt in ("<think>\n", "<think>\nFirst."):
        begun = reading.answer_start(prompt, {}, calls=False)
        assert begun.bound is not None
        options = AnswerOptions(
            format=begun.bound, starts_inside=begun.inside, continues_reasoning=begun.thought
        )
        parser = ParserFactory(tokenizer, None, options).new()
        ids = tokenizer.encode("\n\nThen.\n</think>\n\nSo.", False)
        events = [*parser.push(Output(request=1, tokens=ids)).events]
        events += parser.push(Output(request=1, finish="stop")).events
        found[prompt] = merged(events)[:2]
    assert found == {
        "<think>\n": [Reasoning("Then."), Content("So.")],
        "<think>\nFirst.": [Reasoning("\n\nThen."), Content("So.")],
    }
