"""Logprobs of the model equal torch's log_softmax in float64. Logprobs of the distribution that a
token is drawn from equal a reference in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from msgspec.structs import astuple, replace

from engine_core.schedule.row_results import row_results
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.sampling import SamplingParams
from tests.support.distributions import filtered_distribution
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.tiny_model import TinyModel, tiny_cache, tiny_runner, tiny_slots
from worker.sampling.logprobs import CHUNK, score


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("vocab", [7, 97, 49_152])
def test_scores_equal_the_softmax(vocab):
    logits = logits_of(6, vocab)
    tokens = torch.arange(6) % vocab
    scores = score(logits, tokens, 5)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        scores.logprobs.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )
    best = expected.sort(-1, descending=True)
    assert torch.equal(scores.top_ids, best.indices[:, :5])
    torch.testing.assert_close(
        scores.top_logprobs.double(), best.values[:, :5], rtol=1e-6, atol=1e-6
    )
    places = (best.indices == tokens[:, None]).nonzero()[:, 1]
    assert scores.ranks.tolist() == (places + 1).tolist()


def test_scores_have_the_same_bits_alone_and_among_others_and_for_any_number_of_tops():
    logits, tokens = logits_of(7, 40_001), torch.arange(7) * 100
    together = score(logits, tokens, 20)
    for row in range(7):
        alone = score(logits[row : row + 1], tokens[row : row + 1], 3)
        assert torch.equal(alone.logprobs[0], together.logprobs[row])
        assert torch.equal(alone.top_logprobs[0], together.top_logprobs[row, :3])
        assert torch.equal(alone.top_ids[0], together.top_ids[row, :3])


def test_equally_likely_tokens_are_reported_by_rising_id_and_share_a_rank():
    logits = torch.zeros(1, 50)
    logits[0, [40, 10, 30]] = 2.0
    scores = score(logits, torch.tensor([30]), 4)
    assert scores.top_ids[0, :3].tolist() == [10, 30, 40]
    assert scores.ranks.tolist() == [1]


def test_a_score_can_have_no_top_tokens():
    scores = score(logits_of(2, 97), torch.tensor([0, 1]), 0)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (2, 0)


# ---- through the runner
@dataclass
class CountingModel(TinyModel):
    """A model that records how many rows of logits each call computed."""

    def __init__(self) -> None:
        super().__init__(max_len=400)
        self.sizes: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(hidden))
        return super().logits(hidden)


def runner_of(model: TinyModel | None = None):
    return tiny_runner(tiny_slots(4), tiny_cache(40), model)


def blocks_for(slot: int) -> range:
    return range(1 + 9 * slot, 10 + 9 * slot)


def bound(slot: int, tokens: list[int], params: SamplingParams, **more):
    return slot_init(slot, tokens, blocks=blocks_for(slot), params=params, **more)


PROMPT = [5, 9, 2, 77, 31, 8, 64, 3, 3, 90]


class RecordingModel(TinyModel):
    """A model that stores the logits of its last call."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last_logits = super().logits(hidden)
        return self.last_logits


def logits_after(prompt: list[int]) -> torch.Tensor:
    """Return the model's logits for the token after `prompt`."""
    model = RecordingModel()
    plan = step_plan(bind=[bound(0, prompt, GREEDY)], rows=[(0, 0, len(prompt), True)])
    runner_of(model).step(plan)
    return model.last_logits[0]


def reference(tokens: list[int]) -> torch.Tensor:
    """Return the vocabulary's logprobs after each position of `tokens`, each from its own step."""
    rows = []
    for position in range(len(tokens)):
        prompt = tokens[: position + 1]
        rows.append(logits_after(prompt).double().log_softmax(-1))
    return torch.stack(rows)


def test_every_prompt_token_after_the_first_has_a_logprob_however_the_prompt_is_chunked():
    expected = reference(PROMPT)
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    for cuts in ([0, 10], [0, 4, 10], [0, 1, 2, 9, 10]):
        runner = runner_of()
        ids, values, tops = [], [], []
        for nth, (start, stop) in enumerate(pairwise(cuts)):
            plan = step_plan(
                bind=[bound(2, PROMPT, params)] if not nth else [],
                rows=[(2, start, stop - start, stop == len(PROMPT))],
            )
            columns = runner.step(plan).prompt_logprobs
            if columns is None:
                assert start == len(PROMPT) - 1
                continue
            assert set(columns.rows.tolist()) == {0}
            assert set(columns.counts.tolist()) == {2}
            ids += columns.ids.tolist()
            values += columns.logprobs.tolist()
            tops += columns.top_ids.tolist()
        assert ids == PROMPT[1:]
        best = expected.argsort(-1, descending=True)[:-1, :2]
        assert tops == best.flatten().tolist()
        wanted = expected[torch.arange(9), PROMPT[1:]]
        torch.testing.assert_close(torch.tensor(values).double(), wanted, rtol=1e-4, atol=1e-4)


def test_only_rows_that_request_prompt_logprobs_have_them():
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=1)
    runner = runner_of()
    result = runner.step(
        step_plan(
            bind=[
                bound(0, PROMPT, GREEDY),
                bound(1, PROMPT, params, prompt_tokens=4),
                bound(3, [4, 4, 4], params),
            ],
            rows=[(0, 0, 10, True), (1, 0, 10, True), (3, 0, 3, True)],
        )
    )
    columns = result.prompt_logprobs
    assert columns.rows.tolist() == [1, 1, 1, 2, 2]
    assert columns.ids.tolist() == [9, 2, 77, 4, 4]
    assert columns.top_ids.shape == (5, 0)
    assert result.logprobs.rows.tolist() == [1, 2]
    assert result.logprobs.ids.tolist() == result.tokens.tolist()[1:]
    assert result.logprobs.ranks.tolist() == [1, 1]
    assert result.logprobs.top_ids.tolist() == result.tokens.tolist()[1:]


def test_logprobs_are_of_the_unmodified_logits():
    plain = SamplingParams(temperature=0.0, logprobs=3)
    bent = SamplingParams(
        temperature=0.0, logprobs=3, logit_bias={50: 100.0}, repetition_penalty=1.5
    )
    results = []
    for params in (plain, bent):
        plan = step_plan(bind=[bound(0, PROMPT, params)], rows=[(0, 0, 10, True)])
        results.append(runner_of().step(plan))
    assert results[1].tokens.tolist() == [50]
    assert results[0].logprobs.top_ids == results[1].logprobs.top_ids
    assert results[0].logprobs.top_logprobs == results[1].logprobs.top_logprobs
    assert results[1].logprobs.ranks.tolist()[0] > 1


def test_long_prompts_are_scored_a_chunk_of_logits_at_a_time():
    model = CountingModel()
    slots = tiny_slots(4)
    runner = tiny_runner(slots, tiny_cache(40), model)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    tokens = [[(7 * i + slot) % 97 for i in range(36)] for slot in range(4)]
    plan = step_plan(
        bind=[bound(slot, tokens[slot], params) for slot in range(4)],
        rows=[(slot, 0, 36, True) for slot in range(4)],
    )
    columns = runner.step(plan).prompt_logprobs
    assert columns.ids.tolist() == [token for row in tokens for token in row[1:]]
    assert max(model.sizes) <= CHUNK
    assert sum(model.sizes) == 4 * 35 + 4


def test_logprobs_of_named_tokens_are_in_the_requests_order():
    requests = [
        SamplingParams(temperature=0.0, logprob_token_ids=[60, 4, 33], logprobs=2),
        GREEDY,
        SamplingParams(temperature=0.0, logprob_token_ids=[96], logit_bias={96: 50.0}),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    plan = step_plan(
        bind=[bound(slot, PROMPT, params) for slot, params in enumerate(requests)],
        rows=[(slot, 0, len(PROMPT), True) for slot in range(4)],
    )
    columns = runner_of().step(plan).logprobs
    assert columns.rows.tolist() == [0, 2, 3]
    assert columns.counts.tolist() == [2, 0, 0]
    assert columns.asked_counts.tolist() == [3, 1, 0]
    expected = reference(PROMPT)[-1]
    values = torch.tensor(columns.asked.tolist()).view(3, 3).double()
    torch.testing.assert_close(values[0], expected[[60, 4, 33]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values[1, :1], expected[[96]], rtol=1e-4, atol=1e-4)


def test_without_named_tokens_no_column_for_them_is_sent():
    params = SamplingParams(temperature=0.0, logprobs=1)
    plan = step_plan(bind=[bound(0, PROMPT, params)], rows=[(0, 0, len(PROMPT), True)])
    columns = runner_of().step(plan).logprobs
    assert (columns.asked_counts, columns.asked) == (None, None)


# ---- of the distribution that a token is drawn from
BENT = SamplingParams(
    temperature=0.7,
    top_k=12,
    top_p=0.9,
    min_p=0.01,
    logit_bias={50: 3.0, 4: -2.0},
    repetition_penalty=1.3,
    bad_words=[[7]],
    logprobs=20,
    logprob_token_ids=[4, 7, 50],
)


def raw_logits() -> list[float]:
    """Return the model's logits after PROMPT."""
    return [float(x) for x in logits_after(PROMPT)]


def bent(params: SamplingParams) -> list[float]:
    """Return `raw_logits` with bias, repetition penalty and bans, computed token by token."""
    logits = raw_logits()
    for token, value in params.logit_bias.items():
        logits[token] += value
    for token in set(PROMPT):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for (token,) in params.bad_words:
        logits[token] = -math.inf
    return logits


def logprobs_of_one_token(*requests: SamplingParams) -> list[TokenLogprobs]:
    """Return the logprobs of one sampled token of each request, as the engine receives them."""
    plan = step_plan(
        bind=[bound(slot, PROMPT, params) for slot, params in enumerate(requests)],
        rows=[(slot, 0, len(PROMPT), True) for slot in range(len(requests))],
    )
    return [
        entry for outcome in row_results(plan, runner_of().step(plan)) for entry in outcome.logprobs
    ]


@pytest.mark.parametrize(
    "params",
    [
        BENT,
        SamplingParams(logprobs=5),
        SamplingParams(temperature=0.4, logprobs=0, logprob_token_ids=[1, 2]),
        SamplingParams(top_p=0.5, logprobs=20),
        SamplingParams(top_k=3, logprobs=20),
        SamplingParams(min_p=0.3, logprobs=4, bad_words=[[31]]),
        SamplingParams(temperature=1.5, typical_p=0.6, logprobs=4),
        SamplingParams(top_n_sigma=2.0, xtc_probability=1.0, xtc_threshold=0.02, logprobs=4),
        SamplingParams(temperature=0.5, min_p=0.2, samplers=["min_p", "temperature"], logprobs=4),
    ],
)
def test_sampling_logprobs_are_the_distribution_after_every_parameter(params):
    (entry,) = logprobs_of_one_token(replace(params, logprobs_of="sampling"))
    shares = {
        token: math.log(share)
        for token, share in filtered_distribution(bent(params), params).items()
    }
    best = sorted(shares, key=lambda token: -shares[token])
    assert entry.logprob == pytest.approx(shares[entry.token_id], abs=1e-4)
    assert best[entry.rank - 1] == entry.token_id
    assert entry.top_ids == best[: params.logprobs]
    assert entry.top_logprobs == pytest.approx([shares[t] for t in entry.top_ids], abs=1e-4)
    named = [shares.get(token, -math.inf) for token in params.logprob_token_ids]
    assert entry.asked_logprobs == pytest.approx(named, abs=1e-4)
    assert entry.drawn_logprobs == []


def test_both_logprobs_are_the_models_and_the_drawn_ones_of_the_same_tokens():
    (model,), (drawn,) = (
        logprobs_of_one_token(BENT),
        logprobs_of_one_token(replace(BENT, logprobs_of="sampling")),
    )
    (both,) = logprobs_of_one_token(replace(BENT, logprobs_of="both"))
    assert replace(both, drawn_logprobs=[]) == model
    shares = filtered_distribution(bent(BENT), BENT)
    ids = [both.token_id, *both.top_ids, *BENT.logprob_token_ids]
    wanted = [math.log(shares[t]) if t in shares else -math.inf for t in ids]
    assert both.drawn_logprobs == pytest.approx(wanted, abs=1e-4)
    assert both.drawn_logprobs[0] == drawn.logprob
    assert -math.inf in both.drawn_logprobs


def test_rows_with_different_distributions_do_not_mix():
    plain = SamplingParams(logprobs=2, logprobs_of="both")
    requests = [
        replace(BENT, logprobs_of="both"),
        replace(BENT, logprobs_of="sampling"),
        GREEDY,
        plain,
    ]
    together = logprobs_of_one_token(*requests)
    alone = [entry for params in requests for entry in logprobs_of_one_token(params)]
    for entry, wanted in zip(together, alone, strict=True):
        for found, value in zip(astuple(entry), astuple(wanted), strict=True):
            assert found == pytest.approx(value, abs=1e-5)
    assert [len(entry.drawn_logprobs) for entry in together] == [24, 0, 3]


def test_without_filters_and_at_temperature_one_both_distributions_are_the_same():
    (entry,) = logprobs_of_one_token(SamplingParams(logprobs=9, logprobs_of="both"))
    assert entry.drawn_logprobs == [entry.logprob, *entry.top_logprobs]
