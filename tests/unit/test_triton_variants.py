"""Triton compiles a kernel at its first launch with arguments of another kind. Before a worker
serves, its profile run and its warm-up have launched all that ordinary requests need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol.engine.sampling import SamplingParams
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.pretended_device import DEVICE, DeviceTensor, PretendedDevice
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.triton_code import KernelLaunch, interpreted, triton
from worker.attention.triton_tiles import SplitRule
from worker.kernels.triton import attention, layers
from worker.kv.cache import KVCache
from worker.loading.decoder import LoadedModel, load_model
from worker.sampling.triton import logit_stages, sampling, scores
from worker.slots.fields import slot_fields
from worker.slots.table import SlotTable
from worker.spec.step_limits import StepLimits
from worker.startup.profile_run import CACHE_BLOCKS, ProfileRun
from worker.startup.warm_up import warm_up
from worker.step.runner import Runner

pytestmark = pytest.mark.long
FLOAT = torch.float32
MAX_LEN, BLOCK_TOKENS = 96, 16
COLUMNS = MAX_LEN // BLOCK_TOKENS
LIMITS = StepLimits(max_slots=4, token_budget=8, max_drafts=0, planned_tokens=8)
KERNELS = {
    name: kernel
    for module in (attention, layers, logit_stages, sampling, scores)
    for name, kernel in vars(module).items()
    if isinstance(kernel, triton.JITFunction)
}
ONE = [(0, 5)]
REQUESTS: dict[str, tuple[SamplingParams, list[tuple[int, int]]]] = {
    "greedy": (GREEDY, ONE),
    "drawn": (SamplingParams(temperature=1.0), ONE),
    "top_p": (SamplingParams(temperature=1.0, top_p=0.9), ONE),
    "top_k": (SamplingParams(temperature=1.0, top_k=9), ONE),
    "both filters": (SamplingParams(temperature=1.0, top_p=0.9, top_k=9), ONE),
    "a penalty": (SamplingParams(temperature=0.0, frequency_penalty=0.5), ONE),
    "logprobs": (SamplingParams(temperature=0.0, logprobs=3), ONE),
    "logprobs of a token": (SamplingParams(temperature=0.0, logprob_token_ids=[4]), ONE),
    "logprobs of a prompt": (SamplingParams(temperature=0.0, prompt_logprobs=2), ONE),
    "three prompts": (GREEDY, [(0, 2)] * 3),
    "a short chunk of a long context": (GREEDY, [(80, 6)]),
    "the same with two prompts": (GREEDY, [(80, 3), (0, 2), (0, 2)]),
    "a long decode and a chunk": (GREEDY, [(80, 1), (0, 7)]),
    "a long decode and a long chunk": (GREEDY, [(80, 1), (88, 7)]),
    "one decode": (GREEDY, [(90, 1)]),
    "three decodes": (GREEDY, [(20, 1)] * 3),
}
"""Name -> the parameters of a step's requests, and the first position and the number of tokens of
each."""


class VariantRecorder(PretendedDevice):
    """A device that records what is compiled: each kernel with what is special in its arguments.
    No kernel runs, because the interpreter is slow, and launches do not depend on results."""

    def __init__(self) -> None:
        super().__init__()
        self.variants: set[str] = set()

    def launch(self, name: str, kernel: Callable[..., object], args: Any, kwargs: Any) -> None:
        compiled = KERNELS[name]
        arguments = dict(zip(compiled.arg_names, args, strict=False)) | kwargs
        values = {
            key: value.content if isinstance(value, DeviceTensor) else value
            for key, value in arguments.items()
        }
        special = KernelLaunch(compiled, kwargs["grid"], values).specialised()
        options = [values.get(key) for key in ("num_warps", "num_stages", "enable_fp_fusion")]
        self.variants.add(f"{name} {special} {options}")
        super().launch(name, lambda *args, **kwargs: None, args, kwargs)


class GpuParts:
    """A model on the pretended device, and what computes it there."""

    def __init__(self, folder: Path) -> None:
        kernels = interpreted("worker.kernels.gpu").TritonKernels()
        paged = interpreted("worker.attention.triton_paged")
        self.loaded: LoadedModel = load_model(folder, dtype=FLOAT, device=DEVICE, kernels=kernels)
        self.attention = paged.TritonPagedAttention(BLOCK_TOKENS, num_processors=16)
        self.sampling = interpreted("worker.sampling.triton_sampling").TritonSampling(block=64)

    def cache(self, num_blocks: int) -> KVCache:
        spec = self.loaded.spec
        shape = (
            spec.num_layers,
            num_blocks,
            BLOCK_TOKENS,
            spec.layer_heads[0].count,
            spec.layer_heads[0].dim,
        )
        return KVCache(*shape, FLOAT, DEVICE)

    def runner(self, slots: SlotTable, cache: KVCache) -> Runner:
        return Runner(self.loaded.model, slots, cache, self.attention, sampling=self.sampling)

    def prepare(self, cache: KVCache) -> None:
        """Run what a worker runs before it serves."""
        vocab = self.loaded.spec.vocab_size
        profile = ProfileRun(LIMITS, MAX_LEN, vocab, BLOCK_TOKENS, num_entries=1, has_draft=False)
        slots = SlotTable(profile.slot_fields(), LIMITS.max_slots, DEVICE)
        profile.run(self.runner(slots, self.cache(CACHE_BLOCKS)))
        slots = SlotTable(slot_fields(MAX_LEN, COLUMNS), 1, DEVICE)
        warm_up(self.runner(slots, cache), [cache], MAX_LEN)


def serve(
    runner: Runner, step: int, params: SamplingParams, rows: Sequence[tuple[int, int]]
) -> None:
    """Run a step whose rows have slots of their own, and release these."""
    bind = [
        slot_init(
            slot,
            [5] * (start + count),
            generation=step,
            blocks=range(1 + COLUMNS * slot, 1 + COLUMNS * (slot + 1)),
            params=params,
        )
        for slot, (start, count) in enumerate(rows)
    ]
    spans = [(slot, start, count, True) for slot, (start, count) in enumerate(rows)]
    runner.step(step_plan(2 * step, bind=bind, rows=spans))
    runner.step(step_plan(2 * step + 1, release=[(slot, step) for slot in range(len(rows))]))


def test_no_ordinary_request_waits_for_the_compilation_of_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rule in ("DECODE_SPLITS", "PREFILL_SPLITS"):
        often = SplitRule(min_keys=16, programs_per_processor=1)
        monkeypatch.setattr(interpreted("worker.attention.triton_paged"), rule, often)
    write_tiny_llama(tmp_path)
    with VariantRecorder() as device, np.errstate(all="ignore"):
        parts = GpuParts(tmp_path)
        cache = parts.cache(1 + LIMITS.max_slots * COLUMNS)
        parts.prepare(cache)
        compiled = set(device.variants)
        assert any(each.startswith("prefill") and "'IS_SPLIT': True" in each for each in compiled)
        slots = SlotTable(slot_fields(MAX_LEN, COLUMNS), LIMITS.max_slots, DEVICE)
        runner = parts.runner(slots, cache)
        late: dict[str, set[str]] = {}
        for step, (name, (params, rows)) in enumerate(REQUESTS.items(), start=1):
            serve(runner, step, params, rows)
            late[name] = device.variants - compiled
            compiled |= device.variants
    assert not any(late.values()), {name: found for name, found in late.items() if found}
