"""Measures what grows with a cluster: routing, its table, heartbeats, frames, journals.

    python -m tests.benchmarks.scale_costs

Prints CPU times (the least of a few runs, because other programs can only make a run slower) and
sizes in bytes. docs/contribute/simulator.md quotes them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine_core.journal.file import Writer
from engine_core.journal.recorder import RecordedEngine
from gateway.fleet.routing import PrefixHash, PrefixRouter, prefix_hashes
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.messages import (
    Generate,
    Limits,
    Output,
    Outputs,
    Ping,
    Pong,
    ToClient,
    ToEngine,
)
from protocol.engine.sampling import SamplingParams
from protocol.engine.stats import EngineLoad
from protocol.wire import codec
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepResult
from tests.support.engines import Bench, a_card

BLOCK_TOKENS = 16
TRIES = 5
PROMPTS = 500
CACHE_TOKENS = 450_000


def least_us(run: Callable[[], object], num: int) -> float:
    """Return the least CPU time of `run`, which does something `num` times, in microseconds."""
    times = []
    for _ in range(TRIES):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times) / num * 1e6


def prompts(num_tokens: int, num: int = PROMPTS) -> list[Int32]:
    source = random.Random(num_tokens)
    return [Int32(source.randbytes(4 * num_tokens)) for _ in range(num)]


def hash_all(made: list[Int32]) -> None:
    for prompt in made:
        prefix_hashes(prompt, "", BLOCK_TOKENS)


def measure_hashing() -> None:
    for num_tokens in (250, 1000, 8000, 100_000):
        made = prompts(num_tokens, 20 if num_tokens > 10_000 else PROMPTS)
        us = least_us(partial(hash_all, made), len(made))
        num = len(prefix_hashes(made[0], "", BLOCK_TOKENS))
        print(f"hashes of a prompt of {num_tokens:7,} tokens: {us:7.1f} us, {num} prefixes")


def router_of(replicas: int) -> PrefixRouter:
    router = PrefixRouter()
    for number in range(replicas):
        router.set_usable(router.add(f"replica {number}", CACHE_TOKENS), is_usable=True)
    return router


def route(router: PrefixRouter, hashes: list[list[PrefixHash]]) -> None:
    for each in hashes:
        decision = router.choose(each)
        assert decision is not None
        router.on_sent(each, decision.replica, 1000, prompt_tokens=1000)
        router.loads[decision.replica].on_answered(1000, is_accepted=False)


def measure_choice() -> None:
    hashes = [prefix_hashes(prompt, "", BLOCK_TOKENS) for prompt in prompts(1000)]
    for replicas in (2, 8, 32, 100, 1000, 10_000):
        router = router_of(replicas)
        route(router, hashes)
        us = least_us(partial(route, router, hashes), len(hashes))
        print(f"choice among {replicas:6,} replicas, 1,000 tokens: {us:6.1f} us")


def measure_table() -> None:
    router = router_of(1000)
    tracemalloc.start()
    for seed in range(40):
        source = random.Random(seed)
        made = [Int32(source.randbytes(4000)) for _ in range(100)]
        route(router, [prefix_hashes(prompt, "", BLOCK_TOKENS) for prompt in made])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"routing table: {size / len(router):.0f} bytes per prefix, {len(router):,} prefixes")


def size_of(message: ToClient | ToEngine) -> int:
    return sum([len(bytes(frame)) for frame in codec.encode(message)])


def measure_frames() -> None:
    bench = Bench()
    pong = Pong(epoch="0" * 16, stats=bench.engine.stats(clients=64), sent_bytes=1 << 40)
    print(f"heartbeat: ping {size_of(Ping())} bytes, pong {size_of(pong)} bytes")
    sizes = []
    for rows in (1, 64, 65):
        outputs = [Output(request=100_000 + row, tokens=[40_000]) for row in range(rows)]
        sizes.append(size_of(Outputs(step=100_000, outputs=outputs, load=EngineLoad(60, 4, 9000))))
    print(f"outputs of a step: {sizes[0]} bytes with 1 token, {sizes[2] - sizes[1]} for each more")
    prompt = Int32.of([40_000] * 1000)
    print(f"a request of 1,000 tokens: {size_of(Generate(request=1, prompt=prompt)):,} bytes")


def measure_journal() -> None:
    """Print the bytes that a journal grows by, per request and per step."""
    config = EngineConfig(worker=WorkerConfig(model=""))
    limits = Limits(
        max_len=4096,
        max_slots=64,
        block_tokens=BLOCK_TOKENS,
        num_blocks=9000,
        token_budget=70_000,
        prefix_cache=True,
    )
    with tempfile.TemporaryDirectory() as directory:
        writer = Writer(Path(directory), max_bytes=1 << 28)
        engine = RecordedEngine(writer, config, a_card(), limits)
        empty = writer.path.stat().st_size
        for number, prompt in enumerate(prompts(1000, 64)):
            ids = Int32.of([token % 97 for token in prompt.tolist()])
            params = SamplingParams(max_tokens=500, ignore_eos=True)
            engine.add(b"client", Generate(request=number, prompt=ids, params=params))
        added = writer.path.stat().st_size
        for step in range(101):
            if step == 1:
                started = writer.path.stat().st_size
            engine.tick(float(step))
            plan = engine.plan()
            assert plan is not None
            tokens = Int32.of([7] * sum(plan.row_samples.tolist()))
            engine.commit(StepResult(step=plan.step, tokens=tokens, failed=Int32.of([])), 0.01)
        size = writer.path.stat().st_size
        writer.close()
    print(
        f"journal: {(added - empty) / 64:,.0f} bytes per request of 1,000 tokens, "
        f"{(size - started) / 100:,.0f} per step of 64 rows"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    measure_hashing()
    measure_choice()
    measure_table()
    measure_frames()
    measure_journal()


if __name__ == "__main__":
    main()
