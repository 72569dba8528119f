"""Overload on a simulated clock: refusals, throughput, and the effect of one account's flood on
another account.

`python -m tests.benchmarks.overload` measures the same with real processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

import pytest

from engine_core.policy.fair_share import prefill_budget_when_shared
from engine_core.speculation.step_costs import StepCosts
from gateway.engine.refusal_cache import RefusalCache
from protocol.engine.messages import Account
from tests.support.paced import STEP_S, TOKEN_S, Paced, PacedRequest

ALICE, BOB = Account(name="alice"), Account(name="bob")
PROMPT, ANSWER = 20, 8
BUDGET = 32
MAX_WAITING = 16
STEP = STEP_S + BUDGET * TOKEN_S
OPTIONS: dict[str, Any] = {"token_budget": BUDGET, "steps_in_flight": 2, "num_blocks": 129}


def offered(
    per_s: float,
    seconds: float,
    max_waiting: int = MAX_WAITING,
    refusal_cache: RefusalCache | None = None,
    **terms: float,
) -> tuple[Paced, list[PacedRequest]]:
    """Send `per_s` requests per second at even intervals, from two accounts in turn. Return the run
    and its requests."""
    paced = Paced(refusal_cache=refusal_cache, **OPTIONS, max_waiting=max_waiting)
    for place in range(int(per_s * seconds)):
        account = (ALICE, BOB)[place % 2]
        paced.at(place / per_s, lambda who=account: paced.ask(PROMPT, ANSWER, who, **terms))  # type: ignore[misc]
    paced.run(seconds)
    return paced, paced.asked


def done_per_s(requests: list[PacedRequest], seconds: float) -> float:
    """Return the tokens per second of the completed requests, prompts included."""
    return sum(one.num_tokens for one in requests) / seconds


def peak_per_s() -> float:
    """Return the higher throughput of two arrival rates near the capacity, in tokens per second."""
    return max(done_per_s(offered(per_s, 4.0)[1], 4.0) for per_s in (40, 60))


def test_tenfold_load_keeps_the_throughput_and_refuses_the_rest_with_retry_after() -> None:
    paced, requests = offered(400, 4.0)
    assert done_per_s(requests, 4.0) >= 0.9 * peak_per_s()
    refused = [one.refused for one in requests if one.refused is not None]
    assert len(refused) > 0.8 * len(requests)
    assert {one.error.code for one in refused} == {"overloaded"}
    assert all((one.error.retry_after_s or 0) >= 1 for one in refused)
    stats = paced.bench.engine.stats()
    assert stats.waiting <= 2 * MAX_WAITING
    assert all(one.ended_at is not None or one.at > 2.0 for one in requests if one.refused is None)


@pytest.mark.parametrize(("max_waiting", "share"), [(1, 0.0), (MAX_WAITING, 0.5), (64, 0.7)])
def test_refusals_cached_by_a_gateway_cost_no_throughput(max_waiting: int, share: float) -> None:
    """`share` is the least share of refusals that come from the cache. If the queue has only one
    place, a refusal is cached for about a millisecond, so the share may be 0."""
    _, requests = offered(400, 4.0, max_waiting)
    caching, cached_requests = offered(400, 4.0, max_waiting, RefusalCache())
    assert done_per_s(cached_requests, 4.0) >= 0.98 * done_per_s(requests, 4.0)
    refused = sum(one.refused is not None for one in cached_requests)
    assert caching.num_early >= share * refused
    begun = {who: sum(one.refused is None for one in cached_requests[who::2]) for who in (0, 1)}
    assert begun[0] == pytest.approx(begun[1], rel=0.2)


def a_crowd(accounts: int) -> tuple[Paced, Account]:
    """Return a run in which requests of every account wait, and the account that sends one more.

    The first account sent its requests two seconds ago, the others one second ago.
    """
    names = [Account(name=f"account {number}") for number in range(accounts)]
    paced = Paced(**OPTIONS, max_waiting=10_000)
    for place in range(200 // accounts):
        for name in names:
            when = 0.0 if name is names[0] else 1.0
            paced.at(when, lambda who=name, n=place: paced.ask(10 + n % 20, ANSWER, who))  # type: ignore[misc]
    paced.run(2.0)
    return paced, names[-1]


def send_one_more(crowd: tuple[Paced, Account], **terms: float) -> PacedRequest:
    """Send one more request, from the account that `crowd` names. Return the request when it has
    been refused or has output."""
    paced, name = crowd
    paced.at(paced.now, lambda: paced.ask(PROMPT, 1, name, **terms))
    while (requests := paced.asked[-1]).at < 2.0 or not (requests.refused or requests.outputs):
        paced.run(paced.now + STEP)
    return requests


@pytest.mark.parametrize("accounts", [2, 4, 8])
def test_queue_timeouts_are_predicted_among_several_accounts(accounts: int) -> None:
    wait_s = send_one_more(a_crowd(accounts)).wait_s
    assert wait_s > 10 * STEP
    refused = send_one_more(a_crowd(accounts), queue_timeout_s=0.8 * wait_s).refused
    assert "cannot be started within" in refused.error.message
    assert send_one_more(a_crowd(accounts), queue_timeout_s=1.1 * wait_s).wait_s == pytest.approx(
        wait_s
    )


def test_requests_past_their_queue_timeout_are_never_computed() -> None:
    """The queue is so long that it never becomes full, so only the timeout refuses requests."""
    paced, requests = offered(400, 4.0, max_waiting=10_000, queue_timeout_s=0.1)
    assert done_per_s(requests, 4.0) >= 0.9 * peak_per_s()
    begun = [one for one in requests if one.first_at is not None]
    assert max(one.wait_s for one in begun) <= 0.1 + 5 * STEP
    codes = {one.refused.error.code for one in requests if one.refused is not None}
    assert "queue_timeout" in codes
    assert not any(
        o.usage and o.tokens for one in requests if not one.first_at for o in one.outputs
    )
    assert paced.bench.engine.stats().num_timeouts.keys() <= {"queued"}


def flooded(length: int, *, flood: bool, times: int = 5) -> list[float]:
    """Return the times to the first token of Bob's few requests. If `flood`, Alice meanwhile keeps
    the queue full."""
    paced = Paced(**OPTIONS, max_len=180, max_slots=8, max_waiting=MAX_WAITING)
    mine: list[PacedRequest] = []

    def more() -> None:
        """Add requests of Alice until the queue is full, and again after each step."""
        while paced.ask(150, 20, ALICE).refused is None:
            pass
        paced.at(paced.now + STEP, more)

    if flood:
        paced.at(0.0, more)
    for place in range(times):
        paced.at(1.0 + 1.37 * place, lambda: mine.append(paced.ask(length, 8, BOB)))
    paced.run(1.0 + 1.37 * times)
    assert all(one.refused is None for one in mine)
    return [one.wait_s for one in mine]


@pytest.mark.parametrize("length", [4 * BUDGET, 5 * BUDGET])
def test_a_flood_does_not_double_another_accounts_time_to_the_first_token(length: int) -> None:
    alone, beside = flooded(length, flood=False), flooded(length, flood=True)
    assert max(beside) <= 2 * max(alone)


PACKED = [
    (1, 0.0040),
    (8, 0.0066),
    (16, 0.0105),
    (32, 0.0204),
    (64, 0.0391),
    (128, 0.0770),
    (256, 0.1530),
]
LARGE: dict[str, Any] = {
    "token_budget": 256,
    "steps_in_flight": 2,
    "num_blocks": 400,
    "block_tokens": 16,
}


def in_large_steps(*, flood: bool, costs: Sequence[tuple[int, float]]) -> Paced:
    """Return a run with the step size and the number of slots of a real server. If `flood`, Alice
    keeps its queue full."""
    paced = Paced(costs, **LARGE, max_len=1100, max_slots=16, max_waiting=MAX_WAITING)

    def more() -> None:
        while paced.ask(600, 20, ALICE).refused is None:
            pass
        paced.at(paced.now + 0.1, more)

    if flood:
        paced.at(0.0, more)
    return paced


def flooded_in_large_steps(
    length: int, *, flood: bool, every_s: float = 1.37, costs: Sequence[tuple[int, float]] = ()
) -> tuple[list[float], float]:
    """Return the times to the first token of all but the first of Bob's requests, and the computed
    tokens per second. If `flood`, Alice keeps the queue full."""
    paced = in_large_steps(flood=flood, costs=costs)
    mine: list[PacedRequest] = []
    times = 9 if length > 64 else 40
    for place in range(times):
        paced.at(2.0 + every_s * place, lambda: mine.append(paced.ask(length, 8, BOB)))
    paced.run(2.0 + every_s * times)
    waits = [one.wait_s for one in mine[1:]]  # the first request arrives during a full step
    return waits, paced.bench.engine.stats().num_computed_tokens / paced.now


@pytest.mark.parametrize("length", [64, 100, 256, 600])
def test_a_flood_does_not_double_the_ttft_of_prompts_shorter_than_a_step(length: int) -> None:
    (alone, _), (beside, _) = (flooded_in_large_steps(length, flood=f) for f in (False, True))
    assert median(beside) <= 2 * median(alone)
    assert max(beside) <= max(alone) + 2 * (STEP_S + (64 + 16) * TOKEN_S) + 0.2 * max(alone)


@pytest.mark.parametrize("length", [8, 16, 32, 64, 256, 1024])
def test_a_flood_does_not_double_the_ttft_of_any_prompt_with_known_costs(length: int) -> None:
    """The costs are those of packed weights on a CPU, where they grow with each token."""
    every_s = 0.263 + length / 600
    (alone, _), (beside, per_s) = (
        flooded_in_large_steps(length, flood=flood, every_s=every_s, costs=PACKED)
        for flood in (False, True)
    )
    assert median(beside) <= 2 * median(alone)
    assert quantiles(beside, n=10)[-1] <= 2.75 * median(alone)
    assert per_s >= 0.85 * 256 / StepCosts(PACKED)[256], "throughput relative to full steps"


@pytest.mark.parametrize(("costs", "most"), [(PACKED, 1), ([(1, 0.010), (256, 0.012)], 2)])
def test_a_newcomer_waits_for_one_long_step_or_two_short_ones(
    costs: list[tuple[int, float]], most: int
) -> None:
    full_s, waits = costs[-1][1], []
    for place in range(10):
        paced = in_large_steps(flood=True, costs=costs)
        paced.at(1.5 + place * full_s / 10, lambda them=paced: them.ask(8, 1, BOB))  # type: ignore[misc]
        paced.run(2.5)
        waits += [one.wait_s for one in paced.asked if one.prompt_tokens == 8]
    assert most - 1 < max(waits) / full_s <= most + 0.2 + (most > 1)
    per_s = paced.bench.engine.stats().num_computed_tokens / paced.now
    assert per_s >= 0.95 * 256 / full_s


def test_flat_step_costs_keep_steps_whole_and_ttft_bounded() -> None:
    flat = [(1, 0.010), (64, 0.010), (256, 0.012)]
    for length in (8, 200):
        (alone, _), (beside, per_s) = (
            flooded_in_large_steps(length, flood=f, every_s=0.293, costs=flat)
            for f in (False, True)
        )
        assert median(beside) <= 2 * median(alone)
        assert per_s >= 0.85 * 256 / 0.012


@pytest.mark.parametrize(
    ("full", "costs", "part"),
    [
        (256, [], 64),
        (2048, [], 512),
        (256, PACKED, 16),
        (256, [(1, 1.0), (256, 1.0)], 256),
        (200, [(1, 1.0), (256, 1.0)], 128),
        (256, [(1, 1.0), (8, 8.0), (256, 256.0)], 16),
        (256, [(8, 8.0), (16, 17.0), (32, 17.0), (256, 64.0)], 64),
        (1, PACKED, 1),
    ],
)
def test_the_shared_prefill_budget_follows_from_the_step_costs(
    full: int, costs: list[tuple[int, float]], part: int
) -> None:
    """In the second-to-last case, a step of 16 tokens takes more than twice as long as one of 8, so
    only steps of up to 8 tokens are short enough. But in steps of 8, 16 or 32 tokens, each token
    costs more than twice as much as in a full step. So the budget is 64."""
    assert prefill_budget_when_shared(full, StepCosts(costs) if costs else None) == part


def test_a_single_account_gets_whole_steps() -> None:
    paced = Paced(**LARGE, max_len=700, max_slots=16)
    for place in range(4):
        paced.at(0.1 * place, lambda: paced.ask(600, 20, ALICE))
    paced.run(1.0)
    assert max(sum(plan.row_tokens.tolist()) for plan in paced.bench.plans) == 256


@pytest.mark.parametrize("length", [3, BUDGET // 2, BUDGET, 2 * BUDGET])
def test_a_short_prompt_waits_only_for_the_steps_in_flight(length: int) -> None:
    alone, beside = flooded(length, flood=False), flooded(length, flood=True)
    steps = -(-length // (BUDGET - 8))  # eight may stream
    assert max(beside) <= max(max(alone), steps * STEP) + 3 * STEP
