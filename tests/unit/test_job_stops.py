"""Jobs of batches that stop, or pause because their results have no room: what they compute, and
what they store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import gevent
import msgspec
import pytest
from gevent.lock import BoundedSemaphore, Semaphore

from gateway.api.batches.job import BatchJob, JobContext, LineSlots
from gateway.auth.caller import Caller
from gateway.http.body_memory import BodyMemory
from gateway.http.internal_call import InternalAnswer, InternalOrigin
from gateway.store.batch_database import BatchDatabase
from gateway.store.batch_queries import NewFile, StoredBatch
from tests.support.batches import batch_line, jsonl
from tests.support.waiting import HANG_S, eventually
from tests.unit.test_batch_database import NOW, OWNER, opened, put_batch, put_file
from tests.unit.test_result_buffer import CountingStore

NUM_LINES, NUM_SLOTS = 9, 2
MIB = 1 << 20
ANSWER = b'"%b"' % (b"x" * 10_000)
awaited = partial(eventually, pause=gevent.sleep)


class JobScene:
    """A batch whose window does not end, and its jobs, which have NUM_SLOTS slots. A line is
    answered when a test permits it.

    num_open  number of lines that wait for their answers
    counts    how often each line was answered
    permits   number of lines that may still be answered
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = CountingStore(path)
        self.num_open = 0
        self.counts: Counter[str] = Counter()
        self.permits = Semaphore(0)
        self._context = JobContext(
            self.store,
            self._answer,
            lambda name, owner: Caller(name, frozenset(), owner),
            LineSlots(lambda: NUM_SLOTS),
            BodyMemory(NUM_LINES * MIB),
            BoundedSemaphore(),
            on_stored=lambda results: None,
            max_lines=NUM_LINES,
            max_line_bytes=MIB,
        )
        self._jobs: list[gevent.Greenlet[..., None]] = []
        lines = [batch_line(str(n), {"prompt": str(n)}) for n in range(1, 1 + NUM_LINES)]

        def create(database: BatchDatabase) -> None:
            put_file(database, "file-in", jsonl(lines).encode())
            put_batch(database, expires_at=float("inf"))

        self.store.call(create)

    def _answer(self, path: str, body: bytes, origin: InternalOrigin) -> InternalAnswer:
        self.num_open += 1
        try:
            self.permits.acquire()
        finally:
            self.num_open -= 1
        self.counts[msgspec.json.decode(body)["prompt"]] += 1
        return InternalAnswer(200, {}, ANSWER)

    def start(self) -> BatchJob:
        """Start a job of the batch."""
        claimed = self.store.call(lambda database: database.claim(NOW))
        assert claimed is not None
        job = BatchJob(self._context, claimed)
        self._jobs.append(gevent.spawn(job.run))
        return job

    def end(self) -> None:
        """Wait until the job that was started last has ended, and release the batch."""
        self._jobs[-1].get(timeout=HANG_S)
        self.store.call(lambda database: database.release("batch_1"))

    def paused(self, *, disk_is_full: bool = False) -> BatchJob:
        """Return a new job that has paused, with results that have no room."""
        job = self.start()
        assert awaited(lambda: self.num_open == NUM_SLOTS)
        if disk_is_full:
            self.store.set_disk_pages(1)  # SQLite takes the present size if it is larger
        else:
            self.fill()
        for _ in range(3):
            self.permits.release()
        assert awaited(lambda: job.is_paused and self.counts.total() == 3)
        return job

    def fill(self) -> None:
        """Fill the store, until `empty`."""
        with closing(opened(self.path, "other")) as database:
            database.begin_file(NewFile("ballast", OWNER, "batch", "x"), 100, NOW)
            database.add_piece("ballast", 0, bytes(2 * MIB))

    def empty(self) -> None:
        self.store.call(lambda database: database.abandon_file("ballast"))

    def batch(self) -> StoredBatch:
        found = self.store.call(lambda database: database.get_batch("batch_1", OWNER))
        assert found is not None
        return found

    def status(self) -> str:
        return self.batch().status

    def close(self) -> None:
        gevent.killall(self._jobs)
        self.store.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[JobScene]:
    with closing(JobScene(tmp_path / "files.db")) as scene:
        yield scene


def test_a_job_that_is_stopped_aborts_its_lines_and_starts_no_more(scene: JobScene) -> None:
    """The lines that are aborted give their slots back."""
    job = scene.start()
    assert awaited(lambda: scene.num_open == NUM_SLOTS)
    job.stop(aborts=True)
    scene.end()
    assert scene.num_open == scene.counts.total() == 0


def test_a_paused_batch_that_is_cancelled_keeps_all_results(scene: JobScene) -> None:
    job = scene.paused()
    assert scene.store.call(lambda database: database.cancel_batch("batch_1", OWNER, NOW))
    job.stop(aborts=True)
    scene.end()
    assert scene.batch().num_completed == scene.counts.total() == 3
    scene.start()
    scene.end()
    assert (scene.status(), scene.batch().num_completed) == ("cancelled", 3)
    assert scene.batch().has_output


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "drained"])
def test_a_job_that_stops_on_a_full_disk_waits_for_room(
    scene: JobScene, is_cancelled: bool
) -> None:
    job = scene.paused(disk_is_full=True)
    for _ in range(NUM_SLOTS if not is_cancelled else 0):
        scene.permits.release()  # a drain does not abort the open lines
    num_attempts = len(scene.store.errors)
    job.stop(aborts=is_cancelled)
    assert awaited(lambda: scene.num_open == 0 and len(scene.store.errors) > num_attempts)
    scene.store.set_disk_pages(None)
    scene.end()
    assert scene.batch().num_completed == scene.counts.total() >= 3


def test_a_job_that_is_closed_on_a_full_disk_ends_at_once(
    scene: JobScene, caplog: pytest.LogCaptureFixture
) -> None:
    job = scene.paused(disk_is_full=True)
    job.stop(aborts=False)
    job.close()
    scene.end()
    assert scene.batch().num_completed == 0
    assert "the batch batch_1 loses 3 results" in caplog.text


@pytest.mark.parametrize("aborts", [True, False])
def test_a_paused_batch_that_is_continued_computes_no_line_twice(
    scene: JobScene, aborts: bool
) -> None:
    job = scene.paused()
    for _ in range(2 * NUM_LINES):
        scene.permits.release()
    job.stop(aborts=aborts)
    scene.end()
    scene.empty()
    scene.start()
    scene.end()
    assert scene.status() == "completed"
    assert set(scene.counts.values()) == {1}
    assert scene.batch().num_completed == len(scene.counts) == NUM_LINES


def test_a_job_that_begins_in_a_full_store_computes_no_line_until_there_is_room(
    scene: JobScene,
) -> None:
    """Else each restart would add results to a full store."""
    job = scene.start()
    assert awaited(lambda: scene.num_open == NUM_SLOTS)
    job.close()
    scene.end()
    scene.fill()
    for _ in range(2 * NUM_LINES):
        scene.permits.release()
    job = scene.start()
    assert awaited(lambda: job.is_paused)
    assert scene.counts.total() == 0
    scene.empty()
    scene.end()
    assert scene.status() == "completed"
    assert scene.batch().num_completed == scene.counts.total() == NUM_LINES
