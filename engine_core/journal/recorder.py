"""An engine that writes down what it is told, and a digest of what it says to that.

What it decides is what any engine decides: each verb is the engine's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from typing import TypeVar

from engine_core.engine import Engine, draw_seed
from engine_core.grammar.book import Compiled
from engine_core.journal.file import Writer
from engine_core.journal.records import (
    FORMAT,
    Aborted,
    Added,
    Began,
    Committed,
    Drained,
    Dropped,
    Heard,
    Masked,
    Named,
    Planned,
    Record,
    Settled,
    Ticked,
    digest,
)
from protocol.config.engine import EngineConfig
from protocol.errors import ErrorInfo, ServingError
from protocol.kv import KVReport
from protocol.messages import Accepted, Generate, Limits, Output, Outputs, Refused
from protocol.model_card import ModelCard
from protocol.steps import Masks, StepPlan, StepResult

T = TypeVar("T")
RAISED = b"raised"
"""Instead of an answer's digest."""


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
        writer.write(
            Began(
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
        )
        super().__init__(
            config,
            model,
            limits,
            draft_cost=draft_cost,
            step_costs=step_costs,
            tiers=tiers,
            draw_seed=self._draw,
        )

    def _draw(self) -> int:
        self._drawn.append(draw_seed())
        return self._drawn[-1]

    def _keep(self, call: Callable[[], T], record_of: Callable[[bytes], Record]) -> T:
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

    def tick(self, now: float) -> dict[bytes, Outputs]:
        news = super().tick(now)
        self._waiting_tick = Ticked(now=now, said=digest(news) if news else b"")
        if news or not self.is_idle:
            self._write_tick()
        return news

    def add(self, client: bytes, message: Generate) -> Accepted | Refused | None:
        self._drawn = []

        def record_of(said: bytes) -> Record:
            return Added(client=client, message=message, seeds=self._drawn, said=said)

        return self._keep(partial(super().add, client, message), record_of)

    def settle(self, compiled: Compiled) -> list[tuple[bytes, Accepted | Refused]]:
        error = compiled.result.info() if isinstance(compiled.result, ServingError) else None
        record_of = partial(_settled, compiled.digest, error)
        return self._keep(partial(super().settle, compiled), record_of)

    def abort(self, client: bytes, numbers: Iterable[int]) -> list[Output]:
        asked = list(numbers)
        return self._keep(
            partial(super().abort, client, asked),
            lambda said: Aborted(client=client, numbers=asked, said=said),
        )

    def abort_named(
        self, names: Iterable[str]
    ) -> tuple[dict[bytes, list[Output]], dict[str, bool]]:
        asked = list(names)
        return self._keep(
            partial(super().abort_named, asked), lambda said: Named(names=asked, said=said)
        )

    def drop(self, client: bytes) -> None:
        self._keep(partial(super().drop, client), lambda said: Dropped(client=client))

    def drain(self) -> None:
        self._keep(super().drain, lambda said: Drained())

    def plan(self) -> StepPlan | None:
        was_idle = self.is_idle
        try:
            plan = super().plan()
        except BaseException:
            self._writer.write(Planned(said=RAISED))
            raise
        if plan is not None:
            self._writer.write(planned(plan))
        elif not was_idle:
            self._writer.write(Planned())
        return plan

    def masks(self) -> Masks | None:
        masks = super().masks()
        if masks is not None:
            self._writer.write(Masked(said=digest(masks)))
        return masks

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        return self._keep(
            partial(super().commit, result, elapsed_s),
            lambda said: Committed(result=result, elapsed_s=elapsed_s, said=said),
        )

    def hear(self, report: KVReport) -> dict[bytes, Outputs]:
        return self._keep(
            partial(super().hear, report), lambda said: Heard(report=report, said=said)
        )


def _settled(digest: bytes, error: ErrorInfo | None, said: bytes) -> Settled:
    return Settled(digest=digest, error=error, said=said)


def planned(plan: StepPlan) -> Planned:
    rows = plan.row_tokens.tolist()
    return Planned(step=plan.step, rows=len(rows), tokens=sum(rows), said=digest(plan))
