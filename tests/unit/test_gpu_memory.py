"""How a GPU's memory is divided, and the steps that measure what a step takes. No GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.config.worker import WorkerConfig
from protocol.engine.kv_window import KVGroups
from protocol.tools.start_facts import GIB
from protocol.worker.steps import StepPlan, StepResult
from tests.support.pretended_device import DEVICE, PretendedDevice, content
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.tiny_model import BLOCK_TOKENS, CPU, HEAD_DIM, KV_HEADS, VOCAB, TinyModel
from worker.attention.base import Attention, AttentionBatch
from worker.attention.select import select_attention
from worker.attention.torch_paged import TorchPagedAttention
from worker.draft.model import DraftModel
from worker.errors import NotEnoughMemory, UnusableModel
from worker.kv.budget import MAX_DEFAULT_BLOCKS, KVBudget, KVDemand
from worker.kv.cache import KVCache, PagedCache
from worker.loading.decoder import load_model
from worker.lora.table import StepAdapters
from worker.slots import features
from worker.slots.features import features_of
from worker.slots.fields import slot_fields
from worker.slots.states import StepStates
from worker.slots.table import SlotTable
from worker.spec.kv_blocks import LayerPlace
from worker.spec.step_limits import StepLimits, step_limits
from worker.startup.gpu_memory import RESERVE_BYTES, GpuMemory, gpu_kv_budget
from worker.startup.profile_run import CACHE_BLOCKS, ProfileRun, RowSpan, largest_steps, measure
from worker.startup.reserve import measured_memory
from worker.startup.runner_parts import RunnerParts
from worker.startup.warm_up import warm_up
from worker.step.runner import Runner, no_masks

MIB = 1 << 20


def gpu(
    total: float = 80, free: float = 63, weights: float = 16, step: float = 3, reserve: float = 1
) -> GpuMemory:
    """Return the memory of a GPU, given in GiB. By default one GiB is taken by the context."""
    sizes = (int(gib * GIB) for gib in (total, free, weights, step, reserve))
    names = ("total_bytes", "free_bytes", "weights_bytes", "step_bytes", "reserve_bytes")
    return GpuMemory(**dict(zip(names, sizes, strict=True)))


def budget(
    memory: GpuMemory, *, context: int = 8192, block_bytes: int = MIB, **options: Any
) -> KVBudget:
    """Return the budget for blocks of one MiB and 16 tokens."""
    config = WorkerConfig(model="m", **options)
    demand = KVDemand(
        context_tokens=context,
        block_bytes=block_bytes,
        limits=step_limits(config, is_gpu=True),
    )
    return gpu_kv_budget(config, demand, memory)


@pytest.mark.parametrize(
    ("memory", "options", "gib"),
    [
        (gpu(), {}, 80 * 0.9 - 16 - 3 - 1),
        (gpu(), {"gpu_memory": 0.5}, 80 * 0.5 - 16 - 3 - 1),
        (gpu(), {"gpu_memory": 1.0}, 63 - 3 - 1),  # the context is in no share
        (gpu(step=10), {}, 80 * 0.9 - 16 - 10 - 1),
        (gpu(reserve=0), {}, 80 * 0.9 - 16 - 3),
        (gpu(free=20), {}, 20 - 3 - 1),  # other processes hold the rest
        (gpu(free=20), {"gpu_memory": 0.3}, 80 * 0.3 - 16 - 3 - 1),
        (gpu(), {"kv_memory_gib": 2.5}, 2.5),
        (gpu(), {"kv_memory_gib": 59, "gpu_memory": 0.3}, 59),  # the size wins
        (gpu(), {"kv_blocks": 1024}, 1),
    ],
    ids=str,
)
def test_the_cache_gets_what_the_share_leaves_or_what_is_configured(
    memory: GpuMemory, options: dict[str, Any], gib: float
) -> None:
    assert budget(memory, **options) == KVBudget(int(gib * 1024), 8192)


def test_max_slots_and_max_len_do_not_shrink_the_cache() -> None:
    assert budget(gpu(), max_slots=1, max_len=16).num_blocks == budget(gpu()).num_blocks


def test_the_cache_of_a_small_model_has_a_bounded_number_of_blocks() -> None:
    assert budget(gpu(), block_bytes=1024).num_blocks == MAX_DEFAULT_BLOCKS


def test_a_request_is_as_long_as_the_cache() -> None:
    memory = gpu(free=5, weights=68)  # one GiB is left for K/V by what is free
    assert budget(memory, context=131072, gpu_memory=1.0) == KVBudget(1024, 1023 * 16)


NUMBERS = (
    r"^the GPU has 80.00 GiB; with 16.00 GiB of weights loaded, \d+.00 GiB are free; "
    r"the largest step \(8,192 tokens of 256 requests\) takes 3.00 GiB, "
    r"and 1.00 GiB are kept in reserve; "
)


@pytest.mark.parametrize(
    ("memory", "options", "message", "remedy"),
    [
        (
            gpu(),
            {"gpu_memory": 0.2},
            "--gpu-memory 0.2 leaves 0.00 GiB for the KV cache; 0 KV blocks hold 0 tokens, too few",
            "^--kv-memory-gib 0.0[12], or --gpu-memory 0.98, or a smaller --token-budget or --max-",
        ),
        (
            gpu(),
            {"gpu_memory": 0.26, "max_len": 131072},
            "leaves 0.80 GiB for the KV cache; 819 KV blocks hold 13,088 tokens, less than max_len",
            "^--kv-memory-gib 8.01, or --max-len 13088, or --gpu-memory 0.98, or a smaller",
        ),
        (
            gpu(free=4),
            {},
            "leaves 0.00 GiB for the KV cache; 0 KV blocks hold 0 tokens, too few",
            "^use a smaller model, or a smaller --token-budget or --max-slots, with which a step",
        ),
        (
            gpu(),
            {"kv_memory_gib": 60},
            "reserve; 61,440 KV blocks take 60.00 GiB; 59.00 GiB are free$",
            "^--kv-memory-gib 59.0, or less, or a smaller --token-budget",
        ),
        (
            gpu(),
            {"kv_blocks": 61440},
            "reserve; 61,440 KV blocks take 60.00 GiB; 59.00 GiB are free$",
            "^--kv-blocks 60416, or less, or a smaller --token-budget",
        ),
    ],
    ids=str,
)
def test_a_cache_that_does_not_fit_is_refused_with_all_numbers_and_options(
    memory: GpuMemory, options: dict[str, Any], message: str, remedy: str
) -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        budget(memory, context=131072, **options)
    assert re.match(NUMBERS, refused.value.message)
    assert re.search(message, refused.value.message)
    assert re.search(remedy, refused.value.remedy)


def test_each_remedy_of_a_refusal_makes_the_cache_fit() -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        budget(gpu(), context=131072, gpu_memory=0.26, max_len=131072)
    memory, length, share, *_ = refused.value.remedy.split(", or ")
    configured: dict[str, Any] = {"gpu_memory": 0.26, "max_len": 131072}
    for way, name, read in (
        (memory, "kv_memory_gib", float),
        (length, "max_len", int),
        (share, "gpu_memory", float),
    ):
        option, value = way.split()
        assert option == "--" + name.replace("_", "-")
        options = configured | {name: read(value)}
        assert budget(gpu(), context=131072, **options).max_len == options["max_len"]


def test_a_length_beyond_the_models_context_is_not_a_memory_error() -> None:
    with pytest.raises(UnusableModel, match=r"^max_len is 9,000; the model's context is 8,192"):
        budget(gpu(), max_len=9000)


# ---- the steps of the profile run
def limits(slots: int, budget: int, drafts: int = 0) -> StepLimits:
    return StepLimits(slots, budget, drafts, planned_tokens=budget)


@pytest.mark.parametrize(
    ("limits", "max_len", "first"),
    [
        (limits(4, 16), 100, [4, 4, 4, 4]),
        (limits(4, 6), 100, [1, 1, 2, 2]),
        (limits(8, 3), 100, [1, 1, 1]),
        (limits(2, 100), 20, [20, 20]),
        (limits(1, 7), 100, [7]),
    ],
    ids=str,
)
def test_the_first_step_has_as_many_tokens_of_as_many_requests_as_possible(
    limits: StepLimits, max_len: int, first: list[int]
) -> None:
    spread, prompt, last, *_ = largest_steps(limits, max_len)
    assert [row.count for row in spread] == first
    assert prompt == [RowSpan(0, min(limits.token_budget, max_len))]
    assert last == [RowSpan(max_len - 1, max_len)]


@pytest.mark.parametrize(
    ("limits", "max_len", "more"),
    [
        (limits(4, 16), 100, [[(98, 100)], [(99, 100), (85, 100)]]),
        (limits(4, 16), 12, [[(10, 12)], [(11, 12), (0, 12)]]),
        (limits(4, 2), 100, [[(98, 100)], [(99, 100), (99, 100)]]),
        (limits(1, 16), 100, [[(98, 100)]]),
        (limits(4, 16), 1, [[(0, 1), (0, 1)]]),
        (limits(4, 1), 100, []),
    ],
    ids=str,
)
def test_steps_at_the_end_of_the_longest_request_have_a_chunk_and_both_kinds_of_rows(
    limits: StepLimits, max_len: int, more: list[list[tuple[int, int]]]
) -> None:
    steps = largest_steps(limits, max_len)[3:]
    assert [[(row.start, row.end) for row in rows] for rows in steps] == more


@pytest.mark.parametrize(
    ("limits", "max_len", "num_rows", "drafts"),
    [
        (limits(4, 100, 5), 50, 4, 5),
        (limits(4, 12, 5), 50, 2, 5),
        (limits(4, 4, 5), 50, 1, 3),
        (limits(4, 100, 5), 3, 4, 2),
    ],
    ids=str,
)
def test_with_speculation_the_last_step_has_as_many_sampled_places_as_possible(
    limits: StepLimits, max_len: int, num_rows: int, drafts: int
) -> None:
    assert largest_steps(limits, max_len)[-1] == [RowSpan(0, 1 + drafts, drafts)] * num_rows


class ProfiledTinyModel(TinyModel):
    """A model that records the tokens of each step, and the rows of all logits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens: list[int] = []
        self.num_logits = 0

    def __call__(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        cache: PagedCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        self.num_tokens.append(len(token_ids))
        return super().__call__(token_ids, batch, cache, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_logits += len(hidden)
        return super().logits(hidden)


def a_profile(limits: StepLimits, **changes: Any) -> ProfileRun:
    facts = {"max_len": 40, "vocab_size": VOCAB, "block_tokens": BLOCK_TOKENS}
    facts |= {"num_entries": 1, "has_draft": False}
    return ProfileRun(limits, **(facts | changes))


def a_cache(places: list[LayerPlace] | None = None) -> KVCache:
    shape = (1, CACHE_BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, torch.float32, CPU)
    return KVCache(*shape, places=places or ())


def run(profile: ProfileRun, cache: KVCache, draft: TinyModel | None = None) -> ProfiledTinyModel:
    """Run the steps on the CPU, and return the model."""
    attention = TorchPagedAttention(BLOCK_TOKENS, torch.float32)
    draft_model = None if draft is None else DraftModel(draft, a_cache(), attention, VOCAB)
    slots = SlotTable(profile.slot_fields(), profile.limits.max_slots, CPU)
    model = ProfiledTinyModel()
    profile.run(Runner(model, slots, cache, attention, draft_model=draft_model))
    return model


def test_the_steps_compute_and_sample_everything_in_a_cache_of_one_block() -> None:
    cache = a_cache()
    model = run(a_profile(limits(5, 23)), cache)
    assert model.num_tokens == [23, 23, 1, 2, 23]
    prompt_logprobs = (23 - 5) + (23 - 1) + 1 + (22 - 1)
    assert model.num_logits == (5 + 1 + 1 + 1 + 2) + prompt_logprobs
    assert not cache.k[:, 0].any()


def test_the_steps_verify_drafts() -> None:
    assert run(a_profile(limits(3, 12, 2)), a_cache()).num_tokens == [12, 12, 1, 2, 12, 9]


def test_the_steps_run_the_draft_model_too() -> None:
    draft = ProfiledTinyModel()
    run(a_profile(limits(3, 12, 2), has_draft=True), a_cache(), draft)
    assert draft.num_tokens == [12, 12, 1, 2, 12, 3]


def test_the_steps_fill_all_entries_of_a_column() -> None:
    groups = KVGroups(window=8, window_blocks=1)
    profile = a_profile(limits(3, 12), num_entries=1 + groups.window_blocks)
    assert run(profile, a_cache([LayerPlace(1, 0)])).num_tokens == [12, 12, 1, 2, 12]


def test_every_row_uses_every_sampling_feature() -> None:
    profile = a_profile(limits(3, 12))
    plan = profile.plan(0, largest_steps(profile.limits, profile.max_len)[0], [])
    assert [features_of(init) for init in plan.bind] == [features.ALL] * 3
    assert plan.masked is not None
    assert plan.masked.tolist() == [0, 1, 2]


# ---- measuring
class ScriptedAllocator:
    """An allocator in which `allocate` sets the bytes in use."""

    def __init__(self) -> None:
        self.used = 100
        self.highest = 0
        self.num_released = 0

    def allocate(self, num_bytes: int) -> None:
        self.used = num_bytes
        self.highest = max(self.highest, num_bytes)

    def allocated(self) -> int:
        return self.used

    def reset_peak(self) -> None:
        self.highest = self.used

    def peak(self) -> int:
        return self.highest

    def release(self) -> None:
        self.num_released += 1


def runs(allocator: ScriptedAllocator, *peaks: int) -> Callable[[], None]:
    left = list(peaks)

    def run() -> None:
        allocator.allocate(left.pop(0))
        allocator.allocate(110)  # workspaces that stay

    return run


def test_the_peak_of_the_second_run_counts_without_what_stays() -> None:
    allocator = ScriptedAllocator()
    assert measure(runs(allocator, 900, 500), allocator, limits(256, 8192)) == 500 - 110
    assert allocator.num_released == 2


def test_a_step_that_does_not_fit_beside_the_weights_is_refused() -> None:
    allocator = ScriptedAllocator()

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More words.")

    with pytest.raises(NotEnoughMemory) as refused:
        measure(fail, allocator, limits(256, 8192))
    assert refused.value.message == (
        "the weights leave too little memory for a step of 8,192 tokens of 256 requests "
        "(CUDA out of memory)"
    )
    assert "--token-budget" in refused.value.remedy
    assert allocator.num_released == 1


def test_the_profile_run_of_a_loaded_model_measures_beside_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(write_tiny_llama(tmp_path), dtype=torch.float32, device=CPU)
    attention = select_attention(16, dtype=torch.float32)
    made: list[PagedCache] = []

    def make_caches(num_blocks: int) -> list[PagedCache]:
        spec = loaded.spec
        shape = (
            spec.num_layers,
            num_blocks,
            16,
            spec.layer_heads[0].count,
            spec.layer_heads[0].dim,
        )
        made.append(KVCache(*shape, torch.float32, CPU))
        return made[-1:]

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + 70 * len(made))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6000, 8000))
    config = WorkerConfig(model="m", token_budget=64, max_slots=4)
    parts = RunnerParts([loaded], [attention])
    found = measured_memory(config, parts, make_caches, limits(4, 64), CPU)
    assert [cache.num_blocks for cache in made] == [CACHE_BLOCKS] * 2
    assert found == GpuMemory(
        total_bytes=8000,
        free_bytes=6000,
        weights_bytes=1000,
        step_bytes=140,
        reserve_bytes=RESERVE_BYTES + 2 * 4 * loaded.card.vocab_size * 4,
    )


class RecordingRunner(Runner):
    """A runner that keeps the plans that it was given."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.plans: list[StepPlan] = []

    def step(self, plan: StepPlan, receive_masks: Callable[[], object] = no_masks) -> StepResult:
        self.plans.append(plan)
        return super().step(plan, receive_masks)


@pytest.mark.parametrize(("on_gpu", "temperatures"), [(False, [1.0]), (True, [1.0, 1.0, 0.0])])
def test_a_gpu_is_warmed_up_for_drawn_and_for_greedy_tokens(
    tmp_path: Path, on_gpu: bool, temperatures: list[float]
) -> None:
    write_tiny_llama(tmp_path)
    with PretendedDevice() if on_gpu else nullcontext():
        device = DEVICE if on_gpu else CPU
        loaded = load_model(tmp_path, dtype=torch.float32, device=device)
        spec = loaded.spec
        heads = (spec.layer_heads[0].count, spec.layer_heads[0].dim)
        cache = KVCache(spec.num_layers, 3, BLOCK_TOKENS, *heads, torch.float32, device)
        parts = RunnerParts([loaded], [TorchPagedAttention(BLOCK_TOKENS, torch.float32)])
        slots = SlotTable(slot_fields(16, 4), 1, device)
        runner = parts.runner(slots, [cache], RecordingRunner)
        assert isinstance(runner, RecordingRunner)
        warm_up(runner, [cache], 16)
        inits = [init for plan in runner.plans for init in plan.bind]
        assert [init.params.temperature for init in inits] == temperatures
        assert [plan.num_decodes for plan in runner.plans] == [0, 1] * len(temperatures)
        assert not any((content(each) if on_gpu else each).any() for each in (cache.k, cache.v))
