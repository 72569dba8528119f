"""Runs the first steps of a worker before it is ready, so that no request waits for what only the
first steps need."""

from __future__ import annotations

import msgspec
import torch

from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32, UInt8
from protocol.worker.steps import SlotInit, SlotRelease, StepPlan
from worker.kv.cache import PagedCache
from worker.step.runner import Runner

WARM_UP_TOKENS = 2
"""Tokens of the warm-up prompt. They make a prefill chunk, and a decode step follows, so both kinds
of work run before the first request."""


DRAWN = SamplingParams(temperature=1.0, top_p=0.9)
ON_GPU = (
    SamplingParams(temperature=1.0, top_p=0.9, logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=50),
    SamplingParams(temperature=0.0, logprobs=1),
)
"""The requests of a warm-up on a GPU. In the profile run, which uses every feature, filters are
applied in another way (sampling/filter_chain.py)."""


def warm_up(runner: Runner, caches: list[PagedCache], max_len: int) -> None:
    """Run a prompt and, if it fits, a decode step, in blocks that no request holds yet. A second
    item of `caches` is the cache of the draft model or head, which then runs in the same steps.

    On a GPU do so for drawn tokens and for a greedy one. They need other kernels than the profile
    run has launched, and a kernel is compiled at its first launch.
    """
    prompt, device = min(WARM_UP_TOKENS, max_len), caches[0].rows.device
    blocks = -(-min(prompt + 1, max_len) // caches[0].block_tokens) * caches[0].num_entries
    release: list[SlotRelease] = []
    for generation, params in enumerate((DRAWN,) if device.type == "cpu" else ON_GPU):
        init = SlotInit(
            slot=0,
            generation=generation,
            tokens=Int32.of([0] * prompt),
            prompt_tokens=prompt,
            num_computed=0,
            blocks=Int32.of(range(1, blocks + 1)),
            seed=0,
            stop_ids=[],
            params=params,
        )
        samples = prompt < max_len
        has_draft = len(caches) > 1 and samples  # a head also needs the next token
        plan = _one_row(start=0, count=prompt, bind=[init], samples=samples, has_draft=has_draft)
        runner.step(msgspec.structs.replace(plan, release=release))
        if prompt + 1 < max_len:
            runner.step(_one_row(start=prompt, count=1, bind=[], samples=True, has_draft=has_draft))
        release = [SlotRelease(slot=0, generation=generation)]
    for cache in caches:
        cache.zero(torch.arange(1, blocks + 1, device=device))


def _one_row(
    *, start: int, count: int, bind: list[SlotInit], samples: bool, has_draft: bool
) -> StepPlan:
    """Return the plan of a warm-up step with one row."""
    none = Int32.of([])
    return StepPlan(
        step=0,
        release=[],
        bind=bind,
        block_slots=none,
        block_indexes=none,
        block_ids=none,
        zero_blocks=none,
        row_slots=Int32.of([0]),
        row_starts=Int32.of([start]),
        row_tokens=Int32.of([count]),
        row_samples=UInt8.of([samples]),
        num_decodes=int(count == 1),
        follow_starts=Int32.of([start]) if has_draft else None,
        follow_tokens=Int32.of([count]) if has_draft else None,
        wanted=Int32.of([0]) if has_draft else None,
    )
