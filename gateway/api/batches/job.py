"""The execution of one batch in this process: checks its lines, computes them, stores the results.

A job can be interrupted at any moment. The store has the results so far, so the same job continues
in this process or another: it computes the lines that have no result. It pauses while the store has
no room for results.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import gevent
import msgspec
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gevent.pool import Group

from gateway.api.batches.responses import BatchProblem
from gateway.api.batches.result_buffer import ResultBuffer
from gateway.auth.caller import Caller
from gateway.context import REQUEST_ID_HEADER
from gateway.http.body import SMALL_BYTES
from gateway.http.body_memory import BodyMemory, BodyReservation
from gateway.http.internal_call import InternalAnswer, InternalOrigin
from gateway.store.batch_database import BatchDatabase, LineResult
from gateway.store.batch_queries import StoredBatch
from gateway.store.batch_states import BatchEvent, BatchStatus
from gateway.store.sqlite_file import Store
from protocol.shared.batch_retries import LineOutcome, RetryPolicy
from protocol.shared.batches import (
    BadLine,
    BatchFailure,
    BatchResponse,
    BatchResult,
    digest_of_id,
    json_of,
    read_line,
    split_lines,
)
from protocol.wire.errors import Overloaded

FLUSH_S = 0.1
"""Interval at which new results are stored."""
MAX_PROBLEMS = 100
"""Maximum number of malformed lines that a failed batch lists."""
READ_BYTES = 1 << 20
OPEN_PER_SLOT = 2
"""Maximum number of lines of a job that are open, for each slot. Some of them may wait to be tried
again, without a slot."""
SLOT_WAIT_S = 60.0
EXPIRED = BatchFailure(
    "batch_expired", "this line was not computed within the completion window of its batch"
)
NO_KEY = BatchFailure("invalid_api_key", "the API key that created the batch is not valid any more")
T = TypeVar("T")
Answer = Callable[[str, bytes, InternalOrigin], InternalAnswer]
"""Answers a POST request with this path and body."""


class LineSlots:
    """Limits the lines that all jobs of this process compute at the same time. Jobs take turns.

    limit  returns the current limit
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._num_used = 0
        self._waiting: deque[Event] = deque()

    @property
    def size(self) -> int:
        return max(1, self._limit())

    def acquire(self, timeout_s: float) -> bool:
        """Wait for a slot. Return False if there was none for `timeout_s` seconds."""
        turn = Event()
        self._waiting.append(turn)
        self._admit()
        with contextlib.ExitStack() as on_failure:  # the greenlet may be killed while it waits
            on_failure.callback(self._cancel, turn)
            if not turn.wait(timeout_s):
                return False
            on_failure.pop_all()
        return True

    def _cancel(self, turn: Event) -> None:
        if turn.is_set():
            self.release()
        else:
            self._waiting.remove(turn)

    def release(self) -> None:
        self._num_used -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._num_used < self.size:
            self._num_used += 1
            self._waiting.popleft().set()


class LineSlot:
    """The resources for computing one line of a batch: a slot, and memory for the line. Initially,
    the object holds neither. It gives both back while the line waits for a retry.

    owner      whose share of the memory the line uses
    num_bytes  length of the line
    """

    def __init__(self, slots: LineSlots, memory: BodyMemory, owner: str, num_bytes: int) -> None:
        self._slots = slots
        self._memory = memory
        self._owner = owner
        self._num_bytes = num_bytes
        self._reservation: BodyReservation | None = None

    def acquire(self, timeout_s: float) -> bool:
        """Wait for a slot, and then for memory. Return False if there was none in time."""
        if not self._slots.acquire(timeout_s):
            return False
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._slots.release)
            reservation = self._memory.reservation(self._owner, self._num_bytes)
            on_failure.callback(reservation.close)
            with contextlib.suppress(Overloaded):
                reservation.grow(self._num_bytes, timeout_s)
                reservation.keep()
                self._reservation = reservation
                on_failure.pop_all()
        return self._reservation is not None

    def release(self) -> None:
        """Release the slot and the memory. May be called twice."""
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
            self._slots.release()


@dataclass(slots=True, eq=False)
class InputLine:
    """A line of a batch's input file. Its text may be dropped while the line waits for a slot, for
    memory or for a retry, because many lines may wait. The text is then read from the file
    again."""

    number: int
    #: The text; None: it must be read again.
    data: bytes | None
    #: The number of the last piece of the file that ends before the line.
    after: int
    num_bytes: int
    digest: bytes

    @classmethod
    def read(cls, number: int, data: bytes, after: int) -> InputLine:
        return cls(number, data, after, len(data), _digest(data))


@dataclass(frozen=True, slots=True)
class JobContext:
    """The state that the jobs of a process share."""

    store: Store[BatchDatabase]
    answer: Answer
    #: Returns the caller with this key name and owner; None if the key is not valid any more.
    caller: Callable[[str, str], Caller | None]
    slots: LineSlots
    #: The memory for open lines.
    memory: BodyMemory
    #: Held while a line is read, so that the parts of only one line are in memory.
    reading: BoundedSemaphore
    #: Counts the results that were stored.
    on_stored: Callable[[Sequence[LineResult]], None]
    max_lines: int
    max_line_bytes: int


class BatchJob:
    """One batch that this process holds the lease of. `run` executes it, in a greenlet."""

    def __init__(self, context: JobContext, batch: StoredBatch) -> None:
        self.batch = batch
        self._context = context
        self._lines = Group()
        self._buffer = ResultBuffer(context.store, batch, context.on_stored)
        self._is_stopping = False
        self._is_closing = False
        self._failure: BaseException | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the batch waits for room for its results."""
        return self._buffer.is_paused

    def stop(self, *, aborts: bool) -> None:
        """Start no more lines. With `aborts`, abort those that are being computed. The job ends
        when its results are stored. On a full disk, it waits for room."""
        if not self._is_stopping:
            self._is_stopping = True
            self._buffer.retry_now()
        if aborts:
            self._lines.kill(block=False)

    def close(self) -> None:
        """Abort the open lines, and end after one more attempt to store the results."""
        self._is_closing = True
        self.stop(aborts=True)

    def run(self) -> None:
        """Execute the batch until it ends, is stopped or is lost to another process. Raises
        sqlite3.Error if the store cannot be used."""
        status: BatchStatus | None = self.batch.status
        if status is BatchStatus.VALIDATING:
            status = self._validate()
        if status is BatchStatus.IN_PROGRESS:
            status = self._compute()
        if status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING):
            self._move(BatchEvent.PUBLISHED)

    # ---- the lines

    def _input_lines(self, start: int = -1) -> Iterator[InputLine]:
        """Yield the lines of the file from the stored piece after number `start` on. If a line is
        cut by the start of that piece, its rest comes first."""
        after = last = start

        def pieces() -> Iterator[bytes]:
            nonlocal last
            for number, data in self._pieces(start):
                last = number
                yield data

        lines = split_lines(pieces(), self._context.max_line_bytes)
        while True:
            with self._context.reading:
                found = next(lines, None)
            if found is None:
                return
            line = InputLine.read(*found, after)
            del found  # only `line` holds the text, which may be dropped
            yield line
            after = last - 1  # the next line begins in the piece in which this one ends

    def _pieces(self, after: int) -> Iterator[tuple[int, bytes]]:
        while found := self._call(partial(_some_pieces, self.batch.input_file, after)):
            after = found[-1][0]
            for piece in found:
                yield piece
                gevent.sleep(0)  # other greenlets run between two pieces

    def _text_of(self, line: InputLine) -> bytes:
        """Return the text of a line, and drop the text that `line` holds, to free memory. If it
        holds none, read the input file again. Raises LookupError if the file does not have the line
        any more."""
        data, line.data = line.data, None
        if data is not None:
            return data
        for found in self._input_lines(line.after):
            if found.digest == line.digest and found.data is not None:
                return found.data
        raise LookupError(f"line {line.number} is not in the input file any more")

    def _validate(self) -> BatchStatus | None:
        """Check all lines. Return the new status; None if the batch was lost or cancelled."""
        problems: list[BatchProblem] = []
        ids: set[bytes] = set()
        num_lines = 0
        try:
            for line in self._input_lines():
                if self._is_stopping:
                    return None
                num_lines += 1
                problem = self._problem(line.number, self._text_of(line), ids)
                if problem is not None:
                    problems.append(problem)
                if len(problems) >= MAX_PROBLEMS or num_lines > self._context.max_lines:
                    break
        except BadLine as bad:
            problems.append(BatchProblem("line_too_long", bad.message))
        if num_lines > self._context.max_lines:
            limit = self._context.max_lines
            problems.append(BatchProblem("too_many_tasks", f"more than {limit:,} lines"))
        if not num_lines and not problems:
            problems.append(BatchProblem("empty_file", "the input file has no lines"))
        name = self.batch.id
        if problems:
            errors = msgspec.json.encode(problems)
            self._call(lambda database: database.set_errors(name, errors))
            return self._move(BatchEvent.INVALID)
        self._call(lambda database: database.set_total(name, num_lines))
        return self._move(BatchEvent.VALID)

    def _problem(self, number: int, data: bytes, ids: set[bytes]) -> BatchProblem | None:
        """Return what is wrong with a line; None if it is well-formed. Add a digest of the line's
        custom_id to `ids`, which has those of the earlier lines."""
        try:
            line = read_line(data, self.batch.endpoint)
        except BadLine as bad:
            code = "invalid_json_line" if bad.field is None else "invalid_line"
            return BatchProblem(code, bad.message, number, bad.field)
        own = digest_of_id(line.custom_id)
        if own in ids:
            message = f"custom_id: an earlier line has the id {line.custom_id[:64]!r}"
            return BatchProblem("duplicate_custom_id", message, number, "custom_id")
        ids.add(own)
        return None

    def _compute(self) -> BatchStatus | None:
        """Compute the lines without results. Return the new status; None if the batch is not done
        because the job was stopped."""
        self._flush()  # whether there is room for results
        is_computed = Event()
        flusher = gevent.spawn(self._flush_until, is_computed)
        flusher.link_exception(self._on_exception)
        try:
            done = self._call(partial(_done_lines, self.batch))
            for line in self._input_lines():
                if line.number not in done and not self._start(line):
                    break
            self._lines.join()
            while not self._buffer.is_empty and not self._is_closing:
                gevent.sleep(FLUSH_S)
        finally:
            self._lines.kill()
            is_computed.set()
            flusher.join()  # not killed, because it may be storing the last results
            self._flush(is_last=True)
        if self._failure is not None:
            raise self._failure
        if self._is_stopping:
            return None
        return self._move(BatchEvent.WINDOW_OVER if self._is_over() else BatchEvent.ALL_DONE)

    def _start(self, line: InputLine) -> bool:
        """Wait for a slot, for memory, and for room for results, and start a line. If the batch has
        expired (`expires_at`), store an error as the line's result instead. Return False if the job
        stops."""
        slots, memory = self._context.slots, self._context.memory
        slot = LineSlot(slots, memory, f"key {self.batch.caller}", line.num_bytes)
        wait_s = 0.0
        while not self._is_stopping and not self._is_over():
            if self._buffer.is_paused or len(self._lines) >= OPEN_PER_SLOT * slots.size:
                gevent.sleep(FLUSH_S)  # many lines wait to be tried again
            elif slot.acquire(wait_s):
                if not (self._is_stopping or self._buffer.is_paused):
                    self._spawn(line, slot)
                    return True
                slot.release()  # a line that was aborted, or has no room, has given it back
            wait_s = FLUSH_S
            if line.num_bytes > SMALL_BYTES:
                line.data = None
        while self._buffer.is_paused and not self._is_stopping:
            gevent.sleep(FLUSH_S)
        if not self._is_stopping:
            self._add(line.number, _result(self._text_of(line), error=EXPIRED))
        return not self._is_stopping

    def _spawn(self, line: InputLine, slot: LineSlot) -> None:
        greenlet = gevent.spawn(self._run_line, line, slot)
        greenlet.link(lambda _: slot.release())
        greenlet.link_exception(self._on_exception)
        self._lines.add(greenlet)

    def _is_over(self) -> bool:
        """Return whether the batch has expired: its completion window has ended."""
        return time.time() >= self.batch.expires_at

    def _on_exception(self, failed: gevent.Greenlet[..., None]) -> None:
        self._failure = failed.exception
        self.close()

    def _run_line(self, line: InputLine, slot: LineSlot) -> None:
        """Compute a line until it has a result, or until the job stops."""
        policy = RetryPolicy(random.Random())
        while True:
            caller = self._context.caller(self.batch.caller, self.batch.owner)
            if caller is None:
                self._add(line.number, _result(self._text_of(line), error=NO_KEY))
                return
            name, outcome = self._answer(line, InternalOrigin(caller, is_background=True))
            pause_s = policy.pause_after(outcome)
            if pause_s is None:
                self._add(line.number, _result_of(name, outcome.response))
                return
            if self._is_stopping:
                return
            if self._is_over():
                self._add(line.number, _result_of(name, error=EXPIRED))
                return
            slot.release()  # others are computed meanwhile
            gevent.sleep(pause_s)
            while not slot.acquire(SLOT_WAIT_S):
                pass

    def _answer(self, line: InputLine, origin: InternalOrigin) -> tuple[str, LineOutcome]:
        """Compute a line once. Return its id and the outcome. The line's text is not held."""
        request = read_line(self._text_of(line))
        name, url, body = request.custom_id, request.url, bytes(request.body)
        del request
        return name, _outcome(self._context.answer(url, body, origin))

    def _add(self, number: int, result: BatchResult) -> None:
        self._buffer.add(LineResult(number, result.to_line(), result.has_failed))

    def _flush_until(self, is_computed: Event) -> None:
        while not is_computed.wait(FLUSH_S):
            self._flush()

    def _flush(self, *, is_last: bool = False) -> None:
        """Store the new results. End the job if this process has lost the batch.

        The size limit does not apply in two cases. After the batch has expired, the remaining lines
        have short results, and the batch must end. When the job stops, the results would be lost
        otherwise; they are only those of the lines that were being computed.
        """
        has_limit = not (is_last or self._is_stopping or self._is_over())
        if not self._buffer.flush(time.monotonic(), is_last=is_last, has_limit=has_limit):
            self.close()

    def _move(self, event: BatchEvent) -> BatchStatus | None:
        batch, now = self.batch, time.time()
        return self._call(lambda database: database.move(batch, event, now))

    def _call(self, work: Callable[[BatchDatabase], T]) -> T:
        return self._context.store.call(work)


def _outcome(answer: InternalAnswer) -> LineOutcome:
    request_id = answer.headers.get(REQUEST_ID_HEADER, "")
    retry_after = answer.headers.get("retry-after", "")
    response = BatchResponse(answer.status, request_id, json_of(answer.body))
    return LineOutcome(response, float(retry_after) if retry_after.isdigit() else None)


def _result(data: bytes, error: BatchFailure) -> BatchResult:
    return _result_of(read_line(data).custom_id, error=error)


def _result_of(
    name: str, response: BatchResponse | None = None, error: BatchFailure | None = None
) -> BatchResult:
    return BatchResult(f"batch_req_{uuid.uuid4().hex}", name, response=response, error=error)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _some_pieces(file: str, after: int, database: BatchDatabase) -> list[tuple[int, bytes]]:
    return database.pieces(file, after, READ_BYTES)


def _done_lines(batch: StoredBatch, database: BatchDatabase) -> set[int]:
    return database.done_lines(batch)
