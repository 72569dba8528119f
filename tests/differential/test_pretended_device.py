"""On a device that obeys the rules of CUDA, the worker gives the tokens of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protocol.sampling import SamplingParams
from protocol.steps import StepResult
from tests.support.fused_twins import FusedAttention, FusedTwins
from tests.support.plans import slot_init, step_plan
from tests.support.pretended_device import DEVICE, DeviceFault, PretendedDevice, content
from tests.support.random_decoder import ROLES, RandomTensors, attention, mlp, model_spec
from tests.support.recording import (
    BLOCK_TOKENS,
    MAX_LEN,
    MAX_SLOTS,
    NUM_BLOCKS,
    Recording,
    make_requests,
    record,
    replay,
    tiny_model,
)
from tests.support.replica import Arrived
from tests.support.tiny_model import new_slots
from worker.attention.base import Attention
from worker.attention.torch_paged import TorchPagedAttention
from worker.batch.decode_graph import GraphDecode
from worker.debug.slot_registry import Poison
from worker.kernels.reference import TorchKernels
from worker.kv.blocks import CacheBlocks, cache_blocks
from worker.kv.cache import KVCache
from worker.loading.weights import load_weights
from worker.models.decoder import DecoderModel
from worker.models.load import LoadedModel, load_model
from worker.models.spec import LayerSpec, ModelSpec
from worker.models.tensors import ModelTensors, names_of
from worker.sampling.sampler import sample
from worker.slots.fields import slot_fields
from worker.step import Runner

pytestmark = pytest.mark.long

FLOAT = torch.float32
NUM_REQUESTS = 80
GREEDY = SamplingParams(temperature=0.0)
LAUNCHES, LAUNCHES_PER_LAYER = 40, 10
"""Most launches of a greedy decode step: some, and some for each layer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Recording:
    return record(tiny_model(folder), make_requests(15, NUM_REQUESTS))


@pytest.fixture(scope="module")
def expected(recorded: Recording) -> list[StepResult]:
    return list(replay(recorded, recorded.steps))


@dataclass(frozen=True)
class DeviceWorker:
    """A runner on the device, and its cache."""

    runner: Runner
    cache: KVCache
    blocks: CacheBlocks

    def write(self, arrived: Arrived) -> None:
        """Write K/V that another engine has computed, as a mover does."""
        pieces = torch.cat([arrived.k, arrived.v]).flatten(2).contiguous().view(torch.uint8)
        ids = np.array(arrived.blocks)
        self.blocks.wait_for(self.blocks.fence())
        self.blocks.put(0, self.blocks.num_rows, ids, pieces.numpy())
        self.blocks.synchronize()


@contextmanager
def on_device(
    folder: Path, *, kind: str = "fused", poison: Poison | None = None
) -> Iterator[tuple[PretendedDevice, DeviceWorker]]:
    """Yield the device, and a worker on it with the model in `folder`.

    kind   "torch": torch's kernels; "fused": fused kernels; "graphs": also captured decode steps
    """
    with PretendedDevice() as device:
        kernels = TorchKernels() if kind == "torch" else FusedTwins(device)
        loaded = load_model(folder, dtype=FLOAT, device=DEVICE, kernels=kernels)
        attend: Attention = FusedAttention(device)
        if kind == "torch":
            attend = TorchPagedAttention(BLOCK_TOKENS, FLOAT)
        cache = cache_for(loaded)
        fields = slot_fields(MAX_LEN, MAX_LEN // BLOCK_TOKENS)
        slots = new_slots(fields, MAX_SLOTS, DEVICE, poison=poison)
        device.forget()  # what loading did
        decode = None
        if kind == "graphs":
            decode = GraphDecode.for_model(loaded.model, slots, cache, attend, device.capture)
            assert decode is not None
            decode.prepare()
        runner = Runner(loaded.model, slots, cache, attend, decode=decode)
        assert not device.faults
        yield device, DeviceWorker(runner, cache, cache_blocks(cache))


def cache_for(loaded: LoadedModel) -> KVCache:
    spec = loaded.spec
    heads = (spec.num_kv_heads, spec.head_dim)
    return KVCache(spec.num_layers, NUM_BLOCKS, BLOCK_TOKENS, *heads, FLOAT, DEVICE)


def assert_same(found: StepResult, expected: StepResult) -> None:
    """Check that two results have the same tokens, and logprobs that differ only by rounding. The
    device computes rows of a step together that the CPU computes in parts."""
    for name in ("step", "tokens", "failed", "counts", "proposed"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        for column in theirs.__struct_fields__ if theirs is not None else ():
            assert_near(getattr(ours, column), getattr(theirs, column))


def assert_near(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    if theirs is not None:
        np.testing.assert_allclose(ours.tolist(), theirs.tolist(), rtol=1e-5, atol=1e-5)


# ---- the stream of test_replay.py


@pytest.mark.parametrize(
    ("depth", "kind", "poison"),
    [
        (1, "torch", Poison.PLAUSIBLE),
        (1, "fused", None),
        (2, "fused", Poison.WILD),
        (1, "graphs", None),
        (2, "graphs", Poison.WILD),
    ],
)
def test_a_device_gives_the_tokens_of_the_cpu_without_waiting(
    recorded: Recording,
    expected: list[StepResult],
    folder: Path,
    depth: int,
    kind: str,
    poison: Poison | None,
) -> None:
    """Requests of every kind, masks, drafts, preemption, and K/V from another engine. A step is
    read after `depth` - 1 later ones have been launched."""
    faults: set[DeviceFault] = set()
    with on_device(folder, kind=kind, poison=poison) as (device, worker):
        pending = []
        for number, step in enumerate(recorded.steps):
            for arrived in step.arrived:
                worker.write(arrived)
            taken = step.plan.zero_blocks.tolist()
            content(worker.cache.k)[:, taken] = content(worker.cache.v)[:, taken] = float("nan")
            device.forget()
            pending.append(worker.runner.launch(step.plan, partial(getattr, step, "masks")))
            faults |= set(device.faults)
            if len(pending) == depth:
                assert_same(pending.pop(0).result(), expected[number - depth + 1])
        for result, right in zip(pending, expected[len(expected) - len(pending) :], strict=True):
            assert_same(result.result(), right)
    assert not faults


def plant_a_synchronisation(logits: Tensor) -> None:
    bool((logits > 0).any())


def plant_a_mix(logits: Tensor) -> None:
    logits.add(torch.zeros(logits.shape))


def plant_a_pageable_copy(logits: Tensor) -> None:
    torch.zeros(3).to(logits.device, non_blocking=True)


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (plant_a_synchronisation, "synchronisation"),
        (plant_a_mix, "mix of host and device"),
        (plant_a_pageable_copy, "pageable copy"),
    ],
)
def test_a_planted_fault_is_found(
    folder: Path,
    recorded: Recording,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Tensor], None],
    kind: str,
) -> None:
    def faulty(logits: Tensor, *rest: Any) -> Any:
        plant(logits)
        return sample(logits, *rest)

    with on_device(folder) as (device, worker):
        init = slot_init(0, [1, 2, 3], blocks=[1], params=GREEDY)
        plan = step_plan(1, bind=[init], rows=[(0, 0, 3, True)])
        worker.runner.launch(plan).result()
        assert not device.faults
        monkeypatch.setattr("worker.step.sample", faulty)
        worker.runner.launch(step_plan(2, rows=[(0, 3, 1, True)])).result()
    assert [fault.kind for fault in device.faults] == [kind]


def test_results_that_are_read_before_their_event_are_garbage(folder: Path) -> None:
    with on_device(folder) as (_, worker):
        init = slot_init(0, [1, 2, 3], blocks=[1], params=GREEDY)
        pending = worker.runner.launch(step_plan(1, bind=[init], rows=[(0, 0, 3, True)]))
        assert not pending.is_done
        early = pending.sampled
        assert early is not None
        garbage = early.tokens.clone()
        assert not garbage.equal(torch.tensor(pending.result().tokens.tolist()))
        assert pending.is_done


# ---- launches


def decode_launches(num_layers: int, lens: list[int], params: SamplingParams) -> int:
    """Return the number of launches of a decode step of a model like Qwen3, after these prompts."""
    spec = model_spec(*[LayerSpec(attention=attention(qk_norm="head"), mlp=mlp())] * num_layers)
    width = MAX_LEN // BLOCK_TOKENS
    with PretendedDevice() as device:
        cache = KVCache(
            num_layers, 1 + width * len(lens), BLOCK_TOKENS, 2, spec.head_dim, FLOAT, DEVICE
        )
        slots = new_slots(slot_fields(MAX_LEN, width), len(lens), DEVICE, poison=None)
        runner = Runner(random_model(spec, device), slots, cache, FusedAttention(device))
        inits = [
            slot_init(
                row,
                [(7 * row + i) % spec.vocab_size for i in range(count)],
                blocks=range(1 + width * row, 1 + width * (row + 1)),
                params=params,
                seed=row,
                stop_ids=[3],
            )
            for row, count in enumerate(lens)
        ]
        prompts = [(row, 0, count, True) for row, count in enumerate(lens)]
        runner.launch(step_plan(1, bind=inits, rows=sorted(prompts, key=_is_prompt))).result()
        device.forget()
        runner.launch(step_plan(2, rows=[(row, count, 1, True) for row, count in enumerate(lens)]))
        assert not device.faults
        return device.launches


def _is_prompt(row: tuple[int, int, int, bool]) -> bool:
    return row[2] > 1


def random_model(spec: ModelSpec, device: PretendedDevice) -> DecoderModel:
    tensors = ModelTensors(spec, names_of(ROLES))
    weights = load_weights(tensors, RandomTensors(), dtype=FLOAT, device=DEVICE)
    return DecoderModel(spec, weights, FusedTwins(device))


@pytest.mark.parametrize("lens", [[5], [9] * 8, [2, 3, 17, 31, 40, 5]], ids=["1", "8", "mixed"])
def test_a_greedy_decode_step_has_few_launches(lens: list[int]) -> None:
    few, more = (decode_launches(num_layers, lens, GREEDY) for num_layers in (1, 3))
    assert more - few <= 2 * LAUNCHES_PER_LAYER
    assert few <= LAUNCHES + LAUNCHES_PER_LAYER
