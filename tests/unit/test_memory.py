"""The memory that a model needs, the K/V blocks that fit, the memory that is free, and what is
refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import KVGroups
from protocol.shared.state_memory import (
    CHECKPOINTS_PER_SLOT,
    MAX_EMPTY_BLOCKS,
    STATE_SHARE,
    default_slots,
)
from protocol.tools.start_facts import GIB, ModelPlan
from tests.support.checkpoints import random_llama, write_directory
from tests.support.family_models import RECURRENT, WITHOUT_ATTENTION, random_model
from tests.support.gguf_files import write_gguf
from tests.support.kernels import native_kernels
from tests.support.sparse_checkpoint import write_sparse_llama
from worker.device import device, machine
from worker.device.cpuinfo import cpu_flags
from worker.device.timing import StartupTiming
from worker.errors import NotEnoughMemory, UnusableModel
from worker.kernels.native import NativeKernels
from worker.kv.budget import KVBudget, KVDemand, kv_budget
from worker.kv.cache import block_bytes, cache_bytes, make_cache
from worker.kv.rounding import ROUNDED
from worker.loading.decoder import load_model
from worker.loading.header import read_header
from worker.lora.targets import adapter_bytes
from worker.slots.fields import slot_fields
from worker.slots.table import SlotTable
from worker.spec import kernel_sizes as sizes
from worker.spec.kv_blocks import BlockLayers, are_empty
from worker.spec.model_spec import ModelSpec
from worker.spec.step_limits import StepLimits, step_limits
from worker.startup import assembly
from worker.startup.gpu_memory import RESERVE_BYTES, SMALLER_STEP
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


def budget(
    context_tokens: int = 8192,
    free: int = 64 * GIB,
    *,
    window: int | None = None,
    groups: KVGroups | None = None,
    num_states: int | None = None,
    **config: Any,
) -> KVBudget:
    """Return the K/V budget for blocks of one MiB, with 16 tokens by default. With `num_states`,
    blocks store nothing."""
    options = WorkerConfig(model="m", **config)
    demand = KVDemand(
        context_tokens=context_tokens,
        block_bytes=1 << 20 if num_states is None else 16,
        limits=step_limits(options, is_gpu=False),
        window=window,
        groups=groups,
        num_states=num_states,
    )
    return kv_budget(options, demand, free_bytes=free)


def test_kv_blocks_sets_the_number_of_blocks() -> None:
    assert budget(kv_blocks=100) == KVBudget(100, 99 * 16)
    assert budget(kv_blocks=100, max_len=50) == KVBudget(100, 50)
    assert budget(kv_blocks=10_000) == KVBudget(10_000, 8192)


def test_kv_memory_gib_is_filled_with_blocks() -> None:
    assert budget(kv_memory_gib=1.5) == KVBudget(1536, 8192)


def test_by_default_every_slot_gets_an_average_request_and_one_the_longest() -> None:
    assert budget(max_slots=64) == KVBudget(64 * 64 + 1, 8192)
    assert budget(max_slots=1) == KVBudget(512 + 1, 8192)
    assert budget(max_slots=8, max_len=100) == KVBudget(8 * 7 + 1, 100)


def test_the_default_kv_memory_is_at_most_a_quarter_of_the_free_memory() -> None:
    assert budget(max_slots=64, free=8 * GIB) == KVBudget(2048, 8192)
    assert budget(max_slots=64, free=GIB) == KVBudget(256, 255 * 16)


@pytest.mark.parametrize("free", [GIB, 64 * GIB])
def test_states_limit_the_number_of_blocks_that_store_nothing(free: int) -> None:
    """A prefix is found only as far as a state follows it, so more blocks are of no use."""
    assert budget(free=free, num_states=20) == KVBudget(20 * 512 + 1, 8192)
    assert budget(free=free, num_states=20, max_len=100) == KVBudget(20 * 7 + 1, 100)
    assert budget(free=free, num_states=20, kv_memory_gib=0.5) == KVBudget(20 * 512 + 1, 8192)
    assert budget(free=free, num_states=20, kv_blocks=100) == KVBudget(100, 99 * 16)
    assert budget(free=free, num_states=2000) == KVBudget(MAX_EMPTY_BLOCKS + 1, 8192)
    longest = 32 * MAX_EMPTY_BLOCKS
    assert budget(longest, free, num_states=20) == KVBudget(2 * MAX_EMPTY_BLOCKS + 1, longest)


def test_a_model_with_windows_needs_blocks_for_a_window_and_a_step() -> None:
    live = (1000 - 1 + 256 - 2) // 16 + 2
    assert budget(max_slots=1, window=1000) == KVBudget(live + 1, 8192)
    assert budget(max_slots=64, window=1000) == KVBudget(64 * 64 + 1, 8192)
    assert budget(max_slots=64, window=100) == KVBudget(64 * 24 + 1, 8192)
    assert budget(max_slots=1, window=5000) == KVBudget(331, 8192)
    assert budget(max_slots=1, window=9000) == budget(max_slots=1)


def test_with_groups_only_the_layers_without_a_window_need_blocks_for_the_whole_text() -> None:
    groups = KVGroups(window=1000, window_blocks=5)
    columns, live = 8192 // 16, (1000 + 256 - 2) // 16 + 2
    assert budget(max_slots=1, groups=groups) == KVBudget(columns + 5 * live + 1, 8192)
    assert budget(max_slots=32, groups=groups) == KVBudget(32 * 64 * 6 + 1, 8192)
    least = columns + 5 * 64  # a window and the token after it
    assert budget(kv_blocks=least + 1, groups=groups) == KVBudget(least + 1, 8192)
    assert budget(kv_blocks=least, groups=groups) == KVBudget(least, 8192 - 16)
    with pytest.raises(NotEnoughMemory, match=r"hold 8,176 tokens, less than max_len \(8,192\)"):
        budget(kv_blocks=least, max_len=8192, groups=groups)


def test_a_cache_of_one_window_serves_the_whole_context() -> None:
    assert budget(kv_blocks=65, window=1000) == KVBudget(65, 8192)
    assert budget(kv_blocks=64, window=1000) == KVBudget(64, 63 * 16)
    with pytest.raises(NotEnoughMemory) as refused:
        budget(kv_blocks=64, window=1000, max_len=2000)
    assert refused.value.message == (
        "64 KV blocks hold 1,008 tokens, less than max_len (2,000); "
        "a window of 1,000 tokens needs 65 blocks"
    )
    assert refused.value.remedy == "--kv-blocks 65, or --max-len 1008"


@pytest.mark.parametrize(
    ("config", "free", "message"),
    [
        ({"max_len": 9000}, 64 * GIB, "max_len is 9,000; the model's context is 8,192"),
        ({"max_len": 8192, "kv_blocks": 512}, 64 * GIB, "hold 8,176 tokens, less than max_len"),
        ({"max_len": 8192}, GIB, "256 KV blocks hold 4,080 tokens"),
        ({"kv_blocks": 1}, 64 * GIB, "1 KV blocks hold 0 tokens"),
        ({"kv_blocks": 2048}, GIB, "2,048 KV blocks take 2.00 GiB; 1.00 GiB are free"),
        ({"kv_memory_gib": 3}, 2 * GIB, "3.00 GiB; 2.00 GiB are free"),
        ({}, 1 << 20, "0 KV blocks hold 0 tokens"),
    ],
    ids=str,
)
def test_too_little_memory_for_the_cache_is_refused_with_the_numbers(
    config: dict[str, Any], free: int, message: str
) -> None:
    with pytest.raises(UnusableModel) as refused:
        budget(free=free, **config)
    assert message in refused.value.message


@given(
    st.integers(1, 200_000),
    st.integers(0, 1 << 36),
    st.integers(1, 512),
    st.sampled_from([1, 16, 256]),
    st.integers(0, 4096),
    st.integers(0, 100_000),
)
def test_a_budget_holds_its_longest_request_and_fits_the_free_memory(
    context: int, free: int, slots: int, block_tokens: int, kv_blocks: int, max_len: int
) -> None:
    try:
        found = budget(
            context,
            free,
            max_slots=slots,
            block_tokens=block_tokens,
            kv_blocks=kv_blocks,
            max_len=max_len,
        )
    except UnusableModel:
        return
    assert 1 <= found.max_len <= min(context, (found.num_blocks - 1) * block_tokens)
    assert found.max_len == max_len or not max_len
    assert found.num_blocks << 20 <= free


@pytest.mark.parametrize(
    ("options", "is_gpu", "limits"),
    [
        ({}, False, StepLimits(64, 256, 0, planned_tokens=256)),
        ({}, True, StepLimits(256, 8192, 0, planned_tokens=8192)),
        ({"max_slots": 64}, True, StepLimits(64, 8192, 0, planned_tokens=8192)),
        ({"token_budget": 256}, True, StepLimits(256, 256, 0, planned_tokens=256)),
        ({"token_budget": 512}, False, StepLimits(64, 512, 0, planned_tokens=256)),
        ({"max_slots": 7, "max_drafts": 3}, False, StepLimits(7, 256, 3, planned_tokens=256)),
    ],
    ids=str,
)
def test_limits_that_are_not_configured_depend_on_the_device(
    options: dict[str, Any], is_gpu: bool, limits: StepLimits
) -> None:
    assert step_limits(WorkerConfig(model="m", **options), is_gpu=is_gpu) == limits


def test_available_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   42 kB\n")
    assert machine.available_bytes(tmp_path / "meminfo") == 42 * 1024
    assert device.free_bytes(CPU) > 0


def test_the_default_number_of_threads_is_that_of_allowed_cores() -> None:
    assert machine.choose_threads(3, cores=8, quota=1.0) == 3
    assert machine.thread_warning(0, cores=2, quota=None) == ""
    assert machine.thread_warning(2, cores=2, quota=None) == ""
    assert machine.thread_warning(200, cores=2, quota=None).startswith(
        "--threads 200 is more than the 2 cores that this process may use"
    )
    assert "the 1 core that" in machine.thread_warning(2, cores=8, quota=1.5)
    assert machine.choose_threads(0, cores=8, quota=None) == 8
    assert machine.choose_threads(0, cores=8, quota=2.5) == 2
    assert machine.choose_threads(0, cores=8, quota=0.5) == 1
    assert machine.choose_threads(0, cores=2, quota=16.0) == 2
    assert machine.allowed_cores() >= 1


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16", {"fpu", "avx2", "avx512_bf16"}),
        ("Features\t: fp asimd bf16", {"fp", "asimd", "bf16"}),
        ("model name\t: none", set()),
    ],
)
def test_the_features_of_a_processor_are_read(tmp_path: Path, line: str, flags: set[str]) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert cpu_flags(tmp_path / "cpuinfo") == flags


def test_the_cpu_can_always_be_chosen_and_cuda_only_if_present() -> None:
    assert device.choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert device.choose_device("auto") == CPU
        with pytest.raises(UnusableModel, match="no CUDA device"):
            device.choose_device("cuda")
        with pytest.raises(UnusableModel, match="device cuda:3 was requested"):
            device.choose_device("cuda:3")


def test_the_chosen_gpu_becomes_the_current_one_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, current = torch.device("cuda", 1), list[torch.device]()

    def load(*_: Any, **__: Any) -> Any:
        assert current == [chosen]
        raise UnusableModel("the load began")

    monkeypatch.setattr(device, "choose_device", lambda *_: chosen)
    monkeypatch.setattr(device, "set_threads", lambda threads: None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(assembly, "load_model", load)
    with pytest.raises(UnusableModel, match="the load began"):
        assembly.assemble(WorkerConfig(model="m"), StartupTiming())


def test_a_gpus_identity_is_its_uuid_or_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="0a1b-2c", pci_domain_id=0, pci_bus_id=59, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpu = torch.device("cuda", 1)
    assert device.identity_of(CPU) is None
    assert device.identity_of(gpu) == "gpu-0a1b-2c"
    del properties.uuid  # an older torch has no UUID
    assert device.identity_of(gpu) == "gpu-00:3b:00"
    del properties.pci_bus_id
    assert device.identity_of(gpu) == "gpu-1"


# ---- the plan before a model is loaded
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0")


def planned(path: Path, *, packs: bool = True) -> PlannedModel:
    header = read_header(path)
    return PlannedModel(header.name, header.tensors, header.kinds, packs)


@pytest.fixture(scope="module", params=["directory", *KINDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a model whose matrices the kernels can pack: a directory, and a GGUF file
    of each type. Some models have tied embeddings."""
    path = tmp_path_factory.mktemp("models")
    tied = request.param in ("directory", "Q4_0", "Q5_0")
    theirs = random_llama(tie_word_embeddings=tied, attention_bias=request.param == "F16")
    if request.param == "directory":
        return write_directory(path, theirs)
    return write_gguf(path / "tiny.gguf", theirs, GGMLQuantizationType[request.param])


@pytest.mark.parametrize("form", ["packed", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_planned_weights_equal_the_loaded_weights(model: Path, form: Any, dtype: Any) -> None:
    loaded = load_model(model, dtype=dtype, device=CPU, kernels=native_kernels(), weights=form)
    name = str(dtype).removeprefix("torch.")
    assert isinstance(loaded.spec, ModelSpec)
    packs = is_packed(loaded.spec, form, has_kernels=True)
    assert weights_bytes(planned(model, packs=packs), name) == loaded.card.weights_bytes


@pytest.mark.parametrize("form", ["packed", "dense"])
@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_the_weights_of_per_layer_inputs_and_of_streams_are_planned(
    tmp_path: Path, model_type: str, form: Any
) -> None:
    path = write_directory(tmp_path, random_model(model_type))
    loaded = load_model(
        path, dtype=torch.bfloat16, device=CPU, kernels=native_kernels(), weights=form
    )
    ours = planned(path, packs=form == "packed")
    assert weights_bytes(ours, "bfloat16") == loaded.card.weights_bytes


@pytest.mark.parametrize("model_type", RECURRENT)
def test_the_memory_of_a_hybrid_is_planned(tmp_path: Path, model_type: str) -> None:
    """The states of all slots count, and checkpoints of them if there is room."""
    theirs = random_model(model_type, hidden_size=192, head_dim=32)
    path = write_directory(tmp_path, theirs)
    loaded = load_model(path, dtype=torch.bfloat16, device=CPU, kernels=native_kernels())
    assert isinstance(loaded.spec, ModelSpec)
    ours, items = planned(path), loaded.spec.state_items
    assert weights_bytes(ours, "bfloat16") == loaded.card.weights_bytes
    found = plan(ours, 1, max_slots=4)
    assert (found.max_slots, found.num_checkpoints) == (4, 4 * CHECKPOINTS_PER_SLOT)
    assert found.request_state_bytes == 4 * items
    assert found.state_bytes == 4 * items * (4 + 4 * CHECKPOINTS_PER_SLOT)
    assert found.work_bytes >= found.state_bytes
    slots = SlotTable(slot_fields(64, 4, items), 4, CPU, 4 * CHECKPOINTS_PER_SLOT)
    kept = slots["state"].nbytes + slots.checkpoints["state"][1:].nbytes
    assert kept == found.state_bytes
    with pytest.raises(NotEnoughMemory) as refused:
        plan(ours, 0.1, max_slots=4096)
    assert refused.value.remedy.startswith("serve with fewer --max-slots, each of which takes")


@pytest.mark.parametrize("model_type", WITHOUT_ATTENTION)
def test_the_blocks_of_a_model_without_attention_take_next_to_nothing(
    tmp_path: Path, model_type: str
) -> None:
    ours = planned(write_directory(tmp_path, random_model(model_type)))
    layers = BlockLayers.of(ours.spec)
    assert (layers.is_empty, layers.num_entries, are_empty([ours.spec])) == (True, 1, True)
    assert planned_block_bytes(ours.spec, 16, "float32") == cache_bytes(layers, 1, 16, torch.int8)
    found = plan(ours, 1, max_slots=4)
    states = 4 + 4 * CHECKPOINTS_PER_SLOT
    longest = found.context_tokens // 16
    assert found.kv_bytes == 16 * (1 + states * longest)
    assert found.longest_kv_bytes == 16 * (1 + longest)
    assert found.max_len == found.context_tokens == ours.spec.context_tokens
    on_gpu = plan_on_gpu(ours, max_slots=4)
    assert (on_gpu.kv_bytes, on_gpu.max_len) == (found.kv_bytes, found.max_len)
    cache = make_cache(layers, 9, 16, torch.bfloat16, CPU)
    assert (cache.num_blocks, cache.num_entries, cache.rows.shape) == (9, 1, (1, 9, 16))
    cache.zero(torch.arange(9))
    assert not cache.rows.any()


def test_the_default_number_of_slots_follows_the_size_of_their_states(tmp_path: Path) -> None:
    """64 states would not fit."""
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 64}
    theirs = random_model("qwen3_5_text", linear_num_key_heads=2, **sizes)
    ours = planned(write_directory(tmp_path, theirs))
    with pytest.raises(NotEnoughMemory):
        plan(ours, 1, max_slots=64)
    found, roomy = plan(ours, 1), plan(ours, 100)
    left = found.free_bytes - found.weights_bytes
    one = found.request_state_bytes
    assert one > 12 << 20
    assert found.max_slots == left // STATE_SHARE // one < 64
    assert found.num_checkpoints
    assert found.weights_bytes + found.work_bytes + found.kv_bytes <= found.free_bytes
    assert (found.has_fewer_slots, roomy.has_fewer_slots) == (True, False)
    assert roomy.max_slots == 64


@pytest.mark.parametrize(
    ("state_bytes", "free_bytes", "slots"),
    [(0, 0, 64), (1, 8 * 64, 64), (1, 8 * 63 + 7, 63), (1000, 16_000, 2), (1000, 0, 1)],
)
def test_states_take_at_most_an_eighth_of_the_memory_unless_slots_are_set(
    state_bytes: int, free_bytes: int, slots: int
) -> None:
    assert default_slots(64, state_bytes, free_bytes) == slots


def test_packed_sizes_equal_those_of_the_kernels() -> None:
    kernels = native_kernels()
    assert isinstance(kernels, NativeKernels)
    for fmt in sizes.GROUP_BYTES:
        for outputs, inputs in ((1, 32), (32, 64), (33, 96), (1000, 4096)):
            ours = sizes.packed_bytes(fmt, outputs, inputs)
            assert ours == kernels.library.packed_bytes(fmt, outputs, inputs)


def test_the_planned_block_size_equals_that_of_the_cache(model: Path) -> None:
    config = read_header(model).spec
    shape = (config.num_layers, 16, config.layer_heads[0])
    for name in DTYPE_BYTES:
        assert planned_block_bytes(config, 16, name) == block_bytes(*shape, getattr(torch, name))
        rounded = planned_block_bytes(config, 16, name, rounds_kv=True)
        assert rounded == block_bytes(*shape, ROUNDED)


def test_types_that_cannot_stay_packed_are_expanded(tmp_path: Path) -> None:
    def expanded(kind: GGMLQuantizationType, *, packs: bool) -> set[str]:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
        path = write_gguf(tmp_path / f"{kind.name}{packs}.gguf", random_llama(**sizes), kind)
        return expanded_kinds(planned(path, packs=packs))

    assert expanded(GGMLQuantizationType.Q8_0, packs=True) == set()
    assert expanded(GGMLQuantizationType.Q8_0, packs=False) == {"Q8_0"}
    assert expanded(GGMLQuantizationType.Q5_0, packs=True) == set()
    assert expanded(GGMLQuantizationType.TQ1_0, packs=True) == {"TQ1_0"}
    assert expanded(GGMLQuantizationType.F16, packs=False) == set()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    """Return a model of 70 billion weights: 128 GiB in bfloat16, and 320 KiB of K/V per token."""
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


def test_memory_is_planned_for_all_adapters_that_can_be_loaded(large: PlannedModel) -> None:
    each = adapter_bytes(large.spec, 16, 2)
    options: dict[str, Any] = {"max_loras": 4, "max_lora_rank": 16}
    plain = plan(large, 200).work_bytes
    assert plan(large, 200, **options).work_bytes == plain
    assert plan(large, 200, lora=["a=/a", "b=/b"], **options).work_bytes == plain + 2 * each
    assert plan(large, 200, lora=["a=/a"], lora_dir="/d", **options).work_bytes == plain + 4 * each


def test_keys_and_values_in_eight_bits_leave_room_for_more_tokens(large: PlannedModel) -> None:
    plain, rounded = plan(large, 150), plan(large, 150, kv_dtype="int8")
    assert 1.9 * plain.max_len < rounded.max_len < 2 * plain.max_len


@pytest.mark.parametrize(
    ("free_gib", "options", "message", "remedy"),
    [
        (
            100,
            {},
            "needs 12[0-9].* GiB for weights \\(bfloat16\\) and .* 100.00 GiB are free",
            "^use a GGUF file of type Q4_K or Q8_0, which stay packed, or a smaller model$",
        ),
        (100, {"dtype": "float32"}, "\\(float32\\)", "--dtype bfloat16, or a GGUF"),
        (150, {"max_len": 131072}, "less than max_len \\(131,072\\)", "--max-len [0-9]+$"),
        (200, {"max_len": 131072}, "less than max_len", "^--kv-memory-gib 40.0[0-9], or --max-len"),
        (150, {"kv_memory_gib": 60}, "60.00 GiB; .* are free", "--kv-memory-gib [0-9.]+, or less"),
        (150, {"kv_blocks": 1 << 20}, "KV blocks take", "--kv-blocks [0-9]+, or less"),
        (200, {"kv_blocks": 1}, "hold 0 tokens, too few for a request", "^--kv-blocks 2$"),
        (200, {"kv_blocks": 9, "max_len": 256}, "less than max_len", "^--kv-blocks 17, or --max-"),
    ],
    ids=str,
)
def test_too_little_memory_is_refused_with_numbers_and_options(
    large: PlannedModel, free_gib: float, options: dict[str, Any], message: str, remedy: str
) -> None:
    with pytest.raises(NotEnoughMemory, match=message) as refused:
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


def plan_on_gpu(model: PlannedModel, free_gib: float = 200, **options: Any) -> ModelPlan:
    """Return the plan for a GPU of 200 GiB, and 16 GiB of host memory."""
    return plan_memory(
        WorkerConfig(model="m", **options),
        [model],
        device="cuda:0",
        dtype="bfloat16",
        free_bytes=int(free_gib * GIB),
        host_bytes=16 * GIB,
        total_bytes=200 * GIB,
    )


def test_the_host_tier_of_a_gpu_does_not_reduce_its_kv_memory(large: PlannedModel) -> None:
    assert plan_on_gpu(large, kv_host_gib=16).kv_bytes == plan_on_gpu(large).kv_bytes
    with pytest.raises(NotEnoughMemory) as refused:
        plan_on_gpu(large, kv_host_gib=17)
    assert refused.value.remedy == "--kv-host-gib 16, or less"


@pytest.mark.parametrize("share", [0.8, 0.9, 1.0])
def test_the_plan_of_a_gpu_fills_its_share(large: PlannedModel, share: float) -> None:
    found = plan_on_gpu(large, gpu_memory=share)
    reserved = RESERVE_BYTES + 2 * 4 * 256 * large.spec.vocab_size
    used = found.weights_bytes + found.kv_bytes + found.work_bytes + reserved
    assert used == pytest.approx(share * 200 * GIB, abs=16 << 20)


def test_a_larger_step_leaves_less_memory_for_the_cache_of_a_gpu(large: PlannedModel) -> None:
    default = plan_on_gpu(large)
    assert plan_on_gpu(large, token_budget=8192, max_slots=256) == default
    for option in ({"token_budget": 16384}, {"max_slots": 512}):
        assert plan_on_gpu(large, **option).kv_bytes < default.kv_bytes


def test_a_model_too_large_for_a_gpu_is_refused_with_the_numbers(large: PlannedModel) -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"weights \(bfloat16\) .* 100.00 GiB are free$"
    ) as one:
        plan_on_gpu(large, free_gib=100)
    assert one.value.remedy.endswith("a smaller model, or " + SMALLER_STEP)
    with pytest.raises(NotEnoughMemory, match=r"; the GPU has 200\.00 GiB; ") as two:
        plan_on_gpu(large, gpu_memory=0.6)
    assert "--gpu-memory 0.6 leaves 0.00 GiB for the KV cache" in two.value.message
    assert "--gpu-memory 1, " in two.value.remedy


def test_following_the_remedy_makes_the_plan_fit(large: PlannedModel) -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        plan(large, 200, max_len=131072)
    more, shorter = refused.value.remedy.split(", or ")
    gib, tokens = float(more.split()[1]), int(shorter.split()[1])
    assert plan(large, 200, max_len=131072, kv_memory_gib=gib).max_len == 131072
    assert plan(large, 200, max_len=tokens).max_len == tokens


def test_a_length_beyond_the_models_context_is_not_a_memory_error(large: PlannedModel) -> None:
    with pytest.raises(UnusableModel, match="context is 131,072 tokens") as refused:
        plan(large, 1000, max_len=1 << 20)
    assert refused.value.remedy == "--max-len 131072, or less"


# ---- the heap
STEPS, PIECES, PIECE_BYTES, PAGE_BYTES = 8, 3, 12 << 20, 4096
PROGRAM = f"""
import ctypes, resource, sys
from worker.device import malloc

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
if sys.argv[1] == "kept" and not malloc.keep_pages():
    sys.exit("no glibc")


def step():
    pieces = [libc.malloc({PIECE_BYTES}) for _ in range({PIECES})]
    for piece in pieces:
        ctypes.memset(piece, 1, {PIECE_BYTES})
    for piece in pieces:
        libc.free(piece)


step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    """Return the number of page faults in the steps of PROGRAM after the first one. If `way` is
    "kept", the process keeps freed pages."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=False
    )
    if "no glibc" in ran.stderr:
        pytest.skip("needs glibc")
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


def test_freed_pages_are_kept_for_the_next_step() -> None:
    pages_of_a_step = PIECES * PIECE_BYTES // PAGE_BYTES
    assert faults("kept") < pages_of_a_step // 10
