"""`python -m tests.torture.fuzz`: fuzzes every socket and every route, and prints a table.

All targets run, even after a failure. The exit code is 1 if any of them failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from functools import partial

from tests.torture.fuzz.bodies import bodies
from tests.torture.fuzz.sockets import TARGETS
from tests.torture.fuzz.workers import worker_engine

FRAMES_PER_WORKER = 50_000
"""One worker is started per this many frames, because a worker takes seconds to start and exits at
the first malformed message."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.fuzz", description=__doc__)
    parser.add_argument(
        "--frames", type=int, default=10_000, help="number of frames sent to each ZeroMQ socket"
    )
    parser.add_argument(
        "--bodies",
        type=int,
        default=1_000,
        help="number of bodies sent to all POST routes together",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the random values")
    parser.add_argument(
        "--only",
        choices=[*TARGETS, "bodies"],
        action="append",
        help="test only this; may be repeated",
    )
    options = parser.parse_args()
    runs = {name: partial(target, options.frames) for name, target in TARGETS.items()}
    runs["worker-engine"] = partial(worker_engine, -(-options.frames // FRAMES_PER_WORKER))
    runs["bodies"] = partial(bodies, options.bodies)
    failures = 0
    for name in options.only or runs:
        try:
            print(runs[name](options.seed), flush=True)
        except Exception:  # the other targets still run; the exit code reports the failure
            failures += 1
            print(f"{name} failed, with seed {options.seed}:\n{traceback.format_exc()}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
