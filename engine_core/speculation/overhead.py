"""Overhead of steps with drafts, estimated from step times.

At start, the worker measures only its linear layers (step_costs.py). A step with drafts takes
longer than this cost predicts: attention and sampling also run for each draft, and the next step is
planned only after its result. The excess depends on the machine and its load. Therefore steps with
and without drafts are timed, and the overhead is the ratio of their mean times per unit of
predicted cost. It is estimated separately for each range of row counts, because the overhead at a
few rows is no evidence for that at many rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AVERAGED_STEPS = 16
"""Mean times are taken over about this many steps."""
MIN_STEPS = 4
"""Number of steps with drafts, and of steps without, before an overhead is estimated."""
MAX_DEVIATION = 2.0
"""Step times are clipped to the range from mean / MAX_DEVIATION to mean * MAX_DEVIATION.

Times outside this range are caused by the machine's load, not by the drafts.
"""
RETRY_RATE = 1 / 512
"""Each step without drafts moves the mean time with drafts towards that without, by this fraction
of their difference.

So an overhead that prevents drafts shrinks until drafts are tried again.
"""


@dataclass(slots=True)
class StepTime:
    """Mean seconds per unit of predicted cost, for steps with or without drafts."""

    mean: float = 0.0
    count: int = 0

    def observe(self, value: float) -> None:
        self.count += 1
        if self.count > MIN_STEPS:
            value = min(max(value, self.mean / MAX_DEVIATION), self.mean * MAX_DEVIATION)
        self.mean += (value - self.mean) / min(self.count, AVERAGED_STEPS)


@dataclass(slots=True)
class StepTimes:
    """The step times for one range of row counts."""

    #: The time of steps without drafts.
    plain: StepTime = field(default_factory=StepTime)
    #: The time of steps with drafts.
    drafted: StepTime = field(default_factory=StepTime)

    def observe(self, value: float, *, is_drafted: bool) -> None:
        (self.drafted if is_drafted else self.plain).observe(value)
        if not is_drafted:
            self.drafted.mean += (self.plain.mean - self.drafted.mean) * RETRY_RATE

    @property
    def overhead(self) -> float:
        """The ratio of the mean time with drafts to that without; 1.0 if unknown."""
        is_known = min(self.plain.count, self.drafted.count) >= MIN_STEPS
        return self.drafted.mean / self.plain.mean if is_known else 1.0


class DraftOverhead:
    """The overhead of drafts, for ranges of row counts: 1, 2 to 3, 4 to 7, 8 to 15, ..."""

    def __init__(self) -> None:
        self._times: dict[int, StepTimes] = {}

    def __getitem__(self, rows: int) -> float:
        """Return the overhead of drafts in a step of `rows` rows: by how much to multiply the
        step's predicted cost if it has drafts. It is 1.0 until enough steps were timed."""
        times = self._times.get(rows.bit_length())
        return 1.0 if times is None else times.overhead

    def observe(self, rows: int, cost: float, elapsed_s: float, *, is_drafted: bool) -> None:
        """Record the time of a step without prompts.

        `cost` (> 0) is the predicted cost of the step, in any unit.
        """
        if elapsed_s > 0:
            times = self._times.setdefault(rows.bit_length(), StepTimes())
            times.observe(elapsed_s / cost, is_drafted=is_drafted)
