"""What a model takes before it is loaded: what it takes when it is, and what is said if that is too
much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from protocol.config.worker import WorkerConfig
from protocol.preflight import GIB, ModelPlan
from tests.support.checkpoints import random_llama, write_directory, write_gguf
from tests.support.kernels import native_kernels
from tests.support.sparse_checkpoint import write_sparse_llama
from worker.kernels import sizes
from worker.kernels.native import NativeKernels
from worker.kv.cache import block_bytes
from worker.loading.errors import NotEnoughMemory, UnusableModel
from worker.loading.header import read_header
from worker.models.load import load_model
from worker.startup.memory_plan import (
    DTYPE_BYTES,
    PlannedModel,
    expanded_kinds,
    is_packed,
    plan_memory,
    weights_bytes,
)
from worker.startup.memory_plan import block_bytes as planned_block_bytes

CPU = torch.device("cpu")
KINDS = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q5_0")


def planned(path: Path, *, packs: bool = True) -> PlannedModel:
    header = read_header(path)
    return PlannedModel(header.name, header.config, header.kinds, packs)


@pytest.fixture(scope="module", params=["directory", *KINDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels pack its matrices; half of the kinds have tied embeddings."""
    path = tmp_path_factory.mktemp("models")
    tied = request.param in ("directory", "Q4_0", "Q5_0")
    theirs = random_llama(tie_word_embeddings=tied, attention_bias=request.param == "F16")
    if request.param == "directory":
        return write_directory(path, theirs)
    return write_gguf(path / "tiny.gguf", theirs, GGMLQuantizationType[request.param])


@pytest.mark.parametrize("form", ["packed", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_planned_weights_are_those_that_are_loaded(model: Path, form: Any, dtype: Any) -> None:
    loaded = load_model(model, dtype=dtype, device=CPU, kernels=native_kernels(), weights=form)
    name = str(dtype).removeprefix("torch.")
    packs = is_packed(loaded.config, form, has_kernels=True)
    assert weights_bytes(planned(model, packs=packs), name) == loaded.card.weights_bytes


def test_packed_sizes_are_those_of_the_kernels() -> None:
    kernels = native_kernels()
    assert isinstance(kernels, NativeKernels)
    for fmt in (sizes.Q4, sizes.Q8, sizes.BF16, sizes.F32):
        for outputs, inputs in ((1, 32), (32, 64), (33, 96), (1000, 4096)):
            ours = sizes.packed_bytes(fmt, outputs, inputs)
            assert ours == kernels.library.packed_bytes(fmt, outputs, inputs)


def test_a_block_takes_what_the_cache_takes(model: Path) -> None:
    config = read_header(model).config
    shape = (config.num_layers, 16, config.num_kv_heads, config.head_dim)
    for name, item in DTYPE_BYTES.items():
        assert planned_block_bytes(config, 16, item) == block_bytes(*shape, getattr(torch, name))


def test_types_that_are_no_longer_packed_are_expanded(tmp_path: Path) -> None:
    def expanded(kind: GGMLQuantizationType, *, packs: bool) -> set[str]:
        path = write_gguf(tmp_path / f"{kind.name}{packs}.gguf", random_llama(), kind)
        return expanded_kinds(planned(path, packs=packs))

    assert expanded(GGMLQuantizationType.Q8_0, packs=True) == set()
    assert expanded(GGMLQuantizationType.Q8_0, packs=False) == {"Q8_0"}
    assert expanded(GGMLQuantizationType.Q5_0, packs=True) == {"Q5_0"}
    assert expanded(GGMLQuantizationType.F16, packs=False) == set()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    """70 billion weights: 128 GiB in bfloat16; 320 KiB of K/V per token."""
    return planned(write_sparse_llama(tmp_path_factory.mktemp("large")))


def plan(
    model: PlannedModel, free_gib: float, dtype: str = "bfloat16", **options: Any
) -> ModelPlan:
    return plan_memory(
        WorkerConfig(model="m", **options),
        [model],
        device="cpu",
        dtype=dtype,
        free_bytes=int(free_gib * GIB),
        host_bytes=int(free_gib * GIB),
    )


def test_a_plan_adds_up_and_fits(large: PlannedModel) -> None:
    for free in (150, 200, 1000):
        found = plan(large, free)
        assert found.weights_bytes + found.kv_bytes + found.work_bytes <= found.free_bytes
    assert found.max_len == 131072
    assert plan(large, 150).max_len < 131072


@pytest.mark.parametrize(
    ("free_gib", "options", "said", "remedy"),
    [
        (
            100,
            {},
            "needs 12[0-9].* GiB for weights \\(bfloat16\\) and .* 100.00 GiB are free",
            "^use a GGUF file of type Q4_0, Q4_1, Q8_0, which stay packed, or a smaller model$",
        ),
        (200, {"dtype": "float32"}, "\\(float32\\)", "--dtype bfloat16, or a GGUF"),
        (150, {"max_len": 131072}, "less than max_len \\(131,072\\)", "--max-len [0-9]+$"),
        (200, {"max_len": 131072}, "less than max_len", "^--kv-memory-gib 40.0[0-9], or --max-len"),
        (150, {"kv_memory_gib": 60}, "60.00 GiB; .* are free", "--kv-memory-gib [0-9.]+, or less"),
        (150, {"kv_blocks": 1 << 20}, "KV blocks take", "--kv-blocks [0-9]+, or less"),
    ],
    ids=str,
)
def test_too_little_memory_is_told_with_the_numbers_and_the_options(
    large: PlannedModel, free_gib: float, options: dict[str, Any], said: str, remedy: str
) -> None:
    with pytest.raises(NotEnoughMemory, match=said) as refused:
        plan(large, free_gib, **options)
    assert re.search(remedy, refused.value.remedy)


def test_host_memory_for_dropped_blocks_is_planned(large: PlannedModel) -> None:
    without, found = plan(large, 200), plan(large, 200, kv_host_gib=40)
    assert (without.tier_bytes, found.tier_bytes) == (0, 40 * GIB)
    assert found.kv_bytes == pytest.approx(without.kv_bytes - 10 * GIB, abs=GIB)  # a quarter
    with pytest.raises(NotEnoughMemory, match="kv_host_gib is 80") as refused:
        plan(large, 200, kv_host_gib=80)
    gib = float(refused.value.remedy.split()[1].rstrip(","))
    assert plan(large, 200, kv_host_gib=gib).max_len > 0


def test_a_gpu_keeps_dropped_blocks_outside(large: PlannedModel) -> None:
    def on_gpu(**options: Any) -> ModelPlan:
        return plan_memory(
            WorkerConfig(model="m", **options),
            [large],
            device="cuda:0",
            dtype="bfloat16",
            free_bytes=200 * GIB,
            host_bytes=16 * GIB,
        )

    assert on_gpu(kv_host_gib=16).kv_bytes == on_gpu().kv_bytes
    with pytest.raises(NotEnoughMemory) as refused:
        on_gpu(kv_host_gib=17)
    assert refused.value.remedy == "--kv-host-gib 16, or less"


def test_following_the_remedy_helps(large: PlannedModel) -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        plan(large, 200, max_len=131072)
    more, shorter = refused.value.remedy.split(", or ")
    gib, tokens = float(more.split()[1]), int(shorter.split()[1])
    assert plan(large, 200, max_len=131072, kv_memory_gib=gib).max_len == 131072
    assert plan(large, 200, max_len=tokens).max_len == tokens


def test_a_length_the_model_was_not_made_for_is_no_matter_of_memory(large: PlannedModel) -> None:
    with pytest.raises(UnusableModel, match="context is 131,072 tokens") as refused:
        plan(large, 1000, max_len=1 << 20)
    assert refused.value.remedy == "--max-len 131072, or less"


def test_a_window_that_is_in_the_way_is_named(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    windowed = planned(write_sparse_llama(tmp_path, **mistral, sliding_window=4096))
    assert plan(windowed, 1000).window == 4096
    with pytest.raises(UnusableModel, match="the model's is 4,096 tokens"):
        plan(windowed, 1000, max_len=8192)
