"""A step's parts are told apart, and the steps that are timed are those that were asked for."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.bench import PARTS, StepBench
from protocol.config.worker import WorkerConfig
from protocol.steps import WorkerReady
from tests.support.tiny_checkpoint import write_tiny_llama
from worker.attention.select import select_attention
from worker.debug.benchmark.parts import PartsClock, TimedPart
from worker.debug.benchmark.steps import StepBenchmark, worker_config
from worker.kv.cache import KVCache
from worker.models.load import load_model
from worker.slots.fields import slot_fields
from worker.slots.table import SlotTable
from worker.step import Runner


def ticking() -> PartsClock:
    """One second passes between any two looks at it."""
    return PartsClock(map(float, itertools.count()).__next__)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def config(checkpoint: Path, **changes: object) -> StepBench:
    fields = {"batch": (1, 3), "context": (5, 20), "steps": 3, "warm_up": 1}
    worker = WorkerConfig(model=str(checkpoint), block_tokens=4, threads=1, dtype="float32")
    return msgspec.convert(fields | changes | {"worker": msgspec.to_builtins(worker)}, StepBench)


def benchmark_of(config: StepBench) -> StepBenchmark:
    """As `assembled`, which sets the threads of its process, and so can be called once."""
    worker, dtype, cpu = worker_config(config), torch.float32, torch.device("cpu")
    loaded = load_model(worker.model, dtype=dtype, device=cpu)
    shape = (loaded.config.num_kv_heads, loaded.config.head_dim, dtype, cpu)
    cache = KVCache(loaded.config.num_layers, worker.kv_blocks, worker.block_tokens, *shape)
    fields = slot_fields(worker.max_len, -(-worker.max_len // worker.block_tokens))
    attention = select_attention(worker.block_tokens, dtype=dtype)
    ready = WorkerReady(
        model=loaded.card,
        max_len=worker.max_len,
        max_slots=worker.max_slots,
        block_tokens=worker.block_tokens,
        num_blocks=worker.kv_blocks,
    )
    slots = SlotTable(fields, worker.max_slots, cpu)
    return StepBenchmark(config, Runner(loaded.model, slots, cache, attention), ready)


def test_the_time_of_a_part_within_another_is_not_the_others() -> None:
    clock = ticking()
    with clock.part("outer"), clock.part("inner"):
        pass
    assert clock.seconds == {"outer": 2.0, "inner": 1.0}


def test_what_comes_behind_a_call_may_count_for_a_part_of_its_own() -> None:
    clock = ticking()
    head = TimedPart(lambda: "logits", clock, "head", then="sampling")
    with clock.part("overhead"):
        assert head() == "logits"
    assert clock.seconds == {"overhead": 2.0, "head": 1.0, "sampling": 1.0}


def test_a_watched_object_answers_as_the_one_within() -> None:
    clock = ticking()
    watched = TimedPart([3, 1, 2], clock, "list")
    assert watched.index(1) == 1
    assert watched.__doc__ is not None
    assert clock.seconds == {"list": 1.0}


def test_a_part_that_fails_is_left_all_the_same() -> None:
    clock = ticking()
    with clock.part("outer"):
        with pytest.raises(ZeroDivisionError), clock.part("inner"):
            raise ZeroDivisionError
        clock.rename_current("rest")
    assert clock.seconds == {"outer": 2.0, "inner": 1.0, "rest": 1.0}


def test_the_cache_holds_just_what_the_largest_step_needs(checkpoint: Path) -> None:
    worker = worker_config(config(checkpoint, batch=[2, 3], context=[7, 5], new_tokens=2))
    assert (worker.max_slots, worker.max_len) == (3, 10)
    assert worker.kv_blocks == 3 * 3 + 1


@pytest.mark.parametrize("sampling", ["greedy", "nucleus"])
@pytest.mark.parametrize("new_tokens", [1, 6])
def test_every_batch_is_timed_with_every_context(
    checkpoint: Path, sampling: str, new_tokens: int
) -> None:
    benchmark = benchmark_of(config(checkpoint, sampling=sampling, new_tokens=new_tokens))
    timings = list(benchmark.run())
    assert [(t.batch, t.context) for t in timings] == [(1, 5), (3, 5), (1, 20), (3, 20)]
    for timing in timings:
        assert timing.new_tokens == new_tokens
        assert 0 < timing.best_s <= timing.step_s <= timing.p90_s
        assert set(timing.parts_s) == set(PARTS)
        assert all(seconds > 0 for seconds in timing.parts_s.values()), timing.parts_s


def test_what_was_watched_is_as_it_was(checkpoint: Path) -> None:
    benchmark = benchmark_of(config(checkpoint))
    weights = benchmark._components.model.weights  # type: ignore[attr-defined]
    before = [layer.qkv for layer in weights.layers]
    benchmark.timing(1, 5)
    assert [layer.qkv for layer in weights.layers] == before


@pytest.mark.parametrize("changes", [{"batch": []}, {"context": []}, {"batch": [0]}, {"steps": 0}])
def test_what_cannot_be_timed_is_refused_by_name(
    checkpoint: Path, changes: dict[str, object]
) -> None:
    (name,) = changes
    with pytest.raises(msgspec.ValidationError, match=name):
        config(checkpoint, **changes)


def test_a_bad_config_is_one_line_and_code_2() -> None:
    command = [
        sys.executable,
        "-m",
        "worker.debug.benchmark",
        "--config",
        json.dumps({"batch": [1]}),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "worker" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
