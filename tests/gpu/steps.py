"""Times steps of whole models with random weights, from the plan to its result, and how long the
device waits for the host between them.

A decode step has to read all weights and all earlier keys and values. The floor of its time is that
many bytes over the rate of a copy on the same device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from time import perf_counter

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from protocol.config.worker import WorkerConfig
from protocol.tools.bench import StepBench
from protocol.worker.steps import StepPlan
from tests.gpu.machine import copy_bandwidth
from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, figure
from tools.libraries.catalogue import library_folder
from tools.models.fetch import home
from worker.benchmark.steps import StepBenchmark, assemble_benchmark
from worker.kv.cache import PagedCache
from worker.models.decoder import DecoderModel
from worker.step.runner import Runner

CONTEXT = 1024
SHARES = {1: 0.75, 64: 0.75, 256: 0.70}
"""Batch size -> goal: the floor as a share of the step's time."""
IDLE_SHARES = {64: 0.05}
IDLE_US = {1: 50.0}
"""Goals of the time for which the device waits for the host: as a share of the step's time, and in
microseconds."""
SHORTEST_WAIT_US = 4.0
"""Shorter gaps are between the kernels of a graph, not between the host's launches."""
STEPS, WARM_UPS, TRACED = 30, 5, 10
PREFILL_TOKENS, PREFILL_MS = 8192, 282.0
SMALL_MS = 0.6


def time_decode(session: GpuSession) -> Iterator[GpuRow]:
    """Yield the times of decode steps of Qwen3-8B's shape."""
    batches = session.choose(SHARES, {1: 0.75, 3: 0.75})
    benchmark = benchmark_of(session, "qwen3-8b", tuple(batches))
    model, cache = benchmark.components.model, benchmark.components.cache
    assert isinstance(model, DecoderModel)
    bandwidth = copy_bandwidth(session)
    for batch, share in batches.items():
        name = f"Qwen3-8B, {batch} x {_context(session):,}"
        with benchmark.requests(batch, _context(session)) as plan:
            step_s = median(periods(benchmark.runner, plan, session.choose(STEPS, 2)))
            read = bytes_read(model, cache, batch=batch, context=_context(session))
            floor_s = read / bandwidth
            text = f"{batch / step_s:,.0f} tokens/s; floor {floor_s * 1e3:.3g} ms"
            goal = floor_s / share * 1e3
            yield figure(f"{name}: step", step_s * 1e3, "ms", at_most=goal, text=text)
            yield _idle_row(session, name, benchmark.runner, plan, batch, step_s)


def time_small(session: GpuSession) -> Iterator[GpuRow]:
    """Yield the time of a decode step of SmolLM2-135M's shape, which the host limits."""
    benchmark = benchmark_of(session, "smollm2-135m", (1,))
    name = f"SmolLM2-135M, 1 x {_context(session):,}"
    with benchmark.requests(1, _context(session)) as plan:
        step_s = median(periods(benchmark.runner, plan, session.choose(STEPS, 2)))
        yield figure(f"{name}: step", step_s * 1e3, "ms", at_most=SMALL_MS)
        yield _idle_row(session, name, benchmark.runner, plan, 1, step_s)


def time_prefill(session: GpuSession) -> Iterator[GpuRow]:
    """Yield the time of a step that computes a whole prompt."""
    tokens = session.choose(PREFILL_TOKENS, 64)
    benchmark = benchmark_of(session, "qwen3-8b", (1,), context=0, new_tokens=tokens)
    with benchmark.requests(1, 0) as plan:
        step_s = median(periods(benchmark.runner, plan, session.choose(5, 1), depth=1))
    text = f"{tokens / step_s:,.0f} tokens/s"
    yield figure(
        f"Qwen3-8B, prompt of {tokens:,}", step_s * 1e3, "ms", at_most=PREFILL_MS, text=text
    )


def _context(session: GpuSession) -> int:
    return session.choose(CONTEXT, 40)


def benchmark_of(
    session: GpuSession,
    config: str,
    batches: tuple[int, ...],
    *,
    context: int | None = None,
    new_tokens: int = 1,
) -> StepBenchmark:
    worker = WorkerConfig(
        model=str(session.config(config)),
        device=session.choose("cuda:0", "cpu"),
        dtype=session.choose("bfloat16", "float32"),
        threads=session.threads,
        token_budget=max(batches) * new_tokens,  # so that less memory is kept for a step
        decode_graphs="auto" if new_tokens == 1 else "off",
        libraries=str(library_folder(home())),
    )
    contexts = (_context(session) if context is None else context,)
    return assemble_benchmark(
        StepBench(worker=worker, batch=batches, context=contexts, new_tokens=new_tokens)
    )


def bytes_read(model: DecoderModel, cache: PagedCache, *, batch: int, context: int) -> int:
    """Return the bytes that a decode step has to read: the weights, of the embeddings only if they
    are also the head, and the keys and values."""
    spec, weights = model.spec, model.weights
    tables = [
        set(map(Tensor.data_ptr, part.tensors())) for part in (weights.embedding, weights.head)
    ]
    sizes = {each.data_ptr(): each.nbytes for each in model.tensors()}
    read = sum(size for place, size in sizes.items() if place not in tables[0] - tables[1])
    token = (
        2
        * spec.num_layers
        * spec.layer_heads[0].count
        * spec.layer_heads[0].dim
        * cache.dtype.itemsize
    )
    return read + batch * context * token


def periods(runner: Runner, plan: StepPlan, count: int, *, depth: int = 2) -> list[float]:
    """Return the seconds from one result to the next, for `count` steps, of which `depth` are in
    flight at a time."""
    pending = [runner.launch(plan) for _ in range(depth - 1)]
    times = []
    for _ in range(WARM_UPS + count):
        started = perf_counter()
        pending.append(runner.launch(plan))
        pending.pop(0).result()
        times.append(perf_counter() - started)
    for step in pending:
        step.result()
    return times[WARM_UPS:]


def _idle_row(
    session: GpuSession, name: str, runner: Runner, plan: StepPlan, batch: int, step_s: float
) -> GpuRow:
    """Return how long the device waits for the host in a step, with two steps in flight."""
    kind = session.choose("CUDA", "CPU")
    activity = session.choose(ProfilerActivity.CUDA, ProfilerActivity.CPU)
    with profile(activities=[activity]) as trace:
        count = len(periods(runner, plan, session.choose(TRACED, 1))) + WARM_UPS + 1
        session.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type.name == kind
    ]
    idle = sum(waits_us(spans)) / count
    goal = IDLE_US.get(batch)
    if batch in IDLE_SHARES:
        goal = IDLE_SHARES[batch] * step_s * 1e6
    return figure(f"{name}: device waits for the host", idle, "us a step", at_most=goal)


def waits_us(spans: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Yield the gaps between spans of (start, end) in microseconds that are longer than
    SHORTEST_WAIT_US. Spans may overlap."""
    latest: float | None = None
    for start, end in sorted(spans):
        if latest is not None and start - latest > SHORTEST_WAIT_US:
            yield start - latest
        latest = end if latest is None else max(latest, end)
