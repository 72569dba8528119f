"""Compares routing by prefix and load with taking turns, in cached tokens and first-token times.

    python -m tests.benchmarks.prefix_routing [--requests 400] [--groups 20] [--clients 4]

Two engines serve prompts that start with one of 20 prefixes. The KV cache of one engine holds about
half of these, so if the engines take turns, each evicts prefixes that it needs again soon. In the
first part, two servers with one engine each get the requests in turns. In the second part, one
server with two replicas gets the same requests. A client sends its next request when the last one
has ended. One request of each group comes first and is not counted. The exit code is 1 if routing
does not find 1.8 times as many cached tokens, or if its 99th percentile of the time to first token
is not lower.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import requests

from tests.support.server import Server

PREFIX_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 512, 24, 8
BLOCK_TOKENS = 16
KEPT_PREFIXES = 11
LEAST_RATIO = 1.8


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The measurements of one request."""

    cached_tokens: int
    first_token_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    warm_up, prompts = _prompts(options)
    blocks = (KEPT_PREFIXES * PREFIX_TOKENS + 4 * (OWN_TOKENS + ANSWER_TOKENS)) // BLOCK_TOKENS + 9
    limits = ("--kv-blocks", str(blocks), "--max-slots", "4")
    with ExitStack() as stack:
        servers = [stack.enter_context(Server("--threads", "1", *limits)) for _ in range(2)]
        turns = itertools.cycle(server.url for server in servers)
        lock = threading.Lock()

        def next_url() -> str:
            with lock:
                return next(turns)

        _measure(warm_up, next_url, options.clients)
        in_turns = _measure(prompts, next_url, options.clients)
    with Server("--replicas", "2", *limits) as server:
        _measure(warm_up, lambda: server.url, options.clients)
        routed = _measure(prompts, lambda: server.url, options.clients)
    print(f"{len(prompts)} requests, {options.groups} prefixes of {PREFIX_TOKENS} tokens")
    print("               cached tokens   first token p50      p99")
    totals, p99s = [], []
    for name, found in (("round robin", in_turns), ("prefix and load", routed)):
        times = [each.first_token_s for each in found]
        totals.append(sum(each.cached_tokens for each in found))
        p99s.append(quantiles(times, n=100)[98])
        times_ms = f"{median(times) * 1000:>14,.0f} ms{p99s[-1] * 1000:>9,.0f} ms"
        print(f"{name:15}{totals[-1]:>13,}{times_ms}")
    ratio = totals[1] / max(totals[0], 1)
    print(f"cached tokens: {ratio:.2f} times those of round robin")
    return int(ratio < LEAST_RATIO or p99s[1] >= p99s[0])


def _prompts(options: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Return a prompt of each group, and the prompts to measure, in a random order of groups."""
    dice = random.Random(options.seed)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(1000, 40_000) for _ in range(count)]

    prefixes = [tokens(PREFIX_TOKENS) for _ in range(options.groups)]
    first = [prefix + tokens(OWN_TOKENS) for prefix in prefixes]
    return first, [dice.choice(prefixes) + tokens(OWN_TOKENS) for _ in range(options.requests)]


def _measure(
    prompts: Sequence[list[int]], next_url: Callable[[], str], clients: int
) -> list[RoutedRequest]:
    def ask(prompt: list[int]) -> RoutedRequest:
        started = time.monotonic()
        body: dict[str, Any] = {
            "token_ids": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "sampling_params": {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0},
        }
        first_s, cached = 0.0, 0
        url = next_url() + "/inference/v1/generate"
        with requests.post(url, json=body, stream=True, timeout=600) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                first_s = first_s or time.monotonic() - started
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
        return RoutedRequest(cached, first_s)

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, prompts))


if __name__ == "__main__":
    sys.exit(main())
