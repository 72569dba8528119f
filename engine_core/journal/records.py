"""Journal records: one for each call that may change the engine, in order.

A record holds the arguments of the call, and a digest of the reply. The digest is enough to check
that a replay gives the same reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from engine_core.journal.snapshot import EngineSnapshot
from protocol.config.engine import EngineConfig
from protocol.engine.adapters import AdapterInfo
from protocol.engine.grammar import Grammar
from protocol.engine.messages import Encode, Generate, Limits, LoadAdapter, UnloadAdapter
from protocol.engine.model_card import ModelCard
from protocol.wire import codec
from protocol.wire.errors import ErrorInfo
from protocol.worker.kv import KVReport
from protocol.worker.steps import AdapterReport, EncodeResult, StepResult

FORMAT = 9
"""Version of the format. It covers the records, the snapshot and the plans that are digested."""
DIGEST_BYTES = 8


class JournalRecord(
    msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower, omit_defaults=True, kw_only=True
):
    """Base class of all records. They are encoded like messages (protocol/wire/codec.py)."""


class StartRecord(JournalRecord, frozen=True, kw_only=True, tag="began"):
    """The first record of a file: the arguments with which the engine was created."""

    #: `FORMAT` of the release that wrote the file.
    format: int
    #: Time at which the file was started, in seconds since 1970.
    at: float
    #: Version of Tidegate.
    version: str
    config: EngineConfig
    model: ModelCard
    limits: Limits
    #: Time of the draft model per token, as a fraction of the main model's; 0: no draft model.
    draft_cost: float
    #: (tokens, seconds) of steps, as in WorkerReady.
    step_costs: list[tuple[int, float]] = []
    #: Names of the worker's tiers.
    tiers: list[str] = []
    #: The LoRA adapters that the worker has loaded.
    adapters: list[AdapterInfo] = []
    #: Number of the file in the engine's life, from 1 on. If it is not 1, a SnapshotRecord follows.
    part: int = 1


class SnapshotRecord(JournalRecord, frozen=True, kw_only=True, tag="knew"):
    """The state of the engine when this file was started."""

    snapshot: EngineSnapshot
    #: The grammars that the snapshot refers to, including those being compiled.
    grammars: list[Grammar]


class TickRecord(JournalRecord, frozen=True, kw_only=True, tag="ticked"):
    """A call to `tick`. `reply_digest` is empty unless requests missed a deadline."""

    now: float
    reply_digest: bytes = msgspec.field(name="said", default=b"")


class AddRecord(JournalRecord, frozen=True, kw_only=True, tag="added"):
    """A call to `add`."""

    client: bytes
    message: Generate
    #: The seed that was drawn for the request; empty if none was drawn.
    seeds: list[int]
    reply_digest: bytes = msgspec.field(name="said")


class AddEncodeRecord(JournalRecord, frozen=True, kw_only=True, tag="addedencode"):
    """A call to `add_encode`."""

    client: bytes
    message: Encode
    reply_digest: bytes = msgspec.field(name="said")


class GrammarRecord(JournalRecord, frozen=True, kw_only=True, tag="settled"):
    """A call to `on_grammar_compiled`. The compiled grammar itself is not stored."""

    #: Digest of the grammar.
    digest: bytes
    #: The error if the compilation failed.
    error: ErrorInfo | None
    #: The memory that the compiled grammar keeps.
    num_bytes: int
    reply_digest: bytes = msgspec.field(name="said")


class AbortRecord(JournalRecord, frozen=True, kw_only=True, tag="aborted"):
    """A call to `abort`."""

    client: bytes
    numbers: list[int]
    reply_digest: bytes = msgspec.field(name="said")


class AbortByLabelRecord(JournalRecord, frozen=True, kw_only=True, tag="named"):
    """A call to `abort_by_label`."""

    names: list[str]
    reply_digest: bytes = msgspec.field(name="said")


class ClientLostRecord(JournalRecord, frozen=True, kw_only=True, tag="dropped"):
    """A call to `on_client_lost`."""

    client: bytes


class DrainRecord(JournalRecord, frozen=True, kw_only=True, tag="drained"):
    """A call to `drain`."""


class PlanRecord(JournalRecord, frozen=True, kw_only=True, tag="planned"):
    """A call to `plan`.

    A call that returned None is recorded only if the engine was not idle.
    """

    #: Number of the step; None if `plan` returned None or raised.
    step: int | None = None
    #: Number of rows (or inputs) and of tokens in the step. They make a difference easier to
    #: explain.
    rows: int = 0
    tokens: int = 0
    reply_digest: bytes = msgspec.field(name="said", default=b"")


class MasksRecord(JournalRecord, frozen=True, kw_only=True, tag="masked"):
    """A call to `masks` that returned masks."""

    reply_digest: bytes = msgspec.field(name="said")


class CommitRecord(JournalRecord, frozen=True, kw_only=True, tag="committed"):
    """A call to `commit`."""

    result: StepResult
    elapsed_s: float
    reply_digest: bytes = msgspec.field(name="said")


class CommitEncodedRecord(JournalRecord, frozen=True, kw_only=True, tag="committedencode"):
    """A call to `commit_encoded`."""

    result: EncodeResult
    elapsed_s: float
    reply_digest: bytes = msgspec.field(name="said")


class PopResultsRecord(JournalRecord, frozen=True, kw_only=True, tag="poppedresults"):
    """A call to `pop_results`."""

    client: bytes
    num_bytes: int
    reply_digest: bytes = msgspec.field(name="said")


class KVReportRecord(JournalRecord, frozen=True, kw_only=True, tag="heard"):
    """A call to `on_kv_report`."""

    report: KVReport
    reply_digest: bytes = msgspec.field(name="said")


class LoadAdapterRecord(JournalRecord, frozen=True, kw_only=True, tag="loaded"):
    """A call to `load_adapter`."""

    client: bytes
    message: LoadAdapter
    reply_digest: bytes = msgspec.field(name="said")


class UnloadAdapterRecord(JournalRecord, frozen=True, kw_only=True, tag="unloaded"):
    """A call to `unload_adapter`."""

    client: bytes
    message: UnloadAdapter
    reply_digest: bytes = msgspec.field(name="said")


class AdapterReportRecord(JournalRecord, frozen=True, kw_only=True, tag="adapted"):
    """A call to `on_adapter_report`."""

    report: AdapterReport
    reply_digest: bytes = msgspec.field(name="said")


class FullRecord(JournalRecord, frozen=True, kw_only=True, tag="full"):
    """The last record of a file that became full before the next file could be started."""


AnyRecord = (
    StartRecord
    | SnapshotRecord
    | TickRecord
    | AddRecord
    | AddEncodeRecord
    | GrammarRecord
    | AbortRecord
    | AbortByLabelRecord
    | ClientLostRecord
    | DrainRecord
    | PlanRecord
    | MasksRecord
    | CommitRecord
    | CommitEncodedRecord
    | PopResultsRecord
    | KVReportRecord
    | LoadAdapterRecord
    | UnloadAdapterRecord
    | AdapterReportRecord
    | FullRecord
)


def digest(reply: Any) -> bytes:
    """Return the digest of a reply: a struct, a plain value, or a container of these."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for part in _parts(reply):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def _parts(reply: Any) -> Iterable[bytes]:
    """Yield the bytes to hash for a reply."""
    if isinstance(reply, msgspec.Struct):
        for frame in codec.encode(reply):
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
