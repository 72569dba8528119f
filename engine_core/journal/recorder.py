"""An engine that writes down what it is told, and a digest of what it says to that.

What it decides is what any engine decides: each verb is the engine's own. When a file is nearly
full it goes on in another, which begins with all that the engine is by then (state.py): between two
turns of the loop, when nothing that it has decided waits to be taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from engine_core.engine import Engine, draw_seed
from engine_core.grammar.cache import CompiledGrammar, CompileJob
from engine_core.journal.file import Writer
from engine_core.journal.records import (
    FORMAT,
    AbortByLabelRecord,
    AbortRecord,
    AddRecord,
    Began,
    ClientLostRecord,
    CommitRecord,
    Drained,
    GrammarRecord,
    JournalRecord,
    KnownRecord,
    KVReportRecord,
    MasksRecord,
    PlanRecord,
    Ticked,
    digest,
)
from engine_core.journal.state import Unknown, freeze, named
from protocol.config.engine import EngineConfig
from protocol.errors import ErrorInfo, ServingError
from protocol.grammar import Grammar
from protocol.kv import KVReport
from protocol.messages import Accepted, Generate, Limits, Output, Outputs, Refused
from protocol.model_card import ModelCard
from protocol.steps import Masks, StepPlan, StepResult

log = logging.getLogger(__name__)

T = TypeVar("T")
RAISED = b"raised"
"""Instead of an answer's digest."""
LEAST_GRAMMARS = 256
"""Beyond these, and twice those that are needed, they are looked through."""


class RecordedEngine(Engine):
    """Not one of a cluster: what its engines seal for one another cannot be opened again."""

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
    ) -> None:
        self._writer = writer
        self._drawn: list[int] = []
        self._waiting_tick: Ticked | None = None  # of an idle engine: it matters to what comes next
        self._grammars: dict[bytes, Grammar] = {}  # those that anything may still refer to
        self._most_grammars = LEAST_GRAMMARS
        self._compiling: set[bytes] = set()
        self._began = Began(
            format=FORMAT,
            at=time.time(),
            version=metadata.version("tidegate"),
            config=config,
            model=model,
            limits=limits,
            draft_cost=draft_cost,
            step_costs=list(step_costs),
            tiers=list(tiers),
        )
        writer.write(self._began)
        self._given: dict[int, str] = {}
        self._state: list[str] = []  # names of what is the engine's and not ours
        draw, own = self._draw, set(vars(self))
        super().__init__(
            config,
            model,
            limits,
            draft_cost=draft_cost,
            step_costs=step_costs,
            tiers=tiers,
            draw_seed=draw,
        )
        self._state = [name for name in vars(self) if name not in own]
        self._given = {id(config): "config", id(model): "model", id(limits): "limits"}
        self._given[id(draw)] = "draw_seed"

    def _draw(self) -> int:
        self._drawn.append(draw_seed())
        return self._drawn[-1]

    def _keep(self, call: Callable[[], T], record_of: Callable[[bytes], JournalRecord]) -> T:
        """Do it, and write it down; also where it fails: that is what a journal is for."""
        self._write_tick()
        try:
            answer = call()
        except BaseException:
            self._writer.write(record_of(RAISED))
            raise
        self._writer.write(record_of(digest(answer)))
        return answer

    def _write_tick(self) -> None:
        if self._waiting_tick is not None:
            self._writer.write(self._waiting_tick)
            self._waiting_tick = None

    def _begin_part(self) -> None:
        """Go on in another file."""
        self._write_tick()
        began = time.perf_counter()
        try:
            engine = {name: getattr(self, name) for name in self._state}
            state = msgspec.msgpack.encode(freeze(engine, self._all_given()))
        except Unknown as error:
            self._writer.end(f"cannot be gone on with: {error}")
            return
        self._forget_grammars()
        first = replace(self._began, at=time.time(), part=self._writer.part + 1)
        self._writer.begin_next(
            [first, KnownRecord(state=state, grammars=[*self._grammars.values()])]
        )
        told = "the journal goes on in %s, behind a state of %d KiB, %.0f ms"
        log.info(told, self._writer.path, len(state) >> 10, 1e3 * (time.perf_counter() - began))

    def _all_given(self) -> dict[int, str]:
        templates = self._door.templates.items()
        return self._given | {id(template): named(digest) for digest, template in templates}

    def _forget_grammars(self) -> None:
        """Those that nothing refers to any more."""
        wanted = self._compiling | self._door.templates.keys()
        wanted |= {request.grammar for request in self._open if request.grammar is not None}
        self._grammars = {d: grammar for d, grammar in self._grammars.items() if d in wanted}
        self._most_grammars = 2 * len(self._grammars) + LEAST_GRAMMARS

    def take_jobs(self) -> list[CompileJob]:
        jobs = super().take_jobs()
        for job in jobs:
            self._grammars[job.digest] = job.grammar
            self._compiling.add(job.digest)
        if len(self._grammars) > self._most_grammars:
            self._forget_grammars()
        return jobs

    def tick(self, now: float) -> dict[bytes, Outputs]:
        if self._writer.is_nearly_full:
            self._begin_part()
        news = super().tick(now)
        self._waiting_tick = Ticked(now=now, said=digest(news) if news else b"")
        if news or not self.is_idle:
            self._write_tick()
        return news

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        self._drawn = []

        def record_of(said: bytes) -> JournalRecord:
            return AddRecord(client=client, message=message, seeds=self._drawn, said=said)

        return self._keep(partial(super().add, client, message), record_of)

    def settle(self, compiled: CompiledGrammar) -> list[tuple[bytes, Accepted | Refused]]:
        self._compiling.discard(compiled.digest)
        error = compiled.result.info() if isinstance(compiled.result, ServingError) else None
        record_of = partial(_settled, compiled.digest, error)
        return self._keep(partial(super().settle, compiled), record_of)

    def abort(self, client: bytes, numbers: Iterable[int]) -> list[Output]:
        asked = list(numbers)
        return self._keep(
            partial(super().abort, client, asked),
            lambda said: AbortRecord(client=client, numbers=asked, said=said),
        )

    def abort_named(
        self, names: Iterable[str]
    ) -> tuple[dict[bytes, list[Output]], dict[str, bool]]:
        asked = list(names)
        return self._keep(
            partial(super().abort_named, asked),
            lambda said: AbortByLabelRecord(names=asked, said=said),
        )

    def drop(self, client: bytes) -> None:
        self._keep(partial(super().drop, client), lambda said: ClientLostRecord(client=client))

    def drain(self) -> None:
        self._keep(super().drain, lambda said: Drained())

    def plan(self) -> StepPlan | None:
        was_idle = self.is_idle
        try:
            plan = super().plan()
        except BaseException:
            self._writer.write(PlanRecord(said=RAISED))
            raise
        if plan is not None:
            self._writer.write(planned(plan))
        elif not was_idle:
            self._writer.write(PlanRecord())
        return plan

    def masks(self) -> Masks | None:
        masks = super().masks()
        if masks is not None:
            self._writer.write(MasksRecord(said=digest(masks)))
        return masks

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        return self._keep(
            partial(super().commit, result, elapsed_s),
            lambda said: CommitRecord(result=result, elapsed_s=elapsed_s, said=said),
        )

    def hear(self, report: KVReport) -> dict[bytes, Outputs]:
        return self._keep(
            partial(super().hear, report), lambda said: KVReportRecord(report=report, said=said)
        )


def _settled(digest: bytes, error: ErrorInfo | None, said: bytes) -> GrammarRecord:
    return GrammarRecord(digest=digest, error=error, said=said)


def planned(plan: StepPlan) -> PlanRecord:
    rows = plan.row_tokens.tolist()
    return PlanRecord(step=plan.step, rows=len(rows), tokens=sum(rows), said=digest(plan))
