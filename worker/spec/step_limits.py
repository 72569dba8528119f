"""The largest step that a worker computes. The defaults depend on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol.config.worker import MAX_SLOTS, TOKEN_BUDGET, WorkerConfig

STEP_TOKENS = TOKEN_BUDGET.cpu
"""Tokens of a step for which memory is planned on a CPU."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most requests and tokens of a step, and the most drafts of a request in it."""

    max_slots: int
    token_budget: int
    max_drafts: int
    #: Tokens of a step for which memory is planned: on a GPU all of them.
    planned_tokens: int


def step_limits(config: WorkerConfig, *, is_gpu: bool) -> StepLimits:
    """Return the configured limits, with the device's default for each that is not configured."""
    token_budget = TOKEN_BUDGET.choose(config.token_budget, is_gpu=is_gpu)
    return StepLimits(
        max_slots=MAX_SLOTS.choose(config.max_slots, is_gpu=is_gpu),
        token_budget=token_budget,
        max_drafts=config.max_drafts,
        planned_tokens=token_budget if is_gpu else STEP_TOKENS,
    )


def with_whole_runs(limits: StepLimits, config: WorkerConfig, longest: int) -> StepLimits | None:
    """Return limits with a token budget for a run of `longest` positions that is computed as a
    whole, beside a token of each other request. Return None if the configured budget is smaller."""
    needed = longest + limits.max_slots - 1
    if needed <= limits.token_budget:
        return limits
    return None if config.token_budget else replace(limits, token_budget=needed)
