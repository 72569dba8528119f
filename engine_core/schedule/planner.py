"""`StepPlanner`: decides the next step, and allocates what it needs."""

from __future__ import annotations

from engine_core.grammar.masks import compute_masks
from engine_core.parts import EngineParts
from engine_core.policy.fair_share import charge_rows
from engine_core.schedule.plan import RowColumns, build_plan, mask_matchers
from protocol.worker.steps import EncodePlan, Masks, StepPlan


class StepPlanner:
    """Makes the plans of an engine. Steps that generate and steps that encode take turns if both
    have work."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._encoding = parts.encoding
        self._inflight = parts.inflight

    @property
    def num_in_flight(self) -> int:
        """The number of plans that were sent to the worker and not committed yet."""
        return len(self._inflight) + len(self._encoding.inflight)

    def plan(self) -> StepPlan | EncodePlan | None:
        """Decide the next step and allocate what it needs. Return None if there is nothing to
        compute, or if a plan in flight must commit first."""
        encoding = self._encoding
        if not encoding.num_open and not encoding.inflight:
            return None if self._inflight.is_full else self._plan_generation()
        if self.num_in_flight >= self._parts.config.steps_in_flight:
            return None
        encoding.update_held()
        if encoding.has_work and (encoding.is_next or not self._scheduler.has_work):
            return self._plan_encoding()
        plan = self._plan_generation()
        if plan is not None:
            encoding.on_generation_planned()
        elif encoding.has_work and not self._inflight:  # all that generate wait for K/V
            return self._plan_encoding()
        return plan

    def _plan_encoding(self) -> EncodePlan:
        parts, scheduler = self._parts, self._scheduler
        parts.totals.step += 1
        is_shared = scheduler.fair_share.is_shared(parts.clock.now)
        is_limited = is_shared and scheduler.has_work
        return self._encoding.plan(parts.totals.step, is_limited=is_limited)

    def _plan_generation(self) -> StepPlan | None:
        parts, scheduler, totals = self._parts, self._scheduler, self._parts.totals
        if not scheduler.has_work:
            return None
        is_shared = scheduler.fair_share.is_shared(parts.clock.now)
        if self._inflight and self._must_wait(is_shared=is_shared):
            return None
        schedule = scheduler.schedule(is_shared=is_shared)
        totals.counts["preemptions"] += len(schedule.preempted)
        rows = RowColumns.from_schedule(schedule)
        if not rows.requests:
            return None
        for request in schedule.admitted:
            totals.num_admitted_tokens += len(request.tokens)
            if not request.num_preemptions:
                totals.counts["prompt_tokens"] += request.prompt_tokens
                totals.counts["cached_tokens"] += request.num_cached
        charge_rows(rows.requests, rows.counts)
        for request in [request for request in rows.requests if request.kv_readers]:
            if request not in schedule.partial:
                parts.kv_transfers.announce(request)
        totals.step += 1
        for request in schedule.admitted:
            parts.history.on_bound(request, totals.step)
        releases = scheduler.slots.drain_releases()
        plan = build_plan(totals.step, schedule, rows, releases, self._inflight.newest)
        self._inflight.on_sent(plan, rows.requests)
        return plan

    def _must_wait(self, *, is_shared: bool) -> bool:
        """Return whether the plans in flight must commit before the next step is planned.

        They must if the next step may preempt a request, or if its drafts depend on a result in
        flight. The next step also waits for a long prefill step, and for any prefill step if
        accounts share the engine, so that it can include a request that arrives meanwhile.
        """
        parts, scheduler = self._parts, self._scheduler
        prompt_tokens = self._inflight.num_prompt_tokens
        return (
            not scheduler.can_continue()
            or self._inflight.are_decisive
            or (prompt_tokens > 0 and (is_shared or parts.throughput.is_long_step(prompt_tokens)))
            or parts.speculation.should_wait(scheduler.running, len(scheduler.running))
        )

    def masks(self) -> Masks | None:
        """Return the masks of the oldest plan in flight.

        Return None if they were returned already, or if no grammar constrains the plan's rows. A
        mask depends on all tokens before it. So it can be computed only after the previous plan has
        committed, when its own plan has become the oldest.
        """
        step = self._inflight.oldest
        if step is None or not step.needs_masks:
            return None
        step.needs_masks = False
        matchers = mask_matchers(step.plan, step.requests)
        bits = compute_masks(matchers, self._parts.model.vocab_size)
        return Masks(step=step.plan.step, bits=bits)
