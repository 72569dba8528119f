"""StepResult -> what each row of the plan got.

The shapes a worker reports are checked here, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.request import Request
from protocol.errors import InvalidRequest, ServingError, StepFailed
from protocol.messages import TokenLogprobs
from protocol.steps import Logprobs, StepPlan, StepResult


@dataclass(slots=True)
class Outcome:
    """One row's part of a result. `token` is None where the plan did not sample."""

    token: int | None = None
    failed: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


def outcomes_of(plan: StepPlan, result: StepResult) -> list[Outcome]:
    """[R], in row order. Raises RuntimeError when the result does not fit the plan."""
    outcomes = [Outcome() for _ in range(len(plan.row_slots))]
    sampled = [
        outcome
        for outcome, samples in zip(outcomes, plan.row_samples.tolist(), strict=True)
        if samples
    ]
    if len(result.tokens) != len(sampled):
        raise RuntimeError(f"{len(result.tokens)} tokens for {len(sampled)} sampled rows")
    for outcome, token in zip(sampled, result.tokens.tolist(), strict=True):
        outcome.token = token
    for index in result.failed.tolist():
        sampled[index].failed = True
    if result.logprobs is not None:
        for row, entry in _entries(result.logprobs):
            sampled[row].logprobs.append(entry)
    if result.prompt_logprobs is not None:
        for row, entry in _entries(result.prompt_logprobs):
            outcomes[row].prompt_logprobs.append(entry)
    return outcomes


def failure_of(request: Request) -> ServingError:
    """Why a request got no token, or one that its grammar does not admit. A grammar that turns out
    to be too large where the answer has come to is the request's fault, as it would have been
    before the answer began."""
    matcher = request.matcher
    if matcher is not None and matcher.was_misled:
        return StepFailed(f"the grammar failed: {matcher.error}")
    if matcher is not None and matcher.error is not None:
        return InvalidRequest(
            "the grammar: the answer came to a place where it cannot be enforced "
            f"({matcher.error})",
            param="grammar",
        )
    return StepFailed(_why_no_token(request))


def _why_no_token(request: Request) -> str:
    params = request.params
    asked = {
        "grammar": request.grammar,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "min_tokens": params.min_tokens,
    }
    bounds = [name for name, value in asked.items() if value]
    reason = "the model's output was not a number"
    if bounds:
        return f"no token was possible: {', '.join(bounds)} left none, or {reason}"
    return reason


def _entries(columns: Logprobs) -> list[tuple[int, TokenLogprobs]]:
    """(row, that token's logprobs), in the order of the columns."""
    num, width = columns.top_ids.shape
    top_ids, top_logprobs = columns.top_ids.tolist(), columns.top_logprobs.tolist()
    ids, logprobs, ranks = columns.ids.tolist(), columns.logprobs.tolist(), columns.ranks.tolist()
    asked, drawn = _asked(columns), _drawn_rows(columns)
    entries = []
    for i, (row, count) in enumerate(
        zip(columns.rows.tolist(), columns.counts.tolist(), strict=True)
    ):
        best = slice(i * width, i * width + count)
        drawn_of = _drawn(drawn[i], count, len(asked[i]), width) if i in drawn else []
        entry = TokenLogprobs(
            ids[i], logprobs[i], ranks[i], top_ids[best], top_logprobs[best], asked[i], drawn_of
        )
        entries.append((row, entry))
    assert len(entries) == num
    return entries


def _drawn_rows(columns: Logprobs) -> dict[int, list[float]]:
    """Of those among the N tokens that were scored twice, the second scores, [1 + K + A] each."""
    if columns.drawn_at is None or columns.drawn is None:
        return {}
    width, values = columns.drawn.shape[1], columns.drawn.tolist()
    at = columns.drawn_at.tolist()
    return {row: values[i * width : (i + 1) * width] for i, row in enumerate(at)}


def _drawn(values: list[float], num_top: int, num_asked: int, width: int) -> list[float]:
    """Without the columns that only other rows use; there are `width` for likely tokens."""
    return [*values[: 1 + num_top], *values[1 + width : 1 + width + num_asked]]


def _asked(columns: Logprobs) -> list[list[float]]:
    """[N], of each row the logprobs of the tokens that its request named."""
    if columns.asked is None or columns.asked_counts is None:
        return [[] for _ in range(len(columns.ids))]
    width, values = columns.asked.shape[1], columns.asked.tolist()
    counts = columns.asked_counts.tolist()
    return [values[i * width : i * width + count] for i, count in enumerate(counts)]
