"""Measures how long the worker waits between steps: with 1 and 8 streams, each with one and two
steps in flight.

This is a measurement, not a test. `python -m tests.benchmarks.step_gaps` starts `tidegate serve`
with the default model for each case, and prints the figures that its worker logs when it stops.
Streams use ZeroMQ, so no HTTP process takes part.
"""

from __future__ import annotations

import argparse
import signal
from concurrent.futures import ThreadPoolExecutor

from protocol.engine.sampling import SamplingParams
from protocol.sdk.client import Client
from tests.support.server import Server

STREAMS = (1, 8)
STEPS_IN_FLIGHT = (1, 2)
TOKENS = 250
PROMPT = list(range(100, 116))


def measure(streams: int, steps_in_flight: int) -> str:
    """Serve `streams` streams, and return the figures that the worker logs when it stops."""
    options = ("--steps-in-flight", str(steps_in_flight), "--max-len", "1024", "--max-slots", "16")
    with Server(*options, "--poison-slots", "off") as server:
        with Client(server.address) as engine, ThreadPoolExecutor(streams) as pool:
            list(pool.map(lambda n: answer(engine, n), range(streams)))
        server.signal(signal.SIGTERM)
        server.end()
        (line,) = [line for line in server.err if "gaps between them" in line]
    return line.partition("stopped; ")[2]


def answer(engine: Client, number: int) -> int:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=number)
    return len(engine.generate([*PROMPT, number], params).tokens())


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for streams in STREAMS:
        for steps_in_flight in STEPS_IN_FLIGHT:
            result = measure(streams, steps_in_flight)
            print(f"{streams} streams, {steps_in_flight} in flight: {result}", flush=True)


if __name__ == "__main__":
    main()
