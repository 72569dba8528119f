"""Times synthetic steps: a batch of requests with a given context in the cache.

The steps run through the real runner, from a plan to its result. Each one computes the same
positions again, so the context does not grow while it is measured. The cache is filled with noise
first: pages that were never written are all the same page of zeros, which fits into every processor
cache.

To work on a kernel, call `assemble_benchmark(config)` once and `timing(batch, context)` as often as
needed.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import msgspec
import torch

from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import num_column_blocks
from protocol.engine.sampling import SamplingParams
from protocol.tools.bench import PARTS, StepBench, StepBenchReady, StepTiming
from protocol.wire.arrays import Int32, UInt8
from protocol.worker.steps import SlotInit, SlotRelease, StepPlan, WorkerReady
from worker.benchmark.parts import (
    PartsClock,
    TimedPart,
    WatchedModel,
    timed_kernels,
    watched_linears,
)
from worker.device.timing import StartupTiming
from worker.kv.rounding import round_heads
from worker.models.decoder import DecoderModel
from worker.startup.assembly import assemble
from worker.step.runner import Runner

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "nucleus": SamplingParams(temperature=1.0, top_p=0.9),
    "penalised": SamplingParams(
        temperature=0.2, top_p=0.9, frequency_penalty=0.5, presence_penalty=0.5
    ),
}
TOKENS = 97
"""Prompts use only ids below this number, which exist in every vocabulary."""


def assemble_benchmark(config: StepBench) -> StepBenchmark:
    """Build a worker for the largest step of `config`. Call it once per process.

    Raises UnusableModel if the model cannot be used, or if memory is too small.
    """
    runner, _, ready, *_ = assemble(worker_config(config), StartupTiming())
    if runner is None:
        raise ValueError(f"{ready.model.name} only encodes; its steps are not measured here")
    gc.collect()
    gc.freeze()
    return StepBenchmark(config, runner, ready)


class StepBenchmark:
    """Benchmark of a runner that has no requests. The contents of its cache are overwritten."""

    def __init__(self, config: StepBench, runner: Runner, ready: WorkerReady) -> None:
        self._config = config
        self.runner, self._ready = runner, ready
        self.components = runner.components
        self._params = PARAMS[config.sampling]
        self._generation = 0
        self._fill_cache()

    @property
    def ready(self) -> StepBenchReady:
        return StepBenchReady(
            model=self._ready.model.name,
            dtype=self._ready.model.dtype,
            device=str(self.components.slots.device),
            threads=torch.get_num_threads(),
            phases=self._ready.phases,
        )

    def run(self) -> Iterator[StepTiming]:
        """Time every batch size with every context length, in the configured order. All batch sizes
        of one context length come first."""
        for context in self._config.context:
            for batch in self._config.batch:
                yield self.timing(batch, context)

    def timing(self, batch: int, context: int) -> StepTiming:
        """Time the step of `batch` requests with `context` tokens each. The requests are released
        afterwards."""
        config = self._config
        with self.requests(batch, context) as plan:
            times = [self._step_s(plan) for _ in range(config.warm_up + config.steps)]
            times = sorted(times[config.warm_up :])
            watched, parts = self._time_parts(plan)
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
        """Return the seconds from the plan to the result, which is the time that an engine would
        wait."""
        started = perf_counter()
        self.runner.step(plan)
        return perf_counter() - started

    def _time_parts(self, plan: StepPlan) -> tuple[float, dict[str, float]]:
        """Return the median time of steps whose parts are timed, and the mean time of each part, in
        seconds."""
        components, times = self.components, []
        clock = PartsClock(_clock_of(components.slots.device))
        model, runner = components.model, self.runner
        whole = model.whole if isinstance(model, DecoderModel) else None
        if whole is not None and whole.is_for(plan.row_slots.shape[0] * self._config.new_tokens):
            timed = timed_kernels(whole.kernels, clock)
        else:
            timed = watched_linears(model, clock)
            runner = Runner(
                WatchedModel(model, clock),
                components.slots,
                TimedPart(components.cache, clock, "attention"),  # type: ignore[arg-type]
                TimedPart(components.attention, clock, "attention"),
                sampling=components.sampling,
                adapters=components.adapters,
            )
        with timed:
            for _ in range(self._config.steps):
                started = perf_counter()
                with clock.part("overhead"):
                    runner.step(plan)
                times.append(perf_counter() - started)
        means = {part: clock.seconds.get(part, 0.0) / self._config.steps for part in PARTS}
        return statistics.median(times), means

    # ---- the requests

    @contextmanager
    def requests(self, batch: int, context: int) -> Iterator[StepPlan]:
        """Bind `batch` requests during the `with` block, and yield the plan that computes them,
        which may be executed any number of times."""
        self._generation += 1
        known = context + self._config.new_tokens
        inits = [self._init(slot, batch, known, context) for slot in range(batch)]
        self.runner.step(self._plan(bind=inits))
        yield self._plan(rows=batch, start=context)
        releases = [SlotRelease(slot=init.slot, generation=init.generation) for init in inits]
        self.runner.step(self._plan(release=releases))

    def _init(self, slot: int, batch: int, known: int, context: int) -> SlotInit:
        """Return the SlotInit of a synthetic request: `known` tokens, of which `context` are
        computed.

        Its blocks are not adjacent: they alternate with those of the other `batch` - 1 requests, as
        if all requests had grown together.
        """
        columns = -(-(known + 1) // self._ready.block_tokens)
        num_blocks = columns * num_column_blocks(self._ready.kv_groups)
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
        self,
        *,
        release: list[SlotRelease] | None = None,
        bind: list[SlotInit] | None = None,
        rows: int = 0,
        start: int = 0,
    ) -> StepPlan:
        none = Int32.of([])
        new = self._config.new_tokens
        return StepPlan(
            step=0,
            release=release or [],
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
        """Write noise to every block except the null block, one layer at a time."""
        cache = self.components.cache
        for layer in range(len(cache.entries)):
            for tensor in cache.layer(layer):
                if cache.is_rounded:  # one block of noise for all
                    block = (*tensor.shape[1:-1], cache.heads(layer).dim)
                    tensor[1:] = round_heads(torch.randn(block, device=tensor.device))
                else:
                    tensor[1:].normal_()


def _clock_of(device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return perf_counter

    def synchronized_now() -> float:
        torch.cuda.synchronize(device)
        return perf_counter()

    return synchronized_now


def worker_config(config: StepBench) -> WorkerConfig:
    """Return the worker's config with as many slots and blocks as the largest step needs, and with
    a max_len that fits the longest request."""
    longest = max(config.context) + config.new_tokens + 1
    slots = max(config.batch)
    blocks_each = -(-longest // config.worker.block_tokens)
    return msgspec.structs.replace(
        config.worker, max_slots=slots, max_len=longest, kv_blocks=slots * blocks_each + 1
    )
