"""The store's file with several processes at once, and after one of them is killed."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from gateway.store.database import Database
from gateway.store.queries import Interruption
from tests.support.processes import ROOT, Program

WRITER = """
import sys, time
from gateway.store.database import Database
from gateway.store.queries import Interruption, NewRun, RunBatch, StoredRecord

path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
interrupt = lambda run, number, body: Interruption(b"died", b"died")
database = Database(path, {"kind": interrupt}, max_bytes=1 << 30, max_age_s=1e6, runner=name)
print("open", flush=True)
for n in range(count):
    now = time.time()
    run = f"{name}-{n}"
    queued = StoredRecord(run, "o", now, None, b"[]", b"queued")
    database.start_run(NewRun(run, "o", "kind"), queued, now)
    for k in range(5):
        events = [b"%d" % i for i in range(10 * k, 10 * k + 10)]
        database.append([RunBatch(run, 10 * k, events)], now, 60)
    database.renew_leases([], 0, now)
    database.append([RunBatch(run, 50, [b"50"], True, b"done")], now, 60)
    print(run, flush=True)
"""


def writer(path: Path, name: str, count: int) -> Program:
    arguments = ["-P", "-c", WRITER, str(path), name, str(count)]
    return Program(arguments, environment={"PYTHONPATH": str(ROOT)})


def opened(path: Path) -> Database:
    def interrupt(run: str, number: int, body: bytes | None) -> Interruption:
        return Interruption(b"died", b"died")

    bounds = {"max_bytes": 1 << 30, "max_age_s": 1e6}
    return Database(str(path), {"kind": interrupt}, runner="reader", **bounds)  # type: ignore[arg-type]


def test_processes_write_side_by_side_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    names, count = ("a", "b", "c"), 40
    with ExitStack() as stack:
        for program in [stack.enter_context(writer(path, name, count)) for name in names]:
            assert program.end() == 0, program.output
        database = stack.enter_context(closing(opened(path)))
        for run in (f"{name}-{n}" for name in names for n in range(count)):
            record = database.get(run, "o", time.time())
            assert record is not None
            assert record.body == b"done"
            page = database.page(run, "o", -1, time.time())
            assert page is not None
            assert page.frames == [b"%d" % n for n in range(51)]


@pytest.mark.parametrize("after", [3, 8, 21])
def test_a_process_that_is_killed_leaves_whole_batches(tmp_path: Path, after: int) -> None:
    path = tmp_path / "r.db"
    with writer(path, "a", 100_000) as program:
        program.line_with("open")
        program.line_with(f"a-{after}")
        program.process.kill()
        program.end()
        written = [line for line in program.out if line.startswith("a-")]
    with closing(opened(path)) as database:
        for run in written:
            record = database.get(run, "o", time.time())
            assert record is not None
            assert record.body == b"done"
        last = f"a-{len(written)}"
        page = database.page(last, "o", -1, time.time())
        if page is not None:  # it was begun
            assert page.frames == [b"%d" % n for n in range(len(page.frames))]
            assert len(page.frames) % 10 in (0, 1)
            ended = database.page(last, "o", -1, time.time() + 3600)
            assert ended is not None
            assert ended.is_last
            assert ended.frames[-1] in (b"died", b"50")
