"""Prompt lookup by an index that grows, against a search of the whole past."""

from __future__ import annotations

import random
from array import array
from itertools import islice

import pytest

from engine_core.speculation.ngram import CATCH_UP, MAX_CANDIDATES, NgramDrafter


def searched(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The slow twin: looks at every place, the latest first."""
    known = len(tokens)

    def shared(place: int) -> int:
        pairs = zip(reversed(tokens[:place]), reversed(tokens), strict=False)
        return next((i for i, (a, b) in enumerate(islice(pairs, longest)) if a != b), longest)

    places = (p for p in range(known - 1, shortest - 1, -1) if _ends_alike(tokens, p, shortest))
    candidates = list(islice(places, MAX_CANDIDATES))
    if not candidates:
        return []
    place = max(candidates, key=lambda p: (min(shared(p), p), p))
    guess = list(tokens)
    for i in range(most):
        guess.append(guess[place + i])
    return guess[known:]


def _ends_alike(tokens: list[int], place: int, shortest: int) -> bool:
    return tokens[place - shortest : place] == tokens[len(tokens) - shortest :]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3), (3, 8)])
@pytest.mark.parametrize("seed", range(5))
def test_the_index_finds_what_a_search_finds(shortest: int, longest: int, seed: int) -> None:
    rng = random.Random(seed)
    drafter, tokens = NgramDrafter(shortest, longest), array("i")
    found = 0
    for _ in range(200):
        tokens.extend(rng.randrange(3) for _ in range(rng.choice([1, 1, 1, 4])))
        guess = drafter.propose(tokens, 6)
        assert guess == searched(tokens.tolist(), shortest, longest, 6)
        found += bool(guess)
    assert found > 100


def test_a_guess_that_reaches_the_end_goes_on_with_itself() -> None:
    assert NgramDrafter(2, 4).propose(array("i", [9, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]


def test_what_never_was_before_is_not_guessed() -> None:
    drafter = NgramDrafter(2, 4)
    assert drafter.propose(array("i", [1]), 4) == []
    assert drafter.propose(array("i", [1, 2, 3, 4]), 4) == []


def test_a_long_prompt_is_taken_in_over_several_calls_and_nothing_is_guessed_before() -> None:
    tokens = array("i", range(50)) + array("i", range(CATCH_UP * 2)) + array("i", range(20, 30))
    drafter = NgramDrafter(3, 5)
    guesses = [drafter.propose(tokens, 2) for _ in range(4)]
    assert guesses == [[], [], [30, 31], [30, 31]]
