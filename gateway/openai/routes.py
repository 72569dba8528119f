"""POST /v1/chat/completions and /v1/completions: from bytes to an answer, streamed or whole.

Both are one road: decode, check, find the model, make the prompts, open the answer. Only then is it
decided how to tell it. Everything that can be refused is refused before a stream's headers.
"""

from __future__ import annotations

from collections.abc import Callable

import flask
from flask import Blueprint, Response, g, request

from gateway.answering import Answer, Ask, Fold
from gateway.body import decode, read_json, unknown_fields
from gateway.chat.kwargs import effective_kwargs
from gateway.chat.render import Conversation
from gateway.connection import HangUp, Outlet
from gateway.exchange import Exchange
from gateway.openai import schema
from gateway.openai.chunks import ChunkStream
from gateway.openai.parameters import check_counts, choices_of, first, read_options
from gateway.openai.responses import whole_response
from gateway.openai.shapes import ChatDialect, CompletionDialect, Dialect, Origin
from gateway.output.reader import ReaderFactory
from gateway.service import ServedModel, Service, offload
from gateway.sse import EventStream
from protocol.errors import RequestError


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("openai", __name__)
    routes.post("/v1/chat/completions", endpoint="chat")(lambda: chat(service))
    routes.post("/v1/completions", endpoint="completions")(lambda: completions(service))
    return routes


def chat(service: Service) -> Response:
    data = read_json(request, service.config.max_body_mib << 20)
    body = decode(data, schema.chat_decoder)
    g.ignored = unknown_fields(data, schema.ChatBody)
    schema.check_chat(body)
    model = service.model(body.model)
    choices = choices_of(body, model.defaults)
    prompt_ids = model.renderer.tokens(_conversation(body), offload=offload)
    if not prompt_ids:
        raise schema.empty_prompt("messages")
    try:
        return _answer(
            service,
            body,
            [Ask(prompt_ids, choices)],
            ReaderFactory(model.tokenizer, read_options(body, continues=False)),
            ChatDialect(model.tokenizer, body.num_logprobs),
            _origin("chatcmpl", body.model, model),
        )
    except RequestError as error:
        if error.param == "prompt":  # the engine's word for what this route calls messages
            error.param = "messages"
        raise


def _conversation(body: schema.ChatBody) -> Conversation:
    continues = bool(body.continue_final_message)
    return Conversation(
        messages=body.messages,
        tools=body.tools or None,
        documents=body.documents,
        kwargs=effective_kwargs(body.chat_template_kwargs, reasoning_effort=body.reasoning_effort),
        add_generation_prompt=first(body.add_generation_prompt, default=not continues),
        continue_final_message=continues,
    )


def completions(service: Service) -> Response:
    data = read_json(request, service.config.max_body_mib << 20)
    body = decode(data, schema.completion_decoder)
    g.ignored = unknown_fields(data, schema.CompletionBody)
    schema.check_completion(body)
    prompts = schema.prompts_of(body, service.config.max_prompts)
    model = service.model(body.model)
    choices = choices_of(body, model.defaults)
    asks = [Ask(_prompt_ids(prompt, model), choices) for prompt in prompts]
    options = read_options(body, continues=True)
    texts = [_prompt_text(prompt, model, options.skip_special_tokens) for prompt in prompts]
    return _answer(
        service,
        body,
        asks,
        ReaderFactory(model.tokenizer, options),
        CompletionDialect(
            model.tokenizer, body.num_logprobs, options, texts if body.echo else None
        ),
        _origin("cmpl", body.model, model),
    )


def _prompt_ids(prompt: schema.Prompt, model: ServedModel) -> list[int]:
    """An empty text is the beginning of a text, where the model has a token for that."""
    ids = prompt
    if isinstance(ids, str):
        bos = model.card.bos_token_id
        ids = model.tokenizer.encode(ids, True, offload=offload) or ([] if bos is None else [bos])
    if not ids:
        raise schema.empty_prompt("prompt")
    return ids


def _prompt_text(prompt: schema.Prompt, model: ServedModel, skip_special_tokens: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)


def _origin(kind: str, name: str | None, model: ServedModel) -> Origin:
    exchange: Exchange = g.exchange
    return Origin(f"{kind}-{exchange.request_id}", name or model.names[0], model.fingerprint)


def _answer(
    service: Service,
    body: schema.GenerationBody,
    asks: list[Ask],
    readers: ReaderFactory,
    dialect: Dialect,
    origin: Origin,
) -> Response:
    """Open the answer and wait until all of it is accepted; then tell it as the client wants it."""
    config = service.config
    check_counts(asks, body, config.max_n, max(config.max_n, config.max_prompts))
    priority = body.priority or 0
    answer = service.answer(asks, readers, namespace=body.cache_salt or "", priority=priority)
    exchange: Exchange = g.exchange
    exchange.begin(answer)
    hang_up = HangUp(request.environ, answer.abandon)

    def close() -> None:
        hang_up.close()
        answer.close()
        service.forget(answer)

    try:
        answer.open()
        if not body.stream:
            fold = Fold(len(answer.choices))
            answer.attach(fold)
            answer.wait()
    except BaseException:
        close()
        raise
    if body.stream:
        return _stream(service, body, answer, dialect, origin, hang_up, close)
    close()
    whole = whole_response(answer, fold, dialect, origin, tells_ids=bool(body.return_token_ids))
    return flask.Response(whole, content_type="application/json")


def _stream(
    service: Service,
    body: schema.GenerationBody,
    answer: Answer,
    dialect: Dialect,
    origin: Origin,
    hang_up: HangUp,
    close: Callable[[], None],
) -> Response:
    exchange: Exchange = g.exchange
    exchange.is_streaming = True

    def attach(outlet: Outlet) -> None:
        if answer.is_gone:
            outlet.cut()
        answer.attach(
            ChunkStream(
                answer,
                dialect,
                origin,
                write=outlet.write,
                finish=outlet.finish,
                includes_usage=body.includes_usage,
                repeats_usage=body.repeats_usage,
                tells_ids=bool(body.return_token_ids),
            )
        )

    def end() -> None:
        close()
        exchange.close(200)

    response = EventStream(
        attach,
        abandon=answer.abandon,
        close=end,
        closing=service.is_draining,
        keep_alive_s=service.config.keep_alive_s,
    )
    hang_up.then = response.hang_up
    return response
