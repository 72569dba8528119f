"""Models with recurrent layers in the whole engine: the answers are those of transformers with
preemptions, reused slots and drafts, and for prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from protocol.engine.sampling import SamplingParams
from tests.support.checkpoints import VOCAB, write_directory
from tests.support.eager import expected, load, some_tokens
from tests.support.family_models import HYBRIDS, random_model
from tests.support.replica import Replica
from worker.loading.decoder import LoadedModel

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ATOL = 1e-4


@pytest.fixture(scope="module", params=HYBRIDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, LoadedModel]:
    """Return a model as transformers made it, and as the worker has loaded it."""
    theirs = random_model(request.param)
    return theirs, load(write_directory(tmp_path_factory.mktemp("hybrid"), theirs))


def check(
    theirs: Any, prompt: list[int], answer: list[int], allowed: Sequence[int] = range(VOCAB)
) -> None:
    """Check that each token of the answer is the most likely one of transformers among `allowed`. A
    token may differ from it if the logits of both are almost equal."""
    logits = expected(theirs, prompt + answer)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert set(answer) <= set(allowed)
    assert (logits[:, list(allowed)].amax(1) - chosen).max() <= ATOL


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_answers_are_those_of_transformers_with_preemptions_and_reused_slots(
    pair: tuple[Any, LoadedModel], prefix_cache: bool
) -> None:
    theirs, loaded = pair
    prompts = [some_tokens(count, seed=count) for count in (23, 9, 30, 16, 20)]
    replica = Replica(
        loaded,
        token_budget=16,
        max_slots=3,
        num_blocks=21,
        block_tokens=4,
        prefix_cache=prefix_cache,
    )
    answers = replica.answers(prompts, GREEDY)
    assert replica.engine.stats().num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        check(theirs, prompt, answer)


def test_answers_with_drafts_are_those_of_transformers(pair: tuple[Any, LoadedModel]) -> None:
    """Only three tokens are allowed, so that the answers repeat themselves: n-grams propose drafts,
    and some of them are right."""
    theirs, loaded = pair
    allowed = [5, 6, 7]
    params = replace(GREEDY, max_tokens=60, allowed_token_ids=allowed)
    prompts = [some_tokens(7, seed=seed) for seed in range(6)]
    replica = Replica(loaded, block_tokens=4, max_slots=4, options={"speculation": "ngram"})
    answers = replica.answers(prompts, params)
    stats = replica.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for prompt, answer in zip(prompts, answers, strict=True):
        check(theirs, prompt, answer, allowed)
