"""Computes the figures of one server under one load (`Summary`) from the answers.

A percentile is nearest-rank: always a measured value, never interpolated. Latencies and throughputs
leave out failed requests. These are counted by kind, with the first message of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from tools.bench.answers import BenchAnswer
from tools.bench.config import BenchConfig, BenchLoad

BUSY_CLIENT = 0.7
"""If the client uses a larger share of a CPU core, its own delays may affect the figures."""


@dataclass(slots=True)
class BenchRun:
    """One run of a load on one server. All times, including those in `answers`, are seconds on the
    same clock."""

    answers: list[BenchAnswer]
    began: float
    ended: float
    #: CPU time of this process during the run, in seconds.
    cpu_s: float


class Spread(msgspec.Struct, frozen=True):
    """The distribution of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one server under one load. `--json` writes these fields."""

    #: URL of the server.
    server: str
    #: The load that the requests were sent under.
    load: BenchLoad
    #: Number of requests sent.
    requests: int
    #: Number of requests without an error.
    completed: int
    #: Kind of error -> number of requests.
    errors: dict[str, int]
    #: Kind of error -> its first message.
    complaints: dict[str, str]
    #: Total time of all runs.
    duration_s: float
    #: Tokens in the prompts of the complete answers.
    input_tokens: int
    #: The part of `input_tokens` that the server found in its prefix cache.
    cached_tokens: int
    #: Tokens in the complete answers.
    output_tokens: int
    #: Number of events with a piece of an answer, in all streams, including failed ones.
    events: int
    #: Complete answers per second.
    requests_per_s: float
    #: `input_tokens` per second.
    input_tokens_per_s: float
    #: `output_tokens` per second.
    output_tokens_per_s: float
    #: Time from when a request was due until the first piece of its answer.
    ttft_ms: Spread | None
    #: Time per token after the first, per answer.
    tpot_ms: Spread | None
    #: Time between two successive pieces of one answer.
    gap_ms: Spread | None
    #: Time from when a request was due until the end of its stream.
    e2e_ms: Spread | None
    #: "usage" or "chunks" -> number of answers whose tokens were counted this way.
    counted_by: dict[str, int]
    #: Sum of `BenchAnswer.num_resent`.
    resent: int
    #: Number of complete answers that are shorter than requested.
    short_answers: int
    #: Number of complete answers within the objectives; None if there are no objectives.
    good: int | None
    #: `good` per second.
    goodput_per_s: float | None
    #: Number of CPU cores that the client used on average.
    client_cpu: float

    @property
    def is_client_busy(self) -> bool:
        return self.client_cpu > BUSY_CLIENT


def summarize(
    server: str, load: BenchLoad, runs: Sequence[BenchRun], config: BenchConfig
) -> Summary:
    """Return the figures of all runs of a load on a server, as if they were one long run."""
    answers = [answer for run in runs for answer in run.answers]
    done = [answer for answer in answers if not answer.error]
    failed = [answer for answer in answers if answer.error]
    duration_s = sum(run.ended - run.began for run in runs)
    has_objectives = config.slo_ttft_ms or config.slo_tpot_ms
    good = sum(_is_good(answer, config) for answer in done) if has_objectives else None
    input_tokens = sum(a.usage.prompt_tokens for a in done if a.usage is not None)
    output_tokens = sum(answer.output_tokens for answer in done)

    def per_s(count: int) -> float:
        return count / duration_s if duration_s > 0 else 0.0

    return Summary(
        server=server,
        load=load,
        requests=len(answers),
        completed=len(done),
        errors=dict(Counter(answer.error for answer in failed)),
        complaints={answer.error: answer.message for answer in reversed(failed)},
        duration_s=duration_s,
        input_tokens=input_tokens,
        cached_tokens=sum(map(_cached, done)),
        output_tokens=output_tokens,
        events=sum(len(answer.times) for answer in answers),
        requests_per_s=per_s(len(done)),
        input_tokens_per_s=per_s(input_tokens),
        output_tokens_per_s=per_s(output_tokens),
        ttft_ms=spread(answer.ttft_s for answer in done),
        tpot_ms=spread(tpot for answer in done if (tpot := answer.tpot_s) is not None),
        gap_ms=spread(b - a for answer in done for a, b in pairwise(answer.times)),
        e2e_ms=spread(answer.ended - answer.started for answer in done),
        counted_by=dict(Counter(answer.counted for answer in done)),
        resent=sum(answer.num_resent for answer in answers),
        short_answers=sum(answer.output_tokens < answer.requested_tokens for answer in done),
        good=good,
        goodput_per_s=None if good is None else per_s(good),
        client_cpu=sum(run.cpu_s for run in runs) / duration_s if duration_s > 0 else 0.0,
    )


def spread(seconds: Iterable[float]) -> Spread | None:
    """Return the distribution, in milliseconds, of latencies given in seconds. Return None if there
    are none."""
    values = sorted(value * 1e3 for value in seconds)
    if not values:
        return None
    p50, p90, p99 = (percentile(values, share) for share in (50, 90, 99))
    return Spread(sum(values) / len(values), p50, p90, p99, values[-1])


def percentile(ascending: Sequence[float], share: int) -> float:
    """Return the nearest-rank percentile: the smallest value that is greater than or equal to at
    least `share` percent of the values."""
    return ascending[max(0, -(-share * len(ascending) // 100) - 1)]


def _is_good(answer: BenchAnswer, config: BenchConfig) -> bool:
    in_time = not config.slo_ttft_ms or answer.ttft_s * 1e3 <= config.slo_ttft_ms
    tpot = answer.tpot_s or 0.0
    return in_time and (not config.slo_tpot_ms or tpot * 1e3 <= config.slo_tpot_ms)


def _cached(answer: BenchAnswer) -> int:
    details = answer.usage.prompt_tokens_details if answer.usage is not None else None
    return (details.cached_tokens or 0) if details is not None else 0
