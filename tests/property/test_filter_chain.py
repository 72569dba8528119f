"""The filters of a chain equal a plain reference, and a row never depends on its neighbours."""

from __future__ import annotations

import random

import pytest
import torch

from protocol.engine.sampling import FILTERS, FilterName, PenaltyName, SamplingParams
from tests.support.distributions import filtered_distribution
from tests.support.sampled_rows import RowRequest, bind_rows
from worker.sampling.filter_chain import XTC_DRAW
from worker.sampling.logits import process_logits
from worker.sampling.randomness import uniform
from worker.sampling.sampler import drawn_from, sample

SMALL, LARGE = 61, 1543
LLAMA_CPP: list[PenaltyName | FilterName] = [
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
]
LLAMA_CPP.append("temperature")
PARAMS = [
    SamplingParams(typical_p=0.9),
    SamplingParams(typical_p=0.2, temperature=1.5),
    SamplingParams(typical_p=0.999, temperature=0.5),
    SamplingParams(top_n_sigma=1.0),
    SamplingParams(top_n_sigma=0.3, temperature=2.0),
    SamplingParams(top_n_sigma=2.5, top_k=30),
    SamplingParams(dynatemp_range=0.5),
    SamplingParams(temperature=0.5, dynatemp_range=0.7, dynatemp_exponent=0.4),
    SamplingParams(temperature=1.2, dynatemp_range=0.2, dynatemp_exponent=3.0, top_k=9),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.05),
    SamplingParams(xtc_probability=0.5, xtc_threshold=0.01, temperature=1.7),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.0, min_p=0.2),
    SamplingParams(xtc_probability=1.0, xtc_threshold=0.6),
    SamplingParams(typical_p=0.8, top_n_sigma=2.0, xtc_probability=0.4, xtc_threshold=0.02),
    SamplingParams(samplers=["temperature"], temperature=0.8, top_k=3, min_p=0.9),
    SamplingParams(samplers=[], temperature=0.1, top_k=3),
    SamplingParams(samplers=["min_p", "temperature"], temperature=2.0, min_p=0.1, top_p=0.1),
    SamplingParams(samplers=LLAMA_CPP, temperature=1.8, top_k=40, top_p=0.9),
    SamplingParams(
        samplers=LLAMA_CPP,
        temperature=0.7,
        dynatemp_range=0.6,
        top_k=20,
        min_p=0.02,
        xtc_probability=1.0,
        xtc_threshold=0.1,
    ),
    SamplingParams(
        samplers=["xtc", "typ_p", "top_n_sigma", "top_k"],
        xtc_probability=0.7,
        xtc_threshold=0.03,
        typical_p=0.7,
        top_n_sigma=3.0,
        top_k=25,
    ),
    SamplingParams(temperature=0.0, typical_p=0.5, xtc_probability=1.0),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.8),
]
DRAWING = [params for params in PARAMS if params.temperature > 0]


def logits_of(rows: int, vocab: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def distributions(logits: torch.Tensor, requests: list[RowRequest]) -> torch.Tensor:
    """Return the probabilities [N, V] that each row's token is drawn with."""
    slots, sampled = bind_rows(requests)
    processed = process_logits(logits, slots, sampled)
    return drawn_from(processed, slots, sampled, torch.arange(len(logits))).softmax(-1)


def requests_of(all_params: list[SamplingParams], trial: int = 0) -> list[RowRequest]:
    return [
        RowRequest(params, tokens=[1] * (1 + row % 5), seed=trial * 1000 + row)
        for row, params in enumerate(all_params)
    ]


def xtc_number(request: RowRequest) -> float:
    """Return the random number by which XTC applies to the request's next token."""
    seed, position = torch.tensor([request.seed]), torch.tensor([len(request.tokens)])
    return uniform(seed, position, XTC_DRAW).item()


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_every_row_of_a_mixed_batch_has_the_distribution_of_the_reference(vocab, spread):
    for trial in range(3):
        requests = requests_of(DRAWING, trial)
        logits = logits_of(len(requests), vocab, spread=spread, seed=10 + trial)
        logits[:, 7::11] = float("-inf")
        found = distributions(logits, requests)
        for row, request in enumerate(requests):
            expected = torch.zeros(vocab)
            for token, share in filtered_distribution(
                logits[row].tolist(), request.params, xtc_u=xtc_number(request)
            ).items():
                expected[token] = share
            assert set(found[row].nonzero().flatten().tolist()) == set(
                expected.nonzero().flatten().tolist()
            ), request.params
            torch.testing.assert_close(found[row], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_a_rows_token_is_the_same_in_every_subset_and_order_of_the_batch(vocab):
    requests = requests_of(PARAMS)
    logits = logits_of(len(requests), vocab, spread=1.0, seed=5)

    def outcome(rows: list[int]) -> tuple[list[int], list[list[float]]]:
        slots, sampled = bind_rows([requests[row] for row in rows])
        processed = process_logits(logits[rows], slots, sampled)
        return sample(processed, slots, sampled).tokens.tolist(), processed.tolist()

    tokens, processed = outcome([*range(len(requests))])
    rng = random.Random(vocab)
    groups = [[row] for row in range(len(requests))]
    groups += [rng.sample(range(len(requests)), size) for size in (2, 3, 7, 11, 16)]
    for rows in groups:
        assert outcome(rows) == ([tokens[row] for row in rows], [processed[row] for row in rows])


def test_rows_without_a_chain_keep_their_logits():
    plain = [SamplingParams(top_k=3, top_p=0.9, min_p=0.1), SamplingParams(temperature=0.0)]
    requests = requests_of([plain[0], SamplingParams(typical_p=0.5), plain[1]])
    slots, sampled = bind_rows(requests)
    logits = logits_of(3, SMALL)
    processed = process_logits(logits, slots, sampled)
    assert torch.equal(processed[[0, 2]], logits[[0, 2]])
    assert not torch.equal(processed[1], logits[1])


def test_a_step_without_chains_processes_nothing():
    slots, sampled = bind_rows(requests_of([SamplingParams(top_k=3, top_p=0.9, min_p=0.1)] * 2))
    logits = logits_of(2, SMALL)
    assert process_logits(logits, slots, sampled) is logits


def test_greedy_rows_take_the_most_likely_token_in_spite_of_filters():
    params = SamplingParams(
        temperature=0.0, xtc_probability=1.0, xtc_threshold=0.01, samplers=["xtc", "temperature"]
    )
    slots, sampled = bind_rows([RowRequest(params)])
    logits = logits_of(1, SMALL)
    tokens = sample(process_logits(logits, slots, sampled), slots, sampled).tokens
    assert tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), None])
def test_a_row_that_is_not_finite_is_reported_and_changes_no_other(name, poison):
    """Without poison, all tokens of the row are banned."""
    params = SamplingParams(
        samplers=[name],
        temperature=0.5,
        top_k=4,
        top_p=0.8,
        min_p=0.1,
        typical_p=0.8,
        top_n_sigma=1.0,
        xtc_probability=1.0,
        xtc_threshold=0.01,
    )
    requests = requests_of([params] * 3)
    logits = logits_of(3, SMALL)

    def choice_of() -> tuple[list[int], list[bool]]:
        slots, sampled = bind_rows(requests)
        choice = sample(process_logits(logits, slots, sampled), slots, sampled)
        return choice.tokens.tolist(), choice.finite.tolist()

    clean, _ = choice_of()
    if poison is None:
        logits[1] = float("-inf")
    else:
        logits[1, 5] = poison
    assert choice_of() == ([clean[0], 0, clean[2]], [True, False, True])


def test_xtc_applies_to_its_share_of_positions_and_always_to_the_same():
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.1)
    requests = [RowRequest(params, tokens=[1] * (1 + n % 30), seed=n // 30) for n in range(900)]
    logits = torch.zeros(900, SMALL)
    logits[:, 3], logits[:, 4] = 5.0, 4.9
    removed = distributions(logits, requests)[:, 3] == 0
    assert 0.25 < removed.float().mean().item() < 0.35
    assert torch.equal(removed, distributions(logits, requests)[:, 3] == 0)
    assert removed.tolist() == [xtc_number(request) <= 0.3 for request in requests]


def test_dynamic_temperature_of_one_token_and_of_equal_tokens():
    params = SamplingParams(temperature=1.0, dynatemp_range=1.0, samplers=["top_k", "temperature"])
    one = SamplingParams(
        temperature=1.0, dynatemp_range=1.0, samplers=["top_k", "temperature"], top_k=1
    )
    logits = logits_of(2, SMALL)
    logits[0] = 2.5
    found = distributions(logits, requests_of([params, one]))
    torch.testing.assert_close(found[0], torch.full((SMALL,), 1 / SMALL))
    assert found[1].max().item() == 1.0
