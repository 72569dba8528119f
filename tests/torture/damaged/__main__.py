"""`python -m tests.torture.damaged`: damages the files of models, and reads each damaged model.

Each model must be loaded or refused in one line, in bounded time and memory. A process with limits
reads the models one after the other. If it ends, another one continues after the model that ended
it. The exit code is 1 if a model ended it or raised another exception than a refusal.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CPU_S = 20.0
"""CPU time in which a model must be read."""
MEMORY_BYTES = 2 << 30
"""Address space that the process may allocate while it reads models."""
BAR_CHARS = 40


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.damaged",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=10_000, help="number of damaged models")
    parser.add_argument("--seed", type=int, default=1, help="of the damage")
    parser.add_argument("--first", type=int, default=0, help="index of the first one")
    parser.add_argument("--read", action="store_true", help="read the models in this process")
    options = parser.parse_args()
    if options.read:
        read_models(options.seed, options.first, options.first + options.count)
        return 0
    report = DamageReport()
    began = time.monotonic()
    run(report, options.seed, options.first, options.first + options.count)
    print(f"{options.count:,} damaged models in {time.monotonic() - began:.0f} s", report)
    return 1 if report.failures else 0


@dataclass
class DamageReport:
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    #: (CPU seconds, kind and index) of the slowest model.
    slowest: tuple[float, str] = (0.0, "")
    #: (KiB by which the peak of the process's memory grew, kind and index) of the model that caused
    #: the largest growth.
    largest: tuple[int, str] = (0, "")

    def add(self, result: dict[str, Any]) -> None:
        name = f"{result['kind']} {result['index']}"
        self.counts[f"{result['kind']} {result['outcome']}"] += 1
        self.slowest = max(self.slowest, (result["cpu_s"], name))
        self.largest = max(self.largest, (result["grown_kib"], name))
        if "error" in result:
            self.failures.append(f"{name}: {result['error']}")

    def __str__(self) -> str:
        lines = [f"  {count:>6,} {name}" for name, count in sorted(self.counts.items())]
        lines.append(f"  slowest: {self.slowest[0]:.2f} s of CPU time ({self.slowest[1]})")
        lines.append(f"  largest: {self.largest[0] / 1024:.0f} MiB added ({self.largest[1]})")
        lines += [f"FAILED {each}" for each in self.failures]
        return "\n".join(["", *lines])


def run(report: DamageReport, seed: int, first: int, end: int) -> None:
    """Read the models in processes with limits, add the results to `report`, and show the
    progress."""
    at = first
    while at < end:
        numbers = ("--seed", str(seed), "--first", str(at), "--count", str(end - at))
        command = [sys.executable, "-m", "tests.torture.damaged", "--read", *numbers]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            kind = "?"
            for line in process.stdout:
                result = json.loads(line)
                if "outcome" in result:
                    report.add(result)
                    at = result["index"] + 1
                    _show(at - first, end - first, len(report.failures))
                kind = result["kind"]
        if at < end:  # the process ended while it read this model
            outcome = f"ended the process with {process.returncode}"
            report.add(
                {"kind": kind, "index": at, "outcome": outcome, "error": outcome}
                | {"cpu_s": 0.0, "grown_kib": 0}
            )
            at += 1
    print(file=sys.stderr)


def _show(done: int, total: int, failed: int) -> None:
    if done % max(total // 200, 1) == 0 or done == total:
        bar = "#" * (done * BAR_CHARS // total)
        print(
            f"\r[{bar:<{BAR_CHARS}}] {done:,}/{total:,}, {failed} failed", end="", file=sys.stderr
        )
        sys.stderr.flush()


def read_models(seed: int, first: int, end: int) -> None:
    """Read models with limits of time and memory. Print two JSON lines for each model: its kind and
    index before it is read, and its result afterwards."""
    from tests.torture.damaged.cases import Originals, outcome_of

    logging.disable()  # refusals are raised, and warnings would hide the progress
    with tempfile.TemporaryDirectory() as folder:
        originals = Originals(Path(folder))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for index in range(first, end):
            model = originals.damage(seed, index)
            result: dict[str, Any] = {"kind": model.kind, "index": index}
            print(json.dumps(result), flush=True)
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
            began, peak = time.process_time(), _peak_kib()
            try:
                result["outcome"] = outcome_of(model, tries_tokenizer=index % 4 == 3)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                result["outcome"] = "raised an exception"
                result["error"] = f"{error!r:.300} in {place.filename}:{place.lineno}"
            result |= {"cpu_s": time.process_time() - began, "grown_kib": _peak_kib() - peak}
            print(json.dumps(result), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
