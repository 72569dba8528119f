"""`python -P -m worker.benchmark --config JSON`: print timings as JSON lines.

protocol/tools/bench.py declares the config and the lines.

Exit codes: 0 if all steps were timed; 1 if the model cannot be used or memory is too small, with
the reason in the last line of stderr; 2 for a bad command line.
"""

from __future__ import annotations

import argparse
import logging
import sys

import msgspec

from protocol.process.quick_exit import quick_exit
from protocol.tools.bench import StepBench, StepBenchLine
from worker.device import environment


def main() -> int:
    environment.prepare()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    parser = argparse.ArgumentParser(prog="python -m worker.benchmark", description=__doc__)
    parser.add_argument("--config", required=True, help="a StepBench as JSON")
    try:
        config = msgspec.json.decode(parser.parse_args().config, type=StepBench)
    except msgspec.MsgspecError as error:
        print(f"bad --config: {error}", file=sys.stderr)
        return 2
    from worker.benchmark.steps import assemble_benchmark
    from worker.errors import UnusableModel

    try:
        benchmark = assemble_benchmark(config)
    except UnusableModel as error:
        print(error.message, file=sys.stderr)
        return 1
    write_line(benchmark.ready)
    for timing in benchmark.run():
        write_line(timing)
    return 0


def write_line(line: StepBenchLine) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


if __name__ == "__main__":
    quick_exit(main())
