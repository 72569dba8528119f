"""Finds what a chat template writes for calls and reasoning, by rendering tiny conversations.

A template renders the earlier answers of a conversation in the format in which the model was
trained to write them. So a rendered call shows the format of calls better than any text in the
template's source, which may also mention formats that it does not write. The conversations are
brought into the form of a request's (`fit`), so what is found is what prompts contain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, takewhile
from typing import Any

import msgspec

from gateway.prompt.content import ChatTurn, TurnCall
from gateway.prompt.fit import fitted_list, fitted_messages, fitted_tools
from gateway.prompt.thinking import ThinkingProfile
from gateway.prompt.traits import REASONING_FORMS, TemplateTraits

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


def find_written(render: Render, traits: TemplateTraits, profile: ThinkingProfile) -> WrittenTurns:
    """Return what a template writes.

    traits   the form of conversations that the template needs
    profile  the thinking options of the template
    """
    if not traits.renders_users:
        return WrittenTurns()
    return WrittenTurns(
        call=_first(render, _with_calls(1, traits), _shows_calls(1)),
        calls=_first(render, _with_calls(2, traits), _shows_calls(2)),
        reasoning=_first(render, _with_reasoning(traits, profile), _shows_reasoning),
        has_prompt=_QUESTION in render(_Conversation(traits).prompt()),
    )


def _first(
    render: Render, conversations: Iterator[_Conversation], shows: Callable[[str], bool]
) -> WrittenTurn | None:
    """Return the answer of the first conversation in which the template writes it."""
    for conversation in conversations:
        turn = _after_question(render(conversation.whole())).partition(_RESULT)[0]
        if len(turn) <= MAX_TURN_CHARS and shows(turn):
            return _split(turn, _after_question(render(conversation.prompt())))
    return None


def _after_question(text: str) -> str:
    return text.rpartition(_QUESTION)[2] if _QUESTION in text else ""


_UNFINISHED_MARKER = re.compile(r"[<\[{][^<>\[\]{}\s]*$")


def _split(turn: str, prompt: str) -> WrittenTurn:
    """Return a turn, split where it begins to differ from the prompt. A marker is not split."""
    both = zip(turn, prompt, strict=False)
    opening = turn[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))]
    if len(opening) < len(turn):
        opening = _UNFINISHED_MARKER.sub("", opening)
    return WrittenTurn(opening, turn[len(opening) :])


# ---- conversations

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds it.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": "A street."} for key in given
                },
                "required": list(given),
            },
        },
    }
    for name, given in CALLS
]


class _Conversation(msgspec.Struct, frozen=True):
    """A question, and perhaps an answer with calls or reasoning and the results of the calls."""

    traits: TemplateTraits
    text: str = ""
    num_calls: int = 0
    reasoning: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    #: Further variables of the template.
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def prompt(self) -> dict[str, Any]:
        """Return the variables with which the prompt for the answer is rendered."""
        return self._variables([ChatTurn("user", [_QUESTION])], adds_prompt=True)

    def whole(self) -> dict[str, Any]:
        """Return the variables with which the whole conversation is rendered."""
        calls = [
            TurnCall(name, dict(given), id=f"call0000{index}")
            for index, (name, given) in enumerate(CALLS[: self.num_calls])
        ]
        texts = [self.text] if self.text else []
        turns = [
            ChatTurn("user", [_QUESTION]),
            ChatTurn("assistant", texts, reasoning=self.reasoning, calls=calls),
            *(ChatTurn("tool", [_RESULT], call_id=call.id) for call in calls),
        ]
        return self._variables(turns, adds_prompt=False)

    def _variables(self, turns: Sequence[ChatTurn], *, adds_prompt: bool) -> dict[str, Any]:
        return {
            **self.options,
            "messages": fitted_messages(turns, self.traits, self.tools),
            "tools": fitted_tools(self.tools, self.traits),
            "documents": fitted_list((), self.traits),
            "add_generation_prompt": adds_prompt,
        }


def _with_calls(num_calls: int, traits: TemplateTraits) -> Iterator[_Conversation]:
    """Yield conversations with an answer that consists of calls: without and with tools. There are
    none if calls become text, which the template does not choose."""
    if traits.calls == "text":
        return
    if traits.calls_without_tools:
        yield _Conversation(traits, num_calls=num_calls)
    yield _Conversation(traits, num_calls=num_calls, tools=_TOOLS)


def _with_reasoning(traits: TemplateTraits, profile: ThinkingProfile) -> Iterator[_Conversation]:
    """Yield conversations with an answer that has reasoning. Some templates write the reasoning
    only if thinking is on, or only before a call. If a template omits it in a loop of calls, every
    form is tried, because it may write reasoning elsewhere."""
    switched_on: dict[str, Any] = dict.fromkeys(profile.switches, True)
    if profile.mode is not None:
        switched_on["thinking_mode"] = profile.mode[0]
    forms = REASONING_FORMS if traits.reasoning == "omitted" else (traits.reasoning,)
    answers = ((0, ANSWER), (1, ""), (1, ANSWER))
    for (num_calls, text), options, form in product(answers, ({}, switched_on), forms):
        fitting = msgspec.structs.replace(traits, reasoning=form)
        yield _Conversation(fitting, text, num_calls, THOUGHT, options=options)


# ---- what counts as written

_AS_PASSED = re.compile(r"""'str33t'|["']function["']: *\{|["']type["']: *["'](?:thinking|text)""")
"""Pattern of calls or parts that a template writes as the object that it was passed."""


def _shows_calls(num_calls: int) -> Callable[[str], bool]:
    needed = [text for name, given in CALLS[:num_calls] for text in (name, *given.values())]
    return lambda turn: all(text in turn for text in needed) and not _AS_PASSED.search(turn)


def _shows_reasoning(turn: str) -> bool:
    return THOUGHT in turn and not _AS_PASSED.search(turn)
