"""Cuts of an answer into deltas. The events of an answer must not depend on its cut.

A test parses the answer uncut, unit by unit, in a few long parts so that every place is cut once,
in short runs of equal length after a first run of each length up to theirs, and in random cuts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tests.support.examples import examples

NUM_RANDOM = examples(4, 200)
"""Number of random cuts of one answer."""
RUNS = examples((2, 5), (2, 3, 5))
"""Lengths of the deltas in a cut into runs, in units."""
NUM_PARTS = examples(9, 2)
"""Most long parts into which an answer is cut. The time for all answers grows with the square of
their length, and is nearly halved by each doubling of this number."""
MIN_PART = examples(12, 20)
"""Shortest of these parts, in units, except the first and the last."""
LONGEST = (5, 20, 60, 200)
"""Maximum lengths of a delta in a random cut. Each cut draws one of them."""

IN_WORDS = examples(3, 1)
"""`chosen_places` has one of this many places between two letters or digits."""

_Unit = TypeVar("_Unit")


def all_cuts(units: Sequence[_Unit], seed: int) -> Iterator[list[Sequence[_Unit]]]:
    """Yield the cuts of `units` that the module describes, each as a list of deltas.

    Random cuts into one or two parts are left out, because those have been yielded before.
    """
    yield [units]
    yield [units[at : at + 1] for at in range(len(units))]
    length = max(-(-len(units) // (NUM_PARTS - 1)), MIN_PART)
    for first in range(1, min(length + 1, len(units))):
        yield in_runs(units, first, length)
    for length in RUNS:
        for first in range(1, length + 1):
            yield in_runs(units, first, length)
    rng = random.Random(seed)
    for _ in range(NUM_RANDOM):
        deltas = at_random(units, rng)
        if len(deltas) > 2:
            yield deltas


def in_runs(units: Sequence[_Unit], first: int, length: int) -> list[Sequence[_Unit]]:
    """Return deltas of `length` units, except that the first delta has `first` units."""
    starts = range(first, len(units), length)
    return [units[:first], *(units[start : start + length] for start in starts)]


def at_random(units: Sequence[_Unit], rng: random.Random) -> list[Sequence[_Unit]]:
    """Return deltas of random lengths."""
    most = rng.choice(LONGEST)
    deltas, start = [], 0
    while start < len(units):
        end = start + rng.randint(1, most)
        deltas.append(units[start:end])
        start = end
    return deltas


def chosen_places(units: Sequence[object]) -> list[int]:
    """Return places between units: all beside signs and markers, and one of IN_WORDS others."""
    in_word = [isinstance(unit, str) and unit.isalnum() for unit in units]
    return [
        place
        for place in range(1, len(units))
        if not (in_word[place - 1] and in_word[place]) or place % IN_WORDS == 0
    ]
