"""DRY equals a plain reference that compares token by token."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.engine.sampling import DryBreaker, SamplingParams
from tests.support.distributions import dry_costs
from tests.support.sampled_rows import RowRequest, bind_rows
from worker.sampling.dry import LARGEST_EXPONENT, Breakers, DryRows, penalise_repeats
from worker.sampling.logits import process_logits

VOCAB = 97


def costs(requests: list[RowRequest]) -> list[dict[int, float]]:
    """Return token -> what the worker subtracts from its logit, for each request."""
    slots, sampled = bind_rows(requests)
    processed = process_logits(torch.zeros(len(requests), VOCAB), slots, sampled)
    return [{token: -cost for token, cost in enumerate(row) if cost} for row in processed.tolist()]


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        dry_multiplier=rng.choice([0.8, 0.0, 2.5]),
        dry_base=rng.choice([1.75, 1.0, 1.1, 3.0]),
        dry_allowed_length=rng.choice([0, 1, 2, 5]),
        dry_penalty_last_n=rng.choice([-1, 0, 1, 4, 17]),
        dry_breakers=[
            DryBreaker(
                heads=rng.sample(range(8), rng.randrange(4)),
                tail=[rng.randrange(4) for _ in range(rng.choice([0, 0, 1, 2, 4]))],
            )
            for _ in range(rng.randrange(4))
        ],
    )


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_every_row_of_a_mixed_batch_is_penalised_as_in_the_reference(seed):
    rng = random.Random(seed)
    requests = [
        RowRequest(
            params_of(rng),
            tokens=[rng.randrange(rng.choice([2, 4, 8])) for _ in range(rng.randrange(1, 48))],
        )
        for _ in range(9)
    ]
    for request, found in zip(requests, costs(requests), strict=True):
        expected = dry_costs(request.tokens, request.params)
        assert found == pytest.approx(expected, rel=1e-5), request


def test_the_penalty_grows_with_the_repeat_and_ends_at_a_breaker():
    tokens = [5, 6, 7, 8, 9, 5, 6, 7]
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0)
    broken = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_breakers=[DryBreaker([6])])
    found = costs([RowRequest(params, tokens), RowRequest(broken, tokens)])
    assert found == [{8: 2.0}, {}]


def test_a_long_repeat_has_a_finite_penalty():
    params = SamplingParams(dry_multiplier=1.0, dry_base=30.0)
    (found,) = costs([RowRequest(params, [4] * 47)])
    assert found.keys() == {4}
    assert 1e35 < found[4] < float("inf")


def test_a_very_long_repeat_costs_no_more_than_the_longest_that_counts():
    for base, allowed in ((1.01, 3), (1.0001, 0), (1.0, 2)):
        params = SamplingParams(dry_multiplier=1.0, dry_base=base, dry_allowed_length=allowed)
        logits, none = torch.zeros(1, VOCAB), torch.zeros(1, 0, dtype=torch.int64)
        numbers = DryRows(torch.ones(1), torch.tensor([base]), torch.tensor([allowed]))
        latest = torch.full((1, 700), 4)
        penalise_repeats(logits, latest, Breakers(none, none, none, none, 0), numbers)
        assert -logits[0, 4] == pytest.approx(dry_costs([4] * 700, params)[4], rel=1e-4)
        assert -logits[0, 4] == pytest.approx(base**LARGEST_EXPONENT, rel=1e-4)


@pytest.mark.parametrize("most", [1, 60])
def test_breakers_are_found_in_parts_as_at_once(most: int, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(most)
    requests = [
        RowRequest(params_of(rng), tokens=[rng.randrange(4) for _ in range(40)]) for _ in range(9)
    ]
    at_once = costs(requests)
    monkeypatch.setattr("worker.sampling.dry.ITEMS_AT_ONCE", most)
    assert costs(requests) == at_once


def test_samplers_that_do_not_list_dry_switch_it_off():
    params = SamplingParams(dry_multiplier=1.0, samplers=["penalties", "temperature"])
    assert costs([RowRequest(params, [4] * 20)]) == [{}]
