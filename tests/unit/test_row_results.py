"""The results of a step's rows: which rows have one token and nothing else, and which results do
not fit their plan."""

from __future__ import annotations

import pytest

from engine_core.schedule.row_results import RowResult, StepRowResults, row_results
from protocol.wire.arrays import Float32, Int32
from protocol.worker.steps import Logprobs, StepPlan, StepResult
from tests.support.plans import step_plan

DECODES = step_plan(1, rows=[(slot, 9, 1, True) for slot in range(3)])
WITH_A_CHUNK = step_plan(1, rows=[(0, 9, 1, True), (1, 9, 1, True), (2, 0, 4, False)])
WITH_DRAFTS = step_plan(1, rows=[(0, 9, 1, True), (1, 9, 3, True)], drafts={1: [4, 5]})


def step_result(*tokens: int, failed: tuple[int, ...] = (), **more: object) -> StepResult:
    return StepResult(
        step=1,
        tokens=Int32.of(list(tokens)),
        failed=Int32.of(list(failed)),
        **more,  # type: ignore[arg-type]
    )


def logprobs_of(token: int, place: int) -> Logprobs:
    """Return the logprob of the sampled token at `place`, without likeliest tokens."""
    return Logprobs(
        rows=Int32.of([place]),
        counts=Int32.of([0]),
        ids=Int32.of([token]),
        logprobs=Float32.of([-1.5]),
        ranks=Int32.of([1]),
        top_ids=Int32.of([], (1, 0)),
        top_logprobs=Float32.of([], (1, 0)),
    )


CASES = {
    "tokens only": (DECODES, step_result(6, 7, 8), [6, 7, 8]),
    "a chunk that does not sample": (WITH_A_CHUNK, step_result(6, 7), [6, 7, None]),
    "a failed row": (DECODES, step_result(6, 0, 8, failed=(1,)), [6, None, 8]),
    "logprobs of one row": (
        DECODES,
        step_result(6, 7, 8, logprobs=logprobs_of(8, place=2)),
        [6, 7, None],
    ),
    "drafts": (WITH_DRAFTS, step_result(6, 4, 9, counts=Int32.of([1, 2])), [6, None]),
}


@pytest.mark.parametrize("name", CASES)
def test_only_rows_with_one_token_and_nothing_else_are_in_the_column_of_tokens(name: str) -> None:
    plan, result, tokens = CASES[name]
    results = StepRowResults(plan, result)
    assert results.tokens == tokens
    assert [results[row] for row in range(len(tokens))] == row_results(plan, result)
    for row, token in enumerate(tokens):
        assert token is None or results[row] == RowResult(tokens=[token])


@pytest.mark.parametrize("plan", [DECODES, WITH_A_CHUNK], ids=["decodes", "with a chunk"])
def test_a_result_without_a_token_for_each_sampled_row_is_refused(plan: StepPlan) -> None:
    num_sampled = sum(plan.row_samples.tolist())
    for wrong in (num_sampled - 1, num_sampled + 1):
        with pytest.raises(RuntimeError, match=f"{wrong} tokens for {num_sampled} sampled rows"):
            StepRowResults(plan, step_result(*[5] * wrong))
