"""Measures the phases of a start of `tidegate serve` with the default model.

    python -m tests.benchmarks.start_speed [--starts N]

For each start it prints the seconds until the server was ready, as the server reports them, the
phases of the worker, and the CPU time of each process until then, on which other programs have
less effect. "ended" are processes that have ended by then, such as the check of the model. The
model's files must already be in the page cache.
"""

from __future__ import annotations

import argparse
import re

import psutil

from tests.support.server import Server

PHASES = re.compile(r"engine ready: .*\((.*)\)$")


def name_of(process: psutil.Process) -> str:
    """Return the module that a process runs, since the process is named python."""
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words else process.name()


def one_start() -> None:
    with Server("--poison-slots", "off") as server:
        main = psutil.Process(server.process.pid)
        spent = [
            (name_of(each), sum(each.cpu_times()[:2]))
            for each in (main, *main.children(recursive=True))
        ]
        spent.append(("ended", sum(main.cpu_times()[2:4])))
        phases = [found[1] for line in server.err if (found := PHASES.search(line))]
        cpu = ", ".join(f"{name} {cpu_s:.2f}" for name, cpu_s in spent)
        total = sum(cpu_s for _, cpu_s in spent)
        print(f"ready in {server.ready_s:.1f} s; {phases[0] if phases else 'no phases printed'}")
        print(f"    CPU {total:.2f} s: {cpu}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.start_speed")
    parser.add_argument("--starts", type=int, default=5, help="how often the server is started")
    for _ in range(parser.parse_args().starts):
        one_start()


if __name__ == "__main__":
    main()
