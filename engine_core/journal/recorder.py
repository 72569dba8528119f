"""An engine that records its input, and a digest of each reply, in a journal.

Each method calls the base class, so the decisions are those of a plain `Engine`. When the file is
nearly full, recording continues in another file, which starts with a snapshot of the engine
(capture.py). The snapshot is taken in `tick`, at the start of a turn of the loop. By then the loop
has sent all replies and K/V commands of the previous turn, so the snapshot contains none.

The snapshot contains the results of encoding that wait for their clients. While these are large,
the next file is put off. If the present one is full meanwhile, the journal has a gap, but the next
file can be replayed by itself.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

from msgspec.structs import replace

from engine_core.engine import Engine, draw_seed
from engine_core.grammar.jobs import CompiledGrammar, CompileJob
from engine_core.journal.capture import take_snapshot
from engine_core.journal.file import Writer
from engine_core.journal.records import (
    FORMAT,
    RAISED,
    AbortByLabelRecord,
    AbortRecord,
    AdapterReportRecord,
    AddEncodeRecord,
    AddRecord,
    AttachRecord,
    CallRecord,
    ClientLostRecord,
    CommitEncodedRecord,
    CommitRecord,
    DrainRecord,
    GrammarRecord,
    ImageEncodedRecord,
    KVReportRecord,
    LoadAdapterRecord,
    MasksRecord,
    PlanRecord,
    PopResultsRecord,
    SnapshotRecord,
    StartRecord,
    TickRecord,
    UnloadAdapterRecord,
    digest,
)
from protocol.config.engine import EngineConfig
from protocol.engine.adapters import AdapterInfo
from protocol.engine.attachments import AttachedTensor
from protocol.engine.grammar import Grammar
from protocol.engine.messages import (
    Accepted,
    Generate,
    Limits,
    Output,
    Outputs,
    Refused,
)
from protocol.engine.model_card import ModelCard
from protocol.engine.timeline import AbortReason
from protocol.wire.errors import ServingError
from protocol.worker.steps import (
    EncodePlan,
    Masks,
    StepPlan,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
MIN_GRAMMARS = 256
"""Stored grammars are pruned when there are more than this number plus twice the number kept by the
last pruning.
"""


def recorded(kind: type[CallRecord]) -> Any:
    """Return the method of RecordedEngine that makes a call of this kind, whose record has just the
    call's arguments."""
    method = getattr(Engine, kind.method)

    def call_and_record(engine: RecordedEngine, *arguments: Any, **named: Any) -> Any:
        record = kind(*arguments, **named)
        return engine._call(record, partial(method, engine, *arguments, **named))

    return call_and_record


class RecordedEngine(Engine):
    """An engine with a journal.

    It cannot be part of a cluster, because sealed handles cannot be replayed.
    """

    add_encode = recorded(AddEncodeRecord)
    abort_by_label = recorded(AbortByLabelRecord)
    on_client_lost = recorded(ClientLostRecord)
    drain = recorded(DrainRecord)
    commit = recorded(CommitRecord)
    commit_encoded = recorded(CommitEncodedRecord)
    pop_results = recorded(PopResultsRecord)
    on_kv_report = recorded(KVReportRecord)
    load_adapter = recorded(LoadAdapterRecord)
    unload_adapter = recorded(UnloadAdapterRecord)
    on_adapter_report = recorded(AdapterReportRecord)
    on_image_encoded = recorded(ImageEncodedRecord)

    def __init__(
        self,
        writer: Writer,
        config: EngineConfig,
        model: ModelCard,
        limits: Limits,
        *,
        draft_cost: float = 0.0,
        step_costs: Sequence[tuple[int, float]] = (),
        tiers: Sequence[str] = (),
        adapters: Sequence[AdapterInfo] = (),
    ) -> None:
        self._writer = writer
        #: Seeds drawn in the current call of `add`.
        self._drawn: list[int] = []
        #: The last tick of an idle engine. It is written only before another record, so that an
        #: idle engine writes nothing.
        self._unwritten_tick: TickRecord | None = None
        #: Digest -> grammar that the engine may still refer to.
        self._grammars: dict[bytes, Grammar] = {}
        self._max_grammars = MIN_GRAMMARS
        self._compiling: set[bytes] = set()
        self._start_record = StartRecord(
            format=FORMAT,
            at=time.time(),
            version=metadata.version("tidegate"),
            config=config,
            model=model,
            limits=limits,
            draft_cost=draft_cost,
            step_costs=list(step_costs),
            tiers=list(tiers),
            adapters=list(adapters),
        )
        writer.write(self._start_record)
        super().__init__(
            config,
            model,
            limits,
            draft_cost=draft_cost,
            step_costs=step_costs,
            tiers=tiers,
            adapters=adapters,
            draw_seed=self._draw,
        )

    def _draw(self) -> int:
        self._drawn.append(draw_seed())
        return self._drawn[-1]

    def _call(self, record: CallRecord, call: Callable[[], T]) -> T:
        """Call the engine, write `record` with the digest of the reply, and return the reply. A
        call that raises is recorded too, with the digest RAISED."""
        self._write_tick()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(lambda: self._writer.write(replace(record, reply_digest=RAISED)))
            reply = call()
            on_failure.pop_all()
        self._writer.write(replace(record, reply_digest=record.digest_of(reply)))
        return reply

    def _write_tick(self) -> None:
        if self._unwritten_tick is not None:
            self._writer.write(self._unwritten_tick)
            self._unwritten_tick = None

    def _start_next_part(self) -> None:
        """Continue in another file, which starts with a snapshot."""
        self._write_tick()
        started_at = time.perf_counter()
        self._prune_grammars()
        start = replace(self._start_record, at=time.time(), part=self._writer.part + 1)
        state = SnapshotRecord(snapshot=take_snapshot(self), grammars=[*self._grammars.values()])
        num_bytes = self._writer.start_next([start, state])
        if num_bytes:
            text = "the journal continues in %s (snapshot: %d KiB, %.0f ms)"
            log.info(
                text, self._writer.path, num_bytes >> 10, 1e3 * (time.perf_counter() - started_at)
            )

    def _prune_grammars(self) -> None:
        """Remove the stored grammars that the engine no longer refers to."""
        needed = self._compiling | self.admission.cached_grammars.keys()
        needed |= {request.grammar for request in self.open_requests if request.grammar is not None}
        self._grammars = {d: grammar for d, grammar in self._grammars.items() if d in needed}
        self._max_grammars = 2 * len(self._grammars) + MIN_GRAMMARS

    def drain_compile_jobs(self) -> list[CompileJob]:
        jobs = super().drain_compile_jobs()
        for job in jobs:
            self._grammars[job.digest] = job.grammar
            self._compiling.add(job.digest)
        if len(self._grammars) > self._max_grammars:
            self._prune_grammars()
        return jobs

    def tick(self, now: float) -> dict[bytes, Outputs]:
        if self._writer.is_nearly_full and self._writer.may_start_next(
            self.encoding.num_result_bytes
        ):
            self._start_next_part()
        outputs = super().tick(now)
        tick = TickRecord(now)
        self._unwritten_tick = replace(tick, reply_digest=tick.digest_of(outputs))
        if outputs or not self.is_idle:
            self._write_tick()
        return outputs

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        self._drawn = []  # `_draw` adds to the record's list
        return self._call(
            AddRecord(client, message, self._drawn), partial(super().add, client, message)
        )

    def attach(self, digest: str, tensors: list[AttachedTensor], num_bytes: int) -> None:
        record = AttachRecord(digest, num_bytes)
        self._call(record, partial(super().attach, digest, tensors, num_bytes))

    def on_grammar_compiled(
        self, compiled: CompiledGrammar
    ) -> list[tuple[bytes, Accepted | Refused]]:
        self._compiling.discard(compiled.digest)
        error = compiled.result.info() if isinstance(compiled.result, ServingError) else None
        record = GrammarRecord(compiled.digest, error, compiled.num_bytes)
        return self._call(record, partial(super().on_grammar_compiled, compiled))

    def abort(
        self, client: bytes, numbers: Sequence[int], reason: AbortReason = ""
    ) -> list[Output]:
        record = AbortRecord(client, list(numbers))
        return self._call(record, partial(super().abort, client, numbers, reason))

    def plan(self) -> StepPlan | EncodePlan | None:
        was_idle = self.is_idle
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._writer.write, PlanRecord(reply_digest=RAISED))
            plan = super().plan()
            on_failure.pop_all()
        if plan is not None or not was_idle:
            self._writer.write(PlanRecord.of(plan))
        return plan

    def masks(self) -> Masks | None:
        masks = super().masks()
        if masks is not None:
            self._writer.write(MasksRecord(reply_digest=digest(masks)))
        return masks
