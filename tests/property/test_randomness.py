"""u = hash(seed, position, draw): the same everywhere, uniform, unrelated between neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.sampling.randomness import GAMMA, MASK, MIX_1, MIX_2, hash_words, uniform

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
MANY = 200_000


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def twin(seed: int, position: int, draw: int) -> int:
    """The same hash in unbounded integers."""
    state = mix((seed + GAMMA) & MASK)
    state = mix(((state ^ position) + GAMMA) & MASK)
    return mix(((state ^ draw) + GAMMA) & MASK)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(seed=INT64, position=st.integers(0, 1 << 40), draw=st.integers(0, 1 << 20))
@settings(max_examples=300, deadline=None)
def test_the_tensor_hash_equals_its_twin_in_plain_integers(seed, position, draw):
    expected = twin(seed & MASK, position, draw)
    assert int(hash_words(ints(seed), ints(position), draw).item()) & MASK == expected
    assert uniform(ints(seed), ints(position), draw).item() == (expected >> 11) / (1 << 53)


def test_a_row_draws_the_same_number_alone_and_among_others():
    seeds, positions = torch.arange(-500, 500) * 977, torch.arange(1000) % 37
    together = uniform(seeds, positions)
    alone = torch.cat([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in range(1000)])
    assert torch.equal(together, alone)


def along(axis: str) -> torch.Tensor:
    """MANY numbers drawn along one axis of the key."""
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
