"""Journal records: one for each call that changes an engine, in order.

Replies are not stored, only a digest of each: enough to check that a replay gives the same reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from engine_core.journal.snapshot import EngineSnapshot
from protocol import wire
from protocol.config.engine import EngineConfig
from protocol.errors import ErrorInfo
from protocol.grammar import Grammar
from protocol.kv import KVReport
from protocol.messages import Generate, Limits
from protocol.model_card import ModelCard
from protocol.steps import StepResult

FORMAT = 3
"""Version of the records, of the snapshot in them and of the plans that they digest."""
DIGEST_BYTES = 8


class JournalRecord(
    msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, omit_defaults=True, kw_only=True
):
    """Base class. Records are encoded like messages."""


class Began(JournalRecord, frozen=True, kw_only=True):
    """The first record: what the engine was created from."""

    #: `FORMAT` of the release that wrote it.
    format: int
    #: Seconds since 1970.
    at: float
    #: Release of Tidegate.
    version: str
    #: Configuration of the engine.
    config: EngineConfig
    #: The worker's model card.
    model: ModelCard
    #: Limits that the worker announced.
    limits: Limits
    #: As in WorkerReady.
    draft_cost: float
    #: (tokens, cost), as measured.
    step_costs: list[tuple[int, float]] = []
    #: Names of the worker's tiers.
    tiers: list[str] = []
    #: Part of the engine's life. If it is not 1, a snapshot follows.
    part: int = 1


class KnownRecord(JournalRecord, frozen=True, kw_only=True, tag="knew"):
    """All that the engine remembered when this part began."""

    snapshot: EngineSnapshot
    #: All grammars that the snapshot refers to, and those being compiled.
    grammars: list[Grammar]


class Ticked(JournalRecord, frozen=True, kw_only=True):
    """A tick. `reply_digest` is set if requests missed a deadline."""

    now: float
    reply_digest: bytes = msgspec.field(name="said", default=b"")


class AddRecord(JournalRecord, frozen=True, kw_only=True, tag="added"):
    """A request. `seeds`: those drawn for it."""

    client: bytes
    message: Generate
    seeds: list[int]
    reply_digest: bytes = msgspec.field(name="said")


class GrammarRecord(JournalRecord, frozen=True, kw_only=True, tag="settled"):
    """The outcome of a compilation."""

    digest: bytes
    error: ErrorInfo | None
    reply_digest: bytes = msgspec.field(name="said")


class AbortRecord(JournalRecord, frozen=True, kw_only=True, tag="aborted"):
    client: bytes
    numbers: list[int]
    reply_digest: bytes = msgspec.field(name="said")


class AbortByLabelRecord(JournalRecord, frozen=True, kw_only=True, tag="named"):
    names: list[str]
    reply_digest: bytes = msgspec.field(name="said")


class ClientLostRecord(JournalRecord, frozen=True, kw_only=True, tag="dropped"):
    client: bytes


class Drained(JournalRecord, frozen=True, kw_only=True):
    pass


class PlanRecord(JournalRecord, frozen=True, kw_only=True, tag="planned"):
    """A plan; `step` is None if nothing was computed although requests were open.

    `rows` and `tokens` of the step help to explain a difference.
    """

    step: int | None = None
    rows: int = 0
    tokens: int = 0
    reply_digest: bytes = msgspec.field(name="said", default=b"")


class MasksRecord(JournalRecord, frozen=True, kw_only=True, tag="masked"):
    reply_digest: bytes = msgspec.field(name="said")


class CommitRecord(JournalRecord, frozen=True, kw_only=True, tag="committed"):
    result: StepResult
    elapsed_s: float
    reply_digest: bytes = msgspec.field(name="said")


class KVReportRecord(JournalRecord, frozen=True, kw_only=True, tag="heard"):
    report: KVReport
    reply_digest: bytes = msgspec.field(name="said")


class Full(JournalRecord, frozen=True, kw_only=True):
    """The last record of a file that was full before the next part could begin."""


AnyRecord = (
    Began
    | KnownRecord
    | Ticked
    | AddRecord
    | GrammarRecord
    | AbortRecord
    | AbortByLabelRecord
    | ClientLostRecord
    | Drained
    | PlanRecord
    | MasksRecord
    | CommitRecord
    | KVReportRecord
    | Full
)


def digest(reply: Any) -> bytes:
    """Return the digest of a reply: a struct, None, or lists, tuples and dicts of these."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for part in _parts(reply):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _parts(reply: Any) -> Iterable[bytes]:
    if isinstance(reply, msgspec.Struct):
        for frame in wire.encode(reply):
            yield bytes(frame)
    elif isinstance(reply, dict):
        for key, value in reply.items():
            yield from _parts(key)
            yield from _parts(value)
    elif isinstance(reply, list | tuple):
        yield str(len(reply)).encode()
        for value in reply:
            yield from _parts(value)
    else:
        yield repr(reply).encode()
