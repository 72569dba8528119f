"""Replays a journal without a worker, and checks that the engine decides the same.

`replay` can turn an incident into a test: it raises ReplayDiffers at the first record with another
reply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count

from engine_core.engine import Engine
from engine_core.grammar.cache import CompiledGrammar, digest_of
from engine_core.grammar.compiler import Compiler
from engine_core.grammar.matcher import MatcherTemplate
from engine_core.journal.recorder import plan_record
from engine_core.journal.records import (
    FORMAT,
    AbortByLabelRecord,
    AbortRecord,
    AddRecord,
    AnyRecord,
    Began,
    ClientLostRecord,
    CommitRecord,
    Drained,
    Full,
    GrammarRecord,
    KnownRecord,
    KVReportRecord,
    MasksRecord,
    PlanRecord,
    Ticked,
    digest,
)
from engine_core.journal.snapshot import restore_snapshot
from protocol.errors import ServingError, WireError, error_from
from protocol.grammar import Grammar
from protocol.stats import EngineStats


class ReplayDiffers(Exception):
    """The engine's reply differs from the recorded one. The message names the record."""


class NoJournal(Exception):
    """The records are not a journal that this release can replay."""


@dataclass
class ReplayReport:
    """Summary of a replay."""

    #: The first record.
    began: Began
    num_records: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    #: Of the engine's clock, from the first tick to the last.
    seconds: float = 0.0
    #: Of the engine, at the end.
    stats: EngineStats = field(default_factory=EngineStats)
    #: The journal was full before the engine stopped.
    is_full: bool = False


def replay(records: Iterable[AnyRecord], *, checks: bool = False) -> ReplayReport:
    """Replay the records, and return a summary.

    `checks`: check every invariant of slots, blocks and the cache after each record (slow). Raises
    ReplayDiffers, NoJournal, and whatever the engine raises, as it may have when recorded.
    """
    remaining = iter(records)
    began = next(remaining, None)
    if not isinstance(began, Began):
        raise NoJournal("not a journal: it does not start with the engine's configuration")
    if began.format != FORMAT:
        raise NoJournal(f"the journal has format {began.format}; this release reads {FORMAT}")
    replayed = _ReplayedEngine(began)
    done = ReplayReport(began)
    first: float | None = None
    for number, record in zip(count(1), remaining, strict=False):
        replayed.apply(number, record)
        if checks:
            replayed.engine.check()
        done.num_records = number
        done.kinds[str(type(record).__struct_config__.tag)] += 1
        done.is_full = isinstance(record, Full)
        if isinstance(record, Ticked):
            first = record.now if first is None else first
            done.seconds = record.now - first
    done.stats = replayed.engine.stats()
    return done


class _ReplayedEngine:
    def __init__(self, began: Began) -> None:
        self._seeds: list[int] = []
        self._jobs: dict[bytes, Grammar] = {}
        self._compiler = cache(
            partial(Compiler, began.model)
        )  # on demand: some models have no compiler
        self._at = 0.0
        self.engine = Engine(
            began.config,
            began.model,
            began.limits,
            draft_cost=began.draft_cost,
            step_costs=began.step_costs,
            tiers=began.tiers,
            draw_seed=self._draw,
        )

    def _draw(self) -> int:
        return self._seeds.pop(0)

    def apply(self, number: int, record: AnyRecord) -> None:
        engine = self.engine
        match record:
            case KnownRecord():
                self._restore(record)
            case Ticked(now=now):
                self._at = now
                outputs = engine.tick(now)
                self._compare(number, record, digest(outputs) if outputs else b"")
            case AddRecord(client=client, message=message, seeds=seeds):
                self._seeds = list(seeds)
                self._compare(number, record, digest(engine.add(client, message)))
            case GrammarRecord():
                self._compare(
                    number, record, digest(engine.on_grammar_compiled(self._compiled(record)))
                )
            case AbortRecord(client=client, numbers=numbers):
                self._compare(number, record, digest(engine.abort(client, numbers)))
            case AbortByLabelRecord(names=names):
                self._compare(number, record, digest(engine.abort_by_label(names)))
            case ClientLostRecord(client=client):
                engine.on_client_lost(client)
            case Drained():
                engine.drain()
            case PlanRecord():
                self._plan(number, record)
            case MasksRecord():
                self._compare(number, record, digest(engine.masks()))
            case CommitRecord(result=result, elapsed_s=elapsed_s):
                self._compare(number, record, digest(engine.commit(result, elapsed_s)))
            case KVReportRecord(report=report):
                self._compare(number, record, digest(engine.on_kv_report(report)))
        self._jobs |= {job.digest: job.grammar for job in self.engine.drain_compile_jobs()}
        self.engine.drain_kv_commands()
        self.engine.freed.clear()

    def _restore(self, record: KnownRecord) -> None:
        """Restore what the engine remembered when this part began. Raises NoJournal."""
        self._jobs = {digest_of(grammar): grammar for grammar in record.grammars}
        try:
            restore_snapshot(self.engine, record.snapshot, cache(self._template))
        except (LookupError, ValueError, WireError) as error:
            raise NoJournal(f"the snapshot in this journal is damaged: {error!r}") from None

    def _template(self, digest: bytes) -> MatcherTemplate:
        return self._compiler().compile(self._jobs[digest])

    def _plan(self, number: int, record: PlanRecord) -> None:
        plan = self.engine.plan()
        now = PlanRecord() if plan is None else plan_record(plan)
        if now != record:
            raise ReplayDiffers(
                f"{self._where(number)}: was {_describe(record)}, is {_describe(now)}"
            )

    def _compare(
        self,
        number: int,
        record: Ticked
        | AddRecord
        | GrammarRecord
        | AbortRecord
        | AbortByLabelRecord
        | MasksRecord
        | CommitRecord
        | KVReportRecord,
        reply_digest: bytes,
    ) -> None:
        if reply_digest != record.reply_digest:
            kind = str(type(record).__struct_config__.tag)
            raise ReplayDiffers(f"{self._where(number)}: the reply to {kind!r} differs")

    def _where(self, number: int) -> str:
        return f"record {number}, at {self._at:.3f} s"

    def _compiled(self, record: GrammarRecord) -> CompiledGrammar:
        result: MatcherTemplate | ServingError
        if record.error is not None:
            result = error_from(record.error)
        else:
            result = self._template(record.digest)
        return CompiledGrammar(record.digest, result)


def _describe(record: PlanRecord) -> str:
    if record.step is None:
        return "no step"
    digest = record.reply_digest.hex()
    return f"step {record.step} of {record.rows} rows and {record.tokens} tokens ({digest})"
