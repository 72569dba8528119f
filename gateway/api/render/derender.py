"""Checks the bodies of the derender routes and converts the generated tokens in them into the API's
response. Errors name the fields of these bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.api.openai.checks import check_chat, check_completion
from gateway.api.openai.field_paths import translate_errors
from gateway.api.openai.parameters import check_counts
from gateway.api.openai.prepare import Completion, Preparation, Prompt
from gateway.api.openai.requests import ChatBody, CompletionBody, prompts_of
from gateway.api.openai.response_builder import ChatResponseBuilder
from gateway.api.openai.responses import Effective
from gateway.api.render.recorded import num_logprobs
from gateway.api.render.replay import DerenderCase, derendered, derendered_chunk, first_state
from gateway.api.render.requests import DerenderBody, DerenderChat, DerenderCompletion
from gateway.api.render.stream_state import key_of, opened, sealed
from gateway.api.tokens.prepare import TAIL_TOKENS
from gateway.api.tokens.responses import GenerateChunk, GeneratedChoice, GenerateResponse
from gateway.generation.request import PromptRequest
from gateway.served_model import ServedModel
from protocol.config.gateway import GatewayConfig
from protocol.engine.sampling import check_token_ids
from protocol.wire.errors import InvalidRequest

T = TypeVar("T")
CHAT, COMPLETION = "chat_request", "completion_request"


def _in(field: str) -> Callable[[str], str]:
    """Return a function that puts `field` before a path."""
    return lambda param: f"{field}.{param}"


def _required(value: T | None, field: str, when: str) -> T:
    """Return the value of a field. Raise InvalidRequest if it is None; `when` ends the message."""
    if value is None:
        raise InvalidRequest.at(field, f"required {when}")
    return value


def _with_index_offset(chunk: dict[str, Any] | None, offset: int) -> dict[str, Any] | None:
    for choice in chunk["choices"] if chunk else ():
        choice["index"] += offset
    return chunk


def _ids_of(chunk: GenerateChunk) -> list[int] | None:
    """Return the prompt's token ids if the chunk has them."""
    return None if chunk.prompt_token_ids is msgspec.UNSET else chunk.prompt_token_ids


def _num_choices(
    choices: Sequence[GeneratedChoice],
    body: DerenderBody,
    model: ServedModel,
    config: GatewayConfig,
    field: str,
) -> int:
    """Return the number of choices, for a body without the request that was rendered.

    It is one more than the largest index in `choices` and in the stream state. If it is not
    allowed, raise InvalidRequest naming `field`, which contains `choices`.
    """
    indexes = [choice.index for choice in choices]
    if body.stream_state is not None:
        indexes += opened(body.stream_state, key_of(model, None)).choices
    count = 1 + max(indexes, default=0)
    if not 0 < count <= config.max_n:
        raise InvalidRequest.at(
            field, f"the number of choices must be from 1 to {config.max_n:,}; got {count:,}"
        )
    return count


class ChatDerendering:
    """Handles one body of POST /v1/chat/completions/derender. Raises InvalidRequest naming the
    field."""

    def __init__(self, body: DerenderChat, model: ServedModel, config: GatewayConfig) -> None:
        self._body = body
        self._model = model
        self._config = config
        self._request = body.chat_request or self._plain_request()
        with translate_errors(_in(CHAT)):
            check_chat(self._request)
            trusts = config.trust_request_chat_template
            self._preparation = Preparation(self._request, model, trusts_template=trusts)
            self._kwargs = self._preparation.kwargs() if body.chat_request else {}

    def _plain_request(self) -> ChatBody:
        """Return a substitute for the rendered request, which the body does not have. All text is
        content. Raise InvalidRequest if the model's answers must be parsed."""
        output_format = self._model.output_format
        writes_calls = output_format.tools is not None and not self._model.renderer.omits_tools
        if output_format.reasoning is not None or writes_calls:
            raise InvalidRequest.at(
                CHAT,
                f"required, because this model's answers are parsed for reasoning "
                f"({output_format.reasoning}) and tool calls ({output_format.tools})",
            )
        body = self._body
        if body.stream:
            field = "generate_chunk"
            choices = _required(body.generate_chunk, field, "with stream").choices
        else:
            field = "generate_response"
            choices = _required(body.generate_response, field, "without stream").choices
        num_top = num_logprobs(choices)
        return ChatBody(
            messages=[],
            model=body.model,
            n=_num_choices(choices, body, self._model, self._config, field),
            logprobs=num_top is not None,
            top_logprobs=num_top,
            stream=body.stream,
        )

    def whole(self) -> bytes:
        response = _required(self._body.generate_response, "generate_response", "without stream")
        prompt = self._prompt(response.prompt_token_ids)
        prompt_request = self._preparation.request_without_grammar(
            prompt, self._preparation.answer_start(prompt)
        )
        self._check_counts(prompt_request)
        usage_tokens = response.usage.prompt_tokens if response.usage else 0
        count = None if prompt.ids else self._body.prompt_tokens or usage_tokens
        return derendered(self._case(), [prompt_request], [response], ["generate_response"], count)

    def chunk(self) -> tuple[dict[str, Any] | None, str]:
        """Return (derendered chunk or None, stream state after the chunk)."""
        body, preparation = self._body, self._preparation
        chunk = _required(body.generate_chunk, "generate_chunk", "with stream")
        key = key_of(self._model, body.chat_request)
        if body.stream_state is None:
            prompt = self._prompt(_ids_of(chunk))
            start = preparation.answer_start(prompt)
            count = len(prompt.ids) or body.prompt_tokens or 0
            state = first_state(self._model.output_format.prompt_ending(start), count)
        else:
            state = opened(body.stream_state, key)
            prompt = Prompt(state.ending, [], self._kwargs)
            start = preparation.answer_start(prompt)
        prompt_request = preparation.request_without_grammar(prompt, start)
        self._check_counts(prompt_request)
        derendered, state = derendered_chunk(
            self._case(), prompt_request, state, chunk, is_first=body.stream_state is None
        )
        return derendered, sealed(state, key)

    def _check_counts(self, prompt_request: PromptRequest) -> None:
        with translate_errors(_in(CHAT)):
            check_counts([prompt_request], self._request, self._config.max_n, self._config.max_n)

    def _case(self) -> DerenderCase:
        request, model = self._request, self._model
        return DerenderCase(
            request=request,
            model=model,
            kind="chatcmpl",
            builder=ChatResponseBuilder(
                model.tokenizer,
                request.num_logprobs,
                request.logprob_token_ids or (),
                reasoning_fields=self._config.reasoning_fields,
            ),
            effective=Effective(self._kwargs) if request.return_effective_kwargs else None,
        )

    def _prompt(self, response_ids: Sequence[int] | None) -> Prompt:
        """Return the prompt. Its token ids come from the body, or else from the response or chunk,
        or else from rendering `chat_request` again. Without all of these, the prompt is empty.
        Raise InvalidRequest if the number of token ids is not `prompt_tokens`."""
        body = self._body
        ids = body.prompt_token_ids or response_ids
        if ids:
            check_token_ids(ids, self._model.card.vocab_size, "prompt_token_ids")
            end = self._model.tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False)
            prompt = Prompt(end, list(ids), self._kwargs)
        elif body.chat_request is None:
            return Prompt("", [], self._kwargs)
        else:
            with translate_errors(_in(CHAT)):
                prompt = self._preparation.prompt(body.chat_request.messages)
        _check_count(body.prompt_tokens, len(prompt.ids), "prompt_tokens")
        return prompt


def _check_count(declared: int | None, count: int, at: str) -> None:
    if declared not in (None, count):
        raise InvalidRequest.at(at, f"{declared:,}, but the prompt has {count:,}")


class CompletionDerendering:
    """Handles one body of POST /v1/completions/derender. Call `chunk` if the body has `stream`, and
    `whole` otherwise.

    The constructor and both methods raise InvalidRequest naming the field. The methods raise
    ContextTooLong if they must tokenize a prompt that is too long.
    """

    def __init__(self, body: DerenderCompletion, model: ServedModel, config: GatewayConfig) -> None:
        self._body = body
        self._model = model
        self._config = config
        self._request = body.completion_request or self._plain_request()
        with translate_errors(_in(COMPLETION)):
            check_completion(self._request)
            self._prompts = prompts_of(self._request, config.max_prompts)
        for field in ("generate_responses", "prompt_tokens", "prompt_token_ids"):
            given = getattr(body, field)
            if given is not None and len(given) != len(self._prompts):
                raise InvalidRequest.at(
                    field,
                    f"must have one item per prompt ({len(self._prompts):,}); got {len(given):,}",
                )

    def _plain_request(self) -> CompletionBody:
        """Return a substitute for the rendered request, which the body does not have, with the same
        number of prompts."""
        body = self._body
        if body.stream:
            field, count = "generate_chunk", 1 + body.prompt_index
            choices = _required(body.generate_chunk, field, "with stream").choices
        else:
            field = "generate_responses"
            responses = _required(body.generate_responses, field, "without stream")
            choices = [choice for response in responses for choice in response.choices]
            count = len(responses)
        if not 0 < count <= self._config.max_prompts:
            at = "prompt_index" if body.stream else field
            raise InvalidRequest.at(
                at,
                f"the number of prompts must be from 1 to {self._config.max_prompts:,}; got "
                f"{count:,}",
            )
        return CompletionBody(
            prompt=[""] * count,
            model=body.model,
            n=_num_choices(choices, body, self._model, self._config, field),
            logprobs=num_logprobs(choices),
            stream=body.stream,
        )

    def whole(self) -> bytes:
        body = self._body
        responses = _required(body.generate_responses, "generate_responses", "without stream")
        completion = self._completion(self._request, self._whole_ids(responses))
        total = 0
        for place, prompt_request in enumerate(completion.prompt_requests):
            count = len(prompt_request.prompt_ids)
            declared = body.prompt_tokens[place] if body.prompt_tokens else None
            if count:
                _check_count(declared, count, f"prompt_tokens[{place}]")
            total += count or declared or 0
        at = [f"generate_responses[{place}]" for place in range(len(responses))]
        return derendered(self._case(completion), completion.prompt_requests, responses, at, total)

    def _whole_ids(self, responses: Sequence[GenerateResponse]) -> list[list[int]] | None:
        """Return the token ids of the prompts, from the body or else from the responses. Prompts
        without ids are tokenized, or are empty if there is no `completion_request`. Return None if
        all prompts are still to be tokenized."""
        given = self._body.prompt_token_ids or [None] * len(responses)
        found = [
            ids or response.prompt_token_ids for ids, response in zip(given, responses, strict=True)
        ]
        if self._body.completion_request is None:
            return [ids or [] for ids in found]
        if not any(found):
            return None
        rendered = self._completion(self._request, None).prompt_requests
        return [
            ids or prompt_request.prompt_ids
            for ids, prompt_request in zip(found, rendered, strict=True)
        ]

    def chunk(self) -> tuple[dict[str, Any] | None, str]:
        """Return (derendered chunk or None, stream state after the chunk)."""
        body, place = self._body, self._body.prompt_index
        chunk = _required(body.generate_chunk, "generate_chunk", "with stream")
        if place >= len(self._prompts):
            raise InvalidRequest.at(
                "prompt_index",
                f"{place} is out of range; the request has {len(self._prompts):,} prompts",
            )
        request = msgspec.structs.replace(self._request, prompt=self._prompts[place])
        key = key_of(self._model, request if body.completion_request else None)
        is_first = body.stream_state is None
        if body.stream_state is None:
            completion = self._completion(request, self._chunk_ids(place, chunk))
            declared = body.prompt_tokens[place] if body.prompt_tokens else 0
            state = first_state("", len(completion.prompt_requests[0].prompt_ids) or declared)
        else:
            state = opened(body.stream_state, key)
            completion = self._completion(request, [[]])
        derendered, state = derendered_chunk(
            self._case(completion), completion.prompt_requests[0], state, chunk, is_first=is_first
        )
        return _with_index_offset(derendered, place * (request.n or 1)), sealed(state, key)

    def _chunk_ids(self, place: int, chunk: GenerateChunk) -> list[list[int]] | None:
        """Return a list with the token ids of one prompt, from the body or else from the chunk. If
        neither has them, return None if the prompt of `completion_request` is to be tokenized, or
        one empty prompt if there is no `completion_request`."""
        given = self._body.prompt_token_ids
        ids = (given[place] if given else None) or _ids_of(chunk)
        if ids is None and self._body.completion_request is None:
            return [[]]
        return None if ids is None else [ids]

    def _completion(self, request: CompletionBody, ids: Sequence[list[int]] | None) -> Completion:
        for place, given in enumerate(ids or ()):
            check_token_ids(given, self._model.card.vocab_size, f"prompt_token_ids[{place}]")
        with translate_errors(_in(COMPLETION)):
            completion = Completion(
                request, self._model, max_prompts=self._config.max_prompts, ids=ids
            )
            max_choices = max(self._config.max_n, self._config.max_prompts)
            check_counts(completion.prompt_requests, request, self._config.max_n, max_choices)
        return completion

    def _case(self, completion: Completion) -> DerenderCase:
        return DerenderCase(
            request=completion.body, model=self._model, kind="cmpl", builder=completion.builder()
        )
