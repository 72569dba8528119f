"""One kind of step, made up and run again and again: so many requests with so much in the cache.

The steps are the runner's own, from a plan to a result that can be told. Each computes the same
positions again, so that the context does not grow while it is measured. The cache is filled with
noise first: pages that nobody has written are one page of zeros, which every cache of the processor
holds.

Who works at a kernel calls `assembled(config)` once, and `timing(batch, context)` at will.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import msgspec
import torch

from protocol.arrays import Int32, UInt8
from protocol.bench import PARTS, StepBench, StepBenchReady, StepTiming
from protocol.config.worker import WorkerConfig
from protocol.sampling import SamplingParams
from protocol.steps import SlotInit, StepPlan, WorkerReady
from worker.debug.benchmark.parts import PartsClock, TimedPart, WatchedModel, watched_linears
from worker.startup.assembly import assemble
from worker.startup.timing import StartupTiming
from worker.step import Runner

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "nucleus": SamplingParams(temperature=1.0, top_p=0.9),
}
TOKENS = 97
"""Prompts are made of so many ids: any do that every vocabulary has."""


def assembled(config: StepBench) -> StepBenchmark:
    """A worker put together for the largest of the steps that `config` names: once per process.

    Raises UnusableModel where the model or the memory is not enough.
    """
    runner, ready = assemble(worker_config(config), StartupTiming())
    gc.collect()
    gc.freeze()
    return StepBenchmark(config, runner, ready)


class StepBenchmark:
    """Of a runner that holds no request, and whose cache holds nothing that is still wanted."""

    def __init__(self, config: StepBench, runner: Runner, ready: WorkerReady) -> None:
        self._config = config
        self._runner, self._ready = runner, ready
        self._parts = runner.parts
        self._params = PARAMS[config.sampling]
        self._generation = 0
        self._fill_cache()

    @property
    def ready(self) -> StepBenchReady:
        return StepBenchReady(
            model=self._ready.model.name,
            dtype=self._ready.model.dtype,
            device=str(self._parts.slots.device),
            threads=torch.get_num_threads(),
            phases=self._ready.phases,
        )

    def run(self) -> Iterator[StepTiming]:
        """Every batch size with every context length, the smallest context first."""
        for context in self._config.context:
            for batch in self._config.batch:
                yield self.timing(batch, context)

    def timing(self, batch: int, context: int) -> StepTiming:
        """One kind of step. Its requests leave their slots again."""
        config = self._config
        with self._requests(batch, context) as plan:
            times = [self._step_s(plan) for _ in range(config.warm_up + config.steps)]
            times = sorted(times[config.warm_up :])
            watched, parts = self._watched(plan)
        return StepTiming(
            batch=batch,
            context=context,
            new_tokens=config.new_tokens,
            steps=config.steps,
            step_s=statistics.median(times),
            best_s=times[0],
            p90_s=times[-(-9 * len(times) // 10) - 1],
            watched_s=watched,
            parts_s=parts,
        )

    def _step_s(self, plan: StepPlan) -> float:
        """What the engine waits for: from the plan to the result."""
        started = perf_counter()
        self._runner.step(plan)
        return perf_counter() - started

    def _watched(self, plan: StepPlan) -> tuple[float, dict[str, float]]:
        """The median of watched steps, and the mean of each part."""
        parts, times = self._parts, []
        clock = PartsClock(_clock_of(parts.slots.device))
        runner = Runner(
            WatchedModel(parts.model, clock),
            parts.slots,
            TimedPart(parts.cache, clock, "attention"),  # type: ignore[arg-type]
            TimedPart(parts.attention, clock, "attention"),
        )
        with watched_linears(parts.model, clock):
            for _ in range(self._config.steps):
                started = perf_counter()
                with clock.part("overhead"):
                    runner.step(plan)
                times.append(perf_counter() - started)
        means = {part: clock.seconds.get(part, 0.0) / self._config.steps for part in PARTS}
        return statistics.median(times), means

    # ---- the requests

    @contextmanager
    def _requests(self, batch: int, context: int) -> Iterator[StepPlan]:
        """Requests that hold slots and blocks while inside, and the plan that computes them."""
        self._generation += 1
        known = context + self._config.new_tokens
        inits = [self._init(slot, batch, known, context) for slot in range(batch)]
        self._runner.step(self._plan(bind=inits))
        yield self._plan(rows=batch, start=context)
        self._runner.step(self._plan(release=batch))

    def _init(self, slot: int, batch: int, known: int, context: int) -> SlotInit:
        """Blocks alternate between requests, as they do when all of them grow at once."""
        num_blocks = -(-(known + 1) // self._ready.block_tokens)
        return SlotInit(
            slot=slot,
            generation=self._generation,
            tokens=Int32.of((slot + at) % TOKENS for at in range(known)),
            prompt_tokens=known,
            num_computed=context,
            blocks=Int32.of(1 + slot + index * batch for index in range(num_blocks)),
            seed=slot,
            stop_ids=[],
            params=self._params,
        )

    def _plan(
        self, *, release: int = 0, bind: list[SlotInit] | None = None, rows: int = 0, start: int = 0
    ) -> StepPlan:
        none = Int32.of([])
        new = self._config.new_tokens
        return StepPlan(
            step=0,
            release=Int32.of(range(release)),
            bind=bind or [],
            block_slots=none,
            block_indexes=none,
            block_ids=none,
            zero_blocks=none,
            row_slots=Int32.of(range(rows)),
            row_starts=Int32.of([start] * rows),
            row_tokens=Int32.of([new] * rows),
            row_samples=UInt8.of([1] * rows),
            num_decodes=rows if new == 1 else 0,
        )

    def _fill_cache(self) -> None:
        """Every block but the null block, a layer at a time."""
        cache = self._parts.cache
        for layer in range(len(cache.k)):
            for tensor in (cache.k, cache.v):
                tensor[layer, 1:].normal_()


def _clock_of(device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return perf_counter

    def when_all_is_done() -> float:
        torch.cuda.synchronize(device)
        return perf_counter()

    return when_all_is_done


def worker_config(config: StepBench) -> WorkerConfig:
    """The worker's, with as many slots and blocks as the largest step needs, and a length that
    holds the longest."""
    longest = max(config.context) + config.new_tokens + 1
    slots = max(config.batch)
    blocks_each = -(-longest // config.worker.block_tokens)
    return msgspec.structs.replace(
        config.worker, max_slots=slots, max_len=longest, kv_blocks=slots * blocks_each + 1
    )
