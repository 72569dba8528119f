"""Measures the CPU time that the engine spends on a step of decoding rows: the plan and the commit.

    python -m tests.benchmarks.engine_steps [--rows 1,8,64,256] [--in-flight N] [--clients N]
        [--kv-events]

No worker takes part: the result of each step is made up, with one token per row. Prints the least
CPU time of a few runs, because other programs can only make a run slower.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import msgspec

from engine_core.engine import Engine
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.kv_events import KVEventBatch
from protocol.engine.messages import Generate, Limits
from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepPlan, StepResult
from tests.support.engines import a_card

PROMPT_TOKENS, BLOCK_TOKENS = 64, 16
WARM_UP, STEPS, TRIES = 24, 48, 12
MAX_TOKENS = WARM_UP + STEPS * TRIES + 64


def decoding_engine(rows: int, *, in_flight: int, clients: int, kv_events: bool = False) -> Engine:
    """Return an engine with `rows` requests whose answers do not end during the measurement."""
    columns = 2 + (PROMPT_TOKENS + MAX_TOKENS) // BLOCK_TOKENS
    limits = Limits(
        max_len=4096,
        max_slots=rows,
        block_tokens=BLOCK_TOKENS,
        num_blocks=1 + rows * columns,
        token_budget=2048,
        prefix_cache=True,
    )
    config = EngineConfig(
        worker=WorkerConfig(model=""),
        steps_in_flight=in_flight,
        kv_events="ipc:///nowhere/events.sock" if kv_events else "",
        kv_events_namespace=[""] if kv_events else [],
    )
    engine = Engine(config, a_card(), limits)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for number in range(rows):
        prompt = Int32.of([5 + (number * 7 + at) % 80 for at in range(PROMPT_TOKENS)])
        client = f"client {number % clients}".encode()
        engine.add(client, Generate(request=number, prompt=prompt, params=params))
    return engine


class StepTimer:
    """Runs the steps of an engine, and measures the CPU time of its plans and commits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_flight: deque[StepPlan] = deque()
        self._encoder = msgspec.msgpack.Encoder()

    def run(self, steps: int) -> tuple[float, float]:
        """Run `steps` steps. Return the CPU time per plan and per commit, in microseconds."""
        times = [self._step() for _ in range(steps)]
        plan_s, commit_s = (sum(column) for column in zip(*times, strict=True))
        return plan_s / steps * 1e6, commit_s / steps * 1e6

    def _step(self) -> tuple[float, float]:
        """Plan as many steps as the engine allows, and commit the oldest. Return the CPU times of
        both, in seconds."""
        started = time.process_time()
        while (plan := self._engine.plan()) is not None:
            assert isinstance(plan, StepPlan), "no request of this benchmark encodes"
            self._in_flight.append(plan)
        planned = time.process_time()
        oldest = self._in_flight.popleft()
        tokens = Int32.of([9] * sum(oldest.row_samples.tolist()))
        result = StepResult(step=oldest.step, tokens=tokens, failed=Int32.of([]))
        sampled = time.process_time()
        self._engine.commit(result, 0.01)
        if events := self._engine.drain_kv_events():
            self._encoder.encode(KVEventBatch(ts=0.0, events=events))
        return planned - started, time.process_time() - sampled


def measure(
    rows: int, *, in_flight: int, clients: int, kv_events: bool = False
) -> tuple[float, float]:
    """Return the CPU time of a plan and of a commit, in microseconds. With `kv_events`, the commit
    includes the collection and the encoding of KV events."""
    engine = decoding_engine(rows, in_flight=in_flight, clients=clients, kv_events=kv_events)
    timer = StepTimer(engine)
    timer.run(WARM_UP)
    times = [timer.run(STEPS) for _ in range(TRIES)]
    return min(plan for plan, _ in times), min(commit for _, commit in times)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.engine_steps",
        description="Measure the engine's CPU time per decoding step and row.",
    )
    parser.add_argument("--rows", default="1,8,64,256", help="numbers of rows, with commas")
    parser.add_argument("--in-flight", type=int, default=1, help="most steps in flight at once")
    parser.add_argument("--clients", type=int, default=1, help="number of clients with requests")
    parser.add_argument("--kv-events", action="store_true", help="collect and encode KV events")
    options = parser.parse_args()
    for rows in map(int, options.rows.split(",")):
        plan, commit = measure(
            rows,
            in_flight=options.in_flight,
            clients=options.clients,
            kv_events=options.kv_events,
        )
        both = plan + commit
        print(
            f"{rows:4} rows: plan {plan:5.0f} us, commit {commit:5.0f} us, "
            f"both {both:5.0f} us, {both / rows:6.2f} us per row",
            flush=True,
        )


if __name__ == "__main__":
    main()
