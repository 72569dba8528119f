"""What an account may have: per minute, at once, and how long."""

from __future__ import annotations

import pytest

from engine_core.policy import accounts
from engine_core.policy.accounts import Accounts
from protocol.errors import LimitReached
from protocol.grammar import Lark
from protocol.messages import Account, Refused
from tests.support.engines import Bench


class Till:
    """Accounts at a time of our choice."""

    def __init__(self) -> None:
        self.accounts = Accounts()

    def ask(self, now: float, tokens: int = 1, **limits: int) -> float | None:
        """None: it was taken in. Else after how many seconds to come back."""
        account = Account(name="alice", **limits)
        self.accounts.now = now
        try:
            self.accounts.check(account, 0, is_first=True)
        except LimitReached as error:
            return error.retry_after_s
        self.accounts.charge_request(account, tokens, is_first=True)
        return None


def test_a_minutes_requests_may_come_at_once_and_then_evenly():
    till = Till()
    assert [till.ask(100.0, requests_per_minute=3) for _ in range(4)] == [None, None, None, 20.0]
    assert till.ask(119.9, requests_per_minute=3) == 1.0
    assert till.ask(120.1, requests_per_minute=3) is None
    assert till.ask(120.1, requests_per_minute=3) is not None
    assert [till.ask(1000.0, requests_per_minute=3) for _ in range(4)][2:] == [None, 20.0]


def test_over_an_hour_no_more_is_taken_in_than_the_limit_and_one_minutes_worth():
    till = Till()
    taken = sum(till.ask(s / 10, requests_per_minute=30) is None for s in range(36_000))
    assert 30 * 60 <= taken <= 30 * 60 + 30


def test_a_prompt_larger_than_the_limit_runs_and_is_paid_for_by_waiting():
    till = Till()
    assert till.ask(0.0, tokens=600, tokens_per_minute=100) is None
    assert till.ask(0.0, tokens_per_minute=100) == 301.0  # 501 tokens at 100 a minute
    assert till.ask(300.0, tokens_per_minute=100) == 1.0
    assert till.ask(301.0, tokens_per_minute=100) is None


def test_a_new_limit_holds_from_the_next_request_on():
    till = Till()
    assert till.ask(0.0, requests_per_minute=1) is None
    assert till.ask(0.0, requests_per_minute=1) is not None
    assert till.ask(0.0, requests_per_minute=2) is None
    assert till.ask(0.0) is None, "no limit"


def test_accounts_that_are_as_good_as_new_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accounts, "MAX_KEPT", 10)
    kept = Accounts()
    for place in range(100):
        kept.now = place * 70.0
        account = Account(name=str(place), requests_per_minute=5)
        kept.check(account, 0, is_first=True)
        kept.charge_request(account, 1, is_first=True)
    assert len(kept) <= 11


ALICE = Account(name="alice", concurrency=2)


def code_of(reply: int | Refused) -> str | None:
    return reply.error.code if isinstance(reply, Refused) else None


def test_all_clients_of_the_engine_share_an_accounts_concurrency():
    bench = Bench()
    first = bench.add([1, 2, 3], client=b"one", account=ALICE, max_tokens=4)
    assert isinstance(first, int)
    assert isinstance(bench.add([1, 2, 3], client=b"two", account=ALICE, max_tokens=4), int)
    refused = bench.add([1, 2, 3], client=b"two", account=ALICE)
    assert code_of(refused) == "rate_limit_exceeded"
    assert isinstance(refused, Refused)
    assert refused.error.message.startswith("concurrency: this key already has 2 answers")
    assert isinstance(bench.add([1, 2, 3], account=Account(name="bob", concurrency=1)), int)
    bench.abort(first, client=b"one")
    assert isinstance(bench.add([1, 2, 3], client=b"two", account=ALICE), int)


def test_a_request_whose_grammar_is_refused_frees_its_place():
    bench = Bench()
    one = Account(name="alice", concurrency=1)
    waiting = bench.add([1, 2], account=one, grammar=Lark(text="start: ("))
    assert code_of(bench.add([1, 2], account=one)) == "rate_limit_exceeded"
    assert isinstance(bench.compile()[waiting], Refused)
    assert isinstance(bench.add([1, 2], account=one), int)


def test_tokens_of_answers_are_paid_for_when_they_are_there():
    bench = Bench()
    account = Account(name="alice", tokens_per_minute=12)
    assert isinstance(bench.add([1, 2, 3], account=account, max_tokens=20, ignore_eos=True), int)
    assert isinstance(bench.add([1, 2, 3], account=account, max_tokens=20, ignore_eos=True), int)
    bench.run()
    refused = bench.add([1, 2, 3], account=account)
    assert isinstance(refused, Refused)
    assert refused.error.message.startswith("tokens_per_minute: this key has used up its 12 ")
    assert refused.error.retry_after_s == 175.0  # 46 were used, 12 were there: 35 until one is
    bench.tick(175.0)
    assert isinstance(bench.add([1, 2, 3], account=account), int)


def test_an_answer_of_many_choices_is_one_request():
    bench = Bench()
    account = Account(name="alice", requests_per_minute=2)
    for _ in range(2):
        for place in range(3):
            assert isinstance(bench.add([1, 2], account=account, is_first=place == 0), int)
    assert code_of(bench.add([1, 2], account=account)) == "rate_limit_exceeded"


def test_a_keys_own_length_is_the_length_of_what_it_asks():
    bench = Bench(max_len=200)
    short = Account(name="alice", max_len=8)
    too_long = bench.add(list(range(1, 10)), account=short)
    assert isinstance(too_long, Refused)
    assert (too_long.error.code, too_long.error.param) == ("context_length_exceeded", "prompt")
    assert "this key takes 8 tokens" in too_long.error.message
    number = bench.add([1, 2, 3], account=short)
    assert isinstance(number, int)
    bench.run()
    assert len(bench.tokens(number)) == 5
