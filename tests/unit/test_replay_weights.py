"""Results of a worker, compared with those of a journal, and journals that are refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine_core.journal.weights import NotComparable, StepComparison, check_adapters, check_card
from protocol.wire.arrays import Float32, Int32
from protocol.worker.steps import Logprobs, StepResult
from tests.support.echo_adapters import adapter_info
from tests.support.engines import a_card

FIRST = Logprobs(
    rows=Int32.of([0, 2]),
    counts=Int32.of([1, 1]),
    ids=Int32.of([5, 7]),
    logprobs=Float32.of([-0.5, -1.5]),
    ranks=Int32.of([1, 2]),
    top_ids=Int32.of([5, 6], (2, 1)),
    top_logprobs=Float32.of([-0.5, -0.25], (2, 1)),
)
RESULT = StepResult(
    step=4,
    tokens=Int32.of([5, 6, 7]),
    failed=Int32.of([]),
    logprobs=FIRST,
    prompt_logprobs=replace(FIRST, ids=Int32.of([8, 9])),
    compute_s=0.25,
)


def compared(*computed: StepResult) -> StepComparison:
    comparison = StepComparison()
    for result in computed:
        comparison.add(RESULT, result, "record 9, at 1.500 s")
    return comparison


def test_equal_results_are_counted() -> None:
    comparison = compared(RESULT, replace(RESULT, compute_s=0.5))
    assert comparison.is_same
    assert comparison.num_steps == 2
    assert comparison.summary() == ("computed again: 6 of 6 tokens are equal, 8 of 8 logprobs")


def test_the_first_difference_is_named_with_its_step() -> None:
    other = replace(RESULT, tokens=Int32.of([5, 1, 7]))
    comparison = compared(RESULT, other, replace(RESULT, tokens=Int32.of([1, 1])))
    assert not comparison.is_same
    first, second = comparison.summary().splitlines()
    assert first == "computed again: 5 of 9 tokens are equal, 12 of 12 logprobs"
    assert second == (
        "the first difference: record 9, at 1.500 s, step 4: tokens were 5, 6, 7, are 5, 1, 7"
    )


@pytest.mark.parametrize(
    "changed",
    [
        replace(FIRST, logprobs=Float32.of([-0.5, -1.5000001])),
        replace(FIRST, ranks=Int32.of([1, 3])),
        replace(FIRST, top_logprobs=Float32.of([-0.5, -0.2500001], (2, 1))),
        replace(FIRST, asked=Float32.of([0.5, 0.0], (2, 1))),
        replace(FIRST, drawn_at=Int32.of([1]), drawn=Float32.of([0.5, 0.5], (1, 2))),
    ],
)
def test_a_bit_of_a_logprob_is_a_difference(changed: Logprobs) -> None:
    comparison = compared(replace(RESULT, logprobs=changed))
    assert not comparison.is_same
    assert "logprobs differ" in comparison.first_difference
    assert comparison.num_equal_tokens == 3
    assert not compared(replace(RESULT, prompt_logprobs=None)).is_same
    assert not compared(replace(RESULT, failed=Int32.of([2]))).is_same


def test_another_model_or_fingerprint_is_refused() -> None:
    card = a_card(numerics="0f1e2d3c")
    check_card(card, card)
    other = replace(card, numerics="4b5a6978")
    with pytest.raises(NotComparable, match="has fingerprint 0f1e2d3c, this machine 4b5a6978"):
        check_card(card, other)
    plain = replace(card, numerics="")
    with pytest.raises(NotComparable, match="has fingerprint none, this machine none"):
        check_card(plain, plain)
    check_card(card, other, any_fingerprint=True)
    with pytest.raises(NotComparable, match="has changed: its digest was"):
        check_card(card, replace(card, digest="another"), any_fingerprint=True)


def test_other_adapters_are_refused() -> None:
    fr, de = adapter_info("fr"), adapter_info("de")
    check_adapters([fr, de], [fr, de])
    for found in ([fr], [], [fr, replace(de, digest="another")], [de, fr], [fr, de, fr]):
        with pytest.raises(NotComparable, match=r"the LoRA adapter (fr|de) has changed"):
            check_adapters([fr, de], found)
