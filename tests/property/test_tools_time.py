"""Parsing takes time that is linear in the text, in formats other than JSON, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.property import (
    test_tools_arg_pairs,
    test_tools_functionary,
    test_tools_gemma,
    test_tools_messages,
    test_tools_nested,
    test_tools_pythonic,
    test_tools_response_template,
    test_tools_xml,
    test_tools_xtml,
)
from tests.support.cpu_time import check_linear
from tests.support.formats import PLAIN, Call, Sample, check_cost, seconds

SAMPLES: list[Sample] = [
    *test_tools_xml.SAMPLES,
    *test_tools_arg_pairs.SAMPLES,
    *test_tools_pythonic.SAMPLES,
    *test_tools_gemma.SAMPLES,
    *test_tools_nested.SAMPLES,
    *test_tools_messages.SAMPLES,
    *test_tools_functionary.SAMPLES,
    test_tools_xtml.K3,
    *test_tools_response_template.SAMPLES,
]
EACH = pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])


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
    found = list(texts(sample))
    for head, part in found:
        yield head + part * (size // len(found) // len(part))


def time_of(sample: Sample, size: int) -> float:
    return sum(seconds(sample, text, step=64) for text in adversarial(sample, size))


@EACH
def test_a_hostile_text_costs_a_bounded_multiple_of_a_plain_one(sample: Sample) -> None:
    check_cost(sample, list(adversarial(sample, len(PLAIN))))


@EACH
def test_the_time_grows_with_the_text_and_no_faster(sample: Sample) -> None:
    check_linear(lambda size: time_of(sample, size), 60_000)
