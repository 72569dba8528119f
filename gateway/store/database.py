"""The response store: stored responses, and the events of runs.

A run is a generation that continues without its client. Invariants:

- New events, the end and the response of a run are written in one transaction, so readers always
  see events that are complete and in order.
- A run ends once. A run whose lease has expired is dead: its process no longer generates it. The
  process that finds a dead run ends it. If the run's own process stores events after that, they are
  dropped, and `Database.append` returns the run as lost.
- A reader never sees a dead run as open, because the run is ended first, with a last event.
- A response that was not used for `max_age_s` is deleted, with its run. A response is used when it
  is stored, and when it is part of a `chain`; `get` does not count.
- A run without a response is deleted at the end of its window (`append`, `want`).
- If the file is larger than `max_bytes`, the least recently used records are deleted. A record is a
  response with its run, or a run without a response, which counts as used when it was created.
- None of these rules deletes an open run.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from gateway.store import queries
from gateway.store.queries import Interruption, NewRun, RunBatch, RunControl, RunPage, StoredRecord
from gateway.store.sqlite_file import SqliteFile

LEASE_S = 10.0
"""Time after which a run is dead if its process has not renewed its lease."""
SWEEP_EVERY_S = 60.0
"""Interval at which old records are deleted."""
EVICTED_AT_ONCE = 16
"""Number of records that one transaction deletes to make room."""
SHARE_KEPT = 0.9
"""Share of `max_bytes` that may still be in use after making room."""

Interrupt = Callable[[str, int, bytes | None], Interruption]
"""Makes the last event and the final response of a dead run. The arguments are the run's id, the
number of its last event, and its stored response, if it has one."""


class BrokenChain(Exception):
    """Raised if a response refers to a previous response that was deleted."""

    def __init__(self, missing: str) -> None:
        super().__init__(missing)
        self.missing = missing


class Database(SqliteFile):
    """The open database file. The methods block, and only one thread at a time may call them.

    interrupt  kind of a run -> the function that makes the run's last event and final response if
               its process has died
    runner     unique name of this process; "": a new name

    The arguments `now` are seconds since 1970.
    """

    def __init__(
        self,
        path: str,
        interrupt: Mapping[str, Interrupt],
        *,
        max_bytes: int,
        max_age_s: float,
        runner: str = "",
    ) -> None:
        self._interrupt = interrupt
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._runner = runner or f"{os.getpid()}-{uuid.uuid4().hex}"
        self._swept_at = 0.0
        super().__init__(path, queries.SCHEMA, queries.VERSION)

    # ---- responses

    def put(self, record: StoredRecord, now: float) -> None:
        """Store a response, or replace the stored one with the same id."""
        with self._writing():
            self._put(record, now)
        self._sweep(now)

    def get(self, response: str, owner: str, now: float) -> StoredRecord | None:
        """Return a response by its id; None if `owner` has no such response."""
        self._end_dead_runs(now)
        row = self._one(queries.GET_RESPONSE, response, owner)
        return StoredRecord(*row) if row else None

    def chain(self, response: str, owner: str, now: float) -> list[StoredRecord]:
        """Return a response and all responses before it in its conversation, oldest first. All of
        them are marked as used now. Raises BrokenChain if one of them was deleted."""
        found: list[StoredRecord] = []
        name: str | None = response
        while name is not None:
            record = self.get(name, owner, now)
            if record is None:
                raise BrokenChain(name)
            found.append(record)
            name = record.previous
        with self._writing():
            self._many(queries.TOUCH, [(record.id, now) for record in found])
        return found[::-1]

    def delete(self, response: str, owner: str) -> bool:
        """Delete a response and its run. Return False if `owner` has no such response. If another
        process is generating the run, that process aborts it when it next renews leases."""
        with self._writing():
            if self._one(queries.GET_RESPONSE, response, owner) is None:
                return False
            self._remove([response])
        return True

    # ---- runs, for the process that generates them

    def start_run(self, run: NewRun, record: StoredRecord | None, now: float) -> None:
        """Store a new run, and its response if it has one."""
        with self._writing():
            if record is not None:
                self._put(record, now)
            values = (run.id, run.owner, run.kind, self._runner, now, now + LEASE_S)
            self._execute(queries.PUT_RUN, *values, run.wanted_until)
        self._sweep(now)

    def append(self, batches: Sequence[RunBatch], now: float, window_s: float) -> list[str]:
        """Store the new events of several runs, and their ends, in one transaction.

        Return the ids of the runs that this process no longer owns. Their events are dropped.

        window_s  time for which an ended run without a response is kept
        """
        lost = []
        with self._writing():
            for batch in batches:
                if self._one(queries.IS_OPEN, batch.run, self._runner) is None:
                    lost.append(batch.run)
                    continue
                numbered = enumerate(batch.frames, batch.first)
                self._many(queries.PUT_EVENT, [(batch.run, n, frame) for n, frame in numbered])
                if batch.is_last:
                    self._end(batch.run, batch.body, now, window_s)
                elif batch.body is not None:
                    self._execute(queries.SET_BODY, batch.run, batch.body)
        return lost

    def renew_leases(
        self, attended: Iterable[str], wanted_until: float, now: float
    ) -> dict[str, RunControl]:
        """Renew the leases of this process's open runs.

        Return the `RunControl` of each open run by its id. A deleted run has none.

        attended      runs with a connected client, which are marked as wanted
        wanted_until  time until which they are wanted
        """
        with self._writing():
            self._execute(queries.RENEW, self._runner, now + LEASE_S)
            self._many(queries.WANT_RUN, [(run, wanted_until) for run in attended])
            rows = self._connection.execute(queries.MINE, (self._runner,)).fetchall()
        return {run: RunControl(bool(is_cancelled), wanted) for run, is_cancelled, wanted in rows}

    # ---- runs, for their clients

    def cancel(self, run: str, owner: str) -> None:
        """Mark a run as cancelled. The process that generates it aborts it when it next renews
        leases."""
        with self._writing():
            self._execute(queries.CANCEL_RUN, run, owner)

    def want(self, run: str, until: float) -> None:
        """Mark a run as wanted until `until` (seconds since 1970), so that it is not aborted
        earlier."""
        with self._writing():
            self._execute(queries.WANT_RUN, run, until)

    def page(
        self, run: str, owner: str, after: int, now: float, limit: int = 256
    ) -> RunPage | None:
        """Return up to `limit` events after number `after`; None if `owner` has no such run."""
        self._end_dead_runs(now)
        row = self._one(queries.GET_RUN, run, owner, now)
        if row is None:
            return None
        rows = self._connection.execute(queries.GET_EVENTS, (run, after, limit)).fetchall()
        frames = [frame for (frame,) in rows]
        has_ended = row[0] is not None
        if has_ended and not frames:
            frames = self._end_of_dead_run(run, after)
        return RunPage(frames, is_last=has_ended and len(frames) < limit)

    # ---- internals

    def _end_of_dead_run(self, run: str, after: int) -> list[bytes]:
        """Return the last event of an ended run, if its number is lower than `after`.

        The client may have received events that its process had not stored when it died. The stored
        end of the run then has a lower number than the client's last event. It is returned anyway,
        because otherwise the client would not receive the end of the run.
        """
        last = self._one(queries.LAST_EVENT, run)
        return [last[1]] if last is not None and last[0] < after else []

    def _put(self, record: StoredRecord, now: float) -> None:
        values = (record.id, record.owner, record.created_at, now, record.previous)
        self._execute(queries.PUT_RESPONSE, *values, record.input, record.body)

    def _end(self, run: str, body: bytes | None, now: float, window_s: float) -> None:
        """End a run. A run with a response is kept as long as the response; one without is kept for
        `window_s`."""
        delete_at = None if body is not None else now + window_s
        self._execute(queries.END_RUN, run, now, delete_at)
        if body is not None:
            self._execute(queries.SET_BODY, run, body)

    def _end_dead_runs(self, now: float) -> None:
        """End all runs whose lease has expired, each with a last event."""
        if self._one(queries.DEAD, now) is None:
            return
        with self._writing():  # reads again, because another process may have ended them meanwhile
            dead = self._connection.execute(queries.DEAD, (now,)).fetchall()
            for run, kind, wanted_until in dead:
                (number,) = self._one(queries.NEXT_NUMBER, run) or (0,)
                body = self._one(queries.BODY_OF, run)
                end = self._interrupt[kind](run, number, body[0] if body else None)
                self._execute(queries.PUT_EVENT, run, number, end.frame)
                window_s = max(0.0, (wanted_until or now) - now)
                self._end(run, end.body, now, window_s)

    def _sweep(self, now: float) -> None:
        """End dead runs, delete old records if it is time, and make room if the file is large."""
        self._end_dead_runs(now)
        if now - self._swept_at >= SWEEP_EVERY_S:
            self._swept_at = now
            with self._writing():
                rows = self._connection.execute(queries.OUT_OF_TIME, (now - self._max_age_s, now))
                self._remove([name for (name,) in rows.fetchall()])
        if self._used_bytes() > self._max_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Delete the least recently used records until SHARE_KEPT of `max_bytes` is in use."""
        while self._used_bytes() > SHARE_KEPT * self._max_bytes:
            with self._writing():
                rows = self._connection.execute(queries.LEAST_USED, (EVICTED_AT_ONCE,)).fetchall()
                if not rows:
                    return
                self._remove([name for (name,) in rows])

    def _remove(self, names: Sequence[str]) -> None:
        """Delete the responses, runs and events with these ids."""
        rows = [(name,) for name in names]
        for statement in (queries.DELETE_RESPONSE, queries.DELETE_RUN, queries.DELETE_EVENTS):
            self._many(statement, rows)
