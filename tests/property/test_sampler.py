"""Sampling equals a plain reference for each row, and never depends on a row's neighbours."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.engine.sampling import SamplingParams
from tests.support.distributions import filtered_distribution
from tests.support.sampled_rows import RowRequest, bind_rows
from worker.sampling.exact_probs import relative, weigh
from worker.sampling.randomness import GAMMA, MASK, MIX_1, MIX_2, hash_words, uniform
from worker.sampling.sampler import Draws, bound_by_digits, bound_by_order, draw, keep_from, sample

SMALL, LARGE = 61, 1543
GREEDY = SamplingParams(temperature=0.0)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1e-3),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=2.0, top_k=600),
    SamplingParams(temperature=1.0, top_k=10_000_000),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.99),
    SamplingParams(temperature=0.8, top_p=1e-6),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=700, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=1.5, top_p=0.7, min_p=0.2),
]


def logits_of(rows: int, vocab: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def reference(logits: list[float], params: SamplingParams, u: float) -> int:
    """Return the token whose interval of the cumulative distribution, in vocabulary order, contains
    u."""
    if params.temperature == 0:
        return logits.index(max(logits))
    so_far = 0.0
    for token, share in filtered_distribution(logits, params).items():
        so_far += share
        if u < so_far:
            return token
    return token


def tokens_of(logits: torch.Tensor, requests: list[RowRequest]) -> list[int]:
    choice = sample(logits, *bind_rows(requests))
    assert choice.finite.all()
    return choice.tokens.tolist()


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_every_row_of_a_mixed_batch_gets_the_token_of_the_reference(vocab, spread):
    for trial in range(2):
        requests = [
            RowRequest(params, tokens=[1] * (1 + row % 5), seed=trial * 1000 + row)
            for row, params in enumerate(PARAMS)
        ]
        logits = logits_of(len(requests), vocab, spread=spread, seed=trial)
        known = torch.tensor([len(request.tokens) for request in requests])
        draws = uniform(torch.tensor([request.seed for request in requests]), known).tolist()
        expected = [
            reference(row, request.params, u)
            for row, request, u in zip(logits.tolist(), requests, draws, strict=True)
        ]
        assert tokens_of(logits, requests) == expected


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("params", [p for p in PARAMS if p.temperature > 0])
def test_the_filters_keep_exactly_the_tokens_of_the_reference(params, spread, vocab):
    logits = logits_of(5, vocab, spread=spread, seed=3)
    shares = relative(logits, logits.amax(-1), torch.full((5,), params.temperature))
    bound = keep_from(shares, draws_of([params] * 5))
    mask = torch.ones_like(shares, dtype=torch.bool) if bound is None else shares >= bound[:, None]
    for row, keeps in zip(logits.tolist(), mask, strict=True):
        assert set(keeps.nonzero().flatten().tolist()) == set(filtered_distribution(row, params))


def draws_of(params: list[SamplingParams]) -> Draws:
    """Return the parameters as the sampler reads them from slots, which store top_p and min_p in
    float32."""
    top_k = torch.tensor([p.top_k for p in params], dtype=torch.int32)
    top_p, min_p, temperature = (
        torch.tensor([getattr(p, name) for p in params], dtype=torch.float32)
        for name in ("top_p", "min_p", "temperature")
    )
    u = torch.zeros(len(params), dtype=torch.float64)
    return Draws(temperature, top_k, top_p, min_p, u, top_k, top_p, min_p)


@pytest.mark.parametrize("vocab", [SMALL, 64, LARGE])
def test_a_rows_token_is_the_same_in_every_subset_and_order_of_the_batch(vocab):
    requests = [RowRequest(params, seed=row) for row, params in enumerate(PARAMS)]
    logits = logits_of(len(requests), vocab, spread=1.0, seed=5)
    together = tokens_of(logits, requests)
    rng = random.Random(vocab)
    groups = [[row] for row in range(len(requests))]
    groups += [rng.sample(range(len(requests)), size) for size in (2, 3, 7, 11, 16)]
    for rows in groups:
        alone = tokens_of(logits[rows], [requests[row] for row in rows])
        assert alone == [together[row] for row in rows]


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_a_rows_filter_has_the_same_bits_in_every_subset_of_the_batch(vocab):
    params = [p for p in PARAMS if p.temperature > 0]
    logits = logits_of(len(params), vocab, spread=1.0, seed=6)
    temperature = torch.tensor([p.temperature for p in params])
    shares = relative(logits, logits.amax(-1), temperature)
    together = keep_from(shares, draws_of(params))
    assert together is not None
    for row, one in enumerate(params):
        alone = relative(logits[row : row + 1], logits[row : row + 1].amax(-1), temperature[[row]])
        assert torch.equal(alone[0], shares[row])
        bound = keep_from(alone, draws_of([one]))
        assert (0.0 if bound is None else bound.item()) == together[row].item()


def test_equally_likely_tokens_at_the_cut_are_all_kept():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    shares = relative(logits, logits.amax(-1), torch.ones(1))
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        bound = keep_from(shares, draws_of([params]))
        assert bound is not None
        assert (shares >= bound[:, None]).tolist() == [[True, False, True, True, True, False]]


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.zeros(1, 40_000)
    logits[0, [39_999, 777, 20_000]] = 5.0
    assert tokens_of(logits, [RowRequest(GREEDY)]) == [777]
    assert tokens_of(logits.repeat(3, 1), [RowRequest(GREEDY)] * 3) == [777] * 3


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, top_k=2, top_p=0.9)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_with_non_finite_logits_is_reported_and_changes_no_other(params, poison):
    logits = logits_of(3, SMALL)
    clean = tokens_of(logits, [RowRequest(params)] * 3)
    logits[1, 5] = poison
    choice = sample(logits, *bind_rows([RowRequest(params)] * 3))
    assert choice.finite.tolist() == [True, False, True]
    assert choice.tokens.tolist() == [clean[0], 0, clean[2]]


def test_a_row_without_a_possible_token_is_reported():
    logits = torch.full((2, SMALL), float("-inf"))
    choice = sample(
        logits, *bind_rows([RowRequest(GREEDY), RowRequest(SamplingParams(temperature=1.0))])
    )
    assert choice.finite.tolist() == [False, False]


def test_an_impossible_token_is_never_drawn():
    logits = torch.zeros(500, SMALL)
    logits[:, ::2] = float("-inf")
    requests = [RowRequest(SamplingParams(temperature=2.0), seed=seed) for seed in range(500)]
    assert {token % 2 for token in tokens_of(logits, requests)} == {1}


def test_a_seed_repeats_its_draws_and_each_position_draws_anew():
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(30, LARGE)
    requests = [RowRequest(params, tokens=[1] * (1 + row), seed=9) for row in range(30)]
    first = tokens_of(logits, requests)
    assert first == tokens_of(logits, requests)
    assert len(set(first)) > 25


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.4, top_k=9),
        SamplingParams(temperature=1.2, top_p=0.8),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.1),
    ],
)
def test_sampled_tokens_follow_the_filtered_softmax(params):
    """Chi-square over 10,000 draws with consecutive seeds. Cells that expect fewer than 5 draws are
    joined."""
    draws = 10_000
    logits = logits_of(1, 37, spread=1.5, seed=8)
    shares = filtered_distribution(logits[0].tolist(), params)
    counts = torch.bincount(drawn(logits, params, draws), minlength=37)
    assert set(counts.nonzero().flatten().tolist()) <= set(shares)
    cells = sorted((share * draws, int(counts[token])) for token, share in shares.items())
    while len(cells) > 1 and cells[0][0] < 5:
        joined = (cells[0][0] + cells[1][0], cells[0][1] + cells[1][1])
        cells = sorted([joined, *cells[2:]])
    chi_square = sum((seen - expected) ** 2 / expected for expected, seen in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the 99.9 % point
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


def drawn(logits: torch.Tensor, params: SamplingParams, draws: int) -> torch.Tensor:
    """Return `draws` tokens drawn from one row of logits, with the seeds 0, 1, 2, ..."""
    seeds = torch.arange(draws)
    settings = replace(draws_of([params] * draws), u=uniform(seeds, torch.ones_like(seeds)))
    return draw(logits.expand(draws, -1), logits.amax(-1).expand(draws), settings)


@pytest.mark.parametrize("vocab", [1, SMALL, LARGE])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.5, 3.0, 40.0])
def test_a_bound_is_found_by_digits_as_by_order(vocab: int, spread: float) -> None:
    """The rows have equal shares, nearly equal shares, or shares most of which have no weight."""
    logits = logits_of(9, vocab, spread=spread, seed=vocab)
    shares = relative(logits, logits.amax(-1)).masked_fill_(logits < -2 * spread, 0)
    weights = weigh(shares, vocab)
    mass = weights.sum(-1)
    for part in (0.0, 1e-9, 0.3, 0.9, 0.999999, 1.0):
        target = (mass.double() * part).to(torch.int64).clamp_(min=1).minimum(mass)
        by_digits = bound_by_digits(shares, weights, target)
        assert torch.equal(by_digits, bound_by_order(shares, weights, target))


def test_a_non_finite_row_does_not_change_the_bounds_of_others() -> None:
    logits = logits_of(3, LARGE)
    shares = relative(logits, logits.amax(-1))
    target = weigh(shares, LARGE).sum(-1) // 2
    expected = bound_by_digits(shares, weigh(shares, LARGE), target)
    for odd in (float("nan"), -float("nan"), float("inf")):
        shares[1] = odd
        found = bound_by_digits(shares, weigh(shares, LARGE), target)
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


# ---- u = hash(seed, position, draw)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
MANY = 200_000


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def reference_hash(seed: int, position: int, draw: int) -> int:
    """Return the hash that `hash_words` computes, but with Python's unbounded integers."""
    state = mix((seed + GAMMA) & MASK)
    state = mix(((state ^ position) + GAMMA) & MASK)
    return mix(((state ^ draw) + GAMMA) & MASK)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(seed=INT64, position=st.integers(0, 1 << 40), draw=st.integers(0, 1 << 20))
@settings(max_examples=300, deadline=None)
def test_the_tensor_hash_equals_its_reference_in_plain_integers(seed, position, draw):
    expected = reference_hash(seed & MASK, position, draw)
    assert int(hash_words(ints(seed), ints(position), draw).item()) & MASK == expected
    assert uniform(ints(seed), ints(position), draw).item() == (expected >> 11) / (1 << 53)


def test_a_row_draws_the_same_number_alone_and_among_others():
    seeds, positions = torch.arange(-500, 500) * 977, torch.arange(1000) % 37
    together = uniform(seeds, positions)
    alone = torch.cat([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in range(1000)])
    assert torch.equal(together, alone)


def along(axis: str) -> torch.Tensor:
    """Return many random numbers, whose keys differ along one axis."""
    steps = torch.arange(MANY)
    still = torch.full((MANY,), 5)
    if axis == "position":
        return uniform(still, steps)
    if axis == "seed":
        return uniform(steps, still)
    if axis == "both":
        return uniform(steps, steps)
    return torch.cat([uniform(still[:1], still[:1], draw) for draw in range(MANY // 100)])


@pytest.mark.parametrize("axis", ["position", "seed", "both", "draw"])
def test_numbers_are_uniform_along_every_axis(axis):
    u = along(axis).sort().values
    assert u[0] >= 0
    assert u[-1] < 1
    n = len(u)
    distance = (u - (torch.arange(n) + 0.5) / n).abs().max().item() + 0.5 / n
    assert distance * math.sqrt(n) < 1.95  # Kolmogorov-Smirnov, p about 0.001


@pytest.mark.parametrize("axis", ["position", "seed", "both"])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_independent(axis, lag):
    """Chi-square over a 16 x 16 grid of pairs (u[i], u[i + lag])."""
    cells = (along(axis) * 16).long()
    pairs = cells[:-lag] * 16 + cells[lag:]
    counts = torch.bincount(pairs, minlength=256).double()
    expected = len(pairs) / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 330.5  # 255 degrees of freedom, p about 0.001


def test_every_bit_of_the_hash_depends_on_every_bit_of_the_key():
    """Flip one bit of seed or position: each output bit changes in about half of 400 cases."""
    seeds, positions = torch.arange(400) * 7919, torch.arange(400)
    base = hash_words(seeds, positions)
    for bit in range(64):
        flip = 1 << bit if bit < 63 else -(1 << 63)
        for flipped in (hash_words(seeds ^ flip, positions), hash_words(seeds, positions ^ flip)):
            changed = base ^ flipped
            rates = torch.stack([(changed >> k & 1).double().mean() for k in range(64)])
            assert (rates - 0.5).abs().max().item() < 0.13
