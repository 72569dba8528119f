"""Plans the drafts of a step, and the work of the draft model or of the model's own head.

Drafts follow the last known token of a decode, and get what the rest of the step leaves of the
budget. Blocks are allocated for drafts only if one more block per running request remains free. If
the drafts are wrong, their blocks stay with the request, whose answer will fill them.

The draft model computes a prompt in the same steps as the main model. It computes the tokens of the
answer later: in steps that request drafts from it, and when it is `MAX_DRAFT_LAG` tokens behind. It
skips requests for which drafts are not worthwhile. If it computes a request, the request's blocks
are published only when both models have computed them.

The head reads hidden states of the step, so it computes exactly the positions of each row of a
request that uses it. Blocks are published as if it did not exist: entries that it lacks make drafts
worse, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.requests.request import Request
from engine_core.schedule.block_tables import BlockTables
from engine_core.schedule.grouped_tables import GroupedBlockTables
from engine_core.schedule.plan import DraftCatchUp, Schedule
from engine_core.speculation.draft_policy import Speculation
from protocol.engine.messages import Limits

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
        """Plan the work of the draft model or head: the tokens to compute, and the drafts to
        request."""
        rows = list(step.rows())
        for request, count, drafts in rows:
            known = request.num_scheduled + count - len(drafts)
            if self._speculation.keeps_head(request):
                start, is_due = request.num_scheduled, True
                stride = known - start
            elif request.uses_draft_model:
                start = request.num_draft_computed
                stride = min(known - start, self._limits.token_budget)
                is_due = count - len(drafts) > 1 or stride >= MAX_DRAFT_LAG
            else:
                continue
            num_requested, ahead = 0, known + len(drafts)  # if all drafts are right
            if request.is_sampled(count) and start + stride == known:
                most = self._tables.max_positions(request, reserved=num_running)
                room = min(request.max_total_tokens - 2, most) - ahead
                if room > 0:
                    num_requested = self._speculation.num_draft_model_tokens(
                        request, room, len(rows)
                    )
            if num_requested:
                self._tables.grow(request, ahead + num_requested, step)
                step.draft_catch_ups[request] = DraftCatchUp(start, 0, num_requested)
            elif is_due:
                step.draft_catch_ups[request] = DraftCatchUp(start, stride, 0)
            else:
                continue
            if request.uses_draft_model:
                request.num_draft_computed = start + stride
