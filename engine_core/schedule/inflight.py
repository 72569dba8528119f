"""Steps in flight: sent to the worker and not committed yet.

The worker executes plans in order, so a plan can be sent before the previous result has arrived. A
request then counts the tokens that are being sampled (`num_pending`) and the positions that are
planned (`num_scheduled`). Its slot and blocks are not reused while a plan in flight writes to them
(`num_in_flight`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine_core.request import Request
from engine_core.schedule.row_results import RowResult, row_results
from protocol.steps import StepPlan, StepResult

StepRows = list[tuple[Request, int]]
"""(request, number of positions) of each row."""


@dataclass(slots=True)
class InflightStep:
    """One plan in flight."""

    plan: StepPlan
    rows: StepRows
    #: Some rows are constrained, and their masks have not been sent.
    needs_masks: bool
    #: Most drafts in a row that it requests of the draft model.
    num_requested_drafts: int

    @property
    def is_decisive(self) -> bool:
        """Whether the next drafts depend on its result: it has drafts, or requests some."""
        return self.num_requested_drafts > 0 or self.plan.row_drafts is not None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.rows)

    @property
    def has_prompts(self) -> bool:
        """Whether a row has more than one token."""
        return self.plan.num_decodes < len(self.rows)

    @property
    def prompts(self) -> list[Request]:
        """The requests whose prompt it computes in part."""
        return [each for each, _ in self.rows if each.num_computed < each.prompt_tokens - 1]


class InflightSteps:
    """The plans in flight, oldest first; at most `depth`."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps: deque[InflightStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InflightStep]:
        return iter(self._steps)

    def restore(self, steps: Iterable[InflightStep]) -> None:
        """Add steps whose requests count them as in flight already."""
        self._steps.extend(steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._depth

    @property
    def are_decisive(self) -> bool:
        return any(step.is_decisive for step in self._steps)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the steps in flight that compute prompts, decodes included."""
        return sum(step.num_tokens for step in self._steps if step.has_prompts)

    @property
    def oldest(self) -> InflightStep | None:
        return self._steps[0] if self._steps else None

    def on_sent(self, plan: StepPlan, rows: StepRows) -> None:
        """Record that a plan was sent."""
        for (request, count), samples in zip(rows, plan.row_samples.tolist(), strict=True):
            request.num_scheduled += count
            request.num_pending += samples
            request.num_in_flight += 1
        num_requested_drafts = 0 if plan.wanted is None else max(plan.wanted.tolist(), default=0)
        self._steps.append(InflightStep(plan, rows, plan.masked is not None, num_requested_drafts))

    def on_completed(self, result: StepResult) -> tuple[InflightStep, list[RowResult]]:
        """Remove the oldest plan, and return it with the result of each row.

        Raises RuntimeError if the result belongs to another plan.
        """
        oldest = self.oldest
        if oldest is None or oldest.plan.step != result.step:
            raise RuntimeError(
                f"got the result of step {result.step}, which is not the oldest in flight"
            )
        results = row_results(oldest.plan, result)
        self._steps.popleft()
        for (request, _), samples, row_result in zip(
            oldest.rows, oldest.plan.row_samples.tolist(), results, strict=True
        ):
            request.num_scheduled -= row_result.num_rejected
            request.num_pending -= samples
            request.num_in_flight -= 1
        return oldest, results
