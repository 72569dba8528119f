"""Parsing takes time that is linear in the text, even for hostile texts."""

from __future__ import annotations

import pytest

from tests.property.test_tools_json import NAMES, SAMPLES
from tests.support.cpu_time import check_linear
from tests.support.formats import PLAIN, Call, Sample, check_cost, seconds

PARTS = 12


def adversarial(sample: Sample, size: int) -> str:
    """Return a text of partial markers, markers in wrong order, blanks, unfinished calls, escapes
    and open brackets.
    """
    markers = "".join(sample.format.markers()) or "<"
    call = sample.write([Call("f", {"a": 1})], 0)
    head = call[: call.index('{"a"')]
    repeated = [
        call + " \n",
        "".join(marker[:-1] for marker in sample.format.markers()) or "<",
        " \n",
        "<[{",
        call[: len(call) // 2],
    ]
    opened = [markers, '\\"', "[", '{"a":', '"a",', "1"]
    texts = [many(part, size) for part in repeated]
    return "".join(texts + [head + '{"a": "' + many(part, size) for part in opened])


def many(part: str, size: int) -> str:
    """Return `part`, repeated until it fills its share of the text. The number of repetitions is
    even, so that quotes are paired alike for every size.
    """
    return part * (size // PARTS // len(part) // 2 * 2)


EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)


@EVERY
def test_a_hostile_text_costs_a_bounded_multiple_of_a_plain_one(sample: Sample) -> None:
    check_cost(sample, [adversarial(sample, len(PLAIN))])


@EVERY
def test_the_time_grows_with_the_text_and_no_faster(sample: Sample) -> None:
    check_linear(lambda size: seconds(sample, adversarial(sample, size), step=16), 50_000)
