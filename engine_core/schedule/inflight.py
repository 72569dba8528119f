"""Steps in flight: their plans were sent to the worker, and their results are not committed yet.

The worker executes plans in order, so a plan can be sent before the previous result has arrived.
While plans are in flight, each request in them counts three things: the positions planned for it
(`num_scheduled`), the tokens being sampled for it (`num_pending`) and the plans that contain it
(`num_in_flight`). Its slot and blocks are not reused while a plan in flight contains it.
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
    """A plan in flight and its rows."""

    plan: StepPlan
    rows: StepRows
    #: Whether some rows are constrained by a grammar and their masks have not been sent.
    needs_masks: bool
    #: Maximum number of drafts per row that the plan requests of the draft model.
    num_requested_drafts: int

    @property
    def is_decisive(self) -> bool:
        """Whether the next step's drafts depend on this step's result. They do if this step
        verifies drafts, or requests drafts of the draft model."""
        return self.num_requested_drafts > 0 or self.plan.row_drafts is not None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.rows)

    @property
    def has_prompts(self) -> bool:
        """Whether some row is not a plain decode: it computes a chunk of a prompt, or drafts."""
        return self.plan.num_decodes < len(self.rows)

    @property
    def prompts(self) -> list[Request]:
        """The requests of the step that, before it, still lacked K/V of their prompts. The last
        token of a prompt does not count."""
        return [
            request for request, _ in self.rows if request.num_computed < request.prompt_tokens - 1
        ]


class InflightSteps:
    """A queue of at most `depth` steps in flight, oldest first."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps: deque[InflightStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InflightStep]:
        return iter(self._steps)

    def restore(self, steps: Iterable[InflightStep]) -> None:
        """Add the steps of a snapshot. The counts of their requests include these steps already."""
        self._steps.extend(steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._depth

    @property
    def are_decisive(self) -> bool:
        return any(step.is_decisive for step in self._steps)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of all tokens of those steps in flight for which `has_prompts` is true. Their
        decodes count, too."""
        return sum(step.num_tokens for step in self._steps if step.has_prompts)

    @property
    def oldest(self) -> InflightStep | None:
        return self._steps[0] if self._steps else None

    def on_sent(self, plan: StepPlan, rows: StepRows) -> None:
        """Record that `plan` was sent, and count it in the requests of its rows."""
        for (request, count), samples in zip(rows, plan.row_samples.tolist(), strict=True):
            request.num_scheduled += count
            request.num_pending += samples
            request.num_in_flight += 1
        num_requested_drafts = 0 if plan.wanted is None else max(plan.wanted.tolist(), default=0)
        self._steps.append(InflightStep(plan, rows, plan.masked is not None, num_requested_drafts))

    def on_completed(self, result: StepResult) -> tuple[InflightStep, list[RowResult]]:
        """Remove the oldest step, and return it with the result of each row. Raises RuntimeError if
        the result belongs to another step, or does not fit the plan."""
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
