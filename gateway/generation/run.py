"""Runs the choices of one request, for any API: whole, streamed or detached from the client.

An API passes prompts and a sink for a stream, or builds one JSON object from a `CollectSink`. This
module does what all APIs share: it aborts the choices if the client disconnects, and it counts and
closes the request however it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import gevent
from flask import Response, g, request

from gateway.api.resume.numbering import LAST_EVENT_HEADER
from gateway.auth.caller import Caller
from gateway.context import RequestContext
from gateway.generation.group import ChoiceGroup, ClientGone
from gateway.generation.request import PromptRequest
from gateway.generation.sinks import CollectSink, Sink
from gateway.http.client_socket import HangUp, Outlet
from gateway.http.sse import EventStream
from gateway.http.timeouts import RequestTimeouts
from gateway.observe.timings import measure
from gateway.service import Service
from protocol.errors import RequestError, ServingError

S = TypeVar("S", bound=Sink)


class RequestWishes(Protocol):
    """The fields of a body that all APIs share."""

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def timeout_s(self) -> float | None: ...
    @property
    def queue_timeout_s(self) -> float | None: ...
    @property
    def timings(self) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request that do not depend on its prompts."""

    #: Cached prompts are shared only between requests of one caller with the same salt.
    salt: str = ""
    #: Lower values are served first.
    priority: int = 0
    #: The id of the answer that the client gets.
    label: str = ""
    #: Whether to measure the `timings` of the response.
    timings: bool = False
    #: See RequestTimeouts; None: not set by the request.
    timeout_s: float | None = None
    queue_timeout_s: float | None = None

    @classmethod
    def of(cls, body: RequestWishes, label: str, salt: str | None = None) -> RequestOptions:
        """Return the options of `body`. `salt` replaces the body's."""
        return cls(
            salt=body.cache_salt or "" if salt is None else salt,
            priority=body.priority or 0,
            label=label,
            timeout_s=body.timeout_s,
            queue_timeout_s=body.queue_timeout_s,
            timings=bool(body.timings),
        )


def raise_cached_refusal(service: Service) -> None:
    """Raise the engine's recent refusal of this caller, if it is still valid.

    Call this before rendering a prompt. It does not apply to a client that resumes a stream.
    """
    if LAST_EVENT_HEADER not in request.headers:
        caller: Caller = g.caller
        service.raise_cached_refusal(caller.account)


class GenerationRunner:
    """Runs the choices of a request and watches its client. It must be closed in all cases."""

    def __init__(
        self,
        service: Service,
        asks: Sequence[PromptRequest],
        terms: RequestOptions,
        *,
        needs_client: bool = True,
        is_whole: bool = False,
    ) -> None:
        """Send the choices. Raises the engine's refusal, before any header is sent.

        With a queue timeout this waits for the first token, because the engine may refuse until
        then.

        needs_client   the request is aborted if its client disconnects
        is_whole       the client waits for the whole answer, so its own timeout applies
        """
        self.service = service
        context: RequestContext = g.context
        caller: Caller = g.caller
        caller.check_limits(max(len(ask.choices) for ask in asks), terms.priority)
        headers = request.headers if is_whole else None
        patience = RequestTimeouts.from_request(
            terms.timeout_s, terms.queue_timeout_s, service.config, headers
        )
        self.answer: ChoiceGroup = service.answer(
            asks,
            namespace=caller.namespace(terms.salt),
            priority=terms.priority,
            labels=[
                label
                for name in (terms.label, context.request_id)
                if name
                for label in caller.labels(name)
            ],
            account=caller.account,
            journal=context.journal,
            patience=patience,
        )
        if terms.timings:
            measure(self.answer)
        context.start(self.answer)
        self.hang_up = HangUp(request.environ if needs_client else {}, self.answer.abandon)
        try:
            self.answer.open()
            if needs_client and patience.queue_timeout_s:
                self.answer.wait_started()
        except BaseException as error:
            if isinstance(error, RequestError) and len(self.answer.choices) == 1:
                service.cache_refusal(caller.account, error)
            self.close()
            raise

    def close(self) -> None:
        self.hang_up.close()
        self.answer.close()
        self.service.forget(self.answer)


def whole(
    service: Service, asks: Sequence[PromptRequest], terms: RequestOptions
) -> tuple[ChoiceGroup, CollectSink]:
    """Return the ended answer and its collected events. Raises the error that made it fail."""
    return run_to_end(service, asks, terms, lambda answer: CollectSink(len(answer.choices)))


def run_to_end(
    service: Service,
    asks: Sequence[PromptRequest],
    terms: RequestOptions,
    sink_of: Callable[[ChoiceGroup], S],
) -> tuple[ChoiceGroup, S]:
    """Return the ended answer and the sink that got all events. Raises the error that made it
    fail."""
    opened = GenerationRunner(service, asks, terms, is_whole=True)
    try:
        sink = sink_of(opened.answer)
        opened.answer.attach(sink)
        opened.answer.wait()
    finally:
        opened.close()
    return opened.answer, sink


def stream(
    service: Service,
    asks: Sequence[PromptRequest],
    terms: RequestOptions,
    sink_of: Callable[[ChoiceGroup, Outlet], Sink],
) -> Response:
    """Return a streamed response. `sink_of` creates the sink that writes to the outlet."""
    opened = GenerationRunner(service, asks, terms)
    answer = opened.answer
    context: RequestContext = g.context
    context.is_streaming = True

    def attach(outlet: Outlet) -> None:
        if answer.is_gone:
            outlet.cut()
        sink = sink_of(answer, outlet)
        if outlet.watch_buffer(answer.detach, partial(answer.attach, sink)):
            answer.attach(sink)

    def end() -> None:
        opened.close()
        context.close(200)

    response = EventStream(
        attach,
        abandon=answer.abandon,
        close=end,
        closing=service.is_draining,
        keep_alive_s=service.config.keep_alive_s,
        send_timeout_s=service.config.send_timeout_s,
    )
    opened.hang_up.then = response.hang_up
    return response


def detached(
    service: Service,
    asks: Sequence[PromptRequest],
    terms: RequestOptions,
    sink_of: Callable[[ChoiceGroup], Sink],
) -> None:
    """Start a generation that continues without its client until it ends or is aborted.

    `sink_of` is called after the engine has accepted all choices.
    """
    opened = GenerationRunner(service, asks, terms, needs_client=False)
    try:
        opened.answer.attach(sink_of(opened.answer))
    except BaseException:
        opened.close()
        raise
    context: RequestContext = g.context
    context.is_streaming = True
    gevent.spawn(_close_after_end, opened, context)


def _close_after_end(opened: GenerationRunner, context: RequestContext) -> None:
    with contextlib.suppress(ServingError, ClientGone):  # the sink got the error
        opened.answer.wait()
    opened.close()
    context.close(200)


class Listened(Protocol):
    """A source of frames for an outlet. Both methods may be called from the hub."""

    def listen(self, outlet: Outlet) -> None: ...
    def leave(self) -> None: ...


def listening(service: Service, source: Listened, *, owns_exchange: bool = True) -> Response:
    """Return a stream of the frames of `source`, which continues if the stream is closed.

    `owns_exchange`: the end of the stream is the end of the request.
    """
    context: RequestContext = g.context
    context.is_streaming = True
    hang_up = HangUp(request.environ, source.leave)

    def end() -> None:
        hang_up.close()
        source.leave()
        if owns_exchange:
            context.close(200)

    response = EventStream(
        source.listen,
        abandon=source.leave,
        close=end,
        closing=service.is_draining,
        keep_alive_s=service.config.keep_alive_s,
        send_timeout_s=service.config.send_timeout_s,
    )
    hang_up.then = response.hang_up
    return response
