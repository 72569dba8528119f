"""Ends engines under 64 streams. Each stream must end as it would have alone.

    python -m tests.torture.failover [--runs 100] [--streams 64] [--dtypes float32 auto]

One server runs two replicas of a small random model, another one two prefill and two decode engines
of it. The answers of all requests are first computed one after the other. Then, in each run, all
are streamed at once, and at a random moment one engine is ended: by SIGKILL of the engine or of its
worker; a replica also by a drain, or by a restart of both, one after the other, whose drains the
requests outlast. Token ids, text, finish reasons, logprobs and usage must be those of the answers
computed alone, with the dtype float32 and with the default one. The table has a row for each way
and dtype; the exit code is 1 if any stream differed, was lost or had an error.
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
from typing import Protocol

import requests
from tqdm import tqdm

from tests.support.http import metric_of
from tests.support.processes import ROOT, descendants_of
from tests.support.server import Server
from tests.support.split_cluster import SplitCluster
from tests.support.streams import StreamedAnswer, StreamRequest, run_all, varied_requests
from tests.support.tiny_checkpoint import FITTING, write_babbling_llama
from tests.support.waiting import eventually
from tests.torture.table import print_table

COLUMNS = {"dtype": 10, "ended by": 19, "runs": 6, "streams": 9, "moved": 8, "wrong": 0}
WAYS = ("kill engine", "kill worker", "drain", "rolling")
SPLIT_WAYS = ("kill decode", "kill decode worker", "kill prefill")
READY_S = 60.0
MORE_RUNS = 5
"""Most runs that are added for a row in which no request has moved."""


@dataclass
class FailoverRow:
    """The runs with one dtype in which an engine was ended in one way."""

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
        """Whether no killed engine had a request. On a busy machine the clients may read so late
        that the engine has already computed all of its answers. When tokens arrive, most prompts
        have left the prefill engines, so these may have none."""
        is_tested = self.way.startswith("kill") and self.way != "kill prefill"
        return self.num_runs > 0 and not self.num_moved and is_tested

    def complaints(self, slack: float) -> list[str]:
        if self.tested_nothing:
            return ["no request was moved, so nothing was tested", *self.wrong]
        return self.wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "auto"])
    ways = (*WAYS, *SPLIT_WAYS)
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    return print_table(COLUMNS, _rows(options), slack=1.0)


def _rows(options: argparse.Namespace) -> Iterator[FailoverRow]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_babbling_llama(Path(folder), **FITTING)
        runs = -(-options.runs // (len(options.dtypes) * len(options.ways)))
        for dtype in options.dtypes:
            for rows, known in ((failover_rows, WAYS), (split_rows, SPLIT_WAYS)):
                if ways := [way for way in options.ways if way in known]:
                    yield from rows(
                        model, dtype, ways, runs=runs, streams=options.streams, seed=options.seed
                    )


class FailoverTarget(Protocol):
    """A server whose engines are ended."""

    @property
    def url(self) -> str: ...

    def wait_until_ready(self) -> None:
        """Wait until all engines are used."""

    def end(self, way: str, engine: int) -> None:
        """End an engine (0 or 1) in this way."""

    def restore(self, way: str) -> None:
        """Start what `end` has ended and what nothing starts again."""


class ReplicaTarget:
    """Two replicas."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.url = server.url

    def wait_until_ready(self) -> None:
        def are_ready() -> bool:
            states = requests.get(self.url + "/readyz", timeout=10).json().get("replicas", [])
            return len(states) == 2 and all(state["ready"] for state in states)

        eventually(are_ready, within_s=READY_S)

    def end(self, way: str, engine: int) -> None:
        if way == "rolling":
            _restart(self._server)
            return
        pid = _pids(self._server, "worker" if way == "kill worker" else "engine_core")[engine]
        os.kill(pid, signal.SIGTERM if way == "drain" else signal.SIGKILL)

    def restore(self, way: str) -> None:
        if way == "drain":
            _restart(self._server)  # a replica that was drained from outside stays down


class SplitTarget:
    """Two prefill and two decode engines."""

    def __init__(self, server: SplitCluster) -> None:
        self._server, self._killed = server, server.d[0]
        self.url, self.wait_until_ready = server.url, server.wait_until_ready

    def end(self, way: str, engine: int) -> None:
        engines = self._server.p if way == "kill prefill" else self._server.d
        self._killed = engines[engine]
        self._killed.kill(only_worker=way.endswith("worker"))

    def restore(self, way: str) -> None:
        self._killed.restart()


def failover_rows(
    model: Path, dtype: str, ways: Sequence[str], *, runs: int, streams: int, seed: int
) -> Iterator[FailoverRow]:
    """Yield a row for each way in which a replica is ended, as `_rows_of` does."""
    options = ("--replicas", "2", "--restart-limit", "1000", "--dtype", dtype, "--drain-s", "0.2")
    with Server(*options, model=str(model)) as server:
        yield from _rows_of(
            ReplicaTarget(server), dtype, ways, runs=runs, streams=streams, seed=seed
        )


def split_rows(
    model: Path, dtype: str, ways: Sequence[str], *, runs: int, streams: int, seed: int
) -> Iterator[FailoverRow]:
    """Yield a row for each way in which an engine of a split server is ended."""
    with (
        tempfile.TemporaryDirectory() as folder,
        SplitCluster(Path(folder) / "split", model, dtype=dtype) as server,
    ):
        yield from _rows_of(SplitTarget(server), dtype, ways, runs=runs, streams=streams, seed=seed)


def _rows_of(
    target: FailoverTarget,
    dtype: str,
    ways: Sequence[str],
    *,
    runs: int,
    streams: int,
    seed: int,
) -> Iterator[FailoverRow]:
    """Yield a row for each way, after `runs` runs each, or up to MORE_RUNS more if no request of a
    killed engine has moved."""
    dice = random.Random(seed)
    asked = varied_requests(streams, seed)
    alone = run_all(target.url, asked, at_once=1)
    for answer in alone:
        assert not answer.error, answer.error
    num_tokens = sum(answer.num_tokens for answer in alone)
    for way in ways:
        row = FailoverRow(dtype, way)
        bar = tqdm(total=runs, desc=f"{dtype}, {way}", disable=not sys.stderr.isatty())
        while row.num_runs < runs + MORE_RUNS * row.tested_nothing:
            target.wait_until_ready()
            before = num_moved(target.url)
            # Most prompts are at the prefill engines only before the first tokens.
            most = num_tokens // 20 if way == "kill prefill" else num_tokens * 3 // 4
            after = dice.randrange(1, most)
            end = partial(target.end, way, dice.randrange(2))
            answers = stream_with_fault(target.url, asked, after, end)
            row.num_runs += 1
            row.num_streams += len(answers)
            row.num_moved += num_moved(target.url) - before
            row.wrong += differences(asked, alone, answers)
            target.restore(way)
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


def _restart(server: Server) -> None:
    command = [sys.executable, "-P", "-m", "tools", "restart", "--url", server.url]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)


def _pids(server: Server, module: str) -> list[int]:
    found = descendants_of(server.process.pid)
    return sorted(pid for pid, command in found if f"-m {module}" in command)


def num_moved(url: str) -> int:
    """Return how many requests have moved to another engine."""
    return int(metric_of(url, "tidegate_moved_requests_total"))


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
