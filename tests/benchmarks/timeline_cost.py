"""Measures how long the timelines of requests occupy the engine's loop.

    python -m tests.benchmarks.timeline_cost [--steps N] [--prompt-tokens N]

No worker takes part: the result of each step is made up, with one token per row. 16 requests
decode in all steps, and 48 slots are shared by others, whose prompts are computed at the same time.
So each step is an entry of the log of its own. Prints the least time of a few runs, because other
programs can only make a run slower.
"""

from __future__ import annotations

import argparse
import time

from engine_core.engine import Engine
from engine_core.history.queue import TimelineQueue
from engine_core.loop import TIMELINES_S
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.messages import Generate, GetTimeline, Limits
from protocol.engine.sampling import SamplingParams
from protocol.wire import codec
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepPlan, StepResult
from tests.support.engines import a_card

SLOTS, BUDGET, ANSWER_TOKENS = 64, 320, 500
BLOCK_TOKENS = 16
STEP_S = 0.01
TRIES = 5
LONGS = [f"long {number}" for number in range(16)]


def busy_engine(steps: int, prompt_tokens: int) -> Engine:
    """Return an engine that has computed `steps` steps, most of which contain prompts."""
    limits = Limits(
        max_len=1 << 20,
        max_slots=SLOTS,
        block_tokens=BLOCK_TOKENS,
        num_blocks=1 << 17,
        token_budget=BUDGET,
        prefix_cache=False,
    )
    engine = Engine(EngineConfig(worker=WorkerConfig(model="")), a_card(), limits)
    for number, name in enumerate(LONGS):
        add(engine, number, [name, "all"], [5, 6, 7], 2 * steps)
    for step in range(steps):
        engine.tick(step * STEP_S)
        while engine.num_open < 2 * SLOTS:
            number += 1
            add(engine, number, [f"request-{number}", "all"], [5] * prompt_tokens, ANSWER_TOKENS)
        run_step(engine)
    return engine


def add(engine: Engine, number: int, labels: list[str], tokens: list[int], answer: int) -> None:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    prompt = Int32.of(tokens)
    reply = engine.add(
        b"client", Generate(request=number, prompt=prompt, params=params, labels=labels)
    )
    assert reply is not None


def run_step(engine: Engine) -> None:
    """Compute the next step."""
    plan = engine.plan()
    assert isinstance(plan, StepPlan)
    tokens = Int32.of([7] * sum(plan.row_samples.tolist()))
    engine.commit(StepResult(step=plan.step, tokens=tokens, failed=Int32.of([])), STEP_S)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=11_000)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    options = parser.parse_args()
    engine = busy_engine(options.steps, options.prompt_tokens)
    num_entries = sum(1 for _ in engine.history.steps)
    ended = sum(engine.stats().num_finished.values())
    print(f"the log has {num_entries:,} entries; {ended:,} requests have ended")
    for names in (LONGS[:1], LONGS, ["all"]):
        measure(engine, names)


def measure(engine: Engine, names: list[str]) -> None:
    """Print the time of one GetTimeline with these names: in all, per turn, and to encode."""
    totals, longest = [], []
    for _ in range(TRIES):
        waiting, turns = TimelineQueue(), []
        message = GetTimeline(request=1, names=names)
        assert not waiting.add(b"client", message, engine.compute_timelines(names, bytes.decode))
        while waiting.is_busy:
            started = time.perf_counter()
            answers = waiting.run(TIMELINES_S, time.perf_counter)
            turns.append(time.perf_counter() - started)
        totals.append(sum(turns))
        longest.append(max(turns))
    ((_, answer),) = answers
    started = time.perf_counter()
    size = sum(memoryview(frame).nbytes for frame in codec.encode(answer))
    encode_s = time.perf_counter() - started
    print(
        f"{len(answer.timelines):2} timelines with {sum(len(t.groups) for t in answer.timelines)} "
        f"groups: {min(totals) * 1e3:.1f} ms in {len(turns)} turns, the longest "
        f"{min(longest) * 1e3:.2f} ms; {size:,} bytes, encoded in {encode_s * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    main()
