"""Brings a conversation into the form that a chat template needs, without losing any of it.

Each step below changes the turns of a conversation as one member of `TemplateTraits` demands.
Moving a system message can put two turns of one role next to each other; `_join_neighbours` joins
them. `_move_text` comes after it, because the turns that it makes must stay apart.

Some templates drop the reasoning of turns before the last user message on purpose. Nothing here
changes that.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from gateway.images.marks import split_at
from gateway.prompt.content import ChatTurn, TurnCall, checked_turns, to_json
from gateway.prompt.tool_prompt import calls_as_text, describe_tools
from gateway.prompt.traits import TemplateTraits

SYSTEM_ROLES = ("system", "developer")
BETWEEN_TURNS = "\n\n"
"""Separates the texts of turns that are joined."""
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_DIGITS = string.digits + string.ascii_letters

Turns = Sequence[ChatTurn]


def template_messages(
    messages: Sequence[Any],
    traits: TemplateTraits,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    tool_format: str | None = None,
    image_mark: str = "",
    param: str = "messages",
) -> list[dict[str, Any]]:
    """Return a request's messages for a template with these traits, after checking them.

    tools        the request's tools
    tool_format  the name of the model's tool format; None: its answers are not parsed for calls,
                 so tools that the template does not render are not described either
    image_mark   the text that stands for an image; "": the conversation has none
    param        path of the messages in the request

    Raises InvalidRequest, naming the field, if a message is invalid.
    """
    turns = checked_turns(messages, param)
    return fitted_messages(turns, traits, tools, tool_format=tool_format, image_mark=image_mark)


def fitted_messages(
    turns: Turns,
    traits: TemplateTraits,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    tool_format: str | None = None,
    image_mark: str = "",
) -> list[dict[str, Any]]:
    """Return the turns as messages for a template with these traits.

    tools                    the request's tools
    tool_format, image_mark  as in `template_messages`
    """
    turns = _identify_calls([_with_known_role(turn, traits) for turn in turns], traits)
    turns = _gather_results(turns)
    writes_text = traits.calls == "text" or not (tools or traits.calls_without_tools)
    if writes_text and any(turn.calls or turn.role == "tool" for turn in turns):
        turns = calls_as_text(turns, tool_format, keeps_results=traits.keeps_results)
    if tools and describes_tools(traits, tool_format):
        turns = describe_tools(turns, tools, tool_format or "", traits.call_example)
    elif tools and traits.tools_need_system and turns[0].role not in SYSTEM_ROLES:
        turns = [ChatTurn("system"), *turns]
    for step in _STEPS:
        turns = step(turns, traits)
    return [_message(turn, traits, image_mark) for turn in turns]


def describes_tools(traits: TemplateTraits, tool_format: str | None) -> bool:
    """Return whether tools are described in the system message instead of being passed to the
    template."""
    return not traits.tools and tool_format is not None


def fitted_tools(
    tools: Sequence[Mapping[str, Any]] | None, traits: TemplateTraits
) -> Sequence[Mapping[str, Any]] | None:
    """Return the variable `tools` for a template with these traits. Each tool has a description, if
    the template needs that."""
    if not tools or not traits.tool_descriptions:
        return fitted_list(tools, traits)
    return [_described_tool(tool) for tool in tools]


def _described_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    function = _described(function)
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if isinstance(parameters, Mapping) and isinstance(properties, Mapping):
        described = {
            name: _described(schema) if isinstance(schema, Mapping) else schema
            for name, schema in properties.items()
        }
        function["parameters"] = {**parameters, "properties": described}
    return {**tool, "function": function}


def _described(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "description": schema.get("description", "")}


def fitted_list(values: Sequence[Any] | None, traits: TemplateTraits) -> Sequence[Any] | None:
    """Return a variable that is a list, such as `documents`, for a template with these traits."""
    return values or ([] if traits.empty_lists else None)


def _with_known_role(turn: ChatTurn, traits: TemplateTraits) -> ChatTurn:
    if turn.role == "developer" and not traits.developer:
        return replace(turn, role="system")
    return turn


# ---- tool calls


class _UnansweredCall(NamedTuple):
    """A call without a result: the client's id, the new id, and the name of the tool."""

    own_id: str | None
    new_id: str
    name: str


def _identify_calls(turns: Turns, traits: TemplateTraits) -> Turns:
    """Set the id of each call, in a form that the template accepts. Set the call id and the tool
    name of each result.

    The ids depend only on the calls so far, so they are the same in each request of a conversation.
    """
    identified: list[ChatTurn] = []
    unanswered: list[_UnansweredCall] = []
    #: Each call by the client's id.
    known: dict[str | None, _UnansweredCall] = {}
    count = 0
    for turn in turns:
        if turn.calls:
            unanswered = [
                _UnansweredCall(call.id, _new_id(call, count + place, traits), call.name)
                for place, call in enumerate(turn.calls)
            ]
            count += len(turn.calls)
            known |= {call.own_id: call for call in unanswered}
            calls = [
                replace(call, id=found.new_id)
                for call, found in zip(turn.calls, unanswered, strict=True)
            ]
            turn = replace(turn, calls=calls)
        elif turn.role == "tool":
            turn = _identified_result(turn, _pop_call(turn, unanswered) or known.get(turn.call_id))
        identified.append(turn)
    return identified


def _pop_call(result: ChatTurn, unanswered: list[_UnansweredCall]) -> _UnansweredCall | None:
    """Remove the call that a result answers from `unanswered`, and return it. If one of both has no
    id, the result answers the first such call."""
    own_id = result.call_id
    found = [call for call in unanswered if call.own_id == own_id and own_id is not None]
    found += [call for call in unanswered if own_id is None or call.own_id is None]
    if not found:
        return None
    unanswered.remove(found[0])
    return found[0]


def _identified_result(result: ChatTurn, call: _UnansweredCall | None) -> ChatTurn:
    if call is None:
        return result
    extra = {"name": call.name, **result.extra}
    return replace(result, call_id=call.new_id, extra=extra)


def _new_id(call: TurnCall, count: int, traits: TemplateTraits) -> str:
    """Return the id of a call. `count` is the number of calls before it."""
    own = call.id or f"call{count:05d}"
    match traits.call_ids:
        case "nine":
            return _nine(own)
        case "named":
            return own if f".{call.name}:" in own else f"functions.{call.name}:{count}"
    return own


def _nine(call_id: str) -> str:
    """Return an id of nine letters and digits: `call_id` itself, or else a digest of it."""
    if _NINE.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest())
    return "".join(_DIGITS[number // len(_DIGITS) ** place % len(_DIGITS)] for place in range(9))


def _gather_results(turns: Turns) -> Turns:
    """Put the results of calls directly after the calls, and messages of other roles after them.
    Some templates refuse results elsewhere, or omit them."""
    gathered: list[ChatTurn] = []
    place = 0
    while place < len(turns):
        turn = turns[place]
        rest = list(takewhile(lambda other: other.role != "assistant", turns[place + 1 :]))
        rest = sorted(rest, key=lambda other: other.role != "tool") if turn.calls else []
        gathered += [turn, *rest]
        place += 1 + len(rest)
    return gathered


def _split_calls(turns: Turns, traits: TemplateTraits) -> Turns:
    """Make a turn of each call, followed by the call's result, if the template renders only one
    call of a turn."""
    if traits.calls != "one":
        return turns
    split: list[ChatTurn] = []
    place = 0
    while place < len(turns):
        turn = turns[place]
        place += 1
        if len(turn.calls) < 2:
            split.append(turn)
            continue
        results = list(takewhile(lambda other: other.role == "tool", turns[place:]))
        place += len(results)
        for index, call in enumerate(turn.calls):
            one = replace(turn, calls=[call])
            split.append(one if not index else replace(one, texts=[], reasoning=None))
            if (result := _pop_result(results, call)) is not None:
                split.append(result)
        split += results
    return split


def _pop_result(results: list[ChatTurn], call: TurnCall) -> ChatTurn | None:
    """Remove the result of `call` from `results`, and return it; None if the call has no result."""
    for place, result in enumerate(results):
        if result.call_id == call.id:
            return results.pop(place)
    return None


def _move_text(turns: Turns, traits: TemplateTraits) -> Turns:
    """Move the text of a turn that also has tool calls into a separate turn, if the template would
    omit it."""
    if traits.text_with_calls == "beside":
        return turns
    return [part for turn in turns for part in _text_first(turn, traits)]


def _text_first(turn: ChatTurn, traits: TemplateTraits) -> Iterator[ChatTurn]:
    """Yield the turn, or if it has text and tool calls, one turn with each of them."""
    if not (turn.calls and turn.text):
        yield turn
        return
    first, second = turn.reasoning, None
    if traits.text_with_calls == "before_reasoning":
        first, second = second, first
    yield replace(turn, calls=[], reasoning=first)
    if traits.text_with_calls == "before_user":
        yield ChatTurn("user")
    yield replace(turn, texts=[], has_parts=False, reasoning=second)


def _as_reasoning(turn: ChatTurn) -> ChatTurn:
    """Return the turn with its text appended to its reasoning."""
    texts = [text for text in (turn.reasoning, turn.text) if text]
    return replace(turn, texts=[], has_parts=False, reasoning=BETWEEN_TURNS.join(texts))


# ---- system messages


def _join_systems(turns: Turns, traits: TemplateTraits) -> Turns:
    """Join the system messages at the start, and write them where the template takes them."""
    start = list(takewhile(lambda turn: turn.role in SYSTEM_ROLES, turns))
    rest = turns[len(start) :]
    if not start:
        return turns
    is_last = turns[-1].role == "user" and not any(turn.calls for turn in turns)
    if traits.leading_system == "user" or (
        traits.leading_system == "user_unless_last" and not is_last
    ):
        start = [replace(_joined(start), role="user")]
        if rest and rest[0].role == "user":
            start, rest = [_joined([*start, rest[0]])], rest[1:]
    elif traits.leading_systems == "joined":
        start = [_joined(start)]
    return [*start, *rest]


def _move_late_systems(turns: Turns, traits: TemplateTraits) -> Turns:
    """Turn system messages after the start into user messages, where they are, if the template does
    not keep them. Moving them to the start would change the prompt before them, which would then
    not be found in the prefix cache."""
    if traits.later_system == "kept":
        return turns
    num_first = sum(1 for _ in takewhile(lambda turn: turn.role in SYSTEM_ROLES, turns))
    return [
        replace(turn, role="user") if turn.role in SYSTEM_ROLES and place >= num_first else turn
        for place, turn in enumerate(turns)
    ]


# ---- neighbours


def _join_neighbours(turns: Turns, traits: TemplateTraits) -> Turns:
    """Join neighbouring turns that the template does not render one after the other."""
    joined: list[ChatTurn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last is not None and _must_join(last, turn, traits):
            joined[-1] = _joined([last, turn])
        else:
            joined.append(turn)
    return joined


def _must_join(last: ChatTurn, turn: ChatTurn, traits: TemplateTraits) -> bool:
    match last.role, turn.role:
        case "user", "user":
            return traits.user_turns == "joined"
        case "assistant", "assistant":
            return traits.assistant_turns == "joined" and not last.calls
        case "tool", "user":
            return traits.user_after_result == "result"
    return False


def _joined(turns: Turns) -> ChatTurn:
    """Return the turns as one turn, with the role and the further members of the first."""
    first = turns[0]
    if len(turns) == 1:
        return first
    reasoning = BETWEEN_TURNS.join(turn.reasoning for turn in turns if turn.reasoning)
    return replace(
        first,
        texts=[BETWEEN_TURNS.join(turn.text for turn in turns if turn.text)],
        has_parts=False,
        reasoning=reasoning or None,
        calls=[call for turn in turns for call in turn.calls],
    )


_STEPS: tuple[Callable[[Turns, TemplateTraits], Turns], ...] = (
    _split_calls,
    _move_late_systems,
    _join_systems,
    _join_neighbours,
    _move_text,
)


# ---- one message


def _message(turn: ChatTurn, traits: TemplateTraits, image_mark: str) -> dict[str, Any]:
    message = {**turn.extra, "role": turn.role}
    if turn.calls:
        message["tool_calls"] = [_call(call, traits) for call in turn.calls]
    if turn.call_id is not None:
        message["tool_call_id"] = turn.call_id
    if turn.calls and not turn.text:
        message |= _without_text(traits)
    else:
        message["content"] = _content(turn, traits, image_mark)
    return _with_reasoning(message, turn, traits)


def _without_text(traits: TemplateTraits) -> dict[str, Any]:
    """Return the content of a message that has only calls."""
    match traits.empty_content:
        case "text":
            return {"content": ""}
        case "null":
            return {"content": None}
        case "parts":
            return {"content": [_part("")]}
        case "absent":
            return {}


def _content(turn: ChatTurn, traits: TemplateTraits, image_mark: str) -> Any:
    """Return a message's content as a string, a list of parts or an object, as the template needs
    it. Marks of images become parts, if the template writes markers for such parts."""
    role = "system" if turn.role in SYSTEM_ROLES else turn.role
    if image_mark and role in traits.image_parts and image_mark in turn.text:
        pieces = [piece for text in turn.texts for piece in split_at(image_mark, text)]
        return [{"type": "image"} if piece == image_mark else _part(piece) for piece in pieces]
    if role == "tool" and traits.result_objects:
        return {"result": turn.text}
    if turn.has_parts and role in traits.parts and turn.texts:
        return [_part(text) for text in turn.texts]
    return turn.text if role in traits.strings else [_part(turn.text)]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _with_reasoning(
    message: dict[str, Any], turn: ChatTurn, traits: TemplateTraits
) -> dict[str, Any]:
    if turn.reasoning is None:
        return message
    match traits.reasoning:
        case "members" | "omitted":
            return message | {"reasoning": turn.reasoning, "reasoning_content": turn.reasoning}
        case "thinking":
            return message | {"thinking": turn.reasoning}
        case "thinking_only":
            if turn.calls and turn.text:
                del message["content"]
                return message | _without_text(traits) | {"thinking": _as_reasoning(turn).reasoning}
            return message | {"thinking": turn.reasoning}
        case "part":
            content = message.get("content") or []
            texts = [_part(content)] if isinstance(content, str) else content
            part = {"type": "thinking", "thinking": turn.reasoning}
            return message | {"content": [part, *texts]}


def _call(call: TurnCall, traits: TemplateTraits) -> dict[str, Any]:
    arguments: Any = call.arguments
    if traits.arguments == "text":
        arguments = to_json(arguments) if call.text is None else call.text
    function = {**call.function_extra, "name": call.name, "arguments": arguments}
    own_id = {} if call.id is None else {"id": call.id}
    return {**call.extra, **own_id, "type": "function", "function": function}
