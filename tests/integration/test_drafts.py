"""A tiny model gives the same answers to forty prompts with and without drafts."""

from __future__ import annotations

import random

import pytest

from protocol.engine.messages import Output
from protocol.engine.sampling import SamplingParams
from tests.support.drafted import replica_of
from tests.support.replica import Replica, load
from tests.support.tiny_checkpoint import VOCAB, write_tiny_llama
from worker.loading.decoder import LoadedModel

NUM_PROMPTS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny_llama(tmp_path_factory.mktemp("draft"), seed=4))


def prompts() -> list[list[int]]:
    """Return prompts, half of which repeat themselves."""
    chance = random.Random(5)
    lengths = [chance.randrange(2, 12) for _ in range(NUM_PROMPTS // 2)]
    bases = [[chance.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return [tokens for base in bases for tokens in (base, (base * 5)[:40])]


def logprobs(outputs: list[Output]) -> list[float]:
    return [entry.logprob for output in outputs for entry in output.logprobs]


def answers(replica: Replica, params: SamplingParams) -> list[list[int]]:
    found = replica.answers(prompts(), params)
    assert len(found) == NUM_PROMPTS
    return found


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth", [1, 2])
def test_forty_answers_are_the_same_with_drafts(
    loaded: LoadedModel, other: LoadedModel, params: SamplingParams, depth: int
) -> None:
    plain = replica_of(loaded, "none", steps_in_flight=depth)
    expected = answers(plain, params)
    for speculation, draft in (("ngram", None), ("model", loaded), ("model", other)):
        fast = replica_of(loaded, speculation, draft=draft, steps_in_flight=depth)
        assert answers(fast, params) == expected
        for number in range(NUM_PROMPTS):
            assert logprobs(fast.outputs[number]) == pytest.approx(
                logprobs(plain.outputs[number]), abs=1e-4
            )
        stats = fast.engine.stats()
        assert stats.num_draft_tokens > 0
        if draft is loaded and params is GREEDY:
            assert stats.num_accepted_tokens > 0.98 * stats.num_draft_tokens
            assert stats.num_steps < plain.engine.stats().num_steps / 2


def test_cached_prompt_tokens_can_be_followed_by_drafts(loaded: LoadedModel) -> None:
    replica = replica_of(loaded, "model", steps_in_flight=2, block_tokens=4)
    (first,) = replica.answers([prompts()[1]], GREEDY)
    before = replica.engine.stats()
    replica.answers([[*prompts()[1], *first]], GREEDY)
    after = replica.engine.stats()
    assert after.num_cached_tokens > 40
    drafts = after.num_draft_tokens - before.num_draft_tokens
    assert drafts > 12
    assert after.num_accepted_tokens - before.num_accepted_tokens == drafts
