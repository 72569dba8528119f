"""Runs jobs for every API: as a whole answer, as a stream, or detached from the client.

For a stream, an API passes a job and a sink. For a whole answer, it builds one JSON object from the
events in a `CollectSink`. This module does the work that all APIs share. It sends the choices,
aborts them if the client disconnects, and records and closes the request however it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Protocol, Self, TypeVar

import gevent
from prometheus_client import Gauge

from gateway.context import RequestContext
from gateway.engine.base import EngineClient
from gateway.generation.group import ChoiceGroup, ClientGone
from gateway.generation.job import Job
from gateway.generation.recent import RecentRequests
from gateway.generation.sinks import CollectSink, Sink
from gateway.generation.time_limits import TimeLimits
from gateway.http.client_socket import HangUp, Outlet
from gateway.http.sse import EVENTS, EventStream, StreamFormat
from protocol.config.gateway import GatewayConfig
from protocol.wire.errors import AttachmentMissing, RequestError, ServingError, StaleAdapter

S = TypeVar("S", bound=Sink)


class OpenJob:
    """A job whose choices have been sent. The owner must call `close`, however the job ends.

    group     the choices
    hang_up   detects that the client has disconnected
    on_close  called with the group by `close`
    """

    def __init__(
        self, group: ChoiceGroup, hang_up: HangUp, on_close: Callable[[ChoiceGroup], None]
    ) -> None:
        self.group = group
        self.hang_up = hang_up
        self._on_close = on_close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, gevent.GreenletExit):
            self.group.finish = "cancelled"  # by the batch or the script of this request
        self.close()

    def close(self) -> None:
        """Abort the choices that are still open. Later calls have no effect."""
        self.hang_up.close()
        self.group.close()
        self._on_close(self.group)


class FrameSource(Protocol):
    """A source of SSE frames, such as a detached run. Its methods may be called in gevent's hub."""

    def attach(self, outlet: Outlet) -> None:
        """Write the frames that exist already to `outlet`, and then each new frame."""

    def detach(self) -> None:
        """Stop writing frames."""


class JobRunner:
    """Runs the jobs of one process.

    open_answers  counts the requests in progress
    on_free       called when the engine has released the resources of a choice after a disconnect,
                  with the seconds since the disconnect
    is_draining   returns whether connections are closed after their current stream
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        open_answers: Gauge,
        on_free: Callable[[float], None],
        is_draining: Callable[[], bool],
    ) -> None:
        self._config = config
        self._open_answers = open_answers
        self._on_free = on_free
        self._is_draining = is_draining
        #: The open choices, with the engine that computes them.
        self._groups: dict[ChoiceGroup, EngineClient] = {}
        self.recent = RecentRequests()

    # ---- open and end

    def open(self, job: Job, *, needs_client: bool = True, is_whole: bool = False) -> OpenJob:
        """Send the choices and wait until the engine has accepted them.

        Raises InvalidRequest if a grammar is too large, and the engine's refusal. No header of the
        response has been sent by then, so the response can have the status of the refusal. With
        `needs_client` and a queue timeout, this waits for the first token, because the engine may
        refuse the request until then.

        If the adapter has been replaced meanwhile, or the engine has dropped an image, the choices
        are sent again, once.

        needs_client  abort the job if its client disconnects
        is_whole      the client waits for the whole answer, so the timeout in its headers applies
        """
        job.check()
        context, use = job.context, job.use
        headers = context.headers if is_whole else None
        limits = TimeLimits.from_request(job.options, self._config, headers).minus(use.waited_s)
        use.check()
        context.timeline.load_s = use.waited_s
        self.recent.add(job.labels, context.timeline)
        try:
            try:
                return self._send(job, limits, needs_client=needs_client)
            except StaleAdapter:  # before this refusal, the engine has sent its new list
                context.timeline.reopen()
                return self._send(job.with_current_adapter(), limits, needs_client=needs_client)
            except AttachmentMissing:  # the session with the engine then sends all images again
                context.timeline.reopen()
                return self._send(job, limits, needs_client=needs_client)
        except RequestError as error:
            if job.num_choices == 1:
                use.engine.cache_refusal(context.caller.account, error)
            raise

    def _send(self, job: Job, limits: TimeLimits, *, needs_client: bool) -> OpenJob:
        """Send the choices once."""
        context, engine = job.context, job.use.engine
        group = ChoiceGroup(
            engine,
            job.prompts,
            max_len=job.max_len,
            timeline=context.timeline,
            on_free=self._on_free,
            **job.routed_options(limits),
        )
        self._groups[group] = engine
        if job.options.timings:
            group.measure_parsing()
        if context.group is None:
            self._open_answers.inc()
            context.call_on_close(lambda record: self._open_answers.dec())
        context.group = group
        hang_up = HangUp(context.environ if needs_client else {}, group.abandon)
        opened = OpenJob(group, hang_up, self._forget)
        with contextlib.ExitStack() as on_failure:
            on_failure.push(opened)
            group.open()
            if needs_client and limits.queue_timeout_s > 0:
                group.wait_started()
            on_failure.pop_all()
        return opened

    def _forget(self, group: ChoiceGroup) -> None:
        self._groups.pop(group, None)

    def end_all(self, error_of: Callable[[EngineClient], ServingError]) -> None:
        """End all open answers. `error_of` returns the error for an answer of this engine."""
        for group, engine in list(self._groups.items()):
            group.fail(error_of(engine))

    # ---- run

    def whole(self, job: Job) -> tuple[ChoiceGroup, CollectSink]:
        """Generate the answer and wait until it has ended. Return its choices and a sink that holds
        all their events. Raises the error that ended the answer, or ClientGone."""
        return self.run_to_end(job, lambda group: CollectSink(len(group.choices)))

    def run_to_end(self, job: Job, make_sink: Callable[[ChoiceGroup], S]) -> tuple[ChoiceGroup, S]:
        """Generate the answer and wait until it has ended. Return its choices and the sink that
        `make_sink` made. Raises the error that ended the answer, or ClientGone."""
        with self.open(job, is_whole=True) as opened:
            sink = make_sink(opened.group)
            opened.group.attach(sink)
            opened.group.wait()
        return opened.group, sink

    def stream(
        self,
        job: Job,
        make_sink: Callable[[ChoiceGroup, Outlet], Sink],
        form: StreamFormat = EVENTS,
    ) -> EventStream:
        """Send all choices to the engine, and return a streamed response in the format `form`.
        `make_sink` creates the sink that writes to the response's outlet. Raises the engine's
        refusal, or ClientGone."""
        opened, context = self.open(job), job.context
        group = opened.group
        context.is_streaming = True

        def attach(outlet: Outlet) -> None:
            if group.is_gone:
                outlet.cut()
            sink = make_sink(group, outlet)
            if outlet.watch_buffer(group.detach, partial(group.attach, sink)):
                group.attach(sink)

        def end() -> None:
            opened.close()
            context.close(200)

        return self._event_stream(opened.hang_up, attach, group.abandon, end, form)

    def detached(self, job: Job, make_sink: Callable[[ChoiceGroup], Sink]) -> None:
        """Start a generation that continues after its client has disconnected. `make_sink` is
        called after the engine has accepted all choices. Raises the engine's refusal."""
        opened = self.open(job, needs_client=False)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(opened.close)
            opened.group.attach(make_sink(opened.group))
            on_failure.pop_all()
        job.context.is_streaming = True
        gevent.spawn(_close_after_end, opened, job.context)

    def stream_from(
        self, context: RequestContext, source: FrameSource, *, owns_context: bool = True
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

        return self._event_stream(hang_up, source.attach, source.detach, end)

    def _event_stream(
        self,
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
            closing=self._is_draining,
            keep_alive_s=self._config.keep_alive_s,
            send_timeout_s=self._config.send_timeout_s,
            form=form,
        )
        hang_up.then = response.hang_up
        return response


def _close_after_end(opened: OpenJob, context: RequestContext) -> None:
    with contextlib.suppress(ServingError, ClientGone):  # the sink got the error
        opened.group.wait()
    opened.close()
    context.close(200)
