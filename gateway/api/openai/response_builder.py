"""What a stream's chunks and a whole answer have in common, so that they cannot differ.

An `OpenAIEnvelope` is the part of the JSON that is the same in all chunks of an answer. Logprobs
and usage are shaped here for both, and the dialects of the two routes: where a choice's text
stands, how logprobs look.
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
"""There is one."""


@dataclass(frozen=True, slots=True)
class OpenAIEnvelope:
    """id as told to the client; model as the client named it.

    asides    what else there is to say of the request, beside the choices: with a whole answer, or
              with a stream's first chunk
    warnings  about the request
    """

    id: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    asides: dict[str, Any] = field(default_factory=dict)
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


def usage_of(answer: ChoiceGroup) -> dict[str, Any]:
    """So far, or in all: what each prompt cost once, and all choices."""
    prompt, generated = answer.num_prompt_tokens, answer.num_generated_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }
    if details := _completion_details(answer):
        usage["completion_tokens_details"] = details
    return usage


def usage_of_choice(answer: ChoiceGroup, choice: Choice, num_tokens: int) -> dict[str, Any]:
    """Return the usage of one choice, of which `num_tokens` were sent."""
    prompt = answer.num_prompt_tokens
    if len(answer.asks) > 1:
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


def _completion_details(answer: ChoiceGroup) -> dict[str, int]:
    details = {}
    if (reasoning := answer.num_reasoning_tokens) is not None:
        details["reasoning_tokens"] = reasoning
    accepted, rejected = answer.num_predictions
    if accepted or rejected:
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = rejected
    return details


class ResponseBuilder(Protocol):
    """What differs between the routes. One object serves one answer."""

    kind: str
    chunk_kind: str
    num_logprobs: int | None
    prompt_ids_on_top: bool  # beside the choices, not in each of them
    ends_with_text: bool  # the finish comes with the last text, not in a chunk of its own
    constants: Mapping[str, str]  # what every answer says of itself

    def said(self, text: str) -> bytes:
        """A bit of text, as members of a choice in a chunk."""

    def told(self, event: Event) -> bytes | None:
        """Any other event, in the same way; None for those that nobody hears of."""

    def opening(self, choice: Choice) -> bytes | None:
        """Members of the chunk that comes before all others of this choice, if there is one."""

    def nothing(self) -> bytes:
        """The same members where nothing is said: the chunk that only tells the end."""

    def whole(self, choice: Choice, message: MessageBuilder) -> dict[str, Any]:
        """Members of a choice in a whole answer."""

    def logprobs(self, choice: Choice, delta: OutputDelta) -> Any:
        """Of the delta's tokens; None where none were asked for."""

    def echo_logprobs(self, choice: Choice) -> Any:
        """Of the prompt's tokens, where the prompt is told again; None where there are none."""

    def echo(self, choice: Choice) -> str:
        """The prompt's text, where it is to be told again; else nothing."""


class ChatResponseBuilder:
    """Reasoning has two names in use, `reasoning` and `reasoning_content`; both are told.

    in_batch  the choices are those of several conversations
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

    def said(self, text: str) -> bytes:
        return b'"delta":{"content":%b}' % encode(text)

    def told(self, event: Event) -> bytes | None:
        if type(event) is Reasoning:
            bit = encode(event.text)
            return b'"delta":{"reasoning":%b,"reasoning_content":%b}' % (bit, bit)
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

    def nothing(self) -> bytes:
        return b'"delta":{}'

    def whole(self, choice: Choice, message: MessageBuilder) -> dict[str, Any]:
        """`content` is null where the answer is something else than text."""
        has_other = bool(message.calls or message.reasoning)
        told: dict[str, Any] = {
            "role": "assistant",
            "content": None if has_other and not message.text else message.text,
            "refusal": None,
            "annotations": [],
            "reasoning": message.reasoning or None,
            "reasoning_content": message.reasoning or None,
        }
        if message.calls:
            told["tool_calls"] = message.calls
        place = {"conversation": choice.prompt_index} if self._in_batch else {}
        return {**place, "message": told}

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
    """prompts  the texts to tell again, one per prompt; None where none are"""

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

    def said(self, text: str) -> bytes:
        return b'"text":%b' % encode(text)

    def told(self, event: Event) -> bytes | None:
        return None

    def opening(self, choice: Choice) -> bytes | None:
        return None if self._prompts is None else self.said(self.echo(choice))

    def nothing(self) -> bytes:
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
        """Those of a choice; the first time, fresh ones, or such that go on from `state`."""
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


def joined(parts: Sequence[Any]) -> Any:
    """Logprobs of consecutive tokens as one; None where there are none."""
    found = [msgspec.to_builtins(part) for part in parts if part is not None]
    if not found:
        return None
    return {
        name: [item for part in found for item in part[name]] if value is not None else None
        for name, value in found[0].items()
    }
