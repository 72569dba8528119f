"""The results of a step that Triton kernels sample, in Triton's interpreter, equal those of torch:
processed logits, tokens, verified drafts and logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from protocol.engine.sampling import MAX_LOGPROBS, SamplingParams
from protocol.wire.arrays import Int32
from protocol.worker.steps import Logprobs, StepResult
from tests.property.test_sampler import GREEDY, logits_of
from tests.support.examples import examples
from tests.support.mistaken_kernels import mistaken_copy
from tests.support.plans import slot_init, step_plan
from tests.support.sampled_rows import RowRequest, bind_rows
from tests.support.tiny_model import tiny_cache, tiny_runner, tiny_slots
from tests.support.triton_code import interpreted, recorded_launches
from tests.unit.test_logits import WORDS, random_logits, requests
from worker.batch.batch import Sampled
from worker.batch.pending_step import PendingStep
from worker.device.readback import Readback
from worker.kernels.gpu import TritonKernels
from worker.kernels.reference import TorchKernels
from worker.sampling.bans import RowMasks
from worker.sampling.base import Sampling
from worker.sampling.logits import process_logits
from worker.sampling.logprobs import score
from worker.sampling.row_split import RowSplit
from worker.sampling.select import select_sampling
from worker.sampling.torch_sampling import TorchSampling
from worker.sampling.verify import NO_DRAFT
from worker.slots import features
from worker.slots.table import SlotTable

triton_sampling: Any = interpreted("worker.sampling.triton_sampling")
STAGES = Path("worker/sampling/triton/logit_stages.py")
SCORES = Path("worker/sampling/triton/scores.py")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    """Arithmetic with infinities and NaN gives no warnings, and new tensors hold no zeros."""
    torch.set_deterministic_debug_mode("error")
    with np.errstate(all="ignore"):
        yield
    torch.set_deterministic_debug_mode("default")


# ---- processed logits
def processed(logits: Tensor, group: Sequence[RowRequest], *, reports: bool, block: int) -> Tensor:
    """Return the logits that the kernels process. `reports` is whether a row reports logprobs, so
    that the model's own logits must stay."""
    slots, sampled = bind_rows(group)
    if reports:
        sampled = replace(sampled, features=sampled.features | features.LOGPROBS)
    own = logits.clone()
    found: Tensor = triton_sampling.process_logits(
        own, slots, sampled, None, RowSplit.of(logits, block)
    )
    assert torch.equal(own, logits) or not reports
    return found


@settings(max_examples=examples(13, 25), deadline=None)
@given(st.lists(requests(), min_size=1, max_size=3), st.integers(0, 99), st.booleans())
def test_parameters_change_logits_to_the_same_bits_as_torch(
    group: list[RowRequest], seed: int, reports: bool
) -> None:
    logits = random_logits(len(group), seed)
    expected = process_logits(logits, *bind_rows(group))
    with np.errstate(all="ignore"):
        found = processed(logits, group, reports=reports, block=16)
    assert torch.equal(found, expected)


EVERYTHING = RowRequest(
    SamplingParams(
        logit_bias={3: 2.5, 11: -100.0, 20: 1.25},
        repetition_penalty=1.3,
        frequency_penalty=0.3,
        presence_penalty=-0.7,
        min_tokens=9,
        allowed_token_ids=[*range(3, 12), *range(15, 31), 3, 4],
        bad_words=[[7], [7], [3, 5, 20], [9, 9], [5, 4, 21], [3, 22]],
    ),
    tokens=[3, 9, 7, 7, 3, 5, 11, 7, 3, 5],
    prompt_tokens=4,
    stop_ids=[25, 26],
)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_odd_logits_are_processed_as_torch_processes_them(odd: float) -> None:
    logits = random_logits(WORDS, 3)
    logits.fill_diagonal_(odd)
    group = [EVERYTHING] * WORDS
    expected = process_logits(logits, *bind_rows(group))
    found = processed(logits, group, reports=False, block=32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreted
def test_a_row_is_longer_than_the_tokens_that_are_counted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interpreter reads a constant of the module at each launch."""
    stages = triton_sampling.logit_stages
    monkeypatch.setattr(stages, "TOKENS", type(stages.TOKENS)(4))
    logits = random_logits(1, 5)
    expected = process_logits(logits, *bind_rows([EVERYTHING]))
    assert torch.equal(processed(logits, [EVERYTHING], reports=True, block=32), expected)


def test_the_longest_lists_are_read_whole() -> None:
    params = SamplingParams(
        logit_bias={token: token / 8 for token in range(1024)},
        allowed_token_ids=list(range(100, 1124)),
        bad_words=[[1, 2, 3, token] for token in range(200, 455)] + [[1123]],
        min_tokens=3,
    )
    request = RowRequest(params, [5, 1, 2, 3], 1, stop_ids=list(range(900, 1060)))
    logits = logits_of(1, 1200)
    expected = process_logits(logits, *bind_rows([request]))
    assert torch.equal(processed(logits, [request], reports=False, block=512), expected)


def test_tokens_outside_the_vocabulary_change_nothing() -> None:
    params = SamplingParams(
        logit_bias={WORDS: 9.0}, allowed_token_ids=[2, 99], bad_words=[[40]], min_tokens=5
    )
    request = RowRequest(params, [1, 50], stop_ids=[31, 60], prompt_tokens=1)
    found = processed(random_logits(2), [request] * 2, reports=False, block=16)
    assert found.isfinite().nonzero().tolist() == [[0, 2], [1, 2]]


MISTAKES = {
    "a bias is added twice": ("old + values", "old + 2 * values"),
    "the prompt counts as the answer": ("token_ids, prompt_len, end", "token_ids, 0, end"),
    "the prompt is not repeated": ("tl.minimum(prompt_len, end), start", "0, start"),
    "drafts after the place are counted": (
        "tl.minimum(tl.load(lens + slot), position.to(tl.int32))",
        "tl.load(lens + slot) + 0 * position.to(tl.int32)",
    ),
    "bans come before allowed tokens": (
        "kept = tl.load(out + allowed, here, 0.0)",
        "kept = tl.load(logits + row * stride + allowed, here, 0.0)",
    ),
    "a bad word may begin in the prompt": (">= prompt_len, -1", ">= 0, -1"),
    "a bad word is compared with the next one": ("end - 1 - back >= begin", "end - back >= begin"),
    "end tokens are banned once too often": ("position < tl.load(min", "position <= tl.load(min"),
    "the last id of a list is lost": (
        "nth < tl.load(counts + slot)",
        "nth + 1 < tl.load(counts + slot)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_stage_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above would fail, too."""
    mistaken = mistaken_copy(STAGES, MISTAKES[mistake], tmp_path, monkeypatch)
    monkeypatch.setattr(triton_sampling, "logit_stages", mistaken)
    params = replace_params(EVERYTHING.params, min_tokens=6)
    group = [EVERYTHING, replace(EVERYTHING, params=params), replace(EVERYTHING, prompt_tokens=9)]
    logits = random_logits(3, 1)
    slots, sampled = bind_rows(group)
    sampled = replace(
        sampled,
        known=sampled.known - torch.tensor([0, 0, 1]),
        host_known=sampled.host_known - torch.tensor([0, 0, 1]),
        features=sampled.features | features.LOGPROBS,
    )
    expected = process_logits(logits, slots, sampled)
    found = triton_sampling.process_logits(logits, slots, sampled, None, RowSplit.of(logits, 32))
    assert not torch.equal(found, expected)


def replace_params(params: SamplingParams, **changes: Any) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**(fields | changes))


@pytest.mark.parametrize("vocab", [7, 31, 97, 1030])
@pytest.mark.parametrize("reports", [False, True])
def test_masks_ban_as_in_torch(vocab: int, reports: bool) -> None:
    logits = logits_of(3, vocab)
    bits = torch.randint(0, 256, (2, -(-vocab // 32) * 4), dtype=torch.uint8)
    masks = RowMasks(torch.tensor([2, 0]), bits)
    slots, sampled = bind_rows([RowRequest(GREEDY)] * 3)
    if reports:
        sampled = replace(sampled, features=features.LOGPROBS)
    expected = process_logits(logits, slots, sampled, masks)
    own = logits.clone()
    found = triton_sampling.process_logits(own, slots, sampled, masks, RowSplit.of(own, 64))
    assert torch.equal(found, expected)
    assert torch.equal(own, logits) == reports


# ---- whole steps
ROWS = [
    (GREEDY, 0),
    (SamplingParams(temperature=0.0, logprobs=3), 2),
    (SamplingParams(temperature=1.7, top_k=9, top_p=0.99, logprobs=0, logprobs_of="both"), 3),
    (SamplingParams(temperature=1.9, top_k=12, logprobs=20, logprobs_of="sampling"), 0),
    (SamplingParams(logprob_token_ids=[5, 96, 5, 0], logprobs_of="both", top_k=4, logprobs=2), 1),
    (SamplingParams(logprob_token_ids=[7], allowed_token_ids=[7, 8, 9], logprobs=5), 2),
]
"""Parameters of rows, and the number of their drafts."""


class DraftedStep:
    """One step of rows with drafts: logits with a clear peak at each place, and drafts that equal
    the peaks of most places."""

    def __init__(self, seed: int, rows: Sequence[tuple[SamplingParams, int]] = ROWS) -> None:
        self.rows = rows
        self.counts = np.array([1 + num for _, num in rows])
        generator = torch.Generator().manual_seed(seed)
        num_places = int(self.counts.sum())
        self.logits = torch.randn(num_places, 97, generator=generator) * 2
        peaks = torch.randint(0, 97, (num_places,), generator=generator)
        peaks[-3:] = torch.tensor([7, 8, 9])[-num_places:]
        self.logits[torch.arange(num_places), peaks] += 9
        self.drafts = peaks.numpy().copy()
        self.drafts[seed % 4 :: 5] = 50
        self.drafts[self.counts.cumsum() - 1] = NO_DRAFT

    def bind(self) -> tuple[SlotTable, Sampled]:
        """Bind the rows to slots that hold their drafts, and return the slots and the places."""
        ends = self.counts.cumsum()
        tokens = [
            [3, 9, 7, *self.drafts[end - count : end - 1].tolist()]
            for end, count in zip(ends, self.counts, strict=True)
        ]
        params = [params for params, _ in self.rows]
        slots, sampled = bind_rows(
            [
                RowRequest(one, known, seed=n)
                for n, (one, known) in enumerate(zip(params, tokens, strict=True))
            ]
        )
        row = torch.from_numpy(np.repeat(np.arange(len(ends)), self.counts))
        nth = torch.arange(len(row)) - torch.from_numpy(np.repeat(ends - self.counts, self.counts))
        at, known = sampled.host_slots[row], 3 + nth
        return slots, Sampled(at, known, at, known, torch.arange(len(row)), sampled.features)

    def result(
        self, sampling: Sampling, masks: RowMasks | None = None
    ) -> tuple[StepResult, SlotTable]:
        slots, sampled = self.bind()
        found = sampling.sample(
            self.logits.clone(), slots, sampled, masks=masks, drafts=self.drafts
        )
        pending = PendingStep.start_readback(1, 0.0, Readback(CPU), found, None)
        return pending.result(), slots


def possible(columns: Logprobs) -> Logprobs:
    """Return the columns with -1 for impossible tokens among the most likely ones."""
    ids = [
        token if value > -math.inf else -1
        for token, value in zip(
            columns.top_ids.tolist(), columns.top_logprobs.tolist(), strict=True
        )
    ]
    return structs.replace(columns, top_ids=Int32.of(ids, columns.top_ids.shape))


def assert_same_logprobs(found: Logprobs, expected: Logprobs) -> None:
    """Check that all columns are equal, but for the ids of impossible tokens among the most likely
    ones. All of these are equally likely, and left out."""
    found, expected = possible(found), possible(expected)
    for name in found.__struct_fields__:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.shape == other.shape, name
            assert one.tolist() == pytest.approx(other.tolist(), rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize(("seed", "is_masked"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_step_with_drafts_has_the_result_of_torch(seed: int, is_masked: bool) -> None:
    step = DraftedStep(seed)
    if seed == 3:
        step.logits[4, 8] = float("nan")
    bits = torch.full((2, 16), 0xEF, dtype=torch.uint8)
    masks = RowMasks(torch.tensor([1, 5]), bits) if is_masked else None
    found, slots = step.result(
        triton_sampling.TritonSampling(block=64 if seed == 0 else 128), masks
    )
    expected, other = step.result(TorchSampling(), masks)
    for name in ("tokens", "counts", "failed"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert found.logprobs is not None
    assert expected.logprobs is not None
    if seed != 3:  # logprobs of a failed row are ignored
        assert_same_logprobs(found.logprobs, expected.logprobs)
    for name in ("token_ids", "len"):
        assert torch.equal(slots[name], other[name])
    assert sum(found.counts.tolist()) < len(step.logits), "some drafts are wrong"


@pytest.mark.parametrize("num_rows", [1, 4])
def test_the_number_of_launches_depends_on_no_number_of_rows(num_rows: int) -> None:
    """A greedy row needs two kernels, and all features together 14."""
    params = SamplingParams(
        **{name: getattr(EVERYTHING.params, name) for name in ("logit_bias", "min_tokens")},
        frequency_penalty=1.0,
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        logprobs=4,
        logprobs_of="both",
        logprob_token_ids=[1, 2],
    )
    masks = RowMasks(torch.tensor([0]), torch.full((1, 16), 255, dtype=torch.uint8))
    for one, mask, num_kernels in ((GREEDY, None, 2), (params, masks, 14)):
        step = DraftedStep(0, [(one, 0)] * num_rows)
        slots, sampled = step.bind()
        with recorded_launches() as names:
            triton_sampling.TritonSampling(block=64).sample(step.logits, slots, sampled, masks=mask)
        assert len(names) == num_kernels, names


def prompt_result(sampling: Sampling | None) -> StepResult:
    """Return the result of a prompt with logprobs and a decode with drafts, one of them wrong."""
    params = [
        SamplingParams(temperature=0.0, prompt_logprobs=4, logprobs=1),
        SamplingParams(temperature=0.0),
    ]
    binds = [
        slot_init(n, [5, 9, 2, 77, 31], blocks=range(1 + 4 * n, 5 + 4 * n), params=one)
        for n, one in enumerate(params)
    ]
    plan = step_plan(
        bind=binds,
        zero=list(range(1, 9)),
        rows=[(0, 0, 5, True), (1, 0, 7, True)],
        drafts={1: [11, 12]},
    )
    return tiny_runner(tiny_slots(3), tiny_cache(20), sampling=sampling).step(plan)


def test_a_runner_gives_the_same_result_with_kernels() -> None:
    found = prompt_result(triton_sampling.TritonSampling(block=64))
    expected = prompt_result(None)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.counts.tolist() == expected.counts.tolist()
    for name in ("logprobs", "prompt_logprobs"):
        assert_same_logprobs(getattr(found, name), getattr(expected, name))


def test_sampling_belongs_to_the_kernels_of_the_model() -> None:
    """So a GPU whose Triton cannot launch kernels, or `--kernels torch`, samples with torch."""
    assert isinstance(select_sampling(TorchKernels()), TorchSampling)
    assert type(select_sampling(TritonKernels())).__name__ == "TritonSampling"


# ---- scores
@pytest.mark.parametrize("num_top", [0, 1, 5, MAX_LOGPROBS])
@pytest.mark.parametrize("vocab", [7, 97, 200])
def test_scores_equal_those_of_torch(num_top: int, vocab: int) -> None:
    logits = logits_of(3, vocab, spread=5.0)
    tokens = torch.tensor([0, vocab - 1, vocab // 2])
    found = triton_sampling.TritonSampling(block=64).score(logits, tokens, num_top)
    expected = score(logits, tokens, num_top)
    assert torch.equal(found.ranks, expected.ranks)
    assert torch.equal(found.top_ids, expected.top_ids)
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-6, atol=1e-6
        )


def test_equally_likely_tokens_are_reported_by_rising_id_also_where_the_list_ends() -> None:
    logits = torch.zeros(1, 200)
    logits[0, [140, 10, 70]] = 2.0
    scores = triton_sampling.TritonSampling(block=64).score(logits, torch.tensor([70]), 5)
    assert scores.top_ids[0].tolist() == [10, 70, 140, 0, 1]
    assert scores.ranks.tolist() == [1]


SCORING_MISTAKES = {
    "an equal token ranks higher": ("(x > own)", "(x >= own)"),
    "the peak is forgotten": ("normaliser += key", "normaliser += 0 * key"),
    "a block's second best token is another": ("+ nth, best)\n", "+ nth, best - (nth == 1))\n"),
    "one requested token is scored for all": ("MAX_ASKED + nth, is", "MAX_ASKED + nth * 0, is"),
    "removed tokens keep their share": ("exp(gaps) >= bound", "exp(gaps) >= 0 * bound"),
    "the temperature is ignored": (
        "(tl.load(draws + PEAK)), temperature)",
        "(tl.load(draws + PEAK)), 1.0)",
    ),
    "the sampled token's share is another's": (
        "temperature, token, True, SCALE",
        "temperature, token * 0, True, SCALE",
    ),
    "impossible tokens are counted": ("is_finite(value).to", "(value == value).to"),
}


@pytest.mark.parametrize("mistake", SCORING_MISTAKES)
def test_a_mistake_in_a_score_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test of whole steps would fail, too."""
    step = DraftedStep(0, [(params, 0) for params, _ in ROWS[1:]])
    expected = step.result(TorchSampling())[0].logprobs
    mistaken = mistaken_copy(SCORES, SCORING_MISTAKES[mistake], tmp_path, monkeypatch)
    launcher = triton_sampling.score_tokens.__globals__
    monkeypatch.setitem(launcher, "scores", mistaken)
    found = step.result(triton_sampling.TritonSampling(block=64))[0].logprobs
    assert found is not None
    assert expected is not None
    with pytest.raises(AssertionError):
        assert_same_logprobs(found, expected)
