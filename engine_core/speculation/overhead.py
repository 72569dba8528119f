"""How much longer a step with drafts takes than its tokens alone would make it: learned from steps.

What is measured when a worker starts are its linears (step_costs.py). A step with drafts takes more
than these tell: each place is attended to and sampled by itself, and the next step is not planned
before its result is here. How much more differs with the machine, and with who else uses it. So
steps are timed as they come, with drafts and without, each beside what its tokens should cost.
Nothing is known of many rows from a few, so that is kept by how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 16
"""Of so many steps a mean is mostly made."""
FEWEST = 4
"""Before so many steps of each kind nothing is said."""
OUTLIER = 2.0
"""A step that took so many times what such steps take says nothing of them, but of the machine."""
FORGET = 1 / 512
"""By so much of what is between them a step without drafts brings both closer: drafts that were too
dear are tried again, in the end."""


@dataclass(slots=True)
class StepTime:
    """Of one kind of steps: seconds for one unit of cost, the mean of the last ones."""

    mean: float = 0.0
    count: int = 0

    def learn(self, value: float) -> None:
        self.count += 1
        if self.count > FEWEST:
            value = min(max(value, self.mean / OUTLIER), self.mean * OUTLIER)
        self.mean += (value - self.mean) / min(self.count, MEMORY)


@dataclass(slots=True)
class StepTimes:
    """Of steps of about so many rows, without drafts and with them."""

    plain: StepTime = field(default_factory=StepTime)
    drafted: StepTime = field(default_factory=StepTime)

    def learn(self, value: float, *, is_drafted: bool) -> None:
        (self.drafted if is_drafted else self.plain).learn(value)
        if not is_drafted:
            self.drafted.mean += (self.plain.mean - self.drafted.mean) * FORGET

    @property
    def stretch(self) -> float:
        is_known = min(self.plain.count, self.drafted.count) >= FEWEST
        return self.drafted.mean / self.plain.mean if is_known else 1.0


class DraftOverhead:
    """By the number of rows, in powers of two."""

    def __init__(self) -> None:
        self._paces: dict[int, StepTimes] = {}

    def __getitem__(self, rows: int) -> float:
        """By what the cost of a step with drafts is to be multiplied; 1.0 if that is unknown."""
        paces = self._paces.get(rows.bit_length())
        return 1.0 if paces is None else paces.stretch

    def learn(self, rows: int, cost: float, elapsed_s: float, *, is_drafted: bool) -> None:
        """A step of answers alone took so long; `cost`: what it should cost, in any unit, > 0."""
        if elapsed_s > 0:
            paces = self._paces.setdefault(rows.bit_length(), StepTimes())
            paces.learn(elapsed_s / cost, is_drafted=is_drafted)
