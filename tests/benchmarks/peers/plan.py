"""The loads, the number of requests in each, and the order of the servers, without I/O.

A slow server gets fewer requests, because the comparison would take hours otherwise. Only rates and
percentiles are reported, which do not depend on the number of requests.
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
    """The number of requests per stream that a server gets in a load."""

    per_stream: float

    def requests(self, streams: int) -> int:
        return max(LEAST_REQUESTS, round(self.per_stream * streams))


def loads(streams: Sequence[int], pace: Pace) -> dict[str, BenchConfig]:
    """Return the loads by name: the points of the latency-throughput curve, then PREFIX."""
    curve = [_random(number, pace.requests(number), OUTPUT_TOKENS) for number in streams]
    return {**{str(config.loads[0]): config for config in curve}, PREFIX: _prefix(pace)}


def warm_up_load() -> BenchConfig:
    """Return the load of the warm-up. It is not counted."""
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
    """Return a load whose requests share a prefix. The first one, which computes the prefix, is not
    counted."""
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
    """Return the order of the turns. Each server has one turn per round, and the order is reversed
    each round, so that a machine that becomes warm or busy favours none."""
    return [list(servers if number % 2 == 0 else servers[::-1]) for number in range(rounds)]
