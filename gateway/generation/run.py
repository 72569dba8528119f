"""Asks -> a response, in any API: open the answer, wait until all is accepted, tell it.

An API says what is asked and gives a sink for a stream, or makes one JSON object of a
`CollectSink`. What all have in common is here: the answer is open only as long as its client is
there, and is counted and closed however it ends.
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
    """The part of a body that is the same in every API."""

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
    """How a request wants to be served.

    salt       cached prompts are shared only between requests of one caller with an equal one
    priority   lower goes first
    label      the answer's id, as the client is told; the request's own id need not be said
    timings    where the time went is measured, to be told (timings.py)
    timeout_s, queue_timeout_s   see Patience; None: not said
    """

    salt: str = ""
    priority: int = 0
    label: str = ""
    timings: bool = False
    timeout_s: float | None = None
    queue_timeout_s: float | None = None

    @classmethod
    def of(cls, body: RequestWishes, label: str, salt: str | None = None) -> RequestOptions:
        """`salt`: instead of the body's."""
        return cls(
            salt=body.cache_salt or "" if salt is None else salt,
            priority=body.priority or 0,
            label=label,
            timeout_s=body.timeout_s,
            queue_timeout_s=body.queue_timeout_s,
            timings=bool(body.timings),
        )


def knock(service: Service) -> None:
    """To be asked before a prompt is made. Raises what the engine would say against any request of
    this caller, where it has just said it; whoever picks up what is there already asks nothing."""
    if LAST_EVENT_HEADER not in request.headers:
        caller: Caller = g.caller
        service.raise_cached_refusal(caller.account)


class GenerationRunner:
    """An answer, and its client, who is watched where it matters. `close` it, whatever happens."""

    def __init__(
        self,
        service: Service,
        asks: Sequence[PromptRequest],
        terms: RequestOptions,
        *,
        needs_client: bool = True,
        is_whole: bool = False,
    ) -> None:
        """Raises what the engine says against it, before any header is sent. Where that may be
        that it was not begun in time, so long nothing is sent to a client that listens.

        is_whole   the client waits for all of it
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
        context.begin(self.answer)
        self.hang_up = HangUp(request.environ if needs_client else {}, self.answer.abandon)
        try:
            self.answer.open()
            if needs_client and patience.queue_timeout_s:
                self.answer.wait_begun()
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
    """The answer when it has ended, and all it said. Raises what made it fail."""
    return heard(service, asks, terms, lambda answer: CollectSink(len(answer.choices)))


def heard(
    service: Service,
    asks: Sequence[PromptRequest],
    terms: RequestOptions,
    sink_of: Callable[[ChoiceGroup], S],
) -> tuple[ChoiceGroup, S]:
    """The answer when it has ended, and the sink that was told all of it. Raises what made it
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
    """`sink_of` makes what writes the answer's events to the outlet, and finishes it."""
    opened = GenerationRunner(service, asks, terms)
    answer = opened.answer
    context: RequestContext = g.context
    context.is_streaming = True

    def attach(outlet: Outlet) -> None:
        if answer.is_gone:
            outlet.cut()
        sink = sink_of(answer, outlet)
        if outlet.heed(answer.detach, partial(answer.attach, sink)):
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
    """An answer that goes on whether or not its client is there: until it has ended, or is aborted.
    `sink_of` is called when the engine has accepted it."""
    opened = GenerationRunner(service, asks, terms, needs_client=False)
    try:
        opened.answer.attach(sink_of(opened.answer))
    except BaseException:
        opened.close()
        raise
    context: RequestContext = g.context
    context.is_streaming = True
    gevent.spawn(_see_to_its_end, opened, context)


def _see_to_its_end(opened: GenerationRunner, context: RequestContext) -> None:
    with contextlib.suppress(ServingError, ClientGone):  # its sink has heard of it
        opened.answer.wait()
    opened.close()
    context.close(200)


class Listened(Protocol):
    """Something that can be heard from now on. Both may be called from the hub."""

    def listen(self, outlet: Outlet) -> None: ...
    def leave(self) -> None: ...


def listening(service: Service, source: Listened, *, owns_exchange: bool = True) -> Response:
    """A stream of what somebody else says; its end ends nothing else. `owns_exchange`: the request
    is over with it."""
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
