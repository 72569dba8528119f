"""Calls with JSON bodies: events do not depend on how the answer is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway.formats import json_tags, mistral, named_json
from gateway.formats.reasoning import THINK
from gateway.formats.registry import TOOLS, Format
from tests.support.formats import Call, Sample, dumps, reasoning_writer

Write = Callable[[Sequence[Call], int], str]


def objects(
    calls: Sequence[Call], name: str = "name", arguments: str = "arguments"
) -> list[dict[str, Any]]:
    return [{name: call.name, arguments: call.arguments} for call in calls]


def each(opening: str, closing: str, **keys: str) -> Write:
    """Return a writer that puts a pair of markers around every call."""

    def write(calls: Sequence[Call], before: int) -> str:
        return "\n".join(f"{opening}{dumps(call)}{closing}" for call in objects(calls, **keys))

    return write


def array(opening: str, closing: str = "", **keys: str) -> Write:
    """Return a writer that puts an array of all calls between a pair of markers."""
    return lambda calls, before: f"{opening}{dumps(objects(calls, **keys))}{closing}"


def separated(calls: Sequence[Call], before: int) -> str:
    return "; ".join(dumps(call) for call in objects(calls, arguments="parameters"))


def by_name(calls: Sequence[Call], before: int) -> str:
    body = [{call.name: call.arguments} for call in calls]
    return f"<|tools_prefix|>{dumps(body)}<|tools_suffix|>"


def command(calls: Sequence[Call], before: int) -> str:
    body = [
        {"tool_call_id": str(i), "tool_name": call.name, "parameters": call.arguments}
        for i, call in enumerate(calls, before)
    ]
    return f"<|START_ACTION|>{dumps(body)}<|END_ACTION|>"


def deepseek_v3(calls: Sequence[Call], before: int) -> str:
    body = "\n".join(
        f"<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>{call.name}\n"
        f"```json\n{dumps(call.arguments)}\n```<\uff5ctool▁call▁end\uff5c>"
        for call in calls
    )
    return f"<\uff5ctool▁calls▁begin\uff5c>{body}<\uff5ctool▁calls▁end\uff5c>"


def deepseek_v31(calls: Sequence[Call], before: int) -> str:
    body = "".join(
        f"<\uff5ctool▁call▁begin\uff5c>{call.name}<\uff5ctool▁sep\uff5c>{dumps(call.arguments)}"
        "<\uff5ctool▁call▁end\uff5c>"
        for call in calls
    )
    return f"<\uff5ctool▁calls▁begin\uff5c>{body}<\uff5ctool▁calls▁end\uff5c>"


def kimi_id(index: int, call: Call) -> str:
    return f"functions.{call.name}:{index}"


def kimi(calls: Sequence[Call], before: int) -> str:
    body = "".join(
        f"<|tool_call_begin|>{kimi_id(i, call)}<|tool_call_argument_begin|>"
        f"{dumps(call.arguments)}<|tool_call_end|>"
        for i, call in enumerate(calls, before)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def m1(calls: Sequence[Call], before: int) -> str:
    lines = "".join(f"{dumps(call)}\n" for call in objects(calls))
    return f"<tool_calls>\n{lines}</tool_calls>"


def functionary(calls: Sequence[Call], before: int) -> str:
    return "".join(f"<function={call.name}>{dumps(call.arguments)}</function>" for call in calls)


def solar_id(index: int, call: Call) -> str:
    return f"a1b2c3d4e{index}"


def solar(calls: Sequence[Call], before: int) -> str:
    body = "".join(
        f"<|tool_call:begin|>{solar_id(i, call)}<|tool_call:name|>{call.name}"
        f"<|tool_call:args|>{dumps(call.arguments)}<|tool_call:end|>"
        for i, call in enumerate(calls, before)
    )
    return f"<|tool_calls|>{body}<|calls|>"


def mistral_named(calls: Sequence[Call], before: int) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{dumps(call.arguments)}" for call in calls)


def mistral_with_ids(calls: Sequence[Call], before: int) -> str:
    return "".join(
        f"[TOOL_CALLS]{call.name}[CALL_ID]{nine(i)}[ARGS]{dumps(call.arguments)}"
        for i, call in enumerate(calls, before)
    )


def nine(index: int) -> str:
    return f"aB3dE6gH{index}"


def ours_in_nine(index: int, call: Call) -> str:
    return f"call{index + 1}".rjust(9, "0")


def sample(label: str, write: Write, tag: str, **more: Any) -> Sample:
    """Return a sample. `label` is the format's name, possibly with a remark in brackets."""
    return Sample(
        label,
        Format(TOOLS[label.partition(" ")[0]], THINK),
        write,
        think=reasoning_writer(THINK),
        tags=(tag,),
        **more,
    )


SAMPLES = [
    sample("hermes", each("<tool_call>\n", "\n</tool_call>"), "</tool_call>"),
    sample("hermes (opening tag)", each("<tool_call>", "</tool_call>"), "<tool_call>"),
    sample("ernie45", each("\n<tool_call>\n", "\n</tool_call>\n"), "</tool_call>"),
    sample(
        "longcat", each("<longcat_tool_call>\n", "\n</longcat_tool_call>\n"), "</longcat_tool_call>"
    ),
    sample("granite", array("<|tool_call|>"), "<|tool_call|>"),
    sample("granite (tags)", array("<tool_call>"), "<tool_call>"),
    sample("granite-20b-fc", each("<function_call> ", ""), "<function_call>"),
    sample(
        "internlm",
        each("<|action_start|> <|plugin|>\n", "<|action_end|>\n", arguments="parameters"),
        "<|action_end|>",
    ),
    sample("hunyuan_a13b", array("<tool_calls>", "</tool_calls>"), "</tool_calls>"),
    sample("minimax_m1", m1, "</tool_calls>"),
    sample("nemotron_json", array("<TOOLCALL>", "</TOOLCALL>"), "</TOOLCALL>"),
    sample("hammer", array("\n"), "```", markers=(), only_first=True),
    sample("hammer (fence)", array("```\n", "\n```"), "```", markers=(), only_first=True),
    sample("phi4_mini_json", array("functools"), "functools", markers=()),
    sample("xlam", array(""), "</tool_call>", markers=(), only_first=True),
    sample("xlam (fence)", array("```json\n", "\n```"), "```", markers=(), only_first=True),
    sample("xlam (tags)", array("<tool_call>", "</tool_call>"), "</tool_call>", markers=()),
    sample("xlam (marker)", array("[TOOL_CALLS]"), "</tool_call>", markers=()),
    sample("llama3_json", separated, "<|python_tag|>", only_first=True),
    sample(
        "llama3_json (marker)",
        lambda calls, before: "<|python_tag|>" + separated(calls, before),
        "<|python_tag|>",
    ),
    sample("gigachat3", each("<|function_call|>", ""), "<|function_call|>"),
    sample("gigachat3 (role)", each("function call<|role_sep|>\n", ""), "function call"),
    sample("apertus", by_name, "<|tools_suffix|>"),
    sample("cohere_command3", command, "<|END_ACTION|>"),
    sample(
        "inkling",
        each("<|content_invoke_tool_json|>", "<|end_message|>", arguments="args"),
        "<|end_message|>",
    ),
    sample("deepseek_v3", deepseek_v3, "<\uff5ctool▁call▁end\uff5c>"),
    sample("deepseek_v31", deepseek_v31, "<\uff5ctool▁call▁end\uff5c>"),
    sample("functionary_v31", functionary, "</function>"),
    sample("solar_open", solar, "<|tool_call:end|>", call_id=solar_id),
    sample("kimi_k2", kimi, "<|tool_call_end|>", call_id=kimi_id),
    sample("mistral", array("[TOOL_CALLS]"), "[TOOL_CALLS]", call_id=ours_in_nine),
    sample("mistral (v11)", mistral_named, "[ARGS]", call_id=ours_in_nine),
    sample("mistral (v13)", mistral_with_ids, "[ARGS]", call_id=lambda index, call: nine(index)),
]
ALIASES = {
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "jamba": "hunyuan_a13b",
    "llama4_json": "llama3_json",
    "cohere_command4": "cohere_command3",
}
NAMES = [each_one.name for each_one in SAMPLES]
EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)


def test_every_format_of_these_syntaxes_is_read_here() -> None:
    ours = json_tags.FORMATS.keys() | named_json.FORMATS.keys() | mistral.FORMATS.keys()
    ours -= {"plamo3"}  # whose calls are elements: test_tools_nested.py
    assert {name.partition(" ")[0] for name in NAMES} | ALIASES.keys() == ours
    for name, other in ALIASES.items():
        assert TOOLS[name] == TOOLS[other]
