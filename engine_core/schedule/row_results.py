"""Splits a StepResult into the results of its rows, and checks that its shapes fit the plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from engine_core.requests.request import Request
from protocol.engine.logprobs import TokenLogprobs
from protocol.wire.errors import InvalidRequest, ServingError, StepFailed
from protocol.worker.steps import Logprobs, StepPlan, StepResult


@dataclass(slots=True)
class RowResult:
    """One row's part of a step result."""

    #: Sampled tokens, in order; empty if the row was not sampled.
    tokens: list[int] = field(default_factory=list)
    #: Whether sampling failed: no token could be sampled after `tokens`.
    failed: bool = False
    #: Number of drafts in the row. The last of `tokens` is not a draft, unless `failed` is true.
    #: The tokens before it are accepted drafts.
    num_drafts: int = 0
    #: Logprobs of `tokens`, if requested.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    #: Tokens that the draft model proposes after `tokens`.
    proposed: list[int] = field(default_factory=list)
    #: `Request.mirostat_mu` after `tokens`; None: the row does not use Mirostat, or failed.
    mirostat_mu: float | None = None

    @property
    def num_accepted(self) -> int:
        """The number of leading drafts that equal the tokens sampled in their places."""
        if not self.num_drafts:
            return 0
        return len(self.tokens) if self.failed else len(self.tokens) - 1

    @property
    def num_rejected(self) -> int:
        """The number of drafts from the first wrong one on. Their K/V is not valid."""
        return self.num_drafts - self.num_accepted


class StepRowResults:
    """The results of the rows of one step.

    In most steps, each row has one token or none, and nothing else. Then only the tokens are
    stored; otherwise a RowResult per row (`row_results`). The constructor raises RuntimeError if
    the result does not fit the plan.
    """

    def __init__(self, plan: StepPlan, result: StepResult) -> None:
        self._rows = None if _has_only_tokens(plan, result) else row_results(plan, result)
        #: The token of each row whose result is exactly one token; None for the other rows.
        self.tokens: list[int | None]
        if self._rows is not None:
            self.tokens = [_only_token(row_result) for row_result in self._rows]
        else:
            self.tokens = _token_column(plan.row_samples.tolist(), result.tokens.tolist())

    def __getitem__(self, row: int) -> RowResult:
        if self._rows is not None:
            return self._rows[row]
        token = self.tokens[row]
        return RowResult() if token is None else RowResult(tokens=[token])


def _has_only_tokens(plan: StepPlan, result: StepResult) -> bool:
    """Return whether the result has one token for each row that samples, and nothing else."""
    return (
        plan.row_drafts is None
        and plan.wanted is None
        and result.counts is None
        and result.logprobs is None
        and result.prompt_logprobs is None
        and result.proposed is None
        and result.mirostat_mu is None
        and not len(result.failed)
    )


def _token_column(samples: list[int], tokens: list[int]) -> list[int | None]:
    """Return the token of each row; None for a row that does not sample."""
    num_sampled = sum(samples)
    if num_sampled != len(tokens):
        raise RuntimeError(f"{len(tokens)} tokens for {num_sampled} sampled rows")
    if num_sampled == len(samples):
        return [*tokens]
    remaining = iter(tokens)
    return [next(remaining) if sampled else None for sampled in samples]


def _only_token(row_result: RowResult) -> int | None:
    """Return the token of a row that has one and nothing else; None for other rows."""
    is_plain = len(row_result.tokens) == 1 and not (
        row_result.failed
        or row_result.num_drafts
        or row_result.logprobs
        or row_result.prompt_logprobs
        or row_result.proposed
        or row_result.mirostat_mu is not None
    )
    return row_result.tokens[0] if is_plain else None


def row_results(plan: StepPlan, result: StepResult) -> list[RowResult]:
    """Return one result per row of the plan, in order. Raises RuntimeError if the result does not
    fit the plan."""
    results = [RowResult() for _ in range(len(plan.row_slots))]
    sampled = [
        row_result
        for row_result, samples in zip(results, plan.row_samples.tolist(), strict=True)
        if samples
    ]
    if plan.row_drafts is not None:
        for row_result, count in zip(results, plan.row_drafts.tolist(), strict=True):
            row_result.num_drafts = count
    owners = _owners(sampled, result)
    for row_result, token in zip(owners, result.tokens.tolist(), strict=True):
        row_result.tokens.append(token)
    if result.logprobs is not None:
        for place, entry in _entries(result.logprobs):
            owners[place].logprobs.append(entry)
    if result.mirostat_mu is not None:
        for row_result, mu in zip(sampled, result.mirostat_mu.tolist(), strict=True):
            row_result.mirostat_mu = mu
    for index in result.failed.tolist():
        sampled[index].failed = True
        sampled[index].tokens.pop()
        del sampled[index].logprobs[len(sampled[index].tokens) :]
    if result.prompt_logprobs is not None:
        for row, entry in _entries(result.prompt_logprobs):
            results[row].prompt_logprobs.append(entry)
    _distribute_proposals(results, plan, result)
    return results


def _distribute_proposals(results: list[RowResult], plan: StepPlan, result: StepResult) -> None:
    """Distribute the draft model's proposals to the rows that requested them."""
    counts = [] if plan.wanted is None else plan.wanted.tolist()
    proposed = [] if result.proposed is None else result.proposed.tolist()
    if sum(counts) != len(proposed):
        raise RuntimeError(f"{len(proposed)} proposals, but {sum(counts)} were requested")
    remaining = iter(proposed)
    for row_result, count in zip(results, counts, strict=False):
        row_result.proposed = list(islice(remaining, count))


def _owners(sampled: list[RowResult], result: StepResult) -> list[RowResult]:
    """Return the row result that each token of `result` belongs to."""
    counts = [1] * len(sampled) if result.counts is None else result.counts.tolist()
    if len(counts) != len(sampled) or sum(counts) != len(result.tokens):
        raise RuntimeError(f"{len(result.tokens)} tokens for {len(sampled)} sampled rows")
    if any(
        not 1 <= count <= 1 + row_result.num_drafts
        for count, row_result in zip(counts, sampled, strict=True)
    ):
        raise RuntimeError("a row has no token, or more tokens than its drafts allow")
    return [
        row_result for row_result, count in zip(sampled, counts, strict=True) for _ in range(count)
    ]


def request_failure(request: Request) -> ServingError:
    """Return the error of a request that got no token, or a token that its grammar does not admit.

    If the grammar turns out to be too large at this point of the answer, the error is
    InvalidRequest, as it would have been at compilation. Otherwise it is StepFailed.
    """
    matcher = request.matcher
    if matcher is not None:
        matcher.update_error()
    if matcher is not None and matcher.was_given_wrong_token:
        return StepFailed(f"the grammar failed: {matcher.error}")
    if matcher is not None and matcher.error is not None:
        return InvalidRequest(
            f"the grammar: it could not be enforced at this point of the answer ({matcher.error})",
            param="grammar",
        )
    return StepFailed(_why_no_token(request))


def _why_no_token(request: Request) -> str:
    """Return the possible reasons why no token could be sampled, for the error message."""
    params = request.params
    limits = {
        "grammar": request.grammar,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "min_tokens": params.min_tokens,
    }
    bounds = [name for name, value in limits.items() if value]
    reason = "the model's output was not a number"
    if bounds:
        return f"no token was possible: {', '.join(bounds)} left none, or {reason}"
    return reason


def _entries(columns: Logprobs) -> list[tuple[int, TokenLogprobs]]:
    """Return (value of `columns.rows`, logprobs) for each entry of the columns, in order."""
    num, width = columns.top_ids.shape
    top_ids, top_logprobs = columns.top_ids.tolist(), columns.top_logprobs.tolist()
    ids, logprobs, ranks = columns.ids.tolist(), columns.logprobs.tolist(), columns.ranks.tolist()
    asked, drawn = _named_logprobs(columns), _drawn_rows(columns)
    entries = []
    for i, (row, count) in enumerate(
        zip(columns.rows.tolist(), columns.counts.tolist(), strict=True)
    ):
        best = slice(i * width, i * width + count)
        own_drawn = _without_padding(drawn[i], count, len(asked[i]), width) if i in drawn else []
        entry = TokenLogprobs(
            ids[i], logprobs[i], ranks[i], top_ids[best], top_logprobs[best], asked[i], own_drawn
        )
        entries.append((row, entry))
    assert len(entries) == num
    return entries


def _drawn_rows(columns: Logprobs) -> dict[int, list[float]]:
    """Return {index of an entry: its row of `columns.drawn` [B, 1 + K + A]}.

    The rows are logprobs in the distribution that the token was drawn from. Only the B entries
    whose request chose both distributions have a row.
    """
    if columns.drawn_at is None or columns.drawn is None:
        return {}
    width, values = columns.drawn.shape[1], columns.drawn.tolist()
    at = columns.drawn_at.tolist()
    return {row: values[i * width : (i + 1) * width] for i, row in enumerate(at)}


def _without_padding(values: list[float], num_top: int, num_asked: int, width: int) -> list[float]:
    """Return a row of `columns.drawn` without its unused columns.

    A row has one column for the token itself, then `width` columns for top tokens (`num_top` are
    used), then the columns for named tokens (`num_asked` are used).
    """
    return [*values[: 1 + num_top], *values[1 + width : 1 + width + num_asked]]


def _named_logprobs(columns: Logprobs) -> list[list[float]]:
    """Return, for each entry, the logprobs of the tokens that its request named."""
    if columns.asked is None or columns.asked_counts is None:
        return [[] for _ in range(len(columns.ids))]
    width, values = columns.asked.shape[1], columns.asked.tolist()
    counts = columns.asked_counts.tolist()
    return [values[i * width : i * width + count] for i, count in enumerate(counts)]
