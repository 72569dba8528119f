"""Replays a journal, and checks that the engine gives the same replies.

`replay` raises ReplayDiffers at the first record with a different reply. So a test can replay the
journal of an incident. The engine receives the recorded results of the worker. A real worker can
compute the same steps, so that its results can be compared with the recorded ones (weights.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any, Protocol

from engine_core.adapters import AdapterCommand
from engine_core.engine import Engine
from engine_core.grammar import large_stack
from engine_core.grammar.compiler import Compiler
from engine_core.grammar.jobs import CompiledGrammar, grammar_digest
from engine_core.grammar.matcher import MatcherTemplate
from engine_core.journal.records import (
    FORMAT,
    AddRecord,
    AnyRecord,
    CallRecord,
    CommitEncodedRecord,
    CommitRecord,
    FullRecord,
    GrammarRecord,
    PlanRecord,
    SnapshotRecord,
    StartRecord,
    TickRecord,
)
from engine_core.journal.restore import restore_snapshot
from protocol.engine.grammar import Grammar
from protocol.engine.stats import EngineStats
from protocol.wire.errors import ServingError, WireError, error_from
from protocol.worker.steps import EncodePlan, EncodeResult, Masks, StepPlan, StepResult


class ReplayDiffers(Exception):
    """The engine's reply differs from the recorded one. The message has the record's number."""


class NoJournal(Exception):
    """The records are not a journal that this release can replay."""


@dataclass
class ReplayReport:
    """Summary of a replay."""

    #: The first record of the journal.
    start: StartRecord
    #: Number of replayed records, without `start`.
    num_records: int = 0
    #: Kind of record -> number of records.
    kinds: Counter[str] = field(default_factory=Counter)
    #: Time from the first tick to the last.
    seconds: float = 0.0
    #: Statistics of the engine after the last record.
    stats: EngineStats = field(default_factory=EngineStats)
    #: Whether recording ended because the file was full.
    is_full: bool = False


class StepComparer(Protocol):
    """Computes the steps of a replay. ReplayWorker (weights.py) implements it."""

    def start(self, record: StartRecord) -> None:
        """Prepare for the steps of an engine that was created with these arguments."""

    def send(self, message: StepPlan | EncodePlan | Masks | AdapterCommand) -> None:
        """Start to compute the step of a plan, or supply its masks. Raises an exception for a
        command about LoRA adapters if it cannot be carried out again."""

    def compare(self, recorded: StepResult | EncodeResult, where: str) -> None:
        """Compare the result of the oldest step with `recorded`. `where` names the record, for
        messages."""


def replay(
    records: Iterable[AnyRecord], *, checks: bool = False, worker: StepComparer | None = None
) -> ReplayReport:
    """Replay the records, and return a summary.

    checks   check the invariants of slots, blocks and the prefix cache after each record (slow)
    worker   computes the steps too

    Raises ReplayDiffers, NoJournal, and any exception of the worker or the engine. The engine may
    have raised the same exception when it was recorded.
    """
    remaining = iter(records)
    start = next(remaining, None)
    if not isinstance(start, StartRecord):
        raise NoJournal("not a journal: it does not start with the engine's configuration")
    if start.format != FORMAT:
        raise NoJournal(f"the journal has format {start.format}; this release reads {FORMAT}")
    if worker is not None:
        worker.start(start)
    replayed = _ReplayedEngine(start, worker)
    report = ReplayReport(start)
    first: float | None = None
    for number, record in zip(count(1), remaining, strict=False):
        replayed.apply(number, record)
        if checks:
            replayed.engine.check()
        report.num_records = number
        report.kinds[str(type(record).__struct_config__.tag)] += 1
        report.is_full = isinstance(record, FullRecord)
        if isinstance(record, TickRecord):
            first = record.now if first is None else first
            report.seconds = record.now - first
    report.stats = replayed.engine.stats()
    return report


class _ReplayedEngine:
    """An engine to which records are applied."""

    def __init__(self, start: StartRecord, worker: StepComparer | None) -> None:
        self._worker = worker
        #: Seeds of the current record.
        self._seeds: list[int] = []
        #: Digest -> grammar that was to be compiled.
        self._jobs: dict[bytes, Grammar] = {}
        #: Created when it is first needed, because some models have no grammar compiler.
        self._compiler = cache(partial(Compiler, start.model))
        #: Time of the last tick.
        self._at = 0.0
        self.engine = Engine(
            start.config,
            start.model,
            start.limits,
            draft_cost=start.draft_cost,
            step_costs=start.step_costs,
            tiers=start.tiers,
            adapters=start.adapters,
            draw_seed=self._draw,
        )

    def _draw(self) -> int:
        return self._seeds.pop(0)

    def apply(self, number: int, record: AnyRecord) -> None:
        """Make the recorded call. Raises ReplayDiffers if the reply differs from the record's."""
        if isinstance(record, SnapshotRecord):
            self._restore(record)
        elif isinstance(record, CallRecord):
            self._call(number, record)
        self._jobs |= {job.digest: job.grammar for job in self.engine.drain_compile_jobs()}
        for command in self.engine.adapters.drain_commands():
            if self._worker is not None:
                self._worker.send(command)
        self.engine.drain_kv_commands()
        self.engine.drain_kv_events()
        self.engine.images.drain_commands()
        self.engine.pop_freed()

    def _restore(self, record: SnapshotRecord) -> None:
        """Restore the state that the engine had when the file was started.

        Raises NoJournal if the snapshot is damaged.
        """
        self._jobs = {grammar_digest(grammar): grammar for grammar in record.grammars}
        try:
            restore_snapshot(self.engine, record.snapshot, cache(self._template))
        except (LookupError, ValueError, WireError) as error:
            raise NoJournal(f"the snapshot in this journal is damaged: {error!r}") from None

    def _template(self, digest: bytes) -> MatcherTemplate:
        return large_stack.call(lambda: self._compiler().compile(self._jobs[digest]))

    def _call(self, number: int, record: CallRecord) -> None:
        match record:
            case TickRecord(now=now):
                self._at = now
            case AddRecord(seeds=seeds):
                self._seeds = list(seeds)
            case CommitRecord(result=result) | CommitEncodedRecord(result=result):
                if self._worker is not None:
                    self._worker.compare(result, self._position(number))
        reply: Any = (
            self.engine.on_grammar_compiled(self._compiled(record))
            if isinstance(record, GrammarRecord)
            else record.call(self.engine)
        )
        if isinstance(record, PlanRecord):
            if (replayed := PlanRecord.of(reply)) != record:
                raise ReplayDiffers(
                    f"{self._position(number)}: was {_describe(record)}, is {_describe(replayed)}"
                )
        elif record.digest_of(reply) != record.reply_digest:
            kind = str(type(record).__struct_config__.tag)
            raise ReplayDiffers(f"{self._position(number)}: the reply to {kind!r} differs")
        if self._worker is not None and isinstance(reply, StepPlan | EncodePlan | Masks):
            self._worker.send(reply)

    def _position(self, number: int) -> str:
        return f"record {number}, at {self._at:.3f} s"

    def _compiled(self, record: GrammarRecord) -> CompiledGrammar:
        result: MatcherTemplate | ServingError
        if record.error is not None:
            result = error_from(record.error)
        else:
            result = self._template(record.digest)
        return CompiledGrammar(record.digest, result, record.num_bytes)


def _describe(record: PlanRecord) -> str:
    if record.step is None:
        return "no step"
    digest = record.reply_digest.hex()
    return f"step {record.step} of {record.rows} rows and {record.tokens} tokens ({digest})"
