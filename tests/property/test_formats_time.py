"""No text makes reading slow: time is linear, in the worst of texts."""

from __future__ import annotations

import pytest

from tests.property.test_tools_json import NAMES, SAMPLES
from tests.support.formats import Call, Sample, seconds

MEGABYTE = 1_000_000
PARTS = 12


def adversarial(sample: Sample, size: int) -> str:
    """Half markers, markers in bad order, blanks, calls without end, escapes, depth."""
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
    """Its share of the text; always an even number, so that quotes stand alike for every size."""
    return part * (size // PARTS // len(part) // 2 * 2)


EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)


@EVERY
def test_a_megabyte_is_read_in_a_second(sample: Sample) -> None:
    assert seconds(sample, adversarial(sample, MEGABYTE), step=64) < 1.0


@EVERY
def test_twice_the_text_takes_twice_the_time(sample: Sample) -> None:
    """Doubled twice, with the best of a few tries: other processes only ever add time."""
    small, large = (adversarial(sample, size) for size in (50_000, 200_000))
    ratios = []
    for _ in range(5):
        times = [min(seconds(sample, text, step=16) for _ in range(3)) for text in (small, large)]
        ratios.append(times[1] / times[0])
        if ratios[-1] <= 2.2**2:
            return
    raise AssertionError(f"four times the text took {min(ratios):.2f} times the time")
