"""An engine that computes the facts of a step's rows as columns decides as one that computes them
row by row (engine_core/schedule/columns.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from engine_core import engine
from engine_core.requests.request import Request, RequestPhase
from engine_core.schedule import columns, inflight, plan, scheduler
from engine_core.schedule.block_tables import BlockTables
from engine_core.schedule.plan import Schedule
from engine_core.schedule.row_results import RowResult, row_results
from protocol.worker.steps import StepPlan, StepResult
from tests.support.examples import examples
from tests.support.storm import RequestStorm, SmallCacheStorm, StateStorm, WindowStorm

OPERATIONS = examples(150, 3000)
STORMS: dict[str, Callable[[], RequestStorm]] = {
    "one step in flight": lambda: RequestStorm(5),
    "two steps in flight": lambda: RequestStorm(7),
    "n-grams": lambda: RequestStorm(103),
    "a draft model": lambda: RequestStorm(205),
    "a window": lambda: WindowStorm(7),
    "K/V groups": lambda: WindowStorm(5, 3),
    "tiers": lambda: SmallCacheStorm(3, ["host"]),
    "states": lambda: StateStorm(11),
    "states and n-grams": lambda: StateStorm(103),
}


class RowByRowResults:
    """The results of a step's rows, each computed on its own. `tokens` is None for every row, so
    the engine treats no row as one that has only a token."""

    def __init__(self, plan: StepPlan, result: StepResult) -> None:
        self._rows = row_results(plan, result)
        self.tokens = [None] * len(self._rows)

    def __getitem__(self, row: int) -> RowResult:
        return self._rows[row]


def grow_one_by_one(tables: BlockTables, growing: Sequence[Request], step: Schedule) -> None:
    for request in growing:
        tables.grow(request, request.num_scheduled + 1, step)


def charge_one_by_one(requests: Iterable[Request], counts: Iterable[int]) -> None:
    for request, count in zip(requests, counts, strict=True):
        for position in range(request.num_scheduled, request.num_scheduled + count):
            if position >= request.num_charged:
                request.account_usage.served += 1
                request.num_charged = position + 1


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Yield a MonkeyPatch that replaces every column by its reference, which computes one row at a
    time, until `undo` is called."""
    with monkeypatch.context() as patch:
        patch.setattr(
            scheduler, "running_column", lambda rs: [r for r in rs if r.phase.name == "RUNNING"]
        )
        patch.setattr(scheduler, "uncomputed_column", lambda rs: [r.num_uncomputed for r in rs])
        patch.setattr(plan, "samples_column", lambda rs: [r.samples for r in rs])
        patch.setattr(plan, "repeats", lambda schedule, requests, newest: False)
        patch.setattr(BlockTables, "growing", lambda t, rs: [r for r in rs if t.needs_block(r)])
        patch.setattr(BlockTables, "grow_all", grow_one_by_one)
        patch.setattr(inflight, "StepRowResults", RowByRowResults)
        patch.setattr(engine, "charge_rows", charge_one_by_one)
        yield patch


def run(storm: RequestStorm) -> tuple[RequestStorm, list[tuple[int, dict[int, bytes]]]]:
    """Run a storm. Return it, and the number of free blocks and the contents of the prefix cache
    after each operation."""
    pool, blocks = storm.bench.engine.scheduler.pool, []
    for _ in range(OPERATIONS):
        storm.operate()
        blocks.append((pool.num_free, pool.cache.items()))
    storm.finish_all()
    return storm, blocks


@pytest.mark.parametrize("name", STORMS)
def test_columns_give_the_plans_and_outputs_of_rows(
    name: str, row_by_row: pytest.MonkeyPatch
) -> None:
    reference, reference_blocks = run(STORMS[name]())
    row_by_row.undo()
    storm, blocks = run(STORMS[name]())
    assert blocks == reference_blocks
    assert storm.bench.plans == reference.bench.plans
    assert storm.bench.outputs == reference.bench.outputs
    assert storm.bench.engine.stats() == reference.bench.engine.stats()


@pytest.mark.parametrize("name", STORMS)
def test_each_column_holds_the_facts_of_its_requests(name: str) -> None:
    storm = STORMS[name]()
    tables, running = storm.bench.engine.scheduler.tables, storm.bench.engine.scheduler.running
    for _ in range(OPERATIONS):
        storm.operate()
        assert columns.running_column(running) == [
            request for request in running if request.phase is RequestPhase.RUNNING
        ]
        assert columns.uncomputed_column(running) == [r.num_uncomputed for r in running]
        assert columns.samples_column(running) == [request.samples for request in running]
        assert columns.slot_column(running) == [request.slot for request in running]
        assert columns.start_column(running) == [request.num_scheduled for request in running]
        assert tables.growing(running) == list(filter(tables.needs_block, running))
