"""Journal records: one for each call that may change the engine, in order.

A record is a call: it holds the arguments, so that the call can be made again, and a digest of the
reply. The digest is enough to check that a replay gives the same reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, ClassVar

import msgspec

from engine_core.engine import Engine
from engine_core.journal.snapshot import EngineSnapshot
from protocol.config.engine import EngineConfig
from protocol.engine.adapters import AdapterInfo
from protocol.engine.grammar import Grammar
from protocol.engine.messages import Encode, Generate, Limits, LoadAdapter, UnloadAdapter
from protocol.engine.model_card import ModelCard
from protocol.wire import codec
from protocol.wire.errors import ErrorInfo
from protocol.worker.kv import KVReport
from protocol.worker.steps import (
    AdapterReport,
    EncodePlan,
    EncodeResult,
    ImageEncoded,
    StepPlan,
    StepResult,
)

FORMAT = 15
"""Version of the format. It covers the records, the snapshot and the plans that are digested."""
DIGEST_BYTES = 8
RAISED = b"raised"
"""Recorded instead of a digest if the engine raised an exception."""


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


class CallRecord(JournalRecord, frozen=True, kw_only=True):
    """A call to `method` of `Engine`."""

    #: Digest of the reply. It is empty if there was none, and RAISED if the engine raised an
    #: exception.
    reply_digest: bytes = msgspec.field(name="said", default=b"")
    method: ClassVar[str]
    #: Whether "nothing" is no reply, for which no digest is stored.
    may_be_silent: ClassVar[bool] = False

    def call(self, engine: Engine) -> Any:
        """Call the engine as it was called before, and return its reply."""
        return getattr(engine, self.method)(*self._arguments())

    def digest_of(self, reply: Any) -> bytes:
        """Return the digest with which `reply` is recorded."""
        return b"" if self.may_be_silent and not reply else digest(reply)

    def _arguments(self) -> list[Any]:
        """Return the arguments of the call: in most records, all other fields."""
        return [getattr(self, name) for name in self.__struct_fields__ if name != "reply_digest"]


class TickRecord(CallRecord, frozen=True, tag="ticked"):
    """The engine was told the time. The reply is empty unless requests missed a deadline."""

    now: float
    method: ClassVar[str] = "tick"
    may_be_silent: ClassVar[bool] = True


class AddRecord(CallRecord, frozen=True, tag="added"):
    """A client sent a request."""

    client: bytes
    message: Generate
    #: The seed that was drawn for the request; empty if none was drawn.
    seeds: list[int]
    method: ClassVar[str] = "add"

    def _arguments(self) -> list[Any]:
        return [self.client, self.message]


class AddEncodeRecord(CallRecord, frozen=True, tag="addedencode"):
    """A client sent a request that encodes."""

    client: bytes
    message: Encode
    method: ClassVar[str] = "add_encode"


class GrammarRecord(CallRecord, frozen=True, tag="settled"):
    """A grammar was compiled, or refused. The compiled grammar itself is not stored, so a replay
    compiles it again."""

    #: Digest of the grammar.
    digest: bytes
    #: The error if the compilation failed.
    error: ErrorInfo | None
    #: The memory that the compiled grammar keeps.
    num_bytes: int
    method: ClassVar[str] = "on_grammar_compiled"


class AbortRecord(CallRecord, frozen=True, tag="aborted"):
    """A client aborted requests. Its reason is not stored, because it changes no decision."""

    client: bytes
    numbers: list[int]
    method: ClassVar[str] = "abort"


class AbortByLabelRecord(CallRecord, frozen=True, tag="named"):
    """A client aborted the requests with some names."""

    names: list[str]
    method: ClassVar[str] = "abort_by_label"


class ClientLostRecord(CallRecord, frozen=True, tag="dropped"):
    """A client was lost."""

    client: bytes
    method: ClassVar[str] = "on_client_lost"
    may_be_silent: ClassVar[bool] = True


class DrainRecord(CallRecord, frozen=True, tag="drained"):
    """The engine was told to refuse new requests."""

    method: ClassVar[str] = "drain"
    may_be_silent: ClassVar[bool] = True


class PlanRecord(CallRecord, frozen=True, tag="planned"):
    """The engine was asked for the next step. A call that returned None is recorded only if the
    engine was not idle."""

    #: Number of the step; None if `plan` returned None or raised.
    step: int | None = None
    #: Number of rows (or inputs) and of tokens in the step. They make a difference easier to
    #: explain.
    rows: int = 0
    tokens: int = 0
    method: ClassVar[str] = "plan"

    @classmethod
    def of(cls, plan: StepPlan | EncodePlan | None) -> PlanRecord:
        """Return the record of a call that returned `plan`."""
        if plan is None:
            return cls()
        sizes = plan.inputs.lengths if isinstance(plan, EncodePlan) else plan.row_tokens
        rows = sizes.tolist()
        return cls(step=plan.step, rows=len(rows), tokens=sum(rows), reply_digest=digest(plan))

    def _arguments(self) -> list[Any]:
        return []


class MasksRecord(CallRecord, frozen=True, tag="masked"):
    """The engine was asked for masks, and returned some."""

    method: ClassVar[str] = "masks"


class CommitRecord(CallRecord, frozen=True, tag="committed"):
    """The worker has computed a step."""

    result: StepResult
    elapsed_s: float
    method: ClassVar[str] = "commit"


class CommitEncodedRecord(CallRecord, frozen=True, tag="committedencode"):
    """The worker has computed a step that encodes."""

    result: EncodeResult
    elapsed_s: float
    method: ClassVar[str] = "commit_encoded"


class PopResultsRecord(CallRecord, frozen=True, tag="poppedresults"):
    """A client could be sent results of encoding."""

    client: bytes
    num_bytes: int
    method: ClassVar[str] = "pop_results"


class KVReportRecord(CallRecord, frozen=True, tag="heard"):
    """The worker reported on K/V."""

    report: KVReport
    method: ClassVar[str] = "on_kv_report"


class LoadAdapterRecord(CallRecord, frozen=True, tag="loaded"):
    """A client wants an adapter to be loaded."""

    client: bytes
    message: LoadAdapter
    method: ClassVar[str] = "load_adapter"


class UnloadAdapterRecord(CallRecord, frozen=True, tag="unloaded"):
    """A client wants an adapter to be unloaded."""

    client: bytes
    message: UnloadAdapter
    method: ClassVar[str] = "unload_adapter"


class AdapterReportRecord(CallRecord, frozen=True, tag="adapted"):
    """The worker reported on an adapter."""

    report: AdapterReport
    method: ClassVar[str] = "on_adapter_report"


class AttachRecord(CallRecord, frozen=True, tag="attached"):
    """A client sent the content of an image. A journal has its size only."""

    digest: str
    num_bytes: int
    method: ClassVar[str] = "attach"

    def _arguments(self) -> list[Any]:
        return [self.digest, [], self.num_bytes]


class ImageEncodedRecord(CallRecord, frozen=True, tag="encodedimage"):
    """The worker has encoded an image, or could not."""

    message: ImageEncoded
    method: ClassVar[str] = "on_image_encoded"


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
    | AttachRecord
    | ImageEncodedRecord
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
