"""Mirostat: its distributions, and how its limit follows the tokens, against plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from protocol.engine.sampling import SamplingParams, first_mu
from tests.support.distributions import filtered_distribution
from tests.support.plans import slot_init, step_plan
from tests.support.sampled_rows import RowRequest, bind_rows
from tests.support.tiny_model import tiny_cache, tiny_runner, tiny_slots
from worker.sampling.torch_sampling import TorchSampling
from worker.step.runner import Runner
from worker.step.slot_registry import Poison

VOCAB = 301
PLAIN = SamplingParams(temperature=1.2)
SPECS = [
    SamplingParams(temperature=1.3, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.6),
    SamplingParams(temperature=0.8, mirostat=2, mirostat_tau=0.0, mirostat_eta=1.0),
    SamplingParams(temperature=1.3, mirostat=1, mirostat_tau=3.0, mirostat_eta=0.6),
    SamplingParams(temperature=2.0, mirostat=1, mirostat_tau=1.0, mirostat_eta=0.2, top_k=3),
]


def steep_logits(rows: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    logits = torch.randn(rows, VOCAB, generator=generator) * 2.5
    logits[:, ::7] = float("-inf")
    return logits


def test_each_token_is_one_of_those_that_the_slow_twin_keeps_and_moves_the_limit() -> None:
    """The rows without Mirostat between the others show that each row has its own limit."""
    rows = [params for spec in SPECS for params in (spec, PLAIN)]
    slots, sampled = bind_rows([RowRequest(params, seed=seed) for seed, params in enumerate(rows)])
    expected = [first_mu(params) for params in rows]
    num_removed = 0
    for step in range(12):
        logits = steep_logits(len(rows), step)
        result = TorchSampling().sample(logits.clone(), slots, sampled)
        assert result.mu is not None
        for row, params in enumerate(rows):
            if params.mirostat:
                kept = filtered_distribution(logits[row].tolist(), params, mu=expected[row])
                surprise = -math.log2(kept[int(result.tokens[row])])
                expected[row] += params.mirostat_eta * (params.mirostat_tau - surprise)
                num_removed += len(kept) < VOCAB * 6 // 7
        assert result.mu.tolist() == pytest.approx(expected, abs=1e-3)
        assert slots["mirostat_mu"][sampled.slots].tolist() == result.mu.tolist()
    assert num_removed > 20


def test_a_limit_below_every_surprise_keeps_the_most_likely_token() -> None:
    for version in (1, 2):
        params = SamplingParams(temperature=2.0, mirostat=version, mirostat_tau=0.0)
        slots, sampled = bind_rows([RowRequest(params, seed=seed) for seed in range(20)])
        slots["mirostat_mu"].fill_(-30.0)
        logits = steep_logits(20, step=1)
        result = TorchSampling().sample(logits.clone(), slots, sampled)
        assert result.tokens.tolist() == logits.argmax(-1).tolist()


def test_greedy_requests_have_no_limit() -> None:
    greedy = SamplingParams(temperature=0.0, mirostat=2, mirostat_tau=0.5)
    slots, sampled = bind_rows([RowRequest(greedy), RowRequest(PLAIN)])
    logits = steep_logits(2, step=1)
    result = TorchSampling().sample(logits.clone(), slots, sampled)
    assert result.mu is None
    assert int(result.tokens[0]) == int(logits[0].argmax())


# ---- a request that loses its slot
PROMPT = [5, 9, 2, 77, 31]
LONG = SamplingParams(temperature=1.5, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.8)


def started(tokens: list[int], mu: float) -> tuple[Runner, list[int], float]:
    """Return a runner whose slot 2 was bound with a prompt and its answer so far, and the next
    token and limit."""
    runner = tiny_runner(tiny_slots(3, poison=Poison.WILD), tiny_cache(40))
    blocks = range(1, 13)
    known = PROMPT + tokens
    init = slot_init(
        2,
        known,
        prompt_tokens=len(PROMPT),
        blocks=blocks,
        seed=3,
        params=LONG,
        mirostat_mu=mu,
    )
    plan = step_plan(bind=[init], zero=[*blocks], rows=[(2, 0, len(known), True)])
    result = runner.step(plan)
    return runner, result.tokens.tolist(), result.mirostat_mu.tolist()[0]


def test_a_preempted_request_continues_with_the_limit_that_the_worker_has_reported() -> None:
    runner, answer, mu = started([], first_mu(LONG))
    limits = [mu]
    for _ in range(15):
        at = len(PROMPT) + len(answer) - 1
        result = runner.step(step_plan(rows=[(2, at, 1, True)]))
        answer += result.tokens.tolist()
        limits += result.mirostat_mu.tolist()
    assert len(set(limits)) > 10, "the limit moves"
    for done in (1, 6, 14):
        _, again, mu = started(answer[:done], limits[done - 1])
        assert again == answer[done : done + 1]
        assert mu == pytest.approx(limits[done], abs=1e-4)
