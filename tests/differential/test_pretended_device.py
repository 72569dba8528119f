"""On a device that obeys the rules of CUDA, the worker gives the tokens of the CPU.

The device runs the real code of the host. Its kernels are those of torch, slow twins of ours
(fused_twins.py), or our own in Triton's interpreter, which is too slow for a long stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protocol.engine.sampling import SamplingParams, filter_order
from protocol.worker.steps import StepResult
from tests.support.device_stream import FLOAT, DeviceWorker, assert_same, record_stream
from tests.support.fused_twins import FusedAttention, FusedTwins
from tests.support.plans import slot_init, step_plan
from tests.support.pretended_device import DEVICE, DeviceFault, PretendedDevice, content
from tests.support.random_decoder import ROLES, RandomTensors, attention, mlp, model_spec
from tests.support.recording import BLOCK_TOKENS, MAX_LEN, Recording, replay
from tests.support.recording import KINDS as RECORDED
from tests.support.replica import Executed
from tests.support.tiny_model import new_slots
from tests.support.triton_code import interpreted
from worker.attention.base import Attention
from worker.attention.torch_paged import TorchPagedAttention
from worker.kernels.base import Kernels
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.loading.decoder import load_model
from worker.loading.weights import load_weights
from worker.models.decoder import DecoderModel
from worker.sampling.base import Sampling
from worker.sampling.torch_sampling import TorchSampling
from worker.slots.fields import slot_fields
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.tensor_names import names_of
from worker.spec.tensors import ModelTensors
from worker.step.runner import Runner
from worker.step.slot_registry import Poison

pytestmark = [
    pytest.mark.long,
    # Rows of padding are computed from whatever the memory contains.
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]

KINDS = ("torch", "fused", "graphs", "triton")
CAPTURED = ("graphs", "triton")
"""The kinds of workers, by their kernels: torch's, slow twins of ours, the same in captured decode
steps, and ours, interpreted and captured. The others sample with torch."""
OWN_SAMPLING = "graphs"
"""The kind that samples with our kernels. Their interpretation takes most of the time."""
NUM_PROCESSORS = 2
DRAFTS = "torch_sampling.py"
"""The file whose verification of drafts waits for the device. It is not used if Triton is there."""
GREEDY = SamplingParams(temperature=0.0)
LAUNCHES, LAUNCHES_PER_LAYER = 40, 10
"""Most launches of a greedy decode step: some, and some for each layer."""
DRY = "sampling/dry.py"
"""DRY is computed by torch, and waits for the device several times in a step."""
CHAIN_LAUNCHES = 220
"""The most launches that DRY, or filters in an order of their own, add to a step."""
SAMPLING_LAUNCHES = 60
"""Most further launches of a step with any sampling parameters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Recording:
    """Return a stream that has every kind of request and event."""
    return record_stream(folder)


@pytest.fixture(scope="module")
def expected(recorded: Recording) -> list[StepResult]:
    return list(replay(recorded, recorded.steps))


@contextmanager
def on_device(
    folder: Path, *, kind: str = "fused", poison: Poison | None = None
) -> Iterator[tuple[PretendedDevice, DeviceWorker]]:
    """Yield the device, and a worker on it with the model in `folder`.

    kind   one of KINDS
    """
    with PretendedDevice() as device:
        kernels, attend = kernels_of(kind, device)
        loaded = load_model(folder, dtype=FLOAT, device=DEVICE, kernels=kernels)
        device.forget()  # what loading did
        worker = DeviceWorker.of(
            loaded,
            DEVICE,
            attend,
            sampling=triton_sampling() if kind == OWN_SAMPLING else TorchSampling(),
            capture=device.capture if kind in CAPTURED else None,
            poison=poison,
        )
        assert not device.faults
        yield device, worker


def kernels_of(kind: str, device: PretendedDevice) -> tuple[Kernels, Attention]:
    if kind == "torch":
        return TorchKernels(), TorchPagedAttention(BLOCK_TOKENS, FLOAT)
    if kind == "triton":
        attend = interpreted("worker.attention.triton_paged").TritonPagedAttention
        kernels: Kernels = interpreted("worker.kernels.gpu").TritonKernels()
        return kernels, attend(BLOCK_TOKENS, num_processors=NUM_PROCESSORS)
    return FusedTwins(device), FusedAttention(device)


def triton_sampling() -> Sampling:
    sampling: Sampling = interpreted("worker.sampling.triton_sampling").TritonSampling(block=64)
    return sampling


# ---- the stream of test_replay.py


@pytest.mark.parametrize(
    ("depth", "kind", "poison", "num_steps"),
    [
        (1, "torch", Poison.PLAUSIBLE, 1000),
        (1, "fused", None, 1000),
        (2, "graphs", Poison.WILD, 1000),
        (2, "triton", Poison.WILD, 20),
    ],
)
def test_a_device_gives_the_tokens_of_the_cpu_without_waiting(
    recorded: Recording,
    expected: list[StepResult],
    folder: Path,
    depth: int,
    kind: str,
    poison: Poison | None,
    num_steps: int,
) -> None:
    """Requests of every kind, masks, drafts, preemption, and K/V from another engine. A step is
    read after `depth` - 1 later ones have been launched."""
    faults: set[DeviceFault] = set()
    num_graphs, results = 0, expected[:num_steps]
    with on_device(folder, kind=kind, poison=poison) as (device, worker):

        def fill_zeroed(step: Executed) -> None:
            taken = step.plan.zero_blocks.tolist()
            content(worker.cache.k)[:, taken] = content(worker.cache.v)[:, taken] = float("nan")

        @contextmanager
        def launching() -> Iterator[None]:
            nonlocal num_graphs
            device.forget()
            yield
            faults.update(device.faults)
            num_graphs += device.by_operation.get("graph", 0)

        found = worker.replay(
            recorded.steps[:num_steps], depth=depth, before=fill_zeroed, launching=launching
        )
        for result, right in zip(found, results, strict=True):
            assert_same(result, right)
    faults = {fault for fault in faults if DRY not in fault.line}
    assert {fault for fault in faults if kind == OWN_SAMPLING or DRAFTS not in fault.line} == set()
    assert (num_graphs > 5) == (kind in CAPTURED)


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
    with on_device(folder) as (device, worker):
        init = slot_init(0, [1, 2, 3], blocks=[1], params=GREEDY)
        plan = step_plan(1, bind=[init], rows=[(0, 0, 3, True)])
        worker.runner.launch(plan).result()
        assert not device.faults
        model: Any = worker.runner.components.model

        def faulty(hidden: Tensor) -> Tensor:
            logits: Tensor = original(hidden)
            plant(logits)
            return logits

        original = model.logits
        monkeypatch.setattr(model, "logits", faulty)
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


def decode_launches(
    num_layers: int, lens: list[int], params: SamplingParams, kind: str = "triton"
) -> int:
    """Return the number of launches of a decode step of a model like Qwen3, after these prompts.
    The kernels are those of `kind`, and the sampling is ours."""
    spec = model_spec(*[LayerSpec(attention=attention(qk_norm="head"), mlp=mlp())] * num_layers)
    width = MAX_LEN // BLOCK_TOKENS
    with PretendedDevice() as device:
        kernels, attend = kernels_of(kind, device)
        cache = KVCache(
            num_layers,
            1 + width * len(lens),
            BLOCK_TOKENS,
            2,
            spec.layer_heads[0].dim,
            FLOAT,
            DEVICE,
        )
        slots = new_slots(slot_fields(MAX_LEN, width), len(lens), DEVICE, poison=None)
        model = random_model(spec, kernels)
        runner = Runner(model, slots, cache, attend, sampling=triton_sampling())
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
        # The keys and values of the prompts are those of a new cache. So only a decode step runs.
        rows = [(row, count - 1, 1, True) for row, count in enumerate(lens)]
        runner.launch(step_plan(1, bind=inits, rows=rows)).result()
        device.forget()
        runner.launch(step_plan(2, rows=[(row, count, 1, True) for row, count in enumerate(lens)]))
        assert not [fault for fault in device.faults if DRY not in fault.line]
        return device.launches


def random_model(spec: ModelSpec, kernels: Kernels) -> DecoderModel:
    tensors = ModelTensors(spec, names_of(ROLES))
    weights = load_weights(tensors, RandomTensors(), dtype=FLOAT, device=DEVICE)
    return DecoderModel(spec, weights, kernels)


SAMPLED_LENS = [5, 17, 3]
LENS = {"one row": [5], "equal rows": [9] * 4, "mixed rows": [2, 17, 31, 40, 5]}


@pytest.mark.parametrize("lens", LENS.values(), ids=LENS)
def test_a_greedy_decode_step_has_few_launches(lens: list[int]) -> None:
    few, more = (decode_launches(num_layers, lens, GREEDY) for num_layers in (1, 2))
    assert more - few <= LAUNCHES_PER_LAYER
    assert few <= LAUNCHES + LAUNCHES_PER_LAYER


@pytest.fixture(scope="module")
def num_greedy_launches() -> int:
    return decode_launches(1, SAMPLED_LENS, GREEDY, "fused")


@pytest.mark.parametrize("params", [params for params, body in RECORDED if body is None], ids=str)
def test_a_sampled_decode_step_has_few_more_launches(
    num_greedy_launches: int, params: SamplingParams
) -> None:
    """Only the sampling differs, so the other kernels are twins of ours."""
    more = decode_launches(1, SAMPLED_LENS, params, "fused") - num_greedy_launches
    is_ordinary = filter_order(params) is None and not params.dry_multiplier
    assert more <= (SAMPLING_LAUNCHES if is_ordinary else CHAIN_LAUNCHES)
