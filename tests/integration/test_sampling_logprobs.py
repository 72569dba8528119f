"""Logprobs of the distribution that tokens are drawn from, through the real engine: grammars,
batches, draws."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.engine.grammar import ChoiceGrammar, Grammar
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.sampling import SamplingParams
from tests.support.grammars import signs_tokenizer
from tests.support.replica import Replica, load
from tests.support.tiny_checkpoint import write_tiny_llama
from worker.loading.decoder import LoadedModel

PROMPT = [5, 9, 2, 77, 31, 8]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=200)
    model = load(path)
    card = replace(model.card, tokenizer=signs_tokenizer(markers=False), eos_token_ids=[0])
    return dataclasses.replace(model, card=card)


def logprobs_of(replica: Replica, number: int) -> list[TokenLogprobs]:
    return [entry for output in replica.outputs[number] for entry in output.logprobs]


def test_the_sampling_distribution_includes_the_grammars_mask_and_sums_to_one(
    loaded: LoadedModel,
) -> None:
    replica = Replica(loaded)
    params = SamplingParams(logprobs=20, logprobs_of="sampling", seed=3, max_tokens=12)
    number = replica.add(PROMPT, params, Grammar(body=ChoiceGrammar(choices=["abc", "abd", "xy"])))
    replica.run()
    entries = logprobs_of(replica, number)
    assert entries
    for entry in entries:
        assert 1 <= len(entry.top_ids) < 20, "a choice leaves few tokens"
        assert sum(map(math.exp, entry.top_logprobs)) == pytest.approx(1, abs=1e-5)
        assert entry.top_logprobs[entry.rank - 1] == pytest.approx(entry.logprob, abs=1e-6)


def test_tokens_are_as_frequent_as_their_logprobs(loaded: LoadedModel) -> None:
    """A thousand requests with the same prompt and different seeds generate one token each."""
    replica = Replica(loaded)
    count = 1000
    numbers = [
        replica.add(
            PROMPT,
            SamplingParams(
                temperature=0.6,
                top_k=5,
                seed=seed,
                max_tokens=1,
                logprobs=5,
                logprobs_of="sampling",
            ),
        )
        for seed in range(count)
    ]
    replica.run()
    (first, *_) = logprobs_of(replica, numbers[0])
    drawn = Counter(replica.tokens(number)[0] for number in numbers)
    assert set(drawn) <= set(first.top_ids)
    for token, logprob in zip(first.top_ids, first.top_logprobs, strict=True):
        share = math.exp(logprob)
        spread = math.sqrt(count * share * (1 - share))
        assert abs(drawn[token] - count * share) < 4.5 * spread + 1


def test_logprobs_do_not_depend_on_other_requests_in_the_batch(loaded: LoadedModel) -> None:
    requests = [
        SamplingParams(temperature=0.8, logprobs=3, logprobs_of="both", seed=1, max_tokens=6),
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=6),
        SamplingParams(top_p=0.7, logprobs=4, logprobs_of="sampling", seed=2, max_tokens=6),
    ]
    crowd = Replica(loaded)
    numbers = [crowd.add(PROMPT, params) for params in requests]
    crowd.run()
    for number, params in zip(numbers, requests, strict=True):
        alone = Replica(loaded)
        only = alone.add(PROMPT, params)
        alone.run()
        for ours, theirs in zip(logprobs_of(crowd, number), logprobs_of(alone, only), strict=True):
            assert ours.top_ids == theirs.top_ids
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)
            assert ours.drawn_logprobs == pytest.approx(theirs.drawn_logprobs, abs=1e-4)
