"""Plans the drafts of a step, and the work of the draft model or of the model's own head.

Drafts follow the last known token of a decode, and get what the rest of the step leaves of the
budget. Blocks are allocated for drafts only if one more block per running request remains free. If
the drafts are wrong, their blocks stay with the request, whose answer will fill them.

The draft model computes a prompt in the same steps as the main model. It computes the tokens of the
answer later: in steps that request drafts from it, and when it is `MAX_DRAFT_LAG` tokens behind. It
skips requests for which drafts are not worthwhile. If it computes a request, the request's blocks
are published only when both models have computed them.

The head reads the model's hidden states, which the worker keeps for the last `MAX_HEAD_LAG`
positions of a request only. So it computes prompts in the steps of the model, and answers when
drafts are requested. It then computes what it can of all requests that use it. All other steps are
planned as if it did not exist, and so are the blocks that are published: entries that it lacks make
drafts worse, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.requests.request import Request
from engine_core.schedule.block_tables import BlockTables
from engine_core.schedule.grouped_tables import GroupedBlockTables
from engine_core.schedule.plan import DraftCatchUp, Schedule
from engine_core.speculation.draft_policy import Speculation
from protocol.engine.messages import Limits
from protocol.worker.steps import MAX_HEAD_LAG

MAX_DRAFT_LAG = 32
"""The draft model computes answer tokens once it lacks this many of them.

One pass over many tokens costs little more than a pass over one token.
"""


class DraftPlanning:
    """Adds drafts, and the work of the draft model or head, to the schedules of one engine."""

    def __init__(
        self, limits: Limits, tables: BlockTables | GroupedBlockTables, speculation: Speculation
    ) -> None:
        self._limits = limits
        self._tables = tables
        self._speculation = speculation

    def add_to(self, step: Schedule, running: Sequence[Request]) -> None:
        """Complete the schedule of a step, to which everything else has been added.

        - running: the running requests
        """
        if self._speculation.is_enabled:
            self._add_drafts(step, len(running))
            if self._speculation.has_head:
                self._add_head_work(step, len(running))
            else:
                self._add_model_work(step, len(running))

    def _add_drafts(self, step: Schedule, num_running: int) -> None:
        """Add drafts to the decodes that have no token in flight."""
        rows, plain = len(step.decodes) + len(step.chunks), []
        for request in step.decodes:
            are_all_known = request.num_uncomputed == 1 and not request.num_pending
            max_drafts = self._max_drafts(request, step, num_running) if are_all_known else 0
            drafts = self._speculation.propose(request, max_drafts, rows) if max_drafts > 0 else []
            if drafts:
                self._tables.grow(request, len(request.tokens) + len(drafts), step)
                step.drafted.append((request, drafts))
                step.budget -= len(drafts)
            else:
                plain.append(request)
        step.decodes = plain

    def _max_drafts(self, request: Request, step: Schedule, num_running: int) -> int:
        """Return how many drafts the budget, the answer's length and the blocks allow.

        One free block is left for each running request. With n drafts, the step samples up to
        n + 1 tokens.
        """
        left = request.max_total_tokens - len(request.tokens) - 1
        most = self._tables.max_positions(request, reserved=num_running)
        return min(step.budget, left, most - len(request.tokens))

    def _add_model_work(self, step: Schedule, num_running: int) -> None:
        """Plan the work of the draft model: the tokens to compute, and the drafts to request."""
        rows = list(step.rows())
        for request, count, drafts in rows:
            if not request.uses_draft_model:
                continue
            known = request.num_scheduled + count - len(drafts)
            start = request.num_draft_computed
            stride = min(known - start, self._limits.token_budget)
            num_requested = 0
            if start + stride == known:
                num_requested = self._request_drafts(step, request, count, len(rows), num_running)
            if num_requested:
                step.draft_catch_ups[request] = DraftCatchUp(start, 0, num_requested)
            elif count - len(drafts) > 1 or stride >= MAX_DRAFT_LAG:
                step.draft_catch_ups[request] = DraftCatchUp(start, stride, 0)
            else:
                continue
            request.num_draft_computed = start + stride

    def _add_head_work(self, step: Schedule, num_running: int) -> None:
        """Plan the work of the head: none if the step requests no drafts and has no prompts.
        Otherwise that of the rows which have either, and of other rows that use it, up to a token
        budget of entries, for which the worker reserves memory. The other rows lose the entries
        whose hidden states the worker no longer has."""
        every = list(step.rows())
        rows = [row for row in every if self._speculation.keeps_head(row[0])]
        wanted = {
            request: self._request_drafts(step, request, count, len(every), num_running)
            for request, count, _ in rows
        }
        is_due = {
            request: wanted[request] > 0 or count - len(drafts) > 1
            for request, count, drafts in rows
        }
        has_work = any(is_due.values())
        spare = self._limits.token_budget - sum(n for each, n, _ in rows if is_due[each])
        for request, count, drafts in sorted(rows, key=lambda row: not is_due[row[0]]):
            start, end = request.num_draft_computed, request.num_scheduled + count
            more = end - start - (count if is_due[request] else 0)
            if more > spare and is_due[request]:
                start, more = request.num_scheduled, 0
            if has_work and more <= spare:
                spare -= more
                stride = 0 if wanted[request] else end - len(drafts) - start
                step.draft_catch_ups[request] = DraftCatchUp(start, stride, wanted[request])
                request.num_draft_computed = end - len(drafts)
            else:
                request.num_draft_computed = max(start, end - MAX_HEAD_LAG)

    def _request_drafts(
        self, step: Schedule, request: Request, count: int, num_rows: int, num_running: int
    ) -> int:
        """Return how many drafts to request for a row of `count` positions, in a step of `num_rows`
        rows, and allocate their blocks."""
        if not request.is_sampled(count):
            return 0
        ahead = request.num_scheduled + count  # if all drafts of the row are right
        most = self._tables.max_positions(request, reserved=num_running)
        room = min(request.max_total_tokens - 2, most) - ahead
        if room <= 0:
            return 0
        num_requested = self._speculation.num_draft_model_tokens(request, room, num_rows)
        if num_requested:
            self._tables.grow(request, ahead + num_requested, step)
        return num_requested
