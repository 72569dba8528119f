"""The store's tables, statements and rows. This module does no I/O.

    responses   stored responses and their inputs
    runs        generations that continue without their client
    events      the frames of each run so far

A run is open until its `ended_at` is set. The process that generates it (`runner`) renews its
lease. A run whose lease has expired is dead. The first process that finds a dead run ends it. An
open run is aborted at the time `wanted_until`, which clients that read the run extend.

Times are seconds since 1970, because they are compared in other processes and after restarts.
"""

from __future__ import annotations

import msgspec

VERSION = 1

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id          TEXT PRIMARY KEY,
    owner       TEXT NOT NULL,
    created_at  REAL NOT NULL,
    used_at     REAL NOT NULL,
    previous    TEXT,
    input       BLOB NOT NULL,
    body        BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at);
CREATE TABLE IF NOT EXISTS runs (
    id            TEXT PRIMARY KEY,
    owner         TEXT NOT NULL,
    kind          TEXT NOT NULL,
    runner        TEXT NOT NULL,
    created_at    REAL NOT NULL,
    lease_until   REAL NOT NULL,
    wanted_until  REAL,
    is_cancelled  INTEGER NOT NULL DEFAULT 0,
    ended_at      REAL,
    delete_at     REAL
);
CREATE INDEX IF NOT EXISTS runs_open ON runs (lease_until) WHERE ended_at IS NULL;
CREATE INDEX IF NOT EXISTS runs_to_delete ON runs (delete_at) WHERE delete_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (
    run     TEXT NOT NULL,
    number  INTEGER NOT NULL,
    frame   BLOB NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID;
"""

PUT_RESPONSE = """
INSERT OR REPLACE INTO responses (id, owner, created_at, used_at, previous, input, body)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""
GET_RESPONSE = """
SELECT id, owner, created_at, previous, input, body FROM responses WHERE id = ? AND owner = ?
"""
SET_BODY = "UPDATE responses SET body = ?2 WHERE id = ?1"
TOUCH = "UPDATE responses SET used_at = ?2 WHERE id = ?1"
DELETE_RESPONSE = "DELETE FROM responses WHERE id = ?"

PUT_RUN = """
INSERT INTO runs (id, owner, kind, runner, created_at, lease_until, wanted_until)
VALUES (?, ?, ?, ?, ?, ?, ?)
"""
GET_RUN = """
SELECT ended_at FROM runs WHERE id = ? AND owner = ? AND (delete_at IS NULL OR delete_at >= ?)
"""
IS_OPEN = "SELECT 1 FROM runs WHERE id = ? AND runner = ? AND ended_at IS NULL"
END_RUN = "UPDATE runs SET ended_at = ?2, delete_at = ?3 WHERE id = ?1"
CANCEL_RUN = "UPDATE runs SET is_cancelled = 1 WHERE id = ? AND owner = ? AND ended_at IS NULL"
WANT_RUN = """
UPDATE runs SET wanted_until = MAX(wanted_until, ?2), delete_at = MAX(delete_at, ?2) WHERE id = ?1
"""
RENEW = "UPDATE runs SET lease_until = ?2 WHERE runner = ?1 AND ended_at IS NULL"
MINE = "SELECT id, is_cancelled, wanted_until FROM runs WHERE runner = ? AND ended_at IS NULL"
DEAD = "SELECT id, kind, wanted_until FROM runs WHERE ended_at IS NULL AND lease_until < ?"
DELETE_RUN = "DELETE FROM runs WHERE id = ?"

PUT_EVENT = "INSERT INTO events (run, number, frame) VALUES (?, ?, ?)"
GET_EVENTS = "SELECT frame FROM events WHERE run = ? AND number > ? ORDER BY number LIMIT ?"
LAST_EVENT = "SELECT number, frame FROM events WHERE run = ? ORDER BY number DESC LIMIT 1"
NEXT_NUMBER = "SELECT COALESCE(MAX(number), -1) + 1 FROM events WHERE run = ?"
BODY_OF = "SELECT body FROM responses WHERE id = ?"
DELETE_EVENTS = "DELETE FROM events WHERE run = ?"

OUT_OF_TIME = """
SELECT id FROM responses WHERE used_at < ?1
    AND id NOT IN (SELECT id FROM runs WHERE ended_at IS NULL)
UNION ALL
SELECT id FROM runs WHERE delete_at < ?2 AND ended_at IS NOT NULL
"""
LEAST_USED = """
SELECT id FROM (
    SELECT id, used_at FROM responses WHERE id NOT IN (SELECT id FROM runs WHERE ended_at IS NULL)
    UNION ALL
    SELECT id, created_at FROM runs WHERE delete_at IS NOT NULL AND ended_at IS NOT NULL
) ORDER BY used_at LIMIT ?
"""


class StoredRecord(msgspec.Struct, frozen=True):
    """A stored response."""

    id: str
    #: The caller that stored the response (`Caller.owner`).
    owner: str
    created_at: float
    #: Id of the response before this one in the conversation; None if this is the first.
    previous: str | None
    #: JSON: the input items of the request.
    input: bytes
    #: JSON: the response. While it is generated, this is its last stored state.
    body: bytes


class NewRun(msgspec.Struct, frozen=True):
    """A run to be stored when it starts."""

    id: str
    owner: str
    #: Selects the function that makes the run's end if its process dies.
    kind: str
    #: The time at which the run is aborted, unless a client extends it; None: never.
    wanted_until: float | None = None


class RunBatch(msgspec.Struct, frozen=True):
    """New frames of a run, to be stored."""

    #: Id of the run.
    run: str
    #: Number of the first frame.
    first: int
    frames: list[bytes]
    #: Whether the run ends with these frames.
    is_last: bool = False
    #: The current response; None if the run has none or it has not changed.
    body: bytes | None = None


class RunControl(msgspec.Struct, frozen=True):
    """Columns of an open run that other processes may have changed."""

    #: Whether a client has cancelled the run.
    is_cancelled: bool
    #: The time at which the run is aborted, unless a client extends it; None: never.
    wanted_until: float | None


class RunPage(msgspec.Struct, frozen=True):
    """The next frames of a run."""

    frames: list[bytes]
    #: Whether these are the last frames of the run.
    is_last: bool


class Interruption(msgspec.Struct, frozen=True):
    """The last event and the final response of a run whose process has died."""

    #: The last event.
    frame: bytes
    #: The final response; None if the run has none.
    body: bytes | None = None
