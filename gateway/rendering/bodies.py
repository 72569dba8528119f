"""The bodies of the derender routes -> what is derendered, and in whose words errors are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.asking import Ask
from gateway.openai.checks import check_chat, check_completion
from gateway.openai.completion import Completion
from gateway.openai.naming import named
from gateway.openai.parameters import check_counts
from gateway.openai.prepare import Preparation, Prompt
from gateway.openai.schema import CompletionBody, prompts_of
from gateway.openai.shapes import ChatDialect
from gateway.rendering.derender import Case, derendered, derendered_chunk, first_state
from gateway.rendering.recorded import check_ids
from gateway.rendering.schema import DerenderChat, DerenderCompletion
from gateway.rendering.state import key_of, opened, sealed
from gateway.served import ServedModel
from gateway.tokens.generate_ask import TAIL_TOKENS
from gateway.tokens.generated import GenerateChunk
from protocol.config.gateway import GatewayConfig
from protocol.errors import InvalidRequest

T = TypeVar("T")
CHAT, COMPLETION = "chat_request", "completion_request"


def _in(field: str) -> Callable[[str], str]:
    return lambda param: f"{field}.{param}"


def _needed(value: T | None, field: str, when: str) -> T:
    if value is None:
        raise InvalidRequest(f"{field}: needed {when}", param=field)
    return value


def _index_offset(chunk: dict[str, Any] | None, offset: int) -> dict[str, Any] | None:
    for choice in chunk["choices"] if chunk else ():
        choice["index"] += offset
    return chunk


class ChatDerendering:
    """POST /v1/chat/completions/derender, once. Raises InvalidRequest naming the field."""

    def __init__(self, body: DerenderChat, model: ServedModel, config: GatewayConfig) -> None:
        self._body = body
        self._model = model
        with named(_in(CHAT)):
            check_chat(body.chat_request)
            trusts = config.trust_request_chat_template
            self._preparation = Preparation(body.chat_request, model, trusts_template=trusts)
            kwargs = self._preparation.kwargs()
        self._kwargs = kwargs
        self._config = config

    def whole(self) -> bytes:
        response = _needed(self._body.generate_response, "generate_response", "without stream")
        prompt = self._prompt(response.prompt_token_ids)
        ask = self._preparation.told(prompt, self._preparation.begin(prompt))
        self._check_counts(ask)
        return derendered(self._case(), [ask], [response], ["generate_response"])

    def chunk(self) -> tuple[dict[str, Any] | None, str]:
        """The chunk and the state behind it."""
        body, preparation = self._body, self._preparation
        chunk = _needed(body.generate_chunk, "generate_chunk", "with stream")
        key = key_of(self._model, body.chat_request)
        if body.stream_state is None:
            told = None if chunk.prompt_token_ids is msgspec.UNSET else chunk.prompt_token_ids
            prompt = self._prompt(told)
            begun = preparation.begin(prompt)
            state = first_state(self._model.reading.ending(begun), len(prompt.ids))
        else:
            state = opened(body.stream_state, key)
            prompt = Prompt(state.ending, [], self._kwargs)
            begun = preparation.begin(prompt)
        ask = preparation.told(prompt, begun)
        self._check_counts(ask)
        told_chunk, state = derendered_chunk(
            self._case(), ask, state, chunk, is_first=body.stream_state is None
        )
        return told_chunk, sealed(state, key)

    def _check_counts(self, ask: Ask) -> None:
        with named(_in(CHAT)):
            check_counts([ask], self._body.chat_request, self._config.max_n, self._config.max_n)

    def _case(self) -> Case:
        request, model = self._body.chat_request, self._model
        effective = {"chat_template_kwargs": self._kwargs}
        return Case(
            request=request,
            model=model,
            kind="chatcmpl",
            dialect=ChatDialect(
                model.tokenizer, request.num_logprobs, request.logprob_token_ids or ()
            ),
            effective=effective if request.return_effective_kwargs else None,
        )

    def _prompt(self, told: Sequence[int] | None) -> Prompt:
        """The body's, or as the token endpoint tells it, or rendered again."""
        body = self._body
        ids = body.prompt_token_ids or told
        if ids:
            check_ids(ids, self._model, "prompt_token_ids")
            end = self._model.tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False)
            prompt = Prompt(end, list(ids), self._kwargs)
        else:
            with named(_in(CHAT)):
                prompt = self._preparation.prompt(body.chat_request.messages)
        _check_count(body.prompt_tokens, len(prompt.ids), "prompt_tokens")
        return prompt


def _check_count(said: int | None, count: int, at: str) -> None:
    if said not in (None, count):
        raise InvalidRequest(f"{at}: {said:,}, but the prompt has {count:,}", param=at)


class CompletionDerendering:
    """POST /v1/completions/derender, once. Raises InvalidRequest naming the field."""

    def __init__(self, body: DerenderCompletion, model: ServedModel, config: GatewayConfig) -> None:
        self._body = body
        self._model = model
        self._config = config
        with named(_in(COMPLETION)):
            check_completion(body.completion_request)
            self._prompts = prompts_of(body.completion_request, config.max_prompts)
        for field in ("generate_responses", "prompt_tokens", "prompt_token_ids"):
            given = getattr(body, field)
            if given is not None and len(given) != len(self._prompts):
                raise InvalidRequest(
                    f"{field}: {len(given):,} of them; the request has {len(self._prompts):,} "
                    "prompts",
                    param=field,
                )

    def whole(self) -> bytes:
        body = self._body
        responses = _needed(body.generate_responses, "generate_responses", "without stream")
        completion = self._completion(body.completion_request, body.prompt_token_ids)
        for place, said in enumerate(body.prompt_tokens or ()):
            count = len(completion.asks[place].prompt_ids)
            _check_count(said, count, f"prompt_tokens[{place}]")
        at = [f"generate_responses[{place}]" for place in range(len(responses))]
        return derendered(self._case(completion), completion.asks, responses, at)

    def chunk(self) -> tuple[dict[str, Any] | None, str]:
        """The chunk and the state behind it."""
        body, place = self._body, self._body.prompt_index
        chunk = _needed(body.generate_chunk, "generate_chunk", "with stream")
        if place >= len(self._prompts):
            raise InvalidRequest(
                f"prompt_index: {place}; the request has {len(self._prompts):,} prompts",
                param="prompt_index",
            )
        request = msgspec.structs.replace(body.completion_request, prompt=self._prompts[place])
        key = key_of(self._model, request)
        is_first = body.stream_state is None
        if body.stream_state is None:
            completion = self._completion(request, self._own_ids(place, chunk))
            state = first_state("", len(completion.asks[0].prompt_ids))
        else:
            state = opened(body.stream_state, key)
            completion = self._completion(request, [[]])
        told, state = derendered_chunk(
            self._case(completion), completion.asks[0], state, chunk, is_first=is_first
        )
        return _index_offset(told, place * (request.n or 1)), sealed(state, key)

    def _own_ids(self, place: int, chunk: GenerateChunk) -> list[list[int]] | None:
        if self._body.prompt_token_ids is not None:
            return [self._body.prompt_token_ids[place]]
        return None if chunk.prompt_token_ids is msgspec.UNSET else [chunk.prompt_token_ids]

    def _completion(self, request: CompletionBody, ids: Sequence[list[int]] | None) -> Completion:
        for place, given in enumerate(ids or ()):
            check_ids(given, self._model, f"prompt_token_ids[{place}]")
        with named(_in(COMPLETION)):
            completion = Completion(
                request, self._model, max_prompts=self._config.max_prompts, ids=ids
            )
            most = max(self._config.max_n, self._config.max_prompts)
            check_counts(completion.asks, request, self._config.max_n, most)
        return completion

    def _case(self, completion: Completion) -> Case:
        return Case(
            request=completion.body, model=self._model, kind="cmpl", dialect=completion.dialect()
        )
