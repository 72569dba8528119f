"""First tokens of prompts that arrive at the same time, on a simulated clock.

    python -m tests.benchmarks.first_tokens [--streams 32,64] [--budgets 128,256,512,1024,2048]

The engine is the real one, with an echo worker. A step takes `--step-ms`, and `--token-ms` for each
of its tokens, so the figures depend on nothing else and are the same in every run. Prints, for each
token budget, when the first tokens came, and the longest gap between two tokens of one answer:
large steps compute all prompts sooner, but the answers that are already streaming wait for them.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

from tests.support.paced import Paced, PacedRequest

SEED, ANSWER, BLOCK_TOKENS = 1, 64, 16


@dataclass(frozen=True)
class Burst:
    """Prompts that arrive at the same time.

    prompts   shortest and longest prompt, in tokens
    step_s    seconds that each step takes
    token_s   seconds that each token of a step adds
    """

    streams: int
    prompts: tuple[int, int]
    step_s: float
    token_s: float


def first_tokens(burst: Burst, token_budget: int) -> tuple[list[float], float]:
    """Return the sorted times of the first tokens, and the longest gap in an answer, in seconds."""
    lengths = random.Random(SEED)
    columns = 2 + (burst.prompts[1] + ANSWER) // BLOCK_TOKENS
    paced = Paced(
        [(0, burst.step_s), (1, burst.step_s + burst.token_s)],
        token_budget=token_budget,
        block_tokens=BLOCK_TOKENS,
        num_blocks=1 + burst.streams * columns,
        max_slots=burst.streams,
        max_len=burst.prompts[1] + ANSWER,
        steps_in_flight=2,
    )
    asked = [paced.ask(lengths.randint(*burst.prompts), ANSWER) for _ in range(burst.streams)]
    seen, last_at, gap_s = dict.fromkeys(range(burst.streams), 0), [0.0] * burst.streams, 0.0
    while any(request.ended_at is None for request in asked):
        paced.run(paced.now + burst.step_s)  # one step
        for number, request in enumerate(asked):
            if (tokens := num_tokens(request)) > seen[number]:
                gap_s = max(gap_s, paced.now - last_at[number] if seen[number] else 0.0)
                seen[number], last_at[number] = tokens, paced.now
    return sorted(request.wait_s for request in asked), gap_s


def num_tokens(request: PacedRequest) -> int:
    return sum(len(output.tokens) for output in request.outputs)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.first_tokens",
        description="Simulate the first tokens of prompts that arrive at the same time.",
    )
    parser.add_argument("--streams", default="32,64", help="numbers of prompts, with commas")
    parser.add_argument("--budgets", default="128,256,512,1024,2048", help="token budgets")
    parser.add_argument("--prompts", default="256,512", help="shortest and longest, in tokens")
    parser.add_argument("--step-ms", type=float, default=8.0, help="time of each step")
    parser.add_argument("--token-ms", type=float, default=0.5, help="time that each token adds")
    options = parser.parse_args()
    shortest, longest = map(int, options.prompts.split(","))
    for streams in map(int, options.streams.split(",")):
        burst = Burst(streams, (shortest, longest), options.step_ms / 1e3, options.token_ms / 1e3)
        for budget in map(int, options.budgets.split(",")):
            times, gap_s = first_tokens(burst, budget)
            p50, p99 = (times[int(share * len(times))] for share in (0.5, 0.99))
            print(
                f"{streams:3} streams, token budget {budget:4}: first token p50 {p50:5.2f} s, "
                f"p99 {p99:5.2f} s, longest gap {gap_s * 1e3:5.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
