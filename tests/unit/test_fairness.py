"""Fair share between accounts: their order, preemption, and the limits of the queue."""

from __future__ import annotations

import random

import pytest

from engine_core.admission.check_generate import new_request
from engine_core.policy.fair_share import FairShare, squash
from engine_core.policy.queue import WaitingQueue
from engine_core.requests.request import AccountUsage, Request
from engine_core.requests.stage_timer import EngineClock
from protocol.engine.messages import Account, Generate
from protocol.wire.arrays import Int32
from tests.support.engines import CLIENT, Bench, a_card

ALICE, BOB = Account(name="alice"), Account(name="bob")


def flood(bench: Bench, account: Account | None, count: int, length: int, answer: int) -> list[int]:
    """Add `count` requests of one account, each with a different prompt."""
    numbers = []
    for place in range(count):
        prompt = [1 + place % 90, *([2 + place // 90] * (length - 1))]
        number = bench.add(prompt, account=account, max_tokens=answer, ignore_eos=True)
        numbers.append(number)
    return numbers


def steps_to_first_token(bench: Bench, number: int, most: int = 1000) -> int:
    for step in range(most):
        if bench.tokens(number):
            return step
        bench.step()
    raise AssertionError(f"no token after {most} steps")


def without_output(bench: Bench, numbers: list[int]) -> list[int]:
    """Return the requests that have no output yet."""
    return [number for number in numbers if not bench.outputs[CLIENT, number]]


def test_a_newcomer_goes_before_all_prompts_of_an_account_that_was_served_more() -> None:
    alone = Bench(token_budget=16)
    solo = steps_to_first_token(alone, flood(alone, BOB, 1, 40, 4)[0])
    bench = Bench(token_budget=16)
    flood(bench, ALICE, 50, 100, 4)
    for _ in range(5):
        bench.step()
    (late,) = flood(bench, BOB, 1, 40, 4)
    assert steps_to_first_token(bench, late) <= solo + 1


def test_a_decode_never_pauses_for_newcomers_in_two_steps_in_a_row() -> None:
    """Decodes pause if each token costs as much as the first, not if all steps cost the same."""
    streamed = {}
    for name, cost in (("dear", 64.0), ("flat", 1.0)):
        costs = [(1, 1.0), (64, cost)]
        bench = Bench(max_slots=40, num_blocks=300, step_costs=costs)
        flood(bench, ALICE, 6, 8, 60)
        for _ in range(30):
            bench.step()
        of_alice = set(bench.plans[-1].row_slots.tolist())
        first = len(bench.plans)
        for _ in range(8):
            bench.add([3] * 5, account=BOB, max_tokens=2)
            bench.step()
        plans = bench.plans[first:]
        streamed[name] = [len(of_alice & set(plan.row_slots.tolist())) for plan in plans]
    assert streamed == {"dear": [0, 6] * 4, "flat": [6] * 8}


def test_requests_of_one_account_are_served_in_order() -> None:
    bench = Bench(token_budget=16, max_slots=2)
    numbers = flood(bench, ALICE, 6, 30, 3)
    begun: list[int] = []
    for _ in range(100):
        bench.step()
        waiting = [number for number in numbers if number not in begun]
        begun += [number for number in waiting if bench.outputs[CLIENT, number]]
    assert begun == numbers


def test_an_account_that_fills_all_slots_is_preempted_for_one_served_less() -> None:
    bench = Bench(token_budget=16, max_slots=4)
    long = flood(bench, ALICE, 8, 20, 150)
    for _ in range(30):
        bench.step()
    assert len(without_output(bench, long)) == 4, "all slots are taken, for a long time"
    (late,) = flood(bench, BOB, 1, 10, 4)
    assert steps_to_first_token(bench, late) <= 3
    assert bench.engine.stats().num_preemptions == 1
    bench.run()
    assert all(bench.last_output(number).finish == "length" for number in [*long, late])


def test_an_account_that_fills_all_blocks_is_preempted_after_the_steps_in_flight() -> None:
    bench = Bench(token_budget=64, num_blocks=33, block_tokens=4, steps_in_flight=2)
    flood(bench, ALICE, 6, 60, 30)
    for _ in range(6):
        bench.step()
    (late,) = flood(bench, BOB, 1, 60, 4)
    assert steps_to_first_token(bench, late) <= 5
    bench.run()
    assert bench.engine.stats().num_preemptions >= 1


def test_a_request_is_not_preempted_for_another_of_its_account() -> None:
    bench = Bench(token_budget=16, max_slots=2)
    flood(bench, ALICE, 3, 10, 60)
    for _ in range(20):
        bench.step()
    (late,) = flood(bench, ALICE, 1, 10, 4)
    bench.run()
    assert bench.engine.stats().num_preemptions == 0
    assert bench.last_output(late).finish == "length"


def test_two_accounts_that_fill_all_slots_do_not_preempt_each_other_in_turn() -> None:
    bench = Bench(token_budget=16, max_slots=4)
    flood(bench, ALICE, 30, 12, 20)
    flood(bench, BOB, 30, 12, 20)
    bench.run()
    stats = bench.engine.stats()
    needed = 60 * (12 + 20 - 1)
    assert stats.num_computed_tokens - needed <= needed / 10, "hardly anything is computed again"


def test_a_preempted_request_resumes_before_later_requests() -> None:
    bench = Bench(token_budget=16, max_slots=2)
    flood(bench, ALICE, 2, 10, 60)
    flood(bench, ALICE, 4, 9, 2)
    for _ in range(20):
        bench.step()
    flood(bench, BOB, 1, 11, 4)
    bench.run()
    begun = [init.prompt_tokens for plan in bench.plans for init in plan.bind]
    assert begun == [10, 10, 11, 10, 9, 9, 9, 9]


def test_a_full_queue_accepts_an_account_with_few_requests_in_it() -> None:
    bench = Bench(max_waiting=10, max_slots=1)
    flood(bench, ALICE, 10, 5, 5)
    bench.refusal([1], account=ALICE)
    for _ in range(5):
        bench.add([1] * 3, account=BOB, max_tokens=1)
    bench.refusal([1] * 3, account=BOB, max_tokens=1)
    bench.refusal([1], account=ALICE)


def test_waiting_tokens_are_shared_between_accounts() -> None:
    bench = Bench(max_waiting_tokens=100, max_slots=1)
    flood(bench, ALICE, 10, 10, 5)
    bench.refusal([1], account=ALICE)
    assert bench.add([1] * 60, account=BOB), "in an empty part of the queue, a prompt may be long"
    bench.refusal([1], account=BOB)


def test_a_queue_of_many_accounts_is_bounded() -> None:
    bench = Bench(max_waiting=10, max_slots=1)
    for name in range(100):
        bench.try_add([1], account=Account(name=str(name)), max_tokens=1)
    assert bench.engine.stats().waiting <= 20


def test_cached_tokens_are_not_charged() -> None:
    bench = Bench(token_budget=16, block_tokens=4, max_slots=1)
    fair_share = bench.engine.scheduler.fair_share
    bench.add([5] * 17, account=ALICE, max_tokens=1)
    bench.run()
    usage = fair_share.get("alice", lambda name: 0)
    assert usage.served == 17
    bench.add([5] * 17, account=ALICE, max_tokens=1)
    bench.run()
    assert usage.served == 18, "16 of them were cached"


def test_the_head_start_of_an_idle_account_and_the_debt_of_a_busy_one_are_bounded() -> None:
    fair_share = FairShare(Bench(max_len=100, token_budget=10).limits)
    busy, away = AccountUsage("busy", 1_000_000.0), AccountUsage("away")
    fair_share.on_scheduled(busy)
    fair_share.on_wait_started(away)
    assert away.served == busy.served - fair_share.max_credit
    ahead = AccountUsage("ahead", 9_000_000.0)
    fair_share.on_wait_started(ahead)
    assert ahead.served == busy.served + fair_share.max_credit


def test_accounts_without_requests_are_forgotten() -> None:
    fair_share = FairShare(Bench().limits)
    kept = fair_share.get("kept", lambda name: 1)
    for number in range(10_000):
        fair_share.get(str(number), lambda name: int(name == "kept"))
    assert len(fair_share) <= 4097
    assert fair_share.get("kept", lambda name: 1) is kept


def new_waiting_request(order: int, usage: AccountUsage, length: int) -> Request:
    message = Generate(request=order, prompt=Int32.of([1] * length))
    prompt, limits = [1] * length, Bench().limits
    request = new_request(
        CLIENT, message, prompt, order, lambda: 0, a_card(), limits, EngineClock()
    )
    request.account_usage, request.queue_time = usage, float(order)
    return request


@pytest.mark.parametrize("seed", range(20))
def test_the_estimated_tokens_before_a_request_match_a_drained_queue(seed: int) -> None:
    rng, longest = random.Random(seed), 30
    fair_share = FairShare(Bench().limits)
    queue = WaitingQueue(fair_share)
    accounts = [AccountUsage(str(i), rng.uniform(0, 400)) for i in range(rng.randrange(1, 8))]
    for order in range(rng.randrange(120)):
        queue.push(new_waiting_request(order, rng.choice(accounts), rng.randrange(1, longest)))
    new = new_waiting_request(1000, rng.choice(accounts), 5)
    new.priority_credit = rng.choice([0.0, 0.0, -50.0, 50.0])
    estimated, bound = queue.tokens_before(new), queue.max_tokens_before(new)
    assert estimated <= bound
    queue.push(new)
    found = 0
    while (first := queue.first()) is not new:
        assert first is not None
        queue.remove(first)
        first.account_usage.served += len(first.tokens)
        found += len(first.tokens)
    # The estimate splits requests, the queue does not: one request of each account may differ.
    assert abs(estimated - found) <= longest * len(accounts)


def test_squashed_priorities_keep_their_order_within_bounds() -> None:
    values = [squash(priority) for priority in (-(1 << 31), -5, -1, 0, 1, 2, 1 << 31)]
    assert values == sorted(values)
    assert len(set(values)) == len(values)
    assert all(-1 < value < 1 for value in values)


def test_a_waiting_request_is_overtaken_by_higher_priorities_for_a_bounded_time() -> None:
    bench = Bench(token_budget=8, max_slots=1, priority_s=60.0)
    bench.tick(1000.0)
    patient = bench.add([1] * 8, max_tokens=1, priority=5)
    now, waited = 1000.0, 0.0
    while not bench.outputs[CLIENT, patient]:
        for _ in range(2):  # twice what can be served
            bench.add([2] * 8, max_tokens=1, priority=-5, prompt_logprobs=None)
        bench.step()
        now, waited = now + 1.0, waited + 1.0
        bench.tick(now)
        assert waited < 1000, "the request starves"
    # The requests of the next 2 * 60 s go first; twice as many arrive as can be served.
    assert 60.0 < waited <= 4 * 60.0 + 2


def test_a_priority_gives_an_account_a_bounded_head_start() -> None:
    bench = Bench(token_budget=16, max_len=64, max_slots=2)
    max_credit = bench.engine.scheduler.fair_share.max_credit
    for place in range(60):
        bench.add([1 + place, *[3] * 11], account=ALICE, priority=-100, max_tokens=4)
        bench.add([1 + place, *[4] * 11], account=BOB, priority=100, max_tokens=4)
    fair_share = bench.engine.scheduler.fair_share
    alice, bob = (fair_share.get(name, lambda name: 0) for name in ("alice", "bob"))
    most = 0.0
    for _ in range(60):
        bench.step()
        most = max(most, alice.served - bob.served)
    assert max_credit / 2 < most <= 2 * max_credit + 3 * 16
    assert bob.served > max_credit / 2
