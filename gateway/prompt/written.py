"""Finds what a chat template writes for calls and reasoning, by rendering tiny conversations.

A template renders the earlier answers of a conversation in the format in which the model was
trained to write them. So a rendered call shows the format of calls better than any text in the
template's source, which may also mention formats that it does not write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, takewhile
from typing import Any

import msgspec

from gateway.prompt.thinking import ThinkingProfile

CALLS = (("find_pl4ce", {"str33t": "v4lue"}), ("look_w3ather", {"str33t": "0ther"}))
"""Name and arguments of the calls in the conversations. No template contains these texts."""
THOUGHT, ANSWER = "a th0ught", "the answ3r"
"""The reasoning and the content of the earlier answer in the conversations."""
_QUESTION, _RESULT = "qu3stion?", "r3sult"

MAX_TURN_CHARS = 10_000
"""A longer turn does not count, because the answers in the conversations are short."""

Render = Callable[[Mapping[str, Any]], str]
"""Renders a template with these variables. Returns "" if the template cannot be rendered."""


class WrittenTurn(msgspec.Struct, frozen=True):
    """An earlier answer, as a template writes it."""

    #: What the prompt for this answer ends with: everything after the user's question.
    opening: str = ""
    #: The answer itself, and the start of the turn after it.
    answer: str = ""

    @property
    def text(self) -> str:
        return self.opening + self.answer


class WrittenTurns(msgspec.Struct, frozen=True):
    """The turns of tiny conversations as a template writes them. A turn is None if the template
    omits it, or writes only the JSON or the Python object that it was passed."""

    #: An answer with the first of CALLS.
    call: WrittenTurn | None = None
    #: An answer with both of CALLS.
    calls: WrittenTurn | None = None
    #: An answer with the reasoning THOUGHT and with the content ANSWER or a call.
    reasoning: WrittenTurn | None = None
    #: Whether a prompt can be rendered.
    has_prompt: bool = False


def find_written(render: Render, profile: ThinkingProfile) -> WrittenTurns:
    """Return what a template writes.

    profile  the thinking options of the template
    """
    return WrittenTurns(
        call=_first(render, _with_calls(1), _shows_calls(1)),
        calls=_first(render, _with_calls(2), _shows_calls(2)),
        reasoning=_first(render, _with_reasoning(profile), _shows_reasoning),
        has_prompt=any(
            _QUESTION in render(_prompt_of(_variables([_question(is_list)])))
            for is_list in (False, True)
        ),
    )


def _first(
    render: Render, conversations: Iterator[dict[str, Any]], shows: Callable[[str], bool]
) -> WrittenTurn | None:
    """Return the last turn of the first conversation in which the template writes it."""
    for variables in conversations:
        turn = _after_question(render(variables)).partition(_RESULT)[0]
        if len(turn) <= MAX_TURN_CHARS and shows(turn):
            return _split(turn, _after_question(render(_prompt_of(variables))))
    return None


def _after_question(text: str) -> str:
    return text.rpartition(_QUESTION)[2] if _QUESTION in text else ""


def _prompt_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables with which the prompt for the conversation's answer is rendered."""
    messages = variables["messages"][:1]
    return {**variables, "messages": messages, "add_generation_prompt": True}


_UNFINISHED_MARKER = re.compile(r"[<\[{][^<>\[\]{}\s]*$")


def _split(turn: str, prompt: str) -> WrittenTurn:
    """Return a turn, split where it begins to differ from the prompt. A marker is not split."""
    both = zip(turn, prompt, strict=False)
    opening = turn[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))]
    if len(opening) < len(turn):
        opening = _UNFINISHED_MARKER.sub("", opening)
    return WrittenTurn(opening, turn[len(opening) :])


# ---- conversations

_CALL_IDS = ("functions.{name}:{index}", "call0000{index}")
"""Forms of call ids. Some templates write the id in place of the name, others demand an id of nine
letters and digits."""


def _with_calls(num_calls: int) -> Iterator[dict[str, Any]]:
    """Yield conversations with an answer that consists of calls, in each form that templates need:
    without and with `tools`, content as a string or a list, arguments as an object or as JSON."""
    tools = [_tool(name) for name, _ in CALLS]
    for given, as_text, content, is_list, call_id in product(
        (None, tools), (False, True), ("", None, ANSWER), (False, True), _CALL_IDS
    ):
        calls = _calls(num_calls, call_id, as_text=as_text)
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        yield _variables([_question(is_list), answer, *_results(calls)], tools=given)


def _with_reasoning(profile: ThinkingProfile) -> Iterator[dict[str, Any]]:
    """Yield conversations with an answer that has reasoning. Some templates write the reasoning
    only if thinking is on, or only before a call."""
    switched_on: dict[str, Any] = dict.fromkeys(profile.switches, True)
    if profile.mode is not None:
        switched_on["thinking_mode"] = profile.mode[0]
    thinking = {"reasoning": THOUGHT, "reasoning_content": THOUGHT, "thinking": THOUGHT}
    part = {"type": "thinking", "thinking": THOUGHT}
    for has_call, options, content, is_list, as_part in product(
        (False, True), ({}, switched_on), (ANSWER, "", None), (False, True), (False, True)
    ):
        if not has_call and not content:
            continue
        calls = _calls(1, _CALL_IDS[1]) if has_call else []
        text = [{"type": "text", "text": content}] if content else []
        answer = {"role": "assistant", "content": [part, *text] if as_part else content}
        answer |= {} if as_part else thinking
        answer |= {"tool_calls": calls} if calls else {}
        yield _variables([_question(is_list), answer, *_results(calls)], **options)


def _variables(messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    base = {"tools": None, "documents": None, "add_generation_prompt": False}
    return {**base, **options, "messages": messages}


def _question(is_list: bool) -> dict[str, Any]:
    content = [{"type": "text", "text": _QUESTION}] if is_list else _QUESTION
    return {"role": "user", "content": content}


def _tool(name: str) -> dict[str, Any]:
    street = {"type": "string", "description": "A street."}
    schema = {"type": "object", "properties": {"str33t": street}, "required": ["str33t"]}
    function = {"name": name, "description": "Finds it.", "parameters": schema}
    return {"type": "function", "function": function}


def _calls(num_calls: int, call_id: str, *, as_text: bool = False) -> list[dict[str, Any]]:
    return [
        {
            "id": call_id.format(name=name, index=index),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given) if as_text else given},
        }
        for index, (name, given) in enumerate(CALLS[:num_calls])
    ]


def _results(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": _RESULT,
        }
        for call in calls
    ]


# ---- what counts as written

_AS_PASSED = re.compile(r"""'str33t'|["']function["']: *\{|["']type["']: *["'](?:thinking|text)""")
"""Pattern of calls or parts that a template writes as the object that it was passed."""


def _shows_calls(num_calls: int) -> Callable[[str], bool]:
    needed = [text for name, given in CALLS[:num_calls] for text in (name, *given.values())]
    return lambda turn: all(text in turn for text in needed) and not _AS_PASSED.search(turn)


def _shows_reasoning(turn: str) -> bool:
    return THOUGHT in turn and not _AS_PASSED.search(turn)
