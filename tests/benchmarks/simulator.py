"""Compares the simulator with real servers on this machine, under four loads.

This is a measurement, not a test. `python -m tests.benchmarks.simulator paced` starts a real
gateway and a real engine whose worker computes nothing: its steps take the times that the simulator
estimates for MODEL on GPU. So all but the arithmetic is compared, and other work on the machine
disturbs little.

`python -m tests.benchmarks.simulator real` starts `tidegate serve` with the default model and a
journal. It measures step times with a load before and after each of the four, and predicts each
load from the journal of the two measurements around it. The steps of the load itself are used only
for the last two columns. They show the difference that is left if step times are known. Without
them, other work on the machine during a load shows as a difference.

Printed are, for each load, the predicted and the measured throughput, time to first token, gap
between tokens and cached prompt tokens, and their ratio. `--repeat N` repeats everything, and
`--seconds` changes the length of a load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from engine_core.journal.file import list_journals
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.tools.simulation import LoadFigures, SimulationConfig
from simulator.figures import LoadRecorder
from simulator.machine import SimulatedReplicaType, replica_type
from simulator.measured import StepMeasurements, read_journal
from simulator.requests import SimulatedRequest, prompt_of, segment_tokens
from simulator.run import Simulation
from simulator.steps import FittedSteps
from simulator.workload import WorkloadStreams
from tests.support.gateway_process import GatewayProcess
from tests.support.paced_server import paced_server
from tests.support.server import Server

# With two threads, other work on the machine would delay each step by the slower of them.
OPTIONS = ("--max-slots", "16", "--max-len", "2048", "--threads", "1", "--poison-slots", "off")
ENGINE = EngineConfig(worker=WorkerConfig(model="", max_len=8192))
USUAL = SimulationConfig(
    engine=ENGINE, model="measured", input_tokens=256, output_tokens=48, duration_s=40.0
)
MODEL, GPU = "llama-3.1-8b", "L40S"
STREAMS = 12
"""Requests that are open at once while the capacity is measured."""
CAPACITY_S = 10.0
MEASURE_S = 15.0


@dataclass
class Period:
    """A time on the clock of all processes (time.monotonic)."""

    began: float
    ended: float = 0.0


@dataclass
class MeasuredLoad:
    """The measurements of the clients of a real server."""

    recorder: LoadRecorder
    period: Period
    #: Time to first token that the engine does not explain, of each request, in seconds.
    outside_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def recorder() -> LoadRecorder:
    return LoadRecorder(0.0, 0.0, 0.0)


class LoadSender:
    """Sends the requests of a workload to a server, when they are due."""

    def __init__(self, port: int, config: SimulationConfig) -> None:
        self._port = port
        self._streams = WorkloadStreams(config)
        #: Loads with different seeds share no cached prompts.
        self._salt = f"load {config.seed}"
        self._began = time.monotonic()
        self.load = MeasuredLoad(recorder(), Period(self._began))
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> MeasuredLoad:
        for request in self._streams.arrivals(0):
            await asyncio.sleep(request.at - self._now)
            self._start(request, prompt_of(request.path).tolist())
        while self._tasks:
            await asyncio.wait(self._tasks)
        self.load.period.ended = time.monotonic()
        return self.load

    async def run_closed(self, streams: int, seconds: float) -> MeasuredLoad:
        """Keep `streams` requests open, instead of sending them when they are due."""
        arrivals = self._streams.arrivals(0)

        async def stream() -> None:
            while self._now < seconds:
                request = next(arrivals)
                request.at = self._now
                await self._send(request, prompt_of(request.path).tolist())

        await asyncio.gather(*(stream() for _ in range(streams)))
        self.load.period.ended = time.monotonic()
        return self.load

    def _start(self, request: SimulatedRequest, prompt: list[int]) -> None:
        task = asyncio.create_task(self._send(request, prompt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, request: SimulatedRequest, prompt: list[int]) -> None:
        seen = self.load.recorder
        seen.on_arrival(request)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        writer.write(_http(prompt, request.output_tokens, self._salt))
        status = await reader.readline()
        if b" 200 " not in status:
            self.load.errors.append(status.decode(errors="replace").strip())
            seen.on_refused(request)
            writer.close()
            return
        answer: list[int] = []
        times: list[float] = []
        last: dict[str, Any] = {}
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now, chunk = self._now, json.loads(line[6:])
                if chunk["choices"]:
                    times.append(now)
                    answer += chunk["choices"][0]["token_ids"]
                last |= {name: chunk[name] for name in ("usage", "timings") if chunk.get(name)}
        writer.close()
        usage, timings = last["usage"], last["timings"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        seen.on_first_token(request, times[0], cached)
        for before, after in pairwise(times):
            seen.on_gaps(after - before, 1)
        seen.on_end(request, times[-1])
        inside_s = (timings["queue_ms"] + timings["prompt_ms"]) / 1e3
        self.load.outside_s.append(times[0] - request.at - inside_s)
        seen.ended.clear()
        turn = self._streams.next_turn(request, times[-1])
        if turn is not None:
            await asyncio.sleep(turn.at - self._now)
            self._start(turn, prompt + answer + segment_tokens(turn.path[-1]))


def _http(prompt: Sequence[int], max_tokens: int, salt: str) -> bytes:
    fields = {
        "cache_salt": salt,
        "token_ids": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings": True,
        "sampling_params": {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0},
    }
    body = json.dumps(fields).encode()
    head = (  # HTTP/1.0: the answer comes without chunks, and each event is a line
        "POST /inference/v1/generate HTTP/1.0\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def loads(capacity_per_s: float, seconds: float) -> dict[str, SimulationConfig]:
    """Return the loads to compare. `capacity_per_s` is the rate of a closed loop."""
    usual = replace(USUAL, duration_s=seconds)
    return {
        "poisson, low": replace(usual, rate=0.3 * capacity_per_s, seed=11),
        "poisson, near capacity": replace(usual, rate=0.8 * capacity_per_s, seed=12),
        "bursts": replace(
            usual, workload="bursts", rate=0.45 * capacity_per_s, burst_s=5, pause_s=5, seed=13
        ),
        "chat, shared prefixes": replace(
            usual,
            workload="chat",
            rate=0.6 * capacity_per_s,
            prefix_tokens=300,
            prefixes=3,
            input_tokens=64,
            turns=4,
            think_s=2.0,
            seed=14,
        ),
    }


def measuring_load(capacity_per_s: float, seed: int) -> SimulationConfig:
    """Return a load with steps of all kinds, from one request to many."""
    return replace(
        USUAL,
        workload="bursts",
        rate=0.5 * capacity_per_s,
        burst_s=3,
        pause_s=2,
        duration_s=MEASURE_S,
        seed=seed,
    )


def paced_loads(seconds: float) -> dict[str, SimulationConfig]:
    """Return the loads for a paced server, whose capacity is about 20 requests per second."""
    usual = replace(USUAL, model=MODEL, hardware=GPU, duration_s=seconds, output_tokens=32)
    chat = replace(usual, workload="chat", prefix_tokens=600, prefixes=5, input_tokens=96)
    return {
        "poisson, low": replace(usual, rate=4.0, seed=21),
        "poisson, near capacity": replace(usual, rate=16.0, seed=22),
        "bursts": replace(usual, workload="bursts", rate=8.0, burst_s=3, pause_s=3, seed=23),
        "chat, shared prefixes": replace(chat, rate=10.0, turns=4, think_s=1.5, seed=24),
    }


async def measure_paced(gateway: GatewayProcess, seconds: float) -> None:
    warm_up = await LoadSender(
        gateway.port, replace(USUAL, rate=3.0, duration_s=10.0, seed=20)
    ).run()
    outside_s = median(warm_up.outside_s)
    for name, config in paced_loads(seconds).items():
        config = replace(config, gateway_ms=outside_s * 1e3)
        kind = replica_type(config)
        predicted = Simulation(config, kind).simulate(1, 1).figures
        measured = await LoadSender(gateway.port, config).run()
        facts = f"{MODEL} on {GPU}; {outside_s * 1e3:.1f} ms outside the engine"
        _print(name, predicted, None, measured, facts)


def steps_in(journal: StepMeasurements, periods: Sequence[Period]) -> StepMeasurements:
    """Return the steps that ended in one of the periods."""
    found = [
        step
        for step, at in zip(journal.steps, journal.ended_at, strict=True)
        if any(period.began <= at <= period.ended for period in periods)
    ]
    return StepMeasurements(journal.name, found, journal.is_gpu, journal.limits)


def predict(
    config: SimulationConfig, journal: StepMeasurements, around: Sequence[MeasuredLoad]
) -> tuple[LoadFigures, str]:
    """Return the figures that the simulator predicts from the measurements around a load, and how
    good the fit is."""
    found = steps_in(journal, [load.period for load in around])
    fitted = FittedSteps(found.steps)
    outside_s = median(value for load in around for value in load.outside_s)
    assert journal.limits is not None
    kind = SimulatedReplicaType(ENGINE, journal.limits, fitted.for_replica, "measured")
    result = Simulation(replace(config, gateway_ms=1e3 * outside_s), kind).simulate(1, 1)
    fit = f"{len(found.steps):,} steps, fitted to {fitted.error(found.steps):.0%}"
    return result.figures, f"{fit}; {outside_s * 1e3:.1f} ms outside the engine"


def figures(seen: LoadFigures) -> dict[str, float]:
    assert seen.ttft is not None
    assert seen.gap is not None
    return {
        "requests/s": seen.num_completed / seen.duration_s,
        "tokens/s out": seen.output_tokens / seen.duration_s,
        "first token p50, ms": seen.ttft.p50 * 1e3,
        "first token p99, ms": seen.ttft.p99 * 1e3,
        "gap p50, ms": seen.gap.p50 * 1e3,
        "gap p99, ms": seen.gap.p99 * 1e3,
        "cached tokens": float(seen.cached_tokens),
    }


async def measure(server: Server, seconds: float, directory: Path) -> None:
    def sender(config: SimulationConfig) -> LoadSender:
        return LoadSender(server.port, config)

    await sender(replace(USUAL, rate=4.0, duration_s=3.0, seed=5)).run()  # warm-up
    closed = await sender(replace(USUAL, rate=1e3, seed=6)).run_closed(STREAMS, CAPACITY_S)
    seen = closed.recorder.counts.figures(USUAL)
    capacity = seen.num_completed / seen.duration_s
    print(f"capacity: {capacity:.2f} requests/s, closed loop of {STREAMS}", flush=True)
    chosen = loads(capacity, seconds)
    measurings = [await sender(measuring_load(capacity, 100)).run()]
    measured = {}
    for number, (name, config) in enumerate(chosen.items()):
        measured[name] = await sender(config).run()
        measurings.append(await sender(measuring_load(capacity, 101 + number)).run())
    (path,) = list_journals(directory)
    journal = read_journal(path)
    for number, (name, config) in enumerate(chosen.items()):
        predicted, facts = predict(config, journal, measurings[number : number + 2])
        own = predict(config, journal, [measured[name]])[0]
        _print(name, predicted, own, measured[name], facts)


def _print(
    name: str, predicted: LoadFigures, own: LoadFigures | None, load: MeasuredLoad, facts: str
) -> None:
    """Print a table. `own` was predicted from the steps of the load itself."""
    real = load.recorder.counts.figures(USUAL)
    print(f"\n{name}: {real.num_requests} requests, {len(load.errors)} errors; {facts}")
    heads = ["predicted", "own steps"][: 1 + (own is not None)]
    print(f"{'':22}{'measured':>11}" + "".join(f"{head:>11}   ratio" for head in heads))
    guesses = [figures(guess) for guess in (predicted, own) if guess is not None]
    for what, value in figures(real).items():
        row = f"{what:22}{value:11,.2f}"
        for guess in guesses:
            ratio = f"{guess[what] / value:8.2f}" if value else f"{'-':>8}"
            row += f"{guess[what]:11,.2f}{ratio}"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["paced", "real"])
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each load")
    parser.add_argument("--repeat", type=int, default=1, help="number of runs")
    options = parser.parse_args()
    for _ in range(options.repeat):
        if options.kind == "paced":
            with paced_server(MODEL, GPU, max_len=8192) as gateway:
                asyncio.run(measure_paced(gateway, options.seconds))
            continue
        with (
            tempfile.TemporaryDirectory() as directory,
            Server("--journal", directory, *OPTIONS) as server,
        ):
            asyncio.run(measure(server, options.seconds, Path(directory)))


if __name__ == "__main__":
    main()
