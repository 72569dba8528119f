"""For every tool format: what any scraps of calls mean does not depend on how they are cut."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from tests.property.test_tools_leftovers import SAMPLES
from tests.support.cuts import at_random
from tests.support.examples import examples
from tests.support.format_tools import TYPED_TOOLS
from tests.support.formats import Call, Fixture, Sample, difference, lexicon, read, units

NUM_TEXTS = examples(40, 1000)
OTHERS = (*"\"'{}[]()<>:=,;.\\", " ", "\n", "a b", "7", "true", "r'", "''", "\n\n", "語")
"""Pieces that may stand anywhere in an answer."""


def scraps(sample: Sample) -> list[str]:
    """Return the pieces of two calls: markers, words and signs."""
    text = sample.write([Call("run", {"code": "x", "e": "y"}), Call("now")][: sample.max_calls], 0)
    markers = sorted(sample.format.markers(), key=len, reverse=True)
    return re.findall("|".join([*map(re.escape, markers), r"\w+|\s|[^\w\s]+"]), text)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_meaning_of_scraps_of_calls_does_not_depend_on_the_cut(name: str) -> None:
    sample = replace(SAMPLES[name], tools=TYPED_TOOLS)
    rng = random.Random(name)
    pieces = scraps(sample)
    for _ in range(NUM_TEXTS):
        start = rng.randint(0, len(pieces))  # scraps in their order lead into all states
        text = "".join([*pieces[:start], *rng.choices([*pieces, *OTHERS], k=rng.randint(1, 25))])
        case = Fixture("scraps", text, [], complete=rng.random() < 0.8)
        for tokens in (True, False)[: 1 + sample.spelt_ok]:
            words = lexicon(sample, tokens=tokens)
            found = units(text, words)
            case = replace(case, events=read(sample, [found], words, case))
            for deltas in ([[unit] for unit in found], at_random(found, rng)):
                said = read(sample, deltas, words, case)
                assert said == case.events, difference(case, deltas, said)
