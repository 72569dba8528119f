"""The tokens of DRY's sequence breakers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from random import Random

import pytest

from gateway.text.breakers import TokenIndex, find_breakers
from protocol.engine.sampling import DryBreaker
from protocol.wire.errors import InvalidRequest

TOKENS = [b"a", b"b", b"ab", b"xa", b"bab", b"abc", b"", "é".encode(), "é".encode()[:1], b"c"]
INDEX = TokenIndex(TOKENS)
IDS = {"a": 0, "b": 1, "c": 9, "é": 7}


def encode(text: str) -> list[int]:
    return [IDS[character] for character in text]


def test_each_token_that_contains_the_text_is_a_breaker():
    assert find_breakers(["b"], INDEX, encode) == [DryBreaker([1, 2, 4, 5])]
    assert find_breakers(["b", "xa"], INDEX, encode) == [
        DryBreaker([1, 2, 3, 4, 5]),
    ]


def test_tokens_that_end_with_the_same_beginning_of_the_text_have_one_tail():
    assert find_breakers(["abc"], INDEX, encode) == [
        DryBreaker([0, 3], [1, 9]),
        DryBreaker([2, 4], [9]),
        DryBreaker([5]),
    ]


def test_a_token_can_begin_several_breakers():
    assert find_breakers(["ab", "ac", "bb"], INDEX, encode) == [
        DryBreaker([0, 1, 2, 3, 4], [1]),
        DryBreaker([0, 3], [9]),
        DryBreaker([2, 4, 5]),
    ]


def test_a_text_is_not_divided_within_a_character():
    assert find_breakers(["éa"], INDEX, encode) == [DryBreaker([7], [0])]


def test_a_token_with_a_byte_that_is_no_text_does_not_join_its_neighbours():
    index = TokenIndex([b"a", b"b", b"\xff", b"\xffb", b"a\xff"])
    assert find_breakers(["ab"], index, encode) == [DryBreaker([0], [1])]
    assert find_breakers(["b"], index, encode) == [DryBreaker([1, 3])]


def test_the_index_finds_the_tokens_that_a_pass_over_all_of_them_finds():
    random = Random(1)
    tokens = [bytes(random.choices(b"ab\xc3\xa9\xff", k=random.randrange(6))) for _ in range(300)]
    index = TokenIndex(tokens)
    for _ in range(100):
        text = "".join(random.choices("abé", k=random.randint(1, 4))).encode()
        assert [*index.containing(text)] == [i for i, each in enumerate(tokens) if text in each]
        ends = {i for i, each in enumerate(tokens) if each.endswith(text)}
        assert set(index.ending_with(text)) == ends


def test_long_texts_do_not_cost_a_pass_over_the_vocabulary():
    index = TokenIndex([b"%d" % number for number in range(20_000)])
    texts = [f"x{place}" * 10 for place in range(10, 26)]
    assert num_calls(lambda: find_breakers(texts, index, lambda _: [1])) < 20_000


def num_calls(work: Callable[[], object]) -> int:
    """Return the number of functions, those in C too, that `work` calls."""
    calls = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    ("texts", "tokens", "rest", "problem"),
    [
        (["a"], [b"xa"] * 16_385, 1, "16,385 tokens of this model"),
        (["x" * 33] * 5, [b"x" * size for size in range(1, 33)], 1, "160 different sequences"),
        (["x" * 40], [b"x" * size for size in range(1, 39)], 31, "1,178 tokens are in the"),
    ],
)
def test_breakers_that_an_engine_does_not_accept_are_refused(
    texts: list[str], tokens: list[bytes], rest: int, problem: str
):
    numbers = count()
    index = TokenIndex(tokens)
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        find_breakers(texts, index, lambda _: [next(numbers)] * rest)
    assert refusal.value.param == "dry_sequence_breakers"
