"""Reads measured step times: from a journal, or from the output of `tidegate bench step --json`.

A journal (`tidegate serve --journal`) contains every plan of a real server and the time of every
step, including all delays there. The journal is replayed to get the plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine_core.adapters import AdapterCommand
from engine_core.journal.file import list_journals, read
from engine_core.journal.records import CommitRecord, StartRecord, TickRecord
from engine_core.journal.replay import NoJournal, ReplayDiffers, replay
from protocol.engine.messages import Limits
from protocol.tools.bench import StepBenchReady, StepTiming
from protocol.wire.errors import WireError
from protocol.worker.steps import EncodePlan, EncodeResult, Masks, StepPlan, StepResult
from simulator.replica import work_of
from simulator.steps import MeasuredStep, StepWork, chunk_pairs


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """Measured steps of one worker."""

    name: str
    steps: list[MeasuredStep]
    is_gpu: bool
    #: The limits of the server; None if no server was measured.
    limits: Limits | None = None
    #: When each step ended, on the clock of the engine (time.monotonic); empty if not known.
    ended_at: list[float] = field(default_factory=list)


@dataclass(slots=True)
class PlanCollector:
    """Stands in for the worker when a journal is replayed. It computes nothing, but stores how much
    each step had to compute (StepWork)."""

    works: list[StepWork] = field(default_factory=list)

    def start(self, record: StartRecord) -> None:
        """Do nothing: no step is computed."""

    def send(self, message: StepPlan | EncodePlan | Masks | AdapterCommand) -> None:
        if isinstance(message, StepPlan):
            self.works.append(work_of(message))

    def compare(self, recorded: StepResult | EncodeResult, where: str) -> None:
        """Do nothing: no step is computed."""


def read_measurements(path: str) -> StepMeasurements:
    """Return the steps in a journal, in the newest journal of a directory, or in a JSON file.

    Raises OSError, and ValueError if the file is none of these.
    """
    file = Path(path)
    if file.is_dir():
        journals = list_journals(file)
        if not journals:
            raise ValueError(f"--steps: {path} contains no journal")
        file = journals[-1]
    if file.suffix == ".json":
        return _read_bench(file)
    return read_journal(file)


def read_journal(path: Path) -> StepMeasurements:
    """Return the steps of a journal that begins when its engine starts. Raises ValueError, naming
    the file, if the journal cannot be replayed."""
    plans = PlanCollector()
    try:
        records = [*read(path)]
        report = replay(records, worker=plans)
    except (NoJournal, ReplayDiffers, WireError) as error:
        raise ValueError(f"--steps: {path}: {error}") from None
    now, steps, ended_at = 0.0, [], []
    works = iter(plans.works)
    for record in records:
        if isinstance(record, TickRecord):
            now = record.now
        elif isinstance(record, CommitRecord):
            steps.append(MeasuredStep(next(works), record.elapsed_s))
            ended_at.append(now)
    limits = report.start.limits
    return StepMeasurements(report.start.model.name, steps, False, limits, ended_at)


def _read_bench(path: Path) -> StepMeasurements:
    """Return the steps of `tidegate bench step --json`. Each line is the output of one run."""
    steps: list[MeasuredStep] = []
    ready: StepBenchReady | None = None
    for line in path.read_bytes().splitlines():
        try:
            items = msgspec.json.decode(line, type=list[StepBenchReady | StepTiming])
        except msgspec.MsgspecError as error:
            raise ValueError(f"--steps: {path} is not the JSON of bench step: {error}") from None
        for item in items:
            if isinstance(item, StepBenchReady):
                ready = item
            else:
                steps.append(MeasuredStep(_bench_work(item), item.step_s))
    if ready is None:
        raise ValueError(f"--steps: {path} has no steps")
    return StepMeasurements(ready.model, steps, is_gpu=ready.device != "cpu")


def _bench_work(timing: StepTiming) -> StepWork:
    batch, start, count = timing.batch, timing.context, timing.new_tokens
    if count == 1:
        return StepWork(batch, batch * (start + 1))
    return StepWork(0, 0, batch, batch * count, batch * chunk_pairs(start, count))
