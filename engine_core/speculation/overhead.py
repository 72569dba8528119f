"""Overhead of steps with drafts, relative to the cost of their tokens; estimated from step times.

The worker measures its linear layers at start (step_costs.py). A step with drafts takes longer than
these predict: each draft position is attended and sampled by itself, and the next step is planned
only after its result. How much longer depends on the machine and its load. So steps are timed with
drafts and without, relative to the cost of their tokens. Estimates are kept per number of rows,
because a few rows predict nothing about many.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 16
"""A mean is taken over about this many steps."""
MIN_STEPS = 4
"""Steps of each kind before an estimate is made."""
OUTLIER = 2.0
"""Step times beyond this factor of the mean are clipped: they reflect the machine, not the
drafts.
"""
FORGET = 1 / 512
"""Decay per draft-free step. The two estimates converge, so drafting is retried eventually."""


@dataclass(slots=True)
class StepTime:
    """Mean seconds per unit of cost, for one kind of step."""

    mean: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        if self.count > MIN_STEPS:
            value = min(max(value, self.mean / OUTLIER), self.mean * OUTLIER)
        self.mean += (value - self.mean) / min(self.count, MEMORY)


@dataclass(slots=True)
class StepTimes:
    """The step times of one class of row counts."""

    #: Without drafts.
    plain: StepTime = field(default_factory=StepTime)
    #: With drafts.
    drafted: StepTime = field(default_factory=StepTime)

    def observe(self, value: float, *, is_drafted: bool) -> None:
        (self.drafted if is_drafted else self.plain).observe(value)
        if not is_drafted:
            self.drafted.mean += (self.plain.mean - self.drafted.mean) * FORGET

    @property
    def overhead(self) -> float:
        is_known = min(self.plain.count, self.drafted.count) >= MIN_STEPS
        return self.drafted.mean / self.plain.mean if is_known else 1.0


class DraftOverhead:
    """The overhead by number of rows, in powers of two."""

    def __init__(self) -> None:
        self._times: dict[int, StepTimes] = {}

    def __getitem__(self, rows: int) -> float:
        """Return the factor on the cost of a step with drafts; 1.0 if unknown."""
        times = self._times.get(rows.bit_length())
        return 1.0 if times is None else times.overhead

    def observe(self, rows: int, cost: float, elapsed_s: float, *, is_drafted: bool) -> None:
        """Record the time of a step without prompts.

        `cost` > 0 is its expected cost, in any unit.
        """
        if elapsed_s > 0:
            times = self._times.setdefault(rows.bit_length(), StepTimes())
            times.observe(elapsed_s / cost, is_drafted=is_drafted)
