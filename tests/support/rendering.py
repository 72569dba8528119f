"""Render, generate, derender, and a chat beside them: all in one process, with one recording of
what an engine says. Bodies and answers pass through JSON, as between servers.
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
from gateway.api.tokens import prepare as asking
from gateway.api.tokens import stream as telling
from gateway.api.tokens.requests import GenerateBody
from gateway.engine.base import Subscriber
from gateway.generation.group import ChoiceGroup
from gateway.generation.sinks import CollectSink
from gateway.served_model import ServedModel
from protocol.config.gateway import GatewayConfig
from protocol.messages import Accepted, Output
from tests.support.http import events_of

CONFIG = GatewayConfig()
encode = msgspec.json.encode


class Tape:
    """The line to an engine that says, to every request, what was recorded."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = outputs
        self._open: dict[int, Subscriber] = {}

    def generate(self, prompt: Any, params: Any, subscriber: Subscriber, **_: Any) -> int:
        number = len(self._open) + 1
        self._open[number] = subscriber
        subscriber(Accepted(request=number))
        return number

    def abort(self, request: int, freed: object = None) -> None:
        self._open.pop(request, None)

    def play(self) -> None:
        for output in self._outputs:
            for number in list(self._open):
                if subscriber := self._open.get(number):
                    subscriber(msgspec.structs.replace(output, request=number))


class Both:
    """A sink that is two."""

    def __init__(self, *sinks: Any) -> None:
        self._sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return lambda *told: [getattr(sink, name)(*told) for sink in self._sinks]


@dataclass
class Played:
    """One request's answer, of whichever API."""

    answer: ChoiceGroup
    fold: CollectSink
    frames: list[bytes] = field(default_factory=list)

    @property
    def events(self) -> list[Any]:
        return events_of(b"".join(self.frames))


def play(asks: Sequence[Any], outputs: Sequence[Output], sink_of: Any) -> Played:
    tape = Tape(outputs)
    answer = ChoiceGroup(tape, asks)
    played = Played(answer, CollectSink(0))
    answer.open()
    played.fold = CollectSink(len(answer.choices))
    answer.attach(Both(played.fold, sink_of(answer, played.frames.append)))
    tape.play()
    return played


@dataclass
class Trip:
    """One request of one API, answered in both ways.

    outputs  what the engine says of every choice
    """

    model: ServedModel
    body: dict[str, Any]
    outputs: Sequence[Output]

    # ---- the API itself

    def chat(self) -> tuple[dict[str, Any], list[Any]]:
        """(whole, stream)"""
        body = msgspec.json.decode(encode(self.body), type=requests.ChatBody)
        preparation = Preparation(body, self.model)
        ask = preparation.prompt_request(preparation.prompt(body.messages))

        def dialect() -> ResponseBuilder:
            return ChatResponseBuilder(
                self.model.tokenizer, body.num_logprobs, body.logprob_token_ids or ()
            )

        return self._told(body, [ask], dialect, "chatcmpl")

    def completion(self) -> tuple[dict[str, Any], list[Any]]:
        body = msgspec.json.decode(encode(self.body), type=requests.CompletionBody)
        completion = Completion(body, self.model, max_prompts=99)
        return self._told(body, completion.prompt_requests, completion.builder, "cmpl")

    def _told(
        self, body: Any, asks: Any, dialect: Any, kind: str
    ) -> tuple[dict[str, Any], list[Any]]:
        origin = OpenAIEnvelope(f"{kind}-7", self.model.names[0], self.model.fingerprint)
        includes_ids = bool(body.return_token_ids)

        def stream(answer: ChoiceGroup, write: Any) -> ChunkStream:
            return ChunkStream(
                answer,
                dialect(),
                origin,
                write=write,
                finish=lambda: None,
                includes_usage=True,
                includes_ids=includes_ids,
            )

        played = play(asks, self.outputs, stream)
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
        told: dict[str, Any] = json.loads(encode(rendered))
        return told

    def render_completion(self) -> list[dict[str, Any]]:
        body = msgspec.json.decode(encode(self.body), type=requests.CompletionBody)
        completion = Completion(body, self.model, max_prompts=99)
        rendered = rendered_completion(completion, self.model, Carried(), "cmpl-7")
        told: list[dict[str, Any]] = json.loads(encode(rendered))
        return told

    def generate(self, rendered: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """(whole, stream)"""
        body = msgspec.json.decode(
            encode(rendered | {"stream_options": {"include_usage": True}}), type=GenerateBody
        )
        told = telling.GenerateEnvelope.from_request(body, self.model, rendered["request_id"], [])

        def stream(answer: ChoiceGroup, write: Any) -> telling.GenerateStream:
            return telling.GenerateStream(answer, told, write=write, finish=lambda: None)

        played = play([asking.to_request(body, self.model)], self.outputs, stream)
        return json.loads(telling.whole_response(played.answer, played.fold, told)), played.events

    # ---- derendered

    def derender_chat(self, response: dict[str, Any], **more: Any) -> dict[str, Any]:
        body = {"chat_request": self.body, "generate_response": response, **more}
        decoded = msgspec.json.decode(encode(body), type=DerenderChat)
        told: dict[str, Any] = json.loads(ChatDerendering(decoded, self.model, CONFIG).whole())
        return told

    def derender_completion(self, responses: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body = {"completion_request": self.body, "generate_responses": responses, **more}
        decoded = msgspec.json.decode(encode(body), type=DerenderCompletion)
        whole = CompletionDerendering(decoded, self.model, CONFIG).whole()
        told: dict[str, Any] = json.loads(whole)
        return told

    def derender_chat_chunk(
        self, chunk: dict[str, Any], state: str | None, **more: Any
    ) -> tuple[dict[str, Any] | None, str]:
        body = {"chat_request": self.streaming, "generate_chunk": chunk, "stream_state": state}
        decoded = msgspec.json.decode(encode(body | {"stream": True} | more), type=DerenderChat)
        told, state = ChatDerendering(decoded, self.model, CONFIG).chunk()
        return json.loads(encode(told)), state

    def derender_completion_chunk(
        self, chunk: dict[str, Any], state: str | None, **more: Any
    ) -> tuple[dict[str, Any] | None, str]:
        body = {"completion_request": self.streaming, "generate_chunk": chunk}
        body |= {"stream_state": state, "stream": True} | more
        decoded = msgspec.json.decode(encode(body), type=DerenderCompletion)
        told, state = CompletionDerendering(decoded, self.model, CONFIG).chunk()
        return json.loads(encode(told)), state

    @property
    def streaming(self) -> dict[str, Any]:
        return {**self.body, "stream": True, "stream_options": {"include_usage": True}}

    def derender_stream(self, chunks: Sequence[dict[str, Any]], one: Any, **more: Any) -> list[Any]:
        """`one`: derender_chat_chunk, or that of completions. The chunks that tell anything."""
        state, told = None, []
        for chunk in chunks:
            derendered, state = one(chunk, state, **more)
            if derendered is not None:
                told.append(derendered)
        return told
