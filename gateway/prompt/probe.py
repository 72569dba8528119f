"""Finds the `TemplateTraits` of a chat template by rendering tiny conversations.

A template's source does not show reliably in which form it needs a conversation. So each trait is
tried: its values are listed in order of preference, and each is used to bring a few conversations
(its scenes) into form, as for a request. The first value with which the template renders every
text of its scenes is the trait. Later traits are tried with the values of the earlier ones. If no
value renders all scenes, the trait is the one that renders most, and `omits_texts` is set.

The source is read only to leave out trials: a template that does not contain the word `developer`
does not support that role, and one that does not contain `content` renders no text at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product, takewhile
from typing import Any

import jinja2
import msgspec

from gateway.prompt.content import ChatTurn, TurnCall
from gateway.prompt.fit import fitted_list, fitted_messages, fitted_tools
from gateway.prompt.image_probe import IMAGE_MARK, with_images
from gateway.prompt.thinking import ThinkingProfile
from gateway.prompt.traits import REASONING_FORMS, TemplateTraits

RAISED_BY_TEMPLATES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a template may raise for messages that it does not support."""

Render = Callable[[Mapping[str, Any]], str]
"""Returns the output of a template for these variables. Raises one of RAISED_BY_TEMPLATES."""

_FIRST_SYSTEM, _SYSTEM, _USER, _ANSWER, _USER_2, _REASON, _TEXT = (
    f"n33dle{name}x" for name in ("start", "system", "ask", "answer", "askagain", "reason", "text")
)
_NAMES, _KEYS, _VALUES, _RESULTS = (
    tuple(f"n33dle{name}{i}x" for i in range(2)) for name in ("tool", "key", "value", "result")
)
"""Texts that occur in no template, and not in each other. If such a text is in the output, the
template has rendered it."""
_PYTHON = (
    *(f"'{key}'" for key in _KEYS),
    *("'thinking':", '"thinking":', "'type': 'text'", '"type": "text"', "'text':", '"text":'),
)
"""Signs that the template has written an object or a list instead of what is in it."""
_UNFINISHED_MARKER = re.compile(r"[<\[][^<>\[\]\s]*$")
_MARKER_START = re.compile(r"[<\[]")
_LONG_ID = "call_abcdefghijklmnopqrstuvwx"


# ---- the turns of scenes


def _turn(role: str, *texts: str) -> ChatTurn:
    return ChatTurn(role, list(texts), has_parts=len(texts) > 1)


def _called(*indexes: int, text: str = "", reasoning: str | None = None) -> ChatTurn:
    """Return an assistant's turn with the tool calls of these indexes."""
    calls = [TurnCall(_NAMES[i], {_KEYS[i]: _VALUES[i]}, id=_id(i)) for i in indexes]
    texts = [text] if text else []
    return ChatTurn("assistant", texts, reasoning=reasoning, calls=calls)


def _result(index: int, *texts: str) -> ChatTurn:
    found = list(texts or (_RESULTS[index],))
    return ChatTurn("tool", found, has_parts=len(found) > 1, call_id=_id(index))


def _id(index: int) -> str:
    return f"{_LONG_ID}{index}"


def _tool(name: str, *, described: bool = True) -> dict[str, Any]:
    text = {"description": "a text"} if described else {}
    schema = {
        "type": "object",
        "properties": {"number": {"type": "integer", **text}},
        "required": ["number"],
    }
    return {"type": "function", "function": {"name": name, **text, "parameters": schema}}


_TOOLS = (_tool("other"),)
"""The tools of scenes. None of them is called, so a call's name in the output comes from the call.
"""
_CALLED_TOOLS = tuple(map(_tool, _NAMES))
"""The tools that are called, for templates that look them up."""
_ASK, _ASK_2, _ANSWERED = _turn("user", _USER), _turn("user", _USER_2), _turn("assistant", _ANSWER)


class _Scene(msgspec.Struct, frozen=True):
    """A conversation, the texts that its prompt must contain, and a further condition."""

    turns: tuple[ChatTurn, ...]
    texts: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    passes: Callable[[str], bool] = lambda output: True


def _scene(*turns: ChatTurn, tools: Sequence[Mapping[str, Any]] = (), **rest: Any) -> _Scene:
    """Return a scene whose prompt must contain all that its turns contain."""
    texts: list[str] = []
    for turn in turns:
        texts += [*turn.texts, *([turn.reasoning] if turn.reasoning else [])]
        texts += [text for call in turn.calls for text in (call.name, *call.arguments.values())]
    return _Scene(turns, tuple(texts), tuple(tools), **rest)


# ---- trying


class _Prober:
    """Finds the traits of one template."""

    def __init__(self, render: Render, traits: TemplateTraits, profile: ThinkingProfile) -> None:
        self._render = render
        self.traits = traits
        #: Turns thinking on. Templates that can turn it off may omit the reasoning otherwise.
        self._thinking: dict[str, Any] = dict.fromkeys(profile.switches, True)
        if profile.mode is not None:
            self._thinking["thinking_mode"] = profile.mode[0]
        usual = self.output([_ASK], _TOOLS)
        self._signs = [sign for sign in _PYTHON if sign not in usual]

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools of scenes: none if the template does not render tools."""
        return _TOOLS if self.traits.tools else ()

    def choose(self, scenes: Iterable[_Scene], *candidates: Mapping[str, Any]) -> bool:
        """Set the traits to the first of the candidates with which all scenes are rendered. If
        there is none, take the first one with which most of them are.

        Return whether all scenes are rendered.
        """
        scenes = list(scenes)
        best, most = candidates[0], -1
        for candidate in candidates:
            traits = msgspec.structs.replace(self.traits, **candidate)
            count = sum(self.renders(scene, traits) for scene in scenes)
            if count > most:
                best, most = candidate, count
            if count == len(scenes):
                break
        self.traits = msgspec.structs.replace(self.traits, **best)
        return most == len(scenes)

    def renders(self, scene: _Scene, traits: TemplateTraits | None = None) -> bool:
        """Return whether the template renders all of a scene."""
        output = self.output(scene.turns, scene.tools, traits)
        return (
            all(text in output for text in scene.texts)
            and not any(sign in output for sign in self._signs)
            and scene.passes(output)
        )

    def output(
        self,
        turns: Sequence[ChatTurn],
        tools: Sequence[Mapping[str, Any]] = (),
        traits: TemplateTraits | None = None,
    ) -> str:
        """Return the template's output, or "" if the template cannot render the turns."""
        return self.try_output(turns, tools, traits) or ""

    def try_output(
        self,
        turns: Sequence[ChatTurn],
        tools: Sequence[Mapping[str, Any]] = (),
        traits: TemplateTraits | None = None,
    ) -> str | None:
        """Return the template's output, or None if the template raises an error."""
        traits = traits or self.traits
        variables = {
            **self._thinking,
            "messages": fitted_messages(turns, traits, tools, image_mark=IMAGE_MARK),
            "tools": fitted_tools(tools, traits),
            "documents": fitted_list((), traits),
            "add_generation_prompt": turns[-1].role != "assistant",
        }
        try:
            return self._render(variables)
        except RAISED_BY_TEMPLATES:
            return None


def find_traits(render: Render, source: str, profile: ThinkingProfile) -> TemplateTraits:
    """Return the traits of a template.

    render   renders it with variables
    source   its source
    profile  the thinking options that it reads
    """
    knows_developer = "'developer'" in source or '"developer"' in source
    prober = _Prober(render, TemplateTraits(), profile)
    prober.choose([_scene(_ASK)], {"empty_lists": False}, {"empty_lists": True})
    _find_tools(prober)
    asked = _turn("user", _USER, _USER_2)
    _find_content_forms(prober, "user", _scene(asked), _scene(asked, tools=prober.tools))
    output = prober.try_output([_ASK])
    if "content" in source and output is not None and _USER not in output:
        return msgspec.structs.replace(prober.traits, renders_users=False)
    if knows_developer:
        scene = _scene(_turn("developer", _FIRST_SYSTEM), _ASK)
        prober.choose([scene], {"developer": True}, {"developer": False})
    answered = _turn("assistant", _ANSWER, _TEXT)
    _find_content_forms(prober, "assistant", _scene(_ASK, answered, _ASK_2))
    _find_calls(prober)
    _find_neighbours(prober)
    _find_systems(prober)
    _find_reasoning(prober)
    if "image" in source:
        prober.traits = with_images(prober.traits, prober.output, prober.tools)
    omits_texts = "content" in source and _omits_texts(prober)
    return msgspec.structs.replace(prober.traits, omits_texts=omits_texts)


def _find_content_forms(prober: _Prober, role: str, *scenes: _Scene) -> None:
    """Find whether the content of the turns of `role` in these scenes, which have two texts, may be
    a string, a list of two parts, or else a list of one part."""
    traits = prober.traits
    strings = tuple(name for name in traits.strings if name != role)
    both = msgspec.structs.replace(traits, parts=(*traits.parts, role))
    as_string = msgspec.structs.replace(traits, strings=(*strings, role))
    takes_string = all(prober.renders(scene, as_string) for scene in scenes)
    takes_parts = all(prober.renders(scene, both) for scene in scenes)
    one_part = msgspec.structs.replace(traits, strings=strings)
    if takes_parts:
        prober.traits = both if takes_string else msgspec.structs.replace(both, strings=strings)
    elif not takes_string and all(prober.renders(scene, one_part) for scene in scenes):
        prober.traits = one_part


def _find_tools(prober: _Prober) -> None:
    """Find whether the template renders tools, with or without a system message."""
    traits = prober.traits
    scenes = [
        _Scene((_ASK,), (_NAMES[0],), (_tool(_NAMES[0], described=d),)) for d in (True, False)
    ]
    for needs_system in (False, True):
        with_tools = msgspec.structs.replace(traits, tools=True, tools_need_system=needs_system)
        if prober.renders(scenes[0], with_tools):
            prober.traits = with_tools
            prober.choose(scenes, {"tool_descriptions": False}, {"tool_descriptions": True})
            return


def _find_call_example(prober: _Prober) -> None:
    """Find how the template writes a call, if it renders calls but no tools: the part in which a
    prompt with the call differs from one with an answer. No marker is split."""
    if prober.traits.tools:
        return
    call = TurnCall("function-name", {"name": "value"}, id=_id(0))
    called = prober.output([_ASK, ChatTurn("assistant", calls=[call])])
    answered = prober.output([_ASK, _ANSWERED])
    start = _UNFINISHED_MARKER.sub("", _common_start(called, answered))
    end = _common_start(called[::-1], answered[::-1])[::-1]
    marker = _MARKER_START.search(end)
    example = called.removeprefix(start).removesuffix(end[marker.start() :] if marker else "")
    if call.name in example:
        prober.traits = msgspec.structs.replace(prober.traits, call_example=example.strip())


def _common_start(one: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return one[: sum(1 for _ in same)]


def _find_calls(prober: _Prober) -> None:
    """Find the form of tool calls and their results."""
    for tools in (prober.tools, _CALLED_TOOLS if prober.tools else ()):
        if _find_call_form(prober, tools):
            break
    else:
        prober.traits = msgspec.structs.replace(prober.traits, calls="text")
        if prober.traits.tools or not _writes_any_role(prober):
            scene = _scene(_ASK, _called(0), _result(0), tools=prober.tools)
            prober.choose([scene], {"keeps_results": True}, {"keeps_results": False})
        return
    _find_call_example(prober)
    result = _result(0, _RESULTS[0], _RESULTS[1])
    if not prober.traits.result_objects:
        _find_content_forms(prober, "tool", _scene(_ASK, _called(0), result, tools=tools))
    two = [
        _scene(_ASK, _called(0, 1), _result(0), _result(1), tools=tools),
        _scene(_ASK, _called(0, 1), _result(0), _result(1), _ANSWERED, _ASK_2, tools=tools),
    ]
    prober.choose(two, {"calls": "many"}, {"calls": "one"})
    no_tools = _scene(_ASK, _called(0), _result(0))
    prober.choose([no_tools], {"calls_without_tools": True}, {"calls_without_tools": False})


def _find_call_form(prober: _Prober, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Find the form in which a call and its result are rendered in a conversation with `tools`.
    Return whether there is one; otherwise the traits stay as they are.

    Of the forms of a content without text, the one with the shortest output is taken, blanks aside,
    because some templates write an empty message, or the word None, for the others. The result has
    the name of another tool, so the call's name in the output comes from the call.
    """
    result = replace(_result(0), extra={"name": _NAMES[1]})
    scene = _scene(_ASK, _called(0), result, tools=tools)
    strings = prober.traits.strings
    forms = product(
        ("any", "named", "nine"),
        (strings, tuple(role for role in strings if role != "tool")),
        (False, True),
        ("object", "text"),
    )
    names = "call_ids", "strings", "result_objects", "arguments"
    for form in forms:
        found = []
        for empty in ("text", "null", "parts", "absent"):
            members = dict(zip(names, form, strict=True)) | {"empty_content": empty}
            traits = msgspec.structs.replace(prober.traits, **members)
            if prober.renders(scene, traits):
                output = prober.output(scene.turns, tools, traits)
                found.append((len("".join(output.split())), traits))
        if found:
            prober.traits = min(found, key=lambda each: each[0])[1]
            return True
    return False


def _writes_any_role(prober: _Prober) -> bool:
    """Return whether the template writes the name of any role, even of an unknown one. A rendered
    tool result then does not show that the model knows results."""
    known, unknown = (ChatTurn(role, [_RESULTS[0]]) for role in ("tool", _NAMES[0]))
    strings = (*prober.traits.strings, unknown.role)
    keeps = msgspec.structs.replace(prober.traits, keeps_results=True, strings=strings)
    outputs = [
        prober.output([_ASK, _ANSWERED, turn], prober.tools, keeps).lower()
        for turn in (known, unknown)
    ]
    return outputs[0] == outputs[1].replace(unknown.role, known.role)


def _find_neighbours(prober: _Prober) -> None:
    """Find which turns may follow each other."""
    prober.choose(
        [_scene(_ASK, _ASK_2), _scene(_ASK, _ANSWERED, _ASK_2, _turn("user", _TEXT))],
        {"user_turns": "kept"},
        {"user_turns": "joined"},
    )
    prober.choose(
        [_scene(_ASK, _ANSWERED, _turn("assistant", _TEXT), _ASK_2)],
        {"assistant_turns": "kept"},
        {"assistant_turns": "joined"},
    )
    if prober.traits.calls == "text":
        return
    prober.choose(
        [_scene(_ASK, _called(0), _result(0), _ASK_2, tools=prober.tools)],
        {"user_after_result": "kept"},
        {"user_after_result": "result"},
    )
    said = _called(0, text=_TEXT)
    prober.choose(
        [
            _scene(_ASK, said, _result(0), tools=prober.tools),
            _scene(_ASK, said, _result(0), _ANSWERED, _ASK_2, tools=prober.tools),
            _scene(_ASK, _called(1), _result(1), said, _result(0), tools=prober.tools),
        ],
        {"text_with_calls": "beside"},
        {"text_with_calls": "before"},
        {"text_with_calls": "before_user"},
    )
    if "assistant" in prober.traits.parts and prober.traits.text_with_calls == "beside":
        both = _called(0, text=_TEXT)
        both.texts, both.has_parts = [_TEXT, _ANSWER], True
        scene = _scene(_ASK, both, _result(0), tools=prober.tools)
        if not prober.renders(scene):
            parts = tuple(role for role in prober.traits.parts if role != "assistant")
            prober.traits = msgspec.structs.replace(prober.traits, parts=parts)


def _find_systems(prober: _Prober) -> None:
    """Find where system messages may be."""
    first, second = _turn("system", _FIRST_SYSTEM), _turn("system", _SYSTEM)
    tools = prober.tools
    parts = _turn("system", _FIRST_SYSTEM, _TEXT)
    in_roles = [_scene(parts, _ASK), _scene(parts, _ASK, tools=tools)]
    if prober.traits.developer:
        in_roles.append(_scene(_turn("developer", _FIRST_SYSTEM, _TEXT), _ASK))
    _find_content_forms(prober, "system", *in_roles)
    prober.choose(
        [
            _scene(first, _ASK),
            _scene(first, _ASK, tools=tools),
            _scene(first, _ASK, _ANSWERED, _ASK_2),
            _scene(first, _ASK, _called(0), _result(0), tools=tools),
            _scene(first, _ASK, _ANSWERED),
        ],
        {"leading_system": "kept"},
        {"leading_system": "user_unless_last"},
        {"leading_system": "user"},
    )
    prober.choose(
        [_scene(first, second, _ASK)], {"leading_systems": "kept"}, {"leading_systems": "joined"}
    )
    in_order = (_ASK, _ANSWERED, second, _ASK_2)
    at_end = (_ASK, second)
    after_first = (_ASK, second, _called(0), _result(0))
    scenes = [
        _scene(first, *in_order, passes=_is_at_its_place(prober, first)),
        _scene(*in_order, passes=_is_at_its_place(prober, first)),
        _scene(*at_end),
        _scene(*after_first, tools=tools),
    ]
    prober.choose(scenes, {"later_system": "kept"}, {"later_system": "user"})


def _is_at_its_place(prober: _Prober, first: ChatTurn) -> Callable[[str], bool]:
    """Return a check of a scene's output: the later system message must be between its neighbours.
    If it is written with the role's name, a system message at the start must be, too."""
    start = prober.output((first, _ASK)).partition(_FIRST_SYSTEM)[0]

    def passes(output: str) -> bool:
        before, _, rest = output.partition(_SYSTEM)
        if _ANSWER not in before or _USER_2 not in rest:
            return False
        header = before.rpartition(_ANSWER)[2]
        name = header.rfind("system")
        # A template that writes any role's name does so for "system", too, if it has no such role.
        return name < 0 or header[name:] in start

    return passes


def _find_reasoning(prober: _Prober) -> None:
    """Find how reasoning is written in a loop of tool calls. It is optional in earlier turns."""
    thought = _called(0, reasoning=_REASON)
    said = _called(0, text=_TEXT, reasoning=_REASON)
    earlier = _turn("assistant", _ANSWER)
    earlier.reasoning = _REASON
    scenes = [
        _scene(_ASK, thought, _result(0), tools=prober.tools),
        _scene(_ASK, said, _result(0), tools=prober.tools),
        _Scene((_ASK, earlier, _ASK_2), (_ANSWER, _USER_2)),
    ]
    places = [{"text_with_calls": prober.traits.text_with_calls}]
    if prober.traits.text_with_calls == "before":
        places.append({"text_with_calls": "before_reasoning"})
    before = prober.traits
    if not prober.choose(
        scenes, *({"reasoning": form, **place} for form, place in product(REASONING_FORMS, places))
    ):
        prober.traits = msgspec.structs.replace(before, reasoning="omitted")


def _omits_texts(prober: _Prober) -> bool:
    """Return whether the template omits a text of a conversation without an error."""
    system, later = _turn("system", _FIRST_SYSTEM), _turn("system", _SYSTEM)
    said = _called(0, text=_TEXT)
    chat = [_turn(role, f"n33dle{role}{i}x") for i in range(8) for role in ("user", "assistant")]
    scenes = (
        _scene(system, *chat, _ASK),
        _scene(system, _ASK, _ASK_2, _ANSWERED, later, _turn("user", _TEXT)),
        _scene(_ASK, said, _result(0), _ASK_2, _ANSWERED, tools=prober.tools),
        _scene(_ASK, _called(0, 1), _result(0), _result(1), tools=prober.tools),
    )
    outputs = [prober.try_output(scene.turns, scene.tools) for scene in scenes]
    return any(
        text not in output
        for scene, output in zip(scenes, outputs, strict=True)
        if output is not None  # otherwise requests get the same error
        for text in scene.texts
    )
