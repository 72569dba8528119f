"""What a committed step adds to one answer: its tokens, up to its end, and how they are told.

Of several tokens that a step brings, those behind the answer's end are not its own. Here nobody
owns anything: the engine gives back what a request held, when it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import astuple

from engine_core.request import Request
from engine_core.schedule.row_results import RowResult, failure_of
from protocol.errors import ServingError
from protocol.messages import FinishReason, Output, RequestView, TokenLogprobs, Usage
from protocol.model_card import ModelCard


@dataclass(slots=True)
class CommittedTokens:
    """What one row of a step has become.

    tokens        appended to the request
    logprobs      of `tokens`, if asked for
    num_valid     positions whose K/V is that of the request's tokens
    num_accepted  drafts among `tokens`
    finish        the answer's end, if this is it
    kv_handle     for those who will go on from it
    error         why it ended with "error", if not for what the step brought
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_valid: int = 0
    num_accepted: int = 0
    finish: FinishReason | None = None
    kv_handle: str = ""
    error: ServingError | None = None


NOTHING = CommittedTokens()


def take(request: Request, count: int, outcome: RowResult) -> CommittedTokens:
    """Append what a step that computed `count` positions of `request` has sampled."""
    taken = CommittedTokens(finish="error" if outcome.failed else None)
    if request.num_generated == 0 and not outcome.failed:
        request.prompt_logprobs += outcome.prompt_logprobs
    for token in outcome.tokens:
        if not _admits(request, token):
            taken.finish = "error"
            break
        taken.tokens.append(token)
        request.tokens.append(token)
        if (end := _end_behind(request, token)) is not None:
            taken.finish = end
            break
    num_taken = len(taken.tokens)
    taken.logprobs = outcome.logprobs[:num_taken]
    # What is not a number is behind the last token, or anywhere: no block with it is published.
    num_void = outcome.num_void + len(outcome.tokens) - num_taken
    taken.num_valid = num_taken if outcome.failed else count - num_void
    taken.num_accepted = min(num_taken, outcome.num_right)
    _learn(request, outcome, taken)
    return taken


def _admits(request: Request, token: int) -> bool:
    """Go on in the request's grammar, if it has one; False where that went wrong."""
    if request.matcher is None:
        return True
    request.matcher.consume(token)
    return request.matcher.error is None


def _end_behind(request: Request, token: int) -> FinishReason | None:
    """Whether the answer ends with the `token` that was just appended."""
    is_complete = request.matcher is not None and request.matcher.is_complete
    if token in request.stop_ids or is_complete:
        return "stop"
    return "length" if len(request.tokens) >= request.end else None


def _learn(request: Request, outcome: RowResult, taken: CommittedTokens) -> None:
    request.num_drafts += outcome.num_drafts
    request.num_accepted += taken.num_accepted
    if request.guesses is not None and outcome.tokens:
        request.guesses.learn(outcome.num_drafts, outcome.num_right, outcome.tokens[0])
    if request.guesses is not None and outcome.proposed and taken.finish is None:
        request.guesses.hear(len(request.tokens), outcome.proposed)
        request.num_followed = len(request.tokens)


# ---- as it is told


def news_of(request: Request, taken: CommittedTokens) -> Output:
    """Of an answer that goes on."""
    is_first = request.num_generated == len(taken.tokens)
    if is_first:
        request.watch.speak()
    return Output(
        request=request.number,
        tokens=taken.tokens,
        logprobs=taken.logprobs,
        prompt_logprobs=request.prompt_logprobs if is_first else [],
        usage=usage_of(request) if is_first else None,
    )


def end_of(
    request: Request, finish: FinishReason, taken: CommittedTokens, model: ModelCard
) -> Output:
    """An answer's last news, with what the last step brought."""
    is_first = request.num_generated == len(taken.tokens)
    return Output(
        request=request.number,
        tokens=taken.tokens,
        logprobs=taken.logprobs,
        prompt_logprobs=request.prompt_logprobs if is_first and finish != "abort" else [],
        finish=finish,
        stop_token=_stop_token(request, model) if finish == "stop" else None,
        usage=usage_of(request),
        error=(taken.error or failure_of(request)).info() if finish == "error" else None,
        kv_handle=taken.kv_handle,
    )


def usage_of(request: Request) -> Usage:
    return Usage(
        prompt_tokens=request.prompt_tokens,
        generated_tokens=request.num_generated,
        cached_tokens=request.num_cached,
        fetched_tokens=request.num_fetched,
        preemptions=request.num_preemptions,
        draft_tokens=request.num_drafts,
        accepted_tokens=request.num_accepted,
        times=request.watch.times(),
    )


def _stop_token(request: Request, model: ModelCard) -> int | None:
    """The last token, unless it is part of the text: the last of what a grammar admits."""
    token = request.tokens[-1]
    is_end = token in request.stop_ids or token in model.eos_token_ids
    return token if is_end else None


def seen(request: Request) -> RequestView:
    """As others may see it. Who its client is, the loop knows."""
    times = request.watch.times()
    return RequestView(
        name=request.name,
        account=request.account.name if request.account is not None else "",
        stage=request.watch.stage,
        age_s=sum(astuple(times)),
        decode_s=times.decode_s,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.num_cached,
        computed_tokens=request.num_computed,
        generated_tokens=request.num_generated,
        most_tokens=request.end - request.prompt_tokens,
        preemptions=request.num_preemptions,
    )
