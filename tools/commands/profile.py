"""`tidegate profile`: records a trace of a server's worker, and the CPU use of its processes.

The command connects to the engine, not the gateway, so it works when HTTP is down. While the worker
records, this process reads the CPU times of the supervisor and all its descendants from /proc.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from protocol.engine.messages import Profiled
from protocol.process.process_state import (
    PROC,
    TITLE_PREFIX,
    program_name,
    read_all_stats,
    with_descendants,
)
from protocol.sdk.client import Client
from protocol.wire.errors import EngineNotReady, ServingError
from protocol.wire.sockets import engine_address
from tools.bench.report import aligned
from tools.failure import Failure
from tools.paths import user_path
from tools.processes.discovery import add_server, local_server

DESCRIPTION = """\
Record the next steps of a running server's worker as a Chrome trace, and measure the CPU use of
each process. The command waits for steps, so the server needs load. Recording makes steps slower.
Ctrl-C ends the command without a trace.
"""

EXAMPLES = """\
examples:
  tidegate profile                        record 50 steps to ./profile
  tidegate profile --steps 10 --directory /var/tmp/traces --port 8001
open the file at https://ui.perfetto.dev or in chrome://tracing
"""

WAIT_S = 3.0
SAMPLE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU times of processes at one moment."""

    #: Seconds since 1970.
    at: float
    #: Process id -> CPU time used so far, in seconds.
    cpu_s: Mapping[int, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser, takes_argument=True)
    parser.add_argument(
        "--steps",
        type=int,
        default=50,
        metavar="N",
        help="number of steps to record (default %(default)s)",
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="give up if the steps take longer than this many seconds (default %(default)g)",
    )
    parser.add_argument(
        "--directory",
        default="profile",
        metavar="DIRECTORY",
        help="directory for the trace, on the server's machine; it is created if missing, and must "
        "be accessible to its owner only (default %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    server = local_server(options)
    directory = str(user_path(options.directory).absolute())
    try:
        with (
            Client(engine_address(server.port), name="profile", wait_s=WAIT_S) as engine,
            Sampler(server.pid) as sampler,
        ):
            profiled = engine.profile(options.steps, directory, wait_s=options.wait_s)
    except EngineNotReady as error:
        raise Failure(f"the engine is not ready: {error}") from None
    except TimeoutError as error:
        raise Failure(f"{error}: does the server have any load?") from None
    except ServingError as error:
        raise Failure(str(error)) from None
    print(report(profiled, sampler))
    return 0


class Sampler:
    """Samples the CPU times of a process and its descendants, inside a `with` block.

    samples   the samples so far, in order
    names     process id -> name of the program
    """

    def __init__(self, root: int, proc: Path = PROC) -> None:
        self.samples: list[CpuSample] = []
        self.names: dict[int, str] = {}
        self._root, self._proc = root, proc
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            found = descendants(self._root, self._proc)
            self.samples.append(CpuSample(time.time(), found))
            for pid in found.keys() - self.names.keys():
                self.names[pid] = program_name(pid, self._proc).removeprefix(TITLE_PREFIX)
            if self._stop.wait(SAMPLE_EVERY_S):
                return


def descendants(root: int, proc: Path) -> dict[int, float]:
    """Return the CPU time that the process `root` and each of its descendants have used so far, in
    seconds by process id."""
    stats = read_all_stats(proc)
    found = with_descendants(
        {root} & stats.keys(), {pid: stat.parent for pid, stat in stats.items()}
    )
    return {pid: stats[pid].cpu_s for pid in sorted(found)}


def cores_used(samples: list[CpuSample], began: float, ended: float) -> dict[int, float]:
    """Return the average number of cores that each process used, by process id.

    The average covers the time from the last sample before `began`, or else the first sample, to
    the first one after `ended`, or else the last one. Processes that did not exist during all of
    that time are left out. Return {} if there are not two such samples.
    """
    before = [sample for sample in samples if sample.at <= began] or samples[:1]
    after = [sample for sample in samples if sample.at >= ended] or samples[-1:]
    if not before or after[0].at <= before[-1].at:
        return {}
    first, last = before[-1], after[0]
    seconds = last.at - first.at
    return {
        pid: (used - first.cpu_s[pid]) / seconds
        for pid, used in last.cpu_s.items()
        if pid in first.cpu_s
    }


def report(profiled: Profiled, sampler: Sampler) -> str:
    cores = cores_used(sampler.samples, profiled.began, profiled.ended)
    rows = [["process", "pid", "CPU, cores"]]
    rows += [[sampler.names[pid], str(pid), f"{share:.2f}"] for pid, share in cores.items()]
    return (
        f"{profiled.steps} steps in {profiled.ended - profiled.began:.2f} s: {profiled.file}\n\n"
        f"{aligned(rows)}"
    )
