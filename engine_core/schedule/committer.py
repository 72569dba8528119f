"""`StepCommitter`: applies the worker's results."""

from __future__ import annotations

from engine_core.endings import RequestEndings
from engine_core.parts import EngineParts
from engine_core.request import Request, RequestPhase
from engine_core.schedule.columns import quiet_tokens
from engine_core.schedule.commit import (
    NO_LOGPROBS,
    CommittedTokens,
    commit_row,
    progress_output,
)
from engine_core.schedule.inflight import InflightStep
from engine_core.schedule.row_results import RowResult, StepRowResults
from engine_core.status import engine_load
from protocol.engine.messages import Output, Outputs
from protocol.wire.errors import StepFailed
from protocol.worker.steps import EncodeResult, StepResult


class StepCommitter:
    """Commits the steps of an engine, in the order of their plans."""

    def __init__(self, parts: EngineParts, endings: RequestEndings) -> None:
        self._parts = parts
        self._endings = endings
        self._accounts = parts.accounts
        self._scheduler = parts.scheduler

    def commit(self, result: StepResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight, and return the outputs of each client.

        `elapsed_s` is the time in seconds since the plan was sent, or since the previous result if
        that came later. Raises RuntimeError if the result belongs to another plan, or does not fit
        the plan.
        """
        parts, totals = self._parts, self._parts.totals
        step, results = parts.inflight.on_completed(result)
        num_rows, num_computed = len(step.requests), step.num_tokens
        if parts.speculation.is_enabled and not step.prompts:
            parts.speculation.observe(num_rows, num_computed, step.num_requested_drafts, elapsed_s)
        totals.counts["computed_tokens"] += num_computed
        parts.throughput.observe(num_computed, elapsed_s, has_prompts=step.has_prompts)
        if len(self._scheduler.waiting):
            parts.throughput.admitted.observe(totals.num_admitted_tokens, elapsed_s)
        totals.num_admitted_tokens = 0
        parts.history.on_step(step, num_computed, elapsed_s, self._scheduler.lack)
        self._endings.release_committed()
        return self._messages(result.step, self._commit_rows(step, results))

    def commit_encoded(self, result: EncodeResult, elapsed_s: float) -> dict[bytes, Outputs]:
        """Apply the result of the oldest plan in flight that encodes, and return the outputs of
        each client whose requests have failed. `elapsed_s` is that of `commit`. `pop_results`
        returns the results of requests that are done.

        Raises RuntimeError if the result belongs to another plan, or does not fit the plan.
        """
        parts, counts = self._parts, self._parts.totals.counts
        step, encoded = parts.encoding.commit(result)
        counts["computed_tokens"] += step.num_tokens
        parts.throughput.observe_encoding(step.num_tokens, elapsed_s)
        parts.history.on_encoded(step, elapsed_s, self._scheduler.lack)
        outputs: dict[bytes, list[Output]] = {}
        for part in encoded:
            request, progress = part.request, part.request.encode
            assert progress is not None
            if part.is_failed:
                error = StepFailed("a result of this request is not a finite number")
                end = self._endings.finish(request, "error", CommittedTokens(error=error))
                outputs.setdefault(request.client, []).append(end)
            elif progress.is_done:
                counts["prompt_tokens"] += request.prompt_tokens
                parts.encoding.unsent.add(request)
        return self._messages(result.step, outputs)

    def pop_results(self, client: bytes, num_bytes: int) -> Outputs:
        """End the first requests of `client` whose results are not sent, and return their last
        outputs: as many as have at most `num_bytes` together, and at least one. Raises KeyError if
        there are none."""
        requests = self._parts.encoding.unsent.first(client, num_bytes)
        outputs = [self._endings.finish(request, "stop") for request in requests]
        return Outputs(step=0, outputs=outputs, load=engine_load(self._parts))

    def _messages(self, step: int, outputs: dict[bytes, list[Output]]) -> dict[bytes, Outputs]:
        load = engine_load(self._parts)
        return {
            client: Outputs(step=step, outputs=own, load=load) for client, own in outputs.items()
        }

    def _commit_rows(
        self, step: InflightStep, results: StepRowResults
    ) -> dict[bytes, list[Output]]:
        """Apply the rows of a committed step in order, and return the outputs of each client.

        Rows with a quiet token (columns.py) are applied here, and the others by `_commit_row`,
        which is the reference: both do the same to a row with a quiet token.
        """
        counts, starts = step.counts, step.plan.row_starts.tolist()
        quiet = quiet_tokens(step.requests, starts, results.tokens, step.plan.num_decodes)
        self._parts.totals.counts["generated_tokens"] += len(quiet) - quiet.count(None)
        # `advance` is needed only after every `size` positions, when a block is full; elsewhere it
        # just counts. If blocks are freed while requests run, it is needed after every position.
        size = 1 if self._scheduler.tables.frees_blocks else self._parts.limits.block_tokens
        outputs: dict[bytes, list[Output]] = {}
        client, own = None, []
        rows = range(len(step.requests))
        for row, request, start, token in zip(rows, step.requests, starts, quiet, strict=True):
            if token is None:
                if request.phase is not RequestPhase.RUNNING:
                    continue
                output = self._commit_row(request, counts[row], results[row])
                if output is None:
                    continue
            else:
                request.tokens.append(token)
                if request.account is not None:
                    self._accounts.charge_tokens(request.account, 1)
                if (start + 1) % size:
                    request.num_computed += 1
                else:
                    self._scheduler.advance(request, 1)
                output = Output(
                    request=request.number,
                    tokens=[token],
                    logprobs=NO_LOGPROBS,
                    prompt_logprobs=NO_LOGPROBS,
                )
            if request.client != client:
                client = request.client
                own = outputs.setdefault(client, [])
            own.append(output)
        return outputs

    def _commit_row(self, request: Request, count: int, row_result: RowResult) -> Output | None:
        """Apply one row of a committed step, and return the Output for its client. Return None
        while the prompt is being computed."""
        counts = self._parts.totals.counts
        committed = commit_row(request, count, row_result)
        counts["generated_tokens"] += len(committed.tokens)
        if request.account is not None:
            self._accounts.charge_tokens(request.account, len(committed.tokens))
        counts["draft_tokens"] += row_result.num_drafts
        counts["accepted_tokens"] += committed.num_accepted
        self._scheduler.advance(request, committed.num_valid)
        if committed.tokens and request.num_generated == len(committed.tokens):
            self._parts.history.on_first_token(request)
        if committed.finish is not None:
            return self._endings.finish(request, committed.finish, committed)
        if committed.tokens:
            return progress_output(request, committed)
        if request.samples or request.num_computed < len(request.tokens):
            return None
        if request.kv_readers:
            committed.kv_handle = self._parts.kv_transfers.hand_over(request)
        return self._endings.finish(request, "length", committed)
