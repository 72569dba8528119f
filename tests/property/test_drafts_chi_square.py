"""Forty thousand draws with drafts follow the model's distribution, with n-grams and with a draft
model.

Each single draw is tested exactly, seed by seed, in tests/unit/test_runner_drafts.py. This test
looks at whole answers of the real engine and worker. The model's next token depends only on the
last one, so every step from a token to the next is a draw from a known distribution, and an answer
is a series of independent draws. Seeds are fixed, so the result is too.

With other seeds a correct server would fail fewer than one time in a thousand. An error is found
with a probability of 99.9 % if it replaces 3 % of the draws by draws from a uniform distribution,
or 8 % of them by draws from the draft model's distribution.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from protocol.engine.sampling import SamplingParams
from tests.support.recording import tiny_model
from tests.support.replica import Replica
from tests.support.tiny_checkpoint import VOCAB
from worker.attention.base import Attention, AttentionBatch
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.loading.decoder import LoadedModel
from worker.lora.table import StepAdapters
from worker.slots.states import StepStates

TOKENS = [11, 12, 13, 14, 15, 16, 17]
PARAMS = SamplingParams(
    temperature=0.8, allowed_token_ids=TOKENS, max_tokens=100, ignore_eos=True, min_p=0.02
)
NUM_ANSWERS = 400
ONE_IN_A_THOUSAND = 66.6
"""The 99.9 % point of chi-square with 35 degrees of freedom. min_p leaves 34, so the limit is on
the safe side."""

Pair = tuple[int, int]


class Bigrams:
    """A model whose logits of the next token are a table's row for the last token."""

    kernels = TorchKernels()

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        return token_ids[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0]]


def table(seed: int) -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


TRUTH = table(1)
NEARLY = TRUTH + 0.5 * table(2)
"""Logits of the draft model, which often agrees with the model."""


def chances(last: int) -> dict[int, float]:
    """Return the expected probability of each token after `last`, computed directly from the
    definitions of temperature and min_p."""
    scaled = TRUTH[last, TOKENS].double() / PARAMS.temperature
    shares = torch.softmax(scaled, 0)
    shares[shares < PARAMS.min_p * shares.max()] = 0
    return dict(zip(TOKENS, (shares / shares.sum()).tolist(), strict=True))


def model_of(loaded: LoadedModel, logits: Tensor) -> LoadedModel:
    return replace(loaded, model=Bigrams(logits))  # type: ignore[arg-type]


def count_pairs(loaded: LoadedModel, speculation: str) -> tuple[Counter[Pair], Replica]:
    """Return how often each token followed each other token, and the replica."""
    replica = Replica(
        model_of(loaded, TRUTH),
        max_slots=NUM_ANSWERS // 2,
        token_budget=2000,
        num_blocks=4096,
        draft=model_of(loaded, NEARLY) if speculation == "model" else None,
        options={"speculation": speculation, "ngram_min": 1, "draft_width": 1000},
    )
    prompts = [[TOKENS[n % len(TOKENS)]] for n in range(NUM_ANSWERS)]
    answers = replica.answers(prompts, PARAMS)
    pairs: Counter[Pair] = Counter()
    for prompt, answer in zip(prompts, answers, strict=True):
        pairs.update(pairwise(prompt + answer))
    return pairs, replica


@pytest.mark.parametrize("speculation", ["ngram", "model"])
def test_forty_thousand_draws_follow_the_models_distribution(tmp_path, speculation: str) -> None:
    pairs, replica = count_pairs(tiny_model(tmp_path), speculation)
    stats = replica.engine.stats()
    assert pairs.total() == NUM_ANSWERS * 100
    statistic, cells = 0.0, 0
    for last in TOKENS:
        num = sum(pairs[last, token] for token in TOKENS)
        for token, chance in chances(last).items():
            assert chance or not pairs[last, token], "a token that the filter leaves out"
            if chance:
                statistic += (pairs[last, token] - num * chance) ** 2 / (num * chance)
                cells += 1
    print(
        f"{speculation}: chi-square {statistic:.1f}, {cells - len(TOKENS)} degrees of freedom; "
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts right"
    )
    assert statistic < ONE_IN_A_THOUSAND
    assert 2_000 < stats.num_accepted_tokens < 0.9 * stats.num_draft_tokens
