"""Models with recurrent layers whose K/V and states are moved: from one engine to another, or to a
tier and back. The answers are those of an engine that computes everything, and they are not if
another state arrives.

Each family has one turn in each table: of movers, of tiers, and of mutations. So each row of a
table is used with several families, and each family moves its K/V and states in both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine_core.kv import tiers
from engine_core.kv.tiers import TierIndex
from engine_core.requests.request import Request
from engine_core.schedule.checkpointing import Checkpointing
from engine_core.schedule.plan import Schedule
from protocol.config.worker import WorkerConfig
from protocol.engine.sampling import SamplingParams
from protocol.tools.start_facts import GIB
from protocol.worker import kv
from protocol.worker.kv import KVFetch, KVStore, TierSource
from tests.support.checkpoints import write_directory
from tests.support.eager import load, some_tokens
from tests.support.family_models import RECURRENT, random_model
from tests.support.replica import Replica
from worker.kv.tiers import reader as tier_reader
from worker.kv.tiers.reader import TierReader
from worker.kv.transfer.exports import Exports
from worker.kv.transfer.fetcher import Fetcher
from worker.loading.decoder import LoadedModel

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
BLOCK_TOKENS, NUM_CHECKPOINTS = 4, 6
PROMPTS = [some_tokens(count, seed=count) for count in (23, 9, 34, 17)]
ATOL = 1e-4


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> Replica:
    """Return an engine that has computed all answers itself."""
    replica = a_replica(loaded)
    for answer in replica.answers(PROMPTS, GREEDY):
        assert len(answer) == GREEDY.max_tokens
    return replica


def in_turn(name: str, values: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test with each family, and with `values` in turn as its parameter `name`."""
    rows = [*zip(RECURRENT, cycle(values), strict=False)]
    return pytest.mark.parametrize(("loaded", name), rows, indirect=["loaded"])


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


@in_turn("mover", ["shm", "zmq"])
def test_a_prompt_that_another_engine_has_computed_is_answered_as_by_one(
    loaded: LoadedModel, alone: Replica, tmp_path: Path, mover: str
) -> None:
    with ExitStack() as stack:
        p, d, numbers = handed_over(loaded, tmp_path, mover, stack)
        assert is_like(alone, d, numbers)
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


@in_turn("mutation", MUTATIONS)
def test_another_state_than_that_of_the_prompt_gives_wrong_answers(
    loaded: LoadedModel,
    alone: Replica,
    tmp_path: Path,
    mutation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*MUTATIONS[mutation])
    with ExitStack() as stack:
        _, d, numbers = handed_over(loaded, tmp_path, "zmq", stack)
        assert not is_like(alone, d, numbers)


# ---- through the tiers
def tier_options(loaded: LoadedModel, folder: Path, tier: str) -> dict[str, Any]:
    """Return the options of a worker with one tier, which is large enough for all of PROMPTS."""
    if tier == "disk":
        return {"kv_disk": str(folder / "kv")}
    return {"kv_host_gib": 100 * 4 * (loaded.spec.state_items + 10_000) / GIB}


def await_stored(replica: Replica, tier: str, count: int) -> None:
    """Wait until the tier has stored so many blocks and states."""
    assert replica.transfers is not None
    while replica.engine.stats().num_tier_stored.get(tier, 0) < count:
        replica.transfers.wait()
        replica.receive_report()


def through_a_tier(
    loaded: LoadedModel, folder: Path, tier: str, stack: ExitStack, num_keys: int = len(PROMPTS)
) -> tuple[Replica, list[int]]:
    """Compute PROMPTS, let the cache lose them, and answer them with what the tier has. Return the
    replica that does, and the numbers of its requests.

    num_keys   number of different keys of the states. A state is not stored if the tier has its key
    """
    options = tier_options(loaded, folder, tier)
    replica = a_replica(loaded, **options)
    for prompt in PROMPTS:
        replica.add(prompt, replace(GREEDY, max_tokens=1))
    replica.run()
    if tier == "disk":
        replica.close()  # writes what waits
        replica = stack.enter_context(closing(a_replica(loaded, **options)))
    else:
        stack.enter_context(closing(replica))
        num_blocks = sum(len(prompt) // BLOCK_TOKENS for prompt in PROMPTS)
        await_stored(replica, tier, num_blocks + num_keys)
        pool = replica.engine.scheduler.pool
        pool.release(pool.allocate(pool.num_free) or [])
        replica.cache.rows[:, 1:].fill_(255)  # NaN
        assert replica.states is not None
        replica.states.states[1:] = float("nan")
    numbers = [replica.add(prompt, GREEDY) for prompt in PROMPTS]
    replica.run()
    return replica, numbers


@in_turn("tier", ["disk", "host"])
def test_a_prompt_from_a_tier_is_answered_as_if_it_were_computed(
    loaded: LoadedModel, alone: Replica, tmp_path: Path, tier: str
) -> None:
    with ExitStack() as stack:
        replica, numbers = through_a_tier(loaded, tmp_path, tier, stack)
        assert is_like(alone, replica, numbers)
        stats = replica.engine.stats()
        assert stats.num_fetched_tokens == sum(map(num_moved, PROMPTS))
        assert stats.num_fetches_failed == {}
        assert stats.held_checkpoints == 0
        for number, prompt in zip(numbers, PROMPTS, strict=True):
            usage = replica.outputs[number][-1].usage
            assert usage is not None
            assert usage.cached_tokens == num_moved(prompt)


def store_another(index: TierIndex, content: bytes, checkpoint: int) -> KVStore | None:
    return STORE_STATE(index, content, checkpoint % NUM_CHECKPOINTS + 1)


def load_into_another(reader: TierReader, fetch: KVFetch, source: TierSource) -> None:
    assert fetch.checkpoint is not None
    other = fetch.checkpoint % NUM_CHECKPOINTS + 1
    TIER_FETCH(reader, replace(fetch, checkpoint=other), source)


def of_another_block(content: bytes) -> bytes:
    """Return the same key for the states after all blocks."""
    return bytes(len(content)) + STATE_KEY(content)[len(content) :]


STORE_STATE, TIER_FETCH = TierIndex.store_state_command, TierReader.fetch
STATE_KEY = kv.state_key
ONE_KEY = "states of different blocks have one key"
TIER_MUTATIONS: dict[str, list[tuple[Any, str, Callable[..., object]]]] = {
    "another checkpoint is stored": [(TierIndex, "store_state_command", store_another)],
    "another checkpoint is filled": [(TierReader, "fetch", load_into_another)],
    ONE_KEY: [(module, "state_key", of_another_block) for module in (tiers, tier_reader)],
}


@in_turn("mutation", TIER_MUTATIONS)
def test_another_state_from_a_tier_gives_wrong_answers(
    loaded: LoadedModel,
    alone: Replica,
    tmp_path: Path,
    mutation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for change in TIER_MUTATIONS[mutation]:
        monkeypatch.setattr(*change)
    num_keys = 1 if mutation == ONE_KEY else len(PROMPTS)
    with ExitStack() as stack:
        replica, numbers = through_a_tier(loaded, tmp_path, "host", stack, num_keys)
        assert not is_like(alone, replica, numbers)
