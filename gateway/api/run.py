"""Runs the choices of one request for every API: as a whole answer, as a stream, or detached.

For a stream, an API passes its prompts and a sink. For a whole answer, it builds one JSON object
from the events in a `CollectSink`. This module does the work that all APIs share. It aborts the
choices if the client disconnects, and it records and closes the request however it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self, TypeVar

import gevent

from gateway.auth.caller import CallerHeaders
from gateway.context import RequestContext
from gateway.generation.group import ChoiceGroup, ClientGone
from gateway.generation.request import PromptRequest
from gateway.generation.sinks import CollectSink, Sink
from gateway.http.client_socket import HangUp, Outlet
from gateway.http.sse import EVENTS, EventStream, StreamFormat
from gateway.model_host import ModelUse
from gateway.observe.timings import measure
from gateway.service import Service
from protocol.config.gateway import GatewayConfig
from protocol.engine.grammar import check_grammar
from protocol.engine.messages import MAX_TIMEOUT_S
from protocol.wire.errors import RequestError, ServingError, StaleAdapter

S = TypeVar("S", bound=Sink)
SESSION_HEADER = "X-Session-ID"
"""Requests with the same value are sent to the same replica. Routers use this name, too."""
MAX_SESSION_CHARS = 256
BACKGROUND_PRIORITY = 100
"""Priority of the requests of batches. Requests that set no priority have 0 and come first."""
CLIENT_HEADERS = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")
"""Headers with the client's own timeout. The first one with a valid number of seconds is used."""


class OptionFields(Protocol):
    """The fields of every API's request body that `RequestOptions.from_body` reads."""

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

    #: Requests of one caller share cached prompts only if they have the same salt.
    salt: str = ""
    #: Requests with lower values are served first.
    priority: int = 0
    #: The id in the response, by which the request can be aborted; "" if there is none.
    label: str = ""
    #: Whether the response has `timings`, for which parsing must be measured.
    timings: bool = False
    #: Seconds until the answer must have ended; None if the request does not set it.
    timeout_s: float | None = None
    #: Seconds until the answer must have started; None if the request does not set it.
    queue_timeout_s: float | None = None

    @classmethod
    def from_body(cls, body: OptionFields, label: str, salt: str | None = None) -> RequestOptions:
        """Return the options in `body`. If `salt` is not None, it replaces the body's salt."""
        return cls(
            salt=body.cache_salt or "" if salt is None else salt,
            priority=body.priority or 0,
            label=label,
            timeout_s=body.timeout_s,
            queue_timeout_s=body.queue_timeout_s,
            timings=bool(body.timings),
        )


class GenerationRunner:
    """Runs the choices of a request and detects a disconnect of its client. The owner must call
    `close`, however the request ends."""

    def __init__(
        self,
        service: Service,
        use: ModelUse,
        context: RequestContext,
        prompt_requests: Sequence[PromptRequest],
        options: RequestOptions,
        *,
        needs_client: bool = True,
        is_whole: bool = False,
    ) -> None:
        """Send the choices and wait until the engine has accepted them.

        Raises InvalidRequest if a grammar is too large, and the engine's refusal. No header of the
        response has been sent by then, so the response can have the status of the refusal. With
        `needs_client` and a queue timeout, this waits for the first token, because the engine may
        refuse the request until then.

        needs_client  abort the request if its client disconnects
        is_whole      the client waits for the whole answer, so the timeout in its headers applies
        """
        self.service = service
        caller = context.caller
        caller.check_limits(max(len(p.choices) for p in prompt_requests), options.priority)
        for prompt_request in prompt_requests:
            if prompt_request.grammar is not None:  # the engine checks it, too, but after a copy
                check_grammar(prompt_request.grammar)
        headers = context.headers if is_whole else None
        timeouts = RequestTimeouts.from_request(
            options.timeout_s, options.queue_timeout_s, service.config, headers
        ).minus(use.waited_s)
        use.check()
        names = [name for name in (options.label, context.request_id) if name]
        labels = [label for name in names for label in caller.labels(name)]
        context.timeline.load_s = use.waited_s
        service.recent.add(labels, context.timeline)
        new_group = partial(
            service.new_group,
            use.host,
            prompt_requests,
            context.timeline,
            namespace=caller.namespace(options.salt),
            priority=max(options.priority, BACKGROUND_PRIORITY)
            if context.is_background
            else options.priority,
            labels=labels,
            account=caller.account,
            session=context.headers.get(SESSION_HEADER, "")[:MAX_SESSION_CHARS],
            timeout_s=timeouts.timeout_s,
            queue_timeout_s=timeouts.queue_timeout_s,
        )
        waits = needs_client and timeouts.queue_timeout_s > 0

        def open_group(current: ModelUse) -> None:
            self.group = new_group(**current.adapter_options)
            if options.timings:
                measure(self.group)
            context.start_inference(self.group)
            self.hang_up = HangUp(context.environ if needs_client else {}, self.group.abandon)
            with contextlib.ExitStack() as on_failure:
                on_failure.push(self)
                self.group.open()
                if waits:
                    self.group.wait_started()
                on_failure.pop_all()

        try:
            try:
                open_group(use)
            except StaleAdapter:  # before this refusal, the engine has sent its new list
                context.timeline.reopen()
                open_group(use.with_current_adapter())
        except RequestError as error:
            if len(self.group.choices) == 1:
                use.host.cache_refusal(caller.account, error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, gevent.GreenletExit):
            self.group.finish = "cancelled"  # by the batch or the script of this request
        self.close()

    def close(self) -> None:
        self.hang_up.close()
        self.group.close()
        self.service.forget(self.group)


def whole(
    service: Service,
    use: ModelUse,
    context: RequestContext,
    prompt_requests: Sequence[PromptRequest],
    options: RequestOptions,
) -> tuple[ChoiceGroup, CollectSink]:
    """Generate the answer and wait until it has ended. Return its choices and a sink that holds all
    their events. Raises the error that ended the answer, or ClientGone."""
    return run_to_end(
        service,
        use,
        context,
        prompt_requests,
        options,
        lambda group: CollectSink(len(group.choices)),
    )


def run_to_end(
    service: Service,
    use: ModelUse,
    context: RequestContext,
    prompt_requests: Sequence[PromptRequest],
    options: RequestOptions,
    make_sink: Callable[[ChoiceGroup], S],
) -> tuple[ChoiceGroup, S]:
    """Generate the answer and wait until it has ended. Return its choices and the sink that
    `make_sink` made. Raises the error that ended the answer, or ClientGone."""
    with GenerationRunner(service, use, context, prompt_requests, options, is_whole=True) as runner:
        sink = make_sink(runner.group)
        runner.group.attach(sink)
        runner.group.wait()
    return runner.group, sink


def stream(
    service: Service,
    use: ModelUse,
    context: RequestContext,
    prompt_requests: Sequence[PromptRequest],
    options: RequestOptions,
    make_sink: Callable[[ChoiceGroup, Outlet], Sink],
    form: StreamFormat = EVENTS,
) -> EventStream:
    """Send all choices to the engine, and return a streamed response in the format `form`.
    `make_sink` creates the sink that writes to the response's outlet. Raises the engine's refusal,
    or ClientGone."""
    runner = GenerationRunner(service, use, context, prompt_requests, options)
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

    return _event_stream(service, runner.hang_up, attach, group.abandon, end, form)


def detached(
    service: Service,
    use: ModelUse,
    context: RequestContext,
    prompt_requests: Sequence[PromptRequest],
    options: RequestOptions,
    make_sink: Callable[[ChoiceGroup], Sink],
) -> None:
    """Start a generation that continues after its client has disconnected. `make_sink` is called
    after the engine has accepted all choices. Raises the engine's refusal."""
    runner = GenerationRunner(service, use, context, prompt_requests, options, needs_client=False)
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
    """A source of SSE frames, such as a detached run. Its methods may be called in gevent's hub."""

    def attach(self, outlet: Outlet) -> None:
        """Write the frames that exist already to `outlet`, and then each new frame."""

    def detach(self) -> None:
        """Stop writing frames."""


def stream_from(
    service: Service, context: RequestContext, source: FrameSource, *, owns_context: bool = True
) -> EventStream:
    """Return a streamed response with the frames of `source`.

    A disconnect of the client does not end the source.

    owns_context  close `context` at the end of the stream; otherwise the generation closes it
    """
    context.is_streaming = True
    hang_up = HangUp(context.environ, source.detach)

    def end() -> None:
        hang_up.close()
        source.detach()
        if owns_context:
            context.close(200)

    return _event_stream(service, hang_up, source.attach, source.detach, end)


def _event_stream(
    service: Service,
    hang_up: HangUp,
    attach: Callable[[Outlet], None],
    abandon: Callable[[], None],
    close: Callable[[], None],
    form: StreamFormat = EVENTS,
) -> EventStream:
    """Return a streamed response that ends when `hang_up` detects that the client disconnected.
    `EventStream` describes the callbacks."""
    response = EventStream(
        attach,
        abandon=abandon,
        close=close,
        closing=service.is_draining,
        keep_alive_s=service.config.keep_alive_s,
        send_timeout_s=service.config.send_timeout_s,
        form=form,
    )
    hang_up.then = response.hang_up
    return response


# ---- time limits
#
# OpenAI's and Anthropic's SDKs disconnect after a number of seconds without a byte, and they send
# that number in a header. If the response is sent as a whole, the answer must be complete within
# that time. For a stream the number does not matter, because streams send keep-alives.


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """The time limits of one answer, in seconds."""

    #: Seconds until the answer must have ended; 0: no limit.
    timeout_s: float = 0.0
    #: Seconds until the answer must have started; 0: no limit.
    queue_timeout_s: float = 0.0

    @classmethod
    def from_request(
        cls,
        timeout_s: float | None,
        queue_timeout_s: float | None,
        config: GatewayConfig,
        headers: CallerHeaders | None,
    ) -> RequestTimeouts:
        """Return the limits of a request.

        timeout_s, queue_timeout_s  the request's fields; None: the operator's defaults apply
        headers                     the request's headers; None: the client's timeout does not apply
        """
        own_s = config.timeout_s if timeout_s is None else timeout_s
        client_s = 0.0 if headers is None else client_timeout_s(headers)
        return cls(
            timeout_s=min(filter(None, (own_s, client_s)), default=0.0),
            queue_timeout_s=(
                config.queue_timeout_s if queue_timeout_s is None else queue_timeout_s
            ),
        )

    def minus(self, waited_s: float) -> RequestTimeouts:
        """Return the time limits that remain after a request has waited for its model."""
        return RequestTimeouts(
            _rest(self.timeout_s, waited_s), _rest(self.queue_timeout_s, waited_s)
        )


def _rest(limit_s: float, waited_s: float) -> float:
    """Return the remaining seconds of a time limit, at least a millisecond: 0 means no limit."""
    return max(0.001, limit_s - waited_s) if limit_s else 0.0


def client_timeout_s(headers: CallerHeaders) -> float:
    """Return the client's own timeout in seconds; 0 if the headers have no valid one."""
    for name in CLIENT_HEADERS:
        try:
            seconds = float(headers.get(name, ""))
        except ValueError:  # absent, or "NOT_GIVEN"
            continue
        if 0 < seconds <= MAX_TIMEOUT_S:
            return seconds
    return 0.0
