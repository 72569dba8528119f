"""Renders a chat or completion into a request to the token endpoint.

The rendered request contains the prompt tokens, the grammar and all sampling parameters, so any
server can generate from it. `derender` converts the result into the response that the chat or
completion route would send.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.openai.prepare import Completion, Preparation, Prompt
from gateway.api.openai.requests import GenerationBody
from gateway.api.render.requests import Carried
from gateway.api.render.responses import RenderedRequest
from gateway.api.tokens.requests import ReasoningParserKwargs
from gateway.generation.request import PromptRequest
from gateway.served_model import ServedModel
from protocol.engine.sampling import SamplingParams, check_vocabulary
from protocol.wire.errors import ContextExcess, ContextTooLong

_NOT_COPIED = frozenset({"seed", "bad_words", "dry_breakers", "logprobs_of"})
"""Fields of SamplingParams that are not copied. The first three have another form in
`sampling_params`, and chats and completions have no `logprobs_of`."""


def rendered_chat(
    preparation: Preparation, prompt: Prompt, carried: Carried, request_id: str
) -> RenderedRequest:
    """Render a chat. Raise the error with which the engine would refuse the rendered request."""
    start = preparation.answer_start(prompt)
    request = _rendered(
        preparation.body, preparation.model, preparation.prompt_request(prompt), carried, request_id
    )
    return msgspec.structs.replace(
        request,
        reasoning_ended=start.closed,
        reasoning_parser_kwargs=ReasoningParserKwargs(prompt.kwargs),
        reads_calls=preparation.plan.mode != "none",
    )


def rendered_completion(
    completion: Completion, model: ServedModel, carried: Carried, request_id: str
) -> list[RenderedRequest]:
    """Render a completion into one request per prompt."""
    prompt_requests = completion.prompt_requests
    ids = (
        [request_id]
        if len(prompt_requests) == 1
        else [f"{request_id}-{i}" for i in range(len(prompt_requests))]
    )
    return [
        _rendered(completion.body, model, prompt_request, carried, name)
        for prompt_request, name in zip(prompt_requests, ids, strict=True)
    ]


def _rendered(
    body: GenerationBody,
    model: ServedModel,
    prompt_request: PromptRequest,
    carried: Carried,
    request_id: str,
) -> RenderedRequest:
    _check_fits(prompt_request, model)
    return RenderedRequest(
        request_id=request_id,
        token_ids=prompt_request.prompt_ids,
        sampling_params=sampling_of(body, prompt_request.choices[0]),
        model=body.model or model.names[0],
        stream=bool(body.stream),
        stream_options=body.stream_options,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        timeout_s=body.timeout_s,
        queue_timeout_s=body.queue_timeout_s,
        grammar=prompt_request.grammar,
        kv_transfer_params=carried.kv_transfer_params,
    )


def _check_fits(prompt_request: PromptRequest, model: ServedModel) -> None:
    """Raise the error with which the engine would refuse the request."""
    params, max_len = prompt_request.choices[0], model.limits.max_len
    check_vocabulary(params, model.card.vocab_size)
    if (size := len(prompt_request.prompt_ids)) + (params.max_tokens != 0) > max_len:
        raise ContextTooLong.of(ContextExcess(num_tokens=size, max_tokens=max_len), "prompt")


def sampling_of(body: GenerationBody, params: SamplingParams) -> dict[str, Any]:
    """Return the `sampling_params` of a rendered request.

    params  the sampling parameters of the first choice
    """
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(params).items()
        if value is not None and name not in _NOT_COPIED
    }
    fields |= {
        "n": body.n or 1,
        "stop": body.stop_strings,
        "include_stop_str_in_output": bool(body.include_stop_str_in_output),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "bad_words": body.bad_words or [],
    }
    if isinstance(body.logit_bias, list):
        fields["logit_bias"] = body.logit_bias
    if body.dry_sequence_breakers is not None:
        fields["dry_sequence_breakers"] = body.dry_sequence_breakers
    if params.seed is not None:
        fields["seed"] = params.seed
    return fields
