"""Sends the requests of a load: a fixed number of streams, or random arrivals.

With streams (a closed loop), each stream sends its next request when its last one has ended. With a
rate (an open loop), each request is sent when it is due, whether or not earlier ones have ended.
The latency of a request is measured from the time when it was due, even if the client was late or
the limit `concurrency` delayed it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tools.bench.answers import BenchAnswer
from tools.bench.client import BenchClient
from tools.bench.config import BenchConfig, BenchLoad
from tools.bench.datasets import BenchPrompt
from tools.bench.stats import BenchRun

PAUSE_S = 0.05
"""Seconds that a stream waits after a failed request."""

OnAnswer = Callable[[BenchAnswer], object]
"""Function that is called with each answer when it has ended."""


def arrivals(rate: float, source: random.Random) -> Iterator[float]:
    """Yield the arrival times of a Poisson process, in seconds after its start.

    rate   arrivals per second
    """
    return itertools.accumulate(source.expovariate(rate) for _ in itertools.count())


def body_of(
    prompt: BenchPrompt, config: BenchConfig, model: str, accepted: frozenset[str]
) -> dict[str, Any]:
    """Return the body of the request for `prompt`.

    accepted   fields of `client.OPTIONAL` that the server accepts; the others are left out
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.output_tokens,
        "temperature": config.temperature,
        "stream": True,
    }
    if prompt.messages is None:
        body["prompt"] = prompt.prompt
    else:
        body["messages"] = prompt.messages
    if "stream_options" in accepted:
        body["stream_options"] = {"include_usage": True}
    if config.has_exact_length and "ignore_eos" in accepted:
        body["ignore_eos"] = True
    return body


async def run_load(
    client: BenchClient,
    bodies: Iterator[Mapping[str, Any]],
    load: BenchLoad,
    config: BenchConfig,
    seed: int,
    on_answer: OnAnswer,
) -> BenchRun:
    """Send the warm-up requests, then the load, and wait until all answers have ended. Return the
    measured answers, without those of the warm-up.

    bodies      the bodies of the requests, in order
    seed        determines the random arrivals
    on_answer   called with each answer when it has ended
    """
    warm_ups = [client.post(body) for body in itertools.islice(bodies, config.warm_up)]
    await asyncio.gather(*warm_ups)
    if (number := config.num_requests(load)) is not None:
        # Create the bodies before the measurement, because that takes time.
        bodies = iter(list(itertools.islice(bodies, number)))
    cpu_s, began = time.process_time(), time.perf_counter()
    answers: list[BenchAnswer] = []

    def record(answer: BenchAnswer) -> None:
        answers.append(answer)
        on_answer(answer)

    until = began + config.duration_s if config.duration_s else None
    if load.rate:
        due = (began + at for at in arrivals(load.rate, random.Random(f"{seed}/arrivals")))
        await _open_loop(client, bodies, due, until, load.concurrency, record)
    else:
        await _closed_loop(client, bodies, until, load.concurrency, record)
    return BenchRun(answers, began, time.perf_counter(), time.process_time() - cpu_s)


async def _closed_loop(
    client: BenchClient,
    bodies: Iterator[Mapping[str, Any]],
    until: float | None,
    streams: int,
    record: OnAnswer,
) -> None:
    async def stream() -> None:
        for body in bodies:  # an iterator that all streams share
            if until is not None and time.perf_counter() >= until:
                return
            answer = await client.post(body)
            record(answer)
            if answer.error:  # do not flood a server that refuses requests
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(stream() for _ in range(streams)))


async def _open_loop(
    client: BenchClient,
    bodies: Iterator[Mapping[str, Any]],
    due: Iterator[float],
    until: float | None,
    max_open: int,
    record: OnAnswer,
) -> None:
    slots = asyncio.Semaphore(max_open) if max_open else None

    async def send(body: Mapping[str, Any], at: float) -> None:
        if slots is None:
            record(await client.post(body, at))
            return
        async with slots:
            record(await client.post(body, at))

    async with asyncio.TaskGroup() as tasks:
        for body, at in zip(bodies, due, strict=False):
            if until is not None and at >= until:
                return
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.create_task(send(body, at))
