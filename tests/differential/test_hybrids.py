"""Models with recurrent layers in the whole engine: the answers are those of transformers with
preemptions, reused slots and drafts, and they are not if a state is reset or restored wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from protocol.config.worker import PoolingOption
from protocol.engine.sampling import SamplingParams
from protocol.worker.steps import SlotInit
from tests.support.checkpoints import VOCAB, write_directory
from tests.support.eager import BLOCK_TOKENS, EagerStepper, expected, some_tokens
from tests.support.family_models import RECURRENT, random_model
from tests.support.kernels import native_kernels
from tests.support.replica import Replica, load
from worker.attention.select import select_attention
from worker.errors import UnusableModel
from worker.loading.decoder import LoadedModel
from worker.loading.header import read_any_header
from worker.slots.states import Ints, StepStates
from worker.slots.table import SlotField, SlotTable

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ALLOWED = [5, 6, 7]
"""With so few tokens, answers repeat themselves, so n-grams propose drafts that are right."""
ATOL = 1e-4


def load_pair(path: Path, model_type: str) -> tuple[Any, LoadedModel]:
    """Return a model as transformers made it, and as the worker has loaded it."""
    theirs = random_model(model_type)
    return theirs, load(write_directory(path, theirs))


def load_compiled_pair(path: Path, model_type: str, **changes: Any) -> tuple[Any, LoadedModel]:
    """Return a model as `load_pair` does, with packed weights on the compiled kernels, and with a
    hidden size that they support. `changes` are those of its config."""
    theirs = random_model(model_type, hidden_size=192, **changes)
    directory = write_directory(path, theirs)
    return theirs, load(directory, kernels=native_kernels(), weights="packed")


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, LoadedModel]:
    return load_pair(tmp_path_factory.mktemp("hybrid"), request.param)


@pytest.fixture(scope="module", params=list(product(RECURRENT, [False, True])), ids=str)
def any_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, LoadedModel]:
    """Return a model on torch's kernels and on the compiled ones."""
    model_type, is_compiled = request.param
    load_any = load_compiled_pair if is_compiled else load_pair
    return load_any(tmp_path_factory.mktemp("hybrid"), model_type)


def is_likeliest(
    theirs: Any, prompt: list[int], answer: list[int], allowed: Sequence[int] = range(VOCAB)
) -> bool:
    """Return whether each token of the answer is the most likely one of transformers among
    `allowed`. A token may differ from it if the logits of both are almost equal."""
    logits = expected(theirs, prompt + answer)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert set(answer) <= set(allowed)
    return bool((logits[:, list(allowed)].amax(1) - chosen).max() <= ATOL)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_answers_are_those_of_transformers_with_preemptions_and_reused_slots(
    any_pair: tuple[Any, LoadedModel], prefix_cache: bool
) -> None:
    theirs, loaded = any_pair
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
        assert is_likeliest(theirs, prompt, answer)


def test_answers_with_drafts_are_those_of_transformers(any_pair: tuple[Any, LoadedModel]) -> None:
    """Only three tokens are allowed, so that the answers repeat themselves: n-grams propose drafts,
    and some of them are right."""
    theirs, loaded = any_pair
    params = replace(GREEDY, max_tokens=60, allowed_token_ids=ALLOWED)
    prompts = [some_tokens(7, seed=seed) for seed in range(6)]
    replica = Replica(loaded, block_tokens=4, max_slots=4, options={"speculation": "ngram"})
    answers = replica.answers(prompts, params)
    stats = replica.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for prompt, answer in zip(prompts, answers, strict=True):
        assert is_likeliest(theirs, prompt, answer, ALLOWED)


def two_turns(loaded: LoadedModel) -> tuple[Replica, list[list[int]]]:
    """Compute two turns of three conversations, with preemptions and drafts. Return the replica,
    and the prompts of its requests."""
    params = replace(GREEDY, allowed_token_ids=ALLOWED, logprobs=0)
    replica = Replica(
        loaded, block_tokens=4, max_slots=2, num_blocks=26, options={"speculation": "ngram"}
    )
    prompts = [some_tokens(7 + 6 * seed, seed=seed) for seed in range(3)]
    answers = replica.answers(prompts, params)
    prompts += [
        prompt + answer + some_tokens(5, seed=9)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    replica.answers(prompts[3:], params)
    return replica, prompts


def are_right(theirs: Any, replica: Replica, prompts: Sequence[list[int]]) -> bool:
    """Return whether the answers have the tokens and the logprobs of transformers."""
    for number, prompt in enumerate(prompts):
        answer = replica.tokens(number)
        if len(answer) != GREEDY.max_tokens:
            return False  # its logits were not finite
        if not is_likeliest(theirs, prompt, answer, ALLOWED):
            return False
        logits = expected(theirs, prompt + answer)[len(prompt) - 1 : -1]
        right = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        entries = [entry.logprob for output in replica.outputs[number] for entry in output.logprobs]
        if (torch.tensor(entries) - right).abs().max() > ATOL:
            return False
    return True


def restore_nothing(table: SlotTable, field: SlotField, inits: Sequence[SlotInit]) -> None:
    """Keep what the slot's last request left."""


def restore_zeros(table: SlotTable, field: SlotField, inits: Sequence[SlotInit]) -> None:
    for init in inits:
        table[field.name][init.slot] = 0


def restore_another(table: SlotTable, field: SlotField, inits: Sequence[SlotInit]) -> None:
    kept = table.checkpoints[field.name]
    for init in inits:
        number = init.checkpoint and init.checkpoint % (len(kept) - 1) + 1
        table[field.name][init.slot] = kept[number]


def accept_nothing(states: StepStates, accepted: Ints) -> None:
    """Forget the drafts that were right."""


def save_late(states: StepStates, row: int) -> list[tuple[int, int]]:
    """Save each state one token late, if the row has another one."""
    last = int(states.kept[row])
    return [(min(count + 1, last), number) for count, number in SAVES(states, row)]


SAVES = StepStates.saves
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "nothing is restored": (SlotTable, "_restore", restore_nothing),
    "zeros are restored": (SlotTable, "_restore", restore_zeros),
    "another checkpoint is restored": (SlotTable, "_restore", restore_another),
    "accepted drafts are forgotten": (StepStates, "accept", accept_nothing),
    "states are saved late": (StepStates, "saves", save_late),
}


def test_two_turns_are_right(any_pair: tuple[Any, LoadedModel]) -> None:
    theirs, loaded = any_pair
    replica, prompts = two_turns(loaded)
    assert are_right(theirs, replica, prompts)
    stats = replica.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("pair", "mutation"), [*zip(RECURRENT, cycle(MUTATIONS), strict=False)], indirect=["pair"]
)
def test_a_state_that_is_not_reset_or_kept_right_gives_wrong_answers(
    pair: tuple[Any, LoadedModel], mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `test_two_turns_are_right` can fail: for each family, and for each mistake. A mistake is
    made with three families or more."""
    theirs, loaded = pair
    kind, name, wrong = MUTATIONS[mutation]
    monkeypatch.setattr(kind, name, wrong)
    assert not are_right(theirs, *two_turns(loaded))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("lfm2", {}),
        ("lfm2", {"conv_bias": True}),
        ("granitemoehybrid", {"num_local_experts": 0, "shared_intermediate_size": 160}),
    ],
    ids=str,
)
def test_any_steps_give_the_same_bits_on_compiled_kernels(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    """Of models all of whose linears are packed, and that have no experts."""
    _, loaded = load_compiled_pair(tmp_path, model_type, **changes)
    kernels = loaded.model.kernels
    attention = select_attention(BLOCK_TOKENS, dtype=torch.float32, kernels=kernels)
    prompts = [some_tokens(61), some_tokens(40, seed=3)]
    steps = [(7, 1), (1, 1), (30, 20), (1, 1), (2, 9), *[(1, 1)] * 8, *[(1, 0)] * 12]
    together = EagerStepper(loaded, prompts, attention).run(steps)
    for prompt, logits in zip(prompts, together, strict=True):
        alone = EagerStepper(loaded, [prompt], attention).run([(len(prompt),)])[0]
        assert torch.equal(logits, alone)


@pytest.mark.parametrize("pooling", ["last", "mean", "rank"])
def test_vectors_and_scores_are_refused(tmp_path: Path, pooling: PoolingOption) -> None:
    """Inputs that are encoded have no slots, so they would have no states."""
    path = write_directory(tmp_path, random_model("lfm2"))
    with pytest.raises(UnusableModel, match="recurrent layers, so it has no vectors or scores"):
        read_any_header(path, pooling)
    assert read_any_header(path).spec.architecture == "Lfm2ForCausalLM"
