"""StepResult -> what each row of the plan got.

The shapes a worker reports are checked here, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from engine_core.request import Request
from protocol.errors import InvalidRequest, ServingError, StepFailed
from protocol.messages import TokenLogprobs
from protocol.steps import Logprobs, StepPlan, StepResult


@dataclass(slots=True)
class RowResult:
    """One row's part of a result.

    tokens      sampled, in order; none where the plan did not sample
    failed      no token could be sampled, or none after `tokens`
    num_drafts  how many the row had; each of `tokens` but the last of all was one of them
    logprobs    of `tokens`, if asked for
    proposed    what a draft model guesses behind `tokens`
    """

    tokens: list[int] = field(default_factory=list)
    failed: bool = False
    num_drafts: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)

    @property
    def num_right(self) -> int:
        """How many drafts were what was sampled."""
        if not self.num_drafts:
            return 0
        return len(self.tokens) if self.failed else len(self.tokens) - 1

    @property
    def num_void(self) -> int:
        """Positions that were computed behind a wrong draft."""
        return self.num_drafts - self.num_right


def row_results(plan: StepPlan, result: StepResult) -> list[RowResult]:
    """[R], in row order. Raises RuntimeError when the result does not fit the plan."""
    outcomes = [RowResult() for _ in range(len(plan.row_slots))]
    sampled = [
        outcome
        for outcome, samples in zip(outcomes, plan.row_samples.tolist(), strict=True)
        if samples
    ]
    if plan.row_drafts is not None:
        for outcome, count in zip(outcomes, plan.row_drafts.tolist(), strict=True):
            outcome.num_drafts = count
    owners = _owners(sampled, result)
    for outcome, token in zip(owners, result.tokens.tolist(), strict=True):
        outcome.tokens.append(token)
    if result.logprobs is not None:
        for place, entry in _entries(result.logprobs):
            owners[place].logprobs.append(entry)
    for index in result.failed.tolist():
        sampled[index].failed = True
        sampled[index].tokens.pop()
        del sampled[index].logprobs[len(sampled[index].tokens) :]
    if result.prompt_logprobs is not None:
        for row, entry in _entries(result.prompt_logprobs):
            outcomes[row].prompt_logprobs.append(entry)
    _share_out(outcomes, plan, result)
    return outcomes


def _share_out(outcomes: list[RowResult], plan: StepPlan, result: StepResult) -> None:
    """What the draft model guessed, to those it was asked for."""
    counts = [] if plan.wanted is None else plan.wanted.tolist()
    proposed = [] if result.proposed is None else result.proposed.tolist()
    if sum(counts) != len(proposed):
        raise RuntimeError(f"{len(proposed)} guesses, where {sum(counts)} were wanted")
    guesses = iter(proposed)
    for outcome, count in zip(outcomes, counts, strict=False):
        outcome.proposed = list(islice(guesses, count))


def _owners(sampled: list[RowResult], result: StepResult) -> list[RowResult]:
    """[T]: whose each of the result's tokens is."""
    counts = [1] * len(sampled) if result.counts is None else result.counts.tolist()
    if len(counts) != len(sampled) or sum(counts) != len(result.tokens):
        raise RuntimeError(f"{len(result.tokens)} tokens for {len(sampled)} sampled rows")
    if any(
        not 1 <= count <= 1 + outcome.num_drafts
        for count, outcome in zip(counts, sampled, strict=True)
    ):
        raise RuntimeError("a row has no token, or more than its drafts allow")
    return [o for o, count in zip(sampled, counts, strict=True) for _ in range(count)]


def failure_of(request: Request) -> ServingError:
    """Why a request got no token, or one that its grammar does not admit. A grammar that turns out
    to be too large where the answer has come to is the request's fault, as it would have been
    before the answer began."""
    matcher = request.matcher
    if matcher is not None:
        matcher.look()
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
    """(what `rows` says, that token's logprobs), in the order of the columns."""
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
