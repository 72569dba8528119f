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

from engine_core.requests.request import Request
from engine_core.schedule.row_results import StepRowResults
from protocol.worker.steps import StepPlan, StepResult


@dataclass(slots=True)
class InflightStep:
    """A plan in flight and the requests of its rows."""

    plan: StepPlan
    #: The request of each row of the plan.
    requests: list[Request]
    #: Whether some rows are constrained by a grammar and their masks have not been sent.
    needs_masks: bool
    #: Maximum number of drafts per row that the plan requests from the draft model.
    num_requested_drafts: int

    @property
    def is_decisive(self) -> bool:
        """Whether the next step's drafts depend on this step's result. They do if this step
        verifies drafts, or requests drafts from the draft model."""
        return self.num_requested_drafts > 0 or self.plan.row_drafts is not None

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def counts(self) -> list[int]:
        """The number of positions of each row."""
        return self.plan.row_tokens.tolist()

    @property
    def has_prompts(self) -> bool:
        """Whether some row is not a plain decode: it computes a chunk of a prompt, or drafts."""
        return self.plan.num_decodes < len(self.requests)

    @property
    def prompts(self) -> list[Request]:
        """The step's requests that lacked K/V of their prompt before the step. The last token of
        a prompt does not count."""
        return [
            request for request in self.requests if request.num_computed < request.prompt_tokens - 1
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
        """Total tokens, including those of decodes, of the steps in flight for which `has_prompts`
        is true."""
        return sum(step.num_tokens for step in self._steps if step.has_prompts)

    @property
    def oldest(self) -> InflightStep | None:
        return self._steps[0] if self._steps else None

    @property
    def newest(self) -> InflightStep | None:
        return self._steps[-1] if self._steps else None

    def on_sent(self, plan: StepPlan, requests: list[Request]) -> None:
        """Record that `plan` was sent, and count it in the requests of its rows."""
        counts, samples = plan.row_tokens.tolist(), plan.row_samples.tolist()
        for request, count, sampled in zip(requests, counts, samples, strict=True):
            request.num_scheduled += count
            request.num_pending += sampled
            request.num_in_flight += 1
        num_requested = 0 if plan.wanted is None else max(plan.wanted.tolist(), default=0)
        self._steps.append(InflightStep(plan, requests, plan.masked is not None, num_requested))

    def on_completed(self, result: StepResult) -> tuple[InflightStep, StepRowResults]:
        """Remove the oldest step, and return it with the results of its rows. Raises RuntimeError
        if the result belongs to another step, or does not fit the plan."""
        oldest = self.oldest
        if oldest is None or oldest.plan.step != result.step:
            raise RuntimeError(
                f"got the result of step {result.step}, which is not the oldest in flight"
            )
        results = StepRowResults(oldest.plan, result)
        self._steps.popleft()
        samples = oldest.plan.row_samples.tolist()
        for request, sampled in zip(oldest.requests, samples, strict=True):
            request.num_pending -= sampled
            request.num_in_flight -= 1
        if oldest.plan.row_drafts is not None:
            for row, request in enumerate(oldest.requests):
                request.num_scheduled -= results[row].num_rejected
        return oldest, results
