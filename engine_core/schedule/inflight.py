"""Plans that are out: sent to the worker, and not committed yet.

The worker executes plans in order, so a plan may go out before the result of the one before has
come back. A request then counts the tokens that are on their way (`num_pending`) and those whose
computation was planned (`num_scheduled`); what it owns is given to nobody else while a plan that
writes to it is out (`num_in_flight`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine_core.request import Request
from engine_core.schedule.row_results import RowResult, row_results
from protocol.steps import StepPlan, StepResult

Work = list[tuple[Request, int]]


@dataclass(slots=True)
class InflightStep:
    """One plan.

    needs_masks   some of its rows are constrained, and their masks are still to be told
    num_guesses   in a row, at most, that it wants of a draft model
    """

    plan: StepPlan
    work: Work
    needs_masks: bool
    num_guesses: int

    @property
    def is_decisive(self) -> bool:
        """What comes of it decides what is guessed next: it has drafts, or wants guesses."""
        return self.num_guesses > 0 or self.plan.row_drafts is not None

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.work)

    @property
    def has_prompts(self) -> bool:
        """More than a token of a row."""
        return self.plan.num_decodes < len(self.work)

    @property
    def prompts(self) -> list[Request]:
        """Those of which it computes a part of the prompt."""
        return [each for each, _ in self.work if each.num_computed < each.prompt_tokens - 1]


class InflightSteps:
    """The plans that are out, oldest first; at most `depth` of them."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._out: deque[InflightStep] = deque()

    def __len__(self) -> int:
        return len(self._out)

    @property
    def is_full(self) -> bool:
        return len(self._out) >= self._depth

    @property
    def are_decisive(self) -> bool:
        return any(flight.is_decisive for flight in self._out)

    @property
    def num_prompt_tokens(self) -> int:
        """Of the steps that compute prompts, with what else they compute."""
        return sum(flight.num_tokens for flight in self._out if flight.has_prompts)

    @property
    def oldest(self) -> InflightStep | None:
        return self._out[0] if self._out else None

    def depart(self, plan: StepPlan, work: Work) -> None:
        for (request, count), samples in zip(work, plan.row_samples.tolist(), strict=True):
            request.num_scheduled += count
            request.num_pending += samples
            request.num_in_flight += 1
        num_guesses = 0 if plan.wanted is None else max(plan.wanted.tolist(), default=0)
        self._out.append(InflightStep(plan, work, plan.masked is not None, num_guesses))

    def land(self, result: StepResult) -> tuple[InflightStep, list[RowResult]]:
        """The oldest plan, and what each of its rows got.

        Raises RuntimeError when the result is not of that plan.
        """
        oldest = self.oldest
        if oldest is None or oldest.plan.step != result.step:
            raise RuntimeError(f"a result of step {result.step}, which is not the oldest one out")
        outcomes = row_results(oldest.plan, result)
        self._out.popleft()
        for (request, _), samples, outcome in zip(
            oldest.work, oldest.plan.row_samples.tolist(), outcomes, strict=True
        ):
            request.num_scheduled -= outcome.num_void
            request.num_pending -= samples
            request.num_in_flight -= 1
        return oldest, outcomes
