"""A live picture of engines: rates and percentiles, made from two or more of an engine's statuses.

`GET /v1/watch` sends `WatchFrame`s, and `tidegate top` draws the same `EngineFrame`s. The engine
reports counters only. Everything that needs two reports is computed here, without I/O.

What was before the first report comes from the engine's log of steps. So a page has curves from its
first frame, although nothing is measured while nobody watches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from protocol.engine.messages import EngineStatus, Limits
from protocol.engine.stats import BlockCounts, EngineStats, StepSummary
from protocol.engine.usage import RequestStatus
from protocol.shared.latency import NUM_BUCKETS, bucket, grown, quantiles

WINDOW_S = 60.0
"""Percentiles are those of this many seconds."""
SHARES = (0.5, 0.9, 0.99)
"""The shares of `Percentiles`."""
MAX_STEPS = 120
"""Most entries for steps in one frame. If there are more, neighbours are merged."""
FIRST_STEPS_S = 30.0
"""The first frame also has the steps of this many seconds before it."""
MAX_PAST = 90
"""Most entries of `EngineFrame.past`. There is one for each second."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of an engine between two of its statuses."""

    #: Generated tokens per second.
    tokens_per_s: float = 0.0
    #: Computed positions of prompts, answers and drafts, per second.
    computed_per_s: float = 0.0
    steps_per_s: float = 0.0
    requests_per_s: float = 0.0
    #: Share of the new prompt tokens found in the prefix cache; None: no new prompt tokens.
    cache_hits: float | None = None
    #: Share of the new prompt tokens that were computed although their K/V was cached, because no
    #: checkpoint of the recurrent state followed; None: no new prompt tokens, or no checkpoints.
    recomputed: float | None = None
    #: Share of the new draft tokens that were accepted; None: no new draft tokens.
    drafts_right: float | None = None
    #: Share of the time that the worker spent computing.
    busy: float = 0.0


class Percentiles(msgspec.Struct, frozen=True):
    """Latencies in seconds. Half of them were at most `p50`, and so on."""

    count: int
    p50: float
    p90: float
    p99: float


class PastPoint(msgspec.Struct, frozen=True):
    """One point of each curve of an engine, at a time of its clock.

    at_s          the time, in seconds
    tokens_per_s  generated tokens per second
    first_token   median of the last minute, in seconds; None: there was none, or it is not known
    gap           the same of the gaps between tokens
    """

    at_s: float
    tokens_per_s: float
    first_token: float | None
    gap: float | None


class EngineFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one engine, and what it did since the frame before."""

    #: Main name of the model.
    model: str = ""
    #: "replica", "prefill" or "decode"; "" if there is only one engine.
    role: str = ""
    #: Number of the engine in the server's list, from 0.
    engine: int = 0
    #: Why there is no newer state; "" if there is. The other fields then have the last one.
    error: str = ""
    #: None: the engine has not reported them yet.
    limits: Limits | None = None
    #: The engine's clock, in seconds. Times of steps refer to it.
    now_s: float = 0.0
    stats: EngineStats = EngineStats()
    rates: Rates = Rates()
    blocks: BlockCounts = BlockCounts()
    #: Times from a request's arrival to its first token, and gaps between two outputs of an answer,
    #: over the last minute. None: there were none.
    first_token: Percentiles | None = None
    gap: Percentiles | None = None
    #: The steps since the frame before, oldest first; equal or very many ones are merged.
    steps: list[StepSummary] = []
    #: Number of open requests; `requests` has the oldest of them.
    num_open: int = 0
    requests: list[RequestStatus] = []
    #: The curves until now, oldest point first. Only in the first frame of each client; its `steps`
    #: are the last ones, not those since a frame before.
    past: list[PastPoint] = []


class WatchFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The state of all engines of a server."""

    #: Time of the frame, in seconds since 1970.
    at: float
    #: Seconds between two frames. A watcher that reads slowly gets fewer.
    every_s: float
    engines: list[EngineFrame]


def rates(before: EngineStatus, now: EngineStatus) -> Rates:
    """Return the rates between two statuses of an engine. Return `Rates()` if no time has passed,
    or if the engine was restarted."""
    seconds = now.now_s - before.now_s
    old, new = before.stats, now.stats
    if seconds <= 0 or new.num_steps < old.num_steps:
        return Rates()

    def growth(field: str) -> float:
        return float(getattr(new, field) - getattr(old, field))

    ended = sum(new.num_finished.values()) - sum(old.num_finished.values())
    return Rates(
        tokens_per_s=growth("num_generated_tokens") / seconds,
        computed_per_s=growth("num_computed_tokens") / seconds,
        steps_per_s=growth("num_steps") / seconds,
        requests_per_s=ended / seconds,
        cache_hits=_share(growth("num_cached_tokens"), growth("num_prompt_tokens")),
        recomputed=(
            _share(growth("num_uncovered_tokens"), growth("num_prompt_tokens"))
            if new.total_checkpoints
            else None
        ),
        drafts_right=_share(growth("num_accepted_tokens"), growth("num_draft_tokens")),
        busy=min(1.0, growth("busy_s") / seconds),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class EngineWatcher:
    """Turns the statuses of one engine, in order, into frames.

    model, role, engine   fields of every frame
    """

    def __init__(self, model: str = "", role: str = "", engine: int = 0) -> None:
        self._names = {"model": model, "role": role, "engine": engine}
        #: The statuses of the last WINDOW_S seconds, without their steps and rows.
        self._statuses: deque[EngineStatus] = deque()
        self._last = EngineFrame(model=model, role=role, engine=engine)
        self._last_step = 0
        self._past: deque[PastPoint] = deque(maxlen=MAX_PAST)
        self._steps: deque[StepSummary] = deque(maxlen=MAX_STEPS)

    def repeat(self) -> EngineFrame:
        """Return the last frame again, without its steps, because there is no newer status yet."""
        return msgspec.structs.replace(self._last, steps=[])

    def first_frame(self) -> EngineFrame:
        """Return the last frame for a client that has seen none, with what was before it."""
        return msgspec.structs.replace(self._last, steps=list(self._steps), past=list(self._past))

    @property
    def after_step(self) -> int:
        """The value for `GetStatus.after_step` in the next request of a status."""
        return self._last_step

    def push(self, status: EngineStatus, limits: Limits | None) -> EngineFrame:
        """Return the frame for the next status."""
        statuses = self._statuses
        if statuses and status.stats.num_steps < statuses[-1].stats.num_steps:
            statuses.clear()  # the engine was restarted
            self._last_step = 0
            self._steps.clear()
        before = statuses[-1] if statuses else None
        kept = msgspec.structs.replace(status, steps=[], rows=[])
        statuses.append(kept)
        while status.now_s - statuses[0].now_s > WINDOW_S:
            statuses.popleft()
        oldest, steps = statuses[0], status.steps
        if steps:
            self._last_step = steps[-1].first + steps[-1].count - 1
        if before is None:
            if not self._past:
                self._past.extend(past_points(steps, status.now_s))
            steps = [step for step in steps if step.ended_s >= status.now_s - FIRST_STEPS_S]
        self._last = EngineFrame(
            **self._names,  # type: ignore[arg-type]
            limits=limits,
            now_s=status.now_s,
            stats=status.stats,
            rates=Rates() if before is None else rates(before, status),
            blocks=status.blocks,
            first_token=_percentiles(oldest.first_tokens, status.first_tokens),
            gap=_percentiles(oldest.gaps, status.gaps),
            steps=merged_steps(steps, MAX_STEPS),
            num_open=status.num_open,
            requests=status.rows,
        )
        self._steps.extend(self._last.steps)
        if before is not None:
            self._past.append(_point(self._last))
        return self._last

    def fail(self, error: str) -> EngineFrame:
        """Return the frame if the engine did not answer: the last one, with the error."""
        self._last = msgspec.structs.replace(self._last, error=error, rates=Rates(), steps=[])
        return self._last


def _point(frame: EngineFrame) -> PastPoint:
    return PastPoint(
        frame.now_s,
        frame.rates.tokens_per_s,
        None if frame.first_token is None else frame.first_token.p50,
        None if frame.gap is None else frame.gap.p50,
    )


def past_points(steps: Sequence[StepSummary], now_s: float) -> list[PastPoint]:
    """Return what the curves would have shown until `now_s`, from the steps that the engine has
    recorded. Steps do not tell times to first tokens, nor how many drafts were accepted, so the
    tokens of an answer count as one per step."""
    window = int(WINDOW_S)
    tokens = [0.0] * (window + MAX_PAST)
    gaps: list[Counter[int]] = [Counter() for _ in tokens]
    for step in steps:
        ended = max(0.0, now_s - step.ended_s)
        age = int(ended)
        if age < len(tokens):
            # An entry lasts up to a second, so a part of it may be in the second before.
            began = ended + step.busy_s
            before = min(1.0, max(0.0, began - age - 1) / step.busy_s) if step.busy_s else 0.0
            tokens[age] += step.decode * (1 - before)
            tokens[min(age + 1, len(tokens) - 1)] += step.decode * before
            gaps[age][bucket(step.busy_s / step.count)] += step.decode
    # Nothing is known of the time before the first recorded step, unless it was the engine's first.
    is_all_known = not steps or steps[0].first <= 1
    oldest = MAX_PAST - 1 if is_all_known else min(MAX_PAST - 1, int(now_s - steps[0].ended_s))
    points = []
    counts = [0] * NUM_BUCKETS
    for age in range(len(tokens) - 1, -1, -1):
        for index, number in gaps[age].items():
            counts[index] += number
        for index, number in gaps[age + window].items() if age < MAX_PAST else ():
            counts[index] -= number
        if age <= oldest:
            found = quantiles(counts, (0.5,))
            gap = None if found is None else found[0]
            points.append(PastPoint(now_s - age, tokens[age], None, gap))
    return points


def _percentiles(before: Sequence[int], now: Sequence[int]) -> Percentiles | None:
    """Return the percentiles of the latencies that were counted between two reports. If nothing was
    counted then, or if both are the same report, return None."""
    counts = grown(before, now)
    found = quantiles(counts, SHARES)
    return None if found is None else Percentiles(sum(counts), *found)


def merged_steps(steps: Sequence[StepSummary], most: int) -> list[StepSummary]:
    """Return at most `most` entries: as many neighbours as necessary are merged, always the same
    number."""
    size = -(-len(steps) // most)
    if size <= 1:
        return list(steps)
    return [_merge(steps[start : start + size]) for start in range(0, len(steps), size)]


def _merge(steps: Sequence[StepSummary]) -> StepSummary:
    return StepSummary(
        steps[0].first,
        sum(step.count for step in steps),
        sum(step.prefill for step in steps),
        sum(step.decode for step in steps),
        sum(step.draft for step in steps),
        sum(step.busy_s for step in steps),
        max(step.longest_s for step in steps),
        steps[-1].ended_s,
    )
