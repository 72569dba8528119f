"""Rate limits of accounts, cached refusals, and measured throughput."""

from __future__ import annotations

from contextlib import suppress

import pytest

from engine_core.admission.admission import check_load, repeat_s
from engine_core.policy import accounts
from engine_core.policy.accounts import MAX_REPEAT_S, Accounts
from engine_core.policy.queue import QueueLoad
from engine_core.policy.throughput import LONG_STEP_S, Rate, Throughput
from gateway.engine.refusal_cache import MAX_ENTRIES, RefusalCache
from protocol.engine.grammar import Lark
from protocol.engine.messages import Account, Refused
from protocol.wire.errors import ContextTooLong, LimitReached, Overloaded, ServingError
from tests.support.engines import Bench


class LimitedAccounts:
    """Accounts whose clock the test sets."""

    def __init__(self) -> None:
        self.accounts = Accounts()

    def request(self, now: float, tokens: int = 1, **limits: int) -> float | None:
        """Send a request. Return None if it was accepted, else the seconds to wait."""
        account = Account(name="alice", **limits)
        self.accounts.now = now
        try:
            self.accounts.check(account, 0, is_first=True)
        except LimitReached as error:
            return error.retry_after_s
        self.accounts.charge_request(account, tokens, is_first=True)
        return None


def test_a_minutes_requests_may_come_in_one_burst():
    limited = LimitedAccounts()
    assert [limited.request(100.0, requests_per_minute=3) for _ in range(4)] == [
        None,
        None,
        None,
        20.0,
    ]
    assert limited.request(119.9, requests_per_minute=3) == 1.0
    assert limited.request(120.1, requests_per_minute=3) is None
    assert limited.request(120.1, requests_per_minute=3) is not None
    assert [limited.request(1000.0, requests_per_minute=3) for _ in range(4)][2:] == [None, 20.0]


@pytest.mark.parametrize(
    "limit", [{"requests_per_minute": 5}, {"tokens_per_minute": 50}, {"concurrency": 5}]
)
def test_several_engines_together_admit_the_limit(limit: dict[str, int]) -> None:
    num_accepted = 0
    for part in range(3):
        limited = Accounts()
        account = Account(name="alice", part=part, parts=3, **limit)

        def send(num_open: int) -> None:
            limited.check(account, num_open, is_first=True)  # noqa: B023
            limited.charge_request(account, 10, is_first=True)  # noqa: B023

        num_open = 0
        with suppress(LimitReached):
            for num_open in range(60):
                send(num_open)
        with pytest.raises(LimitReached, match=str(*limit.values())):  # the limit, not the part
            send(num_open)
        num_accepted += num_open
    assert num_accepted in (5, 6)  # a bucket with a few tokens left admits one more prompt


def test_an_hour_admits_the_limit_and_at_most_one_burst_more():
    limited = LimitedAccounts()
    num_accepted = sum(
        limited.request(s / 10, requests_per_minute=30) is None for s in range(36_000)
    )
    assert 30 * 60 <= num_accepted <= 30 * 60 + 30


def test_a_prompt_larger_than_the_limit_runs_and_the_next_one_waits():
    limited = LimitedAccounts()
    assert limited.request(0.0, tokens=600, tokens_per_minute=100) is None
    assert limited.request(0.0, tokens_per_minute=100) == 301.0  # 501 tokens at 100 a minute
    assert limited.request(300.0, tokens_per_minute=100) == 1.0
    assert limited.request(301.0, tokens_per_minute=100) is None


def test_a_new_limit_holds_from_the_next_request_on():
    limited = LimitedAccounts()
    assert limited.request(0.0, requests_per_minute=1) is None
    assert limited.request(0.0, requests_per_minute=1) is not None
    assert limited.request(0.0, requests_per_minute=2) is None
    assert limited.request(0.0) is None, "no limit"


def test_accounts_with_full_buckets_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accounts, "MAX_ACCOUNTS", 10)
    kept = Accounts()
    for place in range(100):
        kept.now = place * 70.0
        account = Account(name=str(place), requests_per_minute=5)
        kept.check(account, 0, is_first=True)
        kept.charge_request(account, 1, is_first=True)
    assert len(kept) <= 11


LIMITED_ALICE = Account(name="alice", concurrency=2)


def error_code(reply: int | Refused) -> str | None:
    return reply.error.code if isinstance(reply, Refused) else None


def test_all_clients_of_the_engine_share_an_accounts_concurrency():
    bench = Bench()
    first = bench.add([1, 2, 3], client=b"one", account=LIMITED_ALICE, max_tokens=4)
    bench.add([1, 2, 3], client=b"two", account=LIMITED_ALICE, max_tokens=4)
    refused = bench.refusal([1, 2, 3], client=b"two", account=LIMITED_ALICE)
    assert error_code(refused) == "rate_limit_exceeded"
    assert refused.error.message.startswith("concurrency: this key already has 2 answers")
    bench.add([1, 2, 3], account=Account(name="bob", concurrency=1))
    bench.abort(first, client=b"one")
    bench.add([1, 2, 3], client=b"two", account=LIMITED_ALICE)


def test_a_request_with_a_refused_grammar_frees_its_concurrency():
    bench = Bench()
    one = Account(name="alice", concurrency=1)
    waiting = bench.add([1, 2], account=one, grammar=Lark(text="start: ("))
    assert error_code(bench.try_add([1, 2], account=one)) == "rate_limit_exceeded"
    assert isinstance(bench.compile()[waiting], Refused)
    bench.add([1, 2], account=one)


def test_generated_tokens_are_charged():
    bench = Bench()
    account = Account(name="alice", tokens_per_minute=12)
    bench.add([1, 2, 3], account=account, max_tokens=20, ignore_eos=True)
    bench.add([1, 2, 3], account=account, max_tokens=20, ignore_eos=True)
    bench.run()
    refused = bench.refusal([1, 2, 3], account=account)
    assert refused.error.message.startswith("tokens_per_minute: this key has used up its 12 ")
    assert refused.error.retry_after_s == 175.0  # 46 of 12 were used: 35 must be refilled
    bench.tick(175.0)
    bench.add([1, 2, 3], account=account)


def test_an_answer_of_many_choices_is_one_request():
    bench = Bench()
    account = Account(name="alice", requests_per_minute=2)
    for _ in range(2):
        for place in range(3):
            bench.add([1, 2], account=account, is_first=place == 0)
    assert error_code(bench.try_add([1, 2], account=account)) == "rate_limit_exceeded"


def test_a_keys_max_len_bounds_its_requests():
    bench = Bench(max_len=200)
    short = Account(name="alice", max_len=8)
    too_long = bench.refusal(list(range(1, 10)), account=short)
    assert (too_long.error.code, too_long.error.param) == ("context_length_exceeded", "prompt")
    assert (
        "length is 8 tokens with this key. However, your prompt is too long: 9"
        in too_long.error.message
    )
    number = bench.add([1, 2, 3], account=short)
    bench.run()
    assert len(bench.tokens(number)) == 5


# ---- cached refusals
ALICE, BOB = Account(name="alice"), Account(name="bob")
FULL = Overloaded("full", retry_after_s=3, stands_s=0.2)
MOST = QueueLoad(requests=100, tokens=6400)


def refusal_of(num_tokens: int, waiting: QueueLoad, *, rate: float = 1000.0) -> Overloaded:
    with pytest.raises(Overloaded) as refused:
        check_load(num_tokens, waiting, own=waiting, max_load=MOST, num_accounts=1, rate=rate)
    return refused.value


def test_a_cached_refusal_holds_for_its_account_and_its_time() -> None:
    cache = RefusalCache()
    cache.add(ALICE, FULL, now=10.0)
    found = cache.get(ALICE, now=10.19)
    assert isinstance(found, Overloaded)
    assert found.info() == FULL.info()
    assert found is not FULL
    assert (
        cache.get(ALICE, now=10.1) is not found
    )  # a new object: raising an error adds a traceback to it
    assert cache.get(BOB, now=10.1) is None
    assert cache.get(None, now=10.1) is None
    assert cache.get(ALICE, now=10.2) is None


def test_requests_without_an_account_share_a_cached_refusal() -> None:
    cache = RefusalCache()
    cache.add(None, FULL, now=0.0)
    assert cache.get(None, now=0.1) is not None


@pytest.mark.parametrize("refusal", [Overloaded("full"), ContextTooLong("too long")])
def test_a_refusal_that_depends_on_the_request_is_not_cached(refusal: ServingError) -> None:
    cache = RefusalCache()
    cache.add(ALICE, refusal, now=0.0)
    assert cache.get(ALICE, now=0.0) is None


def test_the_refusal_cache_is_bounded() -> None:
    cache = RefusalCache()
    for place in range(3 * MAX_ENTRIES):
        cache.add(Account(name=f"a{place}"), FULL, now=float(place))
    assert len(cache) <= MAX_ENTRIES
    assert cache.get(Account(name=f"a{place}"), now=place + 0.1) is not None


def test_a_refusal_from_a_queue_full_of_requests_is_cacheable() -> None:
    assert refusal_of(8, QueueLoad(100, 3000)).stands_s > 0


def test_a_refusal_from_a_queue_full_of_tokens_is_cacheable_if_no_small_prompt_fits() -> None:
    assert refusal_of(1000, QueueLoad(50, 6000)).stands_s == 0
    assert refusal_of(1000, QueueLoad(50, 6399)).stands_s > 0
    assert refusal_of(1, QueueLoad(50, 6400)).stands_s > 0


def test_a_refusal_holds_while_a_twentieth_of_the_queue_leaves() -> None:
    assert repeat_s(2000, 1000.0) == 0.1  # the queue takes 2 s; a twentieth of that
    assert repeat_s(10**6, 1000.0) == MAX_REPEAT_S
    assert repeat_s(2000, 0.0) == 0  # unknown


def test_a_rate_limit_refusal_holds_until_the_bucket_has_one_request() -> None:
    bench = Bench()
    for per_minute, stands_s in ((60, MAX_REPEAT_S), (600, 0.1)):
        account = Account(name=f"{per_minute}", requests_per_minute=per_minute)
        for _ in range(per_minute):
            number = bench.add([1], account=account)
            bench.abort(number)
        refused = bench.refusal([1], account=account)
        assert refused.error.code == "rate_limit_exceeded"
        assert refused.error.stands_s == pytest.approx(stands_s)


# ---- throughput
def test_a_rate_looks_back_about_ten_seconds() -> None:
    rate = Rate()
    for per_s in (100, 1000):
        for _ in range(300):
            rate.observe(per_s // 10, 0.1)
    assert rate.per_s == pytest.approx(1000, rel=0.06)
    rate.observe(1, 0.0)
    assert rate.seconds == pytest.approx(60)


def test_decode_steps_do_not_change_the_prefill_rate() -> None:
    speed = Throughput()
    assert not speed.is_long_step(1 << 20)  # unknown
    speed.observe(1, 0.02, has_prompts=False)
    assert not speed.is_long_step(1 << 20)
    speed.observe(256, 0.2, has_prompts=True)
    fits = int(256 / 0.2 * LONG_STEP_S)
    assert [speed.is_long_step(tokens) for tokens in (0, fits, fits + 1)] == [False, False, True]
    assert speed.busy_s == pytest.approx(0.22)
