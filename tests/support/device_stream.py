"""The stream of recording.py, replayed by a worker on a device, for comparison with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from protocol.worker.steps import Logprobs, StepResult
from tests.support.recording import (
    BLOCK_TOKENS,
    KINDS,
    MAX_LEN,
    MAX_SLOTS,
    NUM_BLOCKS,
    Recording,
    make_requests,
    record,
    tiny_model,
)
from tests.support.replica import Arrived, Executed
from tests.support.tiny_model import new_slots
from worker.attention.base import Attention
from worker.kv.blocks import CacheBlocks, cache_blocks
from worker.kv.cache import KVCache
from worker.loading.decoder import LoadedModel
from worker.sampling.base import Sampling
from worker.slots.fields import slot_fields
from worker.step.decode_graph import Capture, GraphDecode
from worker.step.runner import Runner
from worker.step.slot_registry import Poison

FLOAT = torch.float32
NUM_REQUESTS = 36


def record_stream(folder: Path) -> Recording:
    """Write a model to `folder`, and return a stream that has every kind of request and event."""
    found = record(tiny_model(folder), make_requests(15, NUM_REQUESTS))
    plans = [step.plan for step in found.steps]
    assert len(KINDS) < NUM_REQUESTS
    assert any(plan.row_drafts is not None for plan in plans)
    assert any(plan.masked is not None for plan in plans)
    assert any(0 in plan.row_samples.tolist() for plan in plans), "chunked prompts"
    assert any(step.arrived for step in found.steps), "K/V of another engine"
    assert any(outputs[-1].usage.preemptions for outputs in found.outputs.values())
    return found


@dataclass(frozen=True)
class DeviceWorker:
    """A runner on a device, and its cache."""

    runner: Runner
    cache: KVCache
    blocks: CacheBlocks

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        device: torch.device,
        attention: Attention,
        *,
        sampling: Sampling | None = None,
        capture: Capture | None = None,
        poison: Poison | None = None,
    ) -> DeviceWorker:
        """Return a worker with this model. With `capture`, plain decode steps are captured."""
        cache = _cache_for(loaded, device)
        fields = slot_fields(MAX_LEN, MAX_LEN // BLOCK_TOKENS)
        slots = new_slots(fields, MAX_SLOTS, device, poison=poison)
        decode = None
        if capture is not None:
            decode = GraphDecode.for_model(loaded.model, slots, cache, attention, capture)
            assert decode is not None
            decode.prepare()
        runner = Runner(loaded.model, slots, cache, attention, decode=decode, sampling=sampling)
        return cls(runner, cache, cache_blocks(cache))

    def write(self, arrived: Arrived) -> None:
        """Write K/V that another engine has computed, as a mover does."""
        pieces = torch.cat([arrived.k, arrived.v]).flatten(2).contiguous().view(torch.uint8)
        ids = np.array(arrived.blocks)
        self.blocks.wait_for(self.blocks.fence())
        self.blocks.put(0, self.blocks.num_rows, ids, pieces.numpy())
        self.blocks.synchronize()

    def replay(
        self,
        steps: Sequence[Executed],
        *,
        depth: int,
        before: Callable[[Executed], object] = lambda step: None,
        launching: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Iterator[StepResult]:
        """Yield the results of the steps. A step is read after `depth` - 1 later ones have been
        launched.

        before      called with each step, once its K/V has arrived
        launching   makes the context in which a step is launched
        """
        pending = []
        for step in steps:
            for arrived in step.arrived:
                self.write(arrived)
            before(step)
            with launching():
                pending.append(self.runner.launch(step.plan, partial(getattr, step, "masks")))
            if len(pending) == depth:
                yield pending.pop(0).result()
        yield from (each.result() for each in pending)


def _cache_for(loaded: LoadedModel, device: torch.device) -> KVCache:
    spec = loaded.spec
    heads = (spec.layer_heads[0].count, spec.layer_heads[0].dim)
    return KVCache(spec.num_layers, NUM_BLOCKS, BLOCK_TOKENS, *heads, FLOAT, device)


def assert_same(found: StepResult, expected: StepResult) -> None:
    """Check that two results have the same tokens, and logprobs that differ only by rounding. The
    device computes rows of a step together that the CPU computes in parts."""
    for name in ("step", "tokens", "failed", "counts", "proposed"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            _assert_near(ours, theirs)


def _assert_near(ours: Logprobs, theirs: Logprobs) -> None:
    """Compare two messages. Of the most likely tokens, each row counts only some."""
    counts = np.array(theirs.counts.tolist())
    for name in theirs.__struct_fields__:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None)
        if other is None:
            continue
        one, other = (np.array(each.tolist()).reshape(each.shape) for each in (one, other))
        if name in ("top_ids", "top_logprobs"):
            is_counted = np.arange(other.shape[1]) < counts[:, None]
            one, other = one[is_counted], other[is_counted]
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
