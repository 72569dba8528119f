"""Batches whose results have no room: the store has reached its limit, or the disk is full."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from gateway.store.batch_database import BatchDatabase
from gateway.store.batch_queries import NewBatch, NewFile
from protocol.engine.messages import Generate
from tests.integration.batches.conftest import client_of
from tests.integration.batches.test_batches import COMPLETIONS, awaited, created, rows_of, uploaded
from tests.support.batches import batch_line, complaints
from tests.support.gateway_process import GatewayProcess
from tests.support.scripted_engine import Reply, ScriptedEngine, text_of, text_reply
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

KIB, MIB = 1 << 10, 1 << 20
NUM_LINES, ANSWER_CHARS = 60, 30_000
ANSWER_MIB = NUM_LINES * ANSWER_CHARS / MIB
assert ANSWER_MIB > 1.5


def long_lines() -> list[dict[str, Any]]:
    """Return lines whose answers need more than ANSWER_MIB in total."""
    return [
        batch_line(f"line-{n}", {"prompt": f"prompt {n}", "max_tokens": ANSWER_CHARS + 1})
        for n in range(NUM_LINES)
    ]


class CountingEngine:
    """An engine with long answers, which counts how often it computes each prompt.

    pauses_at   number of different prompts from which on it waits until `resume`; 0: it never does
    """

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()  # the engine has a thread of its own
        self.pauses_at = 0
        self.counts: Counter[str] = Counter()
        engine.script = self._reply

    def _reply(self, generate: Generate) -> Reply:
        with self._lock:
            self.counts[text_of(generate.prompt.tolist())] += 1
            self._engine.is_paused = 0 < self.pauses_at <= len(self.counts)
        return text_reply("x" * ANSWER_CHARS, size=ANSWER_CHARS)

    def resume(self, pauses_at: int = 0) -> None:
        with self._lock:
            self.pauses_at, self._engine.is_paused = pauses_at, False

    def has_computed_once(self, num_lines: int) -> bool:
        return len(self.counts) == num_lines and set(self.counts.values()) == {1}


@pytest.fixture
def counting(engine: ScriptedEngine) -> Iterator[CountingEngine]:
    counting = CountingEngine(engine)
    yield counting
    counting.resume()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, *, except_bytes: int) -> Path:
    """Fill a disk with a file, and return the file."""
    ballast = disk / "ballast"
    stat = os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - except_bytes)
    return ballast


def metric(gateway: GatewayProcess, name: str, **labels: str) -> float:
    """Return the value of a metric; -1 if it is not exported."""
    text = requests.get(f"{gateway.url}/metrics", timeout=20).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    values = [s.value for s in samples if (s.name, s.labels) == (name, labels)]
    return values[0] if values else -1.0


def lines_stored(gateway: GatewayProcess, num_completed: int) -> bool:
    """Wait until the gateway has counted these lines, and return whether no line has failed."""
    name = "tidegate_batch_lines_total"
    is_counted = eventually(lambda: metric(gateway, name, result="completed") == num_completed)
    return is_counted and metric(gateway, name, result="failed") == 0


def test_a_batch_waits_for_room_on_a_full_disk_and_computes_each_line_once(
    engine: ScriptedEngine, counting: CountingEngine, disk: Path
) -> None:
    gateway = GatewayProcess(engine=engine.address, file_store=str(disk / "files.db"))
    lines = long_lines()
    with gateway, client_of(gateway.await_ready()) as client:
        uploaded(client, lines)  # the store has its tables
        ballast = fill(disk, except_bytes=512 * KIB)
        batch = created(client, lines).id
        line = gateway.line_with(f"the batch {batch} pauses", on_stderr=True)
        assert (
            "its results cannot be stored: the file store cannot be used: its disk is full" in line
        )
        assert eventually(lambda: metric(gateway, "tidegate_paused_batches") == 1)
        paused = client.batches.retrieve(batch)
        assert (paused.status, paused.errors) == ("in_progress", None)
        assert paused.request_counts.completed < NUM_LINES
        with pytest.raises(
            Exception, match="the file store cannot be used: its disk is full"
        ) as refused:
            client.files.create(file=("in.jsonl", b"x" * MIB), purpose="batch")
        assert refused.value.status_code == 503  # type: ignore[attr-defined]
        assert not gateway.process.poll()
        ballast.unlink()
        done = awaited(client, batch)
        rows = rows_of(client, done.output_file_id)
    assert complaints(lines, rows) == []
    assert counting.has_computed_once(NUM_LINES)
    assert gateway.log.count("pauses") == gateway.log.count("continues") == 1
    assert "Traceback" not in gateway.log


@pytest.fixture
def small(engine: ScriptedEngine, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway that computes one line at a time and has room for a part of the results."""
    options: dict[str, Any] = {"file_store": str(tmp_path / "files.db"), "file_store_mib": 1}
    with GatewayProcess(engine=engine.address, batch_concurrency=1, **options) as gateway:
        yield gateway.await_ready()


def test_a_batch_pauses_in_a_full_store_and_continues_when_a_file_was_deleted(
    small: GatewayProcess, counting: CountingEngine
) -> None:
    lines = long_lines()[: NUM_LINES // 2]
    counting.pauses_at = 20
    with client_of(small) as client:
        other = uploaded(client, b"x" * (600 * KIB))
        batch = created(client, lines).id
        paused = awaited(client, batch, lambda found: found.errors is not None)
        assert paused.status == "in_progress"
        (problem,) = paused.errors.data
        assert problem.code == "file_store_full"
        assert "--file-store-mib" in problem.message
        assert client.batches.list().data[0].errors.data == [problem]
        num_stored = client.batches.retrieve(batch).request_counts.completed
        assert 0 < num_stored < 20
        assert eventually(lambda: metric(small, "tidegate_file_store_bytes") > MIB)
        assert metric(small, "tidegate_file_store_limit_bytes") == MIB
        assert metric(small, "tidegate_open_batches", status="in_progress") == 1
        assert lines_stored(small, num_stored)
        counting.resume()
        line = small.line_with(f"the batch {batch} pauses", on_stderr=True)
        assert "the file store is full (--file-store-mib)" in line
        client.files.delete(other)
        done = awaited(client, batch)
        assert (done.status, done.errors) == ("completed", None)
        rows = rows_of(client, done.output_file_id)
        assert eventually(lambda: metric(small, "tidegate_open_batches", status="in_progress") == 0)
        assert metric(small, "tidegate_paused_batches") == 0
        assert lines_stored(small, len(lines))
    assert complaints(lines, rows) == []
    assert counting.has_computed_once(len(lines))
    small.line_with(f"the batch {batch} continues", on_stderr=True)


def test_several_gateway_processes_report_their_store_as_one(
    engine: ScriptedEngine, counting: CountingEngine, tmp_path: Path
) -> None:
    counting.pauses_at = 1
    path, status = str(tmp_path / "files.db"), "in_progress"
    gateway = GatewayProcess(engine=engine.address, file_store=path, file_store_mib=8, gateways=2)
    with gateway, client_of(gateway.await_ready()) as client:
        batch = created(client, long_lines()).id
        assert eventually(lambda: metric(gateway, "tidegate_open_batches", status=status) == 1)
        assert metric(gateway, "tidegate_file_store_limit_bytes") == 8 * MIB
        counting.resume()
        assert awaited(client, batch).status == "completed"
        assert eventually(lambda: metric(gateway, "tidegate_open_batches", status=status) == 0)
        assert lines_stored(gateway, NUM_LINES)
        assert eventually(
            lambda: ANSWER_MIB * MIB < metric(gateway, "tidegate_file_store_bytes") < 8 * MIB
        )


FULL_AT = 38
assert MIB < (FULL_AT - 1) * ANSWER_CHARS, "the answers before this one fill the store"


def paused(gateway: GatewayProcess, counting: CountingEngine, client: OpenAI) -> str:
    """Create a batch, and wait until it has paused and none of its lines is open. Two of its
    results, or more, have no room."""
    counting.pauses_at = FULL_AT
    batch = created(client, long_lines()).id
    awaited(client, batch, lambda found: found.errors is not None)
    counting.resume(pauses_at=FULL_AT + 1)
    assert eventually(lambda: metric(gateway, "tidegate_paused_batches") == 1)
    counting.resume()
    assert eventually(lambda: metric(gateway, "tidegate_open_answers") == 0)
    return str(batch)


def test_a_gateway_that_stops_with_a_full_store_keeps_the_results(
    engine: ScriptedEngine, counting: CountingEngine, small: GatewayProcess, tmp_path: Path
) -> None:
    with client_of(small) as client:
        batch = paused(small, counting, client)
        small.signal(signal.SIGTERM)
        assert small.end() == 0, small.log
    options: dict[str, Any] = {"file_store": str(tmp_path / "files.db"), "file_store_mib": 8}
    with (
        GatewayProcess(engine=engine.address, **options) as gateway,
        client_of(gateway.await_ready()) as client,
    ):
        done = awaited(client, batch)
        assert complaints(long_lines(), rows_of(client, done.output_file_id)) == []
    assert counting.has_computed_once(NUM_LINES)


def test_a_batch_in_a_full_store_ends_with_its_window(
    engine: ScriptedEngine, counting: CountingEngine, small: GatewayProcess, tmp_path: Path
) -> None:
    path = tmp_path / "files.db"
    with client_of(small) as client:
        file = uploaded(client, long_lines()[:3])
        with closing(BatchDatabase(str(path), max_bytes=1 << 30, max_age_s=1e6)) as database:
            now = time.time()
            database.begin_file(NewFile("ballast", "o", "batch", "x"), 1, now)
            database.add_piece("ballast", 0, b"x" * (2 * MIB))
            new = NewBatch(
                id="batch_late",
                owner=hashlib.sha256(b"k1").hexdigest()[:32],
                caller="",
                endpoint=COMPLETIONS,
                input_file=file,
                output_file="file-out",
                error_file="file-err",
                window="1m",
                metadata=b"null",
                output_s=3600,
                expires_at=now + 3,
            )
            assert database.create_batch(new, 10, now) is not None
        done = awaited(client, "batch_late")
        assert done.status == "expired"
        counts = done.request_counts
        assert counts.completed + counts.failed == counts.total == 3
