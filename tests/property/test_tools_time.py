"""Parsing takes time that is linear in the text, even for hostile texts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.property.test_tools_json import NAMES as JSON
from tests.property.tool_samples import SAMPLES
from tests.support.cpu_time import check_linear
from tests.support.formats import PLAIN, Call, Sample, check_cost, seconds

EACH = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
PARTS = 12


def texts(sample: Sample) -> Iterator[tuple[str, str]]:
    """Yield (head, text that is repeated after it).

    The texts are calls that break off at any place, again and again, and values full of text that
    might end them.
    """
    call = sample.write([Call("run", {"code": "X", "path": "Y"})], 0)
    for tenths in range(1, 10):
        yield "", call[: len(call) * tenths // 10]
    yield "", call + " \n"
    value = call.index("X")
    for filler in ("\\", "'''\\'", '"', "[", "{a:[", "<", "\n ", "1", *sample.tags, *ends(call)):
        yield call[:value], filler
    for filler in (" ", "\n", "a", "a ", "(", "[a"):
        yield call[: call.index("run")], filler


def ends(call: str) -> Iterator[str]:
    """Yield parts of the text after the value."""
    rest = call[call.index("X") + 1 :]
    yield from (rest[:3], rest[: len(rest) // 2], rest[:-1])


def adversarial(sample: Sample, size: int) -> Iterator[str]:
    """Yield all hostile texts, of about the same size. Together they have `size` characters."""
    if sample.name in JSON:
        yield adversarial_json(sample, size)
        return
    found = list(texts(sample))
    for head, part in found:
        yield head + part * (size // len(found) // len(part))


def adversarial_json(sample: Sample, size: int) -> str:
    """Return a text of partial markers, markers in wrong order, blanks, unfinished calls, escapes
    and open brackets."""
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
    parts = [many(part, size) for part in repeated]
    return "".join(parts + [head + '{"a": "' + many(part, size) for part in opened])


def many(part: str, size: int) -> str:
    """Return `part`, repeated until it fills its share of the text. The number of repetitions is
    even, so that quotes are paired alike for every size."""
    return part * (size // PARTS // len(part) // 2 * 2)


def time_of(sample: Sample, size: int) -> float:
    step = 16 if sample.name in JSON else 64
    return sum(seconds(sample, text, step=step) for text in adversarial(sample, size))


@EACH
def test_a_hostile_text_costs_a_bounded_multiple_of_a_plain_one(sample: Sample) -> None:
    check_cost(sample, list(adversarial(sample, len(PLAIN))))


@EACH
def test_the_time_grows_with_the_text_and_no_faster(sample: Sample) -> None:
    check_linear(lambda size: time_of(sample, size), 50_000 if sample.name in JSON else 60_000)
