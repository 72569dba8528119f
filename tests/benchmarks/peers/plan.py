"""Which loads there are, how many requests each has, and whose turn it is. Pure.

How long a load takes is a matter of the server: who serves a crowd slowly is asked less of it, or
the whole would take hours. What is told are rates and percentiles, which do not count requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tools.bench.config import BenchConfig

INPUT_TOKENS = OUTPUT_TOKENS = 128
STREAMS = (1, 8, 32, 64)
LEAST_REQUESTS = 6
PREFIX_STREAMS = 16
PREFIX_TOKENS, TAIL_TOKENS, PREFIX_OUTPUT_TOKENS = 1000, 28, 16
WARM_UP_STREAMS, WARM_UP_OUTPUT_TOKENS = 16, 8
VOCABULARY = 20_000
PREFIX = f"{PREFIX_STREAMS} streams that share {PREFIX_TOKENS:,} tokens"

T = TypeVar("T")


@dataclass(frozen=True)
class Pace:
    """How much is asked of a server: requests per stream in a load."""

    per_stream: float

    def requests(self, streams: int) -> int:
        return max(LEAST_REQUESTS, round(self.per_stream * streams))


def loads(streams: Sequence[int], pace: Pace) -> dict[str, BenchConfig]:
    """Name -> load: the points of the curve of latency against throughput, then PREFIX."""
    curve = [_random(number, pace.requests(number), OUTPUT_TOKENS) for number in streams]
    return {**{str(config.loads[0]): config for config in curve}, PREFIX: _prefix(pace)}


def warm_up_load() -> BenchConfig:
    """A crowd that nobody counts: what a server prepares on its first requests is prepared."""
    return _random(WARM_UP_STREAMS, 2 * WARM_UP_STREAMS, WARM_UP_OUTPUT_TOKENS)


def _random(streams: int, requests: int, output_tokens: int) -> BenchConfig:
    return BenchConfig(
        concurrency=(streams,),
        requests=requests,
        warm_up=1,
        input_tokens=INPUT_TOKENS,
        output_tokens=output_tokens,
        vocabulary=VOCABULARY,
    )


def _prefix(pace: Pace) -> BenchConfig:
    """Requests that begin alike. The first of all, which computes the beginning, is not counted."""
    return BenchConfig(
        dataset="shared-prefix",
        concurrency=(PREFIX_STREAMS,),
        requests=pace.requests(PREFIX_STREAMS),
        warm_up=1,
        prefix_tokens=PREFIX_TOKENS,
        input_tokens=TAIL_TOKENS,
        output_tokens=PREFIX_OUTPUT_TOKENS,
        vocabulary=VOCABULARY,
    )


def turns(servers: Sequence[T], rounds: int) -> list[list[T]]:
    """Each round every server has one turn; the order turns about, so that a machine that grows
    warm or busy favours none."""
    return [list(servers if number % 2 == 0 else servers[::-1]) for number in range(rounds)]
