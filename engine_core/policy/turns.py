"""Among requests that run: whose prompt is computed next, who waits for a newcomer, who gives way.

Pure functions of what accounts were served (fair_share.py), which `Request.due` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.policy.fair_share import AccountUsage
from engine_core.request import Request, RequestPhase


def prefill_order(running: Sequence[Request]) -> list[Request]:
    """Those with more than one token to compute: of the account that was served least first, and of
    each in the order of `running`."""
    prompts = [r for r in running if r.phase is RequestPhase.RUNNING and r.num_uncomputed > 1]
    due: dict[AccountUsage, float] = {}
    for request in prompts:
        due.setdefault(request.share, request.due)
    return sorted(prompts, key=lambda r: due[r.share]) if len(due) > 1 else prompts


def is_due_before(newcomer: Request, request: Request) -> bool:
    """Whether a newcomer is computed before one that has begun. Not within one account."""
    if newcomer.share is request.share:
        return False
    return (newcomer.due, newcomer.rank) < (request.due, request.rank)


def paused_decodes(streams: Sequence[Request], newcomer: Request) -> set[Request]:
    """Of those who stream, whoever may do without a token in the step in which a newcomer begins:
    it is his who was served less."""
    return {request for request in streams if is_due_before(newcomer, request)}


def preemption_victims(newcomer: Request, running: Sequence[Request]) -> list[Request]:
    """Those whose accounts were served more, by more tokens than it costs to compute them again;
    from the end of `running`. So what is lost is less than what was unfair, and after it the
    difference is the same: nobody is preempted back before the other has been served as much."""
    return [
        request
        for request in reversed(running)
        if request.phase is RequestPhase.RUNNING
        and request.share is not newcomer.share
        and request.due - len(request.tokens) > newcomer.due
    ]
