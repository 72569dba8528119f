"""`python -P -m worker.debug.benchmark --config JSON`: prints JSON lines.

The config and the lines are declared in protocol/bench.py.

Exit codes: 0 all were timed; 1 the model or the memory does not suffice, told in the last line of
stderr; 2 a bad command line.
"""

from __future__ import annotations

import argparse
import logging
import sys

import msgspec

from protocol.bench import StepBench, StepBenchLine
from worker.startup import environment


def main() -> int:
    environment.prepare()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m worker.debug.benchmark", description=__doc__)
    parser.add_argument("--config", required=True, help="a StepBench as JSON")
    try:
        config = msgspec.json.decode(parser.parse_args().config, type=StepBench)
    except msgspec.MsgspecError as error:
        print(f"bad --config: {error}", file=sys.stderr)
        return 2
    from worker.debug.benchmark.steps import assembled
    from worker.loading.errors import UnusableModel

    try:
        benchmark = assembled(config)
    except UnusableModel as error:
        print(error.message, file=sys.stderr)
        return 1
    tell(benchmark.ready)
    for timing in benchmark.run():
        tell(timing)
    return 0


def tell(line: StepBenchLine) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
