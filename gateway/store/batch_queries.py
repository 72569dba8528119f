"""The tables, statements and rows of files and batches. This module does no I/O.

    files     uploaded files, and the output files of batches
    pieces    the content of each file; that of an output file has a piece per result, whose number
              is the number of the line
    batches   batches, open and ended

Files and batches are listed in the order of `seq`, in which they were created. A file is hidden
while it is uploaded or while its batch is open. An open batch is executed by the process `runner`
until its lease ends. Times are seconds since 1970.
"""

from __future__ import annotations

import msgspec

from gateway.store.batch_states import FINAL, BatchStatus

VERSION = 1

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    id          TEXT NOT NULL UNIQUE,
    owner       TEXT NOT NULL,
    purpose     TEXT NOT NULL,
    filename    TEXT NOT NULL,
    bytes       INTEGER NOT NULL DEFAULT 0,
    created_at  REAL NOT NULL,
    expires_at  REAL,
    is_visible  INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, seq);
CREATE TABLE IF NOT EXISTS pieces (
    file    TEXT NOT NULL,
    number  INTEGER NOT NULL,
    data    BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TABLE IF NOT EXISTS batches (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    id             TEXT NOT NULL UNIQUE,
    owner          TEXT NOT NULL,
    caller         TEXT NOT NULL,
    endpoint       TEXT NOT NULL,
    input_file     TEXT NOT NULL,
    output_file    TEXT NOT NULL,
    error_file     TEXT NOT NULL,
    window         TEXT NOT NULL,
    metadata       BLOB NOT NULL,
    output_s       REAL,
    status         TEXT NOT NULL,
    created_at     REAL NOT NULL,
    expires_at     REAL NOT NULL,
    changed_at     BLOB NOT NULL DEFAULT '{}',
    errors         BLOB,
    num_total      INTEGER NOT NULL DEFAULT 0,
    num_completed  INTEGER NOT NULL DEFAULT 0,
    num_failed     INTEGER NOT NULL DEFAULT 0,
    runner         TEXT NOT NULL DEFAULT '',
    lease_until    REAL NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, seq);
"""
_OPEN = "status NOT IN ({})".format(", ".join(f"'{status}'" for status in sorted(FINAL)))

# ---- files

_FILE = "id, owner, purpose, filename, bytes, created_at, expires_at"
PUT_FILE = """
INSERT INTO files (id, owner, purpose, filename, created_at) VALUES (?, ?, ?, ?, ?)
"""
PUT_PIECE = "INSERT INTO pieces (file, number, data) VALUES (?, ?, ?)"
ADD_BYTES = "UPDATE files SET bytes = bytes + ?2 WHERE id = ?1"
IS_FILE = "SELECT 1 FROM files WHERE id = ?"
SHOW_FILE = "UPDATE files SET is_visible = 1, expires_at = ?2, purpose = ?3 WHERE id = ?1"
SHOW_OUTPUT = """
UPDATE files SET is_visible = 1, created_at = ?2, expires_at = ?3 WHERE id = ?1 AND bytes > 0
"""
GET_FILE = f"""
SELECT {_FILE} FROM files
WHERE id = ?1 AND owner = ?2 AND is_visible AND (expires_at IS NULL OR expires_at > ?3)
"""
NUM_FILES = "SELECT COUNT(*) FROM files WHERE owner = ?1 AND purpose != ?2"
GET_PIECES = "SELECT number, data FROM pieces WHERE file = ? AND number > ? ORDER BY number"
FILE_SEQ = "SELECT seq FROM files WHERE id = ? AND owner = ? AND is_visible"
DELETE_FILE = "DELETE FROM files WHERE id = ?"
DELETE_PIECES = "DELETE FROM pieces WHERE file = ?"
USED_BY_BATCH = f"SELECT id FROM batches WHERE input_file = ? AND {_OPEN} LIMIT 1"
OVERDUE_FILES = f"""
SELECT id FROM files WHERE
    (is_visible AND expires_at < ?1
        AND id NOT IN (SELECT input_file FROM batches WHERE {_OPEN}))
    OR (NOT is_visible AND created_at < ?2
        AND id NOT IN (SELECT output_file FROM batches WHERE {_OPEN})
        AND id NOT IN (SELECT error_file FROM batches WHERE {_OPEN}))
LIMIT ?3
"""


def list_files(*, is_ascending: bool) -> str:
    """Return the statement that lists an owner's files, from the file with the number `after` on.
    Its values are the owner, the time, `after`, the purpose ("": any) and the limit."""
    compare, order = (">", "ASC") if is_ascending else ("<", "DESC")
    return f"""
    SELECT {_FILE} FROM files
    WHERE owner = ?1 AND is_visible AND (expires_at IS NULL OR expires_at > ?2)
        AND (?3 IS NULL OR seq {compare} ?3) AND (?4 = '' OR purpose = ?4)
    ORDER BY seq {order} LIMIT ?5
    """


# ---- batches

_BATCH = """
id, owner, caller, endpoint, input_file, output_file, error_file, window, metadata, output_s,
status, created_at, expires_at, changed_at, errors, num_total, num_completed, num_failed,
(SELECT bytes > 0 FROM files WHERE files.id = output_file AND is_visible),
(SELECT bytes > 0 FROM files WHERE files.id = error_file AND is_visible)
"""
PUT_BATCH = """
INSERT INTO batches
    (id, owner, caller, endpoint, input_file, output_file, error_file, window, metadata, output_s,
     status, created_at, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
GET_BATCH = f"SELECT {_BATCH} FROM batches WHERE id = ?1 AND owner = ?2"
BATCH_SEQ = "SELECT seq FROM batches WHERE id = ? AND owner = ?"
LIST_BATCHES = f"""
SELECT {_BATCH} FROM batches WHERE owner = ?1 AND (?2 IS NULL OR seq < ?2)
ORDER BY seq DESC LIMIT ?3
"""
NUM_OPEN = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND {_OPEN}"
OPEN_BY_STATUS = f"SELECT status, COUNT(*) FROM batches WHERE {_OPEN} GROUP BY status"
CLAIMABLE = f"""
WITH held AS (
    SELECT owner AS holder, COUNT(*) AS num_held FROM batches
    WHERE {_OPEN} AND lease_until >= ?1 GROUP BY owner
)
SELECT {_BATCH} FROM batches LEFT JOIN held ON holder = owner
WHERE {_OPEN} AND lease_until < ?1 ORDER BY COALESCE(num_held, 0), seq LIMIT 1
"""
CLAIM = "UPDATE batches SET runner = ?2, lease_until = ?3 WHERE id = ?1"
RENEW = f"UPDATE batches SET lease_until = ?2 WHERE runner = ?1 AND {_OPEN}"
RELEASE = "UPDATE batches SET lease_until = 0, runner = '' WHERE runner = ?1 AND id = ?2"
MINE = f"SELECT id, status FROM batches WHERE runner = ? AND {_OPEN}"
STATUS_OF = "SELECT status, changed_at, output_s FROM batches WHERE id = ?1"
OWNED_STATUS = "SELECT status FROM batches WHERE id = ?1 AND runner = ?2"
SET_STATUS = "UPDATE batches SET status = ?2, changed_at = ?3 WHERE id = ?1"
SET_ERRORS = "UPDATE batches SET errors = ?2 WHERE id = ?1"
SET_TOTAL = "UPDATE batches SET num_total = ?2 WHERE id = ?1"
COUNT_RESULTS = """
UPDATE batches SET num_completed = num_completed + ?2, num_failed = num_failed + ?3 WHERE id = ?1
"""
COUNTS = "SELECT num_total, num_completed + num_failed FROM batches WHERE id = ?"
DONE_LINES = "SELECT number FROM pieces WHERE file IN (?, ?)"
_CHANGED_AT = "json_extract(CAST(changed_at AS TEXT), '$.' || status)"  # when it got its status
OLD_BATCHES = f"DELETE FROM batches WHERE NOT ({_OPEN}) AND {_CHANGED_AT} < ?"


class NewFile(msgspec.Struct, frozen=True):
    """A file to be stored."""

    id: str
    #: The caller that stores the file (`Caller.owner`).
    owner: str
    purpose: str
    filename: str


class StoredFile(msgspec.Struct, frozen=True):
    """The database row of a fully uploaded file: everything except its bytes."""

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: float
    expires_at: float | None


class NewBatch(msgspec.Struct, frozen=True):
    """A batch to be stored."""

    id: str
    owner: str
    #: Name of the caller's key, under which the lines run; "" if the server has no keys.
    caller: str
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    #: The window as the client wrote it.
    window: str
    #: JSON: an object, or null.
    metadata: bytes
    #: Seconds for which the output files are kept.
    output_s: float
    expires_at: float


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch. The fields are those of NewBatch, and its progress."""

    id: str
    owner: str
    caller: str
    endpoint: str
    input_file: str
    output_file: str
    error_file: str
    window: str
    metadata: bytes
    output_s: float
    status: BatchStatus
    created_at: float
    expires_at: float
    #: JSON: status -> the time at which the batch got it.
    changed_at: bytes
    #: JSON: why the batch failed; None if it has not.
    errors: bytes | None
    num_total: int
    num_completed: int
    num_failed: int
    #: Whether the output files are visible and not empty.
    has_output: bool
    has_errors: bool
    #: Whether no results can be stored now, because the database is full.
    is_paused: bool
