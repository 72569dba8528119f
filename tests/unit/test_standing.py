"""Refusals that stand for a moment: which do, for how long, and for whom."""

from __future__ import annotations

import pytest

from engine_core.policy.accounts import MAX_STANDS_S
from engine_core.policy.admission import check_load, repeat_s
from engine_core.policy.queue import QueueLoad
from gateway.engine.refusal_cache import MAX_ENTRIES, RefusalCache
from protocol.errors import ContextTooLong, Overloaded, ServingError
from protocol.messages import Account
from tests.support.engines import Bench

ALICE, BOB = Account(name="alice"), Account(name="bob")
FULL = Overloaded("full", retry_after_s=3, stands_s=0.2)
MOST = QueueLoad(requests=100, tokens=6400)


def refusal_of(num_tokens: int, waiting: QueueLoad, *, rate: float = 1000.0) -> Overloaded:
    with pytest.raises(Overloaded) as refused:
        check_load(num_tokens, waiting, own=waiting, max_load=MOST, num_accounts=1, rate=rate)
    return refused.value


def test_it_stands_for_the_account_it_was_said_to_and_for_its_time() -> None:
    standing = RefusalCache()
    standing.add(ALICE, FULL, now=10.0)
    found = standing.get(ALICE, now=10.19)
    assert isinstance(found, Overloaded)
    assert found.info() == FULL.info()
    assert found is not FULL
    assert standing.get(ALICE, now=10.1) is not found  # whoever raises it gives it a traceback
    assert standing.get(BOB, now=10.1) is None
    assert standing.get(None, now=10.1) is None
    assert standing.get(ALICE, now=10.2) is None


def test_without_accounts_all_are_one() -> None:
    standing = RefusalCache()
    standing.add(None, FULL, now=0.0)
    assert standing.get(None, now=0.1) is not None


@pytest.mark.parametrize("refusal", [Overloaded("full"), ContextTooLong("too long")])
def test_what_depends_on_the_request_does_not_stand(refusal: ServingError) -> None:
    standing = RefusalCache()
    standing.add(ALICE, refusal, now=0.0)
    assert standing.get(ALICE, now=0.0) is None


def test_accounts_without_number_leave_no_memory_behind() -> None:
    standing = RefusalCache()
    for place in range(3 * MAX_ENTRIES):
        standing.add(Account(name=f"a{place}"), FULL, now=float(place))
    assert len(standing._until) <= MAX_ENTRIES
    assert standing.get(Account(name=f"a{place}"), now=place + 0.1) is not None


def test_a_queue_full_of_requests_is_full_whatever_is_asked() -> None:
    assert refusal_of(8, QueueLoad(100, 3000)).stands_s > 0


def test_a_queue_full_of_tokens_is_full_for_others_if_nothing_small_fits_either() -> None:
    assert refusal_of(1000, QueueLoad(50, 6000)).stands_s == 0
    assert refusal_of(1000, QueueLoad(50, 6399)).stands_s > 0
    assert refusal_of(1, QueueLoad(50, 6400)).stands_s > 0


def test_it_stands_while_little_of_what_waits_leaves() -> None:
    assert repeat_s(2000, 1000.0) == 0.1  # a twentieth of it, at that speed
    assert repeat_s(10**6, 1000.0) == MAX_STANDS_S
    assert repeat_s(2000, 0.0) == 0  # nobody knows


def test_a_limit_of_the_accounts_own_stands_until_there_is_one_in_the_bucket() -> None:
    bench = Bench()
    for per_minute, stands_s in ((60, MAX_STANDS_S), (600, 0.1)):
        account = Account(name=f"{per_minute}", requests_per_minute=per_minute)
        for _ in range(per_minute):
            number = bench.add([1], account=account)
            assert isinstance(number, int)
            bench.abort(number)
        refused = bench.add([1], account=account)
        assert refused.error.code == "rate_limit_exceeded"
        assert refused.error.stands_s == pytest.approx(stands_s)
