"""Builds response structs from events. There is a builder for chat completions, and one for text
completions.

Streams and complete responses use the same builder, so their content cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.openai.requests import GenerationBody
from gateway.api.openai.responses import (
    SERVICE_TIER,
    AssistantMessage,
    BatchChoice,
    ChatBatch,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionResponse,
    CustomPart,
    CustomText,
    Function,
    FunctionPart,
    MessagePart,
    OpenAIToolCall,
    ToolCallPart,
)
from gateway.formats.choice_parser import ReadOptions
from gateway.formats.events import (
    Content,
    Event,
    OutputDelta,
    Reasoning,
    ToolArguments,
    ToolCall,
    ToolText,
)
from gateway.generation.request import Choice
from gateway.served_model import ServedModel
from gateway.text.detokenizer import DetokenizerState
from gateway.text.logprobs import (
    CompletionLogprobs,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    prompt_token_logprobs,
)
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs

L = TypeVar("L", ChatLogprobs, CompletionLogprobs)
Text = TypeVar("Text", str, str | None)
Members = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OpenAIEnvelope:
    """The members of a response that do not depend on its choices."""

    #: The response id, as sent to the client.
    id: str
    #: The model name from the request.
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    #: Members that OpenAI does not define. Sent with a complete response, or with the first chunk
    #: of a stream.
    extensions: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> Members:
        """The members that every chunk repeats."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class ResponseBuilder(Protocol):
    """Builds the response structs of one route."""

    #: The number of top tokens per sampled token; None: no logprobs.
    num_logprobs: int | None
    #: The prompt's token ids and logprobs are members of the response, not of each choice.
    prompt_ids_on_top: bool
    #: The finish reason is sent with the last text, not in its own chunk.
    ends_with_text: bool
    #: The members of a choice in a chunk without text, such as the finish chunk.
    empty: Members
    #: The structs of a chunk, a chunk's choice, a response and a response's choice.
    chunk: Callable[..., Any]
    chunk_choice: Callable[..., Any]
    whole: Callable[..., Any]
    whole_choice: Callable[..., Any]

    def part(self, event: Event) -> Members | None:
        """Return the members that `event` adds to the choice in a chunk; None if the event is not
        sent."""

    def opening(self, choice: Choice) -> Members | None:
        """Return the members of a choice in the first chunk, which is sent before any text. Return
        None if there is nothing to send before text."""

    def fold(self, choice: Choice, chunks: Sequence[Any]) -> Members:
        """Join all chunks of a choice. Return the members of the complete choice: its message or
        text, and its logprobs."""

    def logprobs(self, choice: Choice, delta: OutputDelta) -> Any:
        """Return the logprobs of the delta's tokens, or None if they are not requested."""

    def echo_logprobs(self, choice: Choice) -> Any:
        """Return the logprobs of an echoed prompt, or None if no prompt is echoed."""


class ChatResponseBuilder:
    """Builds chat completions. With `in_batch`, the choices belong to several conversations.

    reasoning_fields  names under which reasoning is sent: `reasoning`, `reasoning_content`, or both
    """

    ends_with_text = False
    empty: Members = {"delta": MessagePart()}
    chunk: Callable[..., Any] = partial(
        ChatChunk, object="chat.completion.chunk", service_tier=SERVICE_TIER
    )
    chunk_choice: Callable[..., Any] = ChatChunkChoice

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_logprobs: int | None,
        logprob_token_ids: Sequence[int] = (),
        *,
        reasoning_fields: Literal["both", "reasoning", "reasoning_content"] = "both",
        in_batch: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._reasoning_fields = reasoning_fields
        self._extra_ids = logprob_token_ids
        self._in_batch = in_batch
        self.num_logprobs = num_logprobs
        self.prompt_ids_on_top = not in_batch
        self.whole_choice: Callable[..., Any] = BatchChoice if in_batch else ChatChoice
        kind: Callable[..., Any] = ChatBatch if in_batch else ChatCompletion
        self.whole: Callable[..., Any] = partial(
            kind, object="chat.completion", service_tier=SERVICE_TIER
        )

    def part(self, event: Event) -> Members | None:
        match event:
            case Content(text):
                part = MessagePart(content=text)
            case Reasoning(text):
                short, long = _named(text, self._reasoning_fields)
                part = MessagePart(reasoning=short, reasoning_content=long)
            case ToolArguments(index, fragment):
                function = FunctionPart(arguments=fragment)
                part = MessagePart(tool_calls=[ToolCallPart(index=index, function=function)])
            case ToolText(index, fragment):
                custom = CustomPart(input=fragment)
                part = MessagePart(tool_calls=[ToolCallPart(index=index, custom=custom)])
            case ToolCall():
                part = MessagePart(tool_calls=[_call_start(event)])
            case _:
                return None
        return {"delta": part}

    def opening(self, choice: Choice) -> Members:
        return {"delta": MessagePart(role="assistant", content="", refusal=None)}

    def fold(self, choice: Choice, chunks: Sequence[ChatChunkChoice]) -> Members:
        place = {"conversation": choice.prompt_index} if self._in_batch else {}
        message = _message([chunk.delta for chunk in chunks], self._reasoning_fields)
        return {**place, "message": message, "logprobs": _joined([c.logprobs for c in chunks])}

    def logprobs(self, choice: Choice, delta: OutputDelta) -> ChatLogprobs | None:
        if self.num_logprobs is None:
            return None
        items = chat_logprobs(
            self._tokenizer, delta.logprobs, num_top=self.num_logprobs, extra_ids=self._extra_ids
        )
        return ChatLogprobs(items, None)

    def echo_logprobs(self, choice: Choice) -> None:
        return None


def _message(parts: Iterable[MessagePart], reasoning_fields: str) -> AssistantMessage:
    """Join the deltas of a message, in linear time. A tool call that was cut off is included.
    `content` is null if there is only reasoning or tool calls."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCallPart, list[str]]] = []
    for part in parts:
        if part.content is not UNSET:
            text.append(part.content)
        if part.reasoning is not UNSET:
            reasoning.append(part.reasoning)
        elif part.reasoning_content is not UNSET:
            reasoning.append(part.reasoning_content)
        for call in part.tool_calls or ():
            if call.id is not UNSET:
                calls.append((call, []))
            calls[call.index][1].append(_piece_of(call))
    content, thoughts = "".join(text), "".join(reasoning) or None
    short, long = _named(thoughts, reasoning_fields)
    return AssistantMessage(
        role="assistant",
        content=None if (calls or thoughts) and not content else content,
        refusal=None,
        annotations=[],
        reasoning=short,
        reasoning_content=long,
        tool_calls=[_whole_call(start, "".join(pieces)) for start, pieces in calls] or UNSET,
    )


def _named(text: Text, fields: str) -> tuple[Text | UnsetType, Text | UnsetType]:
    """Return the values of `reasoning` and of `reasoning_content`."""
    long = "reasoning_content"
    return UNSET if fields == long else text, UNSET if fields == "reasoning" else text


def _call_start(call: ToolCall) -> ToolCallPart:
    """Return the first delta of a call."""
    if call.is_text:
        custom = CustomPart(name=call.name, input="")
        return ToolCallPart(index=call.index, id=call.id, type="custom", custom=custom)
    function = FunctionPart(name=call.name, arguments="")
    return ToolCallPart(index=call.index, id=call.id, type="function", function=function)


def _piece_of(part: ToolCallPart) -> str:
    """Return what a delta of a call adds to its arguments or its text."""
    if part.custom is not UNSET:
        return part.custom.input
    assert part.function is not UNSET
    return part.function.arguments


def _whole_call(start: ToolCallPart, text: str) -> OpenAIToolCall:
    """Return the call that begins with the delta `start`."""
    assert start.id is not UNSET
    if start.custom is not UNSET:
        custom = CustomText(name=str(start.custom.name), input=text)
        return OpenAIToolCall(id=start.id, type="custom", custom=custom)
    assert start.function is not UNSET
    function = Function(name=str(start.function.name), arguments=text)
    return OpenAIToolCall(id=start.id, type="function", function=function)


class CompletionResponseBuilder:
    """Builds text completions. `prompts` has the texts to echo; None if `echo` is off."""

    prompt_ids_on_top = False
    ends_with_text = True
    empty: Members = {"text": ""}
    chunk: Callable[..., Any] = partial(CompletionChunk, object="text_completion")
    chunk_choice: Callable[..., Any] = CompletionChunkChoice
    whole: Callable[..., Any] = partial(CompletionResponse, object="text_completion")
    whole_choice: Callable[..., Any] = CompletionChoice

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_logprobs: int | None,
        options: ReadOptions,
        prompts: Sequence[str] | None = None,
        logprob_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._extra_ids = logprob_token_ids
        self._options = options
        self._prompts = prompts
        self._offsets: dict[int, TextOffsets] = {}
        self.num_logprobs = num_logprobs

    def part(self, event: Event) -> Members | None:
        return {"text": event.text} if isinstance(event, Content) else None

    def opening(self, choice: Choice) -> Members | None:
        return None if self._prompts is None else {"text": self._prompts[choice.prompt_index]}

    def fold(self, choice: Choice, chunks: Sequence[CompletionChunkChoice]) -> Members:
        text = "".join([chunk.text for chunk in chunks])
        return {"text": text, "logprobs": _joined([chunk.logprobs for chunk in chunks])}

    def logprobs(self, choice: Choice, delta: OutputDelta) -> CompletionLogprobs | None:
        return self._logprobs(choice, delta.token_ids, delta.logprobs)

    def echo_logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        if self._prompts is None:
            return None
        ids = choice.prompt_request.prompt_ids
        return self._logprobs(choice, ids, [None, *choice.prompt_logprobs])

    def _logprobs(
        self, choice: Choice, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs | None:
        if self.num_logprobs is None:
            return None
        return completion_logprobs(
            self._tokenizer,
            ids,
            entries,
            offsets=self.offsets(choice.index),
            num_top=self.num_logprobs,
            extra_ids=self._extra_ids,
        )

    def offsets(self, index: int, state: tuple[DetokenizerState, int] | None = None) -> TextOffsets:
        """Return the text offsets of the choice `index`. The first call restores them from `state`,
        if it is given: (detokenizer state, number of characters so far)."""
        if index not in self._offsets:
            detokenizer = self._tokenizer.detokenizer(
                skip_special_tokens=self._options.skip_special_tokens,
                continues=self._prompts is None,
                state=state[0] if state else None,
            )
            self._offsets[index] = TextOffsets(detokenizer, state[1] if state else 0)
        return self._offsets[index]


def _joined(parts: Iterable[L | None]) -> L | None:
    """Return the logprobs of all parts, concatenated; None if all parts are None."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    kind: Callable[..., L] = type(found[0])
    columns = zip(*map(msgspec.structs.astuple, found), strict=True)
    return kind(*[None if c[0] is None else list(chain(*c)) for c in columns])


def prompt_logprobs_builder(
    body: GenerationBody, model: ServedModel
) -> Callable[[Choice], list[Any] | None] | None:
    """Return a function that builds a choice's prompt logprobs, or None if they are not
    requested."""
    num_top = body.prompt_logprobs
    if num_top is None:
        return None
    return lambda choice: prompt_token_logprobs(model.tokenizer, choice.prompt_logprobs, num_top)
