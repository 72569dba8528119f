"""Measures one server: starts it, warms it up, runs all loads and stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.benchmarks.peers.plan import Pace, loads, warm_up_load
from tests.benchmarks.peers.servers import Competitor, running
from tools.bench import datasets
from tools.bench.client import OPTIONAL, BenchClient, StampedLoop, accepted_fields
from tools.bench.config import BenchConfig
from tools.bench.load import body_of, run_load
from tools.bench.stats import BenchRun
from tools.failure import Failure
from tools.http.web import WebServer

PATH = "/v1/completions"
TIMEOUT_S = 600.0
WARM_UP_RUN = -2
"""The run number of the warm-up, which has prompts of its own."""


@dataclass
class Turns:
    """The results of one server: for each load, one run per round."""

    ready_s: list[float] = field(default_factory=list)
    runs: dict[str, list[BenchRun]] = field(default_factory=dict)
    configs: dict[str, BenchConfig] = field(default_factory=dict)


def take_turn(
    competitor: Competitor, pace: Pace, streams: Sequence[int], seed: int, turns: Turns
) -> None:
    """Start a server, run all loads, and add the results to `turns`. `seed` is the same for all
    servers of a round."""
    configs = loads(streams if competitor.has_curve else [], pace)
    with running(competitor) as (url, ready_s), asyncio.Runner(loop_factory=StampedLoop) as runner:
        runs = runner.run(_measure(url, configs, seed))
    turns.ready_s.append(ready_s)
    turns.configs |= configs
    for name, run in runs.items():
        turns.runs.setdefault(name, []).append(run)


async def _measure(url: str, configs: Mapping[str, BenchConfig], seed: int) -> dict[str, BenchRun]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StampedLoop)
    model = WebServer(url).first_model()
    if model is None:
        raise Failure(f"{url} lists no model")
    client = BenchClient(url, PATH, {}, loop.clock, wait_s=TIMEOUT_S)
    warm_up = warm_up_load()
    probe = body_of(datasets.probe(warm_up, seed), warm_up, model, frozenset(OPTIONAL))
    try:
        taken = await accepted_fields(client, probe)

        async def run(config: BenchConfig, number: int) -> BenchRun:
            asks = datasets.prompts(config, seed, number)
            bodies = (body_of(ask, config, model, taken) for ask in asks)
            (load,) = config.loads
            return await run_load(client, bodies, load, config, seed, lambda _: None)

        await run(warm_up, WARM_UP_RUN)
        return {
            name: await run(config, number) for number, (name, config) in enumerate(configs.items())
        }
    finally:
        client.close()
        await asyncio.sleep(0)  # lets the loop close the connections
