"""Runs render, generate and derender, and the API itself for comparison, in one process.

All of them receive the same recorded outputs of an engine. Bodies and answers pass through JSON, as
between servers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.api.openai import requests
from gateway.api.openai.prepare import Completion, Preparation
from gateway.api.openai.response_builder import (
    ChatResponseBuilder,
    OpenAIEnvelope,
    ResponseBuilder,
    prompt_logprobs_builder,
)
from gateway.api.openai.stream import ChunkStream, whole_response
from gateway.api.render.derender import ChatDerendering, CompletionDerendering
from gateway.api.render.render import rendered_chat, rendered_completion
from gateway.api.render.requests import (
    Carried,
    DerenderChat,
    DerenderCompletion,
)
from gateway.api.tokens import prepare, stream
from gateway.api.tokens.requests import GenerateBody
from gateway.engine.base import Subscriber
from gateway.generation.group import ChoiceGroup
from gateway.generation.sinks import CollectSink
from gateway.served_model import ServedModel
from protocol.config.gateway import GatewayConfig
from protocol.engine.messages import Accepted, Output
from tests.support.answers import WrittenStream
from tests.support.http import events_of

CONFIG = GatewayConfig()
encode = msgspec.json.encode


class Tape:
    """An engine client. `play` sends the recorded outputs to every open request."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = outputs
        self._open: dict[int, Subscriber] = {}

    def generate(self, prompt: Any, params: Any, subscriber: Subscriber, **_: Any) -> int:
        number = len(self._open) + 1
        self._open[number] = subscriber
        subscriber(Accepted(request=number))
        return number

    def encode(self, *_: Any, **__: Any) -> int:
        raise AssertionError("no recorded request encodes")

    def abort(self, request: int, reason: str, *, on_freed: object = None) -> None:
        self._open.pop(request, None)

    def play(self) -> None:
        for output in self._outputs:
            for number in list(self._open):
                if subscriber := self._open.get(number):
                    subscriber(msgspec.structs.replace(output, request=number))


class Both:
    """A sink that passes each call on to several sinks."""

    def __init__(self, *sinks: Any) -> None:
        self._sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: [getattr(sink, name)(*arguments) for sink in self._sinks]


@dataclass
class Played:
    """One request's answer, collected and streamed."""

    answer: ChoiceGroup
    fold: CollectSink
    written: WrittenStream = field(default_factory=WrittenStream)

    @property
    def events(self) -> list[Any]:
        return events_of(self.written.data)


def play(asks: Sequence[Any], outputs: Sequence[Output], sink_of: Any) -> Played:
    tape = Tape(outputs)
    answer = ChoiceGroup(tape, asks)
    played = Played(answer, CollectSink(0))
    answer.open()
    played.fold = CollectSink(len(answer.choices))
    answer.attach(Both(played.fold, sink_of(answer, played.written)))
    tape.play()
    return played


@dataclass
class Trip:
    """One request of one API, answered as a whole and as a stream.

    outputs  the engine's outputs for every choice
    """

    model: ServedModel
    body: dict[str, Any]
    outputs: Sequence[Output]

    # ---- the API itself

    def chat(self) -> tuple[dict[str, Any], list[Any]]:
        """Answer the body as the chat API does. Return (whole answer, events of the stream)."""
        body = msgspec.json.decode(encode(self.body), type=requests.ChatBody)
        preparation = Preparation(body, self.model)
        ask = preparation.prompt_request(preparation.prompt(body.messages))

        def dialect() -> ResponseBuilder:
            return ChatResponseBuilder(
                self.model.tokenizer, body.num_logprobs, body.logprob_token_ids or ()
            )

        return self._answer(body, [ask], dialect, "chatcmpl")

    def completion(self) -> tuple[dict[str, Any], list[Any]]:
        body = msgspec.json.decode(encode(self.body), type=requests.CompletionBody)
        completion = Completion(body, self.model, max_prompts=99)
        return self._answer(body, completion.prompt_requests, completion.builder, "cmpl")

    def _answer(
        self, body: Any, asks: Any, dialect: Any, kind: str
    ) -> tuple[dict[str, Any], list[Any]]:
        origin = OpenAIEnvelope(f"{kind}-7", self.model.names[0], self.model.fingerprint)
        includes_ids = bool(body.return_token_ids)

        def sink(answer: ChoiceGroup, written: WrittenStream) -> ChunkStream:
            return ChunkStream(
                answer,
                written,
                dialect(),
                origin,
                includes_usage=True,
                includes_ids=includes_ids,
            )

        played = play(asks, self.outputs, sink)
        whole = whole_response(
            played.answer,
            played.fold,
            dialect(),
            origin,
            includes_ids=includes_ids,
            prompt_logprobs=prompt_logprobs_builder(body, self.model),
        )
        return json.loads(whole), played.events

    # ---- rendered, generated

    def render_chat(self, carried: Carried | None = None) -> dict[str, Any]:
        body = msgspec.json.decode(encode(self.body), type=requests.ChatBody)
        preparation = Preparation(body, self.model)
        prompt = preparation.prompt(body.messages)
        rendered = rendered_chat(preparation, prompt, carried or Carried(), "chatcmpl-7")
        decoded: dict[str, Any] = json.loads(encode(rendered))
        return decoded

    def render_completion(self) -> list[dict[str, Any]]:
        body = msgspec.json.decode(encode(self.body), type=requests.CompletionBody)
        completion = Completion(body, self.model, max_prompts=99)
        rendered = rendered_completion(completion, self.model, Carried(), "cmpl-7")
        decoded: list[dict[str, Any]] = json.loads(encode(rendered))
        return decoded

    def generate(self, rendered: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Generate from a rendered request. Return (whole answer, events of the stream)."""
        body = msgspec.json.decode(
            encode(rendered | {"stream_options": {"include_usage": True}}), type=GenerateBody
        )
        envelope = stream.GenerateEnvelope.from_request(
            body, self.model, rendered["request_id"], []
        )

        def sink(answer: ChoiceGroup, written: WrittenStream) -> stream.GenerateStream:
            return stream.GenerateStream(answer, written, envelope)

        played = play([prepare.to_request(body, self.model)], self.outputs, sink)
        whole = stream.whole_response(played.answer, played.fold, envelope)
        return json.loads(whole), played.events

    # ---- derendered

    def derender_chat(self, response: dict[str, Any], **more: Any) -> dict[str, Any]:
        body = {"chat_request": self.body, "generate_response": response, **more}
        decoded = msgspec.json.decode(encode(body), type=DerenderChat)
        whole: dict[str, Any] = json.loads(ChatDerendering(decoded, self.model, CONFIG).whole())
        return whole

    def derender_completion(self, responses: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body = {"completion_request": self.body, "generate_responses": responses, **more}
        decoded = msgspec.json.decode(encode(body), type=DerenderCompletion)
        whole: dict[str, Any] = json.loads(
            CompletionDerendering(decoded, self.model, CONFIG).whole()
        )
        return whole

    def derender_chat_chunk(
        self, chunk: dict[str, Any], state: str | None, **more: Any
    ) -> tuple[dict[str, Any] | None, str]:
        body = {"chat_request": self.streaming, "generate_chunk": chunk, "stream_state": state}
        decoded = msgspec.json.decode(encode(body | {"stream": True} | more), type=DerenderChat)
        derendered, state = ChatDerendering(decoded, self.model, CONFIG).chunk()
        return json.loads(encode(derendered)), state

    def derender_completion_chunk(
        self, chunk: dict[str, Any], state: str | None, **more: Any
    ) -> tuple[dict[str, Any] | None, str]:
        body = {"completion_request": self.streaming, "generate_chunk": chunk}
        body |= {"stream_state": state, "stream": True} | more
        decoded = msgspec.json.decode(encode(body), type=DerenderCompletion)
        derendered, state = CompletionDerendering(decoded, self.model, CONFIG).chunk()
        return json.loads(encode(derendered)), state

    @property
    def streaming(self) -> dict[str, Any]:
        return {**self.body, "stream": True, "stream_options": {"include_usage": True}}

    def derender_stream(self, chunks: Sequence[dict[str, Any]], one: Any, **more: Any) -> list[Any]:
        """Derender each chunk with `one`, and return the results that are not empty.

        one   `derender_chat_chunk` or `derender_completion_chunk`
        """
        state, found = None, []
        for chunk in chunks:
            derendered, state = one(chunk, state, **more)
            if derendered is not None:
                found.append(derendered)
        return found
