"""Ends replicas under 64 streams. Each stream must end as it would have alone.

    python -m tests.torture.failover [--runs 100] [--streams 64] [--dtypes float32 auto]

A server runs two replicas of a small random model. The answers of all requests are first computed
one after the other. Then, in each run, all are streamed at once, and at a random moment one replica
is ended: by SIGKILL of its engine or of its worker, by a drain, or by a restart of both, one after
the other, whose drains the requests outlast. Token ids, text, finish reasons, logprobs and usage
must be those of the answers computed alone, with the dtype float32 and with the default one. The
table has a row for each way and dtype; the exit code is 1 if any stream differed, was lost or had
an error.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import requests
from tqdm import tqdm

from tests.support.http import metric_of
from tests.support.processes import ROOT, descendants_of
from tests.support.server import Server
from tests.support.streams import StreamedAnswer, StreamRequest, run_all, varied_requests
from tests.support.tiny_checkpoint import FITTING, write_babbling_llama
from tests.support.waiting import eventually
from tests.torture.table import print_table

COLUMNS = {"dtype": 10, "ended by": 14, "runs": 6, "streams": 9, "moved": 8, "wrong": 0}
WAYS = ("kill engine", "kill worker", "drain", "rolling")
READY_S = 60.0
MORE_RUNS = 5
"""Most runs that are added for a row in which no request has moved."""


@dataclass
class FailoverRow:
    """The runs with one dtype in which a replica was ended in one way."""

    dtype: str
    way: str
    num_runs: int = 0
    num_streams: int = 0
    num_moved: int = 0
    wrong: list[str] = field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        counts = self.num_runs, self.num_streams, self.num_moved, len(self.wrong)
        return self.dtype, self.way, *map(str, counts)

    @property
    def tested_nothing(self) -> bool:
        """Whether no killed replica had a request. On a busy machine the clients may read so late
        that the replica has already computed all of its answers."""
        return self.num_runs > 0 and not self.num_moved and self.way.startswith("kill")

    def complaints(self, slack: float) -> list[str]:
        if self.tested_nothing:
            return ["no request was moved, so nothing was tested", *self.wrong]
        return self.wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "auto"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    return print_table(COLUMNS, _rows(options), slack=1.0)


def _rows(options: argparse.Namespace) -> Iterator[FailoverRow]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_babbling_llama(Path(folder), **FITTING)
        runs = -(-options.runs // (len(options.dtypes) * len(options.ways)))
        for dtype in options.dtypes:
            yield from failover_rows(
                model, dtype, options.ways, runs=runs, streams=options.streams, seed=options.seed
            )


def failover_rows(
    model: Path, dtype: str, ways: Sequence[str], *, runs: int, streams: int, seed: int
) -> Iterator[FailoverRow]:
    """Yield a row for each way, after `runs` runs each, or up to MORE_RUNS more if no request of a
    killed replica has moved."""
    dice = random.Random(seed)
    asked = varied_requests(streams, seed)
    drain = ("--drain-s", "0.2")
    with Server(
        *("--replicas", "2", "--restart-limit", "1000", "--dtype", dtype, *drain),
        model=str(model),
    ) as server:
        alone = run_all(server.url, asked, at_once=1)
        for answer in alone:
            assert not answer.error, answer.error
        num_tokens = sum(answer.num_tokens for answer in alone)
        for way in ways:
            row = FailoverRow(dtype, way)
            bar = tqdm(total=runs, desc=f"{dtype}, {way}", disable=not sys.stderr.isatty())
            while row.num_runs < runs + MORE_RUNS * row.tested_nothing:
                _wait_for_both(server)
                before = num_moved(server.url)
                after = dice.randrange(1, num_tokens * 3 // 4)
                replica = dice.randrange(2)
                end = partial(_end, server, way, replica)
                answers = stream_with_fault(server.url, asked, after, end)
                row.num_runs += 1
                row.num_streams += len(answers)
                row.num_moved += num_moved(server.url) - before
                row.wrong += differences(asked, alone, answers)
                if way == "drain":
                    _restart(server)  # a replica that was drained from outside stays down
                bar.update()
            bar.close()
            yield row


def stream_with_fault(
    url: str, asked: Sequence[StreamRequest], after: int, fault: Callable[[], object]
) -> list[StreamedAnswer]:
    """Stream all requests, and call `fault` once `after` tokens have arrived."""
    lock, count = threading.Lock(), 0
    due = threading.Event()

    def on_token(more: int) -> None:
        nonlocal count
        with lock:
            count += more
            if count >= after:
                due.set()

    def cause_fault() -> None:
        due.wait()
        fault()

    ending = threading.Thread(target=cause_fault)
    ending.start()
    answers = run_all(url, asked, on_token, at_once=len(asked))
    due.set()
    ending.join()
    return answers


def _end(server: Server, way: str, replica: int) -> None:
    if way == "rolling":
        _restart(server)
        return
    pid = _pids(server, "worker" if way == "kill worker" else "engine_core")[replica]
    number = signal.SIGTERM if way == "drain" else signal.SIGKILL
    os.kill(pid, number)


def _restart(server: Server) -> None:
    command = [sys.executable, "-P", "-m", "tools", "restart", "--url", server.url]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)


def _pids(server: Server, module: str) -> list[int]:
    found = descendants_of(server.process.pid)
    return sorted(pid for pid, command in found if f"-m {module}" in command)


def num_moved(url: str) -> int:
    """Return how many requests have moved to another engine."""
    return int(metric_of(url, "tidegate_moved_requests_total"))


def _wait_for_both(server: Server) -> None:
    def are_ready() -> bool:
        states = requests.get(server.url + "/readyz", timeout=10).json().get("replicas", [])
        return len(states) == 2 and all(state["ready"] for state in states)

    eventually(are_ready, within_s=READY_S)


def differences(
    asked: Sequence[StreamRequest], alone: list[StreamedAnswer], answers: list[StreamedAnswer]
) -> list[str]:
    """Return how streamed answers differ from those computed alone, with a line per request."""
    wrong = []
    for number, (one, other) in enumerate(zip(alone, answers, strict=True)):
        if one != other:
            names = [n for n in StreamedAnswer.__slots__ if getattr(one, n) != getattr(other, n)]
            wrong.append(f"request {number}: {', '.join(names)} differ: {other.error}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
