"""The compiled kernels choose the tokens that torch chooses, for all logits and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol.engine.sampling import SamplingParams
from tests.property.test_sampler import GREEDY, LARGE, PARAMS, SMALL, logits_of
from tests.support.kernels import FLOAT_NAMES, native_kernels
from tests.support.sampled_rows import RowRequest, bind_rows
from worker.sampling.bans import RowMasks
from worker.sampling.native_sampling import NativeSampling
from worker.sampling.torch_sampling import TorchSampling
from worker.sampling.verify import NO_DRAFT

DRAWN = SamplingParams(temperature=0.7, top_p=0.9)
PENALTIES: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.5},
    {"frequency_penalty": -0.3, "presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "logit_bias": {3: 4.0, 5: -100.0}},
    {"presence_penalty": 0.2, "min_tokens": 9},
)
HUGE = 151_936
"""Size of a vocabulary of which most blocks have no token with a weight."""


def requests_of(params: Sequence[SamplingParams], *, seed: int = 0) -> list[RowRequest]:
    """Return a request for each set of parameters, with a prompt and tokens that repeat."""
    rng = np.random.default_rng(seed)
    return [
        RowRequest(
            each,
            tokens=rng.integers(0, SMALL, 3 + row % 17).tolist(),
            prompt_tokens=1 + row % 3,
            seed=int(rng.integers(-(1 << 60), 1 << 60)),
            stop_ids=[2, 7],
        )
        for row, each in enumerate(params)
    ]


def assert_equal(
    native: NativeSampling,
    logits: Tensor,
    requests: list[RowRequest],
    masks: RowMasks | None = None,
) -> None:
    """Assert that both choose the same tokens, and that the logits stay as they were."""
    outcomes = []
    for sampling in (native, TorchSampling()):
        slots, sampled = bind_rows(requests)
        given_logits = logits.clone()
        result = sampling.sample(given_logits, slots, sampled, masks=masks)
        assert torch.equal(given_logits.nan_to_num(-9), logits.nan_to_num(-9))
        written = slots["token_ids"].gather(1, (slots["len"].long() - 1).clamp(min=0)[:, None])
        at = sampled.slots
        outcomes.append((result.tokens, result.finite, slots["len"][at], written[at]))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(params=FLOAT_NAMES)
def native(request: pytest.FixtureRequest) -> NativeSampling:
    return NativeSampling(native_kernels(request.param))


@pytest.mark.parametrize("vocab", [SMALL, 128, LARGE])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0, 40.0])
def test_the_kernels_choose_torchs_tokens(native, vocab, spread):
    for seed in range(3):
        requests = requests_of(PARAMS, seed=seed)
        assert_equal(native, logits_of(len(requests), vocab, spread=spread, seed=seed), requests)


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_the_kernels_apply_penalties_as_torch_does(native, penalties):
    params = [
        SamplingParams(**({"temperature": one.temperature, "top_p": one.top_p} | penalties))
        for one in PARAMS
    ]
    for seed in range(3):
        requests = requests_of(params, seed=seed)
        assert_equal(native, logits_of(len(requests), SMALL, seed=seed), requests)


@pytest.mark.parametrize("spread", [0.02, 2.5])
def test_a_large_vocabulary_has_the_same_tokens(native, spread):
    requests = requests_of(PARAMS)
    assert_equal(native, logits_of(len(requests), HUGE, spread=spread), requests)


def test_equal_logits_have_the_same_tokens(native):
    requests = requests_of(PARAMS * 2)
    ties = (logits_of(len(requests), LARGE) * 2).round() / 2
    assert_equal(native, ties, requests)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_odd_logits_have_the_same_tokens(native, odd):
    requests = requests_of(PARAMS)
    logits = logits_of(len(requests), LARGE)
    logits[::2, [5, LARGE - 1]] = odd
    logits[3] = odd
    assert_equal(native, logits, requests)


def test_banned_tokens_are_the_same(native):
    requests = requests_of(PARAMS)
    logits = logits_of(len(requests), LARGE)
    logits[:, 3:1400] = -float("inf")
    bits = torch.full((1, -(-LARGE // 32) * 4), 0b0101_0101, dtype=torch.uint8)
    assert_equal(native, logits, requests, RowMasks(torch.tensor([8]), bits))


def test_stages_that_the_kernels_lack_are_computed_with_torch(native):
    others = [
        SamplingParams(temperature=1.0, bad_words=[[4]], frequency_penalty=0.5),
        SamplingParams(temperature=1.0, allowed_token_ids=[1, 2, 3], presence_penalty=0.5),
        replace_params(DRAWN, logprobs=2, logprobs_of="both", repetition_penalty=1.5),
        replace_params(DRAWN, logprobs=2),
    ]
    for params in ([each] for each in others):
        requests = requests_of([*params, GREEDY, DRAWN])
        assert_equal(native, logits_of(len(requests), SMALL), requests)


def replace_params(params: SamplingParams, **changes: object) -> SamplingParams:
    return type(params)(**({f: getattr(params, f) for f in params.__struct_fields__} | changes))


def test_drafts_are_verified_with_the_same_tokens(native):
    """All places of the second request are of one slot, which holds the drafts."""
    requests = requests_of([SamplingParams(temperature=1.0, frequency_penalty=0.5)])
    logits = logits_of(4, SMALL)
    results = []
    for sampling in (native, TorchSampling()):
        slots, one = bind_rows(requests)
        slots["token_ids"][one.slots, 3:6] = torch.tensor([4, 4, 9], dtype=torch.int32)
        slots["len"][one.slots] = 6
        known = torch.arange(3, 7)
        at = one.slots.expand(4).contiguous()
        places = replace(
            one, slots=at, host_slots=at, known=known, host_known=known, last=torch.arange(4)
        )
        drafts = np.array([4, 4, 9, NO_DRAFT])
        result = sampling.sample(logits.clone(), slots, places, drafts=drafts)
        results.append((result.tokens.tolist(), result.counts, slots["len"][one.slots].tolist()))
    assert results[0] == results[1]


@given(
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    vocab=st.integers(1, 700),
    temperature=st.floats(0.05, 3.0),
    top_k=st.sampled_from([0, 0, 1, 5, 64, 400]),
    top_p=st.sampled_from([1.0, 0.0, 0.3, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-7, 0.1, 1.0]),
    seed=st.integers(0, 1 << 40),
)
@settings(max_examples=150, deadline=None)
def test_any_filters_have_the_same_tokens(spread, vocab, temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    requests = [RowRequest(params, seed=seed + row) for row in range(8)]
    native = NativeSampling(native_kernels())
    assert_equal(native, logits_of(8, vocab, spread=spread, seed=seed % 1000), requests)
