"""The log of the last steps. Consecutive steps with the same rows are one entry."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from engine_core.encode.scheduler import EncodeStep
from engine_core.schedule.inflight import InflightStep
from protocol.engine.stats import StepSummary
from protocol.engine.timeline import Lack
from protocol.wire.arrays import Int32

MAX_RUNS = 8192
"""Most entries of the log."""
MAX_ROWS = 1 << 20
"""Most rows in all entries together: 8 MiB, 12 MiB with drafts, or 16 MiB if all encode."""
MAX_RUN_S = 1.0
"""An entry that covers more seconds is not extended, so that timelines stay precise."""
MAX_SUMMARIES = 1000
"""Most entries in one report."""
PART_BYTES = 2 * 8


@dataclass(slots=True)
class StepRun:
    """One step, or consecutive steps with the same rows, each of which decodes one token."""

    first: int
    count: int
    #: [R] columns of the plan: slot, number of positions, and number of drafts of each row. None:
    #: no row has drafts.
    slots: Int32
    tokens: Int32
    drafts: Int32 | None
    #: Number of rows that compute one position without drafts. They come first.
    num_decodes: int
    #: Tokens of all rows of one step, drafts included.
    num_tokens: int
    started_at: float
    ended_at: float
    busy_s: float
    longest_s: float
    lack: Lack
    #: The `parts` of a step that encodes, as pairs of int64. It has no rows.
    encoded: bytes = b""

    @property
    def last(self) -> int:
        """The number of the last step."""
        return self.first + self.count - 1

    @property
    def num_drafted(self) -> int:
        """The number of rows with drafts, which follow the decodes."""
        if self.drafts is None:
            return 0
        return sum(1 for count in self.drafts.tolist() if count)

    @property
    def num_drafts(self) -> int:
        return 0 if self.drafts is None else sum(self.drafts.tolist())

    @property
    def num_rows(self) -> int:
        """The number of rows, or of parts of a step that encodes."""
        return len(self.slots) + len(self.encoded) // PART_BYTES

    @property
    def parts(self) -> Iterator[tuple[int, int]]:
        """Return (`Request.order`, number of tokens) for each request that the step encoded."""
        numbers = memoryview(self.encoded).cast("q")
        return zip(numbers[::2], numbers[1::2], strict=True)

    def summary(self) -> StepSummary:
        drafted, drafts = self.num_drafted, self.num_drafts
        decode = self.num_decodes + drafted
        return StepSummary(
            self.first,
            self.count,
            (self.num_tokens - decode - drafts) * self.count,
            decode * self.count,
            drafts * self.count,
            self.busy_s,
            self.longest_s,
            self.ended_at,
        )


class StepLog:
    """The last steps, oldest first."""

    def __init__(self) -> None:
        self._runs: deque[StepRun] = deque()
        self._num_rows = 0
        #: Whether the next step starts an entry of its own.
        self._is_closed = False

    def __iter__(self) -> Iterator[StepRun]:
        return iter(self._runs)

    def add(
        self, step: InflightStep, num_tokens: int, now: float, elapsed_s: float, lack: Lack
    ) -> None:
        """Record a committed step that took `elapsed_s` until now, in constant time."""
        plan, last = step.plan, self._runs[-1] if self._runs else None
        if (
            last is not None
            and not self._is_closed
            and not plan.bind
            and plan.num_decodes == last.num_decodes == len(step.requests)
            and plan.step == last.first + last.count
            and now - last.started_at <= MAX_RUN_S
            and lack == last.lack
            and (plan.row_slots is last.slots or plan.row_slots == last.slots)
        ):
            last.count += 1
            last.ended_at = now
            last.busy_s += elapsed_s
            last.longest_s = max(last.longest_s, elapsed_s)
            return
        self._is_closed = False
        self._runs.append(
            StepRun(
                first=plan.step,
                count=1,
                slots=plan.row_slots,
                tokens=plan.row_tokens,
                drafts=plan.row_drafts,
                num_decodes=plan.num_decodes,
                num_tokens=num_tokens,
                started_at=now - elapsed_s,
                ended_at=now,
                busy_s=elapsed_s,
                longest_s=elapsed_s,
                lack=lack,
            )
        )
        self._forget(len(step.requests))

    def add_encoded(self, step: EncodeStep, now: float, elapsed_s: float, lack: Lack) -> None:
        """Record a committed step that encodes, as `add` does. It is an entry of its own."""
        self._is_closed = True
        self._runs.append(
            StepRun(
                first=step.plan.step,
                count=1,
                slots=Int32.of([]),
                tokens=Int32.of([]),
                drafts=None,
                num_decodes=0,
                num_tokens=step.num_tokens,
                started_at=now - elapsed_s,
                ended_at=now,
                busy_s=elapsed_s,
                longest_s=elapsed_s,
                lack=lack,
                encoded=array("q", chain.from_iterable(step.tokens_by_request())).tobytes(),
            )
        )
        self._forget(len(step.parts))

    def _forget(self, num_rows: int) -> None:
        """Count the rows of a new entry, and forget the oldest entries that are too many."""
        self._num_rows += num_rows
        while len(self._runs) > MAX_RUNS or self._num_rows > MAX_ROWS:
            oldest = self._runs.popleft()
            self._num_rows -= oldest.num_rows

    def after(self, step: int) -> list[StepSummary]:
        """Return the last recorded steps after the one with this number, at most MAX_SUMMARIES
        entries. Later steps are recorded in new entries, so the next report can continue here."""
        self._is_closed = True
        found: list[StepSummary] = []
        for run in reversed(self._runs):
            if run.first <= step or len(found) >= MAX_SUMMARIES:
                break
            found.append(run.summary())
        return found[::-1]

    def snapshot(self) -> list[StepRun]:
        """Return all entries, oldest first. They do not change any more."""
        runs = list(self._runs)
        if runs:
            runs[-1] = replace(runs[-1])  # only the last entry is ever extended
        return runs


def between(runs: Sequence[StepRun], started_at: float, ended_at: float) -> Sequence[StepRun]:
    """Return those of `runs` that overlap this period. It takes O(log runs), because each step
    starts after the one before has ended."""
    first = bisect_right(runs, started_at, key=lambda run: run.ended_at)
    end = bisect_left(runs, ended_at, lo=first, key=lambda run: run.started_at)
    return runs[first:end]
