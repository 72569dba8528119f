"""The JSON that streamed chunks and complete responses share, so that they cannot differ.

`OpenAIEnvelope` has the members that are the same in all chunks of a response. A `ResponseBuilder`
formats the choices of one route: where the text goes, how logprobs look.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from gateway.api.openai.message import MessageBuilder, call_of
from gateway.formats.choice_parser import ReadOptions
from gateway.formats.events import (
    Event,
    OutputDelta,
    OutputWarning,
    Reasoning,
    ToolArguments,
    ToolCall,
)
from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
from gateway.text.detokenizer import DetokenizerState
from gateway.text.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from gateway.text.tokenizer import Tokenizer
from protocol.messages import TokenLogprobs

encode = msgspec.json.encode
SERVICE_TIER = "default"
"""The only tier."""


@dataclass(frozen=True, slots=True)
class OpenAIEnvelope:
    """The members that are the same in all chunks of a response.

    id          the response id, as sent to the client
    model       the model name from the request
    extensions  our own members about the request; sent with a complete response, or with the first
                chunk of a stream
    warnings    warnings about the request
    """

    id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    extensions: dict[str, Any] = field(default_factory=dict)
    warnings: list[OutputWarning] = field(default_factory=list)

    def fields(self, kind: str, constants: Mapping[str, str]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **constants,
        }


def usage_of(group: ChoiceGroup) -> dict[str, Any]:
    """Return the usage so far: each prompt once, and all choices."""
    prompt, generated = group.num_prompt_tokens, group.num_generated_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": group.num_cached_tokens},
    }
    if details := _completion_details(group):
        usage["completion_tokens_details"] = details
    return usage


def usage_of_choice(group: ChoiceGroup, choice: Choice, num_tokens: int) -> dict[str, Any]:
    """Return the usage of one choice after `num_tokens` of its tokens were sent."""
    prompt = group.num_prompt_tokens
    if len(group.asks) > 1:
        prompt = len(choice.ask.prompt_ids)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": num_tokens,
        "total_tokens": prompt + num_tokens,
        "prompt_tokens_details": {"cached_tokens": choice.num_cached},
    }
    if choice.meter is not None:
        reasoning = min(choice.meter.count, num_tokens)  # more may be generated than was sent
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


def _completion_details(group: ChoiceGroup) -> dict[str, int]:
    details = {}
    if (reasoning := group.num_reasoning_tokens) is not None:
        details["reasoning_tokens"] = reasoning
    accepted, rejected = group.num_predictions
    if accepted or rejected:
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = rejected
    return details


class ResponseBuilder(Protocol):
    """Formats the choices of one route. An instance serves one response."""

    kind: str
    chunk_kind: str
    num_logprobs: int | None
    prompt_ids_on_top: bool  # in the response, not in each choice
    ends_with_text: bool  # the finish reason comes with the last text, not in its own chunk
    constants: Mapping[str, str]  # more members of the envelope

    def content(self, text: str) -> bytes:
        """Return the members of a chunk's choice for a delta of content."""

    def event(self, event: Event) -> bytes | None:
        """Return the members for any other event, or None if it is not sent."""

    def opening(self, choice: Choice) -> bytes | None:
        """Return the members of the first chunk of a choice, or None if it has no such chunk."""

    def empty(self) -> bytes:
        """Return the members of a chunk without text, such as a finish chunk."""

    def whole(self, choice: Choice, message: MessageBuilder) -> dict[str, Any]:
        """Return the members of a choice in a complete response."""

    def logprobs(self, choice: Choice, delta: OutputDelta) -> Any:
        """Return the logprobs of the delta's tokens; None if they are not requested."""

    def echo_logprobs(self, choice: Choice) -> Any:
        """Return the logprobs of an echoed prompt; None if there are none."""

    def echo(self, choice: Choice) -> str:
        """Return the text of an echoed prompt, else an empty string."""


class ChatResponseBuilder:
    """Formats chat completions. Reasoning is sent under both names in use: `reasoning` and
    `reasoning_content`.

    in_batch  the choices belong to several conversations
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    ends_with_text = False
    constants: Mapping[str, str] = MappingProxyType({"service_tier": SERVICE_TIER})

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_logprobs: int | None,
        logprob_token_ids: Sequence[int] = (),
        *,
        in_batch: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._asked_ids = logprob_token_ids
        self._in_batch = in_batch
        self.num_logprobs = num_logprobs
        self.prompt_ids_on_top = not in_batch

    def content(self, text: str) -> bytes:
        return b'"delta":{"content":%b}' % encode(text)

    def event(self, event: Event) -> bytes | None:
        if type(event) is Reasoning:
            text = encode(event.text)
            return b'"delta":{"reasoning":%b,"reasoning_content":%b}' % (text, text)
        if type(event) is ToolArguments:
            return b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
                event.index,
                encode(event.fragment),
            )
        if type(event) is ToolCall:
            call = {"index": event.index, **call_of(event, "")}
            return b'"delta":{"tool_calls":[%b]}' % encode(call)
        return None

    def opening(self, choice: Choice) -> bytes | None:
        return b'"delta":{"role":"assistant","content":"","refusal":null}'

    def empty(self) -> bytes:
        return b'"delta":{}'

    def whole(self, choice: Choice, message: MessageBuilder) -> dict[str, Any]:
        """Return the message. `content` is null if it has only reasoning or tool calls."""
        has_other = bool(message.calls or message.reasoning)
        json: dict[str, Any] = {
            "role": "assistant",
            "content": None if has_other and not message.text else message.text,
            "refusal": None,
            "annotations": [],
            "reasoning": message.reasoning or None,
            "reasoning_content": message.reasoning or None,
        }
        if message.calls:
            json["tool_calls"] = message.calls
        place = {"conversation": choice.prompt_index} if self._in_batch else {}
        return {**place, "message": json}

    def logprobs(self, choice: Choice, delta: OutputDelta) -> Any:
        if self.num_logprobs is None:
            return None
        items = chat_logprobs(
            self._tokenizer,
            delta.logprobs,
            num_top=self.num_logprobs,
            asked_ids=self._asked_ids,
        )
        return {"content": items, "refusal": None}

    def echo_logprobs(self, choice: Choice) -> Any:
        return None

    def echo(self, choice: Choice) -> str:
        return ""


class CompletionResponseBuilder:
    """Formats text completions. `prompts` has the texts to echo; None if `echo` is off."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    prompt_ids_on_top = False
    ends_with_text = True
    constants: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_logprobs: int | None,
        options: ReadOptions,
        prompts: Sequence[str] | None = None,
        logprob_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._asked_ids = logprob_token_ids
        self._options = options
        self._prompts = prompts
        self._offsets: dict[int, TextOffsets] = {}
        self.num_logprobs = num_logprobs

    def content(self, text: str) -> bytes:
        return b'"text":%b' % encode(text)

    def event(self, event: Event) -> bytes | None:
        return None

    def opening(self, choice: Choice) -> bytes | None:
        return None if self._prompts is None else self.content(self.echo(choice))

    def empty(self) -> bytes:
        return b'"text":""'

    def whole(self, choice: Choice, message: MessageBuilder) -> dict[str, Any]:
        return {"text": self.echo(choice) + message.text}

    def echo(self, choice: Choice) -> str:
        return "" if self._prompts is None else self._prompts[choice.prompt_index]

    def logprobs(self, choice: Choice, delta: OutputDelta) -> Any:
        if self.num_logprobs is None:
            return None
        return self._shaped(choice, delta.token_ids, delta.logprobs)

    def echo_logprobs(self, choice: Choice) -> Any:
        if self.num_logprobs is None or self._prompts is None:
            return None
        return self._shaped(choice, choice.ask.prompt_ids, [None, *choice.prompt_logprobs])

    def offsets(self, index: int, state: tuple[DetokenizerState, int] | None = None) -> TextOffsets:
        """Return a choice's text offsets. The first call restores them from `state`, if given."""
        if index not in self._offsets:
            detokenizer = self._tokenizer.detokenizer(
                skip_special_tokens=self._options.skip_special_tokens,
                continues=self._prompts is None,
                state=state[0] if state else None,
            )
            self._offsets[index] = TextOffsets(detokenizer, state[1] if state else 0)
        return self._offsets[index]

    def _shaped(
        self, choice: Choice, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> Any:
        return completion_logprobs(
            self._tokenizer,
            ids,
            entries,
            offsets=self.offsets(choice.index),
            num_top=self.num_logprobs or 0,
            asked_ids=self._asked_ids,
        )


def concatenated(parts: Sequence[Any]) -> Any:
    """Return the concatenation of logprobs objects; None if all parts are None."""
    found = [msgspec.to_builtins(part) for part in parts if part is not None]
    if not found:
        return None
    return {
        name: [item for part in found for item in part[name]] if value is not None else None
        for name, value in found[0].items()
    }
