"""`EngineHistory`: the last steps and requests of one engine, and its latencies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, islice

from engine_core.encode.scheduler import EncodeStep
from engine_core.history.requests import RequestHistories, RequestHistory
from engine_core.history.steps import StepLog, between
from engine_core.history.timeline import build_timeline
from engine_core.requests.request import Request
from engine_core.requests.stage_timer import EngineClock
from engine_core.schedule.commit import request_usage
from engine_core.schedule.inflight import InflightStep
from protocol.engine.timeline import AbortReason, EngineTimeline, Lack
from protocol.engine.usage import Usage
from protocol.shared.latency import NUM_BUCKETS, bucket

MAX_TIMELINES = 16
"""Most timelines in one answer. All choices of an HTTP request have the same names."""
TimelineWork = Generator[None, None, list[EngineTimeline]]
"""The computation of timelines. Each `next` processes one entry of the log of steps. The generator
returns the timelines."""


class EngineHistory:
    """Records steps and requests. The engine calls the methods `on_*`; the times are those of its
    clock."""

    def __init__(self, clock: EngineClock, slots: int) -> None:
        self.steps = StepLog()
        #: Counts of the times from arrival to first token, and of the gaps between two outputs of
        #: an answer, by the buckets of protocol/shared/latency.py.
        self.first_tokens = [0] * NUM_BUCKETS
        self.gaps = [0] * NUM_BUCKETS
        self._clock = clock
        self._slots = slots
        self._requests = RequestHistories()

    def on_bound(self, request: Request, step: int) -> None:
        """Record that the worker binds a slot for the request in this step."""
        self._requests.on_bound(request, step)
        spans = request.stage_timer.spans
        if request.num_generated and len(spans) > 1 and spans[-2][0] == "preempted":
            self.gaps[bucket(spans[-1][1] - spans[-2][1])] += 1

    def on_step(self, step: InflightStep, num_tokens: int, elapsed_s: float, lack: Lack) -> None:
        """Record a committed step. Each of its rows that continues an answer gives a token, so the
        time of the step is the gap before this token."""
        self.steps.add(step, num_tokens, self._clock.now, elapsed_s, lack)
        drafts = [] if step.plan.row_drafts is None else step.plan.row_drafts.tolist()
        num_gaps = step.plan.num_decodes + len(drafts) - drafts.count(0)
        self.gaps[bucket(elapsed_s)] += num_gaps

    def on_encoded(self, step: EncodeStep, elapsed_s: float, lack: Lack) -> None:
        """Record a committed step that encodes."""
        self.steps.add_encoded(step, self._clock.now, elapsed_s, lack)

    def on_first_token(self, request: Request) -> None:
        now = self._clock.now
        self.first_tokens[bucket(now - request.arrived_at)] += 1
        self._requests.get(request).first_token_at = now

    def on_end(
        self, request: Request, finish: str, usage: Usage | None, abort_reason: AbortReason
    ) -> None:
        self._requests.on_end(request, finish, usage, abort_reason, now=self._clock.now)

    def compute_timelines(
        self,
        names: Iterable[str],
        find_open: Callable[[str], Iterable[Request]],
        client_name: Callable[[bytes], str],
        *,
        are_beginnings: bool = False,
    ) -> TimelineWork:
        """Compute the timelines of the requests with these names, open ones first, at most
        MAX_TIMELINES. They describe the requests at the time of the first `next`.

        - find_open: returns the open requests with a name
        - client_name: returns the name of a client
        - are_beginnings: look for ended requests whose names begin so, as `find_open` then does
        """
        find_ended = self._requests.begun if are_beginnings else self._requests.ended
        now, runs = self._clock.now, self.steps.snapshot()
        found = [
            (history.snapshot(), usage)
            for history, usage in islice(self._find([*names], find_open, find_ended), MAX_TIMELINES)
        ]
        timelines: list[EngineTimeline] = []
        for history, usage in found:
            ended_at = now if history.ended_at is None else history.ended_at
            timeline = yield from build_timeline(
                history,
                usage,
                between(runs, history.arrived_at, ended_at),
                self._requests.owner,
                now=now,
                client=client_name(history.client),
                slots=self._slots,
                has_lost_steps=bool(runs)
                and runs[0].first > 1
                and runs[0].started_at > history.arrived_at,
            )
            timelines.append(timeline)
        return timelines

    def _find(
        self,
        names: list[str],
        find_open: Callable[[str], Iterable[Request]],
        find_ended: Callable[[str], Iterable[RequestHistory]],
    ) -> Iterator[tuple[RequestHistory, Usage]]:
        """Yield the requests with these names and their usage until now, open ones first."""
        self._requests.forget_old(self._clock.now)
        for request in dict.fromkeys(chain.from_iterable(map(find_open, names))):
            yield self._requests.get(request), request_usage(request)
        for history in dict.fromkeys(chain.from_iterable(map(find_ended, names))):
            if history.usage is not None:
                yield history, history.usage
