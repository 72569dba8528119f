"""Models whose classes in transformers compute with caches of their own: the logits are those of
one forward pass however the work is cut, and answers are those of `generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from protocol.engine.sampling import SamplingParams
from tests.support.checkpoints import write_directory
from tests.support.eager import expected, some_tokens
from tests.support.own_cache_models import ARCHITECTURES, random_own_cache
from tests.support.replica import Replica, load
from worker.batch.batch import BatchRows
from worker.errors import UnusableModel
from worker.loading.decoder import LoadedModel
from worker.models.base import RowModel
from worker.models.hf_own_cache import (
    FIRST,
    NEXT,
    OwnCacheDecoder,
    continues_in_chunks,
    tried_model,
)
from worker.spec.architectures import TransformersSpec

NUM_TOKENS = 61
ATOL = 5e-4
"""Of logits up to 10. Some classes compute several tokens with another formula than single ones."""
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def rows_of(*spans: tuple[int, int, int]) -> BatchRows:
    """Return the rows (slot, start, count) of a step that does not sample."""
    slots, starts, counts = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    none = np.empty(0, np.int64)
    known = starts + counts
    return BatchRows(slots, starts, counts, known, counts.cumsum(), none, none, none)


def logits_of(
    loaded: LoadedModel, requests: list[list[int]], steps: list[list[int]]
) -> list[torch.Tensor]:
    """Return the logits of each request, [tokens, V], which has the slot of its index.

    steps   for each step the number of tokens of each request
    """
    model = loaded.model
    assert isinstance(model, RowModel)
    states: dict[int, object] = {}
    done, parts = [0] * len(requests), [[] for _ in requests]  # type: ignore[var-annotated]
    for counts in steps:
        spans = [(slot, done[slot], count) for slot, count in enumerate(counts) if count]
        ids = [token for slot, at, n in spans for token in requests[slot][at : at + n]]
        hidden = model.compute_rows(torch.tensor(ids), rows_of(*spans), states)
        for (slot, _, count), part in zip(
            spans, model.logits(hidden).split([n for _, _, n in spans]), strict=True
        ):
            parts[slot].append(part)
            done[slot] += count
    return [torch.cat(each) for each in parts]


def atol_of(logits: torch.Tensor) -> float:
    return ATOL * max(1.0, float(logits.abs().max()) / 5)


@dataclass(frozen=True)
class Pair:
    """A model as transformers made it, and as the worker has loaded it."""

    theirs: Any
    loaded: LoadedModel


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    theirs = random_own_cache(request.param)
    return Pair(theirs, load(write_directory(tmp_path_factory.mktemp("own"), theirs)))


def test_logits_are_those_of_transformers_in_chunks_beside_another_request(pair: Pair) -> None:
    theirs, loaded = pair.theirs, pair.loaded
    requests = [some_tokens(NUM_TOKENS), some_tokens(30, seed=1)]
    steps = [[20, 0], [1, 17], [1, 1], [39, 12]]
    for ours, tokens in zip(logits_of(loaded, requests, steps), requests, strict=True):
        logits = expected(theirs, tokens)
        torch.testing.assert_close(ours, logits, rtol=0, atol=atol_of(logits))


def test_greedy_answers_are_those_of_transformers_with_preemptions_and_reused_slots(
    pair: Pair,
) -> None:
    """A token may differ from the one that transformers chooses if the logits of both are almost
    equal."""
    theirs, loaded = pair.theirs, pair.loaded
    prompts = [some_tokens(count, seed=count) for count in (23, 9, 30, 16, 20)]
    replica = Replica(
        loaded, token_budget=16, max_slots=3, num_blocks=20, block_tokens=4, prefix_cache=False
    )
    answers = replica.answers(prompts, PARAMS)
    assert replica.engine.stats().num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = expected(theirs, prompt + answer)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= atol_of(logits)


def test_a_released_slot_drops_its_cache_and_an_aborted_request_leaves_nothing(
    tmp_path: Path,
) -> None:
    loaded = load(write_directory(tmp_path, random_own_cache("MiniMaxForCausalLM")))
    replica = Replica(loaded, token_budget=16, prefix_cache=False)
    states = replica.runner.components.slots.states
    first = replica.add(some_tokens(20), PARAMS)
    second = replica.add(some_tokens(9, seed=1), PARAMS)
    for _ in range(4):
        replica.step()
    assert len(states) == 2
    replica.abort(first)
    replica.run()
    replica.abort(second)
    third = replica.add(some_tokens(5, seed=2), PARAMS)
    replica.run()
    assert len(replica.tokens(third)) == PARAMS.max_tokens
    assert len(states) <= 1  # a slot is released by the plan after the answer's last step


def test_the_size_of_the_caches_is_measured(tmp_path: Path) -> None:
    """MiniMax has keys and values in its layers with attention, and recurrent states in the
    others."""
    theirs = random_own_cache("MiniMaxForCausalLM")
    spec = load(write_directory(tmp_path, theirs)).spec
    assert isinstance(spec, TransformersSpec)
    assert spec.own_cache is not None
    kinds = theirs.config.layer_types
    config = theirs.config
    per_layer = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert spec.own_cache.token_items == per_layer * kinds.count("full_attention")
    assert spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim == spec.own_cache.token_items


@dataclass
class SumsOutput(ModelOutput):
    """The output of `Sums`, whose cache is the sum of all embeddings so far."""

    last_hidden_state: torch.Tensor | None = None
    past_key_values: torch.Tensor | None = None


class Sums(nn.Module):
    """A decoder whose hidden states are sums of all embeddings so far.

    forgets         it ignores the cache
    single          it continues with single tokens only
    returns_cache   its output has the cache
    """

    def __init__(
        self, *, forgets: bool = False, single: bool = False, returns_cache: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.returns_cache = returns_cache
        self.forgets = forgets
        self.single = single

    def forward(
        self, input_ids: torch.Tensor, past_key_values: torch.Tensor | None = None, **_: object
    ) -> SumsOutput:
        hidden = self.embedding(input_ids).cumsum(1)
        if past_key_values is not None and not self.forgets:
            if self.single and input_ids.shape[1] > 1:
                raise ValueError("one token at a time")
            hidden = hidden + past_key_values
        return SumsOutput(hidden, hidden[:, -1:] if self.returns_cache else None)


def test_a_class_that_continues_with_single_tokens_only_gets_single_tokens() -> None:
    ids = torch.arange(FIRST + NEXT) % 8
    assert continues_in_chunks(OwnCacheDecoder(Sums(), "Sums"), ids)
    assert not continues_in_chunks(OwnCacheDecoder(Sums(single=True), "Sums"), ids)


def test_a_class_that_forgets_its_state_is_refused() -> None:
    decoder = OwnCacheDecoder(Sums(forgets=True), "Sums")
    with pytest.raises(UnusableModel, match="other results if it continues from its cache"):
        continues_in_chunks(decoder, torch.arange(FIRST + NEXT) % 8)


class Headed(nn.Module):
    """A model of `Sums` and a head.

    reads_ids   the logits depend on the token ids, too
    """

    def __init__(self, *, reads_ids: bool) -> None:
        super().__init__()
        self.decoder = Sums()
        self.head = nn.Linear(4, 8, bias=False)
        self.reads_ids = reads_ids

    def get_decoder(self) -> nn.Module:
        return self.decoder

    base_model = property(get_decoder)

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutputWithPast:
        logits = self.head(self.decoder(input_ids).last_hidden_state)
        if self.reads_ids:
            logits = logits * (input_ids[..., None] - 3)
        return CausalLMOutputWithPast(logits=logits)


def test_a_class_whose_logits_need_more_than_hidden_states_is_refused() -> None:
    ids = torch.arange(FIRST + NEXT) % 8
    spec = TransformersSpec(
        architecture="Headed",
        vocab_size=8,
        hidden=4,
        context_tokens=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        num_parameters=64,
        largest_tensor=32,
        inner=4,
        config="{}",
    )
    assert tried_model(spec, Headed(reads_ids=False), ids).spec.own_cache is not None
    with pytest.raises(UnusableModel, match="other logits of its own hidden states"):
        tried_model(spec, Headed(reads_ids=True), ids)


def test_a_class_that_keeps_its_state_in_its_modules_is_refused() -> None:
    decoder = OwnCacheDecoder(Sums(returns_cache=False), "Sums")
    with pytest.raises(UnusableModel, match="it has no cache"):
        continues_in_chunks(decoder, torch.arange(FIRST + NEXT) % 8)


@pytest.mark.parametrize("start", [0, 7])
def test_a_row_that_does_not_continue_its_slot_is_refused(tmp_path: Path, start: int) -> None:
    loaded = load(write_directory(tmp_path, random_own_cache("MiniMaxForCausalLM")))
    model, ids = loaded.model, torch.tensor([5, 6])
    assert isinstance(model, RowModel)
    states: dict[int, object] = {}
    if start == 0:
        model.compute_rows(ids, rows_of((3, 0, 2)), states)
    with pytest.raises(ValueError, match=f"slot 3 does not continue at position {start}"):
        model.compute_rows(ids, rows_of((3, start, 2)), states)
