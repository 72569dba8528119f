"""Models with recurrent layers whose K/V and states are moved: from one engine to another. The
answers are those of an engine that computes alone, and they are not if another state arrives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine_core.requests.request import Request
from engine_core.schedule.checkpointing import Checkpointing
from engine_core.schedule.plan import Schedule
from protocol.config.worker import WorkerConfig
from protocol.engine.sampling import SamplingParams
from protocol.worker.kv import KVFetch
from tests.support.checkpoints import write_directory
from tests.support.eager import load, some_tokens
from tests.support.family_models import HYBRIDS, random_model
from tests.support.replica import Replica
from worker.kv.transfer.exports import Exports
from worker.kv.transfer.fetcher import Fetcher
from worker.loading.decoder import LoadedModel

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
BLOCK_TOKENS, NUM_CHECKPOINTS = 4, 6
PROMPTS = [some_tokens(count, seed=count) for count in (23, 9, 34, 17)]
ATOL = 1e-4


@pytest.fixture(scope="module", params=HYBRIDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    model = random_model(request.param)
    return load(write_directory(tmp_path_factory.mktemp("hybrid"), model))


def a_replica(loaded: LoadedModel, **moves: Any) -> Replica:
    return Replica(
        loaded,
        token_budget=16,
        max_slots=3,
        num_blocks=60,
        num_checkpoints=NUM_CHECKPOINTS,
        block_tokens=BLOCK_TOKENS,
        options={"kv_load_tokens": 1, "state_interval": 16},
        moves=WorkerConfig(model="", **moves) if moves else None,
    )


def num_moved(prompt: Sequence[int]) -> int:
    """Return how many tokens of a prompt have K/V and a state that can be moved."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def is_like(alone: Replica, replica: Replica, numbers: Sequence[int]) -> bool:
    """Return whether the answers to PROMPTS have the tokens and the logprobs of `alone`."""
    for number, expected in zip(numbers, range(len(PROMPTS)), strict=True):
        if replica.tokens(number) != alone.tokens(expected):
            return False
        found, right = (
            torch.tensor([entry.logprob for output in outputs for entry in output.logprobs])
            for outputs in (replica.outputs[number], alone.outputs[expected])
        )
        if not (found - right).abs().max() <= ATOL:  # it may be NaN
            return False
    return True


def plain(loaded: LoadedModel) -> Replica:
    replica = a_replica(loaded)
    for answer in replica.answers(PROMPTS, GREEDY):
        assert len(answer) == GREEDY.max_tokens
    return replica


# ---- from one engine to another
Pair = tuple[Replica, Replica, list[int]]


def handed_over(loaded: LoadedModel, folder: Path, mover: str, stack: ExitStack) -> Pair:
    """Let one engine compute PROMPTS and another one answer them. Return both, and the numbers of
    the second one's requests."""
    address = f"ipc://{folder}/kv"
    exporting = {"kv_export": True, "kv_address": address, "kv_mover": mover}
    p = stack.enter_context(closing(a_replica(loaded, **exporting)))
    d = stack.enter_context(closing(a_replica(loaded, kv_mover=mover)))
    handles = []
    for prompt in PROMPTS:
        number = p.add(prompt, replace(GREEDY, max_tokens=1), kv_readers=1)
        p.run()
        handles.append(p.outputs[number][-1].kv_handle)
    numbers = [
        d.add(prompt, GREEDY, kv_handle=handle)
        for prompt, handle in zip(PROMPTS, handles, strict=True)
    ]
    d.run()
    return p, d, numbers


@pytest.mark.parametrize("mover", ["shm", "zmq"])
def test_a_prompt_that_another_engine_has_computed_is_answered_as_by_one(
    loaded: LoadedModel, tmp_path: Path, mover: str
) -> None:
    with ExitStack() as stack:
        p, d, numbers = handed_over(loaded, tmp_path, mover, stack)
        assert is_like(plain(loaded), d, numbers)
        assert d.engine.stats().num_fetched_tokens == sum(map(num_moved, PROMPTS))
        assert p.engine.stats().num_computed_tokens == sum(map(num_moved, PROMPTS))
        while p.engine.stats().leases:
            assert p.transfers is not None
            p.transfers.wait()
            p.receive_report()
        for replica in (p, d):
            replica.engine.check()
            assert replica.engine.stats().held_checkpoints == 0


def export_another(exports: Exports, lease: bytes, reader: bytes) -> int | None:
    number = OPEN_STATE(exports, lease, reader)
    return None if number is None else number % NUM_CHECKPOINTS + 1


def start_with_another(checkpointing: Checkpointing, request: Request, step: Schedule) -> None:
    """Start with another checkpoint than the one that the fetch has filled."""
    READ_KEPT(checkpointing, request, step)
    step.checkpoints[request] = step.checkpoints[request] % NUM_CHECKPOINTS + 1


def fetch_into_another(fetcher: Fetcher, fetch: KVFetch) -> None:
    assert fetch.checkpoint is not None
    FETCH(fetcher, replace(fetch, checkpoint=fetch.checkpoint % NUM_CHECKPOINTS + 1))


OPEN_STATE, READ_KEPT, FETCH = Exports.open_state, Checkpointing.read_kept, Fetcher.fetch
MUTATIONS: dict[str, tuple[Any, str, Callable[..., object]]] = {
    "another checkpoint is exported": (Exports, "open_state", export_another),
    "the request starts with another checkpoint": (
        Checkpointing,
        "read_kept",
        start_with_another,
    ),
    "another checkpoint is filled": (Fetcher, "fetch", fetch_into_another),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_another_state_than_that_of_the_prompt_gives_wrong_answers(
    loaded: LoadedModel, tmp_path: Path, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = plain(loaded)
    monkeypatch.setattr(*MUTATIONS[mutation])
    with ExitStack() as stack:
        _, d, numbers = handed_over(loaded, tmp_path, "zmq", stack)
        assert not is_like(alone, d, numbers)
