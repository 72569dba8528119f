"""Asks -> a response: open the answer, wait until all is accepted, tell it as it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flask
from flask import Response, g, request

from gateway.answering import Answer, Ask, Fold
from gateway.connection import HangUp, Outlet
from gateway.exchange import Exchange
from gateway.openai.chunks import ChunkStream
from gateway.openai.parameters import check_counts
from gateway.openai.responses import whole_response
from gateway.openai.schema import GenerationBody
from gateway.openai.shapes import Dialect, Origin
from gateway.output.events import Warning
from gateway.served import ServedModel
from gateway.service import Service
from gateway.sse import EventStream


def origin(
    kind: str,
    name: str | None,
    model: ServedModel,
    *,
    effective: Any = None,
    warnings: list[Warning] | None = None,
) -> Origin:
    """Of the request at hand; `effective`: what to tell of the effective parameters."""
    exchange: Exchange = g.exchange
    asides: dict[str, Any] = {}
    if g.get("ignored"):
        asides["ignored_params"] = g.ignored
    if effective is not None:
        asides["effective"] = effective
    return Origin(
        f"{kind}-{exchange.request_id}",
        name or model.names[0],
        model.fingerprint,
        asides=asides,
        warnings=warnings or [],
    )


def respond(
    service: Service, body: GenerationBody, asks: list[Ask], dialect: Dialect, origin: Origin
) -> Response:
    """Raises what the engine says against it, before any header is sent."""
    config = service.config
    check_counts(asks, body, config.max_n, max(config.max_n, config.max_prompts))
    answer = service.answer(asks, namespace=body.cache_salt or "", priority=body.priority or 0)
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
    tokenizer = service.model(body.model).tokenizer if body.prompt_logprobs is not None else None
    whole = whole_response(
        answer,
        fold,
        dialect,
        origin,
        tells_ids=bool(body.return_token_ids),
        prompt_logprobs=tokenizer,
    )
    return flask.Response(whole, content_type="application/json")


def _stream(
    service: Service,
    body: GenerationBody,
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
