"""Logprobs against torch's log_softmax in float64, and against plain Python for what is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from msgspec.structs import astuple, replace

from engine_core.schedule.row_results import row_results
from protocol.messages import TokenLogprobs
from protocol.sampling import SamplingParams
from tests.support.distributions import kept
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.tiny_model import TinyModel, tiny_cache, tiny_runner, tiny_slots
from worker.sampling.logprobs import CHUNK, score


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("vocab", [7, 97, 49_152])
def test_scores_are_those_of_the_softmax(vocab):
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


def test_no_tops_may_be_asked_for():
    scores = score(logits_of(2, 97), torch.tensor([0, 1]), 0)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (2, 0)


# ---- through the runner
@dataclass
class CountingTensor(TinyModel):
    """Remembers how many rows of logits were made at once."""

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
    """Keeps the logits that it made last."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.made = super().logits(hidden)
        return self.made


def logits_after(prompt: list[int]) -> torch.Tensor:
    """The model's logits of the token after `prompt`."""
    model = RecordingModel()
    plan = step_plan(bind=[bound(0, prompt, GREEDY)], rows=[(0, 0, len(prompt), True)])
    runner_of(model).step(plan)
    return model.made[0]


def reference(tokens: list[int]) -> torch.Tensor:
    """log_softmax after every position of `tokens`, each computed by a step of its own."""
    rows = []
    for position in range(len(tokens)):
        prompt = tokens[: position + 1]
        rows.append(logits_after(prompt).double().log_softmax(-1))
    return torch.stack(rows)


def test_prompt_logprobs_are_of_each_prompt_token_after_the_first_however_it_is_chunked():
    expected = reference(PROMPT)
    asks = SamplingParams(temperature=0.0, prompt_logprobs=2)
    for cuts in ([0, 10], [0, 4, 10], [0, 1, 2, 9, 10]):
        runner = runner_of()
        ids, values, tops = [], [], []
        for nth, (start, stop) in enumerate(pairwise(cuts)):
            plan = step_plan(
                bind=[bound(2, PROMPT, asks)] if not nth else [],
                rows=[(2, start, stop - start, stop == len(PROMPT))],
            )
            told = runner.step(plan).prompt_logprobs
            if told is None:
                assert start == len(PROMPT) - 1
                continue
            assert set(told.rows.tolist()) == {0}
            assert set(told.counts.tolist()) == {2}
            ids += told.ids.tolist()
            values += told.logprobs.tolist()
            tops += told.top_ids.tolist()
        assert ids == PROMPT[1:]
        best = expected.argsort(-1, descending=True)[:-1, :2]
        assert tops == best.flatten().tolist()
        wanted = expected[torch.arange(9), PROMPT[1:]]
        torch.testing.assert_close(torch.tensor(values).double(), wanted, rtol=1e-4, atol=1e-4)


def test_prompt_logprobs_are_only_of_rows_that_request_them():
    asks = SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=1)
    runner = runner_of()
    result = runner.step(
        step_plan(
            bind=[
                bound(0, PROMPT, GREEDY),
                bound(1, PROMPT, asks, prompt_tokens=4),
                bound(3, [4, 4, 4], asks),
            ],
            rows=[(0, 0, 10, True), (1, 0, 10, True), (3, 0, 3, True)],
        )
    )
    told = result.prompt_logprobs
    assert told.rows.tolist() == [1, 1, 1, 2, 2]
    assert told.ids.tolist() == [9, 2, 77, 4, 4]
    assert told.top_ids.shape == (5, 0)
    assert result.logprobs.rows.tolist() == [1, 2]
    assert result.logprobs.ids.tolist() == result.tokens.tolist()[1:]
    assert result.logprobs.ranks.tolist() == [1, 1]
    assert result.logprobs.top_ids.tolist() == result.tokens.tolist()[1:]


def test_logprobs_are_of_the_unmodified_logits():
    plain = SamplingParams(temperature=0.0, logprobs=3)
    bent = SamplingParams(
        temperature=0.0, logprobs=3, logit_bias={50: 100.0}, repetition_penalty=1.5
    )
    told = []
    for params in (plain, bent):
        plan = step_plan(bind=[bound(0, PROMPT, params)], rows=[(0, 0, 10, True)])
        told.append(runner_of().step(plan))
    assert told[1].tokens.tolist() == [50]
    assert told[0].logprobs.top_ids == told[1].logprobs.top_ids
    assert told[0].logprobs.top_logprobs == told[1].logprobs.top_logprobs
    assert told[1].logprobs.ranks.tolist()[0] > 1


def test_long_prompts_are_scored_a_chunk_of_logits_at_a_time():
    model = CountingTensor()
    slots = tiny_slots(4)
    runner = tiny_runner(slots, tiny_cache(40), model)
    asks = SamplingParams(temperature=0.0, prompt_logprobs=1)
    tokens = [[(7 * i + slot) % 97 for i in range(36)] for slot in range(4)]
    plan = step_plan(
        bind=[bound(slot, tokens[slot], asks) for slot in range(4)],
        rows=[(slot, 0, 36, True) for slot in range(4)],
    )
    told = runner.step(plan).prompt_logprobs
    assert told.ids.tolist() == [token for row in tokens for token in row[1:]]
    assert max(model.sizes) <= CHUNK
    assert sum(model.sizes) == 4 * 35 + 4


def test_logprobs_of_named_tokens_are_in_the_requests_order():
    asks = [
        SamplingParams(temperature=0.0, logprob_token_ids=[60, 4, 33], logprobs=2),
        GREEDY,
        SamplingParams(temperature=0.0, logprob_token_ids=[96], logit_bias={96: 50.0}),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    plan = step_plan(
        bind=[bound(slot, PROMPT, params) for slot, params in enumerate(asks)],
        rows=[(slot, 0, len(PROMPT), True) for slot in range(4)],
    )
    told = runner_of().step(plan).logprobs
    assert told.rows.tolist() == [0, 2, 3]
    assert told.counts.tolist() == [2, 0, 0]
    assert told.asked_counts.tolist() == [3, 1, 0]
    expected = reference(PROMPT)[-1]
    values = torch.tensor(told.asked.tolist()).view(3, 3).double()
    torch.testing.assert_close(values[0], expected[[60, 4, 33]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values[1, :1], expected[[96]], rtol=1e-4, atol=1e-4)


def test_without_named_tokens_no_column_for_them_is_sent():
    asks = SamplingParams(temperature=0.0, logprobs=1)
    plan = step_plan(bind=[bound(0, PROMPT, asks)], rows=[(0, 0, len(PROMPT), True)])
    told = runner_of().step(plan).logprobs
    assert (told.asked_counts, told.asked) == (None, None)


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
    """What the model says after PROMPT."""
    return [float(x) for x in logits_after(PROMPT)]


def bent(params: SamplingParams) -> list[float]:
    """Logits after bias, penalties and bans, one token at a time."""
    logits = raw_logits()
    for token, value in params.logit_bias.items():
        logits[token] += value
    for token in set(PROMPT):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for (token,) in params.bad_words:
        logits[token] = -math.inf
    return logits


def logprobs_told(*asks: SamplingParams) -> list[TokenLogprobs]:
    """Return the logprobs of one sampled token of each, as the engine receives them."""
    plan = step_plan(
        bind=[bound(slot, PROMPT, params) for slot, params in enumerate(asks)],
        rows=[(slot, 0, len(PROMPT), True) for slot in range(len(asks))],
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
    ],
)
def test_sampling_logprobs_are_the_distribution_after_every_parameter(params):
    (told,) = logprobs_told(replace(params, logprobs_of="sampling"))
    shares = {token: math.log(share) for token, share in kept(bent(params), params).items()}
    best = sorted(shares, key=lambda token: -shares[token])
    assert told.logprob == pytest.approx(shares[told.token_id], abs=1e-4)
    assert best[told.rank - 1] == told.token_id
    assert told.top_ids == best[: params.logprobs]
    assert told.top_logprobs == pytest.approx([shares[t] for t in told.top_ids], abs=1e-4)
    asked = [shares.get(token, -math.inf) for token in params.logprob_token_ids]
    assert told.asked_logprobs == pytest.approx(asked, abs=1e-4)
    assert told.drawn_logprobs == []


def test_both_logprobs_are_the_models_and_the_drawn_ones_of_the_same_tokens():
    (model,), (drawn,) = logprobs_told(BENT), logprobs_told(replace(BENT, logprobs_of="sampling"))
    (both,) = logprobs_told(replace(BENT, logprobs_of="both"))
    assert replace(both, drawn_logprobs=[]) == model
    shares = kept(bent(BENT), BENT)
    ids = [both.token_id, *both.top_ids, *BENT.logprob_token_ids]
    wanted = [math.log(shares[t]) if t in shares else -math.inf for t in ids]
    assert both.drawn_logprobs == pytest.approx(wanted, abs=1e-4)
    assert both.drawn_logprobs[0] == drawn.logprob
    assert -math.inf in both.drawn_logprobs


def test_rows_with_different_distributions_do_not_mix():
    plain = SamplingParams(logprobs=2, logprobs_of="both")
    asks = [replace(BENT, logprobs_of="both"), replace(BENT, logprobs_of="sampling"), GREEDY, plain]
    together = logprobs_told(*asks)
    alone = [entry for ask in asks for entry in logprobs_told(ask)]
    for entry, wanted in zip(together, alone, strict=True):
        for told, value in zip(astuple(entry), astuple(wanted), strict=True):
            assert told == pytest.approx(value, abs=1e-5)
    assert [len(entry.drawn_logprobs) for entry in together] == [24, 0, 3]


def test_without_filters_and_at_temperature_one_both_distributions_are_the_same():
    (told,) = logprobs_told(SamplingParams(logprobs=9, logprobs_of="both"))
    assert told.drawn_logprobs == [told.logprob, *told.top_logprobs]
