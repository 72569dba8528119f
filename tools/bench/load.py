"""When requests are sent: so many streams at once, or arrivals at random.

With streams (a closed loop) the next request of a stream goes out when the last one has ended. With
a rate (an open loop) requests go out when they are due, whatever became of those before; their
waiting counts from then, also where the client was late or `concurrency` held them back.
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
"""Of a stream whose request has failed."""

Seen = Callable[[BenchAnswer], object]
"""Called with each answer that has ended."""


def arrivals(rate: float, source: random.Random) -> Iterator[float]:
    """Seconds after the beginning at which requests of a Poisson process are due."""
    return itertools.accumulate(source.expovariate(rate) for _ in itertools.count())


def body_of(
    ask: BenchPrompt, config: BenchConfig, model: str, taken: frozenset[str]
) -> dict[str, Any]:
    """The JSON of a request. taken: see `client.fields_taken`."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.output_tokens,
        "temperature": config.temperature,
        "stream": True,
    }
    if ask.messages is None:
        body["prompt"] = ask.prompt
    else:
        body["messages"] = ask.messages
    if "stream_options" in taken:
        body["stream_options"] = {"include_usage": True}
    if config.wants_exact_length and "ignore_eos" in taken:
        body["ignore_eos"] = True
    return body


async def run_load(
    client: BenchClient,
    bodies: Iterator[Mapping[str, Any]],
    load: BenchLoad,
    config: BenchConfig,
    seed: int,
    seen: Seen,
) -> BenchRun:
    """Warm up, then the load itself, to its last answer."""
    warm_ups = [client.ask(body) for body in itertools.islice(bodies, config.warm_up)]
    await asyncio.gather(*warm_ups)
    if (number := config.num_requests(load)) is not None:
        # Made now: making them is no part of what is measured.
        bodies = iter(list(itertools.islice(bodies, number)))
    cpu_s, began = time.process_time(), time.perf_counter()
    answers: list[BenchAnswer] = []

    def note(answer: BenchAnswer) -> None:
        answers.append(answer)
        seen(answer)

    until = began + config.duration_s if config.duration_s else None
    if load.rate:
        due = (began + at for at in arrivals(load.rate, random.Random(f"{seed}/arrivals")))
        await _open_loop(client, bodies, due, until, load.concurrency, note)
    else:
        await _closed_loop(client, bodies, until, load.concurrency, note)
    return BenchRun(answers, began, time.perf_counter(), time.process_time() - cpu_s)


async def _closed_loop(
    client: BenchClient,
    bodies: Iterator[Mapping[str, Any]],
    until: float | None,
    streams: int,
    note: Seen,
) -> None:
    async def stream() -> None:
        for body in bodies:  # shared: each request is one stream's
            if until is not None and time.perf_counter() >= until:
                return
            answer = await client.ask(body)
            note(answer)
            if answer.error:  # a server that refuses at once is not stormed
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(stream() for _ in range(streams)))


async def _open_loop(
    client: BenchClient,
    bodies: Iterator[Mapping[str, Any]],
    due: Iterator[float],
    until: float | None,
    most: int,
    note: Seen,
) -> None:
    room = asyncio.Semaphore(most) if most else None

    async def one(body: Mapping[str, Any], at: float) -> None:
        if room is None:
            note(await client.ask(body, at))
            return
        async with room:
            note(await client.ask(body, at))

    async with asyncio.TaskGroup() as tasks:
        for body, at in zip(bodies, due, strict=False):
            if until is not None and at >= until:
                return
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.create_task(one(body, at))
