"""Captured decode steps: the sizes of buckets, their padding, and the memory that they change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from protocol.engine.sampling import SamplingParams
from protocol.worker.steps import NO_ADAPTER
from tests.support.fused_twins import FusedAttention, FusedTwins
from tests.support.kept_hidden import KeptHidden
from tests.support.plans import slot_init, step_plan
from tests.support.pretended_device import DEVICE, PretendedDevice, content
from tests.support.random_decoder import ROLES, RandomTensors, attention, mlp, model_spec
from tests.support.tiny_checkpoint import write_tiny_llama
from worker.attention.torch_paged import TorchPagedAttention
from worker.batch.batch import read_rows
from worker.errors import UnusableModel
from worker.kv.cache import KVCache
from worker.loading.decoder import load_model
from worker.loading.weights import load_weights
from worker.lora.adapter import Adapter, LowRankPart, LowRankTerm
from worker.lora.table import AdapterTable
from worker.models.decoder import DecoderModel
from worker.slots.fields import slot_fields
from worker.slots.table import SlotTable
from worker.spec.kv_blocks import layer_places
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.tensor_names import names_of
from worker.spec.tensors import ModelTensors
from worker.startup.runner_parts import RunnerParts
from worker.step.decode_graph import (
    PADDING,
    CudaGraphs,
    GraphDecode,
    bucket_sizes,
    padded_rows,
    reason_against_graphs,
)
from worker.step.runner import Runner

BLOCK_TOKENS, MAX_SLOTS, MAX_LEN = 4, 7, 24
BLOCKS = MAX_LEN // BLOCK_TOKENS
FLOAT = torch.float32
LENS = [5, 3, 9, 14, 2]
PLAIN = model_spec(LayerSpec(attention=attention(qk_norm="head"), mlp=mlp()))
GREEDY = SamplingParams(temperature=0.0)
DRAWING = SamplingParams(temperature=1.0, top_p=0.9)
WINDOWED = model_spec(
    LayerSpec(attention=attention(), mlp=mlp()),
    *[LayerSpec(attention=attention(window=6), mlp=mlp())] * 2,
)
EXPERTS = model_spec(LayerSpec(attention=attention(), mlp=mlp(num_experts=4, top_k=2)))
CHUNKED = model_spec(LayerSpec(attention=attention(chunk=8), mlp=mlp()))


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (7, [1, 2, 4, 7]),
        (8, [1, 2, 4, 8]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
    ],
)
def test_bucket_sizes(max_rows: int, sizes: list[int]) -> None:
    assert bucket_sizes(max_rows) == sizes


@pytest.mark.parametrize("max_rows", [1, 13, 256, 1000, 4096])
def test_a_bucket_is_at_most_twice_as_large_as_a_step_and_few_sizes_suffice(max_rows: int) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert all(size <= 2 * (before + 1) for before, size in zip([0, *sizes], sizes, strict=False))
    assert all(b <= 1.25 * a for a, b in pairwise(sizes) if a >= 32)
    assert len(sizes) <= 40


@pytest.mark.parametrize("size", [3, 4, 9])
def test_padding_sees_nothing_and_repeats_the_first_rows_token(size: int) -> None:
    rows = padded_rows(np.array([5, 0, 2]), np.array([7, 1, 4]), size)
    assert rows[:, :3].tolist() == [[5, 0, 2], [7, 1, 4], [8, 2, 5]]
    assert rows[:, 3:].T.tolist() == [[5, PADDING, 8]] * (size - 3)


class GraphScene:
    """Requests on the device, with or without captured steps."""

    def __init__(
        self,
        device: PretendedDevice,
        spec: ModelSpec,
        is_captured: bool,
        adapters: AdapterTable | None = None,
    ) -> None:
        self.device = device
        weights = load_weights(
            ModelTensors(spec, names_of(ROLES)), RandomTensors(), dtype=FLOAT, device=DEVICE
        )
        model = DecoderModel(spec, weights, FusedTwins(device))
        windows = spec.layer_windows
        self.places = layer_places(windows, spec.layer_heads) if any(windows) else []
        self.entries = 1 + max((place.entry for place in self.places), default=0)
        self.cache = KVCache(
            1 + max((place.row for place in self.places), default=spec.num_layers - 1),
            1 + MAX_SLOTS * BLOCKS * self.entries,
            BLOCK_TOKENS,
            spec.layer_heads[0].count,
            spec.layer_heads[0].dim,
            FLOAT,
            DEVICE,
            places=self.places,
        )
        self.slots = SlotTable(slot_fields(MAX_LEN, BLOCKS * self.entries), MAX_SLOTS, DEVICE)
        attend, decode = FusedAttention(device), None
        if is_captured:
            decode = GraphDecode.for_model(model, self.slots, self.cache, attend, device.capture)
            assert decode is not None
            decode.prepare()
        self.decode = decode
        self.runner = Runner(
            model, self.slots, self.cache, attend, decode=decode, adapters=adapters
        )

    def run(
        self, params: SamplingParams, num_steps: int = 3, adapter: int = NO_ADAPTER
    ) -> list[list[int]]:
        """Compute the prompts of LENS and some decode steps of all but the first request. Return
        the tokens of each step. The last request has `adapter`."""
        width = BLOCKS * self.entries
        inits = [
            slot_init(
                row + 1,
                [(7 * row + i) % 70 for i in range(count)],
                blocks=range(1 + width * row, 1 + width * (row + 1)),
                params=params,
                seed=row,
                adapter=adapter if row == len(LENS) - 1 else NO_ADAPTER,
                adapter_generation=1,
            )
            for row, count in enumerate(LENS)
        ]
        prompts = [(row + 1, 0, count, True) for row, count in enumerate(LENS)]
        found = [self.runner.launch(step_plan(0, bind=inits, rows=prompts)).result()]
        for step in range(num_steps):
            rows = [(row + 1, LENS[row] + step, 1, True) for row in range(1, len(LENS))]
            self.device.forget()
            found.append(self.runner.launch(step_plan(step + 1, rows=rows)).result())
        return [result.tokens.tolist() for result in found]


@pytest.mark.parametrize("spec", [PLAIN, WINDOWED], ids=["plain", "several tables"])
@pytest.mark.parametrize("params", [GREEDY, DRAWING], ids=["greedy", "drawing"])
def test_a_captured_step_changes_the_same_memory_as_an_eager_one(
    spec: ModelSpec, params: SamplingParams
) -> None:
    """Four rows in a bucket of seven. Slot 0 is free, and block 0 is never written. Only the
    capture itself writes to slot 0, before any slot is bound."""
    with PretendedDevice() as device:
        scenes = [GraphScene(device, spec, is_captured) for is_captured in (False, True)]
        before = content(scenes[1].slots["token_ids"])[0].clone()
        eager, captured = (scene.run(params) for scene in scenes)
        assert eager == captured
        assert device.by_operation["graph"] == (2 if params is GREEDY else 1)
        for ours, theirs in zip(scenes[1].slots.tensors(), scenes[0].slots.tensors(), strict=True):
            assert values(ours)[1:].equal(values(theirs)[1:])
        for name in ("k", "v"):
            ours, theirs = (content(getattr(scene.cache, name)) for scene in scenes)
            torch.testing.assert_close(ours, theirs)
            assert not ours[:, 0].any()
        assert content(scenes[1].slots["token_ids"])[0].equal(before)
        assert not [fault for fault in device.faults if "loading" not in fault.line]


def test_a_captured_step_has_the_hidden_states_of_an_eager_one() -> None:
    with PretendedDevice() as device:
        kept = []
        for is_captured in (False, True):
            scene = GraphScene(device, PLAIN, is_captured)
            scene.runner.draft_model = proposer = KeptHidden(scene.cache)
            scene.run(GREEDY)
            kept.append([content(each) for each in proposer.kept])
        assert device.by_operation["graph"] == 2
        assert len(kept[0]) == 4
        for eager, captured in zip(*kept, strict=True):
            torch.testing.assert_close(eager, captured)


def one_adapter(spec: ModelSpec) -> AdapterTable:
    """Return a table with an adapter of the first layer's queries, on the device."""
    generator = torch.Generator().manual_seed(4)
    width = spec.layers[0].attention.q_width
    down, up = (
        torch.randn(shape, generator=generator).to(FLOAT).to(DEVICE)
        for shape in ((2, spec.hidden), (2, width))
    )
    term = LowRankTerm(down, (LowRankPart(0, 0, 4.0, up),))
    table = AdapterTable(1, spec.num_layers)
    table.add(0, 1, Adapter("d", 2, {(0, "qkv"): term}))
    return table


def test_a_step_with_an_adapter_is_not_captured_and_one_without_is() -> None:
    with PretendedDevice() as device:
        eager, captured = (
            GraphScene(device, PLAIN, is_captured, one_adapter(PLAIN))
            for is_captured in (False, True)
        )
        found = captured.run(GREEDY, adapter=0)
        assert "graph" not in device.by_operation
        assert found == eager.run(GREEDY, adapter=0)
        plain = GraphScene(device, PLAIN, True, one_adapter(PLAIN)).run(GREEDY)
        assert device.by_operation["graph"] == 2
        assert found != plain


def values(tensor: torch.Tensor) -> torch.Tensor:
    return content(tensor) if tensor.device == DEVICE else tensor


def test_a_captured_greedy_step_has_six_launches() -> None:
    """An upload, two graphs, and the results: their slices are read back as two copies."""
    with PretendedDevice() as device:
        GraphScene(device, PLAIN, is_captured=True).run(GREEDY)
        assert device.launches <= 6, device.by_operation


@pytest.mark.parametrize(
    ("rows", "message"),
    [([(8, 3, 1, True)], "slot"), ([(1, MAX_LEN - 1, 1, True)], "exceeds 24 tokens")],
)
def test_a_captured_step_refuses_rows_outside_the_slots(
    rows: list[tuple[int, int, int, bool]], message: str
) -> None:
    with PretendedDevice() as device:
        scene = GraphScene(device, PLAIN, is_captured=True)
        with pytest.raises(ValueError, match=message):
            scene.runner.launch(step_plan(1, rows=rows))


def test_steps_that_are_not_plain_are_not_captured() -> None:
    with PretendedDevice() as device:
        scene = GraphScene(device, PLAIN, is_captured=True)
        assert scene.decode is not None
        for plan, is_plain in [
            (step_plan(1, rows=[(1, 3, 1, True)]), True),
            (step_plan(1, rows=[(1, 3, 1, False)]), False),
            (step_plan(1, rows=[(1, 3, 2, True)]), False),
        ]:
            assert scene.decode.is_for(plan, read_rows(plan)) == is_plain


@pytest.mark.parametrize(
    ("spec", "attend", "reason"),
    [
        (PLAIN, FusedAttention, ""),
        (EXPERTS, FusedAttention, "the host chooses the rows of each expert"),
        (CHUNKED, FusedAttention, "the host finds the chunk of each token"),
        (PLAIN, None, "the attention backend makes its plan on the host"),
    ],
)
def test_reasons_against_graphs(
    spec: ModelSpec, attend: Callable[[PretendedDevice], FusedAttention] | None, reason: str
) -> None:
    with PretendedDevice() as device:
        weights = load_weights(
            ModelTensors(spec, names_of(ROLES)), RandomTensors(), dtype=FLOAT, device=DEVICE
        )
        backend = TorchPagedAttention(4, FLOAT) if attend is None else attend(device)
        assert reason_against_graphs(DecoderModel(spec, weights), backend) == reason


def test_a_capture_that_fails_names_the_option_that_turns_it_off(tmp_path: Path) -> None:
    def fail(work: Callable[[], None]) -> Callable[[], None]:
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    write_tiny_llama(tmp_path)
    with PretendedDevice() as device:
        loaded = load_model(tmp_path, dtype=FLOAT, device=DEVICE, kernels=FusedTwins(device))
        spec = loaded.spec
        cache = KVCache(
            spec.num_layers,
            3,
            BLOCK_TOKENS,
            spec.layer_heads[0].count,
            spec.layer_heads[0].dim,
            FLOAT,
            DEVICE,
        )
        slots = SlotTable(slot_fields(MAX_LEN, BLOCKS), MAX_SLOTS, DEVICE)
        parts = RunnerParts([loaded], [FusedAttention(device)])
        assert parts.captured_decode(slots, [cache], device.capture) is not None
        with pytest.raises(
            UnusableModel, match=r"not permitted when stream is capturing$"
        ) as error:
            parts.captured_decode(slots, [cache], fail)
        assert error.value.remedy == "serve with --decode-graphs off"


def test_all_buckets_share_the_memory_of_their_logits() -> None:
    with PretendedDevice() as device:
        scene = GraphScene(device, PLAIN, is_captured=True)
        assert scene.decode is not None
        found = [
            scene.decode(np.arange(rows), np.full(rows, 3), choose=False)[0] for rows in (1, 3, 7)
        ]
    assert len({logits.data_ptr() for logits in found}) == 1


class RecordedCuda:
    """Stands in for torch.cuda, and records the streams and the captures."""

    def __init__(self) -> None:
        self.streams: list[object] = []
        self.captures: list[dict[str, object]] = []

    def Stream(self, device: torch.device) -> SimpleNamespace:
        self.streams.append(device)
        return SimpleNamespace(wait_stream=lambda other: None)

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: None)

    def graph_pool_handle(self) -> str:
        return "pool"

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def graph(self, graph: object, **options: object) -> AbstractContextManager[None]:
        self.captures.append(options)
        return nullcontext()


def test_all_graphs_are_captured_on_one_stream_into_one_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, runs = RecordedCuda(), []
    monkeypatch.setattr(torch, "cuda", cuda)
    capture = CudaGraphs(torch.device("cuda:0"))
    for _ in range(2):
        capture(lambda: runs.append(1))
    assert len(runs) == 2 * (CudaGraphs.WARM_UPS + 1)
    assert len(cuda.streams) == 1
    first, second = cuda.captures
    assert first == second
    assert first["pool"] == "pool"
    assert "stream" in first
