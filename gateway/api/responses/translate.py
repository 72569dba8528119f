"""Translates a Responses request into a chat request and renders its prompt. Translates the field
paths in errors back.

- The items of one assistant turn (reasoning, text, calls, in any order) become one message, as in a
  chat. So the same conversation has the same prompt, whether it is sent as items or as messages.
- Two consecutive assistant messages stay separate.
- Instructions and the system or developer messages that directly follow them become one message,
  because most templates accept only one system message, at the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from gateway.api.openai.checks import check_chat
from gateway.api.openai.field_paths import NO_FIELDS, translate_errors
from gateway.api.openai.prepare import LEFT_OUT, Preparation, Prompt
from gateway.api.openai.requests import ChatBody
from gateway.api.openai.tools import CHOICE_TYPES, is_hosted
from gateway.api.responses.item_texts import (
    CALLS,
    NOTES,
    OUTPUTS,
    SERVICE_CALLS,
    call_id_of,
    call_of,
    note_of,
    output_of,
    service_result,
)
from gateway.api.responses.items import (
    IMAGE_PART,
    PREVIOUS,
    SYSTEM_ROLES,
    Item,
    PlacedItem,
    reasoning_text,
)
from gateway.api.responses.requests import ResponsesBody
from gateway.api.responses.tools import ResponseTools, loaded_tools, qualified, response_tools
from gateway.formats.events import OutputWarning
from gateway.generation.request import PromptRequest
from gateway.images.source import FileLoader, source_of
from gateway.served_model import ServedModel
from protocol.wire.errors import ContextTooLong, InvalidRequest
from protocol.wire.field_words import one_of

_TRANSLATED = frozenset(
    {
        *("messages", "n", "max_tokens", "max_completion_tokens", "response_format"),
        *("stream", "stream_options", "tools", "tool_choice", "reasoning", "top_logprobs"),
    }
)

_COMMON = frozenset(ResponsesBody.__struct_fields__) & frozenset(ChatBody.__struct_fields__)
COPIED_FIELDS = _COMMON - _TRANSLATED
"""Fields that both requests have with the same meaning. They are copied."""
_REQUEST_PATHS = {
    r"(tools\[\d+\])\.(function|custom)\b": r"\1",
    r"tool_choice\.(function|custom)\.name\b": "tool_choice.name",
    r"tool_choice\.allowed_tools\.tools(\[\d+\])\.(function|custom)\b": r"tool_choice.tools\1",
    r"tool_choice\.allowed_tools\b\.?": "tool_choice.",
    r"response_format(\.json_schema)?\b": "text.format",
    r"reasoning_effort\b": "reasoning.effort",
    r"max_(completion_)?tokens\b": "max_output_tokens",
    r"messages\b": "input",
}
"""Pattern of the start of a path in the chat -> start of the path in the client's request. The
first pattern that matches applies."""
CLIENT_TOOLS = ("local_shell", "shell", "apply_patch", "tool_search")
"""Types of tools that have no name in the API."""
_FORMATS = ("text", "json_object", "json_schema")
INSTRUCTIONS = "instructions"
_BETWEEN_INSTRUCTIONS = "\n\n"
_BETWEEN_PARTS = "\n"
ROOM_TOKENS = 256
"""Tokens reserved for the answer if a request with truncation "auto" does not limit it."""
T = TypeVar("T")


class ResponsesTranslation(msgspec.Struct, frozen=True):
    """A Responses request, translated into a chat request."""

    chat: ChatBody
    #: Path prefix in the chat -> path prefix in the client's request.
    paths: Mapping[str, str]
    tools: ResponseTools
    warnings: Sequence[OutputWarning] = ()

    def translate_errors(
        self, engine_fields: Mapping[str, str] = NO_FIELDS
    ) -> AbstractContextManager[None]:
        """Return a context manager that translates the field paths in errors raised inside its
        block: from paths of the chat request to paths of the client's request. `engine_fields` has
        the chat's paths for the engine's names."""
        return translate_errors(self.request_path, engine_fields)

    def request_path(self, name: str) -> str:
        """Translate the path `name` of a field of the chat into the field's path in the client's
        request.

        The longest prefix of `name` that is a key of `paths` is replaced by its value. A field from
        an earlier response becomes `previous_response_id`. Without such a prefix, the patterns of
        _REQUEST_PATHS apply; if none matches, `name` is returned unchanged.
        """
        for end in sorted({len(name), *(m.start() for m in re.finditer(r"[.\[]", name))})[::-1]:
            if (own := self.paths.get(name[:end])) is not None:
                return PREVIOUS if own.startswith(PREVIOUS) else own + name[end:]
        for pattern, own in _REQUEST_PATHS.items():
            if re.match(pattern, name):
                return re.sub(f"^{pattern}", own, name)
        return name


def chat_body(body: ResponsesBody, items: Sequence[PlacedItem]) -> ResponsesTranslation:
    """Translate a checked body and check the resulting chat. `items` include those of previous
    responses. Raise InvalidRequest naming the field of the client's request."""
    tools = response_tools(body.tools, loaded_tools((placed.item, placed.at) for placed in items))
    conversation = ItemConversation(body.instructions, items)
    if not conversation.messages:
        raise InvalidRequest.at("input", "must have at least one message")
    chat = ChatBody(
        messages=conversation.messages,
        tools=tools.chat,
        tool_choice=_tool_choice(body.tool_choice),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_response_format(body.text.format if body.text else None),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.includes_logprobs,
        top_logprobs=body.top_logprobs if body.includes_logprobs else None,
        **{name: getattr(body, name) for name in COPIED_FIELDS},
    )
    warnings = [*conversation.warnings, *(_left_out(at) for at in tools.ignored if at[-1] == "]")]
    paths = {**tools.paths, **conversation.paths}
    translation = ResponsesTranslation(chat, paths, tools, warnings)
    with translation.translate_errors():
        check_chat(chat)
    return translation


def _left_out(at: str) -> OutputWarning:
    """Return the warning about a tool that the model does not see."""
    return OutputWarning(LEFT_OUT, f"{at}: left out, because only OpenAI's service runs this tool")


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind != "allowed_tools":
        return _chosen(choice, "tool_choice")
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [
            _chosen(tool, f"tool_choice.tools[{place}]")
            for place, tool in enumerate(tools)
            if not is_hosted(tool)
        ]
    return {"type": kind, kind: {"mode": choice.get("mode"), "tools": tools}}


def _chosen(tool: Any, at: str) -> Any:
    """Convert a `tool_choice` from the shape of the Responses API to that of the chat API, in which
    a nested `function` or `custom` contains the tool's name."""
    if not isinstance(tool, Mapping):
        return tool
    kind, name = tool.get("type"), tool.get("name")
    if kind in CLIENT_TOOLS:
        kind, name = "function", kind
    if kind not in ("function", "custom"):
        raise InvalidRequest.wrong(f"{at}.type", one_of((*CHOICE_TYPES, *CLIENT_TOOLS)), kind)
    if isinstance(name, str):
        name = qualified(tool.get("namespace"), name)
    return {"type": kind, kind: {"name": name}}


def _response_format(format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Convert `text.format` to the chat's `response_format`, which has a nested `json_schema`.
    Return None for None."""
    if format is None:
        return None
    kind = format.get("type")
    if kind not in _FORMATS:
        raise InvalidRequest.wrong("text.format.type", one_of(_FORMATS), kind)
    if kind != "json_schema":
        return dict(format)
    return {"type": kind, "json_schema": {k: v for k, v in format.items() if k != "type"}}


# ---- items -> messages


class ItemConversation:
    """Builds the chat messages of a list of items."""

    def __init__(self, instructions: str | None, items: Sequence[PlacedItem]) -> None:
        #: The `messages` of a chat.
        self.messages: list[dict[str, Any]] = []
        #: Path prefix in the chat -> path prefix in the client's request.
        self.paths: dict[str, str] = {}
        self.warnings: list[OutputWarning] = []
        #: Kind of the last item in the assistant's open message; None: no message is open.
        self._last: str | None = None
        if instructions:
            self._add({"role": "system", "content": instructions}, INSTRUCTIONS)
        for place, placed in enumerate(items):
            self._add_item(placed, is_first=not place)

    def _add_item(self, placed: PlacedItem, *, is_first: bool) -> None:
        item, at = placed.item, placed.at
        match item["type"]:
            case "reasoning":
                self._extend("reasoning", reasoning_text(item, at), placed)
            case kind if kind in CALLS:
                self._call(item, at)
            case kind if kind in OUTPUTS:
                self._output(item, at)
            case kind if kind in SERVICE_CALLS:
                self._service_call(item, at)
            case kind if kind in NOTES:
                self._note(item, placed)
            case _ if item["role"] == "assistant":
                self._extend("content", _joined(item["content"]), placed)
            case _ if item["role"] in SYSTEM_ROLES and self._follows_instructions():
                first = self.messages[0]
                first["content"] += _BETWEEN_INSTRUCTIONS + _joined(item["content"])
            case _:
                content = _parts(item["content"], f"{at}.content")
                self._add({"role": item["role"], "content": content}, at)

    def _follows_instructions(self) -> bool:
        return len(self.messages) == 1 and self.paths["messages[0]"] == INSTRUCTIONS

    def _add(self, message: dict[str, Any], at: str) -> str:
        """Append a message and return its path in the chat."""
        own = f"messages[{len(self.messages)}]"
        self.paths[own] = at
        self.messages.append(message)
        self._last = None
        return own

    def _assistant(self, kind: str, at: str) -> tuple[dict[str, Any], str]:
        """Return the message to which the assistant's next item is added, and the message's path in
        the chat.

        This is the assistant's open message. A new message is opened if none is open, or if `kind`
        and the previous item are both "content", because consecutive assistant messages stay
        separate.

        kind  "reasoning", "content" or "call"
        at    the item's path in the client's request
        """
        if self._last is None or (kind == self._last == "content"):
            self._add({"role": "assistant", "content": ""}, at)
        self._last = kind
        return self.messages[-1], f"messages[{len(self.messages) - 1}]"

    def _extend(self, kind: str, text: str, placed: PlacedItem) -> None:
        message, own = self._assistant(kind, placed.at)
        message[kind] = message.get(kind, "") + text
        self.paths[f"{own}.{kind}"] = f"{placed.at}.content"

    def _call(self, item: Item, at: str) -> None:
        message, own = self._assistant("call", at)
        calls = message.setdefault("tool_calls", [])
        for member in ("function", "custom"):
            self.paths[f"{own}.tool_calls[{len(calls)}].{member}"] = at
        self.paths[f"{own}.tool_calls[{len(calls)}].id"] = f"{at}.call_id"
        calls.append(call_of(item).tool_call(call_id_of(item)))

    def _output(self, item: Item, at: str) -> None:
        content, own_path, left_out = output_of(item, at)
        for part in left_out:
            message = f"{part}: left out, because this model reads text only"
            self.warnings.append(OutputWarning(LEFT_OUT, message))
        self._result(content, call_id_of(item), at, own_path)

    def _result(self, content: Any, call_id: str | None, at: str, content_path: str) -> None:
        message = {"role": "tool", "content": content}
        if call_id is not None:
            message["tool_call_id"] = call_id
        own = self._add(message, at)
        self.paths[f"{own}.tool_call_id"] = f"{at}.call_id"
        self.paths[f"{own}.content"] = content_path

    def _service_call(self, item: Item, at: str) -> None:
        """Add a call that OpenAI's service executed, and its result."""
        call_id = call_id_of(item) or f"call_{len(self.messages)}"
        message, _ = self._assistant("call", at)
        message.setdefault("tool_calls", []).append(call_of(item).tool_call(call_id))
        self._result(service_result(item), call_id, at, at)

    def _note(self, item: Item, placed: PlacedItem) -> None:
        role, text = note_of(item, placed.at)
        if role == "assistant":
            self._extend("content", text, placed)
        else:
            self._add({"role": role, "content": text}, placed.at)


def check_outputs(items: Sequence[PlacedItem]) -> None:
    """Raise InvalidRequest if some calls of one turn have outputs and others have none. The model
    would continue as if it had not made the calls without an output."""
    answered = {call_id_of(placed.item) for placed in items if placed.item["type"] in OUTPUTS}
    for calls in _calls_by_turn(items):
        missing = [call for call in calls if call not in answered]
        if missing and len(missing) < len(calls):
            raise InvalidRequest.at(
                "input",
                f"the call {missing[0]!r} has no output, but other calls of the same turn have one",
            )


def _calls_by_turn(items: Sequence[PlacedItem]) -> list[list[str | None]]:
    """Return the ids of the calls of each turn. Outputs and a user's messages separate turns."""
    groups: list[list[str | None]] = []
    is_open = False
    for placed in items:
        item = placed.item
        if item["type"] in CALLS:
            if not is_open:
                groups.append([])
            groups[-1].append(call_id_of(item))
            is_open = True
        elif item["type"] in OUTPUTS or item.get("role") == "user":
            is_open = False
    return groups


def _parts(content: Any, at: str) -> Any:
    """Return the content in the form of a chat's content: a text, or a list of texts and images."""
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] != IMAGE_PART
        else replace(
            source_of(part, f"{at}[{place}]"), kind_at=f"{at}[{place}].type", kind=IMAGE_PART
        )
        for place, part in enumerate(content)
    ]


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    return _BETWEEN_PARTS.join(part["text"] for part in content)


# ---- rendering


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered request, ready to be sent to the engine."""

    translation: ResponsesTranslation
    preparation: Preparation
    prompt: Prompt

    @property
    def ignored(self) -> list[str]:
        """The members that have no effect, as paths in the client's request."""
        paths = map(self.translation.request_path, self.preparation.ignored)
        return [*self.translation.tools.ignored, *paths]

    def prompt_request(self) -> PromptRequest:
        with self.translate_errors():
            return self.preparation.prompt_request(self.prompt)

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that translates the field paths in errors raised inside its
        block, also those of the engine."""
        return self.translation.translate_errors(self.preparation.engine_fields)


def rendered(
    body: ResponsesBody,
    items: Sequence[PlacedItem],
    model: ServedModel,
    *,
    trusts_template: bool,
    files: FileLoader,
) -> Rendered:
    """Translate and render a checked body. `items` include those of previous responses. With
    truncation "auto", drop the oldest items until the rest fits. Raise InvalidRequest, naming the
    field, if the conversation is invalid or cannot be rendered.

    files  loads the images that are uploaded files
    """

    def render(items: Sequence[PlacedItem]) -> Rendered:
        translation = chat_body(body, items)
        with translation.translate_errors():
            preparation = Preparation(
                translation.chat,
                model,
                trusts_template=trusts_template,
                shown_tools=translation.tools.shown,
                files=files,
            )
            prompt = preparation.prompt(translation.chat.messages)
        return Rendered(translation, preparation, prompt)

    check_outputs(items)
    if body.truncation != "auto":
        return render(items)
    max_prompt_tokens = model.limits.max_len - reserved_tokens(
        body.max_output_tokens, model.limits.max_len
    )
    return render_fitting(
        items, render, lambda rendered: len(rendered.prompt.ids) <= max_prompt_tokens
    )


# ---- truncation "auto": drops the oldest items until the rest fits the model's context
#
# System messages, developer messages and the last item stay. The conversation is cut before a user
# message if that suffices, else before another item. If a call is dropped, its output is dropped
# too. Each attempt renders the conversation. To save attempts, the cut is found by bisection.


def reserved_tokens(max_output_tokens: int | None, max_len: int) -> int:
    """Return the number of tokens to reserve for the answer: at most half of the context."""
    return min(max_output_tokens or ROOM_TOKENS, max_len // 2)


def render_fitting(
    items: Sequence[PlacedItem],
    render: Callable[[Sequence[PlacedItem]], T],
    fits: Callable[[T], bool],
) -> T:
    """Return the rendering of as many of the latest items as fit.

    If even the shortest conversation does not fit, return its rendering, or raise ContextTooLong if
    `render` does.
    """

    def attempt(items: Sequence[PlacedItem]) -> T | None:
        try:
            rendered = render(items)
        except ContextTooLong:
            return None
        return rendered if fits(rendered) else None

    if (whole := attempt(items)) is not None:
        return whole
    cuts = possible_cuts(items)
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if attempt(items_after(items, cuts[middle])) is not None:
            high = middle
        else:
            low = middle + 1
    return render(items_after(items, cuts[low]) if cuts else items)


def possible_cuts(items: Sequence[PlacedItem]) -> list[int]:
    """Return the indexes of the items that the shortened conversation may start with, in order of
    preference.

    First come the user's messages, except item 0. Then come the items after the last user message
    (or after item 0), except outputs of functions, because their calls would be dropped.
    """
    user_turns = [i for i, placed in enumerate(items) if _role(placed) == "user" and i]
    last = user_turns[-1] if user_turns else 0
    rest = range(last + 1, len(items))
    return user_turns + [i for i in rest if items[i].item["type"] not in OUTPUTS]


def items_after(items: Sequence[PlacedItem], cut: int) -> list[PlacedItem]:
    """Return the items from index `cut` on, and the system and developer messages before `cut`.
    Outputs whose call is dropped are dropped too."""
    calls = {call_id_of(placed.item) for placed in items[cut:] if placed.item["type"] in CALLS}

    def stays(place: int, placed: PlacedItem) -> bool:
        if place < cut or _role(placed) in SYSTEM_ROLES:
            return _role(placed) in SYSTEM_ROLES
        return placed.item["type"] not in OUTPUTS or call_id_of(placed.item) in calls

    return [placed for place, placed in enumerate(items) if stays(place, placed)]


def _role(placed: PlacedItem) -> str | None:
    return placed.item.get("role")
