"""The formats that are found for published chat templates, and what they make of their answers.

The rows of tests/data/published_formats.txt were written by looking at what each template renders:
the markers around the name and the arguments of a call in the history, or else the call that its
system message asks for; the markers around reasoning in the history, at the end of prompts, or else
those that it cuts out of answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.formats import detect as detection
from gateway.formats.choice_parser import AnswerOptions, ParserFactory
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.events import (
    Content,
    Event,
    Finished,
    Reasoning,
    ToolArguments,
    ToolCall,
    merged,
)
from gateway.formats.model_format import ModelOutputFormat
from gateway.prompt.render import PromptConversation
from gateway.prompt.written import CALLS as WRITTEN_CALLS
from protocol.engine.messages import Output
from protocol.wire.errors import InvalidRequest
from tests.support.published_templates import NAMES, NEEDS_TEMPLATES, model_text

pytestmark = NEEDS_TEMPLATES

FOUND = Path(__file__).parents[1] / "data" / "published_formats.txt"
"""Lines of template, tool format, reasoning format; "-" for none."""
ROWS = {name: formats for name, *formats in map(str.split, FOUND.read_text().splitlines())}
BY_TEMPLATE = pytest.mark.parametrize("name", ROWS)


@cache
def found(name: str) -> ModelOutputFormat:
    """Return the formats of a model with this template that describes tools itself, if at all."""
    model = model_text(name)
    return ModelOutputFormat(model.card, model.tokenizer, written=model.renderer.written)


def names_of(formats: ModelOutputFormat) -> list[str]:
    return [formats.tools or "-", formats.reasoning or "-"]


@BY_TEMPLATE
def test_the_format_that_a_template_writes_is_found(name: str) -> None:
    assert names_of(found(name)) == ROWS[name], found(name).why


def test_every_template_that_renders_calls_or_reasoning_has_a_row() -> None:
    for name in {*NAMES} - {*ROWS}:
        renderer = model_text(name).renderer
        assert renderer.omits_tools or renderer.why_unusable, name
        written = renderer.written
        assert (written.call, written.calls, written.reasoning) == (None, None, None), name


@BY_TEMPLATE
def test_no_rule_shadows_another_for_what_a_template_renders(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most specific rule decides, so the order of the rules does not."""
    written = model_text(name).renderer.written
    for table in ("TOOL_RULES", "REASONING_RULES"):
        monkeypatch.setattr(detection, table, tuple(reversed(getattr(detection, table))))
    tools, reasoning = names_of(found.__wrapped__(name))
    if written.call is not None and " in rendered calls" in found(name).why:
        assert tools == ROWS[name][0]
    if written.reasoning is not None:
        assert reasoning == ROWS[name][1]


@BY_TEMPLATE
def test_the_calls_that_are_found_are_written_like_those_of_requests(name: str) -> None:
    """The template may write calls differently in a form that requests do not have."""
    written = model_text(name).renderer.written.call
    if written is None:
        return
    tool, arguments = WRITTEN_CALLS[0]
    call = {"name": tool, "arguments": json.dumps(arguments, separators=(",", ":"))}
    messages = [
        QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "call00000", "function": call}]},
        {"role": "tool", "tool_call_id": "call00000", "content": "Rain."},
    ]
    declared = {**TOOLS[0], "function": {**TOOLS[0]["function"], "name": tool}}
    prompts = [rendered(name, messages, tools=tools) for tools in ([declared], None)]
    assert any(written.text in prompt for prompt in prompts if prompt), written.text


# ---- round trips

CALLS = (
    ("weather", {"city": "Saint-Étienne", "days": [1, 2.5]}),
    ("time", {"zone": "Europe/Paris"}),
)
THOUGHT, ANSWER = "The user wants the weather.", "It rains."
TEXT = {"type": "string", "description": "A name."}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "city": TEXT,
        "days": {"type": "array", "items": {"type": "number"}, "description": "Days."},
    },
    "time": {"zone": TEXT},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds it.",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    }
    for name, properties in SCHEMAS.items()
]
QUESTION = {"role": "user", "content": "How is the weather?"}
CALL_IDS = ("functions.{name}:{index}", "call0000{index}")
CANNOT_RETURN = {
    "vllm__tool_chat_template_gemma3_pythonic": {1, 2},  # no comma between arguments
    "vllm__tool_chat_template_llama4_pythonic": {1, 2},  # lists are in quotes
    "vllm__tool_chat_template_phi4_mini": {1, 2},  # without the "functools" that it asks for
    "hfjs__NousResearch-Hermes-2-Pro-Llama-3-8B-JSON-Schema": {2},  # no opener of the second call
}
"""Templates that write this number of calls in another way than they ask the model to."""


def rendered(name: str, messages: Sequence[Any], **options: Any) -> str | None:
    """Return the prompt; None if the template cannot render the messages."""
    try:
        return model_text(name).renderer.text(PromptConversation(messages=messages, **options))
    except InvalidRequest:
        return None


def answer_in(name: str, messages: Sequence[Any], tools: Any = None) -> tuple[str, str] | None:
    """Return the prompt and the answer to it, messages[1], as the template writes them. None if the
    template cannot render the messages."""
    prompt = rendered(name, messages[:1], tools=tools)
    whole = rendered(name, messages, tools=tools, add_generation_prompt=False)
    if prompt is None or whole is None:
        return None
    start = next((i for i in range(len(prompt)) if prompt[i] != whole[i]), len(prompt))
    if start < len(prompt):  # do not cut into a marker with which one of both begins
        start = max(prompt.rfind(bracket, 0, start) for bracket in "<[")
    return whole[:start], whole[start:]


def parsed(name: str, prompt: str, answer: str) -> list[Event]:
    """Return the merged events of an answer, up to the first end token."""
    model = model_text(name)
    start = found(name).answer_start(prompt, {}, calls=True)
    if start.bound is None:
        return [Content(answer), Finished("stop")]
    tools = [
        DeclaredTool(each["function"]["name"], each["function"]["parameters"]) for each in TOOLS
    ]
    options = AnswerOptions(format=start.bound, starts_inside=start.inside, tools=tools)
    parser = ParserFactory(model.tokenizer, None, options).new()
    ids = model.tokenizer.encode(answer, False)
    end = next((i for i, each in enumerate(ids) if each in model.tokenizer.eos_token_ids), None)
    events = parser.push(Output(request=1, tokens=ids[:end])).events
    return merged([*events, *parser.push(Output(request=1, finish="stop")).events])


def conversations(num_calls: int) -> list[list[dict[str, Any]]]:
    """Return conversations with calls, with each form of ids and with and without content."""
    return [
        [
            QUESTION,
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [
                    {
                        "id": form.format(name=name, index=index),
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(arguments)},
                    }
                    for index, (name, arguments) in enumerate(CALLS[:num_calls])
                ],
            },
            *(
                {
                    "role": "tool",
                    "tool_call_id": form.format(name=name, index=index),
                    "name": name,
                    "content": "Rain.",
                }
                for index, (name, _) in enumerate(CALLS[:num_calls])
            ),
        ]
        for form in CALL_IDS
        for content in ("", ANSWER)
    ]


@pytest.mark.parametrize("num_calls", [1, 2])
@BY_TEMPLATE
def test_calls_that_a_template_writes_are_parsed_as_these_calls(name: str, num_calls: int) -> None:
    written = model_text(name).renderer.written
    if found(name).tools is None or (written.calls if num_calls == 2 else written.call) is None:
        return
    value = ("Saint", "Paris")[num_calls - 1]
    answers = (
        answer_in(name, messages, tools)
        for messages in conversations(num_calls)
        for tools in (TOOLS, None)
    )
    prompt, answer = next(each for each in answers if each and value in each[1])
    events = parsed(name, prompt, answer)
    names = [event.name for event in events if isinstance(event, ToolCall)]
    texts = [event.fragment for event in events if isinstance(event, ToolArguments)]
    wanted = list(CALLS[:num_calls])
    try:
        result: Any = list(zip(names, map(json.loads, texts), strict=True))
    except ValueError:
        result = texts
    can_return = num_calls not in CANNOT_RETURN.get(name, ())
    assert (result == wanted) is can_return, answer


@BY_TEMPLATE
def test_reasoning_that_a_template_writes_is_parsed_as_reasoning(name: str) -> None:
    message = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    both = answer_in(name, [QUESTION, message])
    if both is None or THOUGHT not in both[1]:
        return
    events = parsed(name, *both)
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    assert thoughts.strip() == THOUGHT
    assert content.strip().startswith(ANSWER)


@BY_TEMPLATE
def test_an_answer_is_content_unless_the_prompt_has_opened_the_reasoning(name: str) -> None:
    prompt = rendered(name, [QUESTION])
    if prompt is None:
        return
    events = parsed(name, prompt, ANSWER)
    start = found(name).answer_start(prompt, {}, calls=True)
    if start.inside:
        assert start.opener, "the prompt has not opened it"
        assert prompt.rstrip().endswith(start.opener)
        assert events == [Reasoning(ANSWER), Finished("stop")]
    else:
        assert events == [Content(ANSWER), Finished("stop")]
