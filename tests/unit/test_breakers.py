"""The tokens of DRY's sequence breakers."""

from __future__ import annotations

import pytest

from gateway.text.breakers import find_breakers
from protocol.engine.sampling import DryBreaker
from protocol.wire.errors import InvalidRequest

TOKENS = [b"a", b"b", b"ab", b"xa", b"bab", b"abc", b"", "é".encode(), "é".encode()[:1], b"c"]
IDS = {"a": 0, "b": 1, "c": 9, "é": 7}


def encode(text: str) -> list[int]:
    return [IDS[character] for character in text]


def test_each_token_that_contains_the_text_is_a_breaker():
    assert find_breakers(["b"], TOKENS, encode) == [DryBreaker([1, 2, 4, 5])]
    assert find_breakers(["b", "xa"], TOKENS, encode) == [
        DryBreaker([1, 2, 3, 4, 5]),
    ]


def test_tokens_that_end_with_the_same_beginning_of_the_text_have_one_tail():
    assert find_breakers(["abc"], TOKENS, encode) == [
        DryBreaker([0, 3], [1, 9]),
        DryBreaker([2, 4], [9]),
        DryBreaker([5]),
    ]


def test_a_token_can_begin_several_breakers():
    assert find_breakers(["ab", "ac", "bb"], TOKENS, encode) == [
        DryBreaker([0, 1, 2, 3, 4], [1]),
        DryBreaker([0, 3], [9]),
        DryBreaker([2, 4, 5]),
    ]


def test_a_text_is_not_divided_within_a_character():
    assert find_breakers(["éa"], TOKENS, encode) == [DryBreaker([7], [0])]


def test_too_many_tokens_are_refused():
    with pytest.raises(InvalidRequest, match="16,385 tokens of this model") as refusal:
        find_breakers(["a"], [b"xa"] * 16_385, encode)
    assert refusal.value.param == "dry_sequence_breakers"
