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


class OptionFields(Protocol):
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
    def from_body(cls, body: OptionFields, label: str, salt: str | None = None) -> RequestOptions:
        """Return the options of `body`. `salt` replaces the body's."""
        return cls(
            salt=body.cache_salt or "" if salt is None else salt,
            priority=body.priority or 0,
            label=label,
            timeout_s=body.timeout_s,
            queue_timeout_s=body.queue_timeout_s,
            timings=bool(body.timings),
        )


class GenerationRunner:
    """Runs the choices of a request and watches its client. It must be closed in all cases."""

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        prompt_requests: Sequence[PromptRequest],
        options: RequestOptions,
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
        caller = context.caller
        caller.check_limits(max(len(p.choices) for p in prompt_requests), options.priority)
        headers = context.headers if is_whole else None
        timeouts = RequestTimeouts.from_request(
            options.timeout_s, options.queue_timeout_s, service.config, headers
        )
        names = [name for name in (options.label, context.request_id) if name]
        self.group = service.new_group(
            prompt_requests,
            context.timeline,
            namespace=caller.namespace(options.salt),
            priority=options.priority,
            labels=[label for name in names for label in caller.labels(name)],
            account=caller.account,
            timeout_s=timeouts.timeout_s,
            queue_timeout_s=timeouts.queue_timeout_s,
        )
        if options.timings:
            measure(self.group)
        context.start(self.group)
        self.hang_up = HangUp(context.environ if needs_client else {}, self.group.abandon)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            try:
                self.group.open()
                if needs_client and timeouts.queue_timeout_s:
                    self.group.wait_started()
            except RequestError as error:
                if len(self.group.choices) == 1:
                    service.cache_refusal(caller.account, error)
                raise
            on_failure.pop_all()

    def close(self) -> None:
        self.hang_up.close()
        self.group.close()
        self.service.forget(self.group)


def whole(
    service: Service,
    context: RequestContext,
    prompt_requests: Sequence[PromptRequest],
    options: RequestOptions,
) -> tuple[ChoiceGroup, CollectSink]:
    """Return the ended answer and its collected events. Raises the error that made it fail."""
    return run_to_end(
        service, context, prompt_requests, options, lambda group: CollectSink(len(group.choices))
    )


def run_to_end(
    service: Service,
    context: RequestContext,
    prompt_requests: Sequence[PromptRequest],
    options: RequestOptions,
    make_sink: Callable[[ChoiceGroup], S],
) -> tuple[ChoiceGroup, S]:
    """Return the ended answer and the sink that got all events. Raises the error that made it
    fail."""
    runner = GenerationRunner(service, context, prompt_requests, options, is_whole=True)
    try:
        sink = make_sink(runner.group)
        runner.group.attach(sink)
        runner.group.wait()
    finally:
        runner.close()
    return runner.group, sink


def stream(
    service: Service,
    context: RequestContext,
    prompt_requests: Sequence[PromptRequest],
    options: RequestOptions,
    make_sink: Callable[[ChoiceGroup, Outlet], Sink],
) -> EventStream:
    """Return a streamed response. `make_sink` creates the sink that writes to the outlet."""
    runner = GenerationRunner(service, context, prompt_requests, options)
    group = runner.group
    context.is_streaming = True

    def attach(outlet: Outlet) -> None:
        if group.is_gone:
            outlet.cut()
        sink = make_sink(group, outlet)
        if outlet.watch_buffer(group.detach, partial(group.attach, sink)):
            group.attach(sink)

    def end() -> None:
        runner.close()
        context.close(200)

    return _event_stream(service, runner.hang_up, attach, group.abandon, end)


def detached(
    service: Service,
    context: RequestContext,
    prompt_requests: Sequence[PromptRequest],
    options: RequestOptions,
    make_sink: Callable[[ChoiceGroup], Sink],
) -> None:
    """Start a generation that continues without its client until it ends or is aborted.

    `make_sink` is called after the engine has accepted all choices.
    """
    runner = GenerationRunner(service, context, prompt_requests, options, needs_client=False)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(runner.close)
        runner.group.attach(make_sink(runner.group))
        on_failure.pop_all()
    context.is_streaming = True
    gevent.spawn(_close_after_end, runner, context)


def _close_after_end(runner: GenerationRunner, context: RequestContext) -> None:
    with contextlib.suppress(ServingError, ClientGone):  # the sink got the error
        runner.group.wait()
    runner.close()
    context.close(200)


class FrameSource(Protocol):
    """A source of frames for an outlet. Both methods may be called from the hub."""

    def listen(self, outlet: Outlet) -> None: ...
    def leave(self) -> None: ...


def follow(
    service: Service, context: RequestContext, source: FrameSource, *, owns_context: bool = True
) -> EventStream:
    """Return a stream of the frames of `source`, which goes on if the stream is closed.

    `owns_context`: the end of the stream is the end of the request.
    """
    context.is_streaming = True
    hang_up = HangUp(context.environ, source.leave)

    def end() -> None:
        hang_up.close()
        source.leave()
        if owns_context:
            context.close(200)

    return _event_stream(service, hang_up, source.listen, source.leave, end)


def _event_stream(
    service: Service,
    hang_up: HangUp,
    attach: Callable[[Outlet], None],
    abandon: Callable[[], None],
    close: Callable[[], None],
) -> EventStream:
    response = EventStream(
        attach,
        abandon=abandon,
        close=close,
        closing=service.is_draining,
        keep_alive_s=service.config.keep_alive_s,
        send_timeout_s=service.config.send_timeout_s,
    )
    hang_up.then = response.hang_up
    return response
