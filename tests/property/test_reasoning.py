"""Reasoning formats: every format's blocks, and whether an answer starts inside one."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.formats.events import Content, Event, Reasoning, ToolCall, ToolCallEnd, merged
from gateway.formats.lexicon import Lexicon
from gateway.formats.reasoning import (
    NO_REASONING,
    REASONING,
    WHOLE,
    ReasoningFormat,
    ReasoningStart,
    reasoning_start,
)
from gateway.formats.registry import TOOLS, Format, format_of
from tests.support.formats import (
    Call,
    ContentPart,
    Fixture,
    ReasoningPart,
    Sample,
    answers,
    check,
    dumps,
    reasoning_writer,
    spelt,
    units,
    written,
)


def writer(name: str) -> Any:
    """Return a function that writes a block of reasoning and the markup after it; None for formats
    without blocks.
    """
    format = REASONING[name]
    return {
        "gemma4": lambda thought: f"<|channel>thought\n{thought}<channel|>",
        "granite": lambda thought: (
            f"Here is my thought process:\n{thought}\n\nHere is my response:\n"
        ),
        "apriel": lambda thought: (
            f"Here are my reasoning steps:\n{thought}\n[BEGIN FINAL RESPONSE]\n"
        ),
        "solar_open": lambda thought: f"<|think|>{thought}<|end|><|begin|>assistant<|content|>",
        "hunyuan_a13b": lambda thought: f"<think>\n{thought}\n</think>\n<answer>\n",
        "ernie45": lambda thought: f"<think>\n{thought}\n</think>\n\n<response>\n",
        "granite33": lambda thought: f"<think>{thought}</think><response>",
        "cohere_command3": lambda thought: (
            f"<|START_THINKING|>{thought}<|END_THINKING|><|START_RESPONSE|>"
        ),
        "inkling": lambda thought: (
            f"<|content_thinking|>{thought}<|end_message|><|message_model|><|content_text|>"
        ),
    }.get(name, reasoning_writer(format) if format.open else None)


BLOCKS = {name: writer(name) for name in REASONING if writer(name)}
CLOSING = {
    "apriel": "\n[END FINAL RESPONSE]",
    "solar_open": "<|end|>",
    "hunyuan_a13b": "\n</answer>",
    "ernie45": "\n</response>\n",
    "granite33": "</response>",
    "cohere_command3": "<|END_RESPONSE|>",
    "inkling": "<|end_message|>",
}


def sample_of(name: str) -> Sample:
    """Return a sample of the format, with calls as Hermes writes them."""
    reasoning = REASONING[name]
    return Sample(
        f"{name} (reasoning)",
        Format(TOOLS["hermes"], reasoning),
        lambda calls, before: "".join(
            f"<tool_call>{dumps({'name': call.name, 'arguments': call.arguments})}</tool_call>"
            for call in calls
        ),
        think=BLOCKS.get(name),
    )


def fixtures(name: str) -> list[Fixture]:
    """Return answers of one format. Prose in them mentions only markers that have no meaning
    there.
    """
    format = REASONING[name]
    sample = sample_of(name)
    end = CLOSING.get(name, "")
    tag = spelt(format.close[0])
    weather = Call("weather", {"city": "Köln </think>", "days": [1, {}]})
    again = "" if format.only_at_start or end else BLOCKS[name]("And more?") + "Yes."
    cases = [
        written(
            sample,
            "one block",
            [ReasoningPart("Hm.\n\nLet me {see} 語"), ContentPart("So\n\nit is." + end)],
        ),
        written(
            sample, "blanks", [ReasoningPart("a  b"), ContentPart("  indented\ttext <x" + end)]
        ),
        written(sample, "no text", [ReasoningPart("a")]),
        written(
            sample,
            "prose with its tag",
            [ReasoningPart(f"write {tag}, or {tag[:5]}"), ContentPart(tag + end)],
        ),
        Fixture("no reasoning", "Plain text, < and > 語.", [Content("Plain text, < and > 語.")]),
        Fixture("empty block", BLOCKS[name]("") + "Text" + end, [Content("Text")]),
        Fixture("unfinished", BLOCKS[name]("ab").partition("ab")[0] + "ab", [Reasoning("ab")]),
    ]
    cases = [_without(case, end) for case in cases]
    if not end:
        cases += [
            written(sample, "a call behind", [ReasoningPart("a"), [weather]]),
            written(
                sample,
                "text and three calls behind",
                [ReasoningPart("a"), ContentPart("b"), [weather] * 3],
            ),
        ]
    if again:
        parts: list[Event] = [
            Reasoning("One"),
            Content("So."),
            Reasoning("And more?"),
            Content("Yes."),
        ]
        text = BLOCKS[name]("One") + "So.\n" + again
        cases.append(Fixture("reasoning before and after", text, parts))
        around: list[Any] = [ReasoningPart("a"), [weather], ReasoningPart("c"), ContentPart("b")]
        cases.append(written(sample, "reasoning around a call", around))
    if format.close and not format.header:
        inside = BLOCKS[name]("ab").partition("ab")[2]
        events: list[Event] = [Reasoning("In it\nalready"), Content("Done.")]
        text = "In it\nalready" + inside + "Done." + end
        cases.append(Fixture("starts inside", text, events, starts_inside=True))
        text = BLOCKS[name]("In it\nalready") + "Done." + end
        cases.append(Fixture("starts inside, and opens again", text, events, starts_inside=True))
    return cases


def _without(case: Fixture, end: str) -> Fixture:
    """Return the case without `end`, the markup after the answer proper, in its content."""
    events = [
        Content(event.text.removesuffix(end)) if isinstance(event, Content) else event
        for event in case.events
    ]
    return Fixture(case.name, case.text, events, case.starts_inside)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_cut_of_reasoning_never_changes_the_events(name: str) -> None:
    row = check(sample_of(name), fixtures(name))
    assert row.fixtures >= 8
    assert not row.differences, row.first


def test_minimax_m2_append_think_leaves_the_reasoning_in_the_content() -> None:
    sample = sample_of("minimax_m2_append_think")
    cases = []
    for name, parts in answers("</think>"):
        if not any(isinstance(part, ReasoningPart) for part in parts):
            fixture = written(sample, name, [ContentPart("<think>Hm.</think>\n\n"), *parts])
            text = fixture.text.removeprefix("<think>")
            cases.append(Fixture(name, text, _trimmed(fixture.events)))
    row = check(sample, cases)
    assert row.fixtures >= 8
    assert not row.differences, row.first


def _trimmed(events: list[Event]) -> list[Event]:
    """Return the events without blanks at the end of content, which parsers drop before a call and
    at the end.
    """
    return [
        Content(event.text.rstrip()) if isinstance(event, Content) else event
        for event in merged(events)
    ]


def said(
    format: ReasoningFormat,
    text: str,
    *,
    tools: str | None = None,
    inside: bool = False,
    complete: bool = True,
    tokens: bool = False,
) -> list[Event]:
    whole = Format(TOOLS[tools] if tools else None, format)
    words = Lexicon(dict(enumerate(whole.markers(), 1000)) if tokens else {})
    machine = whole.parser(words, new_id=lambda: "id", starts_inside=inside)
    events = [event for piece in units(text, words) for event in machine.push(piece)]
    return merged(events + machine.finish(complete))


def test_the_end_of_reasoning_and_a_call_in_one_delta_show_no_tag() -> None:
    text = 'end.</think><tool_call>{"name": "f"}</tool_call>'
    for tokens in (True, False):
        events = said(REASONING["qwen3"], text, tools="hermes", inside=True, tokens=tokens)
        assert events[:2] == [Reasoning("end."), ToolCall(0, "id", "f")]
        assert events[-1] == ToolCallEnd(0)


def test_a_marker_of_calls_ends_kimis_reasoning_whatever_follows_it() -> None:
    calls = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    events = said(REASONING["kimi_k2"], "<think>hm" + calls, tools="kimi_k2")
    assert events[:2] == [Reasoning("hm"), ToolCall(0, "functions.f:0", "f")]
    assert events[-1] == ToolCallEnd(0)
    empty = "<|tool_calls_section_begin|>hm"
    assert said(REASONING["kimi_k2"], "<think>a" + empty, tools="kimi_k2")[0] == Reasoning("a")
    others = said(REASONING["qwen3"], "<think>a" + empty, tools="kimi_k2", tokens=True)
    assert others == [Reasoning("a" + empty)]


def test_markers_of_reasoning_mean_nothing_in_a_calls_arguments() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "<think>x</think>"}}</tool_call>'
    for tokens in (True, False):
        events = said(REASONING["qwen3"], text, tools="hermes", tokens=tokens)
        assert not [event for event in events if isinstance(event, Reasoning)]
        assert ToolCallEnd(0) in events


def test_a_reasoning_token_that_means_nothing_is_no_content() -> None:
    assert said(REASONING["qwen3"], "a</think>b", tokens=True) == [Content("ab")]


def test_reasoning_is_repeated_as_content_if_the_request_asks_for_it() -> None:
    forced = reasoning_start(REASONING["nemotron_v3"], "", {"force_nonempty_content": True}).format
    assert said(forced, "<think>\nall of it\n") == [Reasoning("all of it"), Content("all of it")]
    assert said(forced, "<think>a</think>b") == [Reasoning("a"), Content("b")]
    assert said(REASONING["nemotron_v3"], "<think>a") == [Reasoning("a")]


def test_minimax_m2_append_think_leaves_everything_in_the_content() -> None:
    format = REASONING["minimax_m2_append_think"]
    assert said(format, "a</think>b") == [Content("<think>a</think>b")]


def test_the_budget_tags_inside_seeds_reasoning_stay_in_it() -> None:
    text = "<seed:think>a<seed:cot_budget_reflect>b</seed:cot_budget_reflect>c</seed:think>d"
    events = said(REASONING["seed_oss"], text)
    assert events == [
        Reasoning("a<seed:cot_budget_reflect>b</seed:cot_budget_reflect>c"),
        Content("d"),
    ]


def test_whom_a_message_is_for_is_no_content() -> None:
    text = 'f<|content_invoke_tool_json|>{"name": "f", "args": {}}<|end_message|>'
    events = said(REASONING["inkling"], text, tools="inkling", tokens=True)
    assert events[0] == ToolCall(0, "id", "f")
    long = "a prompt that was continued, without any marker, " * 4
    assert said(REASONING["inkling"], long) == [Content(long)]
    assert said(REASONING["inkling"], "short") == [Content("short")]


def test_reasoning_cut_off_inside_its_closing_marker_shows_none_of_it() -> None:
    for end in range(len("</think>")):
        text = "<think>so" + "</think>"[:end]
        assert said(REASONING["qwen3"], text, complete=False) == [Reasoning("so")]


# ---- where an answer starts
CHAT, R1 = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<\uff5cUser\uff5c>Hi"
AI = "<\uff5cAssistant\uff5c>"
OPEN, SHUT = "<think>\n", "<think>\n\n</think>\n\n"
ON, NO = {"enable_thinking": True}, {"enable_thinking": False}

# name -> (prompt with reasoning on, off, omitted), and whether each starts inside
PROMPTS: dict[str, list[tuple[str, dict[str, Any], bool]]] = {
    "apertus": [
        ("<|assistant_start|><|inner_prefix|>", ON, True),
        ("<|assistant_start|>", NO, False),
    ],
    "cohere_command3": [
        ("<|CHATBOT_TOKEN|><|START_THINKING|>", {}, True),
        ("<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", {}, False),
        ("<|CHATBOT_TOKEN|>", {}, False),
    ],
    "deepseek_r1": [(R1 + AI + OPEN, {}, True), (R1 + AI, {}, True)],
    "deepseek_v3": [
        (R1 + AI + "<think>", {"thinking": True}, True),
        (R1 + AI + "</think>", {"thinking": False}, False),
        (R1 + AI, {}, False),
        (R1 + AI, {"thinking": True}, True),
    ],
    "deepseek_v4": [
        (R1 + AI + "<think>", {"thinking": True}, True),
        (R1 + AI + "</think>", {}, False),
    ],
    "ernie45": [(CHAT + OPEN, ON, True), (CHAT + SHUT, NO, False), (CHAT, {}, True)],
    "gemma4": [
        ("<|turn>model\n", ON, False),
        ("<|turn>model\n<|channel>thought\n<channel|>", NO, False),
        ("<|turn>model\n<|channel>thought\n", {}, True),
    ],
    "glm45": [("<|assistant|>\n<think>", {}, True), ("<|assistant|>\n<think></think>", NO, False)],
    "granite33": [(CHAT, {"thinking": True}, False), (CHAT, {}, False), (CHAT + OPEN, {}, True)],
    "granite": [(CHAT, {"thinking": True}, False), (CHAT, {}, False)],
    "hunyuan_a13b": [(CHAT, ON, False), (CHAT + SHUT, NO, False), (CHAT, {}, False)],
    "hy_v3": [
        ("<|hy_Assistant|><think:opensource>", {"reasoning_effort": "high"}, True),
        ("<|hy_Assistant|><think></think>", {"reasoning_effort": "no_think"}, False),
        ("<|hy_Assistant|>", {}, False),
    ],
    "inkling": [
        ("<|end_message|><|message_model|><|content_thinking|>", {}, True),
        ("<|content_text|>Hi<|end_message|><|message_model|>", {}, False),
    ],
    "k2_horizon": [
        (CHAT + "<ifm|think>\n", {"reasoning_effort": "high"}, True),
        (CHAT + "<ifm|think_fast>\n", {"reasoning_effort": "medium"}, True),
        (CHAT + "<ifm|think_faster>\n", {"reasoning_effort": "low"}, True),
        (CHAT + "<ifm|think>\n</ifm|think>\n", NO, False),
    ],
    "kimi_k2": [("<|im_middle|><think>", {}, True), ("<|im_middle|><think></think>", NO, False)],
    "minimax_m2": [("]~b]ai\n<think>\n", {}, True), ("]~b]ai\n", {}, True)],
    "minimax_m2_append_think": [("]~b]ai\n<think>\n", {}, False)],
    "minimax_m3": [
        ("]~b]ai\n<mm:think>", {"thinking_mode": "enabled"}, True),
        ("]~b]ai\n<mm:think></mm:think>", {"thinking_mode": "disabled"}, False),
    ],
    "mistral": [("[INST]Hi[/INST]", {}, False), ("[INST]Hi[/INST][THINK]", {}, True)],
    "plamo3": [
        ("<|plamo:op|>assistant\n<|plamo:begin_think:plamo|>", {}, True),
        ("<|plamo:op|>assistant\n", NO, False),
    ],
    "apriel": [
        ("<|begin_assistant|>\nHere are my reasoning steps:\n", {}, True),
        ("<|assistant|>\n", {}, False),
    ],
    "minicpm3": [(CHAT, {}, False), (CHAT + "<|thought_start|>\n", {}, True)],
    "solar_open": [
        ("<|begin|>user<|content|>Hi<|end|><|begin|>assistant", {}, False),
        ("<|begin|>assistant<|think|>", {}, True),
        ("<|begin|>assistant<|think|><|end|><|begin|>assistant", NO, False),
    ],
    "seed_oss": [
        ("<seed:bos>assistant\n", {}, False),
        ("<seed:bos>assistant\n<seed:think>", {}, True),
    ],
}
WHOLE_PROMPTS = {
    "openai": [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", False),
        ("<|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|start|>assistant<|channel|>analysis<|message|>I thought", True),
        ("<|start|>assistant<|channel|>final<|message|>Then", False),
        ("<|channel|>analysis<|message|>x<|end|><|start|>assistant", False),
    ],
    "kimi_k3": [
        ('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', True),
        ("<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>", False),
        ('<|open|>message role="assistant"<|sep|>', False),
    ],
    "muse_glimmer": [
        ("<|start|>user<|message|>Hi<|eot|><|start|>assistant", False),
        ("<|start|>user<|message|>Hi<|eot|><|start|>assistant to=self<|message|>", True),
    ],
}
WHOLE_PROMPTS["muse"] = WHOLE_PROMPTS["muse_glimmer"]
ALIKE = {
    "cohere_command4": "cohere_command3",
    "deepseek_v41": "deepseek_v4",
    "glm47": "glm45",
    "ling3": "glm45",
    "hy_v4": "hy_v3",
}
HYBRID = [(CHAT + OPEN, ON, True), (CHAT + SHUT, NO, False), (CHAT, {}, False)]
FORCED = [(CHAT + OPEN, {}, True), (CHAT, {}, True), (CHAT + SHUT, NO, False)]


def prompts(name: str) -> list[tuple[str, dict[str, Any], bool]]:
    default = FORCED if REASONING[name].default_inside else HYBRID
    return PROMPTS.get(ALIKE.get(name, name), default)


@pytest.mark.parametrize("name", REASONING)
def test_an_answer_starts_where_the_prompt_has_left_off(name: str) -> None:
    for tail, kwargs, inside in prompts(name):
        if name == "hy_v4" and not kwargs:
            continue
        begun = reasoning_start(REASONING[name], tail, kwargs)
        assert begun.inside == inside, (tail, kwargs)
        assert not inside or begun.format is not NO_REASONING


@pytest.mark.parametrize("name", WHOLE)
def test_formats_of_whole_answers_start_where_the_prompt_has_left_off_too(name: str) -> None:
    format = format_of(name, None).reasoning
    assert format is WHOLE[name]
    for tail, inside in WHOLE_PROMPTS[name]:
        assert reasoning_start(format, tail).inside == inside, tail


def test_a_marker_in_an_earlier_turn_is_ignored() -> None:
    asked = "<|im_start|>user\nWhat does <think> mean?<|im_end|>\n<|im_start|>assistant\n"
    assert not reasoning_start(REASONING["qwen3"], asked).inside
    assert reasoning_start(REASONING["qwen3"], asked + "<think>\nI thought").inside
    earlier = "<|im_start|>assistant\n<think>\nx\n</think>\n\ny<|im_end|>\n" + CHAT
    assert not reasoning_start(REASONING["qwen3"], earlier).inside
    assert reasoning_start(REASONING["minimax_m2"], earlier).inside


def test_markers_are_text_while_reasoning_is_off_only_in_some_formats() -> None:
    tail = R1 + AI + "</think>"
    assert reasoning_start(REASONING["deepseek_v3"], tail, {"thinking": False}) == ReasoningStart(
        NO_REASONING, False
    )
    assert reasoning_start(REASONING["qwen3"], CHAT, NO).format is REASONING["qwen3"]


def test_the_prompt_overrides_the_switch() -> None:
    begun = reasoning_start(REASONING["deepseek_v3"], R1 + AI + "<think>", {"thinking": False})
    assert begun == ReasoningStart(REASONING["deepseek_v3"], True)
