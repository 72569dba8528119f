"""What is written down: one record for each call that changes an engine, in their order.

Answers are not kept, but a digest of each: enough to know whether a replay says the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from protocol import wire
from protocol.config.engine import EngineConfig
from protocol.errors import ErrorInfo
from protocol.grammar import Grammar
from protocol.kv import KVReport
from protocol.messages import Generate, Limits
from protocol.model_card import ModelCard
from protocol.steps import StepResult

FORMAT = 1
DIGEST_BYTES = 8


class JournalRecord(
    msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, omit_defaults=True, kw_only=True
):
    """Base of all; they travel to a file as messages do to a peer."""


class Began(JournalRecord, frozen=True, kw_only=True):
    """First of all: what the engine was made of.

    at      seconds since 1970
    part    of the engine's life: where it is not the first, its state follows
    """

    format: int
    at: float
    version: str
    config: EngineConfig
    model: ModelCard
    limits: Limits
    draft_cost: float
    step_costs: list[tuple[int, float]] = []
    tiers: list[str] = []
    part: int = 1


class KnownRecord(JournalRecord, frozen=True, kw_only=True, tag="knew"):
    """What the engine was when this part began.

    state      state.Frozen
    grammars   all that it refers to, and those that are being compiled
    """

    state: bytes
    grammars: list[Grammar]


class Ticked(JournalRecord, frozen=True, kw_only=True):
    """said: where something was over by time"""

    now: float
    said: bytes = b""


class AddRecord(JournalRecord, frozen=True, kw_only=True, tag="added"):
    """seeds: that were drawn for it"""

    client: bytes
    message: Generate
    seeds: list[int]
    said: bytes


class GrammarRecord(JournalRecord, frozen=True, kw_only=True, tag="settled"):
    """A grammar was compiled, or why not."""

    digest: bytes
    error: ErrorInfo | None
    said: bytes


class AbortRecord(JournalRecord, frozen=True, kw_only=True, tag="aborted"):
    client: bytes
    numbers: list[int]
    said: bytes


class AbortByLabelRecord(JournalRecord, frozen=True, kw_only=True, tag="named"):
    names: list[str]
    said: bytes


class ClientLostRecord(JournalRecord, frozen=True, kw_only=True, tag="dropped"):
    client: bytes


class Drained(JournalRecord, frozen=True, kw_only=True):
    pass


class PlanRecord(JournalRecord, frozen=True, kw_only=True, tag="planned"):
    """None where nothing was to be computed, though something was open. rows, tokens: of the
    step, to tell what differs."""

    step: int | None = None
    rows: int = 0
    tokens: int = 0
    said: bytes = b""


class MasksRecord(JournalRecord, frozen=True, kw_only=True, tag="masked"):
    said: bytes


class CommitRecord(JournalRecord, frozen=True, kw_only=True, tag="committed"):
    result: StepResult
    elapsed_s: float
    said: bytes


class KVReportRecord(JournalRecord, frozen=True, kw_only=True, tag="heard"):
    report: KVReport
    said: bytes


class Full(JournalRecord, frozen=True, kw_only=True):
    """Last of all: there was no room for more before the next part could begin."""


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


def digest(said: Any) -> bytes:
    """Of an answer: a struct, None, or lists, tuples and maps of such."""
    parts = blake2b(digest_size=DIGEST_BYTES)
    for piece in _pieces(said):
        parts.update(len(piece).to_bytes(8, "little"))
        parts.update(piece)
    return parts.digest()


def _pieces(said: Any) -> Iterable[bytes]:
    if isinstance(said, msgspec.Struct):
        for frame in wire.encode(said):
            yield bytes(frame)
    elif isinstance(said, dict):
        for key, value in said.items():
            yield from _pieces(key)
            yield from _pieces(value)
    elif isinstance(said, list | tuple):
        yield str(len(said)).encode()
        for value in said:
            yield from _pieces(value)
    else:
        yield repr(said).encode()
