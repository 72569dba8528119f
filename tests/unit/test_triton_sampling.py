"""Tokens that Triton kernels sample, in Triton's interpreter, equal those that torch samples.

Blocks are small, so that a row has several of them and its last one is not full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protocol.engine.sampling import SamplingParams
from tests.property.test_sampler import GREEDY, PARAMS, draws_of, logits_of
from tests.support.mistaken_kernels import mistaken_copy
from tests.support.row_masses import bounds_and_masses
from tests.support.sampled_rows import RowRequest, bind_rows
from tests.support.triton_code import interpreted, recorded_launches
from worker.sampling.base import Sampling
from worker.sampling.exact_probs import exact_exp
from worker.sampling.row_split import RowSplit
from worker.sampling.sampler import TokenChoice, sample
from worker.sampling.torch_sampling import TorchSampling
from worker.sampling.verify import NO_DRAFT, verify

triton_sampling: Any = interpreted("worker.sampling.triton_sampling")
KERNELS = Path("worker/sampling/triton/sampling.py")
BLOCK = 64
DRAWING = [params for params in PARAMS if params.temperature > 0]


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    """Arithmetic with infinities and NaN gives no warnings, and new tensors hold no zeros."""
    torch.set_deterministic_debug_mode("error")
    with np.errstate(all="ignore"):
        yield
    torch.set_deterministic_debug_mode("default")


def requests_of(params: list[SamplingParams], seed: int = 0) -> list[RowRequest]:
    return [
        RowRequest(one, tokens=[1] * (1 + row % 5), seed=seed + row)
        for row, one in enumerate(params)
    ]


def choose(logits: Tensor, requests: list[RowRequest], block: int = BLOCK) -> Any:
    """Return the `DrawnRows` that the kernels compute."""
    slots, sampled = bind_rows(requests)
    split = RowSplit.of(logits, block)
    return triton_sampling.choose(logits, slots, sampled, split, append=False)


def assert_same(logits: Tensor, requests: list[RowRequest], block: int = BLOCK) -> TokenChoice:
    """Check that the kernels sample the tokens that torch samples, and return them."""
    expected = sample(logits, *bind_rows(requests))
    found = choose(logits, requests, block).choice
    assert found.finite.tolist() == expected.finite.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    return expected


@pytest.mark.parametrize(
    ("vocab", "spread", "block"), [(61, 0.3, 64), (97, 30.0, 64), (1543, 1.0, 1024)]
)
def test_every_row_of_a_mixed_batch_gets_the_token_that_torch_samples(
    vocab: int, spread: float, block: int
) -> None:
    logits = logits_of(len(PARAMS), vocab, spread=spread, seed=vocab)
    assert_same(logits, requests_of(PARAMS, seed=vocab), block)


def tied_logits(spread: float) -> Tensor:
    """Return logits for the rows of DRAWING. Many tokens of every second row are equally likely."""
    logits = logits_of(len(DRAWING), 331, spread=spread, seed=4)
    logits[::2] = (logits[::2] * 4 / spread).round() * spread / 4
    return logits


def filters_of(records: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds [S] and the masses [S] in the records."""
    bound, mass = (getattr(triton_sampling.kernels, name).value for name in ("BOUND", "MASS"))
    return records[:, bound].int().view(torch.float32), records[:, mass]


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_bounds_and_masses_have_the_bits_of_torchs_filters(spread: float) -> None:
    logits = tied_logits(spread)
    expected = bounds_and_masses(logits, draws_of(DRAWING))
    records = choose(logits, requests_of(DRAWING), 256).records
    for found, column in zip(filters_of(records), expected, strict=True):
        assert torch.equal(found, column)


@pytest.mark.parametrize("params", DRAWING[-2:])
def test_a_row_gets_the_same_token_however_programs_share_it(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(2, 700, spread=1.0)
    requests = requests_of([params] * 2)
    expected = sample(logits, *bind_rows(requests)).tokens.tolist()
    for block, programs in ((64, 6), (128, 1), (256, 1000)):
        monkeypatch.setattr("worker.sampling.row_split.NUM_PROGRAMS", programs)
        assert choose(logits, requests, block).choice.tokens.tolist() == expected


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.full((2, 200), -1.0)
    logits[0, [199, 77, 100]] = 5.0
    logits[1, [150, 3]] = torch.tensor([0.0, -0.0])
    assert assert_same(logits, requests_of([GREEDY] * 2)).tokens.tolist() == [77, 3]


def test_equally_likely_tokens_at_a_cut_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]]).repeat(20, 1)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        tokens = assert_same(logits, requests_of([params] * 20)).tokens
        assert set(tokens.tolist()) == {0, 2, 3, 4}


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_k=2, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_failed_row_is_reported_and_changes_no_other(params: SamplingParams, odd: float) -> None:
    logits = logits_of(3, 130)
    logits[1, 99 if odd != -float("inf") else slice(None)] = odd
    assert assert_same(logits, requests_of([params] * 3)).finite.tolist() == [True, False, True]


def test_the_only_possible_token_is_drawn() -> None:
    logits = torch.full((len(DRAWING), 130), float("-inf"))
    logits[:, 129] = -3e38
    assert set(assert_same(logits, requests_of(DRAWING)).tokens.tolist()) == {129}


def test_impossible_tokens_are_never_drawn() -> None:
    """A top_k larger than the number of possible tokens keeps all of these."""
    logits = logits_of(9, 90, spread=0.1)
    logits[:, ::2] = float("-inf")
    params = [SamplingParams(top_k=60), SamplingParams(temperature=2.0), SamplingParams(top_p=1e-9)]
    tokens = assert_same(logits, requests_of(params * 3)).tokens
    assert {token % 2 for token in tokens.tolist()} == {1}


def test_seeds_and_positions_decide_what_is_drawn() -> None:
    requests = [
        RowRequest(SamplingParams(), tokens=[1] * (1 + position), seed=seed)
        for seed in (-(1 << 63), -1, 0, (1 << 63) - 1)
        for position in range(4)
    ]
    assert len(set(assert_same(torch.zeros(16, 900), requests, 512).tokens.tolist())) > 12


def test_logits_may_be_part_of_wider_rows() -> None:
    wide = torch.full((3, 140), float("nan"))
    logits = logits_of(3, 97)
    wide[:, :97] = logits
    requests = requests_of([GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
    expected = assert_same(logits, requests).tokens.tolist()
    assert choose(wide[:, :97], requests).choice.tokens.tolist() == expected


def test_the_exponential_is_right_to_one_unit_in_the_last_place() -> None:
    x = torch.cat([-torch.rand(200_000) * 87, -torch.logspace(-40, 0, 20_000)])
    exact = x.double().exp()
    unit = torch.ldexp(torch.ones_like(exact), torch.frexp(exact)[1] - 24)
    assert ((exact_exp(x).double() - exact).abs() / unit).max() < 1
    ends = torch.tensor([0.0, -0.0, -87.0, -87.01, float("-inf")])
    assert exact_exp(ends).tolist()[:2] == [1.0, 1.0]
    assert (exact_exp(ends) > 0).tolist() == [True, True, True, False, False]
    assert exact_exp(x).max() <= 1


# ---- launches
@pytest.mark.parametrize(
    ("params", "launches"),
    [
        ([GREEDY], 2),
        ([SamplingParams()], 3),
        ([SamplingParams(top_k=10_000)], 3),
        ([SamplingParams(top_k=5), GREEDY], 6),
        ([SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.5)], 6),
        ([SamplingParams(top_k=5, top_p=0.5, min_p=0.5)], 9),
    ],
)
def test_launches_that_no_row_needs_are_left_out(
    params: list[SamplingParams], launches: int
) -> None:
    for copies in (1, 3):
        requests = requests_of(params * copies)
        with recorded_launches() as names:
            choose(logits_of(len(requests), 97), requests)
        assert len(names) == launches


# ---- appended tokens and drafts
@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
def test_tokens_are_appended_as_torch_appends_them(params: SamplingParams) -> None:
    requests = requests_of([params] * 3)
    logits = logits_of(3, 97)
    logits[1, 5] = float("nan")
    (expected, sampled), (slots, _) = bind_rows(requests), bind_rows(requests)
    choice = sample(logits, expected, sampled)
    expected.append_tokens(sampled.slots, sampled.known, choice.tokens)
    triton_sampling.choose(logits, slots, sampled, RowSplit.of(logits, BLOCK), append=True)
    assert_equal_slots(slots, expected)


def assert_equal_slots(slots: Any, expected: Any) -> None:
    for name in ("token_ids", "len"):
        assert torch.equal(slots[name], expected[name])


def drafted_rows(seed: int) -> tuple[TokenChoice, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the choice at each place of four rows with up to 5 drafts, and the drafts. Most drafts
    are right."""
    random = np.random.default_rng(seed)
    drafts = [np.append(random.integers(0, 3, random.integers(0, 6)), NO_DRAFT) for _ in range(4)]
    tokens = [np.append(row[:-1], random.integers(0, 3)) for row in drafts]
    for row in tokens:
        is_wrong = random.random(len(row)) < 0.2
        row[is_wrong] = random.integers(0, 3, is_wrong.sum())
    finite = torch.from_numpy(random.random(sum(map(len, tokens))) < 0.9)
    choice = TokenChoice(torch.from_numpy(np.concatenate(tokens)) * finite, finite)
    return choice, np.concatenate(drafts)


def assert_same_verdict(seed: int) -> None:
    choice, drafts = drafted_rows(seed)
    kept = verify(choice.tokens.numpy(), choice.finite.numpy(), drafts)
    last = torch.from_numpy(kept.places[kept.last])
    (expected, sampled), (slots, _) = (
        bind_rows([RowRequest(GREEDY, tokens=[1] * 4)] * len(drafts)) for _ in range(2)
    )
    ends = sampled.subset(last.numpy())
    expected.append_tokens(ends.slots, ends.known, choice.tokens[last])
    after = np.flatnonzero(drafts == NO_DRAFT) + 1
    starts = np.append(0, after[:-1])
    counts, finite = triton_sampling.verify(choice, slots, sampled, (drafts, starts, after))
    assert counts.tolist() == kept.counts.tolist()
    assert finite.tolist() == choice.finite[last].tolist()
    assert_equal_slots(slots, expected)


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_verified_as_on_the_host(seed: int) -> None:
    assert_same_verdict(seed)


def test_the_limit_of_mirostat_follows_drafts_as_on_the_host() -> None:
    """Three drafts are right, and one is wrong."""
    params = SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.9)
    requests = [
        RowRequest(params, tokens=[1, 4, 5, 6], seed=1),
        RowRequest(GREEDY),
        RowRequest(params, tokens=[1, 4], seed=2),
    ]
    logits = logits_of(7, 97)
    logits[[0, 1, 5], [4, 5, 4]] = 30.0
    logits[2, 6] = float("-inf")
    drafts = np.array([4, 5, 6, NO_DRAFT, NO_DRAFT, 4, NO_DRAFT])

    def outcome(sampling: Sampling) -> tuple[list[int], list[int], list[float], list[float]]:
        slots, rows = bind_rows(requests)
        places = rows.subset(np.repeat([0, 1, 2], [4, 1, 2]))
        known = torch.tensor([1, 2, 3, 4, 1, 1, 2])
        sampled = replace(places, host_known=known, known=known)
        result = sampling.sample(logits.clone(), slots, sampled, drafts=drafts).without_wrong()
        assert result.mu is not None
        assert result.counts is not None
        own = slots["mirostat_mu"][rows.slots]
        return result.tokens.tolist(), result.counts.tolist(), result.mu.tolist(), own.tolist()

    found = outcome(triton_sampling.TritonSampling(BLOCK))
    assert found == outcome(TorchSampling())
    assert (found[1], found[2]) == ([3, 1, 2], found[3])


# ---- mistakes
MISTAKES = {
    "the highest id of equal peaks wins": ("peak_key(x, ids)", "peak_key(x, V - 1 - ids)"),
    "a digit is one too small": ("(at ^ (SIZE - 1))", "(at ^ (SIZE - 1)) - (at < SIZE - 1)"),
    "the digit's own weight is subtracted": ("place < at, weights", "place <= at, weights"),
    "a search forgets its higher digits": ("== before)", ">= before)"),
    "top_p counts what top_k removed": (" & (bits >= floor)", ""),
    "top_p counts tokens": ("by_count = has_count & (SEARCH == 0)", "by_count = has_count"),
    "min_p is forgotten": ("tl.maximum(bound, tl.load(min_ps + slot))", "bound"),
    "tokens at the bound are lost": ("share >= bound", "share > bound"),
    "earlier blocks are forgotten": ("point -= tl.sum", "point -= 0 * tl.sum"),
    "the temperature is ignored": ("peak, temperature)", "peak, temperature * 0 + 1)"),
}


VERIFYING_MISTAKES = {
    "a draft of a failed place is right": (
        "tl.load(finite + start + nth, is_place, 0) != 0",
        "True",
    ),
    "the last right draft is the last token": ("nth, PLACES), 0) + 1", "nth, PLACES), 0) + 0"),
    "the row's last place is appended": ("last = start + count - 1", "last = end - 1 + count * 0"),
    "the length is that before the token": ("(position + 1).to", "position.to"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_kernel_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above would fail, too."""
    params = [GREEDY, *DRAWING[1::4], *DRAWING[-3:], SamplingParams(top_k=40, top_p=0.3)]
    logits, requests = tied_logits(1.0)[: len(params)], requests_of(params)
    expected = [
        sample(logits, *bind_rows(requests)).tokens,
        *bounds_and_masses(logits[1:], draws_of(params[1:])),
    ]
    mistaken = mistaken_copy(KERNELS, MISTAKES[mistake], tmp_path, monkeypatch)
    monkeypatch.setattr(triton_sampling, "kernels", mistaken)
    drawn = choose(logits, requests, 256)
    found = [drawn.choice.tokens, *(column[1:] for column in filters_of(drawn.records))]
    assert not all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mistake", VERIFYING_MISTAKES)
def test_a_mistake_in_the_verification_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistaken = mistaken_copy(KERNELS, VERIFYING_MISTAKES[mistake], tmp_path, monkeypatch)
    monkeypatch.setattr(triton_sampling, "kernels", mistaken)
    with pytest.raises(AssertionError):
        list(map(assert_same_verdict, range(8)))
