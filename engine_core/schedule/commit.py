"""Commit of one row of a step: appends the row's tokens to its request, and builds the Output.

If the answer ends within the row's tokens, the tokens after the end are dropped. The engine
releases the slot and blocks of an ended request, not this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.requests.request import Request, RequestPhase
from engine_core.schedule.row_results import RowResult, request_failure
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import FinishReason, Output, RequestStatus, Usage
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import uses_mirostat
from protocol.engine.timeline import Lack
from protocol.wire.errors import ServingError


@dataclass(slots=True)
class CommittedTokens:
    """The effect of one row of a step on its request."""

    #: Tokens that were appended to the request.
    tokens: list[int] = field(default_factory=list)
    #: Logprobs of `tokens`, if requested.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    #: Number of computed positions with valid K/V. Those of rejected drafts do not count.
    num_valid: int = 0
    #: How many of `tokens` were drafts.
    num_accepted: int = 0
    #: The finish reason if the answer ends here.
    finish: FinishReason | None = None
    #: Handle of the prompt's K/V, for its readers.
    kv_handle: str = ""
    #: The error to send if `finish` is "error". None: send that of `request_failure`.
    error: ServingError | None = None


NO_LOGPROBS: list[TokenLogprobs] = []
"""Shared by all Outputs without logprobs. It must not be modified."""
NOTHING_COMMITTED = CommittedTokens()
"""For a request that ends outside a step."""


def commit_row(request: Request, count: int, row_result: RowResult) -> CommittedTokens:
    """Append the tokens that a step sampled for `request`, up to the end of its answer. Return the
    changes.

    `count` is the number of positions that the step computed in the row.
    """
    committed = CommittedTokens(finish="error" if row_result.failed else None)
    if request.num_generated == 0 and not row_result.failed:
        request.prompt_logprobs += row_result.prompt_logprobs
    for token in row_result.tokens:
        if not _advance_grammar(request, token):
            committed.finish = "error"
            break
        committed.tokens.append(token)
        request.tokens.append(token)
        if (end := _finish_reason(request, token)) is not None:
            committed.finish = end
            break
    if row_result.mirostat_mu is not None and uses_mirostat(request.params):
        request.mirostat_mu = row_result.mirostat_mu
    num_committed = len(committed.tokens)
    committed.logprobs = row_result.logprobs[:num_committed]
    # In a failed row, only the positions that gave a token are known to be free of NaN.
    num_rejected = row_result.num_rejected + len(row_result.tokens) - num_committed
    committed.num_valid = num_committed if row_result.failed else count - num_rejected
    committed.num_accepted = min(num_committed, row_result.num_accepted)
    _update_drafting(request, row_result, committed)
    return committed


def _advance_grammar(request: Request, token: int) -> bool:
    """Advance the request's grammar by `token`. Return False if the grammar failed."""
    if request.matcher is None:
        return True
    request.matcher.consume(token)
    return request.matcher.error is None


def _finish_reason(request: Request, token: int) -> FinishReason | None:
    """Return the finish reason if the answer ends with `token`, which was just appended."""
    is_complete = request.matcher is not None and request.matcher.is_complete
    if token in request.stop_ids or is_complete:
        return "stop"
    return "length" if len(request.tokens) >= request.max_total_tokens else None


def _update_drafting(request: Request, row_result: RowResult, committed: CommittedTokens) -> None:
    request.num_drafts += row_result.num_drafts
    request.num_accepted += committed.num_accepted
    if request.drafting is not None and row_result.tokens:
        request.drafting.observe(
            row_result.num_drafts, row_result.num_accepted, row_result.tokens[0]
        )
    if request.drafting is not None and row_result.proposed and committed.finish is None:
        request.drafting.on_proposed(len(request.tokens), row_result.proposed)
        if request.uses_draft_model:
            request.num_draft_computed = len(request.tokens)
        else:  # the last token's entry needs the next one
            num_entries = len(request.tokens) - 1
            request.num_draft_computed = max(request.num_draft_computed, num_entries)


# ---- outputs


def progress_output(request: Request, committed: CommittedTokens) -> Output:
    """Return the Output with the new tokens of a request that continues.

    The first Output of a request also has the usage and the prompt logprobs.
    """
    is_first = request.num_generated == len(committed.tokens)
    if is_first:
        request.stage_timer.on_first_token()
    return Output(
        request=request.number,
        tokens=committed.tokens,
        logprobs=committed.logprobs,
        prompt_logprobs=request.prompt_logprobs if is_first else [],
        usage=request_usage(request) if is_first else None,
        mirostat_mu=request.mirostat_mu if uses_mirostat(request.params) else None,
    )


def final_output(
    request: Request, finish: FinishReason, committed: CommittedTokens, model: ModelCard
) -> Output:
    """Return the final Output of a request, with the tokens of its last step."""
    is_first = request.num_generated == len(committed.tokens)
    vectors, stop_token = None, None
    if finish == "stop" and request.encode is not None:
        vectors = request.encode.vectors()
    elif finish == "stop":
        stop_token = _stop_token(request, model)
    return Output(
        request=request.number,
        tokens=committed.tokens,
        logprobs=committed.logprobs,
        prompt_logprobs=request.prompt_logprobs if is_first and finish != "abort" else [],
        finish=finish,
        stop_token=stop_token,
        usage=request_usage(request),
        error=(committed.error or request_failure(request)).info() if finish == "error" else None,
        kv_handle=committed.kv_handle,
        vectors=vectors,
    )


def request_usage(request: Request) -> Usage:
    return Usage(
        prompt_tokens=request.prompt_tokens,
        generated_tokens=request.num_generated,
        cached_tokens=request.num_cached,
        fetched_tokens=request.num_fetched,
        preemptions=request.num_preemptions,
        draft_tokens=request.num_drafts,
        accepted_tokens=request.num_accepted,
        times=request.stage_timer.times(),
    )


def _stop_token(request: Request, model: ModelCard) -> int | None:
    """Return the last token if it is a stop or EOS token.

    Otherwise return None: the answer ended because its grammar was complete.
    """
    token = request.tokens[-1]
    is_end = token in request.stop_ids or token in model.eos_token_ids
    return token if is_end else None


def status_row(request: Request, lack: Lack = "") -> RequestStatus:
    """Return the entry of EngineStatus for `request`, without the name of its client.

    `lack` is what the first request in the queue lacks.
    """
    timer = request.stage_timer
    return RequestStatus(
        name=request.name,
        account=request.account.name if request.account is not None else "",
        stage=timer.stage,
        age_s=timer.total_s,
        decode_s=timer.decode_s,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.num_cached,
        computed_tokens=request.num_computed,
        generated_tokens=request.num_generated,
        most_tokens=request.max_total_tokens - request.prompt_tokens,
        preemptions=request.num_preemptions,
        waits_for=_waits_for(request, lack),
    )


def _waits_for(request: Request, lack: Lack) -> str:
    """Return `RequestStatus.waits_for` of an open request."""
    match request.phase:
        case RequestPhase.ARRIVED:
            return "grammar"
        case RequestPhase.FETCHING:
            return "fetch"
        case RequestPhase.WAITING | RequestPhase.PREEMPTED:
            return lack or "turn"
    return "step"
